"""Graphs as text, as published with GIN (Xu et al., "How powerful are graph neural networks?").

The first line is the number of graphs. Each graph is a line ``n label``, then for each node a
line ``tag degree neighbours…``, which some files follow with attributes. Edges without direction
are listed at both of their ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from raygnn.errors import DataError
from raygnn.graph.arrays import Array
from raygnn.graph.data import DEFAULT_ETYPE, DEFAULT_NTYPE, EdgeFrame, GraphData, NodeFrame
from raygnn.graph.sources.input_files import check_fits_memory, opened
from raygnn.graph.sources.saved_graphs import GraphSet

_REMEDY = (
    "give the number of graphs, then for each a line 'n label' and n lines 'tag degree neighbours'"
)
_SHOWN = 20


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
def read_all(
    file: Path, tags: Sequence[int] | None = None, labels: Sequence[int] | None = None
) -> Iterator[GraphSet]:
    """The graphs of one file; an edge leads from a node to each of its neighbours.

    Nodes have ``tag``, int64 ``[N]``, and ``feat``, that one-hot in float32 ``[N, T]``; and
    ``attr``, float32 ``[N, A]``, where the file has attributes. Graphs have ``label``, int64.
    Tags and labels are numbered 0, 1, … in ascending order, over the whole file.

    Args:
        tags, labels: what is numbered 0, 1, … instead. A label of -1 that is none of these is one
            that is not known, and stays -1.

    Raises:
        DataError: the file is no such text, of which the first bad line is named; or has a tag or
            label that is none of those given.
    """
    graphs = _parse(file)
    if tags is None:
        tags = sorted({tag for graph in graphs for tag in np.unique(graph.tag).tolist()})
    if labels is None:
        labels = sorted({graph.label for graph in graphs})
    class_of = {label: number for number, label in enumerate(labels)}
    class_of.setdefault(-1, -1)
    classes = np.zeros(len(graphs), np.int64)
    for at, graph in enumerate(graphs):
        if graph.label not in class_of:
            raise _not_listed(f"{file}: graph {at}", "label", graph.label, labels)
        classes[at] = class_of[graph.label]
    columns = np.array(tags, np.int64)
    total = sum(len(graph.tag) for graph in graphs)
    array = f"the one-hot tags of {total:,} nodes, of {len(tags):,} kinds,"
    check_fits_memory(4 * total * len(tags), array, str(file))
    yield GraphSet(
        file,
        len(graphs),
        {"label": classes},
        (_convert(graph, columns, f"{file}: graph {at}") for at, graph in enumerate(graphs)),
        {"label": list(labels), "tag": list(tags)},
    )


def _not_listed(where: str, kind: str, value: int, listed: Sequence[int]) -> DataError:
    shown = ", ".join(map(str, listed[:_SHOWN])) + (", …" if len(listed) > _SHOWN else "")
    unknown = ", or give them the label -1, unknown, to predict for them"
    return DataError(
        f"there is a {kind} {value}, which is none of the {len(listed)} in graph.{kind}s: {shown}",
        where=where,
        remedy=f"leave out graphs with other {kind}s" + (unknown if kind == "label" else ""),
    )


def _convert(graph: _Graph, tags: Array, where: str) -> GraphData:
    order = np.argsort(tags, kind="stable")
    at = np.searchsorted(tags, graph.tag, sorter=order)
    tag = order[np.minimum(at, len(order) - 1)]
    if (other := np.flatnonzero(tags[tag] != graph.tag)).size:
        raise _not_listed(where, "tag", int(graph.tag[other[0]]), tags.tolist())
    feat = np.zeros((len(tag), len(tags)), np.float32)
    feat[np.arange(len(tag)), tag] = 1
    data = {"feat": feat, "tag": tag}
    if graph.attr.shape[1]:
        data["attr"] = graph.attr
    edges = EdgeFrame(np.repeat(np.arange(len(tag)), graph.degree), graph.neighbours)
    return GraphData(where, {DEFAULT_NTYPE: NodeFrame(len(tag), data)}, {DEFAULT_ETYPE: edges})


def _parse(file: Path) -> list[_Graph]:
    with opened(file) as stream:
        lines = _Lines(file, stream)
        (count,) = lines.integers("the number of graphs", 1)
        lines.check_natural(count, "number of graphs")
        graphs: list[_Graph] = []
        width = None
        for number in range(count):
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
    lines.check_natural(num, "number of nodes")
    first = lines.at + 1
    tag, degree, neighbours, attr = [], [], [], []
    for _ in range(num):
        words = lines.words()
        head = lines.to_integers(words[:2])
        if len(head) < 2 or not 0 <= head[1] <= len(words) - 2:
            raise lines.error("expected 'tag degree neighbours', with as many as the degree says")
        extra = words[2 + head[1] :]
        width = len(extra) if width is None else width
        if len(extra) != width:
            raise lines.error(f"there are {len(extra)} attributes, but {width} in the lines before")
        tag.append(head[0])
        degree.append(head[1])
        neighbours += lines.to_integers(words[2 : 2 + head[1]])
        if extra:
            attr.append(lines.to_numbers(extra))
    outside = np.flatnonzero([not 0 <= other < num for other in neighbours])
    if len(outside):
        at = int(np.searchsorted(np.cumsum(degree), outside[0], side="right"))
        message = f"the neighbour {neighbours[outside[0]]} is not a node: there are {num}"
        raise lines.error(message, first + at)
    return _Graph(
        np.array(tag, np.int64),
        np.array(degree, np.int64),
        np.array(neighbours, np.int32 if num < 2**31 else np.int64),
        np.array(attr, np.float32).reshape(num, width or 0),
        label,
    )


class _Lines:
    """The lines of a file; ``at`` counts them from 1, ``inside`` says what they belong to."""

    def __init__(self, file: Path, stream: BinaryIO):
        self.file = file
        self.stream = stream
        self.at = 0
        self.inside = ""

    def error(self, message: str, at: int | None = None) -> DataError:
        where = f"{self.file}: line {self.at if at is None else at}{self.inside}"
        return DataError(message, where=where, remedy=_REMEDY)

    def words(self) -> list[bytes]:
        self.at += 1
        line = self.stream.readline()
        if not line:
            raise self.error("the file ends here: it is truncated")
        return line.split()

    def integers(self, expected: str, count: int) -> list[int]:
        """A line of ``count`` integers."""
        words = self.words()
        if len(words) != count:
            raise self.error(f"expected {expected}, found {len(words)} words")
        return self.to_integers(words)

    def check_natural(self, value: int, noun: str) -> None:
        if value < 0:
            raise self.error(f"the {noun} is {value}")

    def to_integers(self, words: list[bytes]) -> list[int]:
        try:
            integers = [int(word) for word in words]
        except ValueError:
            raise self.error(f"expected integers, found {_shown(words)}") from None
        if integers and not -(2**63) <= min(integers) <= max(integers) < 2**63:
            raise self.error(f"{_shown(words)} does not fit 64 bits")
        return integers

    def to_numbers(self, words: list[bytes]) -> list[float]:
        """Attributes, which must be finite in float32, too."""
        try:
            numbers = [float(word) for word in words]
        except ValueError:
            raise self.error(f"expected numbers, found {_shown(words)}") from None
        with np.errstate(over="ignore"):
            if not np.isfinite(np.array(numbers, np.float32)).all():
                raise self.error(f"expected finite numbers, found {_shown(words)}")
        return numbers

    def end(self) -> None:
        for line in self.stream:
            self.at += 1
            if line.strip():
                raise self.error("the file goes on after its last graph")


def _shown(words: list[bytes]) -> str:
    return repr(b" ".join(words)[:60].decode("ascii", "backslashreplace"))
