"""DGL's distributed partition layout on disk.

A partition is a directory with ``<name>.json`` and ``part<p>/{graph,node_feat,edge_feat}.dgl``, as
``dgl.distributed.partition_graph``, GraphStorm and raygnn write it. Nodes and edges are renumbered
so that each part's nodes and edges of a type are contiguous. There are two numberings:

* *homogeneous* ids run over all types, part by part and type by type; files hold these;
* *type-wise* ids count within one type, part by part; all code outside this module uses these.

A part owns the in-edges of its nodes. Its graph also holds the far ends of these edges (the halo)
without their data. Reading a partition does not need DGL, and its description does not need torch.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from raygnn.config.places import Uri
from raygnn.errors import DataError
from raygnn.graph.arrays import IntArray
from raygnn.graph.data import EdgeType, etype_str
from raygnn.graph.partition.manifest import (
    MANIFEST,
    FileFacts,
    Manifest,
    read_all,
    read_json,
    read_manifest,
)
from raygnn.storage.remote import AnyPath, RemotePath, any_path, within

_MAX_PARTS = 1 << 20


@dataclass(frozen=True)
class PartFiles:
    """Files of one part. Original ids are None if the writer did not keep them."""

    graph: AnyPath
    node_feats: AnyPath
    edge_feats: AnyPath
    orig_nids: AnyPath | None
    orig_eids: AnyPath | None

    def all(self) -> list[AnyPath]:
        files = (self.graph, self.node_feats, self.edge_feats, self.orig_nids, self.orig_eids)
        return [path for path in files if path is not None]


@dataclass(frozen=True)
class PartitionMeta:
    """Description of a partition, without its data.

    Attributes:
        directory, config_file: absolute paths; the latter is DGL's ``<name>.json``.
        ntypes, etypes: in the order of DGL's type ids.
        node_ranges, edge_ranges: type → int64 ``[num_parts, 2]``, type-wise ids of each part.
        node_map, edge_map: the same in homogeneous ids, as in the files.
        manifest: content of ``raygnn.json``; None for a partition that another tool wrote.
        digest: identifies the content: the manifest's digest; without a manifest, a hash of the
            json and of the sizes and modification times of the files.
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
    manifest: Manifest | None
    digest: str

    def expected(self, path: AnyPath) -> FileFacts | None:
        """Return expected size and hash of one of its files; None without a manifest."""
        name = within(path, self.directory)
        return self.manifest.files.get(name or "") if self.manifest else None

    @property
    def names(self) -> dict[str, list[Any]]:
        """``"<type>/<array>"`` → categories of its codes 0, 1, …, as far as known."""
        return self.manifest.names if self.manifest else {}

    @property
    def reverses(self) -> dict[EdgeType, EdgeType]:
        """Edge type → type with its edges reversed, as far as known."""
        etypes = {etype_str(etype): etype for etype in self.etypes}
        reverses = self.manifest.reverses if self.manifest else {}
        return {etypes[one]: etypes[other] for one, other in reverses.items()}

    def num_nodes(self, ntype: str) -> int:
        """Return the number of nodes of one type in all parts."""
        return int(self.node_ranges[ntype][-1, 1])

    def num_edges(self, etype: EdgeType) -> int:
        """Return the number of edges of one type in all parts."""
        return int(self.edge_ranges[etype][-1, 1])


def read_meta(path: str | Path | Uri | AnyPath) -> PartitionMeta:
    """Read and check a partition's description, without opening the parts; ``path``: its directory
    or DGL's json in it, local or a URI that pyarrow.fs opens."""
    path = any_path(path)
    if not path.exists():
        message = "there is no partition here"
        remedy = "check partition.path, or partition the graph with `raygnn partition`"
        raise DataError(message, where=str(path), remedy=remedy)
    directory = path if path.is_dir() else path.parent
    if isinstance(directory, RemotePath):  # one listing instead of several requests for each file
        directory = directory.listed()
        path = directory if path == directory else directory / path.name
    manifest = read_manifest(directory)
    config = _DglJson(_find_json(directory) if path.is_dir() else path)
    num_parts = config.num_parts()
    ntypes = config.types("ntypes")
    etypes = config.edge_types("etypes", ntypes)
    node_map = config.ranges("node_map", ntypes, num_parts, "num_nodes")
    edge_map = config.ranges("edge_map", [etype_str(e) for e in etypes], num_parts, "num_edges")
    files = [config.part_files(part) for part in range(num_parts)]
    return PartitionMeta(
        directory=directory,
        config_file=config.path,
        graph_name=str(config.values.get("graph_name", config.path.stem)),
        num_parts=num_parts,
        ntypes=ntypes,
        etypes=etypes,
        node_ranges={ntype: typewise(node_map[ntype]) for ntype in ntypes},
        edge_ranges={etype: typewise(edge_map[etype_str(etype)]) for etype in etypes},
        node_map=node_map,
        edge_map={etype: edge_map[etype_str(etype)] for etype in etypes},
        files=files,
        manifest=manifest,
        digest=manifest.digest if manifest else _foreign_digest(config.path, files),
    )


def typewise(homogeneous: IntArray) -> IntArray:
    """Convert one type's ranges ``[num_parts, 2]`` from homogeneous to type-wise ids."""
    sizes = homogeneous[:, 1] - homogeneous[:, 0]
    ends = np.cumsum(sizes)
    return np.stack([ends - sizes, ends], axis=1)


