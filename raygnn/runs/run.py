"""Run on disk or in an object store, for reading, also while it trains."""

from __future__ import annotations

import difflib
import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import date, datetime
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal

from raygnn.config.places import Uri
from raygnn.errors import DataError, InputError, TrainingError, error_of
from raygnn.runs.metrics_files import RANKS, MetricsTail, long, newest, read_metrics
from raygnn.runs.run_directory import (
    CHECKPOINTS,
    CONFIG,
    LOGS,
    METRICS,
    RANK_FILE,
    SEARCH,
    SUMMARY,
    TRIALS,
    is_run,
    read_config,
    read_status,
    read_storage,
    read_summary,
    storage_path,
)
from raygnn.storage.remote import RemotePath
from raygnn.storage.replica import AT_ONCE, Replica
from raygnn.util.files import read_json
from raygnn.util.locks import LOCK, Holder, holder

if TYPE_CHECKING:
    import pandas

_SHOWN = 200  # characters of a name that is too long
_LAST = 4000  # characters of the output of a command without a result
_GRACE = 90.0  # seconds for a command to end Ray and its workers


@dataclass(frozen=True, repr=False)
class Run:
    """Run directory. Every property reads the files anew, so that a live run can be followed."""

    path: Path  # absolute path of the run directory, or of its local copy
    # maintains the local copy of a run in an object store
    replica: Replica | None = field(default=None, compare=False)

    @property
    def files(self) -> Path:
        """Directory with all files that the run has written so far."""
        if self.replica is not None:
            self.replica.refresh()
        return self.path

    @property
    def shown(self) -> str:
        """Path or URI of the run."""
        return str(self.path) if self.replica is None else self.replica.uri.shared

    @property
    def storage(self) -> Path | Uri:
        """Storage of the run: the directory or URI that contains it."""
        return self.path.parent if self.replica is None else self.replica.uri.parent

    def checkpoints(self, *names: str) -> Path:
        """Return the directory of checkpoints and weights, with the named ones fetched. Raises
        DataError if they cannot be read."""
        directory = self.path / CHECKPOINTS
        if self.replica is not None:
            for name in names:
                if (self.replica.place / CHECKPOINTS / name).exists():
                    self.replica.fetch(f"{CHECKPOINTS}/{name}")
        return directory

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def config(self) -> dict[str, Any]:
        """Resolved configuration. Raises DataError if the file is damaged."""
        return read_config(self.files)

    @property
    def summary(self) -> dict[str, Any]:
        """``summary.json``: ``metrics``, ``steps``, ``seeds_per_second``, ``seconds``, … Raises
        DataError if the file is damaged."""
        return read_summary(self.files)

    @property
    def status(self) -> str:
        """``running``, ``done``, ``failed``, ``interrupted``, or ``killed`` (process gone)."""
        return read_status(self.files)

    @property
    def holder(self) -> Holder | None:
        """Process that writes into it."""
        return holder(self.files / LOCK)

    @property
    def progress(self) -> tuple[int, int | None]:
        """Recorded optimizer steps, and their planned total; None if unknown."""
        summary = self.summary
        record = newest(self.files / METRICS) or {}
        step = max(summary.get("steps") or 0, record.get("step") or 0)
        return step, summary.get("total_steps") or None

    @property
    def began(self) -> float | None:
        """Start of its first command, seconds since the epoch; None if unknown."""
        started = self.summary.get("started")
        return datetime.fromisoformat(started).timestamp() if started else None

    @property
    def metrics(self) -> pandas.DataFrame:
        """One row per record in order of writing; missing values are NaN. Raises DataError if the
        file is damaged."""
        import pandas

        return pandas.DataFrame.from_records(read_metrics(self.files / METRICS))

    @property
    def ranks(self) -> pandas.DataFrame:
        """Times and resource use of each rank, a row per number, in order of writing. Columns:
        ``step``, ``time``, ``rank``, ``group`` (``seconds`` per batch, ``bytes`` per batch,
        ``use``, ``memory``, ``network``), ``name`` and ``value`` (NaN = unknown)."""
        import pandas

        columns = ("step", "time", "rank", "group", "name", "value")
        records = chain.from_iterable(iter(MetricsTail(self.files / RANKS).poll, []))
        return pandas.DataFrame.from_records(list(long(records)), columns=list(columns))

    def report(self, out: str | Path | None = None) -> Path:
        """Write ``report.html``, or the file ``out``, and return its path. Raises InputError if it
        cannot be written."""
        from raygnn.runs.run_page import write_report

        file = write_report(self.files, out)
        if self.replica is not None and out is None:
            (self.replica.place / file.name).upload(file)
        return file

    def predict(
        self,
        split: str | None = None,
        *,
        task: str | None = None,
        scores: bool = False,
        calibrated: bool = False,
        ids: Sequence[int] | Sequence[str] | None = None,
        rows: str | Path | pandas.DataFrame | None = None,
        fanout: Sequence[int] | None = None,
        at: int | str | date | None = None,
        since: int | str | date | None = None,
        new_data: bool = False,
        trust: bool = False,
        overrides: Sequence[str] = (),
        timeout: float = 3600.0,
    ) -> pandas.DataFrame:
        """Predict with the tested weights: a row per node or graph, in order of the id.

        Runs ``raygnn predict`` in a separate process. Options, columns and errors are those of
        `raygnn.predict`, which writes a file, for predictions that do not fit into memory. ``ids``
        can also be a list, and ``rows`` a data frame; an unknown label is NaN. ``overrides``: keys
        of the run, such as ``cluster.workers=1``; ``timeout``: seconds.
        """
        return self._rows("predict", locals())

    def recommend(
        self,
        k: int = 10,
        *,
        ids: Sequence[int] | Sequence[str] | None = None,
        candidates: Sequence[int] | Sequence[str] | str | None = None,
        known: Literal["exclude", "keep"] = "exclude",
        relation: str | int | None = None,
        task: str | None = None,
        at: int | str | date | None = None,
        new_data: bool = False,
        trust: bool = False,
        overrides: Sequence[str] = (),
        timeout: float = 3600.0,
    ) -> pandas.DataFrame:
        """Return the ``k`` best targets of each source, by a run of link prediction; options,
        columns and errors as in `raygnn.recommend`, with lists of ids in place of files,
        ``overrides`` and ``timeout`` as in `predict`."""
        return self._rows("recommend", locals())

    def explain(self, *ids: int | str, **options: Any) -> pandas.DataFrame:
        """Return how much features, neighbours and edges contribute to predictions for nodes;
        ``options`` (``k``, ``fanout``, ``task``, ``at``, ``trust``) and columns as in
        `raygnn.explain`, ``overrides`` and ``timeout`` as in `predict`."""
        return self._rows("explain", dict(ids=ids, **options))

    def embed(
        self,
        ntype: str | None = None,
        *,
        split: str = "all",
        at: int | str | date | None = None,
        new_data: bool = False,
        trust: bool = False,
        overrides: Sequence[str] = (),
        timeout: float = 3600.0,
    ) -> pandas.DataFrame:
        """Compute embeddings of nodes or graphs, the tested model's output before its last layer;
        options, columns and errors as in `raygnn.embed`, ``overrides`` and ``timeout`` as in
        `predict`."""
        return self._rows("embed", locals())

    def evaluate(
        self,
        split: str | None = None,
        *,
        task: str | None = None,
        rows: str | Path | pandas.DataFrame | None = None,
        at: int | str | date | None = None,
        new_data: bool = False,
        trust: bool = False,
        overrides: Sequence[str] = (),
        timeout: float = 3600.0,
    ) -> dict[str, float]:
        """Evaluate the tested weights on a split; metrics are named as in `summary`. Options and
        errors as in `raygnn.evaluate`, ``rows``, ``overrides`` and ``timeout`` as in `predict`."""
        metrics: dict[str, float] = self._ask("evaluate", locals())["metrics"]
        return metrics

    def _rows(self, verb: str, options: Mapping[str, Any]) -> pandas.DataFrame:
        import pandas

        with TemporaryDirectory(prefix=f"raygnn-{verb}-") as directory:
            out = Path(directory) / "out.parquet"
            self._ask(verb, {**options, "out": out})
            return pandas.read_parquet(out)

    def _ask(self, verb: str, given: Mapping[str, Any]) -> dict[str, Any]:
        """Run a verb on this run. ``given``: a method's arguments, of which None and False are
        omitted; lists of ids and frames become files."""
        options = {name: value for name, value in given.items() if name != "self"}
        args = [f"--set={override}" for override in options.pop("overrides", ())]
        timeout = options.pop("timeout", 3600.0)
        with TemporaryDirectory(prefix=f"raygnn-{verb}-") as directory:
            for name, value in options.items():
                if value is None or value is False:
                    continue
                if name == "fanout":
                    value = ",".join(map(str, value))
                if name in ("ids", "candidates", "rows") and not isinstance(value, (str, Path)):
                    value = _as_file(name, value, Path(directory) / f"{name}.parquet")
                option = "--" + name.replace("_", "-")
                args.append(option if value is True else f"{option}={value}")
            return run_verb(verb, self.shown, *args, timeout=timeout)

    def to_dict(self) -> dict[str, Any]:
        """Return ``name``, ``path``, ``status`` and the summary as plain JSON types; of a damaged
        run an ``error`` in place of the summary."""
        try:
            facts = {**self.summary, "status": self.status}
        except DataError as error:
            facts = {"status": "damaged", "error": str(error)}
        return {**facts, "name": self.name, "path": self.shown}

    def __repr__(self) -> str:
        summary, facts = self.summary, [f"status {self.status}"]
        metrics = (summary.get("metrics") or {}).items()
        facts += [f"{key} {value:.4g}" for key, value in metrics if value is not None]
        facts += [f"steps {summary['steps']:,}"] if "steps" in summary else []
        return f"Run({self.shown!r}: {', '.join(facts)})"


