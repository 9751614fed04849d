"""What lies on disk: DGL's distributed partition layout.

A partition is a directory with ``<name>.json`` and ``part<p>/{graph,node_feat,edge_feat}.dgl``,
as ``dgl.distributed.partition_graph`` and GraphStorm write it and as we do. Nodes and edges have
been renumbered so that those of one part and type are contiguous; two numberings are in use:

* *homogeneous* ids run over all types, part by part and within a part type by type: what the
  files hold;
* *type-wise* ids count within one type, part by part: what everything after this module uses.

A part owns the in-edges of its nodes. Its graph also holds the far ends of these edges (the
halo) without their data. DGL is not needed to read a partition, nor is torch for its description.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from raygnn.config.places import Uri
from raygnn.errors import DataError
from raygnn.graph.data import DEFAULT_ETYPE, DEFAULT_NTYPE, EdgeType, etype_str
from raygnn.graph.partition.dgl_json import Fields, IntArray, find_config
from raygnn.graph.partition.partition_manifest import check_manifest, read_manifest
from raygnn.graph.remote import AnyPath, RemotePath, any_path, within

if TYPE_CHECKING:
    from torch import Tensor

MANIFEST = "raygnn.json"
"""The file beside DGL's json that says what we wrote; see `raygnn.graph.partition.manifest`."""

LAYOUT_VERSION = 2

_MAX_PARTS = 1 << 20


@dataclass(frozen=True)
class PartFiles:
    """The files of one part. Original ids are None where the writer did not keep them."""

    graph: AnyPath
    node_feats: AnyPath
    edge_feats: AnyPath
    orig_nids: AnyPath | None
    orig_eids: AnyPath | None

    def all(self) -> list[AnyPath]:
        found = (self.graph, self.node_feats, self.edge_feats, self.orig_nids, self.orig_eids)
        return [path for path in found if path is not None]


@dataclass(frozen=True)
class PartitionMeta:
    """A partition, without its data.

    Attributes:
        directory, config_file: absolute paths; the latter is DGL's ``<name>.json``.
        ntypes, etypes: in the order of DGL's type ids.
        node_ranges: node type → int64 ``[num_parts, 2]``, the type-wise ids that each part owns.
        edge_ranges: the same for edge types.
        node_map, edge_map: as the ranges, but in homogeneous ids, as the files have them.
        manifest: the content of ``raygnn.json``; None for a partition that others wrote.
        digest: identifies the content: the manifest's; for a partition without one, derived from
            its json and from the sizes and modification times of its files.
    """

    directory: AnyPath
    config_file: AnyPath
    graph_name: str
    num_parts: int
    ntypes: list[str]
    etypes: list[EdgeType]
    node_ranges: dict[str, IntArray]
    edge_ranges: dict[EdgeType, IntArray]
    node_map: dict[str, IntArray]
    edge_map: dict[EdgeType, IntArray]
    files: list[PartFiles]
    manifest: dict[str, Any] | None
    digest: str

    def name_of(self, path: AnyPath) -> str:
        """A file's path within the directory."""
        name = within(path, self.directory)
        assert name is not None  # seen to when the json was read
        return name

    def id_file(self, ntype: str) -> AnyPath | None:
        """Where the user's ids of a node type lie; None where the numbers are all there is."""
        known = (self.manifest or {}).get("ids", ())
        return self.directory / "ids" / f"{ntype}.arrow" if ntype in known else None

    @property
    def reverses(self) -> dict[EdgeType, EdgeType]:
        """Edge type → the one that holds its edges the other way round, as far as is known."""
        named = {etype_str(etype): etype for etype in self.etypes}
        known = (self.manifest or {}).get("reverses", {})
        return {named[one]: named[other] for one, other in known.items()}

    def num_nodes(self, ntype: str) -> int:
        """Nodes of one type, over all parts."""
        return int(self.node_ranges[ntype][-1, 1])

    def num_edges(self, etype: EdgeType) -> int:
        """Edges of one type, over all parts."""
        return int(self.edge_ranges[etype][-1, 1])


@dataclass(frozen=True)
class CSC:
    """In-edges of a part's own nodes of the destination type, int64.

    Attributes:
        indptr: ``[n_inner + 1]``; row i is the i-th own node, in id order.
        src: ``[E]`` type-wise ids of the source nodes, over all parts.
        eid: ``[E]`` type-wise edge ids, increasing within a row.
    """

    indptr: Tensor
    src: Tensor
    eid: Tensor


