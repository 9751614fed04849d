"""``raygnn tune``: a sweep over what makes a job faster, on the cluster that will run it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raygnn.config.schema import Config
from raygnn.driver.job_plan import display_of
from raygnn.driver.launch import Launch
from raygnn.driver.session import Session, session_beside
from raygnn.driver.watch import Watch
from raygnn.errors import InputError
from raygnn.runs import interrupts
from raygnn.runs.display import Display
from raygnn.runs.metrics_files import MetricsTail
from raygnn.runs.run_directory import RunDir
from raygnn.storage.remote import RemotePath
from raygnn.tuning.search import NUMERICS, apply
from raygnn.util.files import write_json
from raygnn.worker.job import TRIALS

_PLACE = ".tuning"  # in the storage; no run can have this name
_RESULT = "tuning.json"
SHORTEST, LONGEST = 0.1, 600.0  # seconds of a trial
_POLL = 0.2  # seconds


@dataclass(frozen=True)
class Tuned:
    """What a sweep found.

    Attributes:
        exact: keys and values that are faster and leave results as they are.
        fastest: those that are faster at all; some may change results (`numerics`).
        rates: ``base``, ``exact``, ``fastest`` → seeds a second, measured in turns.
        trials: each with ``settings``, ``rate``, ``seconds`` of a batch, ``parts``, ``bytes``.
        path: of the file with all of it.
    """

    exact: dict[str, Any]
    fastest: dict[str, Any]
    rates: dict[str, float]
    trials: list[dict[str, Any]]
    path: Path

    @property
    def numerics(self) -> list[str]:
        """The keys of `fastest` that change results."""
        return [key for key in self.fastest if key in NUMERICS]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {
            "exact": self.exact,
            "fastest": self.fastest,
            "numerics": self.numerics,
            "rates": self.rates,
            "trials": self.trials,
            "path": str(self.path),
        }


def tune(
    config: Config,
    *,
    seconds: float = 3.0,
    verbose: bool = False,
    display: bool = True,
    started: float | None = None,
) -> Tuned:
    """Train a job again and again for a few seconds with other settings, and compare.

    Blocks. The configuration stays as it is: what it finds is for the user to set. Nothing is
    kept but the figures, in ``<storage>/.tuning/<name>``.

    Args:
        seconds: that each trial takes, about.
        verbose, display, started: see `raygnn.train`.

    Raises:
        InputError, PreflightError, TrainingError, Interrupted: see `raygnn.train`.
    """
    if not SHORTEST <= seconds <= LONGEST:  # nor NaN
        raise InputError(f"a trial of {seconds} seconds", remedy=f"{SHORTEST} to {LONGEST} can be")
    started = time.time() if started is None else started
    show = display_of(display, verbose)
    once = apply(config, {"fault.max_failures": 0})
    with session_beside(
        once, _PLACE, show, started, interrupted=_interrupted, verbose=verbose
    ) as session:
        found = session.launch(_watch, tune=seconds, program="raygnn.tuning.trials:Tuning")
        session.run.update_summary(status="done")
    place = session.run.path
    tuned = Tuned(
        exact=found["exact"],
        fastest=found["fastest"],
        rates={name: found[f"{name}_rate"] for name in ("base", "exact", "fastest")},
        trials=[
            {**t["facts"], "settings": t["settings"], "rate": t["rate"]} for t in found["trials"]
        ],
        path=place / _RESULT,
    )
    write_json(tuned.path, tuned.to_dict())
    if config.store is not None:
        there = RemotePath.of(config.store, "storage") / _PLACE / config.name / _RESULT
        there.upload(tuned.path)
    _show(show, config, tuned)
    return tuned


def _interrupted(run: RunDir) -> str:
    if not (run.begun and (run.path / TRIALS).exists()):
        return "interrupted; nothing was written"
    return f"interrupted; what was measured until then is in {run.path / TRIALS}"


def _watch(session: Session, launch: Launch) -> None:
    """Show each trial as soon as it is through."""
    watch, show = Watch(session, launch), session.show
    trials = MetricsTail(session.run.path / TRIALS)
    seen: list[dict[str, Any]] = []
    records = watch.first_records(trials)
    while True:
        running = launch.running()
        records += trials.poll()
        for record in records:
            again = " (again)" if record["settings"] in seen else ""
            seen.append(record["settings"])
            show.note(f"{record['rate']:>10,.0f} seeds/s  {_settings(record['settings'])}{again}")
        records.clear()
        if not running:
            return
        watch.poll()
        interrupts.sleep(_POLL)


def _show(show: Display, config: Config, tuned: Tuned) -> None:
    base = tuned.trials[0]["rate"]
    columns = ("settings", "seeds/s", "× as fast", "batch ms", "wait ms", "exchange ms", "MB")
    rows = []
    for trial in tuned.trials:
        parts = trial["parts"]
        rows.append(
            (
                _settings(trial["settings"]),
                round(trial["rate"]),
                trial["rate"] / base,
                trial["seconds"] * 1e3,
                parts["wait"] * 1e3,
                parts["communicate"] * 1e3,
                sum(trial["bytes"].values()) / 2**20,
            )
        )
    show.table("trials, with ! what changes results", columns, rows)
    for name, found, what in (
        ("exact", tuned.exact, "results as they are"),
        ("fastest", tuned.fastest, "results change" if tuned.numerics else "results as they are"),
    ):
        if not found:
            show.note(f"{what}: nothing is clearly faster than what is configured")
        else:
            sets = " ".join(f"--set {key}={value}" for key, value in found.items())
            show.note(
                f"{what}: {tuned.rates[name] / tuned.rates['base']:.2f} × as fast with {sets}"
            )
        if tuned.fastest == tuned.exact:
            break
    show.note(f"all figures: {tuned.path}")


def _settings(settings: dict[str, Any]) -> str:
    if not settings:
        return "as configured"
    marks = {key: "!" if key in NUMERICS else "" for key in settings}
    return " ".join(f"{key}={value}{marks[key]}" for key, value in settings.items())
