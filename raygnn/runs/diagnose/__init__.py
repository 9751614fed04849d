"""Diagnosis of a run from its files: ``raygnn diagnose``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from raygnn.runs.diagnose.judge import Diagnosis


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
