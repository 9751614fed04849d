"""A whole graph in memory, as a source hands it over: plain arrays, typed from the start.

Neither torch nor dgl is needed to build one, so that bad input is reported in well under a
second. A homogeneous graph is the one-type case: node type ``"_N"``, edge type
``("_N", "_E", "_N")``, DGL's own default names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from raygnn.errors import DataError

EdgeType = tuple[str, str, str]

DEFAULT_NTYPE = "_N"
DEFAULT_ETYPE: EdgeType = ("_N", "_E", "_N")

SPLITS = ("train", "val", "test")
MASKS = tuple(f"{split}_mask" for split in SPLITS)


@dataclass
class NodeFrame:
    """The nodes of one type.

    Attributes:
        num: how many nodes there are; ids are ``0 … num-1``.
        data: name → array of shape ``[num, …]``. Conventional names: ``feat`` (any float or
            integer dtype), ``label`` (int64 ``[num]``; -1 = unknown), ``train_mask``,
            ``val_mask``, ``test_mask`` (bool ``[num]``). A torch tensor stands in where numpy
            has no dtype (bfloat16).
    """

    num: int
    data: dict[str, Any] = field(default_factory=dict)


@dataclass
class EdgeFrame:
    """The edges of one type, ``src[i]`` to ``dst[i]`` (int64 ``[E]``); ``data`` as for nodes."""

    src: Any
    dst: Any
    data: dict[str, Any] = field(default_factory=dict)

    @property
    def num(self) -> int:
        return len(self.src)


@dataclass
class GraphData:
    """A whole graph.

    Attributes:
        name: a short name, used for the partition's files.
        nodes: node type → frame.
        edges: canonical edge type ``(source type, relation, destination type)`` → frame.
        origin: ``"<type>/<array>"`` or ``"<type>"`` (edge types joined by ``:``) → the file it was
            read from, with the array's name in it where that differs; ``""`` → the file or
            directory as a whole. Used to name the file in errors.
        ids: node type → what the user calls its nodes, a pyarrow array of int64 or large_string
            ``[num]``; of types without one, the numbers are all there is.
        names: ``"<type>/<array>"`` → what the codes 0, 1, … in it stand for.
        reverses: edge type → the one that holds its edges the other way round, in the same order.
        transforms: ``"<type>/<array>"`` → what was done to its columns, and what the rows for
            training say for that: see `raygnn.graph.tables.frames.settle`.
    """

    name: str
    nodes: dict[str, NodeFrame]
    edges: dict[EdgeType, EdgeFrame]
    origin: dict[str, str] = field(default_factory=dict)
    ids: dict[str, Any] = field(default_factory=dict)
    names: dict[str, list[Any]] = field(default_factory=dict)
    reverses: dict[EdgeType, EdgeType] = field(default_factory=dict)
    transforms: dict[str, Any] = field(default_factory=dict)

    @property
    def num_nodes(self) -> int:
        return sum(frame.num for frame in self.nodes.values())

    @property
    def num_edges(self) -> int:
        return sum(frame.num for frame in self.edges.values())

    def where(self, key: str) -> str:
        """The place of ``"<type>/<array>"`` for errors."""
        kind = key.rpartition("/")[0] or key
        place = self.origin.get(key) or self.origin.get(kind)
        return place or f"{self.origin.get('', self.name)}: {key}"


def etype_str(etype: EdgeType) -> str:
    """``("a", "r", "b")`` → ``"a:r:b"``, DGL's own spelling in partition files."""
    return ":".join(etype)


@dataclass(frozen=True)
class EdgeSplit:
    """How the edges of one type are split.

    Attributes:
        etype: whose edges are predicted.
        reverse: the type whose edges are hidden, too, where they join the two nodes of a hidden
            edge the other way round; None = none.
        shares: of the edges for validation and for test, or by time from when on they are (see
            `raygnn.graph.times.moment`); None = by the edges' masks.
        seed: of the shares.
        time: the array that says when each edge is, by which they are split; None = at random.
    """

    etype: EdgeType
    reverse: EdgeType | None = None
    shares: tuple[float | int | str, float | int | str] | None = None
    seed: int = 0
    time: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return asdict(self)


@dataclass(frozen=True)
class EdgeTarget:
    """What a task on edges predicts for.

    Attributes:
        relation: the edge array that holds each edge's relation; None = they have none.
    """

    split: EdgeSplit
    relation: str | None = None

    @property
    def etype(self) -> EdgeType:
        return self.split.etype


TRAINING = "training"  # what negatives are for that are not for a split


@dataclass(frozen=True)
class NegativeLists:
    """What edges of one type are told from; nodes by their numbers in the user's graph.

    Attributes:
        where: the file.
        ends: int64 ``[2, P]``, the edges that have lists, or are ranked; None = all.
        relation: int64 ``[P]``; None where edges have none.
        others: end → ``[P, K]``, nodes in its place. An edge's own end, which never counts, fills
            up lists that are shorter.
        pairs: ``[2, M]``, edges that are not there, the same for all; None = each has a list.
        rows: int64 ``[P]`` or ``[M]``, where they are in the file, from 0.
        digest: of a file of the user's own, in which no edge may be that is there.
    """

    where: str
    ends: Any
    relation: Any
    others: Mapping[str, Any]
    pairs: Any
    rows: Any
    digest: str = ""

    def error(self, message: str, remedy: str, row: int | None = None) -> DataError:
        """What is wrong with the file, or with a list, or a pair."""
        place = self.where if row is None else f"{self.where}, row {self.rows[row] + 1}"
        return DataError(message, where=place, remedy=remedy)
