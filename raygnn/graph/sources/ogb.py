"""Node datasets of the Open Graph Benchmark (Hu et al., 2020) in NumPy archives, unpacked or not.

The large ones, such as ogbn-papers100M, are stored in this way. The package ``ogb`` downloads and
unpacks them, and is not needed afterwards. ``format: dataset`` reads the others with their class.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from raygnn.config.graph import OgbGraph
from raygnn.errors import DataError
from raygnn.graph.arrays import Array
from raygnn.graph.data import (
    DEFAULT_ETYPE,
    DEFAULT_NTYPE,
    MASKS,
    EdgeFrame,
    GraphData,
    NodeFrame,
    etype_str,
)
from raygnn.graph.sources.input_files import require_features, require_rows, to_ids, to_labels
from raygnn.graph.sources.npz_members import Member, members

VERSION = 1

_SPLITS = ("train", "valid", "test")
_ARCHIVE, _LABELS = "data.npz", "node-label.npz"
_COUNTS = "num_nodes_list", "num_edges_list"
_REMEDY = "the dataset is damaged: get it again"

Arrays = dict[str, Array]


def files(graph: OgbGraph) -> list[Path]:
    """Return the archives and the files of the split."""
    place = _place(graph)
    raw = [place / "raw" / name for name in (_ARCHIVE, _LABELS)]
    return raw + [_split_directory(graph, place) / f"{name}.csv.gz" for name in _SPLITS]


def reading_bytes(graph: OgbGraph) -> int:
    """See :func:`raygnn.graph.sources.reading_bytes`."""
    dataset = archived(graph)
    held = (*dataset.members, dataset.ends, *[dataset.label] * 3)  # with copies
    return sum(member.nbytes for member in held)


def read(graph: OgbGraph) -> GraphData:
    """Read the graph with the node ids of the package ``ogb``.

    Nodes have ``feat`` ``[N, F]`` as stored, ``label`` int64 ``[N]`` (-1 = unknown; multi-label:
    ``labels`` ``[N, T]``), masks bool ``[N]``, and other arrays with a row per node, such as
    ``year``; edges their arrays, ``reltype`` as ``relation``.
    """
    dataset = archived(graph)
    nodes = {name: member.read() for name, member in dataset.nodes.items()} | dataset.targets()
    src, dst = dataset.checked_ends(*dataset.ends.read())
    edges = EdgeFrame(src, dst, {name: member.read() for name, member in dataset.edges.items()})
    return GraphData(
        graph.name,
        {DEFAULT_NTYPE: NodeFrame(dataset.num_nodes, nodes)},
        {DEFAULT_ETYPE: _interleaved(edges) if graph.undirected else edges},
        dataset.origin,
    )


def _place(graph: OgbGraph) -> Path:
    """Return the directory of the dataset: below ``graph.path``, or ``graph.path`` itself."""
    directory = graph.name.replace("-", "_")
    for place in (Path(graph.path) / directory, Path(graph.path)):
        if (place / "raw" / _ARCHIVE).exists():
            return place
    kind = "Link" if graph.name.startswith("ogbl") else "Node"
    message = f"there is no archive {directory}/raw/{_ARCHIVE}, or raw/{_ARCHIVE}"
    of = f'dataset: "ogb.{kind.lower()}proppred:{kind}PropPredDataset"'
    of += f", args: {{name: {graph.name}, root: {graph.path}}}"
    remedy = f"read others with their class: graph: {{format: dataset, {of}}}"
    raise DataError(message, where=str(graph.path), remedy=remedy)


def _split_directory(graph: OgbGraph, place: Path) -> Path:
    names = sorted(path.name for path in (place / "split").glob("*") if path.is_dir())
    if graph.split is not None and graph.split not in names:
        message = f"there is no split {graph.split!r}"
    elif graph.split is None and len(names) != 1:
        message = f"there are {len(names)} splits"
    else:
        return place / "split" / (graph.split or names[0])
    remedy = f"choose graph.split from: {', '.join(names)}" if names else _REMEDY
    raise DataError(message, where=str(place / "split"), remedy=remedy)


def _masks(directory: Path, num: int) -> Arrays:
    masks = {}
    for name, mask in zip(_SPLITS, MASKS, strict=True):
        file = directory / f"{name}.csv.gz"
        try:
            ids = np.loadtxt(file, np.int64, ndmin=1)
        except (OSError, EOFError, ValueError) as error:
            raise _error(file, f"it cannot be read: {error}") from error
        masks[mask] = np.zeros(num, np.bool_)
        masks[mask][to_ids(ids, num, str(file), "node")] = True
    return masks


def _interleaved(edges: EdgeFrame) -> EdgeFrame:
    """Follow each edge by its reverse, in the order of ``ogb``."""
    source, target = np.repeat(edges.src, 2), np.repeat(edges.dst, 2)
    source[1::2], target[1::2] = edges.dst, edges.src
    data = {name: np.repeat(rows, 2, axis=0) for name, rows in edges.data.items()}
    return EdgeFrame(source, target, data)


@dataclass(frozen=True)
class Archived:
    """Dataset in archives: its headers, checked against each other.

    Attributes:
        split: the directory of the split.
        ends: ``[2, E]``.
        nodes, edges: array name → array with a row per node or edge.
        label: ``[N]``, or ``[N, T]``.
    """

    split: Path
    num_nodes: int
    ends: Member
    nodes: dict[str, Member]
    edges: dict[str, Member]
    label: Member

    @property
    def members(self) -> list[Member]:
        """All arrays except the labels."""
        return [self.ends, *self.nodes.values(), *self.edges.values()]

    @property
    def origin(self) -> dict[str, str]:
        """Files of the arrays, as in `GraphData`."""
        labels = dict.fromkeys(("label", "labels"), self.label.origin)
        masks = dict.fromkeys(MASKS, str(self.split))
        of_nodes = {name: member.origin for name, member in self.nodes.items()} | labels | masks
        origin = {f"{DEFAULT_NTYPE}/{name}": place for name, place in of_nodes.items()}
        origin |= {f"{etype_str(DEFAULT_ETYPE)}/{n}": m.origin for n, m in self.edges.items()}
        return origin | {"": str(self.ends.file.parents[1])}

    def targets(self) -> Arrays:
        """Read the nodes' labels and masks."""
        rows = self.label.read()
        masks = _masks(self.split, self.num_nodes)
        if rows.ndim > 1:
            return {"labels": rows, **masks}
        return {"label": to_labels(rows, self.label.origin), **masks}

    def checked_ends(self, src: Array, dst: Array, first: int = 0) -> tuple[Array, Array]:
        """Return sources and destinations, from edge ``first`` on, as int64 ``[n]``, checked."""
        num, origin = self.num_nodes, self.ends.origin
        sources = to_ids(src, num, f"{origin}[0]", "source", first)
        return sources, to_ids(dst, num, f"{origin}[1]", "destination", first)


