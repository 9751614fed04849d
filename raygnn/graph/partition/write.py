"""Writes the files of a partition, except its manifest."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import torch
from pydantic import BaseModel
from torch import Tensor

from raygnn.errors import DataError
from raygnn.graph.arrays import AnyArray, Array, IntArray, OnDemand, Rows, index_type, storable
from raygnn.graph.data import MASKS, EdgeType, GraphData, etype_str
from raygnn.graph.outofcore.disk_graph import DiskGraph
from raygnn.graph.outofcore.edge_shuffle import (
    Numbering,
    SortedEdges,
    homogeneous,
    shuffle,
)
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

_INT64 = np.dtype(np.int64)
_OfEdges: TypeAlias = Callable[[SortedEdges], Array]


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
    edges = shuffle(graph, numbering, work)
    assembly = Assembly(held or replace(graph, others={}), numbering, *edges)
    tasks = [(assembly, part, directory) for part in range(parts)]
    sizes = [sum(assembly.num_edges(part).values()) for part in range(parts)]
    found = work.run("write", _write_part, tasks, sizes)
    written = [_WrittenPart.model_validate(part) for part in found]
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
        num_parts=parts,
        method=method,
        features=features,
        ids=list(data.ids),
        names=data.names,
        reverses={etype_str(one): etype_str(other) for one, other in data.reverses.items()},
        transforms=data.transforms,
        columns=data.columns,
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


@dataclass(frozen=True)
class Assembly:
    """A graph renumbered for its parts, with the contents of each part's files.

    Attributes:
        held: the graph; of its edges only the arrays' names, dtypes and shapes are used.
        edge_starts: edge type → int64 ``[parts + 1]``, where each part's edges start.
        edges: of all buckets, in the order of their ids.
    """

    held: GraphData | DiskGraph
    numbering: Numbering
    edge_starts: dict[EdgeType, IntArray]
    edges: list[SortedEdges]

    @property
    def data(self) -> GraphData:
        return self.held.data() if isinstance(self.held, DiskGraph) else self.held

    @property
    def edge_map(self) -> dict[EdgeType, IntArray]:
        """Edge type → int64 ``[parts, 2]`` homogeneous id ranges, as in DGL's json."""
        return homogeneous(self.edge_starts)

    def num_nodes(self, part: int) -> dict[str, int]:
        """Return the numbers of owned nodes of one part, by type."""
        starts_of = self.numbering.starts.items()
        return {ntype: int(starts[part + 1] - starts[part]) for ntype, starts in starts_of}

    def num_edges(self, part: int) -> dict[EdgeType, int]:
        """Return the numbers of owned edges of one part, by type."""
        starts_of = self.edge_starts.items()
        return {etype: int(starts[part + 1] - starts[part]) for etype, starts in starts_of}

    def original_nodes(self, part: int) -> dict[str, Tensor]:
        """Return node type → original ids of the part's owned nodes, int64."""
        return {ntype: torch.from_numpy(self._nodes(ntype, part)) for ntype in self.data.nodes}

    def node_data(self, part: int) -> dict[str, Rows]:
        """Return ``"<type>/<name>"`` → rows of the part's owned nodes."""
        nodes = self.data.nodes
        own = {ntype: self._nodes(ntype, part) for ntype, frame in nodes.items() if frame.data}
        return {
            f"{ntype}/{name}": Rows(array, ids)
            for ntype, ids in own.items()
            for name, array in nodes[ntype].data.items()
        }

    def original_edges(self, part: int) -> dict[str, OnDemand]:
        """``"src:rel:dst"`` → int64, original ids of the part's own edges."""
        return {
            etype_str(etype): OnDemand(_INT64, (num,), partial(self._numbers, part, etype))
            for etype, num in self.num_edges(part).items()
        }

    def edge_data(self, part: int) -> dict[str, OnDemand]:
        """``"src:rel:dst/<name>"`` → rows of the part's own edges."""
        return {
            f"{etype_str(etype)}/{name}": OnDemand(
                figures.dtype, (num, *figures.shape[1:]), partial(self._rows, part, etype, name)
            )
            for etype, frame in self.data.edges.items()
            for num in [self.num_edges(part)[etype]]
            for name, figures in frame.data.items()
        }

    def _numbers(self, part: int, etype: EdgeType) -> Iterator[Array]:
        for edges in self._own(part, etype):
            yield edges.arrays["numbers"].map().astype(np.int64)

    def _rows(self, part: int, etype: EdgeType, name: str) -> Iterator[Array | Tensor]:
        for edges in self._own(part, etype):
            array = edges.arrays[f"data/{name}"]
            yield array.as_declared(array.read(0, len(array)))

    def _nodes(self, ntype: str, part: int) -> IntArray:
        first, last = self.numbering.starts[ntype][part : part + 2]
        return self.numbering.order[ntype].read(first, last).astype(np.int64)

    def _own(self, part: int, etype: EdgeType | None = None) -> list[SortedEdges]:
        """The buckets of a part's own edges, in the order of their ids."""
        of_part = [edges for edges in self.edges if edges.bucket.part == part]
        return [edges for edges in of_part if etype in (None, edges.bucket.etype)]

    def graph(self, part: int) -> tuple[tuple[Any, ...], int, int]:
        """Return one part's graph, as `write_graph` takes it, whose edges are read while it is
        written; the number of nodes of other parts that are sources of owned in-edges (halo), and
        of owned in-edges from other parts (cut). Owned nodes come first, then the halo."""
        first, last = (int(bound) for bound in self.numbering.bounds[part : part + 2])
        far = np.zeros(int(self.numbering.bounds[-1]), np.bool_)
        own, cut = self._own(part), 0
        for edges in own:
            sources = edges.arrays["src"].map()
            outside = sources[(sources < first) | (sources >= last)]
            far[outside] = True
            cut += len(outside)
        halo = int(np.count_nonzero(far))
        outer = [edges for edges in self.edges if edges.bucket.part != part]
        for leaving in outer:
            far[leaving.leaving_from(part, "dst")] = True
        nodes = np.concatenate([np.arange(first, last), np.flatnonzero(far)])
        local = np.empty(len(far), dtype=index_type(len(far)))
        local[nodes] = np.arange(len(nodes), dtype=local.dtype)
        del far

        counts = {edges.bucket.number: edges.bucket.edges for edges in own}
        counts |= {edges.bucket.number: int(np.diff(edges.leaving)[part]) for edges in outer}
        types = {etype: number for number, etype in enumerate(self.edge_starts)}

        def destinations(edges: SortedEdges) -> Array:
            at = edges.bucket.first_row - first
            return np.repeat(np.arange(at, at + edges.bucket.rows), edges.arrays["degrees"].map())

        def on_demand(dtype: Any, of_own: _OfEdges, of_outer: _OfEdges) -> OnDemand:
            def pieces() -> Iterator[Array]:
                yield from (of_own(edges).astype(dtype, copy=False) for edges in own)
                yield from (of_outer(edges).astype(dtype, copy=False) for edges in outer)

            return OnDemand(np.dtype(dtype), (sum(counts.values()),), pieces)

        def kinds(edges: SortedEdges) -> Array:
            return np.full(counts[edges.bucket.number], types[edges.bucket.etype], np.int32)

        node_type, node_part = self.numbering.describe(nodes)
        ndata = {
            "_ID": nodes,
            "part_id": node_part,
            "inner_node": (np.arange(len(nodes)) < last - first).astype(np.uint8),
        }
        edata = {
            "_ID": on_demand(
                np.int64,
                lambda edges: np.arange(edges.bucket.edges) + edges.bucket.first_edge,
                lambda edges: edges.leaving_from(part, "at") + edges.bucket.first_edge,
            ),
            "inner_edge": on_demand(
                np.uint8,
                lambda edges: np.ones(edges.bucket.edges, np.uint8),
                lambda edges: np.zeros(counts[edges.bucket.number], np.uint8),
            ),
        }
        if len(self.numbering.starts) > 1 or len(types) > 1:
            ndata["_TYPE"] = node_type
            edata["_TYPE"] = on_demand(np.int32, kinds, kinds)
        src = on_demand(
            np.int64,
            lambda edges: local[edges.arrays["src"].map()],
            lambda edges: local[edges.leaving_from(part, "src")],
        )
        dst = on_demand(
            np.int64, destinations, lambda edges: local[edges.leaving_from(part, "dst")]
        )
        return (len(nodes), src, dst, ndata, edata), halo, cut


class _WrittenPart(BaseModel):
    """A part's entries in the manifest, once it is on disk."""

    facts: PartFacts
    files: dict[str, FileFacts]
    features: dict[str, Feature]


def _write_part(assembly: Assembly, part: int, directory: Path) -> dict[str, Any]:
    """Write the files of one part, durably, in place of existing ones: see `_WrittenPart`."""
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
    (graph, halo, cut), file = assembly.graph(part), f"part{part}/graph.dgl"
    files[file] = write_graph(directory / file, *graph)
    facts = PartFacts(
        nodes=assembly.num_nodes(part),
        edges={etype_str(t): count for t, count in assembly.num_edges(part).items()},
        halo=halo,
        cut=cut,
        splits=split_counts(masks),
        bytes=sum(file.bytes for file in files.values()),
    )
    return _WrittenPart(facts=facts, files=files, features=features).model_dump()


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
    return {
        "graph_name": name,
        "num_nodes": data.num_nodes,
        "num_edges": data.num_edges,
        "part_method": method,
        "num_parts": parts,
        "halo_hops": 1,
        "node_map": {ntype: rows.tolist() for ntype, rows in node_map.items()},
        "edge_map": {etype_str(t): rows.tolist() for t, rows in assembly.edge_map.items()},
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
