"""The learned rows of a graph's nodes (``model.embedding``), as a rank begins with them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from raygnn.config.schema import Config
from raygnn.errors import ConfigError
from raygnn.graph.staging.shard import Shard
from raygnn.sampling.features import Inputs, Learned
from raygnn.tasks.embeddings import Embeddings, first_rows
from raygnn.worker.comm.process_groups import Ranks
from raygnn.worker.precision import PRECISIONS


def with_learned(inputs: Mapping[str, Inputs], config: Config) -> dict[str, Inputs]:
    """The inputs, with learned rows where the config wants them.

    Args:
        inputs: node type → what it has in the data.

    Raises:
        ConfigError: ``model.embedding.ntypes`` names no node type of the graph, or none has such
            rows.
    """
    embedding = config.model.embedding
    if embedding is None:
        return dict(inputs)
    there = ", ".join(inputs)
    for name in embedding.ntypes or ():
        if name not in inputs:
            raise ConfigError(
                f"there is no node type {name!r}; there are: {there}",
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
            remedy=f"say which are to have learned rows with model.embedding.ntypes ({there}), or "
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
