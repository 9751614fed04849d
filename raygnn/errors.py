"""Errors: what is wrong, where, and what to do about it.

Every error that a user can cause or meet is a `RaygnnError`, whose parts the command line prints in
one form, and which survives pickling from a worker to the driver.
"""

from __future__ import annotations

import copyreg
import traceback
from collections.abc import Mapping
from typing import Any

LONGEST_TEXT = 10_000  # characters of a foreign error message that are kept
LONGEST_TRACE = 100_000  # characters of a trace


def plain_text(text: str, longest: int = LONGEST_TEXT) -> str:
    """Make foreign text safe for files, protocols and terminals: drop the middle of one longer than
    ``longest``, and escape lone surrogates, which UTF-8 cannot encode."""
    if len(text) > longest:
        head, tail = text[: longest // 2], text[-(longest // 2) :]
        text = f"{head} … {len(text) - len(head) - len(tail):,} characters left out … {tail}"
    return text.encode("utf-8", "backslashreplace").decode()


def error_text(error: BaseException) -> str:
    """Return ``Kind: message`` of any exception, also of one whose ``__str__`` raises."""
    try:
        message = str(error)
    except BaseException as failure:
        message = f"<no text: __str__ raised {type(failure).__name__}>"
    return plain_text(f"{type(error).__name__}: {message}" if message else type(error).__name__)


def trace_text(error: BaseException) -> str:
    """Return the traceback of an exception and of its causes."""
    return plain_text("".join(traceback.format_exception(error)), LONGEST_TRACE)


class RaygnnError(Exception):
    """Base of all errors.

    Args:
        what: one sentence, what is wrong, with the offending value in it.
        where: the file, key path, node or rank concerned, e.g. ``"cora.yaml: train.lr"``.
        remedy: one sentence, what to do about it.

    Attributes:
        exit_code: of the command line.
    """

    exit_code = 4

    def __init__(self, what: str, *, where: str | None = None, remedy: str | None = None):
        super().__init__(what)
        self.what = what
        self.where = where
        self.remedy = remedy

    def __str__(self) -> str:
        head = f"{self.where}: {self.what}" if self.where else self.what
        return f"{head}\n  → {self.remedy}" if self.remedy else head

    def __reduce__(self) -> tuple[Any, ...]:
        state = vars(self).copy()
        return copyreg.__newobj__, (type(self), self.what), state  # type: ignore[attr-defined]


class InputError(RaygnnError):
    """Invalid configuration or input data; nothing was started."""

    exit_code = 2


class ConfigError(InputError):
    """Configuration key that is unknown, of the wrong type, out of range or contradictory, named in
    ``where``: ``"<file>: <key.path>"`` or ``"--set <key.path>"``."""


class ClassError(ConfigError):
    """Key that names no importable class of the right kind."""


class DataError(InputError):
    """Input file that is missing, truncated, inconsistent or hostile; ``where`` names the file and,
    if there is one, the first bad row."""


class PreflightError(RaygnnError):
    """Job that cannot run here; nothing was started."""

    exit_code = 3


class CapabilityError(PreflightError):
    """Requested feature that this installation lacks (GraphBolt, dgl.sparse, CUDA, …)."""


def wrong_token(what: str, where: str, *, sent: bool) -> PreflightError:
    """Return the error of a cluster that refuses the token, or its absence."""
    why = "its token is another one" if sent else "it requires a token, and there is none here"
    return PreflightError(
        f"{what}: {why}",
        where=where,
        remedy="set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH, to what the "
        "head node was started with",
    )


class TrainingError(RaygnnError):
    """Failed training.

    Attributes:
        rank: the rank at fault; ``trace`` is its traceback.
        run: the run directory, once there is one, for ``raygnn diagnose``.
        direct: True if that rank reported it itself; else the other ranks inferred it.
        final: True if a restart would meet it again, so that there is none.
    """

    exit_code = 4

    def __init__(
        self,
        what: str,
        *,
        where: str | None = None,
        remedy: str | None = None,
        rank: int | None = None,
        trace: str | None = None,
    ):
        super().__init__(what, where=where, remedy=remedy)
        self.rank = rank
        self.trace = trace
        self.run: str | None = None
        self.direct = True
        self.final = False


class GuardError(TrainingError):
    """Ranks that differ, or cannot continue. All ranks raise the same error, unless only one can
    know; ``rank`` is the lowest of the smallest group of equal ranks."""


class Interrupted(RaygnnError):
    """Interrupt by the user (Ctrl-C or SIGTERM)."""

    exit_code = 130


def error_of(code: int, facts: Mapping[str, Any]) -> RaygnnError:
    """Return the error of a command in another process.

    Args:
        code: its exit code.
        facts: its ``what``, ``where``, ``remedy``, ``rank`` and ``run``, if known.
    """
    kinds: tuple[type[RaygnnError], ...] = (InputError, PreflightError, Interrupted)
    kind = next((kind for kind in kinds if kind.exit_code == code), TrainingError)
    what = facts.get("what") or f"it ended with exit code {code}"
    error = kind(what, where=facts.get("where"), remedy=facts.get("remedy"))
    if isinstance(error, TrainingError):
        rank, error.run = facts.get("rank"), facts.get("run")
        error.rank = None if rank is None else int(rank)
    return error
