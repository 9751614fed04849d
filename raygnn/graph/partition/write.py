"""Writes the files of a partition, except its manifest."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from torch import Tensor

from raygnn.errors import DataError
from raygnn.graph.arrays import (
    AnyArray,
    Array,
    IntArray,
    OnDemand,
    dtype_name,
    index_type,
    rows_of,
    storable,
    take,
)
from raygnn.graph.data import (
    DEFAULT_ETYPE,
    DEFAULT_NTYPE,
    MASKS,
    EdgeFrame,
    EdgeType,
    GraphData,
    NodeFrame,
    etype_str,
)
from raygnn.graph.outofcore.disk_graph import DiskGraph
from raygnn.graph.outofcore.edge_shuffle import Bucket, Numbering, homogeneous, shuffle
from raygnn.graph.outofcore.workspace import Workspace
from raygnn.graph.partition.dgl_format import write_graph, write_tensors
from raygnn.graph.partition.make import Missing
from raygnn.graph.partition.manifest import (
    LAYOUT_VERSION,
    MANIFEST,
    FileFacts,
    Manifest,
    PartFacts,
    PartitionSource,
    checksum,
    file_facts,
    split_counts,
)
from raygnn.graph.partition.read import ID_COLUMN
from raygnn.util.files import sync_file

_INT64 = np.dtype(np.int64)


def check_storable(data: GraphData) -> None:
    """Raise DataError for names and arrays that DGL's files cannot express."""
    for kind in (name for etype in data.edges for name in etype):
        if ":" in kind:
            message = f"the type {kind!r} contains a colon, which separates names in DGL's files"
            raise DataError(message, where=data.name, remedy="give the type another name")
    for kind, arrays in data.arrays.items():
        for name, array in arrays.items():
            if not storable(array):
                key = f"{kind}/{name}"
                message = f"{key} has the dtype {array.dtype}, which DGL's files cannot hold"
                remedy = "convert it to a floating-point or signed integer type"
                raise DataError(message, where=data.where(key), remedy=remedy)


def write_partition(
    graph: DiskGraph,
    held: GraphData | None,
    assigned: Mapping[str, IntArray],
    missing: Missing,
    work: Workspace,
    directory: Path,
) -> None:
    """Write every part, the ids, DGL's json and last the manifest, durably, over existing files.
    ``held``: the graph, if its arrays of nodes are in memory; ``assigned``: part of every node."""
    data, parts = held or graph.data(), missing.parts
    numbering = Numbering.from_assignment(assigned, parts, work.directory("numbering"))
    edges = shuffle(graph, numbering, work)
    assembly = Assembly(held or replace(graph, others={}), numbering, *edges)
    tasks = [(assembly, part, directory) for part in range(parts)]
    sizes = [sum(assembly.num_edges(part).values()) for part in range(parts)]
    written = work.run("write", _write_part, tasks, sizes)
    files = {name: file for part in written for name, file in part["files"].items()}
    files |= _write_ids(data.ids, directory)
    features: dict[str, Any] = {
        f"{kind}/{name}": {"dtype": dtype_name(array), "shape": list(array.shape[1:])}
        for kind, arrays in data.arrays.items()
        for name, array in arrays.items()
    }
    config = _dgl_json(data, assembly, missing.method)
    name = f"{config['graph_name']}.json"
    files[name] = write_json(directory / name, config)
    manifest = Manifest(
        layout=LAYOUT_VERSION,
        graph_name=config["graph_name"],
        num_parts=parts,
        method=missing.method,
        features=features,
        ids=list(data.ids),
        names=data.names,
        reverses={etype_str(one): etype_str(other) for one, other in data.reverses.items()},
        transforms=data.transforms,
        columns=data.columns,
        microseconds=data.microseconds,
        parts=[part["facts"] for part in written],
        files=files,
        versions={
            name: metadata.version(name)
            for name in ("dgl", "pymetis", "torch", "numpy")
            if any(metadata.distributions(name=name))  # DGL is optional
        },
        digest=missing.digest,
        seed=missing.seed,
        source=PartitionSource(**missing.source),
        seconds=work.seconds,
    )
    values = manifest.model_dump(exclude_unset=True)
    write_json(directory / MANIFEST, {**values, "checksum": checksum(values)})


