"""Batches of graphs: order, collation, and skipping of bad graphs."""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from raygnn.errors import DataError, RaygnnError, TrainingError, error_text
from raygnn.graph.collection.mapped_collection import Sample, Samples
from raygnn.graph.data import EdgeType, etype_str
from raygnn.sampling.batch import GraphBatch
from raygnn.sampling.exchange import Exchange
from raygnn.sampling.features import SCALE, Inputs
from raygnn.sampling.loader import Note, silent
from raygnn.sampling.plan import SeedPlan, rank_share
from raygnn.sampling.seeds import as_labels

log = logging.getLogger("raygnn")

K = TypeVar("K", bound=Hashable)

_COMPARED = 8  # graphs from which the pattern is chosen
_TRIES = 100  # graphs tried to find ones that can be loaded


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
        categories: node type or edge type → name → number of categories.
        asked: the graphs are not those of the training; their targets may be unknown, -1 or NaN.
        labels: multi-label targets; see `as_labels`.
    """

    pattern: Sample
    inputs: Mapping[str, Inputs]
    edge_inputs: Mapping[EdgeType, Inputs]
    dtype: torch.dtype
    whole: bool
    classes: int | None
    categories: Mapping[Any, Mapping[str, int]] = field(default_factory=dict)
    asked: bool = False
    labels: bool = False

    def check(self, number: int, sample: Sample) -> None:
        """Raise DataError, naming the graph and the array, if its schema or values are invalid."""
        for kind, types, expected in (
            ("node types", set(sample.num_nodes), set(self.pattern.num_nodes)),
            ("edge types", set(sample.edges), set(self.pattern.edges)),
        ):
            if types != expected:
                text = f"has {kind} {sorted(types)}, {self._others} have {sorted(expected)}"
                raise _unlike(number, text)
        for ntype, num in sample.num_nodes.items():
            arrays = sample.node_data.get(ntype, {})
            self._check_arrays(number, ntype, arrays, self._read(ntype), num)
        for etype, ends in sample.edges.items():
            arrays = sample.edge_data.get(etype, {})
            likes = self._read(etype)
            self._check_arrays(number, etype_str(etype), arrays, likes, len(ends[0]))
        for of, counts in self.categories.items():
            for name, count in counts.items():
                text = f"{of if isinstance(of, str) else etype_str(of)}/{name}"
                _check_range(number, text, self._array(sample, of, name), count)
        y, shape = self._target(sample), _target(self.pattern).shape
        if y.shape != shape:
            text = f"has a target of shape {list(y.shape)}, {self._others} {list(shape)}"
            raise _unlike(number, text)
        if self.labels:
            as_labels(y, f"graph {number} of the dataset")
        elif self.classes is None:
            if not bool((torch.isfinite(y.double()) | (y.isnan() & self.asked)).all()):
                raise _unlike(number, f"has the target {y.tolist()}, which is not finite")
        elif y.is_floating_point() or y.dim():
            raise _unlike(number, f"has the target {y.tolist()}, expected one class number")
        else:
            _check_range(number, "the target", y.clamp(min=0) if self.asked else y, self.classes)

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
            parts = [self._column(kind, name, samples).flatten(1) for name in chosen.plain]
            parts += [self._scaled(kind, name, samples) for name in chosen.scaled]
            if parts:
                x[kind] = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
            if chosen.categories:
                categories[kind] = {
                    name: _join([self._array(s, kind, name) for s in samples]).flatten().long()
                    for name in chosen.categories
                }
        return x, categories

    @property
    def _others(self) -> str:
        """Name, in errors, of the graphs that all must be like."""
        return "those of the training" if self.asked else "others"

    def _target(self, sample: Sample) -> Tensor:
        if not self.asked:
            return _target(sample)
        y, like = sample.y, _target(self.pattern)
        if self.classes is None:
            return torch.full(like.shape, torch.nan) if y is None else y
        if y is None or (y.is_floating_point() and bool(y.isnan().all())):
            return torch.full(like.shape, -1)
        return y if y.is_floating_point() else y.long().clamp(min=-1)

    def _check_arrays(
        self,
        number: int,
        kind: str,
        arrays: Mapping[str, Tensor],
        likes: Mapping[str, Tensor],
        rows: int,
    ) -> None:
        for name, like in likes.items():
            array = arrays.get(name)
            if array is None and not rows:
                continue
            if array is None:
                names = ", ".join(sorted(arrays)) or "none"
                raise _unlike(number, f"has no array {name!r} of {kind}; there are: {names}")
            if tuple(array.shape) != (rows, *like.shape[1:]):
                shape, expected = list(array.shape), [rows, *like.shape[1:]]
                raise _unlike(number, f"has {kind}/{name} of shape {shape}, expected {expected}")
            if array.is_complex():
                raise _unlike(number, f"has {kind}/{name} of {array.dtype}, which is not supported")
            differs = array.is_floating_point() != like.is_floating_point()
            if self.whole and not like.is_floating_point() and array.dtype != like.dtype:
                differs = True  # integers are not converted, and ranks must have equal dtypes
            if differs:
                dtypes = f"of {array.dtype}, {self._others} {like.dtype}"
                raise _unlike(number, f"has {kind}/{name} {dtypes}")

    def _array(self, sample: Sample, kind: Hashable, name: str) -> Tensor:
        """Return an array of a node or edge type; without rows if a graph has none of the type."""
        rows = arrays_of(sample, kind).get(name)
        return arrays_of(self.pattern, kind)[name][:0] if rows is None else rows

    def _read(self, kind: str | EdgeType) -> Mapping[str, Tensor]:
        """Return the pattern's arrays of a node or edge type that every graph must have."""
        named = arrays_of(self.pattern, kind)
        if self.whole:
            return named
        chosen = self.inputs[kind] if isinstance(kind, str) else self.edge_inputs.get(kind)
        if chosen is None:
            return {}
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

    def _column(self, kind: Hashable, name: str, samples: Sequence[Sample]) -> Tensor:
        joined = _join([self._array(s, kind, name).to(self.dtype) for s in samples])
        return joined.unsqueeze(1) if joined.dim() == 1 else joined

    def _scaled(self, kind: Hashable, name: str, samples: Sequence[Sample]) -> Tensor:
        scale = self._column(kind, name + SCALE, samples)
        return self._column(kind, name, samples).flatten(1) * scale.flatten(1)

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


