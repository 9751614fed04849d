"""A run as it lies on disk, for reading: while it trains, or long after."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from raygnn.errors import DataError, InputError
from raygnn.runs.files import read_json, storage_path
from raygnn.runs.lock import holder
from raygnn.runs.metrics import read_metrics
from raygnn.runs.store import CONFIG, LOCK, METRICS, SUMMARY, is_run

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True, repr=False)
class Run:
    """A run directory. Every property reads the files anew, so a live run is followed by asking.

    Attributes:
        path: absolute path of the run directory.
    """

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def config(self) -> dict[str, Any]:
        """The resolved configuration.

        Raises:
            DataError: the file is damaged.
        """
        file = self.path / CONFIG
        try:
            value = yaml.safe_load(file.read_bytes())
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise DataError(f"not readable as YAML: {error}", where=str(file)) from error
        if not isinstance(value, dict):
            raise DataError("not a configuration", where=str(file))
        return value

    @property
    def summary(self) -> dict[str, Any]:
        """``summary.json``: ``metrics``, ``steps``, ``seeds_per_second``, ``seconds``, …

        Raises:
            DataError: the file is damaged.
        """
        return read_json(self.path / SUMMARY)

    @property
    def status(self) -> str:
        """``running``, ``done``, ``failed``, ``interrupted``, or ``killed`` (process gone)."""
        status = self.summary.get("status", "running")
        if status == "running" and holder(self.path / LOCK) is None:
            return "killed"
        return str(status)

    @property
    def metrics(self) -> pandas.DataFrame:
        """One row per record in order of writing; a value that a record lacks is NaN.

        Raises:
            DataError: the file is damaged.
        """
        import pandas

        return pandas.DataFrame.from_records(read_metrics(self.path / METRICS))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types: ``name``, ``path``, ``status`` and the rest of the summary."""
        return {**self.summary, "name": self.name, "path": str(self.path), "status": self.status}

    def _facts(self) -> dict[str, str]:
        summary = self.summary
        facts = {"status": self.status}
        facts |= {key: f"{value:.4g}" for key, value in _numbers(summary.get("metrics"))}
        if "steps" in summary:
            facts["steps"] = f"{summary['steps']:,}"
        return facts

    def __repr__(self) -> str:
        facts = ", ".join(f"{key} {value}" for key, value in self._facts().items())
        return f"Run({str(self.path)!r}: {facts})"

    def _repr_html_(self) -> str:
        rows = {**self._facts(), "path": str(self.path)}
        cells = "".join(
            f"<tr><th style='text-align:left'>{escape(key)}</th>"
            f"<td style='text-align:left'>{escape(value)}</td></tr>"
            for key, value in rows.items()
        )
        return f"<b>{escape(self.name)}</b><table>{cells}</table>"


def open_run(run: str | Path, storage: str = "runs") -> Run:
    """Open a run directory for reading.

    Args:
        run: its path, or its name within ``storage``.
        storage: the directory of runs that a bare name is looked up in.

    Raises:
        InputError: there is no run directory; the nearest names are listed.
    """
    given = storage_path(run)
    path = given if is_run(given) else storage_path(storage) / run
    if is_run(path):
        return Run(path)
    bare = len(Path(run).parts) == 1
    directory = storage_path(storage) if bare else given.parent
    names = [other.name for other in list_runs(str(directory))]
    near = difflib.get_close_matches(given.name, names, n=3, cutoff=0.5) or names[:3]
    what = "this is not a run directory" if given.exists() else "there is no such run"
    raise InputError(
        what,
        where=str(directory / given.name),
        remedy=f"did you mean {', '.join(near)}?" if near else f"there are no runs in {directory}",
    )


def list_runs(storage: str = "runs") -> list[Run]:
    """The runs in ``storage``, the one that began last first; ``[]`` when it does not exist.

    Raises:
        InputError: ``storage`` cannot be listed.
    """
    directory = storage_path(storage)
    try:
        paths = [path for path in directory.iterdir() if not path.is_symlink() and is_run(path)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise InputError(f"cannot be listed: {error.strerror}", where=str(directory)) from error
    return [Run(path) for path in sorted(paths, key=_began, reverse=True)]


def _began(path: Path) -> int:
    try:
        return (path / CONFIG).stat().st_mtime_ns
    except OSError:
        return 0  # removed this moment


def _numbers(values: Any) -> list[tuple[str, float]]:
    if not isinstance(values, dict):
        return []
    return [(key, value) for key, value in values.items() if isinstance(value, (int, float))]
