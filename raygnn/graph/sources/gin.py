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
from typing import Any

import numpy as np

from raygnn.errors import DataError
from raygnn.graph.data import DEFAULT_ETYPE, DEFAULT_NTYPE, EdgeFrame, GraphData, NodeFrame
from raygnn.graph.sources.files import check_file, check_fits_memory
from raygnn.graph.sources.many import GraphSet

_REMEDY = (
    "Give the number of graphs, then for each a line 'n label' and n lines 'tag degree neighbours'."
)

_SHOWN = 20

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
def read(
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
        every = [graph.tag for graph in graphs] or [np.zeros(0, np.int64)]
        tags = np.unique(np.concatenate(every)).tolist()
    if labels is None:
        labels = sorted({graph.label for graph in graphs})
    number_of = {label: number for number, label in enumerate(labels)}
    number_of.setdefault(-1, -1)
    numbers = np.zeros(len(graphs), np.int64)
    for at, graph in enumerate(graphs):
        if graph.label not in number_of:
            raise _unknown(f"{file}: graph {at}", "label", graph.label, labels)
        numbers[at] = number_of[graph.label]
    kinds = np.array(tags, np.int64)
    total = sum(len(graph.tag) for graph in graphs)
    what = f"the one-hot tags of {total:,} nodes, of {len(tags):,} kinds,"
    check_fits_memory(4 * total * len(tags), what, str(file))
    yield GraphSet(
        file,
        len(graphs),
        {"label": numbers},
        (_to_data(graph, kinds, f"{file}: graph {number}") for number, graph in enumerate(graphs)),
        {"label": list(labels), "tag": list(tags)},
    )


def _unknown(where: str, what: str, value: int, known: Sequence[int]) -> DataError:
    shown = ", ".join(map(str, known[:_SHOWN])) + (", …" if len(known) > _SHOWN else "")
    return DataError(
        f"there is a {what} {value}, which is none of the {len(known)} in graph.{what}s: {shown}",
        where=where,
        remedy=f"leave out graphs with other {what}s"
        + (", or give them the label -1, unknown, to predict for them" if what == "label" else ""),
    )


def _to_data(graph: _Graph, tags: Array, where: str) -> GraphData:
    order = np.argsort(tags, kind="stable")
    at = np.searchsorted(tags, graph.tag, sorter=order)
    tag = order[np.minimum(at, len(order) - 1)]
    if (other := np.flatnonzero(tags[tag] != graph.tag)).size:
        raise _unknown(where, "tag", int(graph.tag[other[0]]), tags.tolist())
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