def archived(graph: OgbGraph) -> Archived:
    """Return the dataset's headers."""
    raw = _place(graph) / "raw"
    arrays = members(raw / _ARCHIVE, ["edge_index", *_COUNTS], _REMEDY, ("node_", "edge_"))
    num_nodes, num_edges = (_archived_count(arrays.pop(name)) for name in _COUNTS)
    if (ends := arrays.pop("edge_index")).shape != (2, num_edges):
        message = f"its shape is {ends.shape}, and num_edges_list says {num_edges}"
        raise _error(ends.origin, message)
    nodes, edges = dict[str, Member](), dict[str, Member]()
    for stored, member in arrays.items():
        of, _, name = stored.partition("_")
        if of == "node":
            nodes[name] = _in_rows(member, num_nodes, "nodes")
        else:
            name = "relation" if name == "reltype" else name
            edges[name] = _in_rows(member, num_edges, "edges")
    label = members(raw / _LABELS, ["node_label"], _REMEDY)["node_label"]
    label = _in_rows(label, num_nodes, "nodes")
    return Archived(_split_directory(graph, raw.parent), num_nodes, ends, nodes, edges, label)


def _archived_count(member: Member) -> int:
    if member.shape != (1,) or member.dtype.kind not in "iu":
        message = f"its shape is {member.shape} and its dtype {member.dtype}, not one number"
        raise _error(member.origin, message)
    return int(member.read()[0])


def _in_rows(member: Member, num: int, of: str) -> Member:
    """Check that an array has a row for each; one column becomes ``[N]`` unless it is features."""
    require_rows(member, num, member.origin, of)
    is_features = member.name.endswith("_feat")
    if is_features or member.dtype.kind not in "biuf":
        require_features(member, member.origin)
    column = member.shape[1:] == (1,) and not is_features
    return replace(member, shape=(num,)) if column else member


def _error(where: Path | str, message: str) -> DataError:
    return DataError(message, where=str(where), remedy=_REMEDY)
