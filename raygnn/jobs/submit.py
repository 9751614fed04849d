"""Jobs on a cluster: submitted to its job server, followed, stopped and listed."""

from __future__ import annotations

import glob
import os
import secrets
import shlex
import tempfile
import time
from dataclasses import dataclass
from functools import reduce
from itertools import chain
from operator import attrgetter, getitem
from pathlib import Path
from typing import Any

from raygnn import __version__
from raygnn.config.load import ConfigSource, Overrides, load_for_elsewhere
from raygnn.config.places import is_secret
from raygnn.config.schema import Config
from raygnn.errors import ConfigError, InputError, RaygnnError, TrainingError, error_of
from raygnn.jobs import upload
from raygnn.jobs.handle import Handle, run_of, said_error
from raygnn.jobs.server import RUN, STORAGE, VERSION, JobInfo, JobServer, states, tail
from raygnn.runs.comparison import age, row_of
from raygnn.runs.display import Display
from raygnn.runs.run import Run
from raygnn.runs.run_directory import JOB, read_storage

_GRACE = 60  # seconds to end, in addition to the time for a checkpoint
_POLL = 1.0  # seconds
_LONGEST = 500  # characters of Ray's message
_MOST_LISTED = 100  # jobs
# The job server runs a command in a shell, whose `python` need not be Ray's. The parent of the
# shell is a worker, and the parent of that is the raylet, whose command line names Ray's Python.
_PYTHON = r"""raylet=$(sed -n 's/^PPid:[[:space:]]*//p' "/proc/$PPID/status"); \
python=$(tr '\0' '\n' < "/proc/$raylet/cmdline" \
| sed -n 's/^--python_worker_command=\([^ ]*\).*/\1/p'); \
[ -x "$python" ] || python=python; exec "$python" """
_ON_STORAGE = ("storage", "partition.path")


@dataclass(frozen=True)
class Package:
    """Job that is ready to be submitted."""

    config: Config
    contents: upload.Contents  # the uploaded files
    data: dict[str, Path]  # key → path of an uploaded input; others are on the cluster's storage

    @property
    def file(self) -> str:
        """Name of the job's file, at the top of the package."""
        return f"{self.config.name}.yaml"

    def document(self) -> dict[str, Any]:
        """Return the configuration to upload."""
        document = self.config.to_dict()
        for key, path in self.data.items():
            *sections, last = key.split(".")
            reduce(getitem, sections, document)[last] = str(path)
        document["cluster"]["address"] = "auto"  # the cluster that runs it
        return document


def prepare(
    config: ConfigSource, overrides: Overrides | None = None, working_dir: str | Path | None = None
) -> Package:
    """Check that a job can be uploaded; nothing is sent or written. Raises ConfigError if the
    configuration is wrong, or names paths that only this machine has, and InputError if the
    directory is too large.

    Args:
        config: a YAML file in ``working_dir``, a mapping, or a `Config`.
        overrides: see `raygnn.load_config`.
        working_dir: files that are uploaded with the job: your modules, small data. None = the
            current directory, or the directory of the YAML file if that is elsewhere.
    """
    directory = Path(os.path.abspath(working_dir or "."))
    job, relative = load_for_elsewhere(
        config.to_dict() if isinstance(config, Config) else config, overrides
    )
    label = str(config) if isinstance(config, (str, Path)) else "config"
    if job.file is not None and not job.file.is_relative_to(directory):
        if working_dir is not None:
            what = f"the job is not in the working directory {directory}"
            remedy = "name a directory that contains it with --working-dir"
            raise InputError(what, where=label, remedy=remedy)
        directory = job.file.parent
    _check_places(job, relative, label)
    for name, value in job.comm.env.items():
        if is_secret(name, value):
            what = f"comm.env.{name} is a secret that all users who list the jobs could read"
            remedy = "set it in the environment of the nodes, before ray start"
            raise ConfigError(what, where=label, remedy=remedy)
    data = _carried(job, relative, directory, label)
    files = chain(*(_files(directory / path) for path in data.values()))
    contents = upload.contents_of(directory, list(files), without=job.local_storage)
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
    """Submit a job to a cluster, and return at once.

    The job and the files of ``working_dir`` (without data, version control, environments, and files
    that ``.gitignore`` and ``.rayignore`` name) are uploaded to the head node, which runs
    `raygnn train`. ``config``, ``overrides``, ``working_dir``: see `prepare`; ``address``: see
    `JobServer`; ``overwrite``, ``resume``: see `raygnn.train`. Raises InputError if the job cannot
    be uploaded, and PreflightError if the job server cannot be reached, or refuses it.
    """
    if overwrite and resume:
        raise InputError("overwrite and resume together", remedy="choose one of them")
    package = prepare(config, overrides, working_dir)
    return send(package, JobServer(address), overwrite=overwrite, resume=resume)


