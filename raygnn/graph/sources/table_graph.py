"""Tables of nodes and edges, in files or databases, described by a YAML file.

Nodes and edges are numbered in the order of their rows. The partition keeps the ids of the tables,
and predictions are written with them.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from raygnn.config.graph import TablesGraph
from raygnn.errors import DataError
from raygnn.graph.data import GraphData
from raygnn.graph.outofcore.workspace import Workspace, in_turn
from raygnn.graph.tables.databases import description_of
from raygnn.graph.tables.queries import queries_of
from raygnn.graph.tables.reader import resolve
from raygnn.graph.tables.table_stages import extents, in_memory, read_tables
from raygnn.graph.texts import identity as identity  # of encoders
from raygnn.storage.remote import AnyPath
from raygnn.util.files import storage_errors

VERSION = 4


def files(graph: TablesGraph) -> list[AnyPath]:
    """Return the description, its tables in order, and the vocabulary if there is one."""
    file, described = Path(graph.path), description_of(graph)
    paths: list[AnyPath] = [file]
    for table in described.tables.values():
        paths += resolve(file.parent, table.files)
    queries = queries_of(file, described).values()
    paths += dict.fromkeys(path for query in queries for path in query.files)
    return paths if graph.vocabulary is None else [*paths, graph.vocabulary]


def reading_bytes(graph: TablesGraph) -> int:
    """Estimate the bytes of the arrays; see `raygnn.graph.sources.reading_bytes`."""
    return sum(
        size * (1 + getattr(table, "undirected", False)) for table, _, size in extents(graph)
    )


def read(graph: TablesGraph) -> GraphData:
    """Read the graph with the types, arrays and ids of the description.

    Features are float32 ``[N, F]``, or float16 if the columns are; ``label`` int64 ``[N]`` (classes
    in sorted order, -1 = unknown) or float32 ``[N]`` (numbers, NaN = unknown); categories int64
    ``[N]``; masks bool ``[N]``. Edges can have the same arrays, and ``weight`` float32 ``[E]``;
    ``time`` is int64. Arrays are written to a temporary directory until all are read.
    """
    with (
        TemporaryDirectory(prefix="raygnn-") as place,
        storage_errors(Path(place), DataError, "set TMPDIR to a larger disk"),
    ):
        return in_memory(read_tables(graph, Workspace(Path(place), in_turn, lambda _: None)))