def _find_json(directory: AnyPath) -> AnyPath:
    # from Python 3.12 on a Path's glob hides that a directory cannot be read
    listed: list[AnyPath] = sorted(directory.iterdir(), key=lambda path: path.name)
    jsons = [path for path in listed if path.name.endswith(".json") and path.name != MANIFEST]
    descriptions = [path for path in jsons if {"num_parts", "node_map"} <= read_json(path).keys()]
    if len(descriptions) == 1:
        return descriptions[0]
    message = f"holds {len(descriptions) or 'no'} partition{'s' if descriptions else ''}"
    remedy = "name the partition's json file, the one with num_parts and node_map in it"
    raise DataError(message, where=str(directory), remedy=remedy)


def _foreign_digest(config_file: AnyPath, files: list[PartFiles]) -> str:
    digest = hashlib.sha256(read_all(config_file))
    for path in (path for part in files for path in part.all()):
        stat = path.stat()
        digest.update(f"{path.name} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()


class _DglJson:
    """DGL's partition json. Every method raises DataError with file and key."""

    def __init__(self, path: AnyPath):
        self.path = path
        self.values = read_json(path)

    def bad(self, key: str, what: str) -> DataError:
        remedy = "partition the graph again, or correct the json"
        return DataError(what, where=f"{self.path}: {key}", remedy=remedy)

    def num_parts(self) -> int:
        value = self.values.get("num_parts")
        if type(value) is not int or not 1 <= value <= _MAX_PARTS:
            raise self.bad("num_parts", f"{value!r} is not a whole number from 1 to {_MAX_PARTS}")
        return value

    def types(self, key: str) -> list[str]:
        """Return type names in the order of their ids."""
        ids = self.values.get(key)
        if not isinstance(ids, dict) or not ids:
            raise self.bad(key, f"{ids!r} does not number the types")
        order = {number: name for name, number in ids.items() if isinstance(number, int)}
        if sorted(order) != list(range(len(ids))):
            raise self.bad(key, f"{ids!r} does not number the types from 0")
        return [order[number] for number in range(len(ids))]

    def edge_types(self, key: str, ntypes: list[str]) -> list[EdgeType]:
        etypes: list[EdgeType] = []
        for name in self.types(key):
            ends = name.split(":")
            if len(ends) != 3:
                raise self.bad(key, f"{name!r} is not 'source type:relation:destination type'")
            if not {ends[0], ends[2]} <= set(ntypes):
                raise self.bad(key, f"{name!r} joins types that are not in ntypes")
            etypes.append((ends[0], ends[1], ends[2]))
        return etypes

    def ranges(
        self, key: str, types: list[str], num_parts: int, total_key: str
    ) -> dict[str, IntArray]:
        """Return type → int64 ``[num_parts, 2]``."""
        given, total = self.values.get(key), self.values.get(total_key)
        if not isinstance(given, dict):
            raise self.bad(key, "holds no id ranges (partitions that map ids by file are not read)")
        if set(given) != set(types):
            raise self.bad(key, f"has the types {sorted(given)}, expected {sorted(types)}")
        ranges = {kind: self._range(f"{key}.{kind}", given[kind], num_parts) for kind in types}
        flat = np.stack(list(ranges.values()), axis=1).reshape(-1, 2)
        follows = np.concatenate([[0], flat[:-1, 1]])
        if (flat[:, 0] != follows).any() or (flat[:, 0] > flat[:, 1]).any():
            raise self.bad(key, "its ranges do not follow each other, part by part, type by type")
        if total != flat[-1, 1]:
            raise self.bad(total_key, f"is {total!r}, but {key} ends at {flat[-1, 1]}")
        return ranges

    def _range(self, key: str, rows: Any, num_parts: int) -> IntArray:
        try:
            array = np.asarray(rows)
        except ValueError:  # rows of unequal length
            array = np.empty(0)
        if array.dtype.kind != "i" or array.shape != (num_parts, 2):
            raise self.bad(key, f"is not a list of {num_parts} id ranges")
        return array.astype(np.int64)

    def part_files(self, part: int) -> PartFiles:
        entry = self.values.get(f"part-{part}")
        if not isinstance(entry, dict):
            raise self.bad(f"part-{part}", "is missing")
        if "part_graph" not in entry and "part_graph_graphbolt" in entry:
            message = "this partition holds only GraphBolt's fused graphs, which are not read"
            remedy = "partition with use_graphbolt=False, or keep part_graph beside it"
            raise DataError(message, where=f"{self.path}: part-{part}", remedy=remedy)
        graph, nodes, edges = (
            self._inside(f"part-{part}.{key}", entry.get(key))
            for key in ("part_graph", "node_feats", "edge_feats")
        )
        # names that DGL's dispatch tool uses; the json does not mention them
        originals: list[AnyPath] = [graph.with_name(f"orig_{ids}.dgl") for ids in ("nids", "eids")]
        nids, eids = (path if path.is_file() else None for path in originals)
        return PartFiles(graph, nodes, edges, nids, eids)

    def _inside(self, key: str, name: object) -> AnyPath:
        if not isinstance(name, str) or not name:
            raise self.bad(key, "is missing")
        directory = self.path.parent.resolve()
        try:
            path = (directory / name).resolve()
            exists = path.is_file()
        except (OSError, ValueError):  # a name that no file can have
            raise self.bad(key, f"{name!r} is no file name") from None
        if within(path, directory) is None:
            raise self.bad(key, f"{name!r} leads out of the partition's directory")
        if not exists:
            message = "a file of the partition is missing"
            remedy = "copy the complete directory, or partition the graph again"
            raise DataError(message, where=str(path), remedy=remedy)
        return path
