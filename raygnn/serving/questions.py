"""Questions of a request, and users' ids of nodes."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import field
from functools import cached_property
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import (
    ConfigDict,
    Field,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    model_validator,
)
from pydantic.dataclasses import dataclass
from pydantic_core import PydanticCustomError

from raygnn.errors import InputError, RaygnnError

MOST = 1000  # ids, pairs or graphs of a request, and targets of a list
_EXPLAINED = 10  # ids of a request with explanations
LARGEST_TREE = 50_000  # edges of a prediction's computation tree

UserId: TypeAlias = Annotated[StrictInt | StrictStr, Field(description="as in the graph's tables")]
Ids: TypeAlias = Annotated[list[UserId], Field(min_length=1, max_length=MOST)]
_Scalar: TypeAlias = StrictBool | StrictInt | StrictFloat | StrictStr | None
Row: TypeAlias = dict[str, _Scalar | list[_Scalar]]  # column → value
Rows: TypeAlias = Annotated[dict[str, list[Row]], Field(description="table → new rows")]
Task: TypeAlias = Annotated[
    str | None, Field(description="one of the run's tasks, if several could answer")
]
Relation: TypeAlias = Annotated[str | None, Field(description="of the links, if there are several")]
Arrays: TypeAlias = Annotated[
    dict[str, dict[str, list[Any]]], Field(description="type → array → rows, as in /schema")
]

_KNOWN = ConfigDict(extra="forbid")


class RequestError(InputError):
    """Error of a request, reported to its caller."""


@contextmanager
def request_errors(where: str | None = None) -> Iterator[None]:
    """Turn an error of raygnn in the block into a `RequestError`, at ``where`` if it is set."""
    try:
        yield
    except RaygnnError as error:
        raise RequestError(error.what, where=where or error.where, remedy=error.remedy) from None


@dataclass(frozen=True, config=_KNOWN)
class NodeQuestion:
    """Nodes to predict for."""

    ids: Ids
    fanout: Annotated[
        tuple[Annotated[int, Field(ge=-1, lt=2**31)], ...] | None,
        Field(description="neighbours to sample per layer, from the nodes outward; all by default"),
    ] = None
    at: Annotated[
        StrictInt | StrictStr | None,
        Field(description="predict from edges before this time, such as 2026-01-31"),
    ] = None
    scores: Annotated[bool, Field(description="also return each class's probability")] = False
    explain: Annotated[
        int,
        Field(
            ge=0,
            le=LARGEST_TREE,
            description="number of contributions of features, of nodes and of edges to return with "
            f"each prediction, for at most {_EXPLAINED} ids",
        ),
    ] = 0
    nodes: Rows = field(default_factory=dict)
    edges: Rows = field(default_factory=dict)
    task: Task = None

    @model_validator(mode="after")
    def _few(self) -> NodeQuestion:
        if self.explain and len(self.ids) > _EXPLAINED:
            raise PydanticCustomError("few", f"at most {_EXPLAINED} ids are explained at a time")
        return self


@dataclass(frozen=True, config=_KNOWN)
class PairQuestion:
    """Links to score."""

    pairs: Annotated[
        list[tuple[UserId, UserId]],
        Field(min_length=1, max_length=MOST, description="source and target of each"),
    ]
    relation: Relation = None
    task: Task = None


@dataclass(frozen=True, config=_KNOWN)
class ListQuestion:
    """Sources to recommend targets for."""

    ids: Ids
    k: Annotated[int, Field(ge=1, le=MOST, description="targets of each source")] = 10
    relation: Relation = None
    known: Annotated[
        Literal["exclude", "keep"], Field(description="targets that a source has a link to")
    ] = "exclude"
    task: Task = None


@dataclass(frozen=True, config=_KNOWN)
class GraphRows:
    """A graph. Edges have ``source`` and ``target``, numbers of the nodes in the order of their
    rows."""

    nodes: Arrays
    edges: Arrays


@dataclass(frozen=True, config=_KNOWN)
class GraphQuestion:
    """Graphs to predict for."""

    graphs: Annotated[list[GraphRows], Field(min_length=1, max_length=MOST)]
    scores: Annotated[bool, Field(description="also return each class's probability")] = False
    task: Task = None


@dataclass(frozen=True, config=_KNOWN)
class Update:
    """New rows of tables, which all later requests see; rows of nodes add the edges of their
    keys."""

    nodes: Rows = field(default_factory=dict)
    edges: Rows = field(default_factory=dict)


AnyQuestion = NodeQuestion | PairQuestion | ListQuestion | GraphQuestion
AnswerRows = list[dict[str, Any]]


class NodeIds:
    """The users' ids of a node type, and the positions of its nodes in a shard.

    Args:
        names: pyarrow array ``[N]`` by original id; None = ids are numbers from 0.
        original: original id of each position, int64 ``[N]``.

    Attributes:
        whole: the ids are whole numbers.
    """

    def __init__(self, names: Any, original: np.ndarray):
        self._names, self._original = names, original
        self.whole = names is None or pa.types.is_integer(names.type)

    @cached_property
    def _positions(self) -> np.ndarray:
        return np.argsort(self._original)

    @cached_property
    def _order(self) -> pa.Array:
        # for bisection, since a hash table would need many times the memory of the ids
        return pc.sort_indices(self._names)

    def positions(
        self, ids: Sequence[UserId], where: str, new: Mapping[UserId, int] = MappingProxyType({})
    ) -> np.ndarray:
        """Return the positions of ids, int64 ``[n]``; ``new``: positions of ids that the shard
        lacks. Raises RequestError if an id is unknown."""
        found = [new[one] if one in new else self.position(one) for one in ids]
        unknown = [place for place, position in enumerate(found) if position is None]
        if unknown:
            first = unknown[0]
            what = f"there is no {ids[first]!r} among the {len(self._original):,} of this graph"
            what += f" ({len(unknown)} of {len(ids)} ids are unknown)" * (len(unknown) > 1)
            raise RequestError(what, where=f"{where}[{first}]", remedy="leave it out")
        return np.array(found, np.int64)

    def position(self, one: UserId) -> int | None:
        """Return the position of an id; None if it is unknown."""
        if isinstance(one, int) != self.whole:
            return None
        if self._names is None:
            known = 0 <= int(one) < len(self._original)
            return int(self._positions[int(one)]) if known else None

        def name(rank: int) -> Any:
            return self._names[self._order[rank].as_py()].as_py()

        rank = bisect.bisect_left(range(len(self._names)), one, key=name)
        if rank == len(self._names) or name(rank) != one:
            return None
        return int(self._positions[self._order[rank].as_py()])

    def names(self, numbers: np.ndarray) -> list[UserId]:
        """Return the users' ids of original ids, int64 ``[n]``."""
        if self._names is None:
            return list(numbers.tolist())
        return list(self._names.take(pa.array(numbers)).to_pylist())
