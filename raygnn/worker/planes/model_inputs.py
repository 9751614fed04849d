"""Inputs of a model: checked feature rows and embedding tables, in the precision's dtype, and in
memory if they fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from raygnn.config.schema import Config
from raygnn.errors import DataError
from raygnn.graph.available_memory import memory
from raygnn.graph.sources import check_weights
from raygnn.graph.staging.mapped import large_pages, map_table
from raygnn.graph.staging.shard import Shard
from raygnn.models.registry import needs_degree_sampled
from raygnn.sampling.exchange import Exchange
from raygnn.sampling.features import (
    SCALE,
    FeatureStore,
    Inputs,
    Learned,
    build_store,
    choose_inputs,
    row_width,
)
from raygnn.tasks.embeddings import Embeddings, first_rows
from raygnn.worker.comm.process_groups import Ranks
from raygnn.worker.planes.device_path import DevicePath

_ROWS, _CACHE = 4, 16  # rows, or the cache, may take 1/4, or 1/16, of the free memory
_PLACE = 48  # bytes per cached row in the table of cached rows


def read_inputs(config: Config, shard: Shard) -> dict[str, Inputs]:
    """Return node type → inputs of the model, embedding tables included. Raises DataError if an
    array is missing, scaled features do not have one scale per node, or ``sampling.edge_weight``
    has unusable weights."""
    model, weight = config.model, config.sampling.edge_weight
    inputs = {
        ntype: choose_inputs(arrays, model.feature_names, model.categories, model.ages)
        for ntype, arrays in shard.node_data.items()
    }
    if (embedding := model.embedding) is not None:
        learned = Learned(embedding.dim, config.arithmetic.dtype)
        inputs = {
            t: replace(i, learned=learned) if embedding.covers(t, i.stored) else i
            for t, i in inputs.items()
        }
    for ntype, chosen in inputs.items():
        for name in chosen.scaled:
            scale = shard.node_data[ntype][name + SCALE]
            if row_width(scale) > 1:
                raise DataError(
                    f"array {name + SCALE!r} of node type {ntype!r} has rows of "
                    f"{list(scale.shape[1:])} instead of one number per node",
                    remedy=f"give each node one scale, or rename it so that {name!r} has none",
                )
    for etype, rows in shard.topology.items():
        if weight is not None and weight in rows.data:
            check_weights(weight, etype, rows.data[weight])
    return inputs


def make_embeddings(
    config: Config, shard: Shard, inputs: Mapping[str, Inputs], ranks: Ranks
) -> Embeddings | None:
    """Return the initial embedding tables of this rank's nodes; None if there are none."""
    embedding = config.model.embedding
    if embedding is None:
        return None
    tables = {}
    for ntype in (t for t, i in inputs.items() if i.learned):
        # only used pages take memory: owned rows, and rows fetched for a chunk
        tables[ntype] = map_table(torch.float32, (embedding.dim,), shard.num_nodes(ntype))
        own = tables[ntype][: shard.owned(ntype)]
        first_rows(embedding, config.train.seed, ntype, shard.original[ntype], own)
    return Embeddings(
        tables,
        {t: shard.original[t] for t in tables},
        ranks.step,
        embedding,
        dtype=config.arithmetic.dtype,
        rate=(embedding.lr or config.train.lr) / config.train.lr,
        seed=config.train.seed,
        on_gpu=config.sampling.features_on in ("auto", "gpu"),
    )


def make_store(
    config: Config,
    shard: Shard,
    inputs: Mapping[str, Inputs],
    exchange: Exchange,
    device: torch.device,
    *,
    fanout: Sequence[int] = (),
    **options: Any,
) -> FeatureStore:
    """Return the feature store of a model on ``device``; for the options see `build_store`.
    ``fanout``: fanout that a prediction requests."""
    reads_degree = needs_degree_sampled(config.model, config.sampling, fanout)
    return build_store(
        shard,
        exchange,
        inputs,
        dtype=config.arithmetic.dtype,
        degree_etypes=shard.etypes if reads_degree else (),
        beside=device.type == "cpu",
        **options,
    )


@dataclass
class MemoryBudget:
    """Decides which feature rows a host keeps in memory. Collective: the host's leader decides for
    all of its ranks. ``inputs``: node type → the arrays that the model reads."""

    shard: Shard
    inputs: Mapping[str, Inputs]
    ranks: Ranks

    def __post_init__(self) -> None:
        self._config, self._host = self.ranks.config, self.ranks.host

    @cached_property
    def holds_rows(self) -> bool:
        """``staging.resident``: True if rows of this host's ranks are copied to memory."""
        resident = self._config.staging.resident
        if resident != "auto":
            return resident == "always"
        here = sum(self._here(t) * size for t, size in self._sizes.items())
        fits = large_pages(len(self._host.ranks) > 1) and _ROWS * here <= memory()[1]
        return self._host.from_leader(fits)

    @cached_property
    def cached_share(self) -> float:
        """``sampling.cache``: share of the remote rows that this host caches."""
        share, shard = self._config.sampling.cache, self.shard
        if share != "auto":
            return share
        remote = sum(
            (shard.num_nodes(t) - self._here(t)) * (size + _PLACE)
            for t, size in self._sizes.items()
        )
        return self._host.from_leader(min(1.0, memory()[1] / _CACHE / max(1, remote)))

    def device_path(self) -> DevicePath:
        """Return the parts of a batch that this rank's GPU builds. Collective over all ranks."""
        kept, rows = 0.0 if self._host.holds_all else self.cached_share, 0.0
        for ntype, size in self._sizes.items():
            here = self._here(ntype)
            rows += size * (here + kept * (self.shard.num_nodes(ntype) - here))
        return DevicePath(self._config, self.shard, self.ranks, int(rows))

    @property
    def evaluations(self) -> float:
        """Bytes that this rank may keep between evaluations."""
        return memory()[1] / _CACHE / len(self._host.ranks)

    def _here(self, ntype: str) -> int:
        bounds = self.shard.bounds[ntype]
        return sum(int(bounds[rank + 1] - bounds[rank]) for rank in self._host.ranks)

    @property
    def _sizes(self) -> dict[str, int]:
        """Bytes of a row of each node type."""
        width = self._config.arithmetic.dtype.itemsize
        return {
            t: sum(
                row_width(arrays[name]) * (1 if name in self.inputs[t].scaled else width)
                for name in (*self.inputs[t].plain, *self.inputs[t].scaled)
            )
            for t, arrays in self.shard.node_data.items()
        }
