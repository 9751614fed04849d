"""What happened to a run, told from what it left: ``raygnn diagnose``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from raygnn.runs.diagnose.judge import Diagnosis


def diagnose(run: str | Path, storage: str = "runs") -> Diagnosis:
    """Say what happened to a run and which rank it was; for one that is well, that it is.

    Works on a run that still trains, or was copied here, and passes over damaged files, among
    them its config.yaml.

    Args:
        run: its path or URI, or its name within ``storage``.

    Raises:
        InputError: there is no such run, and nothing that looks like what is left of one.
    """
    from raygnn.runs.diagnose.evidence import read
    from raygnn.runs.diagnose.judge import judge
    from raygnn.runs.run import open_remains

    there = open_remains(run, storage)
    return judge(replace(read(there.files), run=there.shown))