@dataclass(frozen=True)
class Assembly:
    """A graph renumbered for its parts.

    Attributes:
        held: the graph; of its edges only the arrays' names, dtypes and shapes are used.
        edge_starts: edge type → int64 ``[parts + 1]``, where each part's edges start.
        edges: all buckets, in the order of their edges' ids.
    """

    held: GraphData | DiskGraph
    numbering: Numbering
    edge_starts: dict[EdgeType, IntArray]
    edges: list[Bucket]

    def num_edges(self, part: int) -> dict[EdgeType, int]:
        """Return the numbers of owned edges of one part, by type."""
        return {etype: int(np.diff(of)[part]) for etype, of in self.edge_starts.items()}

    def owned(self, part: int, etype: EdgeType) -> list[Bucket]:
        """Return the buckets of a part's owned edges of a type."""
        return [e for e in self.edges if (e.part, e.etype) == (part, etype)]

    def graph(self, part: int) -> tuple[GraphData, int, int]:
        """Return one part's graph, whose edges are read while it is written; the number of nodes of
        other parts that are sources of owned in-edges (halo), and of owned in-edges from other
        parts (cut). Owned nodes come first, then the halo."""
        first, last = (int(bound) for bound in self.numbering.bounds[part : part + 2])
        far = np.zeros(int(self.numbering.bounds[-1]), np.bool_)
        own, cut = [edges for edges in self.edges if edges.part == part], 0
        for edges in own:
            sources = edges.arrays["src"].map()
            outside = sources[(sources < first) | (sources >= last)]
            far[outside] = True
            cut += len(outside)
        halo = int(np.count_nonzero(far))
        outer = [edges for edges in self.edges if edges.part != part]
        for leaving in outer:
            far[leaving.leaving_from(part, "dst")] = True
        nodes = np.concatenate([np.arange(first, last), np.flatnonzero(far)])
        local = np.empty(len(far), dtype=index_type(len(far)))
        local[nodes] = np.arange(len(nodes), dtype=local.dtype)
        del far
        counts = {edges.number: edges.edges for edges in own}
        counts |= {edges.number: int(np.diff(edges.leaving)[part]) for edges in outer}
        types = {etype: number for number, etype in enumerate(self.edge_starts)}

        def sources_of(edges: Bucket, is_own: bool) -> Array:
            return local[edges.arrays["src"].map() if is_own else edges.leaving_from(part, "src")]

        def destinations_of(edges: Bucket, is_own: bool) -> Array:
            if not is_own:
                return local[edges.leaving_from(part, "dst")]
            at = edges.first_row - first
            return np.repeat(np.arange(at, at + edges.rows), edges.arrays["degrees"].map())

        def ids_of(edges: Bucket, is_own: bool) -> Array:
            at = np.arange(edges.edges) if is_own else edges.leaving_from(part, "at")
            return at + edges.first_edge

        def on_demand(dtype: Any, of: Callable[[Bucket, bool], Array | int]) -> OnDemand:
            def pieces() -> Iterator[Array]:
                for edges in own + outer:
                    values = np.asarray(of(edges, edges.part == part), dtype)
                    yield np.broadcast_to(values, counts[edges.number])

            return OnDemand(np.dtype(dtype), (sum(counts.values()),), pieces)

        node_type, node_part = self.numbering.describe(nodes)
        is_inner = (np.arange(len(nodes)) < last - first).astype(np.uint8)
        ndata = {"_ID": nodes, "part_id": node_part, "inner_node": is_inner}
        edata = {
            "_ID": on_demand(np.int64, ids_of),
            "inner_edge": on_demand(np.uint8, lambda _, is_own: is_own),
        }
        if len(self.numbering.starts) > 1 or len(types) > 1:
            ndata["_TYPE"] = node_type
            edata["_TYPE"] = on_demand(np.int32, lambda edges, _: types[edges.etype])
        ends = on_demand(np.int64, sources_of), on_demand(np.int64, destinations_of)
        node_frame, edge_frame = NodeFrame(len(nodes), ndata), EdgeFrame(*ends, edata)
        return GraphData("", {DEFAULT_NTYPE: node_frame}, {DEFAULT_ETYPE: edge_frame}), halo, cut


