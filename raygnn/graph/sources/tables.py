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
from raygnn.graph.partition.dgl_json import read_json
from raygnn.graph.sources.files import check_file
from raygnn.graph.tables.description import edge_type, read_spec
from raygnn.graph.tables.edges import edge_reader, read_edges
from raygnn.graph.tables.nodes import Nodes
from raygnn.graph.tables.reader import resolve

VERSION = 2
DEFAULT_NORMALIZE = "none"

_EDGE_ARRAYS = ("src", "dst", "label", "train_mask")


def files(graph: TablesGraph) -> list[Path]:
    """The description, the tables in its order, and the vocabulary if there is one.

    Raises:
        ConfigError, DataError: the description is wrong, or there is no such file.
    """
    file, spec = Path(graph.path), read_spec(Path(graph.path))
    tables = (*spec.nodes.values(), *spec.edges.values())
    found = [file, *(each for table in tables for each in resolve(file.parent, table.files))]
    return found if graph.vocabulary is None else [*found, graph.vocabulary]


def reading_bytes(graph: TablesGraph) -> int:
    """See :func:`raygnn.graph.sources.reading_bytes`: of the columns that the description names."""
    base, spec = Path(graph.path).parent, read_spec(Path(graph.path))
    total = 0
    for ntype, table in spec.nodes.items():
        total += Nodes(ntype, table, resolve(base, table.files), {}).reader.reading_bytes()
    for edges in spec.edges.values():
        held = edge_reader(edges, resolve(base, edges.files)).reading_bytes()
        total += 2 * held if edges.undirected else held
    return total


def read(graph: TablesGraph) -> GraphData:
    """The graph with the types, arrays and ids that the description gives.

    Features are float32 ``[N, F]``, ``label`` int64 ``[N]`` (classes in sorted order, -1 =
    unknown) or float32 ``[N]`` (numbers, NaN = unknown), categories int64 ``[N]``, masks bool
    ``[N]``; of edges the same, ``weight`` float32 ``[E]`` and ``time`` int64 ``[E]``. Memory is
    that of the arrays, and of a chunk.

    Raises:
        ConfigError: the description is wrong; its keys and lines are named.
        DataError: a table is; its file, row and column are named.
    """
    file, spec = Path(graph.path), read_spec(Path(graph.path))
    origin = {"": str(file)}
    vocabulary = {} if graph.vocabulary is None else _vocabulary(graph.vocabulary)
    names: dict[str, list[Any]] = {}
    nodes: dict[str, Nodes] = {}
    for ntype, table in spec.nodes.items():
        found = resolve(file.parent, table.files)
        nodes[ntype] = Nodes(ntype, table, found, vocabulary.get(ntype, {}))
        origin |= {f"{ntype}/{name}": f"{file}: nodes.{ntype}" for name in table.features}
        origin |= {f"{ntype}/{name}": f"{file}: nodes.{ntype}" for name in ("label", "train_mask")}
        nodes[ntype].read()
    edges: dict[EdgeType, EdgeFrame] = {}
    reverses: dict[EdgeType, EdgeType] = {}
    for key, edge_table in spec.edges.items():
        etype = edge_type(key, spec)
        assert etype is not None  # seen to by read_spec
        words = vocabulary.get(etype_str(etype), {})
        if edge_table.reverse is not None:
            reverses[etype] = (etype[2], edge_table.reverse, etype[0])
            words = words or vocabulary.get(etype_str(reverses[etype]), {})
        found = resolve(file.parent, edge_table.files)
        read_from, known = read_edges(etype, edge_table, found, nodes, words)
        edges |= read_from
        for each in map(etype_str, read_from):
            origin |= {f"{each}/{name}": f"{file}: edges.{key}" for name in _EDGE_ARRAYS}
            names |= {f"{each}/{name}": values for name, values in known.items()}
    pa.default_memory_pool().release_unused()  # of the chunks, which Arrow would keep
    frames = {ntype: each.frame() for ntype, each in nodes.items()}
    for ntype, of in nodes.items():
        names |= {f"{ntype}/{name}": values for name, values in of.names.items()}
    ids = {ntype: each.ids.values for ntype, each in nodes.items()}
    return GraphData(file.stem, frames, edges, origin, ids, names, reverses)


def _vocabulary(file: Path) -> dict[str, dict[str, list[Any]]]:
    """Type → array → what its codes stand for, of a run or a partition.

    Raises:
        DataError: the file has no words.
    """
    check_file(file)
    found = read_json(file)
    named = found.get("words", found.get("names"))
    if not isinstance(named, dict) or not all(isinstance(each, list) for each in named.values()):
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
