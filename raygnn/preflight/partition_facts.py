"""Facts of a partition from its manifest and its files' sizes, and the target nodes or edges of a
task."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from raygnn.config.model import NO_LAYERS
from raygnn.config.schema import Config
from raygnn.config.task import RELATIONAL, EdgeTaskConfig, NodeTaskConfig, SplitConfig
from raygnn.graph.data import MASKS, SPLITS, EdgeSplit, EdgeTarget, EdgeType, etype_str
from raygnn.preflight.facts import ArrayType, PartitionFacts
from raygnn.util.files import is_away

if TYPE_CHECKING:
    from raygnn.graph.collection import CollectionMeta
    from raygnn.graph.data import GraphData
    from raygnn.graph.partition.layout import PartitionMeta
    from raygnn.graph.partition.manifest import Manifest
    from raygnn.storage.remote import AnyPath

Stored: TypeAlias = "PartitionMeta | CollectionMeta"
_Columns: TypeAlias = dict[str, dict[str, tuple[ArrayType, ...]]]
_Edges: TypeAlias = dict[EdgeType, dict[str, ArrayType]]
_Counts: TypeAlias = dict[str, dict[str, int]]
_Arrays: TypeAlias = Mapping[EdgeType, Mapping[str, Any]]

_RELATION = "relation"


class StoredFiles(NamedTuple):
    """Files in the directory of a partition or a collection."""

    directory: AnyPath
    sizes: Mapping[str, int]  # path within the directory → bytes, of every file that a node needs
    jsons: tuple[str, ...]  # json files that describe it: DGL's or the collection's, and raygnn's

    @property
    def fingerprint(self) -> str | None:
        """SHA-256 over the contents of ``jsons``; None if one cannot be read. Raises OSError if
        the storage is unreachable."""
        from raygnn.graph.partition.manifest import read_all

        digest = hashlib.sha256()
        try:
            for name in self.jsons:
                digest.update(read_all(self.directory / name))
        except OSError as error:
            if is_away(error):
                raise
            return None
        return digest.hexdigest()


def stored_files(meta: Stored) -> StoredFiles:
    """Collect the files of a partition or a collection, without reading them."""
    from raygnn.graph.collection import MANIFEST as OF_COLLECTION
    from raygnn.graph.collection import CollectionMeta
    from raygnn.graph.partition.manifest import MANIFEST
    from raygnn.storage.remote import within

    root = meta.directory
    if isinstance(meta, CollectionMeta):
        jsons: tuple[str, ...] = (OF_COLLECTION,)
        sizes = {name: file.bytes for name, file in meta.files.items()}
        sizes |= {name: (root / name).stat().st_size for name in jsons}
    else:
        jsons = (meta.config_file.name, *([MANIFEST] if meta.manifest is not None else []))
        paths = [path for part in meta.files for path in part.all()]
        paths += [root / name for name in jsons]
        sizes = {name: path.stat().st_size for path in paths if (name := within(path, root))}
    return StoredFiles(root, sizes, jsons)


def collection_facts(
    meta: CollectionMeta, splits: Mapping[str, int], *, stored: bool
) -> PartitionFacts:
    """Return the facts of a collection of graphs; ``stored``: True if the ranks will read its
    directory."""
    facts = PartitionFacts(
        bytes=meta.bytes,
        nodes={ntype: nodes.num for ntype, nodes in meta.nodes.items()},
        columns={
            ntype: {name: (_stored(column),) for name, column in nodes.data.items()}
            for ntype, nodes in meta.nodes.items()
        },
        splits=splits,
        edges={
            etype: {name: _stored(column) for name, column in edges.data.items()}
            for etype, edges in meta.edges.items()
        },
    )
    if not stored:
        return facts
    files = stored_files(meta)
    directory = str(meta.directory)
    return replace(facts, directory=directory, files=files.sizes, fingerprint=files.fingerprint)


def task_ntype(config: Config, columns: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Return the target node type: ``task.ntype``, or the only type that has the target; None if
    there is no such type, if several have the target, or for tasks on edges or graphs."""
    task = config.task
    if not isinstance(task, NodeTaskConfig):
        return None
    if task.ntype is not None:
        return task.ntype if task.ntype in columns else None
    holders = [ntype for ntype, arrays in columns.items() if task.target in arrays]
    return holders[0] if len(holders) == 1 else None


def edges_of(config: Config, facts: PartitionFacts) -> EdgeTarget | tuple[str, str] | None:
    """Return the `edge_target` of one task; None if the task is not on edges."""
    return edge_target(config, facts.edges, facts.reverses) if config.task.of_edges else None


