"""Collectives of all ranks side by side: the first one in which they differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from raygnn.runs.tracebacks import Frame

_ALIKE = {  # what must be the same on all ranks: sizes on one side at least
    "all_reduce": "inputs",
    "allreduce": "inputs",
    "broadcast": "inputs",
    "all_gather": "inputs",
    "allgather": "inputs",
    "reduce": "inputs",
    "gather": "inputs",
    "reduce_scatter": "inputs",
    "scatter": "outputs",
}

Entry = Mapping[str, Any]


def first_difference(flights: Mapping[int, Sequence[Entry]]) -> dict[str, Any] | None:
    """Where the ranks' collectives part, aligned by process group and sequence number.

    Args:
        flights: rank → its last collectives, as its black box has them.

    Returns:
        None if they agree as far as they are known, else ``kind`` (``op``, ``dtype``, ``size``,
        or ``missing``: a rank did not come to it), ``group``, ``seq``, ``odd`` (the rank that
        differs from most, or did not come; None where that is not to be told) and ``ranks``: for
        each its ``rank``, ``op``, ``dtypes``, ``sizes``, ``at`` and ``pending``, None for a rank
        that did not come.
    """
    by_group: dict[str, dict[int, dict[int, Entry]]] = {}
    for rank, entries in flights.items():
        for entry in entries:
            if isinstance(entry, Mapping) and isinstance(entry.get("seq"), int):
                by_rank = by_group.setdefault(str(entry.get("group")), {})
                by_rank.setdefault(rank, {})[entry["seq"]] = entry
    groups = (_in_group(group, ranks) for group, ranks in sorted(by_group.items()))
    differences = [difference for difference in groups if difference]
    # that a rank did not come to one may follow from another that it took in its place
    differences.sort(key=lambda d: (d["kind"] == "missing", d.pop("created")))
    return differences[0] if differences else None


def _in_group(group: str, ranks: dict[int, dict[int, Entry]]) -> dict[str, Any] | None:
    if len(ranks) < 2:
        return None
    first = max(min(entries) for entries in ranks.values())  # that all ranks still have
    # only those that a rank has: a damaged number may be any
    for seq in sorted({seq for entries in ranks.values() for seq in entries if first <= seq}):
        calls = {rank: entries.get(seq) for rank, entries in sorted(ranks.items())}
        came = {rank: entry for rank, entry in calls.items() if entry is not None}
        absent = [rank for rank in calls if rank not in came]
        kinds = ("op", "dtype", "size")
        kind = next((k for k in kinds if len({_facet(e, k) for e in came.values()}) > 1), None)
        if kind is None and not (absent and any(e.get("pending") for e in came.values())):
            continue
        return {
            "kind": kind or "missing",
            "group": group,
            "seq": seq,
            "odd": _odd(came, kind) if kind else absent[0],
            "ranks": [_shown(rank, entry) for rank, entry in calls.items()],
            "created": min(_time(e.get("created")) for e in came.values()),
        }
    return None


def _time(value: Any) -> float:
    """Seconds of the epoch; 0 for what is no number, or none that a clock shows."""
    return float(value) if isinstance(value, (int, float)) and abs(value) < 2**63 else 0.0


def _facet(entry: Entry, kind: str) -> str:
    """What must be the same on all ranks, as text."""
    op = str(entry.get("op"))
    side = _ALIKE.get(op.rpartition(":")[2])
    if kind == "op" or side is None:
        return op
    tensors = entry.get(side)
    name = "dtypes" if kind == "dtype" else "sizes"
    return op + str(tensors.get(name) if isinstance(tensors, Mapping) else None)


def _odd(came: Mapping[int, Entry], kind: str) -> int | None:
    """The rank that is alone in what it does; of two, the one that the user's code sent there."""
    facets = {rank: _facet(entry, kind) for rank, entry in came.items()}
    counts = Counter(facets.values())
    fewest = min(counts.values())
    rare = [rank for rank, facet in facets.items() if counts[facet] == fewest]
    if len(rare) < len(came):
        return rare[0]
    users = [rank for rank in rare if called_by_user(came[rank])]
    return users[0] if len(users) == 1 else None


def called_by_user(entry: Entry) -> bool:
    """Whether the user's own code called a collective."""
    place = Frame.of(entry.get("at"))
    return place is not None and place.whose == "user"


def _shown(rank: int, entry: Entry | None) -> dict[str, Any]:
    if entry is None:
        return {"rank": rank, "op": None}
    place, tensors = Frame.of(entry.get("at")), entry.get("inputs")
    tensors = tensors if isinstance(tensors, Mapping) else {}
    return {
        "rank": rank,
        "op": entry.get("op"),
        "dtypes": tensors.get("dtypes"),
        "sizes": tensors.get("sizes"),
        "at": str(place) if place else None,
        "pending": bool(entry.get("pending")),
    }