@dataclass(frozen=True)
class Part:
    """One part, as one worker sees it.

    Attributes:
        part: its number.
        csc: edge type → in-edges.
        node_data: node type → name → ``[n_inner, …]``, rows in id order.
        edge_data: edge type → name → ``[E, …]``, rows in edge id order.
        orig_nids: node type → int64 ``[n_inner]``, the ids in the graph that was partitioned;
            None if the writer did not keep them.
    """

    part: int
    csc: dict[EdgeType, CSC]
    node_data: dict[str, dict[str, Tensor]]
    edge_data: dict[EdgeType, dict[str, Tensor]]
    orig_nids: dict[str, Tensor] | None


def read_meta(path: str | Path | Uri | AnyPath) -> PartitionMeta:
    """Read a partition's description and check it; the parts themselves are not opened.

    Args:
        path: the partition's directory, or DGL's json in it; local, or a URI that pyarrow.fs
            opens.

    Raises:
        DataError: no partition there, a json that is damaged or contradicts itself, a part's
            file that is missing or of another size than the manifest says, or a format that
            cannot be read (GraphBolt's fused graphs, ids that are no ranges).
    """
    path = any_path(path)
    if not path.exists():
        raise DataError(
            "there is no partition here",
            where=str(path),
            remedy="check partition.path, or make the partition with `raygnn partition`",
        )
    directory = path if path.is_dir() else path.parent
    if isinstance(directory, RemotePath):  # one look rather than several at each file
        directory = directory.listed()
        path = directory if path == directory else directory / path.name
    manifest = read_manifest(directory / MANIFEST, LAYOUT_VERSION)
    config_file = find_config(directory, MANIFEST) if path.is_dir() else path
    fields = Fields(config_file)

    num_parts = fields.integer("num_parts", 1, _MAX_PARTS)
    ntypes = fields.types("ntypes", DEFAULT_NTYPE)
    etypes = fields.edge_types("etypes", etype_str(DEFAULT_ETYPE), ntypes)
    node_map = fields.ranges("node_map", ntypes, num_parts, "num_nodes")
    edge_map = fields.ranges("edge_map", [etype_str(e) for e in etypes], num_parts, "num_edges")
    if manifest is not None:
        _check_sizes(directory, manifest)
    files = [PartFiles(*fields.part_files(part)) for part in range(num_parts)]
    meta = PartitionMeta(
        directory=directory,
        config_file=config_file,
        graph_name=str(fields.values.get("graph_name", config_file.stem)),
        num_parts=num_parts,
        ntypes=ntypes,
        etypes=etypes,
        node_ranges={ntype: typewise(node_map[ntype]) for ntype in ntypes},
        edge_ranges={etype: typewise(edge_map[etype_str(etype)]) for etype in etypes},
        node_map=node_map,
        edge_map={etype: edge_map[etype_str(etype)] for etype in etypes},
        files=files,
        manifest=manifest,
        digest=manifest["digest"] if manifest else _foreign_digest(config_file, files),
    )
    check_manifest(directory / MANIFEST, meta)
    return meta


def load_part(meta: PartitionMeta, part: int) -> Part:
    """Read one part. Masks are bool and everything else has the dtype that was stored.

    Raises:
        DataError: naming the file that is missing, cut short, garbled or inconsistent.
    """
    # here, because preflight reads descriptions in processes that need not load torch
    from raygnn.graph.partition.topology import read_part

    return read_part(meta, part)


def typewise(homogeneous: IntArray) -> IntArray:
    """Ranges of one type in homogeneous ids → in type-wise ids, both ``[num_parts, 2]``."""
    sizes = homogeneous[:, 1] - homogeneous[:, 0]
    ends = np.cumsum(sizes)
    return np.stack([ends - sizes, ends], axis=1)


def _check_sizes(directory: AnyPath, manifest: dict[str, Any]) -> None:
    for name, facts in manifest["files"].items():
        path = directory / name
        size = path.stat().st_size if path.is_file() else None
        if size != facts["bytes"]:
            raise DataError(
                "is missing" if size is None else f"has {size} bytes, expected {facts['bytes']}",
                where=str(path),
                remedy="copy the whole directory again, or make the partition again",
            )


def _foreign_digest(config_file: AnyPath, files: list[PartFiles]) -> str:
    digest = hashlib.sha256(config_file.read_bytes())
    for path in (path for part in files for path in part.all()):
        stat = path.stat()
        digest.update(f"{path.name} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()