def edge_target(
    config: Config, arrays: _Arrays, reverses: Mapping[EdgeType, EdgeType] | None = None
) -> EdgeTarget | tuple[str, str]:
    """Return the target of a task on edges, or problem and remedy."""
    task, model = config.task, config.model
    assert isinstance(task, EdgeTaskConfig)
    reverses = reverses or {}
    etype = _etype(task, arrays, set(reverses.values()))
    if len(etype) == 2:
        return etype
    names, relation = arrays[etype], model.relation
    target = None if task.of_links else task.target
    needed = [(target if config.trains else None, "task.target"), (relation, "model.relation")]
    needed += [(name, "model.decoder_features") for name in model.decoder_feature_names]
    for name, key in needed:
        if name is not None and name not in names:
            return (
                f"edge type {etype_str(etype)!r} has no array {name!r} ({key}); "
                f"there are: {', '.join(sorted(names)) or 'none'}",
                f"set {key} to one of them, or task.etype to a type that has the array",
            )
    inputs = {relation, *model.decoder_feature_names}
    if task.exclude == "none":
        inputs |= {*model.edge_feature_names, *model.edge_category_widths}
    if target is not None and target in inputs:
        return (
            f"{target!r} is the target (task.target) and also an input of the model",
            "remove it from model.relation and model.decoder_features, and set task.exclude to "
            "reverse",
        )
    masked = any(name in names for name in MASKS)
    if masked and task.split is not None and (task.split.val or task.split.test):
        problem = f"task.split would be ignored: edges of type {etype_str(etype)} have masks"
        return problem, "remove task.split, or the masks of these edges"
    reverse = _reverse(task, etype, arrays, reverses)
    if isinstance(reverse, str):
        return reverse, "set task.reverse to a type that connects them in the other direction"
    shares = task.split or SplitConfig()
    reads = model.decoder in (None, *RELATIONAL)
    if relation is None and reads and _RELATION in names and target != _RELATION:
        relation = _RELATION
    decoder = model.decoder or ("dot" if relation is None else "distmult")
    weights = decoder not in ("dot", "cosine") or model.embedding is not None
    if task.of_links and model.kind == NO_LAYERS and not weights:
        remedy = "set model.embedding, or model.decoder to distmult or mlp, or another model.kind"
        return f"model.kind none with the decoder {decoder} has no weights", remedy
    split = EdgeSplit(etype, reverse)
    if not masked:
        time = config.split_time
        split = EdgeSplit(etype, reverse, (shares.val, shares.test), shares.seed, time)
    return EdgeTarget(split, relation if reads else None)


def _etype(
    task: EdgeTaskConfig, arrays: _Arrays, added: set[EdgeType]
) -> EdgeType | tuple[str, str]:
    """Return the target edge type, or problem and remedy; ``added``: types of reverse edges that
    raygnn added."""
    listed = ", ".join(map(etype_str, arrays))
    if task.etype is not None:
        named = _named(task.etype, arrays)
        if len(named) == 1:
            return named[0]
        how = "no edge type" if not named else "more than one edge type"
        problem = f"{how} is called {task.etype!r} (task.etype); there are: {listed}"
        return problem, "name one of them as source:relation:target"
    candidates = [etype for etype in arrays if etype not in added]
    if len(candidates) > 1:
        marks = MASKS if task.of_links else (task.target,)
        candidates = [e for e in candidates if not arrays[e].keys().isdisjoint(marks)]
    if len(candidates) == 1:
        return candidates[0]
    return f"the target edge type is not clear; there are: {listed}", "name it with task.etype"


def _named(name: str, arrays: _Arrays) -> list[EdgeType]:
    """Return the edge types with this relation, or this ``source:relation:target``."""
    return [etype for etype in arrays if name in (etype_str(etype), etype[1])]


def _reverse(
    task: EdgeTaskConfig, etype: EdgeType, arrays: _Arrays, reverses: Mapping[EdgeType, EdgeType]
) -> EdgeType | str | None:
    """Return the type of the reverse edges, if any; a text is a problem."""
    if task.exclude != "reverse":
        return None
    if task.reverse is None:
        both = {other: one for one, other in reverses.items()} | dict(reverses)
        return both.get(etype, etype if etype[0] == etype[2] else None)
    ends = (etype[2], etype[0])
    fitting = [e for e in _named(task.reverse, arrays) if (e[0], e[2]) == ends]
    if len(fitting) == 1:
        return fitting[0]
    return (
        f"{task.reverse!r} (task.reverse) is no edge type from {ends[0]} to {ends[1]}; "
        f"there are: {', '.join(map(etype_str, arrays))}"
    )


