"""Jobs on a cluster: submitted to its job server, followed, stopped and listed."""

from __future__ import annotations

import os
import secrets
import shlex
import tempfile
import time
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from raygnn import __version__
from raygnn.config.load import ConfigSource, Overrides, load_for_elsewhere
from raygnn.config.places import is_secret
from raygnn.config.schema import Config
from raygnn.errors import ConfigError, InputError, RaygnnError, TrainingError, error_of
from raygnn.jobs import upload
from raygnn.jobs.handle import Handle, begun_by, opened, said_error
from raygnn.jobs.server import RUN, STORAGE, VERSION, JobInfo, JobServer, states, tail
from raygnn.runs.display import WIDTH, Display
from raygnn.runs.progress_line import ProgressLine
from raygnn.runs.run import Run, age, progress, row_of
from raygnn.runs.run_directory import JOB, read_storage

_GRACE = 60  # seconds to end, beside those for a checkpoint
_POLL = 1.0  # seconds between looks at the server
_LONGEST = 500  # characters of Ray's message
_MOST_LISTED = 100  # jobs
_MOST_READ = 10  # logs of jobs that are listed
# The job server runs a command in a shell, whose `python` need not be the one that Ray runs on. The
# parent of the shell is a worker of Ray's, and the parent of that the raylet, which was told how
# workers are started.
_PYTHON = r"""raylet=$(sed -n 's/^PPid:[[:space:]]*//p' "/proc/$PPID/status"); \
python=$(tr '\0' '\n' < "/proc/$raylet/cmdline" \
| sed -n 's/^--python_worker_command=\([^ ]*\).*/\1/p'); \
[ -x "$python" ] || python=python; exec "$python" """
_ON_STORAGE = ("storage", "partition.path")


@dataclass(frozen=True)
class Package:
    """A job, ready to be submitted.

    Attributes:
        config: what will run.
        contents: what travels with it.
        data: its input within what travels; None where that lies on the cluster's storage.
    """

    config: Config
    contents: upload.Contents
    data: Path | None

    @property
    def file(self) -> str:
        """Name of the job's file, at the top of what travels."""
        return f"{self.config.name}.yaml"

    def document(self) -> dict[str, Any]:
        """The job as it travels."""
        document = self.config.to_dict()
        if self.data is not None:
            graph = document["graph"]
            if graph.get("path") is not None:
                graph["path"] = str(self.data)
            else:
                graph["args"]["root"] = str(self.data)
        document["cluster"]["address"] = "auto"  # the cluster that it is submitted to
        return document


def prepare(
    config: ConfigSource,
    overrides: Overrides | None = None,
    working_dir: str | Path | None = None,
) -> Package:
    """Check that a job can travel; nothing is sent or written.

    Args:
        config: a YAML file in ``working_dir``, a mapping, or what `raygnn.load_config` returned.
        overrides: as of `raygnn.load_config`.
        working_dir: what travels with the job: modules of your own, small data. None = the current
            directory, or that of the YAML file if it lies elsewhere.

    Raises:
        ConfigError: the configuration is wrong, or names paths that only this machine has.
        InputError: the directory is too large.
    """
    directory = Path(os.path.abspath(working_dir or "."))
    job, relative = load_for_elsewhere(
        config.to_dict() if isinstance(config, Config) else config, overrides
    )
    label = str(config) if isinstance(config, (str, Path)) else "config"
    if job.file is not None and not job.file.is_relative_to(directory):
        if working_dir is not None:
            raise InputError(
                f"the job is not in the working directory {directory}",
                where=label,
                remedy="name a directory that holds it with --working-dir",
            )
        directory = job.file.parent
    _check_places(job, relative, label)
    for name, value in job.comm.env.items():
        if is_secret(name, value):
            raise ConfigError(
                f"comm.env.{name} is a secret: with the job it would lie in the cluster's memory, "
                "for everybody who may see jobs",
                where=label,
                remedy="set it in the environment of the nodes, before ray start",
            )
    data = _carried(job, relative, directory, label)
    contents = upload.contents_of(directory, data and directory / data, without=job.local_storage)
    contents.check()
    return Package(job, contents, data)


