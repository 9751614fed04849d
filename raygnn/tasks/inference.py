"""Exact inference: outputs of requested nodes with full neighbourhoods, on all ranks together.

Networks that expose their layers are run layer by layer (as in GraphSAGE's and DGL's full-graph
inference): the last layer for the requested nodes, each earlier one for the nodes that the next
layer reads. A layer computes each node once, which is the least possible work, and memory is
bounded by a chunk and the rank's owned rows. Other modules are run on minibatches with full fanout,
which is exact as well, but visits an edge once for every batch that reaches it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn

from raygnn.graph.data import EdgeType, etype_str
from raygnn.graph.staging.mapped import map_table
from raygnn.graph.staging.shard import FEATURES as EDGE_FEATURES
from raygnn.graph.staging.shard import Shard
from raygnn.models.heads import NodeModel
from raygnn.models.network import Encoder, Network
from raygnn.models.typed_layers import Combined, Degrees, Hidden, Layer, TypedLayer
from raygnn.sampling import kernels
from raygnn.sampling.batch import Block, GraphBatch
from raygnn.sampling.drawing import ALL
from raygnn.sampling.exchange import (
    Exchange,
    Ids,
    World,
    as_ids,
    ask_owners,
    name_to_owners,
    row_bytes,
)
from raygnn.sampling.features import (
    FEATURES,
    BufferRing,
    FeatureRows,
    FeatureStore,
    Inputs,
    assemble,
    degree_column,
)
from raygnn.sampling.plan import Fanout
from raygnn.sampling.sampler import Bounds, Frontier, NeighborSampler, Timing

T = TypeVar("T")

CHUNK_EDGES = 1_000_000  # limit of a chunk
CHUNK_BYTES = 1 << 27  # limit of the rows of a chunk's sources, if each has one edge
_HEAD_ROWS = 1 << 16  # rows that a head reads at a time
_NO_IDS = np.empty(0, np.int64)


@dataclass(frozen=True)
class NodeRows:
    """Rows that a model computed for nodes of this rank."""

    ids: np.ndarray  # int64 [n], global, ascending
    rows: Tensor  # float32 [n, D], on the CPU

    def select(self, ids: Ids) -> Tensor:
        """Return the rows of ``ids``, in this order."""
        ids = as_ids(ids)
        if np.array_equal(ids, self.ids):
            return self.rows
        at = np.searchsorted(self.ids, ids)
        assert np.array_equal(self.ids.take(at, mode="clip"), ids)
        return self.rows[torch.from_numpy(at)]


class LayerInput(NamedTuple):
    """Arguments of `Stack.layer` for one chunk of nodes."""

    block: Block
    h: Hidden
    degree: Degrees
    combined: Combined | None = None
    projected: Combined | None = None

    def to(self, device: torch.device) -> LayerInput:
        if device.type == "cpu":
            return self
        h, degree = _on(device, self.h), _on(device, self.degree)
        done = [c and _on(device, c) for c in (self.combined, self.projected)]
        return LayerInput(self.block.to(device), h, degree, *done)


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Switch to evaluation mode in the block, then restore the previous mode."""
    training = module.training
    module.eval()
    try:
        yield
    finally:
        module.train(training)


