"""Questions of a request, and the ids that users know nodes by."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raygnn.errors import InputError

UserId = int | str
Row = Mapping[str, Any]  # column → value
Rows = Sequence[Row]


class RequestError(InputError):
    """A request that cannot be answered; what it says is for the caller."""


@dataclass(frozen=True)
class NodeQuestion:
    """Nodes to predict for.

    Attributes:
        ids: the users' ids.
        fanout: sampled neighbours per layer, from the nodes outward, -1 = all; None = all.
        at: predict from what was before this time; None = see `Served.find`.
        scores: also answer the probability of each class.
        explain: also answer so many contributions of features, of nodes and of edges; 0 = none.
        nodes, edges: rows of new nodes and edges, by the keys of the tables' description.
    """

    ids: Sequence[UserId]
    fanout: tuple[int, ...] | None = None
    at: int | str | None = None
    scores: bool = False
    explain: int = 0
    nodes: Mapping[str, Rows] = field(default_factory=dict)
    edges: Mapping[str, Rows] = field(default_factory=dict)


@dataclass(frozen=True)
class PairQuestion:
    """Pairs of a source and a target to score, of one relation."""

    pairs: Sequence[tuple[UserId, UserId]]
    relation: str | None = None


@dataclass(frozen=True)
class ListQuestion:
    """Sources to recommend ``k`` targets for; ``known`` targets are left out, or not."""

    ids: Sequence[UserId]
    k: int
    relation: str | None = None
    known: bool = False


@dataclass(frozen=True)
class GraphQuestion:
    """Graphs to predict for.

    Attributes:
        graphs: ``nodes``: node type → array → rows; ``edges``: edge type → array → rows, with
            ``source`` and ``target``.
        scores: see `NodeQuestion`.
    """

    graphs: Sequence[Mapping[str, Any]]
    scores: bool = False


AnyQuestion = NodeQuestion | PairQuestion | ListQuestion | GraphQuestion
AnswerRows = list[dict[str, Any]]


def named(names: Any, numbers: np.ndarray) -> list[UserId]:
    """Return the users' ids of original ids, int64 ``[n]``; ``names``: see `NodeIds`."""
    return numbers.tolist() if names is None else names.take(pa.array(numbers)).to_pylist()


class NodeIds:
    """The users' ids of a node type, and the positions of its nodes in a shard.

    Args:
        names: pyarrow array ``[N]`` by original id; None = ids are numbers from 0.
        original: original id of each position, int64 ``[N]``.

    Attributes:
        whole: the ids are whole numbers.
    """

    def __init__(self, names: Any, original: np.ndarray):
        self._names = names
        self.whole = names is None or pa.types.is_integer(names.type)
        self._positions = np.argsort(original)
        # bisected, since a table of hashes would take many times the memory of the ids
        self._order = None if names is None else pc.sort_indices(names)

    def positions(self, ids: Sequence[UserId], where: str) -> np.ndarray:
        """Return the positions of ids, int64 ``[n]``. Raises RequestError if one is unknown."""
        numbers = [self._number(one) for one in ids]
        unknown = [place for place, number in enumerate(numbers) if number is None]
        if unknown:
            first = unknown[0]
            what = f"there is no {ids[first]!r} among the {len(self._positions):,} of this graph"
            what += f" ({len(unknown)} of {len(ids)} ids are unknown)" * (len(unknown) > 1)
            raise RequestError(what, where=f"{where}[{first}]", remedy="leave it out")
        found: np.ndarray = self._positions[np.array(numbers, np.int64)]
        return found

    def position(self, one: UserId) -> int | None:
        """Return the position of an id; None if it is unknown."""
        number = self._number(one)
        return None if number is None else int(self._positions[number])

    def names(self, numbers: np.ndarray) -> list[UserId]:
        """Return the ids of original ids."""
        return named(self._names, numbers)

    def _number(self, one: UserId) -> int | None:
        if self._order is None:
            return one if isinstance(one, int) and 0 <= one < len(self._positions) else None
        if isinstance(one, int) != self.whole:
            return None

        names, order = self._names, self._order

        def name(rank: int) -> Any:
            return names[order[rank].as_py()].as_py()

        rank = bisect.bisect_left(range(len(names)), one, key=name)
        if rank == len(names) or name(rank) != one:
            return None
        number: int = order[rank].as_py()
        return number
