"""Exact outputs for owned nodes, with full neighbourhoods, on all ranks together.

Networks that expose their layers are run layer by layer over all owned nodes (as in GraphSAGE's
and DGL's full-graph inference): every edge is used once per layer and memory stays bounded by a
chunk. Other modules are run on minibatches with full fanout, which is exact as well, but visits
an edge once for every batch that reaches it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from raygnn.graph.data import EdgeType
from raygnn.graph.staging.shard import Shard
from raygnn.models.heads import NodeModel
from raygnn.models.network import Encoder, Network
from raygnn.sampling.batch import GraphBatch
from raygnn.sampling.exchange import Exchange, Ids, as_ids
from raygnn.sampling.features import (
    FEATURES,
    FeatureStore,
    Inputs,
    Rows,
    Table,
    assemble,
    degree_column,
    with_room,
)
from raygnn.sampling.kernels import ALL
from raygnn.sampling.plan import Fanout
from raygnn.sampling.sampler import Frontier, NeighborSampler

CHUNK_EDGES = 1_000_000  # of one chunk, at most
CHUNK_BYTES = 1 << 27  # of the rows of its sources, if each of them has one edge
_HEAD_ROWS = 1 << 16  # that go through a head at a time


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Evaluation mode in the block, and then the mode as it was."""
    training = module.training
    module.eval()
    try:
        yield
    finally:
        module.train(training)


