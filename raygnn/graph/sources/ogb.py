"""Node and link datasets of the Open Graph Benchmark (Hu et al., 2020), from its raw files.

These are what the package ``ogb`` downloads and unpacks. What it makes of them, a pickle, is not
needed, and so the package is not either; nodes, edges and their order are those that it gives.

Its link datasets keep the edges of validation and test apart from the graph. Here they are edges
as well, with masks. The sampled negatives that come with them are not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from raygnn.config.graph import OgbGraph
from raygnn.errors import DataError
from raygnn.graph.data import (
    DEFAULT_ETYPE,
    DEFAULT_NTYPE,
    MASKS,
    EdgeFrame,
    EdgeType,
    GraphData,
    NodeFrame,
    etype_str,
)
from raygnn.graph.sources.convert import Array, to_labels
from raygnn.graph.sources.ogb_links import link_edges
from raygnn.graph.tables import plain

VERSION = 1
DEFAULT_NORMALIZE = "none"

# Where ogb's own list of datasets says add_inverse_edge: each pair is listed once.
_UNDIRECTED = {"ogbn-proteins", "ogbn-products", "ogbl-ppa", "ogbl-collab", "ogbl-ddi"}
_SPLIT_FILES = ("train", "valid", "test")
_REMEDY = "the dataset is damaged: get it again"


def files(graph: OgbGraph) -> list[Path]:
    """The raw files and those of the split, in the order of their names.

    Raises:
        DataError: there is no such dataset, or it has several splits and none was chosen.
    """
    place = _place(graph)
    split = _split_directory(graph, place)
    found = sorted((place / "raw").rglob("*.csv.gz"))
    return found + sorted([*split.rglob("*.csv.gz"), *split.rglob("*.pt")])


def read(graph: OgbGraph) -> GraphData:
    """The graph as ``ogb`` numbers it.

    Nodes have ``feat`` float32 ``[N, F]``, ``label`` int64 ``[N]`` (-1 = unknown; of several
    labels for each node instead ``labels`` ``[N, T]``), masks bool ``[N]``, and what else is given
    for each, such as ``year``. Edges have ``feat``, ``weight``, ``year``, ``relation`` as given;
    those of link datasets the masks.

    Raises:
        DataError: a file is missing or wrong; it is named, with row and column.
    """
    place = _place(graph)
    raw, split = place / "raw", _split_directory(graph, place)
    undirected = graph.name in _UNDIRECTED if graph.undirected is None else graph.undirected
    origin = {"": str(place)}
    if (raw / "triplet-type-list.csv.gz").exists():
        nodes = _typed_nodes(raw)
        relations = {
            etype: raw / "relations" / "___".join(etype) for etype in _triplets(raw, nodes)
        }
    else:
        nodes = {DEFAULT_NTYPE: _nodes(raw, _single(raw / "num-node-list.csv.gz"))}
        relations = {DEFAULT_ETYPE: raw}
    links = (split / "train.pt").exists()
    if links:
        nodes, edges = link_edges(nodes, relations, split)
    else:
        edges = {etype: _edges(where, etype, nodes) for etype, where in relations.items()}
        for ntype, where, indices in _labelled(raw, split, nodes):
            nodes[ntype].data |= _labels(where, nodes[ntype].num)
            nodes[ntype].data |= _masks(indices, nodes[ntype].num)
            origin |= {f"{ntype}/{name}": str(where) for name in ("label", "labels")}
            origin |= {f"{ntype}/{mask}": str(indices) for mask in MASKS}
    for ntype in nodes:
        where = raw if ntype == DEFAULT_NTYPE or links else raw / "node-feat" / ntype
        origin[f"{ntype}/feat"] = str(where / "node-feat.csv.gz")
    if undirected:
        edges = {etype: _both(frame) for etype, frame in edges.items()}
    for etype, where in relations.items():
        key = etype_str(etype)
        origin |= {f"{key}/{end}": str(where / "edge.csv.gz") for end in ("src", "dst")}
    return GraphData(graph.name, nodes, edges, origin)


def _place(graph: OgbGraph) -> Path:
    """The directory of the dataset: below that of all datasets, or ``graph.path`` itself."""
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
    if (binary := place / "raw" / "data.npz").exists() or (
        binary := place / "raw" / "edge_index_dict.npz"
    ).exists():
        raise DataError(
            "the dataset is one of ogb's binary ones, which are not read",
            where=str(binary),
            remedy="convert it to tables in Parquet, and use format: tables",
        )
    return place


def _split_directory(graph: OgbGraph, place: Path) -> Path:
    there = sorted(each.name for each in (place / "split").glob("*") if each.is_dir())
    if graph.split is not None and graph.split not in there:
        what = f"there is no split {graph.split!r}"
    elif graph.split is None and len(there) != 1:
        what = f"there are {len(there)} splits"
    else:
        return place / "split" / (graph.split or there[0])
    remedy = f"choose graph.split from: {', '.join(there)}" if there else _REMEDY
    raise DataError(what, where=str(place / "split"), remedy=remedy)


def _single(file: Path) -> int:
    """The one number of a file that has one for each graph."""
    found = plain.integers(file, [1 << 40], "row")
    if len(found) != 1:
        raise DataError(
            f"there are {len(found)} graphs",
            where=str(file),
            remedy="datasets of many graphs (ogbg-…) are not read: save them with "
            "dgl.save_graphs, and use format: graphs",
        )
    return int(found[0, 0])


def _nodes(where: Path, num: int) -> NodeFrame:
    data: dict[str, Any] = {}
    if (feat := where / "node-feat.csv.gz").exists():
        data["feat"] = plain.features(feat, num, "nodes")
    for file in sorted(where.glob("node_*.csv.gz")):
        name = file.name.removesuffix(".csv.gz").removeprefix("node_")
        data[name] = plain.numbers(file, num, "nodes")
    if (species := where / "species.csv.gz").exists():  # of ogbn-proteins; the package renames it
        data["species"] = plain.numbers(species, num, "nodes")
    return NodeFrame(num, data)


def _typed_nodes(raw: Path) -> dict[str, NodeFrame]:
    file = raw / "num-node-dict.csv.gz"
    rows = plain.read_rows(file)
    if len(rows) != 2:
        raise DataError(f"there are {len(rows) - 1} graphs", where=str(file), remedy=_REMEDY)
    nodes = {}
    for column, (ntype, num) in sorted(
        enumerate(zip(*rows, strict=True)), key=lambda each: each[1]
    ):
        if not (num or "").isascii() or not (num or "").isdecimal():
            raise DataError(
                f"the value is {num!r}, not how many nodes of {ntype} there are",
                where=f"{file}, row 2 (line 2), column '{column + 1}'",
                remedy=_REMEDY,
            )
        nodes[ntype] = _nodes(raw / "node-feat" / ntype, int(num))
    return nodes


def _triplets(raw: Path, nodes: Mapping[str, NodeFrame]) -> list[EdgeType]:
    file = raw / "triplet-type-list.csv.gz"
    found = []
    for row, triplet in enumerate(plain.read_rows(file), start=1):
        where = f"{file}, row {row} (line {row})"
        if len(triplet) != 3 or not all(triplet):
            what = f"{len(triplet)} columns, expected source type, relation and target type"
            raise DataError(what, where=where, remedy=_REMEDY)
        for column in (1, 3):
            if (ntype := triplet[column - 1]) not in nodes:
                what = f"there is no node type {ntype!r}; there are: {', '.join(nodes)}"
                raise DataError(what, where=f"{where}, column '{column}'", remedy=_REMEDY)
        found.append((triplet[0], triplet[1], triplet[2]))
    return sorted(found)


def _edges(where: Path, etype: EdgeType, nodes: Mapping[str, NodeFrame]) -> EdgeFrame:
    """The edges of one type, with whatever is given for each of them."""
    ends = plain.integers(where / "edge.csv.gz", [nodes[etype[0]].num, nodes[etype[2]].num], "node")
    num = _single(where / "num-edge-list.csv.gz")
    if len(ends) != num:
        what = f"there are {len(ends)} edges, and num-edge-list.csv.gz says {num}"
        raise DataError(what, where=str(where / "edge.csv.gz"), remedy=_REMEDY)
    data: dict[str, Any] = {}
    if (feat := where / "edge-feat.csv.gz").exists():
        data["feat"] = plain.features(feat, num, "edges")
    for file in sorted(where.glob("edge_*.csv.gz")):
        name = file.name.removesuffix(".csv.gz").removeprefix("edge_")
        data["relation" if name == "reltype" else name] = plain.numbers(file, num, "edges")
    return EdgeFrame(np.ascontiguousarray(ends[:, 0]), np.ascontiguousarray(ends[:, 1]), data)


def _labelled(
    raw: Path, split: Path, nodes: Mapping[str, NodeFrame]
) -> list[tuple[str, Path, Path]]:
    """Node types with labels: the type, their file, and the directory of their split."""
    if DEFAULT_NTYPE in nodes:
        return [(DEFAULT_NTYPE, raw / "node-label.csv.gz", split)]
    file = raw / "nodetype-has-label.csv.gz"
    rows = plain.read_rows(file)
    if len(rows) != 2:
        raise DataError(f"there are {len(rows)} rows, expected 2", where=str(file), remedy=_REMEDY)
    found = []
    for column, (ntype, has) in enumerate(zip(*rows, strict=True), start=1):
        if has == "True" and ntype not in nodes:
            where = f"{file}, row 1 (line 1), column '{column}'"
            raise DataError(f"there is no node type {ntype!r}", where=where, remedy=_REMEDY)
        if has == "True":
            labels = raw / "node-label" / ntype / "node-label.csv.gz"
            found.append((ntype, labels, split / ntype))
    return found


def _labels(file: Path, num: int) -> dict[str, Array]:
    found = plain.numbers(file, num, "nodes", nulls=True)
    return {"label": to_labels(found, str(file))} if found.ndim == 1 else {"labels": found}


def _masks(directory: Path, num: int) -> dict[str, Array]:
    masks = {}
    for name, mask in zip(_SPLIT_FILES, MASKS, strict=True):
        masks[mask] = np.zeros(num, np.bool_)
        masks[mask][plain.integers(directory / f"{name}.csv.gz", [num], "node")[:, 0]] = True
    return masks


def _both(edges: EdgeFrame) -> EdgeFrame:
    """Each edge, and after it the reversed one, as ``ogb`` orders them."""
    source, target = np.repeat(edges.src, 2), np.repeat(edges.dst, 2)
    source[1::2], target[1::2] = edges.dst, edges.src
    data = {name: np.repeat(rows, 2, axis=0) for name, rows in edges.data.items()}
    return EdgeFrame(source, target, data)
