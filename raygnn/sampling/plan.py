"""Order of seeds and numbers of sampled neighbours: pure arithmetic, without state.

The order of an epoch's seeds is a permutation that is computed position by position, so every step
costs the same and no rank stores it. A global batch is a slice of that order: with an equal
``global_batch`` it depends neither on the number of workers nor on the partition, since seeds are
numbered by their original ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from raygnn.errors import ConfigError
from raygnn.graph.data import EdgeType, etype_str
from raygnn.util.hashing import derive_key

Fanout = Mapping[EdgeType, int]  # neighbours of one hop

_OTHERS = "*"  # in a fanout: all edge types that are not named

_ROUNDS = 6  # 4 give a pseudorandom permutation (Luby & Rackoff 1988); 2 more cost nothing here
_SHUFFLED = 1000  # up to this size the rounds have too few bits to be fair; shuffle instead


def permute(positions: np.ndarray, size: int, key: int) -> np.ndarray:
    """Map ``positions`` by a keyed permutation of ``0 … size-1``.

    A balanced Feistel network over the next power of four, walked until the image is in range
    (Black & Rogaway, "Ciphers with arbitrary finite domains", 2002), in O(len(positions)). Domains
    up to 1,000 are shuffled (Fisher & Yates), in O(size).

    Args:
        positions: int64 ``[B]``, each in ``[0, size)``.
        size: of the domain, at least 1.
        key: 64-bit.
    """
    from raygnn.sampling import kernels  # a driver that checks fanouts needs no numba

    if size <= _SHUFFLED:
        images: np.ndarray = kernels.shuffled(size, np.uint64(derive_key(key)))
        return images[positions]
    half = max(1, (max(size - 1, 1).bit_length() + 1) // 2)
    keys = np.array([derive_key(key, r) for r in range(_ROUNDS)], np.uint64)
    return kernels.permuted(positions, size, half, keys)


class Steps:
    """Numbers of batches and optimizer steps.

    Attributes:
        steps_per_epoch: batches of an epoch.
        accumulate: batches whose gradients are accumulated for one optimizer step; the last step
            of an epoch may have fewer.
        state: units of positions in a checkpoint, as JSON types.
    """

    steps_per_epoch: int
    accumulate: int
    state: Mapping[str, Any]

    @property
    def updates_per_epoch(self) -> int:
        """Number of optimizer steps per epoch."""
        return -(-self.steps_per_epoch // self.accumulate)

    def batches_until(self, optimizer_steps: int) -> int:
        """Return the number of batches, over all epochs, of ``optimizer_steps``."""
        epochs, rest = divmod(optimizer_steps, self.updates_per_epoch)
        return epochs * self.steps_per_epoch + min(self.steps_per_epoch, rest * self.accumulate)

    def window(self, step: int) -> range:
        """Return the steps of an epoch that share an optimizer step with ``step``."""
        first = step // self.accumulate * self.accumulate
        return range(first, min(first + self.accumulate, self.steps_per_epoch))


@dataclass(frozen=True)
class SeedPlan(Steps):
    """Seeds of every global batch of every epoch.

    Attributes:
        num_seeds: number of seeds, over all ranks.
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
    def state(self) -> dict[str, Any]:  # type: ignore[override]
        """See `Steps`."""
        return asdict(self)

    def size(self, step: int) -> int:
        """Return the number of seeds of one step, over all ranks."""
        return min(self.global_batch, self.num_seeds - step * self.global_batch)

    def seeds_in_window(self, step: int) -> int:
        """Return the number of seeds of all batches that share an optimizer step with ``step``."""
        return sum(self.size(each) for each in self.window(step))

    def batch(self, epoch: int, step: int) -> np.ndarray:
        """Return the seeds of one step: int64 ``[≤ global_batch]``, indices in original-id order.

        The last batch of an epoch may be short: no seed is dropped or repeated.
        """
        assert 0 <= step < self.steps_per_epoch, (step, self.steps_per_epoch)
        start = step * self.global_batch
        positions = np.arange(start, start + self.size(step))
        return permute(positions, self.num_seeds, derive_key(self.seed, epoch))


@dataclass(frozen=True)
class MultitaskPlan(Steps):
    """Seeds of several tasks, a batch of each in every step.

    An epoch ends with the epoch of the task with the most batches; the other tasks continue with
    their own next epoch, in another order.

    Attributes:
        plans: task name → its plan.
    """

    plans: Mapping[str, SeedPlan]
    accumulate: int = 1

    @property
    def steps_per_epoch(self) -> int:  # type: ignore[override]
        return max(plan.steps_per_epoch for plan in self.plans.values())

    @property
    def state(self) -> dict[str, Any]:  # type: ignore[override]
        """See `Steps`."""
        plans = self.plans.items()
        return {
            "num_seeds": {name: plan.num_seeds for name, plan in plans},
            "global_batch": {name: plan.global_batch for name, plan in plans},
            "seed": next(plan.seed for _, plan in plans),
            "accumulate": self.accumulate,
        }

    def position(self, name: str, epoch: int, step: int) -> tuple[int, int]:
        """Return a task's own epoch and the step within it."""
        plan = self.plans[name]
        return divmod(epoch * self.steps_per_epoch + step, plan.steps_per_epoch)

    def seeds_in_window(self, name: str, epoch: int, step: int) -> int:
        """Return the number of a task's seeds that share an optimizer step with ``step``."""
        own = (self.position(name, epoch, each)[1] for each in self.window(step))
        return sum(map(self.plans[name].size, own))


def rank_share(ids: np.ndarray, rank: int, world: int) -> np.ndarray:
    """Return the positions in ``ids`` of the seeds of a global batch that one rank computes.

    The batch is ordered by id and cut into ``world`` pieces whose sizes differ by at most one.
    Ids are contiguous per part, so nearly every seed falls to the rank that owns it, and work is
    even however the seeds of a batch are spread over the parts.

    Args:
        ids: int64 ``[B]``, reshuffled global ids, in any order.

    Returns:
        int64, ``B // world`` to ``ceil(B / world)`` positions; none for some ranks if
        ``B < world``, but never for rank 0, whose module buffers the other ranks receive.
    """
    order = np.argsort(ids, kind="stable")
    return order[-(-rank * len(ids) // world) : -(-(rank + 1) * len(ids) // world)]


def resolve_fanouts(
    given: Sequence[int | Mapping[str, int]], etypes: Sequence[EdgeType]
) -> list[Fanout]:
    """Resolve ``sampling.fanout`` for the edge types of a graph.

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
            what = f"{name!r} is no edge type of this graph, which has: {existing}"
            raise ConfigError(what, where=where, remedy="name one of them, or its relation")
    numbers: dict[EdgeType, int] = {}
    # relations first: a complete name belongs to one edge type and takes precedence
    for name in sorted(names, key=lambda name: ":" in name):
        numbers |= dict.fromkeys(names[name], hop[name])
    for etype in etypes:
        if etype not in numbers:
            if _OTHERS not in hop:
                what = f"no number is set for the edge type {etype_str(etype)}"
                remedy = f"add it, or {_OTHERS!r} for all edge types that are not named"
                raise ConfigError(what, where=where, remedy=remedy)
            numbers[etype] = hop[_OTHERS]
    return {etype: numbers[etype] for etype in etypes}