class Inference:
    """Runs a model over whole owned node sets. Collective: all ranks call `outputs` together.

    Args:
        store: the input features (and degrees where needed).
        inputs: which of its columns are the model's input.
        num_layers: of the model.
        batch_size: seeds per minibatch, for modules without layers; None = 1,024.
        relation: see `NeighborSampler`.
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
        relation: str | None = None,
    ):
        self._shard = shard
        self._exchange = exchange
        self._store = store
        self._inputs = inputs
        self._num_layers = num_layers
        self._batch_size = batch_size or 1024
        self._device = device
        self._sampler = NeighborSampler(shard, exchange, relation=relation)
        self._kept: dict[str, Tensor] | None = None
        self._all = dict.fromkeys(shard.etypes, ALL)

    @torch.no_grad()
    def outputs(self, model: nn.Module, ntype: str, owned: Ids) -> Tensor:
        """Outputs (float32 ``[n, out_features]``, CPU) of nodes that this rank owns.

        Args:
            ntype: their type; the model's target.
            owned: int64 ``[n]``, global ids within this rank's range, on any device.
        """
        owned = as_ids(owned)
        with evaluating(model):
            if isinstance(model, Network):
                hidden = self._layer_by_layer(model)[ntype]
                return hidden[owned - self._shard.first(ntype)].float()
            if isinstance(model, NodeModel):
                rows = self.represent(model.encoder, [ntype])[ntype]
                return self._headed(model, rows[owned - self._shard.first(ntype)])
            return self._by_batches(model, ntype, owned)

    @torch.no_grad()
    def outputs_of_few(
        self, model: nn.Module, ntype: str, owned: np.ndarray, fanouts: Sequence[Fanout] | None
    ) -> Tensor:
        """As `outputs`, from minibatches around the nodes whatever the model is: cheaper than all
        layers of the whole graph where the nodes are few.

        Args:
            fanouts: neighbours per hop, drawn the same for a node whatever else is asked for;
                None = all of them, which is exact.
        """
        with evaluating(model):
            return self._by_batches(model, ntype, owned, fanouts)

    @torch.no_grad()
    def hidden(self, model: Network, ntype: str) -> Tensor:
        """What goes into a network's last layer: float32 ``[owned, hidden]`` of all owned nodes of
        a type that the layer before it computes."""
        with evaluating(model):
            return self._layer_by_layer(model, model.num_layers - 1)[ntype].float()

    @torch.no_grad()
    def represent(self, model: Encoder, ntypes: Sequence[str]) -> dict[str, Tensor]:
        """Outputs (float32 ``[owned, out_features]``, CPU) of all owned nodes of some types."""
        kept = self._kept
        if kept is not None and all(t in kept for t in ntypes):
            return {t: kept[t] for t in ntypes}
        with evaluating(model):
            if isinstance(model, Network):
                hidden = self._layer_by_layer(model)
                return {t: hidden[t].float() for t in ntypes}
            return {
                t: self._by_batches(
                    lambda *inputs, t=t: model.represent(*inputs)[t],
                    t,
                    self._shard.first(t) + np.arange(self._shard.owned(t)),
                )
                for t in ntypes
            }

    @contextmanager
    def represented(self, model: Encoder, ntypes: Sequence[str]) -> Iterator[None]:
        """In the block, `represent` and `outputs` of this encoder give what is computed once."""
        self._kept = self.represent(model, ntypes)
        try:
            yield
        finally:
            self._kept = None

    def _headed(self, model: NodeModel, rows: Tensor) -> Tensor:
        """Outputs from an encoder's rows, float32, a chunk at a time."""
        head = copy.deepcopy(model.head).float().eval()
        pieces = [head(piece.to(self._device)).cpu() for piece in rows.split(_HEAD_ROWS)]
        return torch.cat(pieces) if pieces else head(rows.to(self._device)).cpu()

    def _layer_by_layer(self, model: Network, layers: int | None = None) -> dict[str, Tensor]:
        """Outputs of all owned nodes of the types that a network's first layers compute, of all
        layers where ``layers`` is None: ``[owned, out_features]``."""
        shard, store = self._shard, self._store
        layers = model.num_layers if layers is None else layers
        width = max(i.width(shard.node_data[t]) for t, i in self._inputs.items())
        for number in range(layers):
            kept: dict[str, list[Tensor]] = {t: [] for t in model.computes(number)}
            for chunk in self._chunks(list(kept), width):
                block, sources = self._sampler.hop(chunk, self._all)
                rows = store.gather({t: sources[t] for t in store.ntypes})
                if number == 0:
                    x, categories = assemble(rows, self._inputs)
                    h = model.inputs(
                        self._moved(x), {t: self._moved(c) for t, c in categories.items()}
                    )
                else:
                    h = self._moved({t: columns[FEATURES] for t, columns in rows.items()})
                out = model.layer(number, block.to(self._device), h, self._degrees(rows))
                for t, pieces in kept.items():
                    pieces.append(out[t].cpu())
            hidden = {t: torch.cat(pieces) for t, pieces in kept.items()}
            if number == layers - 1:
                return hidden
            width = max(rows.shape[1] for rows in hidden.values())
            store = FeatureStore(
                shard.bounds, self._exchange, {t: self._table(t, h) for t, h in hidden.items()}
            )
        raise AssertionError("a network has at least one layer")

    def _moved(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: value.to(self._device) for name, value in values.items()}

    def _degrees(self, rows: Rows) -> dict[EdgeType, Tensor]:
        return {
            e: rows[e[2]][degree_column(e)].to(self._device)
            for e in self._shard.etypes
            if degree_column(e) in rows.get(e[2], {})
        }

    def _table(self, ntype: str, hidden: Tensor) -> Table:
        shard, total = self._shard, self._shard.num_nodes(ntype)
        table = {FEATURES: with_room(hidden, total)}
        for etype in shard.etypes:
            if etype[2] == ntype:
                degree = shard.in_degree(etype).to(torch.int32)
                table[degree_column(etype)] = with_room(degree, total)
        return table

    def _chunks(self, ntypes: list[str], width: int) -> Iterator[Frontier]:
        """Pieces of the owned nodes with at most ``CHUNK_EDGES`` in-edges each, or one node.

        Every rank yields the same number of pieces (some may be empty), as the work on each is
        collective.

        Args:
            width: of the sources' rows, the same on all ranks.
        """
        shard = self._shard
        most = max(1, min(CHUNK_EDGES, CHUNK_BYTES // (4 * max(1, width))))
        for ntype in ntypes:
            edges = np.zeros(shard.owned(ntype) + 1, np.int64)
            for etype in shard.etypes:
                if etype[2] == ntype:
                    edges[1:] += np.cumsum(shard.in_degree(etype).numpy())
            edges += np.arange(len(edges))  # nodes without edges count, too
            marks = np.arange(most, int(edges[-1]) + most, most)
            stops = np.searchsorted(edges, marks, side="right") - 1
            pieces = max(1, self._exchange.max(len(stops)))
            start = 0
            for number in range(pieces):
                # a node with more edges than a chunk still makes a chunk of its own
                stop = int(stops[number]) if number < len(stops) else shard.owned(ntype)
                stop = shard.owned(ntype) if number == pieces - 1 else stop
                chunk = {t: np.empty(0, np.int64) for t in shard.ntypes}
                chunk[ntype] = np.arange(start, stop) + shard.first(ntype)
                start = max(start, stop)
                yield chunk

    def _by_batches(
        self,
        model: Callable[..., Tensor],
        ntype: str,
        owned: np.ndarray,
        fanouts: Sequence[Fanout] | None = None,
    ) -> Tensor:
        size = self._batch_size
        fanouts = fanouts or [self._all] * self._num_layers
        pieces: list[Tensor] = []
        for number in range(-(-self._exchange.max(len(owned)) // size)):
            ids = owned[number * size : (number + 1) * size]
            real = len(ids)
            if not real:  # the other ranks still need this one's rows
                ids = np.array([self._any_node(ntype)])
            # one step for all batches: what a node draws does not depend on who comes before it
            blocks, sources = self._sampler.sample({ntype: ids}, fanouts, epoch=0, step=0)
            rows = self._store.gather({t: sources[t] for t in self._store.ntypes})
            x, categories = assemble(rows, self._inputs)
            out = model(
                [block.to(self._device) for block in blocks],
                self._moved(x),
                self._degrees(rows),
                None,
                {t: self._moved(c) for t, c in categories.items() if c},
            )
            pieces.append(out[:real].float().cpu())
        return torch.cat(pieces)

    def _any_node(self, ntype: str) -> int:
        return min(self._shard.first(ntype), self._shard.num_nodes(ntype) - 1)


@torch.no_grad()
def graph_outputs(
    task: nn.Module,
    join: Callable[[np.ndarray], GraphBatch],
    numbers: Ids,
    batch_size: int,
    device: torch.device,
    run: Callable[[GraphBatch], Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs for whole graphs, in evaluation mode. Not collective.

    Args:
        join: numbers of graphs → a batch of them, of padding where there are none; it may leave
            some out.
        numbers: int64 ``[n]``, on any device.
        run: the task's model, or a part of it: a batch → ``[B, out_features]``.

    Returns:
        numbers int64 ``[m]``, outputs float32 ``[m, out_features]`` and targets ``[m, …]``, all on
        the CPU; m ≤ n.
    """
    numbers = as_ids(numbers)
    there, outputs, targets = [], [], []
    with evaluating(task):
        for start in range(0, max(1, len(numbers)), batch_size):
            batch = join(numbers[start : start + batch_size])
            real = batch.weight > 0
            there.append(batch.seeds[real])
            outputs.append(run(batch.to(device)).float().cpu()[real])
            targets.append(batch.y[real])
    return torch.cat(there), torch.cat(outputs), torch.cat(targets)
