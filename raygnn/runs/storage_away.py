"""Errors of storage that is away, as commands and ranks report them."""

from __future__ import annotations

from raygnn.errors import TrainingError
from raygnn.util.files import is_away


def storage_error(error: Exception) -> TrainingError | None:
    """Return the error to report for storage that is away; None for any other error.

    Callers that can wait for the storage have done so before.
    """
    where = getattr(error, "where", None) or getattr(error, "filename", None)
    if not is_away(error) or where is None:  # without a path it may be of the network
        return None
    what = getattr(error, "what", f"the storage does not answer: {getattr(error, 'strerror', '')}")
    remedy = "restore the storage, then run this again, with --resume if the run had begun"
    return TrainingError(what, where=str(where), remedy=remedy)
