"""The partition as preflight looks at it, from its manifest and its files' sizes."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from raygnn.config.schema import Config
from raygnn.graph.data import SPLITS, EdgeType, etype_str
from raygnn.preflight.facts import Column, PartitionFacts

if TYPE_CHECKING:
    from raygnn.graph.collection import CollectionMeta
    from raygnn.graph.data import GraphData
    from raygnn.graph.partition.layout import AnyPath, PartitionMeta

Stored: TypeAlias = "PartitionMeta | CollectionMeta"
_Columns: TypeAlias = dict[str, dict[str, tuple[Column, ...]]]
_Edges: TypeAlias = dict[EdgeType, dict[str, Column]]
_Counts: TypeAlias = dict[str, dict[str, int]]


def stored_files(meta: Stored) -> dict[str, int]:
    """Path within the directory → size in bytes, of every file a node needs."""
    from raygnn.graph.collection import CollectionMeta

    if isinstance(meta, CollectionMeta):
        files = {name: file.bytes for name, file in meta.manifest.files.items()}
        return files | {n: (meta.directory / n).stat().st_size for n in stored_jsons(meta)}
    return partition_files(meta)


def stored_jsons(meta: Stored) -> tuple[str, ...]:
    """The files that say what it is."""
    from raygnn.graph.collection import CollectionMeta
    from raygnn.graph.collection.data import MANIFEST

    return (MANIFEST,) if isinstance(meta, CollectionMeta) else partition_jsons(meta)


def stored_digests(meta: Stored) -> dict[str, str]:
    """SHA-256 of the files, as far as they are known."""
    from raygnn.graph.collection import CollectionMeta

    if isinstance(meta, CollectionMeta):
        return {name: file.sha256 for name, file in meta.manifest.files.items()}
    known = meta.manifest["files"] if meta.manifest else {}
    return {name: facts["sha256"] for name, facts in known.items()}


def partition_files(meta: PartitionMeta) -> dict[str, int]:
    """Path within the partition's directory → size in bytes, of every file a node needs."""
    from raygnn.graph.partition.layout import within

    root = meta.directory
    paths = [path for part in meta.files for path in part.all()]
    paths += [root / name for name in partition_jsons(meta)]
    return {name: path.stat().st_size for path in paths if (name := within(path, root))}


def partition_jsons(meta: PartitionMeta) -> tuple[str, ...]:
    """The files that say what the partition is: DGL's json, and our manifest where there is one."""
    from raygnn.graph.partition.layout import MANIFEST

    return (meta.config_file.name, *([MANIFEST] if meta.manifest is not None else []))


def collection_facts(
    meta: CollectionMeta, splits: Mapping[str, int], *, stored: bool
) -> PartitionFacts:
    """Those of a collection of graphs.

    Args:
        splits: how many graphs there are in each.
        stored: whether it lies where the ranks will look for it.
    """
    return PartitionFacts(
        directory=str(meta.directory) if stored else "",
        num_parts=1,
        bytes=meta.bytes,
        files=stored_files(meta) if stored else {},
        fingerprint=fingerprint(meta.directory, stored_jsons(meta)) if stored else None,
        nodes={ntype: nodes.num for ntype, nodes in meta.nodes.items()},
        columns={
            ntype: {n: (Column(c.dtype, tuple(c.shape)),) for n, c in nodes.data.items()}
            for ntype, nodes in meta.nodes.items()
        },
        splits=splits,
    )


def dataset_facts() -> PartitionFacts:
    """Those of a dataset of the user's own: the ranks will see."""
    return PartitionFacts("", 1, 0, {}, None, {}, {}, {})


def task_ntype(config: Config, columns: Mapping[str, Mapping[str, Any]]) -> str | None:
    """The node type to predict for: ``task.ntype``, or the only one that has the target.

    Args:
        columns: node type → what is keyed by the names of its arrays.

    Returns:
        None when there is no such type, when several have the target, or when edges or graphs are
        what is predicted for.
    """
    task = config.task
    if task.of_graphs or task.of_edges:
        return None
    if task.ntype is not None:
        return task.ntype if task.ntype in columns else None
    having = [ntype for ntype, arrays in columns.items() if task.target in arrays]
    return having[0] if len(having) == 1 else None


def partition_facts(config: Config, meta: PartitionMeta) -> PartitionFacts:
    """Read the facts off the manifest, or off the parts where there is none.

    Raises:
        DataError: a part that others wrote cannot be read.
    """
    files = partition_files(meta)
    if meta.manifest is None:
        columns, edges, by_type = _from_parts(meta)
    else:
        columns, edges, by_type = _from_manifest(meta.manifest, meta)
    return PartitionFacts(
        directory=str(meta.directory),
        num_parts=meta.num_parts,
        bytes=sum(files.values()),
        files=files,
        fingerprint=fingerprint(meta.directory, partition_jsons(meta)),
        nodes={ntype: meta.num_nodes(ntype) for ntype in meta.ntypes},
        columns=columns,
        splits=by_type.get(task_ntype(config, columns) or "", {}),
        by_type=by_type,
        alike=meta.manifest is not None,
        edges=edges,
        reverses=meta.reverses,
    )


