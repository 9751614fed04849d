"""How many neighbours are drawn, by hop and edge type."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from raygnn.errors import ConfigError
from raygnn.graph.data import EdgeType, etype_str

Fanout = Mapping[EdgeType, int]

_OTHERS = "*"


def resolve_fanouts(
    given: Sequence[int | Mapping[str, int]], etypes: Sequence[EdgeType]
) -> list[Fanout]:
    """``sampling.fanout`` for the edge types of a graph.

    Args:
        given: per hop a number for all edge types, or a number for each by its relation or
            ``source:relation:target``; ``"*"`` stands for those not named.

    Returns:
        Per hop, edge type → neighbours; -1 = all, 0 = none.

    Raises:
        ConfigError: a name that is no edge type of the graph, or an edge type without a number.
    """
    return [_resolve(hop, etypes, number) for number, hop in enumerate(given)]


def _resolve(hop: int | Mapping[str, int], etypes: Sequence[EdgeType], number: int) -> Fanout:
    if isinstance(hop, int):
        return dict.fromkeys(etypes, hop)
    names = {name: [e for e in etypes if name in (etype_str(e), e[1])] for name in hop}
    where = f"sampling.fanout[{number}]"
    known = ", ".join(map(etype_str, etypes))
    for name, meant in names.items():
        if name != _OTHERS and not meant:
            raise ConfigError(
                f"{name!r} is no edge type of this graph; there are: {known}",
                where=where,
                remedy="name one of them, or its relation",
            )
    found: dict[EdgeType, int] = {}
    # the whole name of a type is said of it alone, its relation perhaps of several
    for name in sorted(names, key=lambda name: ":" in name):
        found |= dict.fromkeys(names[name], hop[name])
    for etype in etypes:
        if etype not in found:
            if _OTHERS not in hop:
                raise ConfigError(
                    f"has no number for the edge type {etype_str(etype)}",
                    where=where,
                    remedy=f"add it, or {_OTHERS!r} for all that are not named",
                )
            found[etype] = hop[_OTHERS]
    return {etype: found[etype] for etype in etypes}