def send(
    package: Package, server: JobServer, *, overwrite: bool = False, resume: bool = False
) -> SubmittedJob:
    """Submit a package; see `submit`. Raises InputError if a job of this run has not ended, and
    PreflightError if the job server refuses it."""
    config = package.config
    storage = config.to_dict()["storage"]
    for other in server.jobs():
        if not other.over and (other.run, other.storage) == (config.name, storage):
            what = f"a job of the run {config.name!r} is {other.state}: {other.id}"
            remedy = f"raygnn stop {other.id}, or choose another name (--set name=…)"
            raise InputError(what, where=server.address, remedy=remedy)
    job = f"{config.name}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    command = ["-m", "raygnn", "train", package.file]
    command += ["--overwrite"] * overwrite + ["--resume"] * resume
    grace = round(config.fault.save_timeout.seconds) + _GRACE
    with tempfile.TemporaryDirectory(prefix="raygnn-submit-") as target:
        upload.pack(package.contents, package.document(), package.file, Path(target))
        # grace of the job server for a job that it stops
        env = {"RAY_JOB_STOP_WAIT_TIME_S": str(grace), JOB: job}
        server.submit(
            entrypoint=_PYTHON + shlex.join(command),
            submission_id=job,
            metadata={RUN: config.name, STORAGE: storage, VERSION: __version__},
            runtime_env={"working_dir": target, "env_vars": env},
        )
    return SubmittedJob(server, job, config.name, storage)


class SubmittedJob(Handle):
    """Job of a cluster's job server."""

    def __init__(self, server: JobServer, job: str, name: str, storage: str | None):
        self.id = job  # its submission id
        self.name = name
        self.storage = storage  # location of its run on the cluster's nodes; None if unknown
        self._server = server

    @classmethod
    def of(cls, server: JobServer, name: str) -> SubmittedJob:
        """Return the job of this id, or of a run of this name; see `JobServer.find`."""
        info = server.find(name)
        return cls(server, info.id, info.run or info.id, info.storage)

    @property
    def info(self) -> JobInfo:
        """Its current state on the server."""
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
        """Show its output until it is over, and return its last state. Raises PreflightError if
        the job server does not answer any more; the job may still run."""
        explained = False
        for line in tail(self._server, self.id):
            explained |= line.startswith("error: ")
            show.note(line.rstrip())
        info = self.info
        if info.state == "failed" and not explained:
            show.note(f"{self.id}: {' '.join(info.message.split())[:_LONGEST]}")
        return info

    def stop(self, timeout: float = 120.0) -> None:
        """Interrupt it and wait until it has saved a checkpoint. After ``fault.save_timeout`` and a
        minute, the job server kills it. Raises TrainingError if it has not ended after ``timeout``
        seconds."""
        if self.info.over:
            return
        self._server.stop(self.id)
        self._wait(time.monotonic() + timeout)
        if not self.info.over:
            what = f"the job has not ended within {timeout:g} s"
            remedy = "see raygnn logs; another ray job stop does not end it sooner"
            raise TrainingError(what, where=self.id, remedy=remedy)

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
    """Return ``job``, ``run``, ``state``, ``progress``, ``metric`` and ``age``, as text, of the
    latest jobs that train. Progress is read from the run directory if it is visible from here."""
    rows = []
    for job in [job for job in server.jobs() if job.trains][:_MOST_LISTED]:
        run = _run_of(job.id, job.run, job.storage)
        known = {} if run is None else row_of(run)
        about = {"job": job.id, "run": job.run or "", "state": job.state}
        about |= {key: known.get(key, "") for key in ("progress", "metric")}
        rows.append({**about, "age": age(job.started)})
    return rows


def _run_of(job: str, name: str | None, storage: str | None) -> Run | None:
    if not (storage and name):
        return None
    place = read_storage(storage) / name
    return run_of(place if isinstance(place, Path) else place.text, job)


def check_storage(config: str, overrides: Overrides) -> None:
    """Check that a job in a copy of a working directory writes nothing there. Raises ConfigError if
    it would, or the configuration is wrong."""
    job, relative = load_for_elsewhere(config, overrides)
    _check_places(job, relative, config)


def _check_places(config: Config, relative: frozenset[str], label: str) -> None:
    """Raise ConfigError if a written or shared path is in the copy that Ray deletes."""
    for key in _ON_STORAGE:
        if key in relative:
            what = f"{key} is a relative path, but Ray deletes the job's copy of the directory"
            shared = f"/mnt/raygnn/{Path(str(attrgetter(key)(config))).name}"
            remedy = f"give a directory that every node sees: --set {key}={shared}"
            raise ConfigError(what, where=label, remedy=remedy)


def _files(path: Path) -> list[Path]:
    return [path] if path.exists() else sorted(map(Path, glob.glob(str(path))))


def _carried(
    config: Config, relative: frozenset[str], directory: Path, label: str
) -> dict[str, Path]:
    """Return the inputs that are uploaded with the job, those with relative paths, by key. Raises
    ConfigError if one does not exist, or is not within the directory."""
    document, inputs = config.to_dict(), {}
    keys = sorted(key for key in relative if key.partition(".")[0] in ("graph", "task", "tasks"))
    for key in keys:
        path = Path(str(reduce(getitem, key.split("."), document)))
        remedy = f"give an absolute path that every node sees (--set {key}=/…)"
        if not path.is_relative_to(directory):
            what = f"{key} leads out of the working directory {directory}, to {path}"
            remedy += ", or a --working-dir that contains it"
            raise ConfigError(what, where=label, remedy=remedy)
        if not _files(path):
            remedy = f"correct {key}, or download the data first"
            raise ConfigError(f"{key}: there is no {path}", where=label, remedy=remedy)
        inputs[key] = data = path.relative_to(directory)
        folder = data if path.is_dir() else data.parent
        if (directory / folder).resolve() != directory.resolve() / folder:
            what = f"{key}: {data} cannot be uploaded: it is, or is below, a link to a directory"
            raise ConfigError(what, where=label, remedy=remedy)
    return inputs