def partition_facts(config: Config, meta: PartitionMeta) -> PartitionFacts:
    """Return the facts of a partition from its manifest, or without one from its parts. Raises
    DataError if a part cannot be read."""
    files = stored_files(meta)
    if meta.manifest is None:
        columns, edges, by_type = _from_parts(meta)
    else:
        columns, edges, by_type = _from_manifest(meta.manifest, meta)
    return PartitionFacts(
        directory=str(meta.directory),
        num_parts=meta.num_parts,
        bytes=sum(files.sizes.values()),
        files=files.sizes,
        fingerprint=files.fingerprint,
        nodes={ntype: meta.num_nodes(ntype) for ntype in meta.ntypes},
        columns=columns,
        splits=known_splits(config, columns, by_type),
        by_type=by_type,
        alike=meta.manifest is not None,
        edges=edges,
        reverses=meta.reverses,
    )


def known_splits(
    config: Config, columns: Mapping[str, Any], by_type: Mapping[str, Mapping[str, int]]
) -> Mapping[str, int]:
    """Return the number of target nodes in each split. Splits by time and of a training table are
    not known here."""
    if config.split_time or config.table:
        return {}
    return by_type.get(task_ntype(config, columns) or "", {})


def graph_facts(config: Config, data: GraphData, parts: int = 1) -> PartitionFacts:
    """Return the facts of a graph in memory, which is to be partitioned into ``parts``."""
    columns = {
        ntype: {name: (_column(array),) for name, array in frame.data.items()}
        for ntype, frame in data.nodes.items()
    }
    by_type = {ntype: _splits(frame.data) for ntype, frame in data.nodes.items()}
    arrays = [a for frame in data.nodes.values() for a in frame.data.values()]
    for edges in data.edges.values():
        arrays += [edges.src, edges.dst, *edges.data.values()]
    return PartitionFacts(
        num_parts=parts,
        bytes=sum(int(array.nbytes) for array in arrays),
        nodes={ntype: frame.num for ntype, frame in data.nodes.items()},
        columns=columns,
        splits=known_splits(config, columns, by_type),
        by_type=by_type,
        alike=True,
        edges={
            etype: {name: _column(array) for name, array in frame.data.items()}
            for etype, frame in data.edges.items()
        },
        reverses=data.reverses,
    )


def _from_manifest(manifest: Manifest, meta: PartitionMeta) -> tuple[_Columns, _Edges, _Counts]:
    """Return types and counts from raygnn's manifest: all parts have the same arrays."""
    columns: _Columns = {ntype: {} for ntype in meta.ntypes}
    edges: _Edges = {etype: {} for etype in meta.etypes}
    named = {etype_str(etype): arrays for etype, arrays in edges.items()}
    for key, feature in manifest.features.items():
        kind, _, name = key.rpartition("/")
        if kind in columns:
            columns[kind][name] = (_stored(feature),)
        elif kind in named:
            named[kind][name] = _stored(feature)
    by_type: _Counts = {}
    for ntype in meta.ntypes:
        counts = [part.splits.get(ntype, {}) for part in manifest.parts]
        by_type[ntype] = {split: sum(c.get(split, 0) for c in counts) for split in SPLITS}
    return columns, edges, by_type


def _from_parts(meta: PartitionMeta) -> tuple[_Columns, _Edges, _Counts]:
    """Return types and counts from the parts. Raises DataError for a damaged file."""
    from raygnn.graph.partition.read import read_edge_data, read_in_edges, read_node_data

    by_part: dict[str, dict[str, dict[int, ArrayType]]] = {ntype: {} for ntype in meta.ntypes}
    counts: dict[str, Counter[str]] = {ntype: Counter() for ntype in meta.ntypes}
    edges: _Edges = {etype: {} for etype in meta.etypes}
    for number in range(meta.num_parts):
        read_in_edges(meta, number)  # only to raise for a damaged file
        for etype, arrays in read_edge_data(meta, number).items():
            edges[etype] = {name: _column(array) for name, array in arrays.items()} | edges[etype]
        for ntype, arrays in read_node_data(meta, number).items():
            counts[ntype].update(_splits(arrays))
            for name, array in arrays.items():
                by_part[ntype].setdefault(name, {})[number] = _column(array)
    columns: _Columns = {}
    for ntype, named in by_part.items():
        empty = [p for p, (first, last) in enumerate(meta.node_ranges[ntype]) if first == last]
        columns[ntype] = {}
        for name, parts in named.items():
            # a part without nodes of the type need not have its arrays
            filled = dict.fromkeys(empty, next(iter(parts.values()))) | parts
            columns[ntype][name] = tuple(filled[part] for part in sorted(filled))
    return columns, edges, {ntype: dict(count) for ntype, count in counts.items()}


def _splits(arrays: Mapping[str, Any]) -> dict[str, int]:
    masks = {split: arrays.get(f"{split}_mask") for split in SPLITS}
    return {split: 0 if mask is None else int(mask.sum()) for split, mask in masks.items()}


def _stored(described: Any) -> ArrayType:
    return ArrayType(described.dtype, tuple(described.shape))


def _column(array: Any) -> ArrayType:
    return ArrayType(str(array.dtype).removeprefix("torch."), tuple(array.shape[1:]))
