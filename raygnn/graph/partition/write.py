"""Writes the files of a partition, except its manifest."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pyarrow as pa
from pydantic import BaseModel

from raygnn.errors import DataError
from raygnn.graph.arrays import AnyArray, IntArray, storable
from raygnn.graph.data import MASKS, GraphData, etype_str
from raygnn.graph.outofcore.assembly import Assembly
from raygnn.graph.outofcore.disk_graph import DiskGraph
from raygnn.graph.outofcore.edge_shuffle import Numbering, Shuffled, shuffle
from raygnn.graph.outofcore.workspace import Workspace
from raygnn.graph.partition.dgl_format import write_graph, write_tensors
from raygnn.graph.partition.manifest import (
    LAYOUT_VERSION,
    MANIFEST,
    Feature,
    FileFacts,
    Manifest,
    PartFacts,
    PartitionSource,
    file_facts,
    split_counts,
)
from raygnn.graph.partition.read import ID_COLUMN
from raygnn.util.files import sync_file


def check_storable(data: GraphData) -> None:
    """Raise DataError for names and arrays that DGL's files cannot express."""
    for kind in (name for etype in data.edges for name in etype):
        if ":" in kind:
            raise DataError(
                f"the type name {kind!r} contains a colon, which separates names in DGL's files",
                where=data.name,
                remedy="give the type another name",
            )
    frames = {ntype: frame.data for ntype, frame in data.nodes.items()}
    frames |= {etype_str(etype): frame.data for etype, frame in data.edges.items()}
    for kind, arrays in frames.items():
        for name, array in arrays.items():
            if not storable(array):
                key = f"{kind}/{name}"
                raise DataError(
                    f"{key} has the dtype {array.dtype}, which DGL's files cannot hold",
                    where=data.where(key),
                    remedy="convert it to a floating-point or signed integer type",
                )


def write_parts(
    graph: DiskGraph,
    held: GraphData | None,
    assigned: Mapping[str, IntArray],
    parts: int,
    method: str,
    work: Workspace,
    directory: Path,
) -> Manifest:
    """Write every part, the ids and DGL's json, durably; existing files are replaced. Return their
    manifest.

    Args:
        held: the graph, if its arrays of nodes are in memory.
        assigned: part of every node, by node type.
    """
    data = held or graph.data()
    numbering = Numbering.from_assignment(assigned, parts, work.directory("numbering"))
    shuffled = shuffle(graph, numbering, work)
    handed = held or replace(graph, others={})
    tasks = [(handed, numbering, shuffled, part, directory) for part in range(parts)]
    sizes = [sum(e.bucket.edges for e in shuffled.edges if e.bucket.part == t[3]) for t in tasks]
    written = [_WrittenPart.model_validate(it) for it in work.run("write", _write, tasks, sizes)]
    files: dict[str, FileFacts] = {}
    features: dict[str, Feature] = {}
    for part in written:
        files |= part.files
        features |= part.features
    files |= _write_ids(data.ids, directory)
    config = _dgl_json(data, Assembly(data, numbering, shuffled), method)
    name = f"{config['graph_name']}.json"
    files[name] = write_json(directory / name, config)
    return Manifest(
        layout=LAYOUT_VERSION,
        graph_name=config["graph_name"],
        num_parts=parts,
        method=method,
        features=features,
        ids=list(data.ids),
        names=data.names,
        reverses={etype_str(one): etype_str(other) for one, other in data.reverses.items()},
        transforms=data.transforms,
        microseconds=data.microseconds,
        parts=[part.facts for part in written],
        files=files,
        versions={
            name: metadata.version(name)
            for name in ("dgl", "pymetis", "torch", "numpy")
            if any(metadata.distributions(name=name))  # DGL is optional
        },
        digest="",
        source=PartitionSource(),
    )


def _write(
    graph: GraphData | DiskGraph,
    numbering: Numbering,
    shuffled: Shuffled,
    part: int,
    directory: Path,
) -> dict[str, Any]:
    data = graph.data() if isinstance(graph, DiskGraph) else graph
    return _write_part(Assembly(data, numbering, shuffled), part, directory).model_dump()


class _WrittenPart(BaseModel):
    """A part's entries in the manifest, once it is on disk."""

    facts: PartFacts
    files: dict[str, FileFacts]
    features: dict[str, Feature]


def _write_part(assembly: Assembly, part: int, directory: Path) -> _WrittenPart:
    """Write the files of one part, durably, in place of existing ones."""
    (directory / f"part{part}").mkdir(exist_ok=True)
    files: dict[str, FileFacts] = {}
    features: dict[str, Feature] = {}
    rows = assembly.node_data(part).items()
    masks = {key: mask.whole() for key, mask in rows if key.rpartition("/")[2] in MASKS}
    arrays_of: dict[str, Callable[[int], Mapping[str, AnyArray]]] = {
        "node_feat": assembly.node_data,
        "edge_feat": assembly.edge_data,
        "orig_nids": assembly.original_nodes,
        "orig_eids": assembly.original_edges,
    }
    for name, arrays_in in arrays_of.items():
        arrays = arrays_in(part)
        file = f"part{part}/{name}.dgl"
        files[file] = write_tensors(directory / file, arrays)
        if name.endswith("feat"):
            features |= {key: Feature.from_array(array) for key, array in arrays.items()}
    graph, file = assembly.part(part), f"part{part}/graph.dgl"
    given = graph.num_nodes, graph.src, graph.dst, graph.ndata, graph.edata
    files[file] = write_graph(directory / file, *given)
    facts = PartFacts(
        nodes=assembly.num_nodes(part),
        edges={etype_str(t): count for t, count in assembly.num_edges(part).items()},
        halo=graph.halo,
        cut=graph.cut,
        splits=split_counts(masks),
        bytes=sum(file.bytes for file in files.values()),
    )
    return _WrittenPart(facts=facts, files=files, features=features)


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
    return {
        "graph_name": name,
        "num_nodes": data.num_nodes,
        "num_edges": data.num_edges,
        "part_method": method,
        "num_parts": assembly.parts,
        "halo_hops": 1,
        "node_map": {ntype: rows.tolist() for ntype, rows in assembly.node_map.items()},
        "edge_map": {etype_str(t): rows.tolist() for t, rows in assembly.edge_map.items()},
        "ntypes": {ntype: number for number, ntype in enumerate(data.nodes)},
        "etypes": {etype_str(etype): number for number, etype in enumerate(data.edges)},
    } | {
        f"part-{part}": {
            "node_feats": f"part{part}/node_feat.dgl",
            "edge_feats": f"part{part}/edge_feat.dgl",
            "part_graph": f"part{part}/graph.dgl",
        }
        for part in range(assembly.parts)
    }
