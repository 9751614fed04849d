"""Edges the other way round, so that messages pass both ways."""

from __future__ import annotations

from raygnn.errors import ConfigError
from raygnn.graph.data import EdgeFrame, EdgeType, GraphData, etype_str

PREFIX = "rev_"


def reversed_type(etype: EdgeType) -> EdgeType:
    """``("a", "likes", "b")`` → ``("b", "rev_likes", "a")``."""
    return etype[2], PREFIX + etype[1], etype[0]


def add_reverses(data: GraphData) -> None:
    """Give every edge type a second one with the same edges the other way round.

    Edge i of it is the reverse of edge i, with the same arrays: relation, weights, masks. Nothing
    is copied. ``data.reverses`` says which type is whose.

    Raises:
        ConfigError: there is a type of that name.
    """
    for etype, edges in list(data.edges.items()):
        other = reversed_type(etype)
        if other in data.edges:
            raise ConfigError(
                f"there is an edge type {etype_str(other)} already",
                where="graph.reverse",
                remedy="set graph.reverse to false, or give the edge type another name",
            )
        data.edges[other] = EdgeFrame(edges.dst, edges.src, dict(edges.data))
        data.reverses[etype] = other
        here, there = etype_str(etype), etype_str(other)
        for name in edges.data:
            if f"{here}/{name}" in data.origin:
                data.origin[f"{there}/{name}"] = data.origin[f"{here}/{name}"]
            if f"{here}/{name}" in data.names:
                data.names[f"{there}/{name}"] = data.names[f"{here}/{name}"]
