"""Record of a search (``search.json``) and its result in Python."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raygnn.config.schema import Config
from raygnn.errors import InputError
from raygnn.runs.display import Display
from raygnn.runs.run import Run, open_run
from raygnn.runs.run_directory import METRICS, SEARCH
from raygnn.search.space import search_of
from raygnn.util.files import plain, read_json, write_json

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True)
class SearchResult:
    """Search on disk; ``path``: its directory, with ``search.json`` and ``trials/``."""

    path: Path

    @property
    def best(self) -> Run:
        """Run of the best completed trial. Raises InputError if there is none."""
        return open_run(self.path)

    @property
    def trials(self) -> pandas.DataFrame:
        """Trials, one a row: ``id``, ``status``, the metric, ``epochs``, a column per key of the
        space, and ``error``."""
        import pandas

        facts = self.to_dict()
        names = {"id": "id", "status": "status", facts["metric"]: "value", "epochs": "epochs"}
        return pandas.DataFrame.from_records(
            [
                {n: one[of] for n, of in names.items()} | one["settings"] | {"error": one["error"]}
                for one in facts["trials"]
            ]
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the content of ``search.json``."""
        return read_json(self.path / SEARCH)

    def show(self, display: Display) -> None:
        """Print a table of the trials, the best ones first."""
        facts = self.to_dict()
        display.table("trials", *table(facts))
        for trial in facts["trials"]:
            if trial["error"]:
                display.note(f"{trial['id']} failed: {trial['error']}")


class SearchRecord:
    """Writer of ``search.json``, used by one command; its threads may share it."""

    def __init__(self, path: Path, facts: dict[str, Any]):
        self._file = path / SEARCH
        self._facts = facts
        self._lock = threading.Lock()

    @classmethod
    def open(
        cls,
        path: Path,
        config: Config,
        metric: tuple[str, str],
        settings: Sequence[Mapping[str, Any]],
        *,
        resume: bool,
    ) -> SearchRecord:
        """Return a new record, or with ``resume`` an earlier command's; nothing is written.

        Args:
            metric: name of the metric, and ``max`` or ``min``.
            settings: known settings of each trial.

        Raises:
            InputError: the earlier command had other trials, or was not a search.
        """
        search = search_of(config)
        facts = {
            "name": config.name,
            "metric": metric[0],
            "mode": metric[1],
            "algorithm": search.algorithm,
            "scheduler": search.scheduler,
            "seed": config.train.seed,
            "space": search.model_dump(mode="json", exclude_none=True)["space"],
            "count": search.count,
            "started": time.time(),
            "best": None,
            "trials": [],
        }
        if resume and (path / SEARCH).exists():
            before = read_json(path / SEARCH)
            if _identity(before) != _identity(facts):
                what = "the search began with another space, seed, metric or number of trials"
                remedy = "restore these to resume it, or start over with another name or "
                raise InputError(what, where=str(path), remedy=f"{remedy}--overwrite")
            facts = before
        elif resume and (path / METRICS).exists():
            what, remedy = "this is a run, not a search", "choose another name, or resume it with "
            raise InputError(what, where=str(path), remedy=f"{remedy}raygnn train")
        record = cls(path, facts)
        for number in range(len(record.trials), len(settings)):
            record.add(number, settings[number])
        return record

    def add(self, number: int, settings: Mapping[str, Any]) -> None:
        """Add a pending trial, or replace it."""
        self.trials[number:] = [
            {
                "id": trial_id(number),
                "status": "pending",
                "settings": plain(dict(settings)),
                "value": None,
                "epochs": 0,
                "ended": None,
                "metrics": {},
                "error": None,
            }
        ]

    @property
    def trials(self) -> list[dict[str, Any]]:
        trials: list[dict[str, Any]] = self._facts["trials"]
        return trials

    @property
    def best(self) -> dict[str, Any] | None:
        """The best completed trial."""
        return next((one for one in self.trials if one["id"] == self._facts["best"]), None)

    def write(self) -> None:
        """Write the file."""
        with self._lock:
            write_json(self._file, self._facts)

    def update(self, number: int, **facts: Any) -> dict[str, Any]:
        """Set facts of a trial, find the best one, and write the file; returns the trial."""
        trial = self.trials[number]
        trial.update(plain(facts))
        best = max if self._facts["mode"] == "max" else min
        done = [one for one in self.trials if one["status"] == "done" and one["value"] is not None]
        if done:
            self._facts["best"] = best(done, key=lambda one: float(one["value"]))["id"]
        self.write()
        return trial


def _identity(facts: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(facts[key] for key in ("metric", "algorithm", "seed", "space", "count"))


def trial_id(number: int) -> str:
    return f"t{number:03d}"


def table(facts: Mapping[str, Any]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the columns and rows of a table of the trials, the best completed ones first."""
    down = -1 if facts["mode"] == "max" else 1

    def rank(trial: Mapping[str, Any]) -> tuple[bool, bool, float]:
        value = trial["value"]
        return trial["status"] != "done", value is None, down * (value or 0.0)

    keys = tuple(facts["space"])
    rows = [
        (
            trial["id"] + " (best)" * (trial["id"] == facts["best"]),
            trial["status"],
            "" if trial["value"] is None else f"{trial['value']:.4f}",
            str(trial["epochs"]),
            *(shown(trial["settings"][key]) for key in keys),
        )
        for trial in sorted(facts["trials"], key=rank)
    ]
    return ("trial", "status", facts["metric"], "epochs", *keys), rows


def shown(value: Any) -> str:
    """Format a setting or a value of the metric."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