def graph_facts(config: Config, data: GraphData, parts: int = 1) -> PartitionFacts:
    """The same facts of a graph in memory, as they will be once it has ``parts`` parts."""
    columns = {
        ntype: {name: (_column(array),) for name, array in frame.data.items()}
        for ntype, frame in data.nodes.items()
    }
    by_type = {ntype: _splits(frame.data) for ntype, frame in data.nodes.items()}
    arrays = [a for frame in data.nodes.values() for a in frame.data.values()]
    for edges in data.edges.values():
        arrays += [edges.src, edges.dst, *edges.data.values()]
    return PartitionFacts(
        directory="",
        num_parts=parts,
        bytes=sum(int(array.nbytes) for array in arrays),
        files={},
        fingerprint=None,
        nodes={ntype: frame.num for ntype, frame in data.nodes.items()},
        columns=columns,
        splits=by_type.get(task_ntype(config, columns) or "", {}),
        by_type=by_type,
        alike=True,
        edges={
            etype: {name: _column(array) for name, array in frame.data.items()}
            for etype, frame in data.edges.items()
        },
        reverses=data.reverses,
    )


def fingerprint(directory: AnyPath, names: tuple[str, ...]) -> str | None:
    """SHA-256 over the files' contents; None if one cannot be read, or there is none."""
    digest = hashlib.sha256()
    try:
        for name in names:
            digest.update((directory / name).read_bytes())
    except OSError:
        return None
    return digest.hexdigest() if names else None


def _from_manifest(
    manifest: Mapping[str, Any], meta: PartitionMeta
) -> tuple[_Columns, _Edges, _Counts]:
    """What we wrote comes from one array each, so every part has the same."""
    columns: _Columns = {ntype: {} for ntype in meta.ntypes}
    edges: _Edges = {etype: {} for etype in meta.etypes}
    named = {etype_str(etype): arrays for etype, arrays in edges.items()}
    for key, facts in manifest["features"].items():
        kind, _, name = key.rpartition("/")
        column = Column(facts["dtype"], tuple(facts["shape"]))
        if kind in columns:
            columns[kind][name] = (column,)
        elif kind in named:
            named[kind][name] = column
    by_type: _Counts = {}
    for ntype in meta.ntypes:
        counts = [part["splits"].get(ntype, {}) for part in manifest["parts"]]
        by_type[ntype] = {split: sum(c.get(split, 0) for c in counts) for split in SPLITS}
    return columns, edges, by_type


def _from_parts(meta: PartitionMeta) -> tuple[_Columns, _Edges, _Counts]:
    from raygnn.graph.partition.layout import load_part

    found: dict[str, dict[str, dict[int, Column]]] = {ntype: {} for ntype in meta.ntypes}
    counts: dict[str, Counter[str]] = {ntype: Counter() for ntype in meta.ntypes}
    edges: _Edges = {etype: {} for etype in meta.etypes}
    for number in range(meta.num_parts):
        part = load_part(meta, number)
        for etype, named in part.edge_data.items():
            edges[etype] = {name: _column(array) for name, array in named.items()} | edges[etype]
        for ntype, arrays in part.node_data.items():
            counts[ntype].update(_splits(arrays))
            for name, array in arrays.items():
                found[ntype].setdefault(name, {})[number] = _column(array)
    columns: _Columns = {}
    for ntype, by_name in found.items():
        empty = [p for p, (first, last) in enumerate(meta.node_ranges[ntype]) if first == last]
        columns[ntype] = {}
        for name, by_part in by_name.items():
            # A part without nodes of the type need not have its arrays.
            some = next(iter(by_part.values()))
            filled = dict.fromkeys(empty, some) | by_part
            columns[ntype][name] = tuple(filled[part] for part in sorted(filled))
    return columns, edges, {ntype: dict(count) for ntype, count in counts.items()}


def _splits(arrays: Mapping[str, Any]) -> dict[str, int]:
    """``train``, ``val``, ``test`` → how many nodes; a mask that is not there marks none."""
    found = ((split, arrays.get(f"{split}_mask")) for split in SPLITS)
    return {split: 0 if mask is None else int(mask.sum()) for split, mask in found}


def _column(array: Any) -> Column:
    return Column(str(array.dtype).removeprefix("torch."), tuple(array.shape[1:]))
