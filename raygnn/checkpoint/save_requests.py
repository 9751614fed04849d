"""Requests for a checkpoint: files in the run directory, each answered by its own name.

Whoever wants one now makes ``.save-<id>``. Rank 0 renames it to ``.saved-<id>`` when a checkpoint
of a later state is written, or to ``.refused-<id>`` when that cannot be. A file ``.save``, as a
user or a batch system makes it, is removed in both cases.
"""

from __future__ import annotations

import contextlib
import re
import uuid
from collections.abc import Iterable
from pathlib import Path

SAVE = ".save"
_SAVED, _REFUSED = ".saved", ".refused"
_PENDING = re.compile(rf"{re.escape(SAVE)}(-[0-9a-f]{{32}})?")


class Request:
    """A request of this process.

    Raises:
        OSError: it cannot be made.
    """

    def __init__(self, run_dir: Path):
        self._run_dir = run_dir
        self._id = uuid.uuid4().hex
        self._at(SAVE).touch()

    @property
    def answer(self) -> bool | None:
        """Whether the checkpoint was written; None = there is no answer yet.

        Raises:
            OSError: the storage is away.
        """
        if self._at(_SAVED).exists():
            return True
        return False if self._at(_REFUSED).exists() else None

    def withdraw(self) -> None:
        """Remove it, or its answer; requests of others stay."""
        for kind in (SAVE, _SAVED, _REFUSED):
            with contextlib.suppress(OSError):
                self._at(kind).unlink(missing_ok=True)

    def _at(self, kind: str) -> Path:
        return self._run_dir / f"{kind}-{self._id}"


def pending(run_dir: Path) -> frozenset[str]:
    """Names of the requests that wait for an answer; none while the storage is away."""
    try:
        return frozenset(p.name for p in run_dir.iterdir() if _PENDING.fullmatch(p.name))
    except OSError:
        return frozenset()


def answer(run_dir: Path, names: Iterable[str], *, saved: bool) -> None:
    """Answer requests that `pending` named; those that were withdrawn need none."""
    for name in names:
        with contextlib.suppress(OSError):
            if name == SAVE:
                (run_dir / name).unlink()
            else:
                kind = _SAVED if saved else _REFUSED
                (run_dir / name).rename(run_dir / name.replace(SAVE, kind, 1))


def clear(run_dir: Path) -> None:
    """Remove all requests and answers, of an earlier command or of this one at its end."""
    for kind in (SAVE, _SAVED, _REFUSED):
        for path in run_dir.glob(f"{kind}*"):
            with contextlib.suppress(OSError):
                path.unlink()
