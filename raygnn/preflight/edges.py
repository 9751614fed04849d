"""Which edges a task predicts: what the config says of them, and what the graph has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from raygnn.config.schema import Config
from raygnn.config.task import RELATIONAL, SplitConfig
from raygnn.config.values import NO_LAYERS
from raygnn.graph.data import MASKS, EdgeType, etype_str
from raygnn.graph.partition.edge_target import EdgeSplit, EdgeTarget

_RELATION = "relation"

Arrays = Mapping[EdgeType, Mapping[str, Any]]


def edge_target(
    config: Config, arrays: Arrays, reverses: Mapping[EdgeType, EdgeType] | None = None
) -> EdgeTarget | tuple[str, str]:
    """What a task on edges predicts, or what is wrong and what to do about it.

    Args:
        arrays: edge type → what is keyed by the names of its arrays.
        reverses: edge type → the one that holds its edges the other way round, as far as known.
    """
    task, model = config.task, config.model
    reverses = reverses or {}
    etype = _etype(config, arrays, set(reverses.values()))
    if len(etype) == 2:
        return etype
    there = arrays[etype]
    if not task.of_links and task.target not in there and config.trains:
        return (
            f"edge type {etype_str(etype)!r} has no array {task.target!r} (task.target); "
            f"there are: {', '.join(sorted(there)) or 'none'}",
            "set task.target to one of them, or task.etype to the type that has it",
        )
    if model.relation is not None and model.relation not in there:
        return (
            f"edge type {etype_str(etype)!r} has no array {model.relation!r} (model.relation)",
            "set model.relation to an array of whole numbers, or leave it out",
        )
    wanted = None if task.of_links else task.target
    if model.relation is not None and model.relation == wanted:
        return (
            f"model.relation {model.relation!r} is what is to be predicted (task.target), and the "
            "model would be told it",
            "remove model.relation, or name another array",
        )
    masked = any(name in there for name in MASKS)
    if masked and task.split is not None and task.split.val + task.split.test:
        return (
            f"task.split would be ignored: edges of type {etype_str(etype)} have masks",
            "remove task.split, or give the graph without masks of edges",
        )
    reverse = _reverse(config, etype, list(arrays), reverses)
    if isinstance(reverse, str):
        return reverse, "set task.reverse to a type that joins them the other way round"
    shares = task.split or SplitConfig()
    reads = model.decoder in (None, *RELATIONAL)
    relation = model.relation
    if relation is None and reads and _RELATION in there and wanted != _RELATION:
        relation = _RELATION
    dot = model.decoder == "dot" or (model.decoder is None and relation is None)
    if task.of_links and model.kind == NO_LAYERS and dot:
        return (
            "model.kind none with the decoder dot has no weights",
            "set model.decoder to distmult or mlp, or choose another model.kind",
        )
    return EdgeTarget(
        EdgeSplit(
            etype,
            reverse,
            None if masked else (shares.val, shares.test),
            0 if masked else shares.seed,
        ),
        relation if reads else None,
    )


def _etype(config: Config, arrays: Arrays, made: set[EdgeType]) -> EdgeType | tuple[str, str]:
    """``made``: the types that only hold the reverses of others."""
    task, known = config.task, list(arrays)
    listed = ", ".join(map(etype_str, known))
    if task.etype is not None:
        named = [e for e in known if task.etype in (etype_str(e), e[1])]
        if len(named) == 1:
            return named[0]
        how = "no edge type" if not named else "more than one edge type"
        return (
            f"{how} is called {task.etype!r} (task.etype); there are: {listed}",
            "name one of them as source:relation:target",
        )
    found = [etype for etype in known if etype not in made]
    if len(found) > 1:
        wanted = MASKS if task.of_links else (task.target,)
        found = [e for e in found if any(name in arrays[e] for name in wanted)]
    if len(found) == 1:
        return found[0]
    return (
        f"which edges are to be predicted is not clear; there are: {listed}",
        "say it with task.etype",
    )


def _reverse(
    config: Config,
    etype: EdgeType,
    known: Sequence[EdgeType],
    reverses: Mapping[EdgeType, EdgeType],
) -> EdgeType | str | None:
    """The type of the reverses; text = what is wrong."""
    task = config.task
    if task.exclude != "reverse":
        return None
    both = {other: one for one, other in reverses.items()} | dict(reverses)
    if task.reverse is None and etype in both:
        return both[etype]
    if task.reverse is None:
        return etype if etype[0] == etype[2] else None
    named = [e for e in known if task.reverse in (etype_str(e), e[1])]
    fitting = [e for e in named if (e[0], e[2]) == (etype[2], etype[0])]
    if len(fitting) == 1:
        return fitting[0]
    listed = ", ".join(map(etype_str, known))
    return (
        f"{task.reverse!r} (task.reverse) is no edge type from {etype[2]} to {etype[0]}; "
        f"there are: {listed}"
    )
