"""What a model reads: its rows checked, learned if the config says so, in the dtype that the config
says, in memory where they fit."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch

from raygnn.config.schema import Config
from raygnn.errors import ConfigError, DataError
from raygnn.graph.available_memory import memory
from raygnn.graph.graph_sample import Sample
from raygnn.graph.staging.mapped import large_pages
from raygnn.graph.staging.shard import Shard
from raygnn.graph.validate import check_weights
from raygnn.models.graph_network import GraphSchema
from raygnn.models.registry import FAMILIES, needs_degree
from raygnn.sampling.collate import Collate
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
from raygnn.worker.planes.plane import PRECISIONS

_ROWS, _CACHE = 4, 16  # what part of the free memory its rows, or its cache, may take at most
_PLACE = 48  # bytes of the table in which a cached row is found


def read_inputs(config: Config, shard: Shard) -> dict[str, Inputs]:
    """Node type → what the model reads of it, learned rows included.

    Raises:
        ConfigError: ``model.embedding.ntypes`` names no node type of the graph, or none has learned
            rows.
        DataError: an array is not there, scaled features have not one scale for each node, or
            neighbours cannot be drawn in proportion to ``sampling.edge_weight``.
    """
    model, weight = config.model, config.sampling.edge_weight
    inputs = {
        ntype: choose_inputs(arrays, model.feature_names, model.categories)
        for ntype, arrays in shard.node_data.items()
    }
    inputs = _with_learned(inputs, config)
    for ntype, chosen in inputs.items():
        for name in chosen.scaled:
            scale = shard.node_data[ntype][name + SCALE]
            if row_width(scale) > 1:
                raise DataError(
                    f"array {name + SCALE!r} of node type {ntype!r} has rows of "
                    f"{list(scale.shape[1:])}, expected one number for each node",
                    remedy=f"give each node one scale, or rename it so that {name!r} has none",
                )
    for etype, rows in shard.topology.items():
        if weight is not None and weight in rows.data:
            check_weights(weight, etype, rows.data[weight])
    return inputs


def _with_learned(inputs: dict[str, Inputs], config: Config) -> dict[str, Inputs]:
    embedding = config.model.embedding
    if embedding is None:
        return inputs
    names = ", ".join(inputs)
    for name in embedding.ntypes or ():
        if name not in inputs:
            raise ConfigError(
                f"there is no node type {name!r}; there are: {names}",
                where="model.embedding.ntypes",
                remedy="name one of them, or leave the key out",
            )
    learned = Learned(embedding.dim, PRECISIONS[config.precision].dtype)
    chosen = {
        t: replace(i, learned=learned) if embedding.covers(t, i.stored) else i
        for t, i in inputs.items()
    }
    if not any(i.learned for i in chosen.values()):
        raise ConfigError(
            "every node type has features, so nothing would be learned",
            where="model.embedding",
            remedy=f"say which are to have learned rows with model.embedding.ntypes ({names}), or "
            "remove model.embedding",
        )
    return chosen


def make_embeddings(
    config: Config, shard: Shard, inputs: Mapping[str, Inputs], ranks: Ranks
) -> Embeddings | None:
    """The rows of the nodes that this rank owns, as training begins with them."""
    embedding = config.model.embedding
    if embedding is None:
        return None
    tables = {}
    for ntype in (t for t, i in inputs.items() if i.learned):
        # only what is used of it takes memory: the own rows, and those that come for a chunk
        tables[ntype] = torch.empty(shard.num_nodes(ntype), embedding.dim)
        own = tables[ntype][: shard.owned(ntype)]
        first_rows(embedding, config.train.seed, ntype, shard.original[ntype], own)
    return Embeddings(
        tables,
        {t: shard.original[t] for t in tables},
        ranks.step,
        embedding,
        dtype=PRECISIONS[config.precision].dtype,
        rate=(embedding.lr or config.train.lr) / config.train.lr,
        seed=config.train.seed,
    )


def make_store(
    config: Config,
    shard: Shard,
    inputs: Mapping[str, Inputs],
    exchange: Exchange,
    device: torch.device,
    **options: Any,
) -> FeatureStore:
    """The store of what a model on ``device`` reads; for the options see `build_store`."""
    return build_store(
        shard,
        exchange,
        inputs,
        dtype=PRECISIONS[config.precision].dtype,
        degree_etypes=shard.etypes if needs_degree(config.model) else (),
        beside=device.type == "cpu",
        **options,
    )


def make_collate(
    config: Config,
    pattern: Sample,
    inputs: Mapping[str, Inputs],
    schema: GraphSchema,
    *,
    asked: bool,
) -> Collate:
    """What joins graphs like ``pattern`` to what the model reads; for ``asked`` see `Collate`."""
    return Collate(
        pattern=pattern,
        inputs=inputs,
        dtype=PRECISIONS[config.precision].dtype,
        whole=config.model.kind not in FAMILIES,
        classes=schema.out_features if config.task.classifies else None,
        categories={
            ntype: {name: count for name, (count, _) in named.items()}
            for ntype, named in schema.categories.items()
        },
        asked=asked,
    )


class MemoryBudget:
    """Feature rows in a rank's memory; how many ranks share its node is not known here, at most
    as many as there are CPUs.

    Args:
        inputs: node type → the arrays that the model reads.
        workers: of the job.
    """

    def __init__(self, config: Config, shard: Shard, inputs: Mapping[str, Inputs], workers: int):
        self._config = config
        self._shard = shard
        self._inputs = inputs
        self._neighbours = min(workers, os.cpu_count() or 1)

    @cached_property
    def holds_rows(self) -> bool:
        """``staging.resident``: whether this rank copies the rows that it owns."""
        resident = self._config.staging.resident
        if resident != "auto":
            return resident == "always"
        own = sum(self._shard.owned(t) * size for t, size in self._sizes.items())
        return large_pages() and _ROWS * own * self._neighbours <= memory()[1]

    @cached_property
    def cached_share(self) -> float:
        """``sampling.cache``: share of the remote rows that this rank keeps."""
        share, shard = self._config.sampling.cache, self._shard
        if share != "auto":
            return share
        remote = sum(
            (shard.num_nodes(t) - shard.owned(t)) * (size + _PLACE)
            for t, size in self._sizes.items()
        )
        return min(1.0, memory()[1] / (_CACHE * self._neighbours) / max(1, remote))

    @property
    def _sizes(self) -> dict[str, int]:
        """Node type → bytes of a row."""
        width = PRECISIONS[self._config.precision].dtype.itemsize
        return {
            t: sum(
                row_width(arrays[name]) * (1 if name in self._inputs[t].scaled else width)
                for name in (*self._inputs[t].plain, *self._inputs[t].scaled)
            )
            for t, arrays in self._shard.node_data.items()
        }
