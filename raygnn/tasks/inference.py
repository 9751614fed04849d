"""Exact outputs for owned nodes, with full neighbourhoods, on all ranks together.

Networks that expose their layers are run layer by layer over all owned nodes (as in GraphSAGE's
and DGL's full-graph inference): every edge is used once per layer and memory stays bounded by a
chunk. Other modules are run on minibatches with full fanout, which is exact as well, but visits
an edge once for every batch that reaches it.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn

from raygnn.graph.shard import Shard
from raygnn.models.network import Network
from raygnn.sampling.exchange import Exchange
from raygnn.sampling.kernels import ALL
from raygnn.sampling.rows import FEATURES, RowStore, degree_column
from raygnn.sampling.sampler import Frontier, NeighborSampler

# edges of one chunk: some hundred MB at usual widths
CHUNK_EDGES = 1_000_000


class Inference:
    """Runs a model over whole owned node sets. Collective: all ranks call `outputs` together.

    Args:
        stores: node type → store of the input features (and degrees where needed).
        num_layers: of the model.
        batch_size: seeds per minibatch, for modules without layers; None = 1,024.
    """

    def __init__(
        self,
        shard: Shard,
        exchange: Exchange,
        stores: dict[str, RowStore],
        *,
        num_layers: int,
        batch_size: int | None,
        device: torch.device,
    ):
        self._shard = shard
        self._exchange = exchange
        self._stores = stores
        self._num_layers = num_layers
        self._batch_size = batch_size or 1024
        self._device = device
        self._sampler = NeighborSampler(shard, exchange)

    @torch.no_grad()
    def outputs(self, model: nn.Module, ntype: str, owned: np.ndarray) -> Tensor:
        """Outputs (float32 ``[n, out_features]``, CPU) of nodes that this rank owns.

        Args:
            ntype: their type; the model's target.
            owned: int64 ``[n]``, global ids within this rank's range.
        """
        training = model.training
        model.eval()
        try:
            if isinstance(model, Network):
                return self._layer_by_layer(model, ntype)[owned - self._shard.first(ntype)]
            return self._by_batches(model, ntype, owned)
        finally:
            model.train(training)

    def _layer_by_layer(self, model: Network, ntype: str) -> Tensor:
        """Outputs of all owned nodes of ``ntype``, ``[owned, out_features]``."""
        shard, stores = self._shard, self._stores
        for number in range(model.num_layers):
            last = number == model.num_layers - 1
            kept: dict[str, list[Tensor]] = {t: [] for t in model.computes(number)}
            for chunk in self._chunks(list(kept)):
                block, inputs = self._sampler.hop(chunk, ALL)
                rows = {t: store.gather(inputs[t]) for t, store in stores.items()}
                h = {t: columns[FEATURES].to(self._device) for t, columns in rows.items()}
                degree = {
                    e: rows[e[2]][degree_column(e)].to(self._device)
                    for e in shard.etypes
                    if degree_column(e) in rows.get(e[2], {})
                }
                out = model.layer(number, block.to(self._device), h, degree)
                for t, pieces in kept.items():
                    pieces.append(out[t].cpu())
            hidden = {t: torch.cat(pieces) for t, pieces in kept.items()}
            if last:
                return hidden[ntype].float()
            stores = {t: self._store(t, h) for t, h in hidden.items()}
        raise AssertionError("a network has at least one layer")

    def _store(self, ntype: str, hidden: Tensor) -> RowStore:
        columns = {FEATURES: hidden}
        for etype in self._shard.etypes:
            if etype[2] == ntype:
                columns[degree_column(etype)] = self._shard.in_degree(etype)
        return RowStore(self._shard.bounds[ntype], self._exchange, columns)

    def _chunks(self, ntypes: list[str]) -> Iterator[Frontier]:
        """Pieces of the owned nodes with about ``CHUNK_EDGES`` in-edges each.

        Every rank yields the same number of pieces (some may be empty), as the work on each is
        collective.
        """
        shard = self._shard
        for ntype in ntypes:
            edges = np.zeros(shard.owned(ntype) + 1, np.int64)
            for etype in shard.etypes:
                if etype[2] == ntype:
                    edges[1:] += np.cumsum(shard.in_degree(etype).numpy())
            edges += np.arange(len(edges))  # nodes without edges count, too
            marks = np.arange(CHUNK_EDGES, int(edges[-1]) + CHUNK_EDGES, CHUNK_EDGES)
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

    def _by_batches(self, model: nn.Module, ntype: str, owned: np.ndarray) -> Tensor:
        size = self._batch_size
        pieces: list[Tensor] = []
        for number in range(-(-self._exchange.max(len(owned)) // size)):
            ids = owned[number * size : (number + 1) * size]
            real = len(ids)
            if not real:  # the other ranks still need this one's rows
                ids = np.array([self._any_node(ntype)])
            blocks, inputs = self._sampler.sample(
                ntype, ids, [ALL] * self._num_layers, epoch=0, step=number
            )
            x = {
                t: store.gather(inputs[t])[FEATURES].to(self._device)
                for t, store in self._stores.items()
            }
            out = model([block.to(self._device) for block in blocks], x, {})
            pieces.append(out[:real].float().cpu())
        return torch.cat(pieces)

    def _any_node(self, ntype: str) -> int:
        return min(self._shard.first(ntype), self._shard.num_nodes(ntype) - 1)