def get(samples: Samples, number: int) -> Sample:
    """Return graph ``number`` of a dataset.

    Raises:
        TrainingError: the dataset raised another error, which is the cause.
        RaygnnError: raised by the dataset.
    """
    try:
        return samples[number]
    except RaygnnError:
        raise
    except (Exception, SystemExit) as error:
        raise TrainingError(
            f"graph {number} could not be loaded: {error_text(error)}",
            where="the dataset",
            remedy="fix the dataset, or skip bad graphs with guard.bad_samples: 100",
        ) from error


def find_pattern(samples: Samples, numbers: np.ndarray, skip: bool) -> Sample:
    """Return the first graph with the most common schema of the first few.

    Raises:
        DataError: none of the first hundred can be loaded.
        RaygnnError: one cannot be loaded, and ``skip`` is False.
    """
    last: RaygnnError | None = None
    first: list[Sample] = []
    for number in numbers[:_TRIES].tolist():
        try:
            first.append(get(samples, number))
        except RaygnnError as error:
            if not skip:
                raise
            last = error
        if len(first) == _COMPARED:
            break
    if not first:
        raise DataError(
            f"none of the first {min(_TRIES, len(numbers))} training graphs can be loaded",
            remedy="fix the dataset",
        ) from last
    shapes = [_shape(sample) for sample in first]
    usual, _ = Counter(shapes).most_common(1)[0]
    return first[shapes.index(usual)]


def _shape(sample: Sample) -> str:
    """Return the schema of a graph as text."""
    arrays = {
        f"{kind}/{name}": (tuple(rows.shape[1:]), rows.is_floating_point())
        for kind, named in (*sample.node_data.items(), *sample.edge_data.items())
        for name, rows in named.items()
    }
    y = None if sample.y is None else (tuple(sample.y.shape), sample.y.is_floating_point())
    types = sorted(sample.num_nodes), sorted(map(etype_str, sample.edges))
    return repr((types, sorted(arrays.items()), y))


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


def _check_range(number: int, name: str, values: Tensor, count: int) -> None:
    if values.numel() and not 0 <= int(values.min()) <= int(values.max()) < count:
        low, high = int(values.min()), int(values.max())
        span = f"{low}" if low == high else f"{low} to {high}"
        raise _unlike(number, f"has {name} {span}, expected 0 to {count - 1}")


def _unlike(number: int, text: str) -> DataError:
    return DataError(
        f"graph {number} {text}",
        where=f"graph {number} of the dataset",
        remedy="give all graphs one schema, or skip bad ones with guard.bad_samples: 100",
    )