def _as_file(name: str, value: Any, file: Path) -> Path:
    """Write ids, or a frame of rows, to a Parquet file."""
    import pandas

    if isinstance(value, pandas.DataFrame):
        named = None not in value.index.names  # else the index would be a column
        value.to_parquet(file, index=named)
        return file
    try:
        pandas.DataFrame({"id": list(value)}).to_parquet(file)
    except (TypeError, ValueError) as error:  # Arrow's
        what, remedy = f"the ids cannot be read: {error}", "pass numbers or texts, not both"
        raise InputError(what, where=name, remedy=remedy) from None
    return file


def open_run(run: str | Path, storage: str = "runs") -> Run:
    """Open a run for reading; of a search (`raygnn.tune`) the best completed trial.

    Args:
        run: its path or URI, or its name within ``storage``.

    Raises:
        InputError: the run does not exist (the message lists similar names), or the search has no
            completed trial.
    """
    return _open(run, storage, is_run)


def open_remains(run: str | Path, storage: str = "runs") -> Run:
    """Open a run even without a valid config.yaml, if it has a summary.json or a rank's file in
    logs/; for reading only, not to decide what may be deleted. Raises InputError as `open_run`
    does."""
    return _open(run, storage, _has_remains)


def _open(run: str | Path, storage: str, accepts: Callable[[Path], bool]) -> Run:
    if (uri := _uri(run, storage)) is not None:
        replica = Replica(uri)
        replica.refresh()
        if accepts(replica.directory):
            return Run(replica.directory, replica)
        raise _no_run("there is no such run", str(uri), uri.name, uri.parent)
    try:
        given = storage_path(run)
        path = given if accepts(given) else storage_path(storage) / run
        if accepts(path):
            return Run(_best_trial(path) if (path / SEARCH).exists() else path)
        directory = storage_path(storage) if len(Path(run).parts) == 1 else given.parent
        problem = "this is not a run directory" if given.exists() else "there is no such run"
    except OSError as error:  # the name is too long, or a directory on the way cannot be entered
        raise InputError(f"cannot be read: {error.strerror}", where=str(run)[:_SHOWN]) from error
    raise _no_run(problem, str(directory / given.name), given.name, directory)


