"""Graphs of DGL and PyG: files of ``dgl.save_graphs``, and graphs that a Python program holds.

Neither library is imported: files are read without DGL, whose own reader trusts every length in
them, so that a truncated file can abort the whole process.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from raygnn.config.graph import DglGraph
from raygnn.config.load import ConfigSource, as_config, load_config
from raygnn.config.schema import Config
from raygnn.errors import DataError
from raygnn.graph.arrays import Array, dtype_name, storable
from raygnn.graph.data import (
    DEFAULT_ETYPE,
    DEFAULT_NTYPE,
    EdgeFrame,
    EdgeType,
    GraphData,
    NodeFrame,
    etype_str,
)
from raygnn.graph.partition.dgl_format import StoredGraph, open_graphs, read_graphs, write_graph
from raygnn.graph.sources import input_files
from raygnn.util.files import storage_errors

VERSION = 1

_REMEDY = "save the graph again with dgl.save_graphs"


@dataclass(frozen=True)
class GraphSet:
    """Graphs of one file or dataset, each read when it is requested.

    Attributes:
        file: file or dataset, for errors.
        num: number of graphs.
        labels: name → array ``[num, …]`` (a torch tensor for bfloat16); complete once all graphs
            have been read.
        graphs: to read once, in order; a graph's name is its location, for errors.
        splits: split → numbers of graphs; None without splits.
    """

    file: Path | str
    num: int
    labels: Mapping[str, Any]
    graphs: Iterator[GraphData]
    splits: Mapping[str, Array] | None = None


def files(graph: DglGraph) -> list[Path]:
    return [Path(graph.path)]


def read(graph: DglGraph) -> GraphData:
    """Read the graph with its types, edges ordered by id, and data as stored.

    ``label`` of nodes becomes int64 ``[N]``, and the three masks bool ``[N]``; everything else
    keeps its dtype (bfloat16, which numpy lacks, as a torch tensor).
    """
    file = Path(graph.path)
    graphs = read_graphs(file)
    if graph.index >= len(graphs):
        message = f"graph.index is {graph.index}, but it holds {len(graphs)} graphs"
        remedy = f"choose graph.index from 0 to {len(graphs) - 1}"
        raise DataError(message, where=str(file), remedy=remedy)
    nodes, edges = _frames(graphs[graph.index], str(file))
    input_files.to_targets(nodes, edges, str(file))
    return GraphData(file.stem, nodes, edges, {"": str(file)})


@contextmanager
def read_all(file: Path) -> Iterator[GraphSet]:
    """Open the graphs of one file, with their types, edges ordered by id, and data as stored."""
    with open_graphs(file) as (count, labels, stored):
        for name, array in labels.items():
            input_files.require_rows(array, count, f"{file}: labels {name!r}", "graphs")

        def to_data(number: int, graph: StoredGraph) -> GraphData:
            origin = f"{file}: graph {number}"
            return GraphData(origin, *_frames(graph, origin))

        yield GraphSet(file, count, labels, itertools.starmap(to_data, enumerate(stored)))


def _frames(
    stored: StoredGraph, origin: str
) -> tuple[dict[str, NodeFrame], dict[EdgeType, EdgeFrame]]:
    """Return the nodes and edges of each type, edges ordered by id, with all data as stored."""
    nodes: dict[str, NodeFrame] = {}
    for ntype, num, arrays in zip(stored.ntypes, stored.num_nodes, stored.ndata, strict=True):
        nodes[ntype] = NodeFrame(num, arrays)
    if len(nodes) != len(stored.ntypes):
        raise _damaged(origin, "holds two node types of one name")
    edges: dict[EdgeType, EdgeFrame] = {}
    for relation, name, arrays in zip(stored.relations, stored.etypes, stored.edata, strict=True):
        if not all(0 <= end < len(nodes) for end in (relation.src_type, relation.dst_type)):
            message = f"holds the relation {name!r} between node types that do not exist"
            raise _damaged(origin, message)
        etype = (stored.ntypes[relation.src_type], name, stored.ntypes[relation.dst_type])
        if etype in edges:
            raise _damaged(origin, f"holds two relations called {etype_str(etype)}")
        edges[etype] = EdgeFrame(relation.src, relation.dst, arrays)
        if len(relation.ids):  # in the order of the ids
            order = _inverse(relation.ids, f"{origin}: {etype_str(etype)}")
            edges[etype] = EdgeFrame(relation.src[order], relation.dst[order], arrays)
    input_files.check_frames(nodes, edges, origin)
    return nodes, edges


def _inverse(order: Array, origin: str) -> Array:
    """Invert a permutation of ``0 … E-1``."""
    num = len(order)
    if order.min() < 0 or order.max() >= num or (np.bincount(order, minlength=num) > 1).any():
        raise _damaged(origin, f"holds edge ids that are not 0 to {num - 1}, each once")
    place = np.empty(num, np.int64)
    place[order] = np.arange(num)
    return place


def _damaged(origin: Path | str, message: str) -> DataError:
    return DataError(message, where=str(origin), remedy=_REMEDY)


def with_graph(config: ConfigSource, graph: Any, directory: Path | None = None) -> Config:
    """Return a job's configuration, with ``graph`` (see `graph_data`) as its input unless None.

    Args:
        config: a configuration, or a source for `raygnn.load_config`. With a graph, its section
            ``graph`` has at most ``reverse`` and ``normalize``.
        directory: where the graph is written, once; None = ``<storage>/graphs``.
    """
    if graph is None:
        return as_config(config)
    source = config.to_dict() if isinstance(config, Config) else config
    # any file replaces the graph's, whose directory depends on the configured storage
    named = load_config(source, {"graph.format": "dgl", "graph.path": __file__})
    file = write_graph_file(graph, directory or named.local_storage / "graphs")
    return load_config(named.to_dict(), {"graph.path": str(file)})


def write_graph_file(graph: Any, directory: Path) -> Path:
    """Write a graph (see `graph_data`) for the format ``dgl``, to a file named by its content."""
    data = graph_data(graph)
    with storage_errors(directory, DataError):
        directory.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=directory, prefix=".graph-") as temporary:
            draft = Path(temporary) / "graph.dgl"
            facts = write_graph(draft, data)
            return draft.replace(directory / f"graph-{facts.sha256[:16]}.dgl")


def is_graph(value: Any) -> bool:
    """Return True for a ``dgl.DGLGraph``, or a ``Data`` or ``HeteroData`` of PyG."""
    return _library(value) is not None


def graph_data(graph: Any, where: str = "graph") -> GraphData:
    """Return the arrays of a graph, not copied if they are in the CPU's memory.

    Args:
        graph: a ``dgl.DGLGraph``, or a ``Data`` or ``HeteroData`` of PyG with ``edge_index``.
            PyG's ``x`` becomes ``feat``, and ``y`` becomes ``label`` if it is one integer per node;
            graph-level attributes are skipped.
        where: location of the graph, for errors.
    """
    library = _library(graph)
    if library is None:
        message = f"a {type(graph).__module__}.{type(graph).__name__} is no graph to train on"
        remedy = "give a dgl.DGLGraph, or a Data or HeteroData of torch_geometric"
        raise DataError(message, where=where, remedy=remedy)
    return (_of_pyg if library == "torch_geometric" else _of_dgl)(graph)


def _library(graph: Any) -> str | None:
    libraries = {base.__module__.partition(".")[0] for base in type(graph).__mro__}
    if "torch_geometric" in libraries and hasattr(graph, "edge_stores"):
        return "torch_geometric"
    if "dgl" in libraries and hasattr(graph, "canonical_etypes") and not graph.is_block:
        return "dgl"
    return None


def _of_dgl(graph: Any) -> GraphData:
    graph = graph.formats("coo")  # other formats may not return edges by id
    nodes = {
        ntype: NodeFrame(graph.num_nodes(ntype), _arrays(graph.nodes[ntype].data, ntype))
        for ntype in graph.ntypes
    }
    edges = {}
    for etype in graph.canonical_etypes:
        src, dst = graph.edges(etype=etype, order="eid")
        arrays = _arrays(graph.edges[etype].data, etype_str(etype))
        edges[etype] = EdgeFrame(src.cpu(), dst.cpu(), arrays)
    return GraphData("graph", nodes, edges)


def _of_pyg(graph: Any) -> GraphData:
    if hasattr(graph, "edge_types"):
        node_stores = {ntype: graph[ntype] for ntype in graph.node_types}
        edge_stores = {etype: graph[etype] for etype in graph.edge_types}
    else:
        node_stores, edge_stores = {DEFAULT_NTYPE: graph}, {DEFAULT_ETYPE: graph}
    nodes = {}
    for ntype, store in node_stores.items():
        found = {name: value for name, value in store.to_dict().items() if store.is_node_attr(name)}
        found = _arrays(found, ntype)
        y = found.get("y")
        if y is not None and not y.is_floating_point() and y.shape[1:] in ((), (1,)):
            found["label"] = found.pop("y")  # an integer for each node
        if "x" in found:
            found["feat"] = found.pop("x")
        nodes[ntype] = NodeFrame(int(store.num_nodes), found)
    edges = {}
    for etype, store in edge_stores.items():
        if "edge_index" not in store:
            message = "has no edge_index"
            remedy = "leave out the transform that makes a sparse matrix of it"
            raise DataError(message, where=f"graph: {etype_str(etype)}", remedy=remedy)
        found = {name: value for name, value in store.to_dict().items() if store.is_edge_attr(name)}
        ends = found.pop("edge_index").cpu()
        edges[etype] = EdgeFrame(ends[0], ends[1], _arrays(found, etype_str(etype)))
    return GraphData("graph", nodes, edges)


def _arrays(found: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Return tensors on the CPU; raises DataError for a sparse or otherwise unstorable one."""
    for name, array in found.items():
        layout = str(getattr(array, "layout", type(array).__name__)).removeprefix("torch.")
        if layout != "strided" or not storable(array):
            of = dtype_name(array) if layout == "strided" else layout
            where, message = f"graph: {kind}/{name}", f"is {of}, which cannot be stored"
            remedy = "make a dense tensor of another dtype of it, or remove it"
            raise DataError(message, where=where, remedy=remedy)
    return {name: array.detach().cpu() for name, array in found.items()}
