"""Errors of storage that is away, as commands and ranks report them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, TypeVar

from raygnn.errors import TrainingError
from raygnn.util.files import is_away, retry

if TYPE_CHECKING:
    from raygnn.config.schema import Config

T = TypeVar("T")


def patient(act: Callable[..., T]) -> Callable[..., T]:
    """Let a function of a config and more wait ``fault.storage_timeout`` for storage that is away:
    it is called again."""

    @wraps(act)
    def waiting(config: Config, *args: Any, **options: Any) -> T:
        seconds = config.fault.storage_timeout.seconds
        return retry(partial(act, config, *args, **options), seconds, storage_error)

    return waiting


def storage_error(error: Exception) -> TrainingError | None:
    """Return the error to report for storage that is away; None for any other error. Callers that
    can wait for the storage have done so before."""
    where = getattr(error, "where", None) or getattr(error, "filename", None)
    if not is_away(error) or where is None:  # without a path it may be of the network
        return None
    what = getattr(error, "what", f"the storage does not answer: {getattr(error, 'strerror', '')}")
    remedy = "restore the storage, then run this again, with --resume if the run had begun"
    return TrainingError(what, where=str(where), remedy=remedy)
