"""Graphs as text, as published with GIN (Xu et al., "How powerful are graph neural networks?").

The first line is the number of graphs. Each graph is a line ``n label``, then for each node a
line ``tag degree neighbours…``, which some files follow with attributes. Edges without direction
are listed at both of their ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from raygnn.errors import DataError
from raygnn.graph.data import DEFAULT_ETYPE, DEFAULT_NTYPE, EdgeFrame, GraphData, NodeFrame
from raygnn.graph.sources.files import check_file, check_fits_memory
from raygnn.graph.sources.many import GraphSet

_REMEDY = (
    "Give the number of graphs, then for each a line 'n label' and n lines 'tag degree neighbours'."
)

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class _Graph:
    """One graph as it was read: tags ``[N]``, degrees ``[N]``, neighbours ``[E]``, attributes
    float32 ``[N, A]`` and the label."""

    tag: Array
    degree: Array
    neighbours: Array
    attr: Array
    label: int


@contextmanager
def read(file: Path) -> Iterator[GraphSet]:
    """The graphs of one file; an edge leads from a node to each of its neighbours.

    Nodes have ``tag``, int64 ``[N]``, and ``feat``, that one-hot in float32 ``[N, T]``; and
    ``attr``, float32 ``[N, A]``, where the file has attributes. Graphs have ``label``, int64.
    Tags and labels are numbered 0, 1, … in ascending order, over the whole file.

    Raises:
        DataError: the file is no such text; the first bad line is named.
    """
    graphs = _parse(file)
    labels, numbers = np.unique([graph.label for graph in graphs], return_inverse=True)
    tags = np.unique(np.concatenate([graph.tag for graph in graphs] or [np.zeros(0, np.int64)]))
    total = sum(len(graph.tag) for graph in graphs)
    what = f"the one-hot tags of {total:,} nodes, of {len(tags):,} kinds,"
    check_fits_memory(4 * total * len(tags), what, str(file))
    yield GraphSet(
        file,
        len(graphs),
        {"label": numbers.astype(np.int64)},
        (_to_data(graph, tags, f"{file}: graph {number}") for number, graph in enumerate(graphs)),
        {"label": labels.astype(np.int64).tolist(), "tag": tags.tolist()},
    )


def _to_data(graph: _Graph, tags: Array, where: str) -> GraphData:
    tag = np.searchsorted(tags, graph.tag)
    feat = np.zeros((len(tag), len(tags)), np.float32)
    feat[np.arange(len(tag)), tag] = 1
    data = {"feat": feat, "tag": tag}
    if graph.attr.shape[1]:
        data["attr"] = graph.attr
    edges = EdgeFrame(np.repeat(np.arange(len(tag)), graph.degree), graph.neighbours)
    return GraphData(where, {DEFAULT_NTYPE: NodeFrame(len(tag), data)}, {DEFAULT_ETYPE: edges})


def _parse(file: Path) -> list[_Graph]:
    check_file(file)
    with file.open("rb") as stream:
        lines = _Lines(file, stream)
        (count,) = lines.integers("the number of graphs", 1)
        graphs: list[_Graph] = []
        width = None
        for number in range(_natural(lines, count, "number of graphs")):
            lines.inside = f" (graph {number} of {count})"
            graphs.append(_parse_graph(lines, width))
            if len(graphs[-1].tag):
                width = graphs[-1].attr.shape[1]
        lines.inside = ""
        lines.end()
    return graphs


def _parse_graph(lines: _Lines, width: int | None) -> _Graph:
    """``width`` is how many attributes each node has; None before the first node."""
    num, label = lines.integers("'n label'", 2)
    first = lines.at + 1
    tag, degree, neighbours, attr = [], [], [], []
    for _ in range(_natural(lines, num, "number of nodes")):
        words = lines.words()
        head = lines.to_integers(words[:2])
        if len(head) < 2 or not 0 <= head[1] <= len(words) - 2:
            raise lines.bad("expected 'tag degree neighbours', with as many as the degree says")
        extra = words[2 + head[1] :]
        if width is None:
            width = len(extra)
        if len(extra) != width:
            raise lines.bad(f"there are {len(extra)} attributes, but {width} in the lines before")
        tag.append(head[0])
        degree.append(head[1])
        neighbours += lines.to_integers(words[2 : 2 + head[1]])
        if extra:
            attr.append(lines.to_numbers(extra))
    outside = np.flatnonzero([not 0 <= other < num for other in neighbours])
    if len(outside):
        at = int(np.searchsorted(np.cumsum(degree), outside[0], side="right"))
        raise lines.bad(
            f"the neighbour {neighbours[outside[0]]} is not a node: there are {num}", first + at
        )
    return _Graph(
        np.array(tag, np.int64),
        np.array(degree, np.int64),
        np.array(neighbours, np.int32 if num < 2**31 else np.int64),
        np.array(attr, np.float32).reshape(num, width or 0),
        label,
    )


def _natural(lines: _Lines, value: int, what: str) -> int:
    if value < 0:
        raise lines.bad(f"the {what} is {value}")
    return value


class _Lines:
    """The lines of a file; ``at`` counts them from 1, ``inside`` says what they belong to."""

    def __init__(self, file: Path, stream: Any):
        self.file = file
        self.stream = stream
        self.at = 0
        self.inside = ""

    def bad(self, what: str, at: int | None = None) -> DataError:
        where = f"{self.file}: line {self.at if at is None else at}{self.inside}"
        return DataError(what, where=where, remedy=_REMEDY)

    def words(self) -> list[bytes]:
        self.at += 1
        line = self.stream.readline()
        if not line:
            raise self.bad("the file ends here: it is truncated")
        found: list[bytes] = line.split()
        return found

    def integers(self, what: str, count: int) -> list[int]:
        """A line of ``count`` integers."""
        words = self.words()
        if len(words) != count:
            raise self.bad(f"expected {what}, found {len(words)} words")
        return self.to_integers(words)

    def to_integers(self, words: list[bytes]) -> list[int]:
        try:
            found = [int(word) for word in words]
        except ValueError:
            raise self.bad(f"expected integers, found {_shown(words)}") from None
        if found and not -(2**63) <= min(found) <= max(found) < 2**63:
            raise self.bad(f"{_shown(words)} does not fit 64 bits")
        return found

    def to_numbers(self, words: list[bytes]) -> list[float]:
        """Attributes, which must be finite in float32, too."""
        try:
            found = [float(word) for word in words]
        except ValueError:
            raise self.bad(f"expected numbers, found {_shown(words)}") from None
        with np.errstate(over="ignore"):
            if not np.isfinite(np.array(found, np.float32)).all():
                raise self.bad(f"expected finite numbers, found {_shown(words)}")
        return found

    def end(self) -> None:
        for line in self.stream:
            self.at += 1
            if line.strip():
                raise self.bad("the file goes on after its last graph")


def _shown(words: list[bytes]) -> str:
    return repr(b" ".join(words)[:60].decode("ascii", "backslashreplace"))
