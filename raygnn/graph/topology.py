"""One part's files → plain tensors: in-edge lists in type-wise ids, and node and edge data."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raygnn.errors import DataError
from raygnn.graph.arrays import Array, csr_rows
from raygnn.graph.data import DEFAULT_ETYPE, DEFAULT_NTYPE, EdgeType, etype_str
from raygnn.graph.dglfile import StoredGraph, read_graphs, read_tensors
from raygnn.graph.layout import CSC, Part, PartitionMeta, typewise
from raygnn.graph.partjson import IntArray

IndexArray = np.ndarray[Any, np.dtype[np.int32]]

# dgl.NID and dgl.EID: the homogeneous ids of a part graph's nodes and edges
_ID = "_ID"


def read_part(meta: PartitionMeta, part: int) -> Part:
    """See :func:`raygnn.graph.layout.load_part`."""
    files = meta.files[part]
    stored = read_graphs(files.graph)
    if len(stored) != 1 or len(stored[0].relations) != 1 or len(stored[0].num_nodes) != 1:
        raise _inconsistent(files.graph, "does not hold one homogeneous graph")
    topology = _Topology(meta, part, stored[0], files.graph)
    num_nodes = {t: _length(meta.node_ranges[t][part]) for t in meta.ntypes}
    num_edges = {etype_str(t): _length(meta.edge_ranges[t][part]) for t in meta.etypes}
    features = meta.manifest["features"] if meta.manifest else None
    edge_data = _frames(files.edge_feats, num_edges, etype_str(DEFAULT_ETYPE), features)
    orig_nids = None
    if files.orig_nids is not None:
        orig_nids = {ntype: _tensor(ids) for ntype, ids in read_tensors(files.orig_nids).items()}
        shapes = {ntype: tuple(ids.shape) for ntype, ids in orig_nids.items()}
        if shapes != {ntype: (num,) for ntype, num in num_nodes.items()}:
            raise _inconsistent(files.orig_nids, "does not hold one id for each node of the part")
    return Part(
        part=part,
        csc={etype: topology.csc(etype) for etype in meta.etypes},
        node_data=_frames(files.node_feats, num_nodes, DEFAULT_NTYPE, features),
        edge_data={etype: edge_data[etype_str(etype)] for etype in meta.etypes},
        orig_nids=orig_nids,
    )


class _Topology:
    """A part's graph: edges in local homogeneous ids, and what these are in type-wise ones."""

    def __init__(self, meta: PartitionMeta, part: int, stored: StoredGraph, path: Path):
        self.meta, self.part, self.path = meta, part, path
        nids, eids = (self._ids(frames[0].get(_ID)) for frames in (stored.ndata, stored.edata))
        self.src, self.dst, order = self._ends(stored)
        if len(nids) != stored.num_nodes[0]:
            raise _inconsistent(path, "does not hold one id for each of its nodes")
        if len(eids) != len(self.src):
            raise _inconsistent(path, "does not hold one id for each of its edges")
        self.node_type, self.node_id, _ = self._typewise(nids, list(meta.node_map.values()))
        self.edge_type, self.edge_id, self.owner = self._typewise(
            eids if order is None else eids[order], list(meta.edge_map.values())
        )

    def csc(self, etype: EdgeType) -> CSC:
        """In-edges of one type. Edges of other parts (of halos deeper than one hop) are left."""
        src, dst, eid = self.src, self.dst, self.edge_id
        chosen = (self.owner == self.part) & (self.edge_type == self.meta.etypes.index(etype))
        if not chosen.all():
            src, dst, eid = src[chosen], dst[chosen], eid[chosen]
        self._check_types(etype, src, dst)
        self._check_complete(etype, eid)
        first, last = self.meta.node_ranges[etype[2]][self.part]
        row, src = self.node_id[dst] - first, self.node_id[src]
        if len(row) and not (row.min() >= 0 and row.max() < last - first):
            raise _inconsistent(self.path, f"owns {etype_str(etype)!r} edges into other parts")
        # Ours lie in this order already; DGL's are in the order of ids only.
        rising = np.diff(row)
        if not ((rising > 0) | ((rising == 0) & (np.diff(eid) > 0))).all():
            order = np.lexsort((eid, row))
            row, src, eid = row[order], src[order], eid[order]
        indptr = np.zeros(last - first + 1, dtype=np.int64)
        np.cumsum(np.bincount(row, minlength=last - first), out=indptr[1:])
        return CSC(*(torch.from_numpy(array) for array in (indptr, src, eid)))

    def _check_types(self, etype: EdgeType, src: IntArray, dst: IntArray) -> None:
        for end, ntype in ((src, etype[0]), (dst, etype[2])):
            if (self.node_type[end] != self.meta.ntypes.index(ntype)).any():
                raise _inconsistent(self.path, f"{etype_str(etype)!r} edges join other node types")

    def _check_complete(self, etype: EdgeType, eid: IntArray) -> None:
        start, stop = self.meta.edge_ranges[etype][self.part]
        seen = np.zeros(stop - start, dtype=bool)
        seen[eid - start] = True
        if len(eid) != len(seen) or not seen.all():
            raise _inconsistent(
                self.path, f"holds {len(eid)} {etype_str(etype)!r} edges, not those it owns"
            )

    def _ends(self, stored: StoredGraph) -> tuple[IntArray, IntArray, IntArray | None]:
        """Local ends of each edge, and the edges' local ids (None: 0 … E-1)."""
        name, (first, second, order) = next(iter(stored.relations[0].formats.items()))
        if name != "coo":
            first = csr_rows(first, len(second), partial(_inconsistent, self.path))
        src, dst = (second, first) if name == "csc" else (first, second)
        if len(src) != len(dst) or len(order) not in (0, len(src)):
            raise _inconsistent(self.path, "holds edges with one end")
        nodes = stored.num_nodes[0]
        for ids, limit in ((src, nodes), (dst, nodes), (order, len(src))):
            if len(ids) and not (ids.min() >= 0 and ids.max() < limit):
                raise _inconsistent(self.path, "holds edges whose ends or ids are out of range")
        return _int64(src), _int64(dst), _int64(order) if len(order) else None

    def _ids(self, ids: Array | Tensor | None) -> IntArray:
        """Global ids of nodes or edges as the file has them, int64."""
        if ids is None:
            raise _inconsistent(self.path, "does not hold the global ids of its nodes and edges")
        if not isinstance(ids, np.ndarray) or ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise _inconsistent(self.path, "holds global ids that are no ids")
        return _int64(ids)

    def _typewise(
        self, ids: IntArray, maps: list[IntArray]
    ) -> tuple[IndexArray, IntArray, IndexArray]:
        """Homogeneous ids → type number (int32), type-wise id (int64), owning part (int32)."""
        ranges = np.stack(maps, axis=1).reshape(-1, 2)  # by part, then type: increasing
        shift = np.stack([typewise(each) - each for each in maps], axis=1).reshape(-1, 2)[:, 0]
        if len(ids) and not (ids.min() >= 0 and ids.max() < ranges[-1, 1]):
            raise _inconsistent(self.path, "holds global ids that are out of range")
        # The last range that starts at or before an id: empty ranges start where the next does.
        at = np.searchsorted(ranges[:, 0], ids, side="right") - 1
        kind, owner = (at % len(maps)).astype(np.int32), (at // len(maps)).astype(np.int32)
        return kind, ids + shift[at], owner


def _frames(
    path: Path, rows: Mapping[str, int], default: str, features: dict[str, Any] | None
) -> dict[str, dict[str, Tensor]]:
    """The arrays ``"<type>/<name>"`` by type; names without a type are the default type's."""
    frames: dict[str, dict[str, Tensor]] = {kind: {} for kind in rows}
    for key, array in read_tensors(path).items():
        full = key if "/" in key else f"{default}/{key}"
        kind = max((k for k in rows if full.startswith(f"{k}/")), key=len, default=None)
        if kind is None:
            raise _inconsistent(path, f"holds {key!r}, which is of no type of this graph")
        if array.ndim == 0 or len(array) != rows[kind]:
            raise _inconsistent(path, f"{key!r} does not have {rows[kind]} rows")
        tensor = _tensor(array)
        # DGL's files have no bool: it comes back as uint8.
        if tensor.dtype == torch.uint8 and (
            features[full]["dtype"] == "bool" if features else full.endswith("_mask")
        ):
            tensor = tensor.bool()
        frames[kind][full[len(kind) + 1 :]] = tensor
    return frames


def _tensor(array: Array | Tensor) -> Tensor:
    return torch.from_numpy(array) if isinstance(array, np.ndarray) else array


def _int64(array: Array) -> IntArray:
    return array.astype(np.int64, copy=False)


def _length(bounds: IntArray) -> int:
    return int(bounds[1] - bounds[0])


def _inconsistent(path: Path, what: str) -> DataError:
    return DataError(what, where=str(path), remedy="the file is damaged: make the partition again")