def _best_trial(search: Path) -> Path:
    best = read_json(search / SEARCH).get("best")
    if best is None:
        remedy = f"wait for one, or name a trial, {search / TRIALS}/ID"
        raise InputError("the search has no completed trial yet", where=str(search), remedy=remedy)
    return search / TRIALS / Path(str(best)).name


def _no_run(what: str, where: str, name: str, storage: Path | Uri) -> InputError:
    names = [other.name for other in list_runs(storage)]
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5) or names[:3]
    remedy = f"did you mean {', '.join(near)}?" if near else f"there are no runs in {storage}"
    return InputError(what, where=where, remedy=remedy)


def _uri(run: str | Path, storage: str) -> Uri | None:
    """Return the location of a run in an object store; None for a local one."""
    named = "://" not in str(run)
    place = read_storage(storage if named else str(run))
    if not isinstance(place, Uri) or (named and (len(Path(run).parts) > 1 or is_run(Path(run)))):
        return None
    return place / str(run) if named else place


def _has_remains(path: Path) -> bool:
    if is_run(path) or (path / SUMMARY).is_file():
        return True
    logs = path / LOGS
    return logs.is_dir() and any(RANK_FILE.match(entry.name) for entry in logs.iterdir())


def list_runs(storage: str | Path | Uri = "runs") -> list[Run]:
    """Return the runs in ``storage``, the newest first; ``[]`` if it does not exist. Raises
    InputError if the directory cannot be listed, and DataError if the object store cannot be
    listed."""
    place = storage if isinstance(storage, Uri) else read_storage(str(storage))
    if isinstance(place, Uri):
        return _list_remote(place)
    try:
        paths = [path for path in place.iterdir() if not path.is_symlink() and is_run(path)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise InputError(f"cannot be listed: {error.strerror}", where=str(place)) from error
    return [Run(path) for path in sorted(paths, key=_began, reverse=True)]


def _list_remote(storage: Uri) -> list[Run]:
    def fetch(name: str) -> Run:
        replica = Replica(storage / name, only=(CONFIG, SUMMARY, METRICS))
        replica.refresh()
        return Run(replica.directory, replica)

    names = RemotePath.of(storage, "storage").folders()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        runs = pool.map(fetch, (n for n in names if not n.startswith(".") and n != "partitions"))
        return sorted((r for r in runs if is_run(r.path)), key=lambda r: _began(r.path))[::-1]


def run_verb(verb: str, *args: str, timeout: float) -> dict[str, Any]:
    """Run ``raygnn VERB … --json`` in a separate process for at most ``timeout`` seconds; returns
    its parsed output. Raises the command's error, and TrainingError if it took longer, or ended
    without a result."""
    process = subprocess.Popen(
        [sys.executable, "-m", "raygnn", verb, *args, "--json"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        out, err = process.communicate(timeout=timeout)
    except BaseException as error:
        _end(process)
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        what = f"raygnn {verb} took longer than {timeout:g} s"
        raise TrainingError(what, remedy="raise the timeout") from None
    try:
        result: dict[str, Any] = json.loads(out)
    except ValueError:
        message = f"raygnn {verb} ended with {process.returncode} and no result"
        remedy = "run it on the command line, with -v"
        raise TrainingError(message, remedy=remedy, trace=(err or out)[-_LAST:]) from None
    if process.returncode:
        raise error_of(process.returncode, result.get("error") or {})
    return result


def _end(process: subprocess.Popen[str]) -> None:
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        try:
            process.communicate(timeout=_GRACE)
        finally:
            process.kill()  # does nothing if it has ended
            process.wait()


def _began(path: Path) -> int:
    try:
        return (path / CONFIG).stat().st_mtime_ns
    except OSError:
        return 0  # removed this moment
