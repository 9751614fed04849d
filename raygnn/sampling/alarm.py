"""How a rank that fails while it prepares batches tells the others, which wait for it.

The others wait in a collective that will never end. So a failure is written to the process
group's key-value store, which every rank can read at any time, and ranks that wait for a batch
look there.
"""

from __future__ import annotations

import torch.distributed as dist

from raygnn.errors import TrainingError, error_text
from raygnn.sampling.exchange import World


class Alarm:
    """One flag for all ranks.

    Args:
        store: a key-value store that all ranks share; None with one rank.
    """

    def __init__(self, world: World, store: dist.Store | None):
        self._world = world
        self._store = store

    def ring(self, error: BaseException) -> None:
        """Say that this rank's batches have come to an end, and why. The first rank is kept."""
        if self._store is None:
            return
        self._store.compare_set("cause", "", f"{self._world.rank}\n{error_text(error)}")

    def check(self) -> None:
        """Raise if another rank has rung.

        Raises:
            TrainingError: naming that rank and the cause.
        """
        if self._store is None or not self._store.check(["cause"]):
            return
        rank, _, cause = self._store.get("cause").decode().partition("\n")
        if int(rank) != self._world.rank:
            raise TrainingError(
                f"rank {rank} could not prepare its batch: {cause}",
                where=f"rank {rank}",
                remedy="see that rank's log for the traceback",
                rank=int(rank),
            )
