"""Node and link datasets of the Open Graph Benchmark (Hu et al., 2020), from its raw files.

These are what the package ``ogb`` downloads and unpacks. What it makes of them, a pickle, is not
needed, and so the package is not either; nodes, edges and their order are those that it gives.
Large ones, such as ogbn-papers100M, have NumPy archives in place of tables.

Its link datasets keep the edges of validation and test apart from the graph, in files of
``torch.save``. Here they are edges as well, with masks. What `negatives` reads is what they are to
be ranked among.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from raygnn.config.graph import OgbGraph
from raygnn.errors import DataError
from raygnn.graph.arrays import Array
from raygnn.graph.data import (
    DEFAULT_ETYPE,
    DEFAULT_NTYPE,
    MASKS,
    EdgeFrame,
    EdgeType,
    GraphData,
    NegativeLists,
    NodeFrame,
    etype_str,
)
from raygnn.graph.sources import triples
from raygnn.graph.sources.input_files import (
    require_features,
    require_rows,
    to_ids,
    to_labels,
    unpacked_size,
)
from raygnn.graph.sources.npz_members import Member, members
from raygnn.graph.sources.pickles import SavedArrays
from raygnn.graph.tables import plain_csv

VERSION = 1

# Where ogb's own list of datasets says add_inverse_edge: each pair is listed once.
_UNDIRECTED = {"ogbn-proteins", "ogbn-products", "ogbl-ppa", "ogbl-collab", "ogbl-ddi"}
_SPLITS = ("train", "valid", "test")
_LINK_ARRAYS = ("weight", "year")  # of each edge, in datasets that have them
_ARCHIVE, _LABELS = "data.npz", "node-label.npz"  # of large datasets
_COUNTS = "num_nodes_list", "num_edges_list"
_REMEDY = "the dataset is damaged: get it again"

Arrays = dict[str, Array]


def files(graph: OgbGraph) -> list[Path]:
    """Return the raw files and those of the split, sorted by name.

    Raises:
        DataError: there is no such dataset, or it has several splits and none was chosen.
    """
    place = _place(graph)
    split = _split_directory(graph, place)
    raw = sorted((place / "raw").rglob("*.csv.gz"))
    if (place / "raw" / _ARCHIVE).exists():
        raw = [file for name in (_ARCHIVE, _LABELS) if (file := place / "raw" / name).exists()]
    return raw + sorted([*split.rglob("*.csv.gz"), *split.rglob("*.pt")])


def reading_bytes(graph: OgbGraph) -> int:
    """See :func:`raygnn.graph.sources.reading_bytes`."""
    if (dataset := archived(graph)) is None:
        return sum(map(unpacked_size, files(graph)))
    held = (*dataset.members, dataset.ends, *[dataset.label] * 3)  # with copies
    return sum(member.nbytes for member in held)


def read(graph: OgbGraph) -> GraphData:
    """Read the graph with the node ids of the package ``ogb``.

    Nodes have ``feat`` float32 ``[N, F]`` (from archives as stored), ``label`` int64 ``[N]``
    (-1 = unknown; of several labels for each node instead ``labels`` ``[N, T]``), masks bool
    ``[N]``, and what else is given for each, such as ``year``. Edges have ``feat``, ``weight``,
    ``year``, ``relation`` as given; those of link datasets the masks.

    Raises:
        DataError: a file is missing or wrong; it is named, with row and column.
    """
    place = _place(graph)
    raw, split = place / "raw", _split_directory(graph, place)
    origin = {"": str(place)}
    if (dataset := archived(graph)) is not None:
        return _read_archived(graph, dataset)
    if (raw / "triplet-type-list.csv.gz").exists():
        nodes = _typed_nodes(raw)
        directories = {
            etype: raw / "relations" / "___".join(etype) for etype in _edge_types(raw, nodes)
        }
    else:
        nodes = {DEFAULT_NTYPE: _nodes(raw, _only_count(raw / "num-node-list.csv.gz"))}
        directories = {DEFAULT_ETYPE: raw}
    has_links = (split / "train.pt").exists()
    if has_links:
        nodes, edges = _link_edges(nodes, directories, split)
    else:
        edges = {etype: _edges(where, etype, nodes) for etype, where in directories.items()}
        for ntype, labels, indices in _labelled(raw, split, nodes):
            stored = plain_csv.numbers(labels, nodes[ntype].num, "nodes", nulls=True)
            nodes[ntype].data |= _labels(stored, str(labels))
            nodes[ntype].data |= _masks(indices, nodes[ntype].num)
            origin |= {f"{ntype}/{name}": str(labels) for name in ("label", "labels")}
            origin |= {f"{ntype}/{mask}": str(indices) for mask in MASKS}
    for ntype in nodes:
        where = raw if ntype == DEFAULT_NTYPE or has_links else raw / "node-feat" / ntype
        origin[f"{ntype}/feat"] = str(where / "node-feat.csv.gz")
    if is_undirected(graph):
        edges = {etype: _interleaved(frame) for etype, frame in edges.items()}
    return GraphData(graph.name, nodes, edges, origin)


def is_undirected(graph: OgbGraph) -> bool:
    """Return True if each pair is listed once and stands for both directions."""
    return graph.name in _UNDIRECTED if graph.undirected is None else graph.undirected


def _place(graph: OgbGraph) -> Path:
    """Return the directory of the dataset: below ``graph.path``, or ``graph.path`` itself."""
    directory = graph.name.replace("-", "_")
    for place in (Path(graph.path) / directory, Path(graph.path)):
        if (place / "raw").is_dir():
            break
    else:
        kind = "Link" if graph.name.startswith("ogbl") else "Node"
        raise DataError(
            f"there is no directory {directory}/raw, or raw",
            where=str(graph.path),
            remedy=f'get the dataset with the package ogb: python -c "from '
            f"ogb.{kind.lower()}proppred import {kind}PropPredDataset as D; "
            f"D('{graph.name}', root='{graph.path}')\"",
        )
    of_links = graph.name.startswith("ogbl")
    refused = place / "raw" / (_ARCHIVE if of_links else "edge_index_dict.npz")
    if refused.exists():
        message = "archives are read of nodes of one type, and not of links or several types"
        remedy = "convert it to tables in Parquet, and use format: tables"
        raise DataError(message, where=str(refused), remedy=remedy)
    return place


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


def _only_count(file: Path) -> int:
    """Return the only number of a file with one number per graph."""
    counts = plain_csv.integers(file, [1 << 40], "row")
    if len(counts) != 1:
        raise DataError(
            f"there are {len(counts)} graphs",
            where=str(file),
            remedy="datasets of many graphs (ogbg-…) are not read: save them with "
            "dgl.save_graphs, and use format: graphs",
        )
    return int(counts[0, 0])


def _nodes(where: Path, num: int) -> NodeFrame:
    data: dict[str, Any] = {}
    if (feat := where / "node-feat.csv.gz").exists():
        data["feat"] = plain_csv.features(feat, num, "nodes")
    for file in sorted(where.glob("node_*.csv.gz")):
        name = file.name.removesuffix(".csv.gz").removeprefix("node_")
        data[name] = plain_csv.numbers(file, num, "nodes")
    if (species := where / "species.csv.gz").exists():  # of ogbn-proteins; the package renames it
        data["species"] = plain_csv.numbers(species, num, "nodes")
    return NodeFrame(num, data)


def _typed_nodes(raw: Path) -> dict[str, NodeFrame]:
    file = raw / "num-node-dict.csv.gz"
    rows = plain_csv.read_rows(file)
    if len(rows) != 2:
        raise _error(file, f"there are {len(rows) - 1} graphs")
    nodes = {}
    for ntype, column in sorted((ntype, column) for column, ntype in enumerate(rows[0])):
        num = rows[1][column] or ""
        if not num.isascii() or not num.isdecimal():
            message = f"the value is {num!r}, not how many nodes of {ntype} there are"
            raise _error(f"{file}, row 2 (line 2), column '{column + 1}'", message)
        nodes[ntype] = _nodes(raw / "node-feat" / ntype, int(num))
    return nodes


def _edge_types(raw: Path, nodes: Mapping[str, NodeFrame]) -> list[EdgeType]:
    file = raw / "triplet-type-list.csv.gz"
    etypes = []
    for row, triplet in enumerate(plain_csv.read_rows(file), start=1):
        where = f"{file}, row {row} (line {row})"
        if len(triplet) != 3 or not all(triplet):
            message = f"{len(triplet)} columns, expected source type, relation and target type"
            raise _error(where, message)
        for column in (1, 3):
            if (ntype := triplet[column - 1]) not in nodes:
                message = f"there is no node type {ntype!r}; there are: {', '.join(nodes)}"
                raise _error(f"{where}, column '{column}'", message)
        etypes.append((triplet[0], triplet[1], triplet[2]))
    return sorted(etypes)


def _edges(where: Path, etype: EdgeType, nodes: Mapping[str, NodeFrame]) -> EdgeFrame:
    """Read the edges of one type, with all arrays that are given for them."""
    file, below = where / "edge.csv.gz", [nodes[etype[0]].num, nodes[etype[2]].num]
    ends = plain_csv.integers(file, below, "node")
    num = _only_count(where / "num-edge-list.csv.gz")
    if len(ends) != num:
        raise _error(file, f"there are {len(ends)} edges, and num-edge-list.csv.gz says {num}")
    data: dict[str, Any] = {}
    if (feat := where / "edge-feat.csv.gz").exists():
        data["feat"] = plain_csv.features(feat, num, "edges")
    for file in sorted(where.glob("edge_*.csv.gz")):
        name = file.name.removesuffix(".csv.gz").removeprefix("edge_")
        data["relation" if name == "reltype" else name] = plain_csv.numbers(file, num, "edges")
    return EdgeFrame(np.ascontiguousarray(ends[:, 0]), np.ascontiguousarray(ends[:, 1]), data)


def _labelled(
    raw: Path, split: Path, nodes: Mapping[str, NodeFrame]
) -> list[tuple[str, Path, Path]]:
    """Return the node types with labels: the type, their file, and the directory of their split."""
    if DEFAULT_NTYPE in nodes:
        return [(DEFAULT_NTYPE, raw / "node-label.csv.gz", split)]
    file = raw / "nodetype-has-label.csv.gz"
    rows = plain_csv.read_rows(file)
    if len(rows) != 2:
        raise _error(file, f"there are {len(rows)} rows, expected 2")
    labelled = []
    for column, (ntype, has_label) in enumerate(zip(*rows, strict=True), start=1):
        if has_label != "True":
            continue
        if ntype not in nodes:
            where = f"{file}, row 1 (line 1), column '{column}'"
            raise _error(where, f"there is no node type {ntype!r}")
        labels = raw / "node-label" / ntype / "node-label.csv.gz"
        labelled.append((ntype, labels, split / ntype))
    return labelled


def _labels(labels: Array, origin: str) -> Arrays:
    return {"label": to_labels(labels, origin)} if labels.ndim == 1 else {"labels": labels}


def _masks(directory: Path, num: int) -> Arrays:
    masks = {}
    for name, mask in zip(_SPLITS, MASKS, strict=True):
        masks[mask] = np.zeros(num, np.bool_)
        masks[mask][plain_csv.integers(directory / f"{name}.csv.gz", [num], "node")[:, 0]] = True
    return masks


def _interleaved(edges: EdgeFrame) -> EdgeFrame:
    """Follow each edge by its reverse, in the order of ``ogb``."""
    source, target = np.repeat(edges.src, 2), np.repeat(edges.dst, 2)
    source[1::2], target[1::2] = edges.dst, edges.src
    data = {name: np.repeat(rows, 2, axis=0) for name, rows in edges.data.items()}
    return EdgeFrame(source, target, data)


# --- archives: nodes and edges of one type


@dataclass(frozen=True)
class Archived:
    """Dataset in archives: its headers, checked against each other.

    Attributes:
        split: the directory of the split.
        ends: ``[2, E]``.
        nodes, edges: array name → array with a row for each.
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
        labels = _labels(self.label.read(), self.label.origin)
        return labels | _masks(self.split, self.num_nodes)

    def checked_ends(self, src: Array, dst: Array, first: int = 0) -> tuple[Array, Array]:
        """Return sources and destinations, from edge ``first`` on, as int64 ``[n]``; raises
        DataError for an id that is not a node."""
        num, origin = self.num_nodes, self.ends.origin
        sources = to_ids(src, num, f"{origin}[0]", "source", first)
        return sources, to_ids(dst, num, f"{origin}[1]", "destination", first)