@dataclass
class GraphBatchMaker:
    """Builds batch ``(epoch, step)`` of one rank: plan, load, collate.

    Attributes:
        numbers: of the training graphs, int64 ``[plan.num_seeds]``.
        data: fingerprint of the graphs' contents, if known.
        skip: skip a graph that cannot be loaded, on all ranks, instead of raising its error.
        most_skipped: number of distinct graphs that may be skipped.
        note: called with ``"dataset"`` and ``"features"``.
        skipped: numbers of the skipped graphs of all ranks.
    """

    plan: SeedPlan
    samples: Samples
    numbers: np.ndarray
    exchange: Exchange
    collate: Collate
    data: str = ""
    skip: bool = False
    most_skipped: int = 100
    note: Note = silent
    skipped: set[int] = field(default_factory=set, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)

    def __call__(self, epoch: int, step: int) -> GraphBatch:
        """Build a batch. Collective with ``skip``.

        Raises:
            DataError: a graph has another schema.
            TrainingError: the dataset raised, or too many graphs were skipped.
        """
        begin, waited = time.perf_counter(), self.exchange.seconds
        self.note("dataset", epoch=epoch, step=step)
        world = self.exchange.world
        chosen = self.numbers[self.plan.batch(epoch, step)]
        # in permuted order, not by number: neighbours in a dataset often have the same class
        mine = chosen[rank_share(np.arange(len(chosen)), world.rank, world.size)]
        numbers, samples, bad = self._get(mine)
        left_out = self._agree(bad) if self.skip else 0
        loaded, waited = time.perf_counter(), self.exchange.seconds - waited
        self.note("features")
        return self._joined(
            numbers,
            samples,
            total=len(chosen) - left_out,
            window=self.plan.seeds_in_window(step),
            epoch=epoch,
            step=step,
            seconds={"sample": loaded - begin - waited, "features": -loaded, "exchange": waited},
        )

    def accumulating(self, batches: int) -> GraphBatchMaker:
        """See `Maker`."""
        return replace(self, plan=replace(self.plan, accumulate=batches))

    @cached_property
    def identity(self) -> str:
        """See `Maker`."""
        digest = hashlib.blake2b(
            f"{self.data} {self.samples.num} {self.collate.classes}".encode(), digest_size=8
        )
        for split, numbers in sorted(self.samples.splits.items()):
            digest.update(split.encode() + numbers.astype(np.int64).tobytes())
        return digest.hexdigest()

    def join(self, numbers: np.ndarray) -> GraphBatch:
        """Build a batch of these graphs for evaluation. Not collective."""
        kept, samples, _ = self._get(numbers)
        total = len(kept)
        return self._joined(kept, samples, total=total, window=max(1, total), epoch=0, step=0)

    def _get(self, numbers: np.ndarray) -> tuple[list[int], list[Sample], list[int]]:
        kept, samples, bad = [], [], []
        for number in numbers.tolist():
            try:
                with self._lock:  # evaluation and prefetching run in two threads
                    sample = get(self.samples, number)
                self.collate.check(number, sample)
            except RaygnnError as error:
                if not self.skip:
                    raise
                log.warning("graph %d is skipped: %s", number, error.what)
                bad.append(number)
                continue
            kept.append(number)
            samples.append(sample)
        return kept, samples, bad

    def _joined(self, numbers: list[int], samples: list[Sample], **facts: Any) -> GraphBatch:
        weight = torch.ones(max(1, len(samples)))
        if not samples:  # this rank takes part in the step without influence
            numbers, samples, weight = [0], [self.collate.padding()], torch.zeros(1)
        parts = self.collate(samples)
        if facts.get("seconds"):
            facts["seconds"]["features"] += time.perf_counter()
        return GraphBatch(seeds=torch.tensor(numbers), weight=weight, **parts, **facts)

    def _agree(self, bad: list[int]) -> int:
        """Return the number of graphs of this batch that all ranks skip. Collective."""
        total = int(self.exchange.sum(torch.tensor(len(bad))))
        if total:
            self.skipped.update(self.exchange.gather_rows(torch.tensor(bad).long()).tolist())
        if len(self.skipped) > self.most_skipped:
            raise TrainingError(
                f"{len(self.skipped)} graphs were skipped, more than guard.bad_samples "
                f"({self.most_skipped})",
                remedy="the ranks' logs say why each was skipped; fix the dataset, or raise "
                "guard.bad_samples",
            )
        return total
