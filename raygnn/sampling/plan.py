"""Which seeds come when, and how many neighbours are drawn: pure arithmetic, no state, no memory.

The order of the seeds of an epoch is a permutation that is computed position by position, so
that step 1,000,000 costs what step 0 costs and no rank has to remember anything. A global batch
is a slice of that order; it does not depend on the number of workers when ``global_batch`` stays
the same, nor on the partition, since seeds are numbered by their original ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from raygnn.errors import ConfigError
from raygnn.graph.data import EdgeType, etype_str
from raygnn.util.hashing import derive_key

Fanout = Mapping[EdgeType, int]  # neighbours of one hop

_OTHERS = "*"  # in a fanout, the edge types that are not named

_ROUNDS = 6  # 4 give a pseudorandom permutation (Luby & Rackoff 1988); 2 more cost nothing here
_SHUFFLED = 1000  # up to so many the rounds have too few bits to be fair; all are shuffled at once


def permute(positions: np.ndarray, size: int, key: int) -> np.ndarray:
    """The images of ``positions`` under a keyed permutation of ``0 … size-1``.

    A balanced Feistel network over the next power of four, walked until the image is in range
    (Black & Rogaway, "Ciphers with arbitrary finite domains", 2002). O(len(positions)). Up to 1,000
    all are shuffled (Fisher & Yates), which is O(size).

    Args:
        positions: int64 ``[B]``, each in ``[0, size)``.
        size: of the domain, at least 1.
        key: 64-bit.

    Returns:
        int64 ``[B]``.
    """
    from raygnn.sampling import kernels  # a driver that checks fanouts needs no numba

    if size <= _SHUFFLED:
        images: np.ndarray = kernels.shuffled(size, np.uint64(derive_key(key)))
        return images[positions]
    half = max(1, (max(size - 1, 1).bit_length() + 1) // 2)
    keys = np.array([derive_key(key, r) for r in range(_ROUNDS)], np.uint64)
    return kernels.permuted(positions, size, half, keys)


class Steps:
    """How batches make optimizer steps and epochs.

    Attributes:
        steps_per_epoch: batches of an epoch.
        accumulate: batches whose gradients make one optimizer step together; the last ones of an
            epoch may be fewer.
    """

    steps_per_epoch: int
    accumulate: int

    @property
    def updates_per_epoch(self) -> int:
        """Optimizer steps of an epoch."""
        return -(-self.steps_per_epoch // self.accumulate)

    def batches_until(self, optimizer_steps: int) -> int:
        """Batches, over all epochs, after which so many optimizer steps have been made."""
        epochs, rest = divmod(optimizer_steps, self.updates_per_epoch)
        return epochs * self.steps_per_epoch + min(self.steps_per_epoch, rest * self.accumulate)

    def window(self, step: int) -> range:
        """The steps of an epoch whose batches make one optimizer step together with ``step``."""
        first = step // self.accumulate * self.accumulate
        return range(first, min(first + self.accumulate, self.steps_per_epoch))

    @property
    def state(self) -> dict[str, Any]:
        """What positions are counted in: JSON types, for a checkpoint."""
        raise NotImplementedError


@dataclass(frozen=True)
class SeedPlan(Steps):
    """The seeds of every global batch of every epoch.

    Attributes:
        num_seeds: how many there are, over all ranks.
        global_batch: seeds per step, over all ranks.
        seed: of the run.
    """

    num_seeds: int
    global_batch: int
    seed: int = 0
    accumulate: int = 1

    @property
    def steps_per_epoch(self) -> int:  # type: ignore[override]
        return -(-self.num_seeds // self.global_batch)

    @property
    def state(self) -> dict[str, Any]:
        """See `Steps`."""
        return {
            "num_seeds": self.num_seeds,
            "global_batch": self.global_batch,
            "seed": self.seed,
            "accumulate": self.accumulate,
            # few seeds were permuted otherwise before, and those of an epoch under way differ
            **({"order": "shuffled"} if self.num_seeds <= _SHUFFLED else {}),
        }

    def size(self, step: int) -> int:
        """Seeds of one step, over all ranks."""
        return min(self.global_batch, self.num_seeds - step * self.global_batch)

    def seeds_in_window(self, step: int) -> int:
        """Seeds of all batches that make one optimizer step together with batch ``step``."""
        return sum(self.size(each) for each in self.window(step))

    def batch(self, epoch: int, step: int) -> np.ndarray:
        """Indices (int64 ``[≤ global_batch]``, into the seeds in original-id order) of one step.

        The last batch of an epoch is short: no seed is dropped or repeated.
        """
        assert 0 <= step < self.steps_per_epoch, (step, self.steps_per_epoch)
        start = step * self.global_batch
        positions = np.arange(start, start + self.size(step))
        return permute(positions, self.num_seeds, derive_key(self.seed, epoch))


@dataclass(frozen=True)
class MultitaskPlan(Steps):
    """The seeds of several tasks, a batch of each in every step.

    An epoch is as long as that of the task with most batches; the others go on with their next
    epoch, in another order, where one ends.

    Attributes:
        plans: of the tasks, by name.
    """

    plans: Mapping[str, SeedPlan]
    accumulate: int = 1

    @property
    def steps_per_epoch(self) -> int:  # type: ignore[override]
        return max(plan.steps_per_epoch for plan in self.plans.values())

    @property
    def state(self) -> dict[str, Any]:
        """See `Steps`."""
        states = {name: plan.state for name, plan in self.plans.items()}
        first = next(iter(states.values()))
        keys = dict.fromkeys(key for own in states.values() for key in own)
        each = {key: {name: own.get(key) for name, own in states.items()} for key in keys}
        return {**each, "seed": first["seed"], "accumulate": self.accumulate}

    def position(self, name: str, epoch: int, step: int) -> tuple[int, int]:
        """Where a task stands in its own epochs: epoch and step."""
        plan = self.plans[name]
        return divmod(epoch * self.steps_per_epoch + step, plan.steps_per_epoch)

    def seeds_in_window(self, name: str, epoch: int, step: int) -> int:
        """A task's seeds of all batches that make one optimizer step together with one."""
        own = (self.position(name, epoch, each)[1] for each in self.window(step))
        return sum(map(self.plans[name].size, own))