def archived(graph: OgbGraph) -> Archived | None:
    """Return the dataset if it is in archives, else None.

    Raises:
        DataError: an array is missing, or they do not fit each other.
    """
    raw = _place(graph) / "raw"
    if not (file := raw / _ARCHIVE).exists():
        return None
    arrays = members(file, ["edge_index", *_COUNTS], _REMEDY, ("node_", "edge_"))
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
        require_features(member.outline(), member.origin)
    column = member.shape[1:] == (1,) and not is_features
    return replace(member, shape=(num,)) if column else member


def _read_archived(graph: OgbGraph, dataset: Archived) -> GraphData:
    nodes = {name: member.read() for name, member in dataset.nodes.items()} | dataset.targets()
    src, dst = dataset.checked_ends(*dataset.ends.read())
    edges = EdgeFrame(src, dst, {name: member.read() for name, member in dataset.edges.items()})
    return GraphData(
        graph.name,
        {DEFAULT_NTYPE: NodeFrame(dataset.num_nodes, nodes)},
        {DEFAULT_ETYPE: _interleaved(edges) if is_undirected(graph) else edges},
        dataset.origin,
    )


# --- links: files of torch.save, one for each split


def _link_edges(
    nodes: dict[str, NodeFrame], directories: Mapping[EdgeType, Path], split: Path
) -> tuple[dict[str, NodeFrame], dict[EdgeType, EdgeFrame]]:
    """Read all edges, training edges first, with masks bool ``[E]`` and all arrays given for them.

    Triples of nodes of one type are one edge type, as of the format ``triples``; of several,
    their relations are edge types.
    """
    saved = [SavedArrays(split / f"{name}.pt") for name in _SPLITS]
    if DEFAULT_NTYPE not in nodes:
        numbers = {_relation_number(where): etype for etype, where in directories.items()}
        if len(numbers) != len(directories):
            where = next(iter(directories.values())).parent
            raise _error(where, "edge_reltype.csv.gz gives two types of edges one number")
        parts = [_typed_links(arrays, numbers, nodes) for arrays in saved]
        return nodes, {etype: _joined([part[etype] for part in parts]) for etype in directories}
    num = nodes[DEFAULT_NTYPE].num
    frame = _joined([_links(arrays, num) for arrays in saved])
    if "relation" in frame.data:
        return {triples.NTYPE: nodes[DEFAULT_NTYPE]}, {triples.ETYPE: frame}
    (etype,) = directories
    return nodes, {etype: frame}


