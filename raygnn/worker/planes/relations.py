"""Which edge array holds the relations of edges, and how many there are."""

from __future__ import annotations

import numpy as np

from raygnn.config.model import ModelConfig
from raygnn.config.schema import Config
from raygnn.errors import DataError
from raygnn.graph.data import EdgeType, etype_str
from raygnn.graph.staging.shard import Shard
from raygnn.models.registry import needs_relation
from raygnn.sampling.exchange import Exchange

DEFAULT = "relation"


def relation_array(model: ModelConfig) -> str | None:
    """The edge array that blocks carry, if there is one; None: the network reads none."""
    return (model.relation or DEFAULT) if needs_relation(model) else None


def edge_arrays(config: Config) -> list[str]:
    """The edge arrays that sampling reads, of the edge types that have them."""
    wanted = config.sampling.edge_weight, relation_array(config.model)
    return [name for name in wanted if name is not None]


def relations(config: Config, shard: Shard, exchange: Exchange) -> dict[EdgeType, int]:
    """Edge type → how many relations its edges have, of the types that have the array; empty
    where the network reads none. Collective.

    Raises:
        DataError: it does not hold whole numbers from 0.
    """
    name, found = relation_array(config.model), dict[EdgeType, int]()
    if name is None:
        return {}
    for etype in shard.etypes:
        values = shard.topology[etype].data.get(name)
        if values is None:
            continue
        own = values[slice(*shard.own_edges(etype))]
        found[etype] = count_relations(etype, name, own, exchange)
    return found


def count_relations(etype: EdgeType, name: str, own: np.ndarray, exchange: Exchange) -> int:
    """How many relations there are, at least 1. Collective.

    Args:
        own: those of this rank's edges.

    Raises:
        DataError: see `relations`.
    """
    if own.dtype.kind not in "iu" or own.ndim > 1:
        raise _unusable(etype, name, f"is {own.dtype} {list(own.shape)}")
    if exchange.max(-int(own.min()) if len(own) else 0) > 0:
        raise _unusable(etype, name, "has numbers below 0")
    return max(1, exchange.max(int(own.max()) + 1 if len(own) else 0))


def _unusable(etype: EdgeType, name: str, what: str) -> DataError:
    return DataError(
        f"edge array {name!r} of {etype_str(etype)!r} {what}",
        where="model.relation",
        remedy="give each edge one whole number from 0, or name another array",
    )