def rank_share(ids: np.ndarray, rank: int, world: int) -> np.ndarray:
    """Which seeds of a global batch one rank computes.

    The batch is ordered by id and cut into ``world`` pieces whose sizes differ by at most one.
    Ids are contiguous per part, so that nearly every seed falls to the rank that owns it, and no
    rank has more work than another however the seeds of a batch are spread over the parts.

    Args:
        ids: int64 ``[B]``, reshuffled global ids, any order.

    Returns:
        int64 positions in ``ids``, ``B // world`` to ``ceil(B / world)`` of them; none for some
        ranks when ``B < world``, but never for rank 0, whose buffers (such as a user's module has
        them) the others are given.
    """
    order = np.argsort(ids, kind="stable")
    return order[-(-rank * len(ids) // world) : -(-(rank + 1) * len(ids) // world)]


def resolve_fanouts(
    given: Sequence[int | Mapping[str, int]], etypes: Sequence[EdgeType]
) -> list[Fanout]:
    """``sampling.fanout`` for the edge types of a graph.

    Args:
        given: per hop a number for all edge types, or a number for each by its relation or
            ``source:relation:target``; ``"*"`` stands for those not named.

    Returns:
        Per hop, edge type → neighbours; -1 = all, 0 = none.

    Raises:
        ConfigError: a name that is no edge type of the graph, or an edge type without a number.
    """
    return [_resolve(hop, etypes, number) for number, hop in enumerate(given)]


def _resolve(hop: int | Mapping[str, int], etypes: Sequence[EdgeType], number: int) -> Fanout:
    if isinstance(hop, int):
        return dict.fromkeys(etypes, hop)
    names = {name: [e for e in etypes if name in (etype_str(e), e[1])] for name in hop}
    where = f"sampling.fanout[{number}]"
    existing = ", ".join(map(etype_str, etypes))
    for name, meant in names.items():
        if name != _OTHERS and not meant:
            raise ConfigError(
                f"{name!r} is no edge type of this graph; there are: {existing}",
                where=where,
                remedy="name one of them, or its relation",
            )
    numbers: dict[EdgeType, int] = {}
    # the whole name of a type is said of it alone, its relation perhaps of several
    for name in sorted(names, key=lambda name: ":" in name):
        numbers |= dict.fromkeys(names[name], hop[name])
    for etype in etypes:
        if etype not in numbers:
            if _OTHERS not in hop:
                raise ConfigError(
                    f"has no number for the edge type {etype_str(etype)}",
                    where=where,
                    remedy=f"add it, or {_OTHERS!r} for all that are not named",
                )
            numbers[etype] = hop[_OTHERS]
    return {etype: numbers[etype] for etype in etypes}