def _links(saved: SavedArrays, num: int) -> Arrays:
    """Read edges between nodes of one type, from any of the three layouts."""
    if "edge" in saved:
        pairs = _pairs(saved, "edge", num)
        arrays = {"src": pairs[:, 0], "dst": pairs[:, 1]}
    elif "source_node" in saved:
        source, target = (saved.integers(key, num) for key in ("source_node", "target_node"))
        arrays = {"src": source, "dst": target}
    else:
        head, tail = (saved.integers(key, num) for key in ("head", "tail"))
        relation = saved.integers("relation", triples.MAX_RELATIONS)
        arrays = {"src": head, "dst": tail, "relation": relation}
    for name in _LINK_ARRAYS:
        if name in saved:
            arrays[name] = saved.numbers(name).reshape(-1)
    return _same_length(saved, arrays)


def negatives(
    graph: OgbGraph, etype: EdgeType, counts: tuple[int, int]
) -> dict[str, NegativeLists]:
    """Read the negatives of validation and test edges, ``val`` and ``test``: ``edge_neg`` for all
    of them, or replacements of each edge's target, or head and tail.

    Args:
        counts: source and target nodes of the edge type.

    Raises:
        DataError: there are none, or they are damaged.
    """
    place, number = _place(graph), None
    if (place / "raw" / "triplet-type-list.csv.gz").exists():
        number = _relation_number(place / "raw" / "relations" / "___".join(etype))
    files = [_split_directory(graph, place) / f"{name}.pt" for name in _SPLITS[1:]]
    return {
        split: _negatives(SavedArrays(file), counts, number)
        for split, file in zip(("val", "test"), files)
    }