def submit(
    config: ConfigSource,
    overrides: Overrides | None = None,
    *,
    address: str | None = None,
    working_dir: str | Path | None = None,
    overwrite: bool = False,
    resume: bool = False,
) -> SubmittedJob:
    """Have a cluster run a job, and return at once.

    The job and the files of ``working_dir`` (without data, version control, environments, and what
    ``.gitignore`` and ``.rayignore`` name) travel to the head node, where `raygnn train` runs.

    Args:
        config, overrides, working_dir: see `prepare`.
        address: ``http://HOST:8265`` of the cluster's job server; None = as
            RAY_API_SERVER_ADDRESS or RAY_ADDRESS say, else this machine's.
        overwrite, resume: as of `raygnn.train`.

    Raises:
        InputError: the job cannot travel; nothing was sent.
        PreflightError: the job server cannot be reached, or refuses.
    """
    if overwrite and resume:
        raise InputError("overwrite and resume together", remedy="choose one of them")
    package = prepare(config, overrides, working_dir)
    return send(package, JobServer(address), overwrite=overwrite, resume=resume)


def send(
    package: Package,
    server: JobServer,
    *,
    overwrite: bool = False,
    resume: bool = False,
    width: int | None = None,
) -> SubmittedJob:
    """Submit what was prepared; see `submit`.

    Args:
        width: of the terminal that will show what the job prints.

    Raises:
        InputError: a job of this run has not ended.
        PreflightError: the job server refuses.
    """
    config = package.config
    storage = config.to_dict()["storage"]
    for other in server.jobs():
        if not other.over and (other.run, other.storage) == (config.name, storage):
            raise InputError(
                f"a job of the run {config.name!r} is {other.state}: {other.id}",
                where=server.address,
                remedy=f"raygnn stop {other.id}, or choose another name (--set name=…)",
            )
    job = f"{config.name}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    command = ["-m", "raygnn", "train", package.file]
    command += ["--overwrite"] * overwrite + ["--resume"] * resume
    grace = round(config.fault.save_timeout.seconds) + _GRACE
    with tempfile.TemporaryDirectory(prefix="raygnn-submit-") as target:
        upload.pack(package.contents, package.document(), package.file, Path(target))
        server.submit(
            _PYTHON + shlex.join(command),
            Path(target),
            job=job,
            # what the job server gives a job that it stops
            env={
                "RAY_JOB_STOP_WAIT_TIME_S": str(grace),
                JOB: job,
                **({WIDTH: str(width)} if width else {}),
            },
            metadata={RUN: config.name, STORAGE: storage, VERSION: __version__},
        )
    return SubmittedJob(server, job, config.name, storage)


class SubmittedJob(Handle):
    """A job that a cluster's job server knows.

    Attributes:
        id: its submission id.
        storage: where its run lies, as the cluster's nodes see it; None if that is not known.
    """

    def __init__(self, server: JobServer, job: str, name: str, storage: str | None):
        self.id = job
        self.name = name
        self.storage = storage
        self._server = server

    @classmethod
    def of(cls, server: JobServer, name: str) -> SubmittedJob:
        """The job of this id, or of a run of this name; see `JobServer.find`.

        Raises:
            InputError: there is none.
        """
        info = server.find(name)
        return cls(server, info.id, info.run or info.id, info.storage)

    @property
    def info(self) -> JobInfo:
        """What the server knows of it."""
        return self._server.info(self.id)

    @property
    def status(self) -> str:
        return self.info.state

    @property
    def run(self) -> Run | None:
        return _run_of(self.id, self.name, self.storage)

    def logs(self, lines: int | None = None) -> str:
        text = self._server.log(self.id)
        return text if lines is None else "".join(text.splitlines(keepends=True)[-lines:])

    def follow(self, show: Display) -> JobInfo:
        """Show what it prints until it is over: on a terminal, where it is in training is one line
        with a bar, as in `raygnn train`.

        Returns:
            What became of it.

        Raises:
            PreflightError: the job server does not answer any more; the job may go on.
        """
        told_why = False
        with show.remote_lines() as live:
            for line in tail(self._server, self.id):
                if line is not None:
                    self.told = ProgressLine.read(line) or self.told
                    told_why |= line.startswith("error: ")
                    live(line)
        info = self.info
        if info.state == "failed" and not told_why:
            show.note(f"{self.id}: {' '.join(info.message.split())[:_LONGEST]}")
        return info

    def stop(self, timeout: float = 120.0) -> None:
        """Have it write a checkpoint and end, and wait for that.

        Args:
            timeout: seconds to wait. It is ended without a checkpoint, if need be, by the job
                server, after its ``fault.save_timeout`` and a minute.

        Raises:
            TrainingError: it has not ended then.
        """
        if self.info.over:
            return
        self._server.stop(self.id)
        self._wait(time.monotonic() + timeout)
        if not self.info.over:
            raise TrainingError(
                f"the job has not ended within {timeout:g} s",
                where=self.id,
                remedy="look at raygnn logs; ray job stop again ends nothing sooner",
            )

    def _wait(self, deadline: float | None) -> None:
        for over in states(self._server, self.id):
            if over or (deadline is not None and time.monotonic() >= deadline):
                return
            time.sleep(_POLL)

    def _error(self) -> RaygnnError:
        info = self.info
        said = said_error(self.logs()) or {"what": info.message, "where": f"job {self.id}"}
        return error_of(info.code or TrainingError.exit_code, said)


