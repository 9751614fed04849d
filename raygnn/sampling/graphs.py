"""Batches of whole graphs: which graphs when, whose they are, and how they become one."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raygnn.errors import DataError, RaygnnError, TrainingError
from raygnn.graph.data import EdgeType, etype_str
from raygnn.graph.sample import Sample, Samples
from raygnn.sampling.batch import GraphBatch
from raygnn.sampling.convert import to_compute
from raygnn.sampling.exchange import Exchange
from raygnn.sampling.inputs import SCALE, Inputs
from raygnn.sampling.plan import SeedPlan, rank_share
from raygnn.sampling.prefetch import Note, silent

log = logging.getLogger("raygnn")

_TRIES = 100  # graphs looked at for one that can be had, where padding or a pattern is needed


@dataclass(frozen=True)
class Collate:
    """Joins graphs into a `GraphBatch`; the one place where their numbers are converted.

    Attributes:
        pattern: a graph that all others must be like: types, arrays, shapes of rows.
        inputs: node type → which arrays are the model's input.
        dtype: to compute in.
        whole: whether all arrays go along, for a user's own module.
        classifies: whether targets are whole numbers.
    """

    pattern: Sample
    inputs: Mapping[str, Inputs]
    dtype: torch.dtype
    whole: bool
    classifies: bool

    def check(self, number: int, sample: Sample) -> None:
        """Refuse a graph that can not be joined to the others.

        Raises:
            DataError: naming the graph and the array.
        """
        for what, own, wanted in (
            ("node types", set(sample.num_nodes), set(self.pattern.num_nodes)),
            ("edge types", set(sample.edges), set(self.pattern.edges)),
        ):
            if own != wanted:
                raise _unlike(number, f"has {what} {sorted(own)}, others have {sorted(wanted)}")
        for ntype, num in sample.num_nodes.items():
            wanted_nodes = self._wanted(ntype)
            _check_arrays(number, ntype, sample.node_data.get(ntype, {}), wanted_nodes, num)
        for etype, ends in sample.edges.items():
            named = self.pattern.edge_data.get(etype, {}) if self.whole else {}
            found = sample.edge_data.get(etype, {})
            _check_arrays(number, etype_str(etype), found, named, len(ends[0]))
        y = _target(sample)
        if y.shape != _target(self.pattern).shape:
            expected = list(_target(self.pattern).shape)
            raise _unlike(number, f"has a target of shape {list(y.shape)}, others {expected}")
        if self.classifies and (y.is_floating_point() or y.dim()):
            raise _unlike(number, f"has the target {y.tolist()}, expected one class number")
        if not self.classifies and not bool(torch.isfinite(y.double()).all()):
            raise _unlike(number, f"has the target {y.tolist()}, which is not finite")

    def __call__(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """What a `GraphBatch` has of the graphs themselves, ``y`` included."""
        sizes = {t: torch.tensor([s.num_nodes[t] for s in samples]) for t in self.pattern.num_nodes}
        edges, edge_sizes = {}, {}
        for etype in self.pattern.edges:
            edge_sizes[etype] = torch.tensor([len(s.edges[etype][0]) for s in samples])
            edges[etype] = self._joined_edges(etype, samples, sizes, edge_sizes[etype])
        x, categories = {}, {}
        for ntype, chosen in self.inputs.items():
            parts = [self._column(ntype, name, samples).flatten(1) for name in chosen.plain]
            parts += [self._scaled(ntype, name, samples) for name in chosen.scaled]
            if parts:
                x[ntype] = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
            if chosen.categories:
                categories[ntype] = {
                    name: _join([s.node_data[ntype][name] for s in samples]).flatten().long()
                    for name in chosen.categories
                }
        y = torch.stack([_target(sample) for sample in samples])
        return {
            "sizes": sizes,
            "edge_sizes": edge_sizes,
            "edges": edges,
            "x": x,
            "categories": categories,
            "node_data": self._all_nodes(samples) if self.whole else {},
            "edge_data": self._all_edges(samples) if self.whole else {},
            "y": y.long() if self.classifies else y.float(),
        }

    def _wanted(self, ntype: str) -> Mapping[str, Tensor]:
        named = self.pattern.node_data.get(ntype, {})
        if self.whole:
            return named
        chosen = self.inputs[ntype]
        scales = [name + SCALE for name in chosen.scaled]
        read = (*chosen.plain, *chosen.scaled, *scales, *chosen.categories)
        return {name: named[name] for name in read}

    def _joined_edges(
        self,
        etype: EdgeType,
        samples: Sequence[Sample],
        sizes: Mapping[str, Tensor],
        counts: Tensor,
    ) -> tuple[Tensor, Tensor]:
        ends = []
        for end, ntype in enumerate((etype[0], etype[2])):
            first = sizes[ntype].cumsum(0) - sizes[ntype]
            local = _join([s.edges[etype][end] for s in samples])
            ends.append(local + torch.repeat_interleave(first, counts))
        return ends[0], ends[1]

    def _column(self, ntype: str, name: str, samples: Sequence[Sample]) -> Tensor:
        """``[N, …]`` in the compute dtype; at least two-dimensional."""
        joined = _join([s.node_data[ntype][name].to(self.dtype) for s in samples])
        return joined.unsqueeze(1) if joined.dim() == 1 else joined

    def _scaled(self, ntype: str, name: str, samples: Sequence[Sample]) -> Tensor:
        scale = self._column(ntype, name + SCALE, samples)
        return self._column(ntype, name, samples).flatten(1) * scale.flatten(1)

    def _all_nodes(self, samples: Sequence[Sample]) -> dict[str, dict[str, Tensor]]:
        return {
            ntype: {
                name: _join(to_compute([s.node_data[ntype][name] for s in samples], self.dtype))
                for name in named
            }
            for ntype, named in self.pattern.node_data.items()
        }

    def _all_edges(self, samples: Sequence[Sample]) -> dict[EdgeType, dict[str, Tensor]]:
        return {
            etype: {
                name: _join(to_compute([s.edge_data[etype][name] for s in samples], self.dtype))
                for name in named
            }
            for etype, named in self.pattern.edge_data.items()
        }


@dataclass
class GraphBatchMaker:
    """Makes batch ``(epoch, step)`` of one rank: plan, get, join.

    Attributes:
        numbers: of the graphs to train on, int64 ``[plan.num_seeds]``.
        skip: leave out a graph that can not be had, on all ranks; else its error is raised.
        most_skipped: how many may be left out, over all ranks, before that is an error.
        note: told ``"dataset"`` and ``"features"``.
        skipped: how many were.
    """

    plan: SeedPlan
    samples: Samples
    numbers: np.ndarray
    exchange: Exchange
    collate: Collate
    skip: bool = False
    most_skipped: int = 100
    note: Note = silent
    skipped: int = field(default=0, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)

    def __call__(self, epoch: int, step: int) -> GraphBatch:
        """Collective where samples may be left out.

        Raises:
            DataError: a graph that is unlike the others.
            TrainingError: the dataset raised, or too many were left out.
        """
        begin = time.perf_counter()
        self.note("dataset", epoch=epoch, step=step)
        world = self.exchange.world
        chosen = self.numbers[self.plan.batch(epoch, step)]
        mine = chosen[rank_share(chosen, world.rank, world.size)]
        numbers, found, skipped = self._get(mine)
        if self.skip:
            skipped = int(self.exchange.sum(torch.tensor(skipped)))
            self._count(skipped)
        loaded = time.perf_counter()
        self.note("features")
        return self._joined(
            numbers,
            found,
            total=len(chosen) - skipped,
            window=self.plan.seeds_in_window(step),
            epoch=epoch,
            step=step,
            skipped=skipped,
            seconds={"sample": loaded - begin, "features": -loaded},
        )

    def join(self, numbers: np.ndarray) -> GraphBatch:
        """A batch of the graphs of these numbers, for evaluation. Not collective."""
        kept, found, skipped = self._get(numbers)
        total = len(numbers) - skipped
        return self._joined(kept, found, total=total, window=max(1, total), epoch=0, step=0)

    def _get(self, numbers: np.ndarray) -> tuple[list[int], list[Sample], int]:
        """The graphs that could be had, and how many could not."""
        kept, found = [], []
        for number in numbers.tolist():
            try:
                with self._lock:  # evaluation and preparation are two threads
                    sample = self.samples[number]
                self.collate.check(number, sample)
            except Exception as error:
                what = f"{type(error).__name__}: {error}"
                if not self.skip:
                    if isinstance(error, RaygnnError):
                        raise
                    raise TrainingError(
                        f"graph {number} could not be had: {what}",
                        where="the dataset",
                        remedy="mend the dataset, or set guard.on_bad_sample to skip",
                    ) from error
                log.warning("graph %d is left out: %s", number, what)
                continue
            kept.append(number)
            found.append(sample)
        return kept, found, len(numbers) - len(kept)

    def _joined(self, numbers: list[int], found: list[Sample], **facts: Any) -> GraphBatch:
        weight = torch.ones(max(1, len(found)))
        if not found:  # keep the step, without influence
            numbers, found, weight = [0], [self.collate.pattern], torch.zeros(1)
        parts = self.collate(found)
        if facts.get("seconds"):
            facts["seconds"]["features"] += time.perf_counter()
        return GraphBatch(seeds=torch.tensor(numbers), weight=weight, **parts, **facts)

    def _count(self, skipped: int) -> None:
        self.skipped += skipped
        if self.skipped > self.most_skipped:
            raise TrainingError(
                f"{self.skipped} graphs were left out, more than guard.bad_samples "
                f"({self.most_skipped})",
                remedy="see the ranks' logs for what was wrong with them; mend the dataset, or "
                "raise guard.bad_samples",
            )


def find_pattern(samples: Samples, numbers: np.ndarray, skip: bool) -> Sample:
    """The first graph that can be had: what all others are compared with.

    Raises:
        DataError: none of the first hundred can be had.
        Exception: whatever the dataset raises, where nothing is to be left out.
    """
    last: Exception | None = None
    for number in numbers[:_TRIES].tolist():
        try:
            return samples[number]
        except Exception as error:
            if not skip:
                raise
            last = error
    raise DataError(
        f"none of the first {min(_TRIES, len(numbers))} graphs to train on can be had",
        remedy="mend the dataset",
    ) from last


def _join(rows: Sequence[Tensor]) -> Tensor:
    return rows[0] if len(rows) == 1 else torch.cat(list(rows))


def _target(sample: Sample) -> Tensor:
    if sample.y is None:
        raise DataError("a graph has no target", remedy="check task.target")
    return sample.y


def _check_arrays(
    number: int,
    kind: str,
    found: Mapping[str, Tensor],
    wanted: Mapping[str, Tensor],
    rows: int,
) -> None:
    for name, like in wanted.items():
        array = found.get(name)
        if array is None:
            there = ", ".join(sorted(found)) or "none"
            raise _unlike(number, f"has no array {name!r} of {kind}; there are: {there}")
        if tuple(array.shape) != (rows, *like.shape[1:]):
            shape, expected = list(array.shape), [rows, *like.shape[1:]]
            raise _unlike(number, f"has {kind}/{name} of shape {shape}, expected {expected}")
        if array.is_floating_point() != like.is_floating_point():
            raise _unlike(number, f"has {kind}/{name} of {array.dtype}, others {like.dtype}")


def _unlike(number: int, what: str) -> DataError:
    return DataError(
        f"graph {number} {what}",
        where=f"graph {number} of the dataset",
        remedy="make all graphs alike, or leave such ones out with guard.on_bad_sample: skip",
    )
