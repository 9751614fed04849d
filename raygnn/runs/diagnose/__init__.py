"""Diagnosis of a run from its files: ``raygnn diagnose``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raygnn.runs.diagnose.judge import Diagnosis
    from raygnn.runs.diagnose.rank_reports import RankReport
    from raygnn.runs.display import Display

_COLUMNS = ("rank", "host", "state", "phase", "epoch", "step", "training thread", "prefetch thread")
_RANKS = 64  # ranks that are shown, those first that did not only wait


def diagnose(run: str | Path, storage: str = "runs") -> Diagnosis:
    """Find what ended a run, and on which rank.

    Works on a run that still trains, or was copied here, and skips damaged files, including its
    config.yaml.

    Args:
        run: its path or URI, or its name within ``storage``.

    Raises:
        InputError: there is no such run, nor remains of one.
    """
    from raygnn.runs.diagnose.evidence import read
    from raygnn.runs.diagnose.judge import judge
    from raygnn.runs.run import open_remains

    there = open_remains(run, storage)
    return judge(replace(read(there.files), run=there.shown))


def show(diagnosis: Diagnosis, display: Display) -> None:
    """Print the cause, its evidence, each rank, and the first collective that differs."""
    cause = diagnosis.cause
    rows = {"run": f"{diagnosis.run} ({diagnosis.status})", "cause": f"{cause.kind}: {cause.what}"}
    if cause.rank is not None:
        rows["rank"] = str(cause.rank)
    if cause.where:
        rows["where"] = cause.where
    if cause.kind not in ("none", "running"):
        rows["confidence"] = cause.confidence
    if cause.remedy:
        rows["remedy"] = cause.remedy
    display.header(rows)
    for line in cause.evidence:
        display.note(f"evidence: {line}")
    if diagnosis.ranks and cause.kind not in ("none", "interrupted"):
        title = f"ranks in attempt {diagnosis.attempt}"
        shown = sorted(diagnosis.ranks, key=lambda r: (r.state in ("waiting", "running"), r.rank))
        if len(shown) > _RANKS:
            title += f", {_RANKS} of {len(shown)}"
        display.table(title, _COLUMNS, [_row(rank) for rank in shown[:_RANKS]])
    if (found := diagnosis.first_difference) is not None:
        calls = []
        for call in found["ranks"][:_RANKS]:
            tensors = (_list(call, "dtypes"), _list(call, "sizes"))
            op = call["op"] or "did not reach it"
            calls.append((call["rank"], op, *tensors, call.get("at")))
        name = f"{found['seq']} of group {found['group']}, {found['kind']}"
        columns = ("rank", "collective", "dtypes", "sizes", "called at")
        display.table(f"the first collective that differs: {name}", columns, calls)
    for note in diagnosis.notes:
        display.note(f"note: {note}")


def _row(rank: RankReport) -> tuple[object, ...]:
    state = rank.state if not rank.waiting else f"{rank.state} ({rank.waiting})"
    at = (rank.phase, rank.epoch, rank.step)
    return (rank.rank, rank.host, state, *at, rank.training, rank.prefetch)


def _list(call: Mapping[str, Any], key: str) -> str:
    return " ".join(map(str, call.get(key) or ()))