def rows_of(server: JobServer) -> list[dict[str, str]]:
    """``job``, ``run``, ``state``, ``progress``, ``metric`` and ``age`` of the latest jobs that
    train, as text.

    How far one is comes from its run directory where that can be seen from here, else from what it
    has printed: of the ten latest.
    """
    jobs = [job for job in server.jobs() if job.trains][:_MOST_LISTED]
    return [_row(server, job, read=number < _MOST_READ) for number, job in enumerate(jobs)]


def _row(server: JobServer, job: JobInfo, *, read: bool) -> dict[str, str]:
    far, metric = "", ""
    if (run := _run_of(job.id, job.run, job.storage)) is not None:
        row = row_of(run)
        far, metric = row["progress"], row["metric"]
    elif read and (told := _told(server, job.id)) is not None:
        far, metric = progress(told.step, told.total), told.metric
    return {
        "job": job.id,
        "run": job.run or "",
        "state": job.state,
        "progress": far,
        "metric": metric,
        "age": age(job.started),
    }


def _told(server: JobServer, job: str) -> ProgressLine | None:
    """The last line of its progress, of those that it has printed."""
    try:
        lines = server.log(job).splitlines()
    except RaygnnError:  # it has gone
        return None
    return next((told for line in reversed(lines) if (told := ProgressLine.read(line))), None)


def _run_of(job: str, name: str | None, storage: str | None) -> Run | None:
    """The run directory of a job, where it can be seen from here."""
    run = None
    if storage and name:
        kept = read_storage(storage)
        run = opened(kept / name if isinstance(kept, Path) else (kept / name).text)
    return run if run is not None and begun_by(run, job) else None


def check_storage(config: str, overrides: Overrides) -> None:
    """Check that a job which runs in a copy of a working directory leaves nothing there.

    Raises:
        ConfigError: it would, or the configuration is wrong.
    """
    job, relative = load_for_elsewhere(config, overrides)
    _check_places(job, relative, config)


def _check_places(config: Config, relative: frozenset[str], label: str) -> None:
    """What is written or shared lies outside of the copy that Ray throws away."""
    for key in _ON_STORAGE:
        if key in relative:
            given = attrgetter(key)(config)
            raise ConfigError(
                f"{key} is a relative path, and the job runs in a copy of the working directory "
                "that Ray throws away",
                where=label,
                remedy=f"give a directory that every node sees: --set {key}=/mnt/raygnn/"
                f"{Path(str(given)).name}",
            )


def _carried(config: Config, relative: frozenset[str], directory: Path, label: str) -> Path | None:
    """The input that travels with the job: what was named relative to the directory.

    Raises:
        ConfigError: it is not there, or not within the directory.
    """
    key, path = "graph.path", getattr(config.graph, "path", None)
    if path is None and (root := getattr(config.graph, "args", {}).get("root")) is not None:
        key, path = "graph.args.root", Path(str(root))
    if path is None or key not in relative:
        return None
    if not path.is_relative_to(directory):
        raise ConfigError(
            f"{key} leads out of the working directory {directory}, to {path}",
            where=label,
            remedy=f"give an absolute path that every node sees (--set {key}=/…), or a "
            "--working-dir that holds it",
        )
    if not path.exists():
        raise ConfigError(
            f"{key}: there is no {path}",
            where=label,
            remedy=f"correct {key}, or get the data first",
        )
    data = Path(path.relative_to(directory))
    folder = data if path.is_dir() else data.parent
    if (directory / folder).resolve() != directory.resolve() / folder:
        raise ConfigError(
            f"{key}: {data} cannot travel: it is, or lies behind, a link to a directory",
            where=label,
            remedy=f"give an absolute path that every node sees (--set {key}=/…)",
        )
    return data
