"""Tables of nodes and of edges, in CSV or Parquet, as a YAML of their own describes them.

Nodes are numbered in the order of their rows, edges too. The user's ids are kept beside the
graph, and predictions are written by them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa

from raygnn.config.graph import TablesGraph
from raygnn.errors import DataError
from raygnn.graph.data import EdgeFrame, EdgeType, GraphData, etype_str
from raygnn.graph.partition.manifest import read_json
from raygnn.graph.sources.input_files import check_file
from raygnn.graph.tables.description import Description, read_description
from raygnn.graph.tables.frames import FitTo, NodeColumns, edge_reader, read_edges
from raygnn.graph.tables.reader import resolve
from raygnn.storage.remote import AnyPath

VERSION = 4


def files(graph: TablesGraph) -> list[AnyPath]:
    """Return the description, its tables in order, and the vocabulary if there is one.

    Raises:
        ConfigError, DataError: the description is wrong, or there is no such file.
    """
    file, described = Path(graph.path), read_description(Path(graph.path))
    tables = (*described.nodes.values(), *described.edges.values())
    paths: list[AnyPath] = [
        file,
        *(path for table in tables for path in resolve(file.parent, table.files)),
    ]
    return paths if graph.vocabulary is None else [*paths, graph.vocabulary]


def reading_bytes(graph: TablesGraph) -> int:
    """See :func:`raygnn.graph.sources.reading_bytes`: of the columns that the description names."""
    base, described = Path(graph.path).parent, read_description(Path(graph.path))
    total = 0
    for ntype, nodes in described.nodes.items():
        total += NodeColumns(ntype, nodes, resolve(base, nodes.files), {}).reader.reading_bytes()
    for edges in described.edges.values():
        size = edge_reader(edges, resolve(base, edges.files)).reading_bytes()
        total += 2 * size if edges.undirected else size
    return total


def read(graph: TablesGraph) -> GraphData:
    """Read the graph with the types, arrays and ids of the description.

    Features are float32 ``[N, F]``, float16 where they are stored so, ``label`` int64 ``[N]``
    (classes in sorted order, -1 = unknown) or float32 ``[N]`` (numbers, NaN = unknown), categories
    int64 ``[N]``, masks bool ``[N]``; of edges the same, ``weight`` float32 ``[E]`` and ``time``
    int64 ``[E]``. Memory is that of the arrays, and of a chunk.

    Raises:
        ConfigError: the description is wrong; its keys and lines are named.
        DataError: a table is; its file, row and column are named.
    """
    file, described = Path(graph.path), read_description(Path(graph.path))
    origin = {"": str(file)}
    vocabulary, to = vocabulary_of(graph), fit_to(graph, described)
    nodes: dict[str, NodeColumns] = {}
    for ntype, table in described.nodes.items():
        paths = resolve(file.parent, table.files)
        nodes[ntype] = NodeColumns(ntype, table, paths, vocabulary.get(ntype, {}), to=to)
        origin[ntype] = f"{file}: nodes.{ntype}"
        nodes[ntype].read()
    edges: dict[EdgeType, EdgeFrame] = {}
    reverses: dict[EdgeType, EdgeType] = {}
    names: dict[str, list[Any]] = {}
    transforms = {key: one for table in nodes.values() for key, one in table.transforms.items()}
    for key, edge_table in described.edges.items():
        etype = described.edge_type(key)
        words = vocabulary.get(etype_str(etype), {})
        if edge_table.reverse is not None:
            reverses[etype] = (etype[2], edge_table.reverse, etype[0])
            words = words or vocabulary.get(etype_str(reverses[etype]), {})
        paths = resolve(file.parent, edge_table.files)
        frames, values, made = read_edges(etype, edge_table, paths, nodes, words, to)
        edges |= frames
        transforms |= made
        for other in map(etype_str, frames):
            origin[other] = f"{file}: edges.{key}"
            names |= {f"{other}/{name}": stands_for for name, stands_for in values.items()}
    pa.default_memory_pool().release_unused()  # of the chunks, which Arrow would keep
    node_frames = {ntype: table.frame() for ntype, table in nodes.items()}
    for ntype, of_type in nodes.items():
        names |= {f"{ntype}/{name}": values for name, values in of_type.names.items()}
    ids = {ntype: table.ids.values for ntype, table in nodes.items()}
    of_tables = ids, names, reverses, transforms, described.microseconds
    return GraphData(file.stem, node_frames, edges, origin, *of_tables)


def vocabulary_of(graph: TablesGraph) -> dict[str, dict[str, list[Any]]]:
    """Return type → array → meaning of its codes, from the run or partition that the graph names.

    Raises:
        DataError: the file has no words.
    """
    if (file := graph.vocabulary) is None:
        return {}
    check_file(file)
    content = read_json(file)
    named = content.get("words", content.get("names"))
    if not isinstance(named, dict) or not all(isinstance(words, list) for words in named.values()):
        raise DataError(
            "has no words of tables",
            where=str(file),
            remedy="name a run's checkpoints/selected.json or a partition's raygnn.json",
        )
    vocabulary: dict[str, dict[str, list[Any]]] = {}
    for key, words in named.items():
        kind, _, name = key.rpartition("/")
        vocabulary.setdefault(kind, {})[name] = words
    return vocabulary


def fit_to(graph: TablesGraph, described: Description) -> FitTo:
    """Return the rows that transforms of features are fitted to, or their state in the run or
    partition that the graph names (see `GraphData`)."""
    kept = graph.vocabulary
    trained = None if kept is None else read_json(kept).get("transforms") or {}
    base, tables = Path(graph.path).parent, [*described.nodes.values(), *described.edges.values()]
    return FitTo.from_tables([(table, resolve(base, table.files)) for table in tables], trained)
