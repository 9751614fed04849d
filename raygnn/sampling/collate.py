"""Batches of graphs: order and collation."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from raygnn.errors import DataError
from raygnn.graph.arrays import as_matrix
from raygnn.graph.collection.mapped_collection import Collection, Sample
from raygnn.graph.data import EdgeType, etype_str
from raygnn.sampling.batch import GraphBatch
from raygnn.sampling.exchange import Exchange
from raygnn.sampling.features import SCALE, Inputs
from raygnn.sampling.plan import SeedPlan, rank_share
from raygnn.sampling.seeds import as_labels

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True)
class Collate:
    """Joins graphs into a `GraphBatch` and converts their arrays.

    Attributes:
        pattern: graph whose schema (types, arrays, row shapes) all others must have.
        inputs: node type → arrays of the model's input.
        edge_inputs: edge type → likewise, for types with any.
        dtype: compute dtype.
        whole: include all arrays, for a user's module.
        classes: number of classes; None for regression and labels.
        asked: the graphs are not the training graphs; targets may be unknown, -1 or NaN.
        labels: multi-label targets; see `as_labels`.
    """

    pattern: Sample
    inputs: Mapping[str, Inputs]
    edge_inputs: Mapping[EdgeType, Inputs]
    dtype: torch.dtype
    whole: bool
    classes: int | None
    asked: bool = False
    labels: bool = False

    def padding(self) -> Sample:
        """Return a graph to pad a batch with: one node of each type, no edges, zeros; the target
        is the pattern's, since zero may be invalid for a loss."""

        def zeros(arrays: Mapping[str, Tensor], rows: int) -> dict[str, Tensor]:
            return {n: array.new_zeros((rows, *array.shape[1:])) for n, array in arrays.items()}

        pattern, nothing = self.pattern, torch.empty(0, dtype=torch.int64)
        return Sample(
            num_nodes=dict.fromkeys(pattern.num_nodes, 1),
            edges=dict.fromkeys(pattern.edges, (nothing, nothing)),
            node_data={t: zeros(arrays, 1) for t, arrays in pattern.node_data.items()},
            edge_data={e: zeros(arrays, 0) for e, arrays in pattern.edge_data.items()},
            y=_target(pattern),
        )

    def __call__(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """Collate graphs into the fields of a `GraphBatch`, including ``y``."""
        sizes = {t: torch.tensor([s.num_nodes[t] for s in samples]) for t in self.pattern.num_nodes}
        edges, edge_sizes = {}, {}
        for etype in self.pattern.edges:
            edge_sizes[etype] = torch.tensor([len(s.edges[etype][0]) for s in samples])
            edges[etype] = self._joined_edges(etype, samples, sizes, edge_sizes[etype])
        x, categories = self._chosen(self.inputs, samples)
        edge_x, edge_categories = self._chosen(self.edge_inputs, samples)
        y = torch.stack([self._target(sample) for sample in samples])
        y = y.float() if self.classes is None else y.long()
        return {
            "sizes": sizes,
            "edge_sizes": edge_sizes,
            "edges": edges,
            "x": x,
            "categories": categories,
            "edge_x": edge_x,
            "edge_categories": edge_categories,
            "node_data": self._all(self.pattern.node_data, samples),
            "edge_data": self._all(self.pattern.edge_data, samples),
            "y": as_labels(y, "the batch") if self.labels else y,
        }

    def _chosen(
        self, inputs: Mapping[K, Inputs], samples: Sequence[Sample]
    ) -> tuple[dict[K, Tensor], dict[K, dict[str, Tensor]]]:
        x, categories = {}, {}
        for kind, chosen in inputs.items():
            parts = [self._column(kind, name, samples) for name in chosen.plain]
            for name in chosen.scaled:
                scale = self._column(kind, name + SCALE, samples)
                parts.append(self._column(kind, name, samples) * scale)
            if parts:
                x[kind] = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
            if chosen.categories:
                categories[kind] = {
                    name: _join([self._array(s, kind, name) for s in samples]).flatten().long()
                    for name in chosen.categories
                }
        return x, categories

    def _target(self, sample: Sample) -> Tensor:
        if not self.asked:
            return _target(sample)
        y, like = sample.y, _target(self.pattern)
        if self.classes is None:
            return torch.full(like.shape, torch.nan) if y is None else y
        return torch.full(like.shape, -1) if y is None else y.long().clamp(min=-1)

    def _array(self, sample: Sample, kind: Hashable, name: str) -> Tensor:
        """Return an array of a node or edge type; without rows if a graph has none of the type."""
        rows = arrays_of(sample, kind).get(name)
        return arrays_of(self.pattern, kind)[name][:0] if rows is None else rows

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

    def _column(self, kind: Hashable, name: str, samples: Sequence[Sample]) -> Tensor:
        joined = _join([self._array(s, kind, name).to(self.dtype) for s in samples])
        return as_matrix(joined)

    def _all(
        self, pattern: Mapping[K, Mapping[str, Tensor]], samples: Sequence[Sample]
    ) -> dict[K, dict[str, Tensor]]:
        """Collate all arrays, with ``whole``; integers and masks keep their dtype."""

        def converted(array: Tensor) -> Tensor:
            return array.to(self.dtype) if array.is_floating_point() else array

        return {
            kind: {n: _join([converted(self._array(s, kind, n)) for s in samples]) for n in named}
            for kind, named in (pattern.items() if self.whole else ())
        }


def _join(rows: Sequence[Tensor]) -> Tensor:
    """Concatenate rows; always a copy, since a model might write to the dataset's memory."""
    return rows[0].clone() if len(rows) == 1 else torch.cat(list(rows))


def arrays_of(sample: Sample, kind: Any) -> Mapping[str, Tensor]:
    """Return the arrays of a node type or an edge type."""
    data: Mapping[Any, Mapping[str, Tensor]]
    data = sample.node_data if isinstance(kind, str) else sample.edge_data
    return data.get(kind, {})


def _target(sample: Sample) -> Tensor:
    if sample.y is None:
        raise DataError("a graph has no target", remedy="check task.target")
    return sample.y


def check_schema(
    samples: Collection, pattern: Sample, inputs: Mapping[Any, Inputs], *, exact: bool
) -> None:
    """Check that graphs have the schema of the training graphs.

    Args:
        inputs: node or edge type → the arrays that the model reads.
        exact: the model receives all arrays, and whole numbers as they are.

    Raises:
        DataError: they differ.
    """
    meta = samples.meta

    def unlike(found: str, expected: str) -> DataError:
        what = f"the graphs have {found}, the training graphs {expected}"
        remedy = "give them the schema of the graphs that the model was trained on"
        return DataError(what, where=str(meta.directory), remedy=remedy)

    for kinds, types, expected in (
        ("node types", set(meta.nodes), set(pattern.num_nodes)),
        ("edge types", set(meta.edges), set(pattern.edges)),
    ):
        if types != expected:
            raise unlike(f"{kinds} {sorted(types)}", str(sorted(expected)))
    packed: dict[Any, Any] = {**meta.nodes, **meta.edges}
    for kind, frames in packed.items():
        likes, of = arrays_of(pattern, kind), kind if isinstance(kind, str) else etype_str(kind)
        read = likes if exact else names_of(inputs[kind]) if kind in inputs else ()
        for name in read:
            array, like = frames.data.get(name), likes[name]
            if array is None:
                if frames.num:
                    raise unlike(f"arrays {sorted(frames.data)} of {of}", f"also {name!r}")
                continue
            shape, wanted = list(array.shape), list(like.shape[1:])
            if shape != wanted:
                raise unlike(f"{of}/{name} with rows of shape {shape}", str(wanted))
            dtype, whole = getattr(torch, array.dtype), not like.is_floating_point()
            if dtype.is_floating_point == whole or (exact and whole and dtype != like.dtype):
                raise unlike(f"{of}/{name} of {dtype}", str(like.dtype))
    y, target = samples[0].y, pattern.y
    if y is not None and target is not None and y.shape != target.shape:
        raise unlike(f"targets of shape {list(y.shape)}", str(list(target.shape)))


def names_of(inputs: Inputs) -> tuple[str, ...]:
    """Return the names of the arrays that make a type's input."""
    scales = (name + SCALE for name in inputs.scaled)
    return *inputs.plain, *inputs.scaled, *scales, *inputs.categories


@dataclass
class GraphBatchMaker:
    """Builds batch ``(epoch, step)`` of one rank: plan, load, collate.

    Attributes:
        numbers: of the training graphs, int64 ``[plan.num_seeds]``.
    """

    plan: SeedPlan
    samples: Collection
    numbers: np.ndarray
    exchange: Exchange
    collate: Collate

    def __call__(self, epoch: int, step: int) -> GraphBatch:
        """Build a batch."""
        begin = time.perf_counter()
        chosen = self.numbers[self.plan.batch(epoch, step)]
        # in permuted order, not by number: neighbours in a dataset often have the same class
        world = self.exchange.world
        share = rank_share(np.arange(len(chosen)), world.rank, world.size)
        numbers = chosen[share]
        samples = [self.samples[number] for number in numbers.tolist()]
        loaded = time.perf_counter()
        return self._joined(
            numbers,
            samples,
            total=len(chosen),
            window=self.plan.seeds_in_window(step),
            epoch=epoch,
            step=step,
            seconds={"sample": loaded - begin, "features": -loaded, "exchange": 0.0},
        )

    @cached_property
    def identity(self) -> str:
        """Fingerprint of the data and their splits: see `BatchMaker`."""
        data = f"{self.samples.meta.digest} {self.samples.num} {self.collate.classes}"
        digest = hashlib.blake2b(data.encode(), digest_size=8)
        for split, numbers in sorted(self.samples.splits.items()):
            digest.update(split.encode() + numbers.astype(np.int64).tobytes())
        return digest.hexdigest()

    def join(
        self, numbers: np.ndarray, among: Collection | Sequence[Sample] | None = None
    ) -> GraphBatch:
        """Build a batch for evaluation of the graphs numbered ``numbers`` in ``among``; None = in
        the collection."""
        graphs, total = self.samples if among is None else among, len(numbers)
        samples = [graphs[number] for number in numbers.tolist()]
        return self._joined(numbers, samples, total=total, window=max(1, total), epoch=0, step=0)

    def _joined(self, numbers: np.ndarray, samples: list[Sample], **facts: Any) -> GraphBatch:
        weight = torch.ones(max(1, len(samples)))
        if not samples:  # this rank takes part in the step without influence
            numbers, samples = np.zeros(1, np.int64), [self.collate.padding()]
            weight = torch.zeros(1)
        parts = self.collate(samples)
        if facts.get("seconds"):
            facts["seconds"]["features"] += time.perf_counter()
        return GraphBatch(seeds=torch.from_numpy(numbers), weight=weight, **parts, **facts)
