"""Which seeds a rank has in a step, of one task or of several, and where its blocks start."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from raygnn.graph.data import EdgeType
from raygnn.sampling import kernels
from raygnn.sampling.batch import Part
from raygnn.sampling.exchange import World
from raygnn.sampling.negatives import ENDS
from raygnn.sampling.plan import SeedPlan, SeveralPlan, Steps, rank_share
from raygnn.sampling.sampler import Banned
from raygnn.sampling.seeds import Seeds, Start, Turn


@dataclass(frozen=True)
class Dealt:
    """A rank's seeds in a step.

    Attributes:
        nodes, banned: see `Start`.
        fields: what a `Batch` has of its seeds.
    """

    nodes: Mapping[str, np.ndarray]
    banned: Banned | None
    fields: Mapping[str, Any]


class Deal(Protocol):
    """What deals seeds: `OneDeal` or `SeveralDeal`."""

    @property
    def plan(self) -> Steps: ...

    def __call__(self, epoch: int, step: int) -> Dealt:
        """Collective."""
        ...

    def accumulating(self, batches: int) -> Deal:
        """The same, of whose batches so many make an optimizer step together."""
        ...


@dataclass(frozen=True)
class OneDeal:
    """Of one task."""

    plan: SeedPlan
    seeds: Seeds
    world: World

    def accumulating(self, batches: int) -> OneDeal:
        """See `Deal`."""
        return replace(self, plan=replace(self.plan, accumulate=batches))

    def __call__(self, epoch: int, step: int) -> Dealt:
        chosen = self.plan.batch(epoch, step)
        start, fields = self.start(chosen, epoch, step)
        fields |= {"window": self.plan.seeds_in_window(step)}
        return Dealt(start.nodes, start.banned, fields)

    def start(self, chosen: np.ndarray, epoch: int, step: int) -> tuple[Start, dict[str, Any]]:
        """Where this rank starts, and what a `Batch` or a `Part` has of its seeds, but ``window``.

        Args:
            chosen: numbers of all ranks' seeds.
            epoch, step: of the run.
        """
        mine = rank_share(self.seeds.ids(chosen), self.world.rank, self.world.size)
        weight = torch.ones(max(1, len(mine)))
        if not len(mine):  # a short last batch: keep the step, without influence
            mine, weight = np.zeros(1, np.int64), torch.zeros(1)
        turn = Turn(chosen, mine, epoch, step)
        start = self.seeds.start(turn)
        return start, {
            "seeds": torch.from_numpy(self.seeds.ids(turn.index)),
            "y": start.y,
            "weight": weight,
            "total": len(chosen),
            "pairs": start.pairs,
            "relation": start.relation,
            "instead": dict(start.instead),
        }


@dataclass(frozen=True)
class SeveralDeal:
    """Of several tasks: their seeds share one neighbourhood, in which nothing is drawn that one of
    them is to predict.

    Attributes:
        plan: of all; tasks: of each, by name.
    """

    plan: SeveralPlan
    tasks: Mapping[str, OneDeal]
    _empty: Tensor = field(default_factory=lambda: torch.empty(0), init=False)

    def accumulating(self, batches: int) -> SeveralDeal:
        """See `Deal`."""
        return replace(self, plan=replace(self.plan, accumulate=batches))

    def __call__(self, epoch: int, step: int) -> Dealt:
        starts, fields = {}, {}
        for name, deal in self.tasks.items():
            chosen = deal.plan.batch(*self.plan.position(name, epoch, step))
            starts[name], fields[name] = deal.start(chosen, epoch, step)
            fields[name]["window"] = self.plan.seeds_in_window(name, epoch, step)
        nodes, numbers = _together({name: start.nodes for name, start in starts.items()})
        parts = {}
        for name, start in starts.items():
            parts[name] = Part(**fields[name] | _renumbered(start, numbers[name]))
        return Dealt(
            nodes,
            _all_banned(start.banned for start in starts.values()),
            {
                **dict.fromkeys(("seeds", "y", "weight"), self._empty),
                "total": sum(part.total for part in parts.values()),
                "window": sum(part.window for part in parts.values()),
                "parts": parts,
            },
        )


def _together(
    starts: Mapping[str, Mapping[str, np.ndarray]],
) -> tuple[dict[str, np.ndarray], dict[str, dict[str, np.ndarray]]]:
    """The nodes of all tasks, each once by type, and what number each task's have in them."""
    nodes: dict[str, np.ndarray] = {}
    numbers: dict[str, dict[str, np.ndarray]] = {name: {} for name in starts}
    for ntype in dict.fromkeys(ntype for start in starts.values() for ntype in start):
        pieces = {name: start[ntype] for name, start in starts.items() if ntype in start}
        found = kernels.relabel(np.empty(0, np.int64), np.concatenate(list(pieces.values())))
        nodes[ntype], local = found
        stops = np.cumsum([len(piece) for piece in pieces.values()])
        for name, piece in zip(pieces, np.split(local, stops[:-1])):
            numbers[name][ntype] = piece
    return nodes, numbers


def _renumbered(start: Start, numbers: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """``nodes``, ``pairs`` and ``instead`` of a `Part`.

    Args:
        numbers: node type → where the nodes of ``start`` are among those of all tasks.
    """
    found = {ntype: torch.from_numpy(local) for ntype, local in numbers.items()}
    if start.pairs is None:
        (nodes,) = found.values()
        return {"nodes": nodes}
    assert start.etype is not None
    ntypes = dict(zip(ENDS, (start.etype[0], start.etype[2])))
    pairs = [found[t][rows] for t, rows in zip(ntypes.values(), start.pairs)]
    instead = {end: found[ntypes[end]][rows] for end, rows in start.instead.items()}  # type: ignore[index]
    return {"pairs": torch.stack(pairs), "instead": instead}


def _all_banned(each: Iterator[Banned | None]) -> Banned | None:
    pairs: dict[EdgeType, list[tuple[np.ndarray, np.ndarray]]] = {}
    for banned in each:
        for etype, ends in (banned.pairs if banned else {}).items():
            pairs.setdefault(etype, []).append(ends)
    if not pairs:
        return None
    return Banned(
        {e: tuple(np.concatenate(ends) for ends in zip(*found)) for e, found in pairs.items()}  # type: ignore[misc]
    )