class Inference:
    """Runs a model over nodes of the complete graph. Collective: all ranks call each method
    together.

    Args:
        store: input features (and degrees and weights if needed).
        inputs: node type → columns of the model's input.
        num_layers: of the model.
        batch_size: seeds per minibatch, for modules without layers; None = 1,024.
        timing: see `NeighborSampler`; then nodes have times.
        at: time of all nodes; None = their own.
        hops: fanouts from the nodes outward, for deterministic samples; None = all neighbours.
        spare: bytes that may be kept between calls, see `outputs`.
        once: see `NeighborSampler`.
    """

    def __init__(
        self,
        shard: Shard,
        exchange: Exchange,
        store: FeatureStore,
        inputs: Mapping[str, Inputs],
        *,
        num_layers: int,
        batch_size: int | None,
        device: torch.device,
        timing: Timing | None = None,
        at: int | None = None,
        hops: Sequence[Fanout] | None = None,
        spare: float = 0,
        once: bool = False,
    ):
        self._shard, self._exchange, self._device = shard, exchange, device
        self._store, self._inputs = store, inputs
        self._num_layers, self._batch_size, self._spare = num_layers, batch_size or 1024, spare
        self._sampler = NeighborSampler(shard, exchange, timing=timing, once=once)
        # a rank has the in-edges of its own nodes in either topology: no exchange is needed
        alone = Exchange(World(0, 1))
        self._own_sampler = NeighborSampler(shard, alone, timing=timing)
        self._timed, self._at = timing is not None, cast("int", at)
        self._represented: dict[str, NodeRows] | None = None
        self._kept: tuple[Frontier, list[LayerInput]] | None = None
        self._hops = hops or [dict.fromkeys(shard.etypes, ALL)] * num_layers

    @torch.no_grad()
    def outputs(
        self,
        model: nn.Module,
        ntype: str,
        owned: Ids,
        fanouts: Sequence[Fanout] | None = None,
        *,
        times: np.ndarray | None = None,
        layers: int | None = None,
        again: bool = False,
    ) -> Tensor:
        """Return outputs (float32 ``[n, out_features]``, CPU) of nodes that this rank owns.

        Args:
            ntype: their type; the model's target.
            owned: int64 ``[n]``, distinct global ids within this rank's range, on any device.
            fanouts: neighbours per hop, sampled independently of the other requested nodes; None =
                all, which is exact.
            times: int64 ``[n]``, time of each node; None = one time for all, or none.
            layers: of a `Network`, after which its hidden rows are returned; None = all.
            again: keep the first layer's aggregated inputs, if they depend on no parameters and
                fit, since the same nodes will be requested again.
        """
        owned = as_ids(owned)
        with evaluating(model):
            sampled = fanouts is not None or times is not None
            if sampled or not isinstance(model, Network | NodeModel):
                return self._by_batches(model, ntype, owned, fanouts, times)
            if isinstance(model, Network):
                nodes = {ntype: np.sort(owned)}
                return self._layer_by_layer(model, nodes, layers, again=again)[ntype].select(owned)
            rows = self.represent(model.encoder, {ntype: owned}, again=again)[ntype]
            return self._headed(model, rows.select(owned))

    @torch.no_grad()
    def encode(
        self, model: Encoder, nodes: Mapping[str, np.ndarray], times: Mapping[str, np.ndarray]
    ) -> Hidden:
        """Return an encoder's outputs of any nodes, each at its own time: float32, on the device.
        ``nodes``, ``times``: node type → int64 ``[n]``, distinct as pairs."""
        with evaluating(model):
            given, _ = self.neighbourhood(nodes, self._hops, times)
            return {t: rows.float() for t, rows in model.represent(*given).items()}

    @torch.no_grad()
    def represent(
        self, model: Encoder, nodes: Mapping[str, np.ndarray], *, again: bool = False
    ) -> dict[str, NodeRows]:
        """Return an encoder's outputs of this rank's nodes among the nodes that any rank names.

        Args:
            nodes: node type → int64 ``[n]``, global ids, of any rank; the same types on all ranks.
            again: see `outputs`.
        """
        if self._represented is not None:
            return self._represented
        named = name_to_owners(nodes, self._shard.bounds, self._exchange)
        own = {t: np.unique(ids) for t, ids in named.items()}
        with evaluating(model):
            if isinstance(model, Network):
                return self._layer_by_layer(model, own, again=again)

            def rows_of(t: str, ids: np.ndarray) -> Tensor:
                return self._by_batches(lambda *given: model.represent(*given)[t], t, ids)

            return {t: NodeRows(ids, rows_of(t, ids)) for t, ids in own.items()}

    @contextmanager
    def represented(
        self, model: Encoder, nodes: Mapping[str, np.ndarray], *, again: bool = False
    ) -> Iterator[None]:
        """Compute these nodes once; in the block `represent` and `outputs` of this encoder reuse
        the result."""
        self._represented = self.represent(model, nodes, again=again)
        try:
            yield
        finally:
            self._represented = None

    def _headed(self, model: NodeModel, rows: Tensor) -> Tensor:
        head = copy.deepcopy(model.head).float().eval()
        return torch.cat([head(some.to(self._device)).cpu() for some in rows.split(_HEAD_ROWS)])

    def _layer_by_layer(
        self, model: Network, nodes: Frontier, layers: int | None = None, *, again: bool = False
    ) -> dict[str, NodeRows]:
        """Return the outputs of a network's first ``layers`` (None = all) for owned nodes
        (ascending)."""
        layers = model.num_layers if layers is None else layers
        needed = self._needed(model, nodes, layers)
        inputs, tables = self._first_inputs(model, needed[0], again), Hidden()
        for number, ids in enumerate(needed):
            if number:
                fanout = self._hops[self._num_layers - 1 - number]
                layer = cast("Layer", model.layers[number])
                inputs = self._next_inputs(layer, tables, needed[number - 1], ids, fanout)
            tables, filled = {}, dict.fromkeys(ids, 0)
            for given in inputs:
                out = model.layer(number, *given.to(self._device))
                for t, start in filled.items():
                    if t not in tables:
                        width = out[t].shape[1:]
                        tables[t] = map_table(out[t].dtype, width, len(ids[t]), large=True)
                    filled[t] += len(out[t])
                    tables[t][start : filled[t]] = out[t]
        return {t: NodeRows(needed[-1][t], rows.float()) for t, rows in tables.items()}

    def _needed(self, model: Network, nodes: Frontier, layers: int) -> list[Frontier]:
        """Return the owned nodes (ascending) that each layer must compute, from the first on."""
        needed = [{t: nodes.get(t, _NO_IDS) for t in model.computes(layers - 1)}]
        for number in reversed(range(layers - 1)):
            needed.insert(0, self._read_by(needed[0], model.computes(number)))
        return needed

    def _read_by(self, nodes: Frontier, ntypes: Sequence[str]) -> Frontier:
        """Return the owned nodes (ascending) that a layer reads to compute all ranks' ``nodes``:
        these nodes and their neighbours, of types ``ntypes``."""
        shard = self._shard
        marks = {t: np.zeros(shard.owned(t), np.bool_) for t in ntypes}

        def mark(ids: Frontier) -> None:
            for t, some in ids.items():
                marks[t][some - shard.first(t)] = True

        mark(nodes)
        if self._exchange.max(int(not all(marked.all() for marked in marks.values()))):
            for chunk in self._chunks(nodes, 1):
                others = {t: [_NO_IDS] for t in marks}
                for source, rows, chosen in (
                    (e[0], shard.topology[e], chunk[e[2]]) for e in shard.etypes if e[0] in marks
                ):
                    given = rows.indptr, rows.src, chosen - rows.first, shard.first(source)
                    others[source].append(kernels.mark_sources(*given, marks[source]))
                named = {t: np.concatenate(ids) for t, ids in others.items()}
                mark(name_to_owners(named, shard.bounds, self._exchange))
        return {t: np.flatnonzero(marked) + shard.first(t) for t, marked in marks.items()}

    def _first_inputs(self, model: Network, ids: Frontier, again: bool) -> Iterator[LayerInput]:
        """Yield the first layer's inputs, for chunks of owned nodes."""
        width = max(i.width(self._shard.node_data[t]) for t, i in self._inputs.items())
        how = model.first_combine if all(i.one_table for i in self._inputs.values()) else None
        # a layer that narrows its inputs does so before aggregation
        if how is None or width > cast("Layer", model.layers[0]).width:
            for block, _, rows in self._gathered(self._from_store, ids, width, self._hops[-1]):
                x, categories = assemble(rows, self._inputs, block.until)
                moved = {t: _on(self._device, c) for t, c in categories.items()}
                h = model.inputs(_on(self._device, x), moved)
                yield LayerInput(block, h, self._degrees(rows))
            return
        kept = self._kept
        if kept is None or self._exchange.max(int(not _same(kept[0], ids))):
            chunks = self._combined(ids, "weighted" if how == "gcn" else how)
            if not (again and self._fits(ids)):
                yield from chunks
                return
            kept = self._kept = ids, list(chunks)
        yield from kept[1]

    def _combined(self, ids: Frontier, how: str) -> Iterator[LayerInput]:
        for chunk in self._chunks(ids, 1):
            (block,), nodes, draws = self._own_sampler.sample_open(
                chunk, self._hops[-1:], epoch=0, step=0, times=self._all_at(chunk)
            )
            rows, combined = self._store.combine(nodes, draws, how)
            x, _ = assemble(rows, self._inputs, {})
            yield LayerInput(block, x, self._degrees(rows), combined)

    def _fits(self, ids: Frontier) -> bool:
        size = {t: self._store.row_bytes(t) for t in self._store.ntypes}
        total = sum(
            len(nodes) * (size[t] + sum(size[e[0]] + 8 for e in self._shard.etypes if e[2] == t))
            for t, nodes in ids.items()
        )
        for etype, rows in self._shard.topology.items():
            nodes = ids.get(etype[2], _NO_IDS) - rows.first
            edges = int((rows.indptr[nodes + 1] - rows.indptr[nodes]).sum())
            total += edges * sum(row_bytes(column) for column in rows.carried.values())
        return not self._exchange.max(int(total > self._spare))

    def _next_inputs(
        self, layer: Layer, tables: Hidden, held: Frontier, ids: Frontier, fanout: Fanout
    ) -> Iterator[LayerInput]:
        """Yield a later layer's inputs, for chunks of owned nodes. A layer that narrows rows does
        so before they are gathered and sent. ``tables``: node type → the previous layer's rows of
        the nodes in ``held``."""
        shard = self._shard
        narrows = layer.narrows(max(rows.shape[1] for rows in tables.values()))
        columns = {t: {FEATURES: rows} for t, rows in tables.items()}
        if narrows:
            of = partial(self._projected, cast("TypedLayer", layer))
            columns = {t: dict(of(t, rows)) for t, rows in tables.items()}
        for etype in shard.etypes:
            if (t := etype[2]) in tables:
                own = torch.from_numpy(held[t] - shard.first(t))
                columns[t][degree_column(etype)] = shard.in_degree(etype)[own]

        places = {t: np.full(shard.owned(t), -1) for t in columns}
        for t, nodes in held.items():
            places[t][nodes - shard.first(t)] = np.arange(len(nodes))
        ring = BufferRing(1)  # a chunk's rows are used before the next chunk's are gathered

        def rows_of(t: str, nodes: np.ndarray) -> list[Tensor]:
            index = torch.from_numpy(places[t][nodes - shard.first(t)])
            return [ring.gather(f"{t}/{n}", column, index) for n, column in columns[t].items()]

        def gather(sources: Frontier) -> FeatureRows:
            bounds, exchange = shard.bounds, self._exchange
            return {
                t: dict(
                    zip(names, ask_owners(sources[t], bounds[t], exchange, partial(rows_of, t)))
                )
                for t, names in columns.items()
                if names  # a node type without edges has no projected columns
            }

        width = max(sum(c.shape[1:].numel() for c in named.values()) for named in columns.values())
        for block, sources, rows in self._gathered(gather, ids, width, fanout):
            degrees = self._degrees(rows)
            if not narrows:
                h = {t: column[FEATURES] for t, column in rows.items()}
                yield LayerInput(block, h, degrees)
                continue
            h = {}
            for t, table in tables.items():
                own = places[t][sources[t][: block.num_dst[t]] - shard.first(t)]
                h[t] = table[torch.from_numpy(own)]
            projected = {e: rows[e[0]][etype_str(e)] for e in layer.etypes}
            yield LayerInput(block, h, degrees, projected=projected)

    def _projected(
        self, layer: TypedLayer, ntype: str, rows: Tensor
    ) -> Iterator[tuple[str, Tensor]]:
        """Project a layer's rows for each edge type, by name, on the CPU."""
        pieces = [layer.project(ntype, some.to(self._device)) for some in rows.split(_HEAD_ROWS)]
        for etype in pieces[0]:
            yield etype_str(etype), torch.cat([piece[etype].cpu() for piece in pieces])

    def _gathered(
        self, gather: Callable[[Frontier], FeatureRows], ids: Frontier, width: int, fanout: Fanout
    ) -> Iterator[tuple[Block, Frontier, FeatureRows]]:
        """Yield blocks of owned nodes, their sources, and the rows of these."""
        bounds = None
        if self._timed:
            bounds = Bounds(np.array([self._at]), dict.fromkeys(self._shard.ntypes, 62))
        for chunk in self._chunks(ids, width):
            block, sources = self._own_sampler.hop(chunk, fanout, bounds=bounds)
            yield block, sources, gather(sources)

    def _from_store(self, sources: Frontier) -> FeatureRows:
        return self._store.gather({t: sources[t] for t in self._store.ntypes})

    def _degrees(self, rows: FeatureRows) -> dict[EdgeType, Tensor]:
        return {
            e: rows[e[2]][degree_column(e)]
            for e in self._shard.etypes
            if degree_column(e) in rows.get(e[2], {})
        }

    def _chunks(self, nodes: Frontier, width: int) -> Iterator[Frontier]:
        """Yield chunks of owned nodes with at most ``CHUNK_EDGES`` in-edges each, or one node.
        Every rank yields equally many (some may be empty), as the work on each is collective.
        ``width``: of the sources' rows, without edge features; the same on all ranks."""
        shard = self._shard
        carried = [rows.carried.get(EDGE_FEATURES) for rows in shard.topology.values()]
        width = max(1, width) + max((c.shape[1] for c in carried if c is not None), default=0)
        most = max(1, min(CHUNK_EDGES, CHUNK_BYTES // (4 * width)))
        for ntype, ids in nodes.items():
            edges = np.arange(len(ids) + 1)  # each node counts as an edge
            for etype in shard.etypes:
                if etype[2] == ntype:
                    degree = shard.in_degree(etype).numpy()[ids - shard.first(ntype)]
                    edges[1:] += np.cumsum(degree)
            marks = np.arange(most, int(edges[-1]) + most, most)
            stops = np.searchsorted(edges, marks, side="right") - 1
            cuts = np.full(max(1, self._exchange.max(len(stops))), len(ids))
            cuts[: len(stops)] = stops
            for some in np.split(ids, cuts[:-1]):
                yield {**dict.fromkeys(shard.ntypes, _NO_IDS), ntype: some}

    def _by_batches(
        self,
        model: Callable[..., Tensor],
        ntype: str,
        owned: np.ndarray,
        fanouts: Sequence[Fanout] | None = None,
        times: np.ndarray | None = None,
    ) -> Tensor:
        size = self._batch_size
        fanouts = fanouts or self._hops
        pieces: list[Tensor] = []
        for number in range(max(1, -(-self._exchange.max(len(owned)) // size))):
            chunk = slice(number * size, (number + 1) * size)
            ids, when = owned[chunk], None if times is None else {ntype: times[chunk]}
            if not (real := len(ids)):  # the other ranks still need this one's rows
                shard = self._shard
                ids = np.array([min(shard.first(ntype), shard.num_nodes(ntype) - 1)])
                when = None if times is None else {ntype: np.zeros(1, np.int64)}
            given, _ = self.neighbourhood({ntype: ids}, fanouts, when)
            pieces.append(model(*given)[:real].float().cpu())
        return torch.cat(pieces)

    def neighbourhood(
        self,
        seeds: Mapping[str, np.ndarray],
        fanouts: Sequence[Fanout],
        times: Mapping[str, np.ndarray] | None,
    ) -> tuple[tuple[Any, ...], Frontier]:
        """Sample the neighbourhood of nodes, at their times. Return arguments of `Encoder.forward`,
        and the global ids of the input nodes."""
        # one step for all batches, so that a node's sample does not depend on the batch
        blocks, sources = self._sampler.sample(
            seeds, fanouts, epoch=0, step=0, times=times or self._all_at(seeds)
        )
        rows, device = self._from_store(sources), self._device
        x, categories = assemble(rows, self._inputs, blocks[0].until if blocks else {})
        given = (
            [block.to(device) for block in blocks],
            _on(device, x),
            _on(device, self._degrees(rows)),
            None,
            {t: _on(device, c) for t, c in categories.items()},
        )
        return given, sources

    def _all_at(self, nodes: Mapping[str, np.ndarray]) -> dict[str, np.ndarray] | None:
        """Return the common time for all nodes, if they have times."""
        if not self._timed:
            return None
        return {t: np.full(len(ids), self._at) for t, ids in nodes.items()}


def _on(device: torch.device, values: Mapping[T, Tensor]) -> dict[T, Tensor]:
    return {name: value.to(device) for name, value in values.items()}


def _same(one: Frontier, other: Frontier) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[t], other[t]) for t in one)


@torch.no_grad()
def graph_outputs(
    task: nn.Module,
    join: Callable[[np.ndarray], GraphBatch],
    numbers: Ids,
    batch_size: int,
    device: torch.device,
    run: Callable[[GraphBatch], Tensor],
) -> tuple[Tensor, Tensor]:
    """Compute outputs of graphs in evaluation mode. Not collective.

    Args:
        join: numbers of graphs → a batch of them, padded if empty.
        numbers: int64 ``[n]``, on any device.
        run: the task's model, or a part of it: a batch → ``[B, out_features]``.

    Returns:
        Outputs float32 ``[n, out_features]`` and targets ``[n, …]``, on the CPU.
    """
    numbers = as_ids(numbers)
    outputs, targets = [], []
    with evaluating(task):
        for start in range(0, max(1, len(numbers)), batch_size):
            batch = join(numbers[start : start + batch_size])
            real = batch.weight > 0
            outputs.append(run(batch.to(device)).float().cpu()[real])
            targets.append(batch.y[real])
    return torch.cat(outputs), torch.cat(targets)