def _negatives(saved: SavedArrays, counts: tuple[int, int], number: int | None) -> NegativeLists:
    """Read one split's negatives; ``number``: the relation to select if relations are edge
    types."""
    if "edge" in saved:
        ends, pairs = (_pairs(saved, key, counts[0]).T for key in ("edge", "edge_neg"))
        rows = np.arange(pairs.shape[1])
        return NegativeLists(str(saved.path), ends, None, {}, pairs, rows)
    names = ("source_node", "target_node") if "source_node" in saved else ("head", "tail")
    relation = saved.integers("relation", triples.MAX_RELATIONS) if "relation" in saved else None
    ends = np.stack([saved.integers(name) for name in names])
    rows = np.arange(ends.shape[1]) if number is None else np.flatnonzero(relation == number)
    others = {}
    for end, name, count in zip(("source", "target"), names, counts):
        if (key := f"{name}_neg") not in saved and name != names[1]:
            continue
        nodes = saved.integers(key)
        if nodes.ndim != 2 or len(nodes) != ends.shape[1]:
            raise saved.error(
                key, f"its shape is {nodes.shape}, and there are {ends.shape[1]} edges"
            )
        others[end] = nodes = nodes[rows]
        if (bad := ((nodes < 0) | (nodes >= count)).any(1)).any():
            row = int(np.argmax(bad))
            message = f"it holds {nodes[row].tolist()[:20]}; ids run from 0 to {count - 1}"
            raise saved.error(key, message, int(rows[row]))
    relation = None if number is not None else relation
    return NegativeLists(str(saved.path), ends[:, rows], relation, others, None, rows)


