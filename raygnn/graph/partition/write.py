"""Writes the files of a partition, except its manifest."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow as pa
from pydantic import BaseModel

from raygnn.errors import DataError
from raygnn.graph.arrays import storable
from raygnn.graph.data import MASKS, GraphData, etype_str
from raygnn.graph.partition.assemble import PartedGraph
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

_MAX_THREADS = 16


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
    data: GraphData,
    assembly: PartedGraph,
    directory: Path,
    method: str,
    tell: Callable[[str], object] = lambda text: None,
) -> Manifest:
    """Write every part, the ids and DGL's json, durably. Return their manifest.

    Args:
        tell: called with the number of written parts after each.
    """
    numbers = range(assembly.parts)
    for part in numbers:
        (directory / f"part{part}").mkdir()
    # A few more threads than cores, since some wait for the disk. Their memory is at most that of
    # all parts together.
    threads = min(2 * assembly.parts, (os.cpu_count() or 1) + 2, _MAX_THREADS)
    with ThreadPoolExecutor(threads, "write") as pool:
        arrays = [pool.submit(_write_arrays, assembly, part, directory) for part in numbers]
        graphs = [pool.submit(_write_graph, assembly, part, directory) for part in numbers]
        try:
            written = []
            for part in numbers:
                facts = _written(assembly, part, graphs[part].result(), arrays[part].result())
                written.append(facts)
                tell(f"{part + 1} of {assembly.parts} parts")
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return write_description(data, assembly, directory, method, written)


class WrittenPart(BaseModel):
    """A part's entries in the manifest, once it is on disk."""

    facts: PartFacts
    files: dict[str, FileFacts]
    features: dict[str, Feature]


def write_part(assembly: PartedGraph, part: int, directory: Path) -> WrittenPart:
    """Write the files of one part, durably, in place of existing ones."""
    (directory / f"part{part}").mkdir(exist_ok=True)
    arrays = _write_arrays(assembly, part, directory)
    return _written(assembly, part, _write_graph(assembly, part, directory), arrays)


def _written(assembly: PartedGraph, part: int, graph: _Structure, arrays: _Arrays) -> WrittenPart:
    (file, halo, cut), (part_files, features, splits) = graph, arrays
    files = {f"part{part}/graph.dgl": file} | part_files
    facts = PartFacts(
        nodes=assembly.num_nodes(part),
        edges={etype_str(t): count for t, count in assembly.num_edges(part).items()},
        halo=halo,
        cut=cut,
        splits=splits,
        bytes=sum(file.bytes for file in files.values()),
    )
    return WrittenPart(facts=facts, files=files, features=features)


def write_description(
    data: GraphData,
    assembly: PartedGraph,
    directory: Path,
    method: str,
    written: Sequence[WrittenPart],
) -> Manifest:
    """Write the ids and DGL's json beside the parts. Return the manifest of all."""
    files: dict[str, FileFacts] = {}
    features: dict[str, Feature] = {}
    for part in written:
        files |= part.files
        features |= part.features
    files |= _write_ids(data.ids, directory)
    config = _dgl_json(data, assembly, method)
    name = f"{config['graph_name']}.json"
    files[name] = write_json(directory / name, config)
    return Manifest(
        layout=LAYOUT_VERSION,
        graph_name=config["graph_name"],
        num_parts=assembly.parts,
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


_Structure: TypeAlias = tuple[FileFacts, int, int]  # graph.dgl, halo, cut


def _write_graph(assembly: PartedGraph, part: int, directory: Path) -> _Structure:
    graph = assembly.part(part)
    path = directory / f"part{part}" / "graph.dgl"
    file = write_graph(path, graph.num_nodes, graph.src, graph.dst, graph.ndata, graph.edata)
    return file, graph.halo, graph.cut


_Arrays: TypeAlias = tuple[dict[str, FileFacts], dict[str, Feature], dict[str, dict[str, int]]]


def _write_arrays(assembly: PartedGraph, part: int, directory: Path) -> _Arrays:
    files: dict[str, FileFacts] = {}
    features: dict[str, Feature] = {}
    rows = assembly.node_data(part)
    masks = {k: mask.whole() for k, mask in rows.items() if k.rpartition("/")[2] in MASKS}
    splits = split_counts(masks)
    for name in ("node_feat", "edge_feat"):
        arrays = rows if name == "node_feat" else assembly.edge_data(part)
        file = f"part{part}/{name}.dgl"
        files[file] = write_tensors(directory / file, arrays)
        features |= {key: Feature.from_array(array) for key, array in arrays.items()}
        rows = {}
        del arrays  # frees them before the next are selected
    for name, ids_of in (
        ("orig_nids", assembly.original_nodes),
        ("orig_eids", assembly.original_edges),
    ):
        file = f"part{part}/{name}.dgl"
        files[file] = write_tensors(directory / file, ids_of(part))
    return files, features, splits


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


def _dgl_json(data: GraphData, assembly: PartedGraph, method: str) -> dict[str, Any]:
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
