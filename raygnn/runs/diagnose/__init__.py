"""What happened to a run, told from what it left: ``raygnn diagnose``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from raygnn.errors import InputError

if TYPE_CHECKING:
    from raygnn.runs.diagnose.judge import Diagnosis


def diagnose(run: str | Path, storage: str = "runs") -> Diagnosis:
    """Say what happened to a run and which rank it was; for one that is well, that it is.

    Works on a run that still trains, or was copied here, and passes over damaged files, among
    them its config.yaml.

    Args:
        run: its path, or its name within ``storage``.

    Raises:
        InputError: there is no such run, and nothing that looks like what is left of one.
    """
    from raygnn.runs.diagnose.judge import judge
    from raygnn.runs.diagnose.reading import read
    from raygnn.runs.run import open_run, remains

    try:
        found = open_run(run, storage)
    except InputError:
        left = remains(run, storage)
        if left is None:
            raise
        found = left
    return judge(read(found))
