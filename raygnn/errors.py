"""The one error tree: what happened, where, and what to do about it.

Every error that a user can cause or meet is a :class:`RaygnnError`. It carries its parts
separately, so that the command line prints them in one form and they survive pickling on the
way from a worker to the driver. ``exit_code`` is what the command line exits with.
"""

from __future__ import annotations

import copyreg
import traceback
from collections.abc import Mapping
from typing import Any

LONGEST_TEXT = 10_000  # characters of an error message of somebody else's that are kept
LONGEST_TRACE = 100_000  # characters of a trace


def plain_text(text: str, longest: int = LONGEST_TEXT) -> str:
    """Text of somebody else's that any file, protocol and terminal takes: its middle left out
    where it is longer than ``longest``, and escapes in place of lone surrogates, which have no
    UTF-8."""
    if len(text) > longest:
        head, tail = text[: longest // 2], text[-(longest // 2) :]
        text = f"{head} … {len(text) - len(head) - len(tail):,} characters left out … {tail}"
    return text.encode("utf-8", "backslashreplace").decode()


def error_text(error: BaseException) -> str:
    """``Kind: message`` of any exception, also of one whose ``__str__`` raises."""
    try:
        message = str(error)
    except BaseException as failure:
        message = f"<its text cannot be had: __str__ raised {type(failure).__name__}>"
    return plain_text(f"{type(error).__name__}: {message}" if message else type(error).__name__)


def trace_text(error: BaseException) -> str:
    """The trace of any exception and of its causes."""
    return plain_text("".join(traceback.format_exception(error)), LONGEST_TRACE)


class RaygnnError(Exception):
    """Base of all errors raised on purpose.

    Args:
        what: one sentence, what is wrong, with the offending value in it.
        where: the file, key path, node or rank concerned, e.g. ``"cora.yaml: train.lr"``.
        remedy: one sentence, what to do about it.
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
    """Bad configuration or bad input data; nothing was started."""

    exit_code = 2


class ConfigError(InputError):
    """A config key that is unknown, of the wrong type, out of range or in contradiction.

    ``where`` is ``"<file>: <key.path>"`` (or ``"--set <key.path>"``).
    """


class ClassError(ConfigError):
    """A key names no class that can be imported, or none of the kind that it is to be."""


class DataError(InputError):
    """An input file that is missing, truncated, inconsistent or hostile.

    ``where`` names the file and, where one is at fault, the first bad row.
    """


class PreflightError(RaygnnError):
    """The job cannot run here as asked; nothing was started."""

    exit_code = 3


class CapabilityError(PreflightError):
    """Something that this installation lacks (GraphBolt, dgl.sparse, CUDA, …) was asked for."""


def wrong_token(what: str, where: str, *, sent: bool) -> PreflightError:
    """The error of a cluster, or a part of it, that wants another token than what was sent."""
    told = "its token is another one" if sent else "it asks for a token, and there is none here"
    return PreflightError(
        f"{what}: {told}",
        where=where,
        remedy="set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH, to what the "
        "head node was started with",
    )


class TrainingError(RaygnnError):
    """Training failed. ``rank`` is the rank whose fault it was, ``trace`` its traceback.

    ``run`` is the run directory, once there is one: ``raygnn diagnose`` says more of it.
    ``direct`` is whether that rank could say it itself; else it is what others made of it.
    ``final`` is whether a new start would meet it again, so that there is to be none.
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
    """Ranks were about to do different things, or have nothing sensible left to do.

    All ranks raise the same one, except where only one rank can know. ``rank`` is the odd one
    out: of the fewest, the lowest.
    """


class Interrupted(RaygnnError):
    """The user stopped the command (Ctrl-C or SIGTERM)."""

    exit_code = 130


def error_of(code: int, facts: Mapping[str, Any]) -> RaygnnError:
    """The error that a command raised in another process.

    Args:
        code: its exit code.
        facts: its ``what``, ``where``, ``remedy``, ``rank`` and ``run``, as far as they are known.
    """
    kinds: tuple[type[RaygnnError], ...] = (InputError, PreflightError, Interrupted)
    kind = next((kind for kind in kinds if kind.exit_code == code), TrainingError)
    what = facts.get("what") or f"it ended with exit code {code}"
    error = kind(what, where=facts.get("where"), remedy=facts.get("remedy"))
    if isinstance(error, TrainingError):
        error.rank, error.run = facts.get("rank"), facts.get("run")
    return error
