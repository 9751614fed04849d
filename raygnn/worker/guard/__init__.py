"""What keeps ranks that are about to do different things from doing them.

:mod:`fingerprint` says what a rank is about to do, :mod:`compare` holds it against what the
others say, :mod:`callback` does so at the right moments of training.
"""

from raygnn.worker.guard.callback import Guard

__all__ = ["Guard"]