def _write_part(assembly: Assembly, part: int, directory: Path) -> dict[str, Any]:
    """Write the files of a part, durably, over existing ones. Returns its part of the manifest."""
    data = assembly.held.data() if isinstance(assembly.held, DiskGraph) else assembly.held
    nodes = {t: assembly.numbering.nodes(t, part) for t in data.nodes}
    num_edges = assembly.num_edges(part)
    node_data: dict[str, AnyArray] = {
        f"{ntype}/{name}": rows_of(array, nodes[ntype])
        for ntype, frame in data.nodes.items()
        for name, array in frame.data.items()
    }
    edge_data: dict[str, AnyArray] = {}
    numbers: dict[str, AnyArray] = {}
    for etype, frame in data.edges.items():
        num, kind, of = num_edges[etype], etype_str(etype), assembly.owned(part, etype)
        numbers[kind] = OnDemand(_INT64, (num,), partial(_numbers, of))
        for name, array in frame.data.items():
            pieces = partial(_rows, of, f"data/{name}")
            edge_data[f"{kind}/{name}"] = OnDemand(array.dtype, (num, *array.shape[1:]), pieces)
    files: dict[str, FileFacts] = {}
    place = f"part{part}"
    (directory / place).mkdir(exist_ok=True)
    contents: list[Mapping[str, AnyArray]] = [node_data, edge_data, nodes, numbers]
    for name, arrays in zip(("node_feat", "edge_feat", "orig_nids", "orig_eids"), contents):
        file = f"{place}/{name}.dgl"
        files[file] = write_tensors(directory / file, arrays)
    (graph, halo, cut), file = assembly.graph(part), f"{place}/graph.dgl"
    files[file] = write_graph(directory / file, graph)
    masks = {
        f"{ntype}/{name}": take(mask, nodes[ntype])
        for ntype, frame in data.nodes.items()
        for name, mask in frame.data.items()
        if name in MASKS
    }
    facts = PartFacts(
        nodes={ntype: len(ids) for ntype, ids in nodes.items()},
        edges={etype_str(t): count for t, count in num_edges.items()},
        halo=halo,
        cut=cut,
        splits=split_counts(masks),
        bytes=sum(file.bytes for file in files.values()),
    )
    stored = {name: file.model_dump() for name, file in files.items()}
    return {"facts": facts.model_dump(), "files": stored}


def _numbers(of: Sequence[Bucket]) -> Iterator[Array]:
    for edges in of:
        yield edges.arrays["numbers"].map().astype(np.int64)


def _rows(of: Sequence[Bucket], name: str) -> Iterator[Array | Tensor]:
    for edges in of:
        array = edges.arrays[name]
        yield array.as_declared(array.read(0, len(array)))


def _write_ids(ids: Mapping[str, Any], directory: Path) -> dict[str, FileFacts]:
    """Write the user's node ids of each type, by original id, as an Arrow IPC file of one record
    batch, which can be mapped and read at any row; return the files."""
    files = {}
    for ntype, values in ids.items():
        name = f"ids/{ntype}.arrow"
        (directory / "ids").mkdir(exist_ok=True)
        values = values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values
        batch = pa.RecordBatch.from_arrays([values], names=[ID_COLUMN])
        with (directory / name).open("wb") as stream:
            with pa.ipc.new_file(stream, batch.schema) as writer:
                writer.write_batch(batch)
            sync_file(stream)
        files[name] = file_facts(directory / name)
    return files


def write_json(path: Path, values: Mapping[str, Any]) -> FileFacts:
    """Write a JSON file, durably."""
    with path.open("w") as file:
        json.dump(values, file, indent=1)
        sync_file(file)
    return file_facts(path)


def _dgl_json(data: GraphData, assembly: Assembly, method: str) -> dict[str, Any]:
    # a graph may be named raygnn, but its json must not replace the manifest
    name = data.name if f"{data.name}.json" != MANIFEST else f"{data.name}_graph"
    parts, node_map = len(assembly.numbering.bounds) - 1, assembly.numbering.node_map
    edge_map = homogeneous(assembly.edge_starts)
    return {
        "graph_name": name,
        "num_nodes": data.num_nodes,
        "num_edges": data.num_edges,
        "part_method": method,
        "num_parts": parts,
        "halo_hops": 1,
        "node_map": {ntype: rows.tolist() for ntype, rows in node_map.items()},
        "edge_map": {etype_str(etype): rows.tolist() for etype, rows in edge_map.items()},
        "ntypes": {ntype: number for number, ntype in enumerate(data.nodes)},
        "etypes": {etype_str(etype): number for number, etype in enumerate(data.edges)},
    } | {
        f"part-{part}": {
            "node_feats": f"part{part}/node_feat.dgl",
            "edge_feats": f"part{part}/edge_feat.dgl",
            "part_graph": f"part{part}/graph.dgl",
        }
        for part in range(parts)
    }