def _pairs(saved: SavedArrays, key: str, num: int) -> Array:
    pairs = saved.integers(key, num)
    if pairs.ndim != 2 or pairs.shape[1] != 2:
        raise saved.error(key, f"its shape is {pairs.shape}, not that of pairs")
    return pairs


def _typed_links(
    saved: SavedArrays, numbers: Mapping[int, EdgeType], nodes: Mapping[str, NodeFrame]
) -> dict[EdgeType, Arrays]:
    relation = saved.integers("relation", max(numbers) + 1)
    ends = {"src": saved.integers("head"), "dst": saved.integers("tail")}
    _same_length(saved, {**ends, "relation": relation})
    unknown = ~np.isin(relation, list(numbers))
    if unknown.any():
        row = int(np.argmax(unknown))
        raise saved.error("relation", f"{relation[row]} is no relation", row)
    links: dict[EdgeType, Arrays] = {}
    for number, etype in numbers.items():
        rows = np.flatnonzero(relation == number)
        links[etype] = {end: ids[rows] for end, ids in ends.items()}
        for end, key, ntype in (("src", "head", etype[0]), ("dst", "tail", etype[2])):
            ids, num = links[etype][end], nodes[ntype].num
            bad = (ids < 0) | (ids >= num)
            if bad.any():
                message = f"{ids[np.argmax(bad)]} is no {ntype}: there are {num}"
                raise saved.error(key, message, int(rows[np.argmax(bad)]))
    return links


def _relation_number(where: Path) -> int:
    """Return the number of an edge type in the files of the split."""
    file = where / "edge_reltype.csv.gz"
    text = plain_csv.first_value(file)
    if not text.isascii() or not text.isdecimal() or int(text) >= triples.MAX_RELATIONS:
        place = f"{file}, row 1 (line 1), column '1'"
        raise _error(place, f"the value is {text!r}, not a number")
    return int(text)


def _same_length(saved: SavedArrays, arrays: Arrays) -> Arrays:
    shapes = {name: array.shape for name, array in arrays.items()}
    if any(shape != shapes["src"] or len(shape) != 1 for shape in shapes.values()):
        listed = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise _error(saved.path, f"the arrays of its edges differ in shape: {listed}")
    return arrays


def _joined(parts: list[Arrays]) -> EdgeFrame:
    names = [name for name in parts[0] if all(name in part for part in parts)]
    joined = {name: np.concatenate([part[name] for part in parts]) for name in names}
    split = np.repeat(np.arange(len(parts)), [len(part["src"]) for part in parts])
    masks = {mask: split == at for at, mask in enumerate(MASKS)}
    source, target = joined.pop("src"), joined.pop("dst")
    return EdgeFrame(source, target, joined | masks)


def _error(where: Path | str, message: str) -> DataError:
    return DataError(message, where=str(where), remedy=_REMEDY)
