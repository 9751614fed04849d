"""A complete graph in memory, as a source provides it: plain arrays, typed from the start.

Building one needs neither torch nor dgl, so that bad input is reported in well under a second. A
homogeneous graph has node type ``"_N"`` and edge type ``("_N", "_E", "_N")``, DGL's defaults.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from raygnn.errors import DataError

EdgeType = tuple[str, str, str]

DEFAULT_NTYPE = "_N"
DEFAULT_ETYPE: EdgeType = ("_N", "_E", "_N")

SPLITS = ("train", "val", "test")
MASKS = tuple(f"{split}_mask" for split in SPLITS)
NEVER = 1 << 62  # in place of a missing time: after all others


@dataclass
class NodeFrame:
    """The nodes of one type, with ids ``0 … num-1``.

    ``data``: name → array ``[num, …]`` (a torch tensor for bfloat16). Conventional names: ``feat``
    (floats or integers), ``label`` (int64 ``[num]``; -1 = unknown), ``train_mask``, ``val_mask``,
    ``test_mask`` (bool ``[num]``).
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
    """A complete graph.

    Attributes:
        name: a short name, used for the partition's files.
        edges: canonical edge type ``(source type, relation, destination type)`` → frame.
        origin: ``"<type>/<array>"`` or ``"<type>"`` (edge types joined by ``:``) → the file it was
            read from, with the array's name in it if that differs; ``""`` → the file or directory
            of the graph. Used in errors.
        ids: node type → the user's node ids, a pyarrow array of int64 or large_string ``[num]``;
            types without one have only numbers.
        names: ``"<type>/<array>"`` → categories of its codes 0, 1, …
        reverses: edge type → type with its edges reversed, in the same order.
        transforms: ``"<type>/<array>"`` → transforms of its columns with their fitted state: see
            `raygnn.graph.tables.frames.TableArrays.fit`.
        columns: ``"<node type>/<array>"`` → name of each number of its rows.
        microseconds: types, not reversed ones, whose ``time`` is known to be in microseconds.
    """

    name: str
    nodes: dict[str, NodeFrame]
    edges: dict[EdgeType, EdgeFrame]
    origin: dict[str, str] = field(default_factory=dict)
    ids: dict[str, Any] = field(default_factory=dict)
    names: dict[str, list[Any]] = field(default_factory=dict)
    reverses: dict[EdgeType, EdgeType] = field(default_factory=dict)
    transforms: dict[str, Any] = field(default_factory=dict)
    columns: dict[str, list[str]] = field(default_factory=dict)
    microseconds: list[str] = field(default_factory=list)

    @property
    def arrays(self) -> dict[str, dict[str, Any]]:
        """Node or edge type, the latter joined by ``:`` → its arrays."""
        arrays = {ntype: frame.data for ntype, frame in self.nodes.items()}
        return arrays | {etype_str(etype): frame.data for etype, frame in self.edges.items()}

    @property
    def num_nodes(self) -> int:
        return sum(frame.num for frame in self.nodes.values())

    @property
    def num_edges(self) -> int:
        return sum(frame.num for frame in self.edges.values())

    def where(self, key: str) -> str:
        """Return the location of ``"<type>/<array>"`` for errors."""
        kind = key.rpartition("/")[0] or key
        place = self.origin.get(key) or self.origin.get(kind)
        return place or f"{self.origin.get('', self.name)}: {key}"


def etype_str(etype: EdgeType) -> str:
    """Convert ``("a", "r", "b")`` to ``"a:r:b"``, DGL's spelling in partition files."""
    return ":".join(etype)


@dataclass(frozen=True)
class EdgeSplit:
    """Split of the edges of type ``etype``, which are predicted.

    Attributes:
        reverse: edge type whose edges are hidden if they reverse a hidden edge; None = none.
        shares: fractions of the edges for validation and for test, or the times from which on they
            are in them (see `raygnn.graph.times.moment`); None = use the edges' masks.
        seed: seed of a random split.
        time: array with the time of each edge, to split by time; None = at random.
    """

    etype: EdgeType
    reverse: EdgeType | None = None
    shares: tuple[float | int | str, float | int | str] | None = None
    seed: int = 0
    time: str | None = None


@dataclass(frozen=True)
class EdgeTarget:
    """Edges that a task predicts for. ``relation``: edge array of their relations, or None."""

    split: EdgeSplit
    relation: str | None = None

    @property
    def etype(self) -> EdgeType:
        return self.split.etype


TRAINING = "training"  # key of the negatives to train with, beside those of splits
TABLE = "table"  # key of the rows of a training table


def table_key(task: str) -> str:
    """Return the key of the classes of a task's training table among all words of a run."""
    return f"table of task {task}/target"


@dataclass(frozen=True)
class NegativeLists:
    """Listed negative edges of one edge type; nodes are numbered as in the user's graph.

    Attributes:
        where: the file.
        ends: int64 ``[2, P]``, the edges that have lists, or are ranked; None = all.
        relation: int64 ``[P]``; None if edges have none.
        others: end → ``[P, K]``, nodes that replace it. Shorter lists are padded with the edge's
            own end, which never counts.
        pairs: ``[2, M]``, negative edges for all positives; None = each positive has a list.
        rows: int64 ``[P]`` or ``[M]``, their rows in the file, from 0.
        digest: hash of the file.
    """

    where: str
    ends: Any
    relation: Any
    others: Mapping[str, Any]
    pairs: Any
    rows: Any
    digest: str

    def error(self, message: str, remedy: str, row: int | None = None) -> DataError:
        """Build the error of the file, or of one list or pair."""
        place = self.where if row is None else f"{self.where}, row {self.rows[row] + 1}"
        return DataError(message, where=place, remedy=remedy)


@dataclass(frozen=True)
class TrainingRows:
    """Rows of a training table, in the order of its files.

    Attributes:
        nodes: number of the entity in the user's graph, int64 ``[N]``.
        times: int64 ``[N]``; None = the table has none.
        splits: int8 ``[N]``, positions in `SPLITS`; -1 = in none.
        targets: classes int64 ``[N]``, -1 = unknown; numbers float32 ``[N]`` or ``[N, K]``, NaN =
            unknown; labels int8 ``[N, K]``, -1 = unknown; None = the rows to predict have none.
        words: class → its name; empty = the targets are no classes.
        in_microseconds: True if the times are known to be.
        digest: SHA-256 of the files.
    """

    nodes: Any
    times: Any
    splits: Any
    targets: Any
    words: Sequence[Any]
    in_microseconds: bool
    digest: str

    @property
    def counts(self) -> dict[str, int]:
        """Split → number of rows in it."""
        return {split: int((self.splits == code).sum()) for code, split in enumerate(SPLITS)}
