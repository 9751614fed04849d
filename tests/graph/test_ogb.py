"""The Open Graph Benchmark's raw files give the graph that its own package gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import assert_refused
from ogb_builder import (
    EDGES,
    NODES,
    TRIPLETS,
    TYPED,
    raw_text,
    write_archives,
    write_links,
    write_nodes,
    write_typed,
)

from raygnn.config.graph import OgbGraph
from raygnn.graph.data import DEFAULT_ETYPE, DEFAULT_NTYPE, MASKS
from raygnn.graph.partition.make import partition_graph
from raygnn.graph.sources import digest, load_graph
from raygnn.graph.sources.triples import ETYPE
from raygnn.graph.tables import plain_csv, reader
from tests.graph.parted import load_part

Build = Callable[[Path], OgbGraph]


@pytest.mark.parametrize("name", ["ogbn-arxiv", "ogbn-products"])
def test_nodes_of_one_type_are_those_of_the_package(name: str, tmp_path: Path) -> None:
    graph = write_nodes(tmp_path, name)
    data = load_graph(graph)
    nodes, edges = data.nodes[DEFAULT_NTYPE], data.edges[DEFAULT_ETYPE]
    assert (nodes.num, edges.num) == (NODES, EDGES * (2 if name == "ogbn-products" else 1))
    assert [int(nodes.data[mask].sum()) for mask in MASKS] == [20, 5, 5]
    assert nodes.data["year"].dtype == np.int64
    theirs = pytest.importorskip("ogb.io.read_graph_raw").read_csv_graph_raw(
        str(tmp_path / name.replace("-", "_") / "raw"), name == "ogbn-products", ["node_year"]
    )[0]
    np.testing.assert_array_equal(np.stack([edges.src, edges.dst]), theirs["edge_index"])
    np.testing.assert_array_equal(nodes.data["feat"], theirs["node_feat"])
    np.testing.assert_array_equal(nodes.data["year"], theirs["node_year"][:, 0])


def test_a_late_fraction_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "_BLOCK", 1 << 10)
    monkeypatch.setattr(reader, "ROWS", 99)
    raw_text(tmp_path / "a.csv.gz", "".join(f"{i},{i}\n" for i in range(1000)) + "1,0.5\n")
    found = plain_csv.numbers(tmp_path / "a.csv.gz", 1001, "nodes")
    assert found[-2:].tolist() == [[999, 999], [1, 0.5]]


def test_archives_are_read_as_they_are_stored(tmp_path: Path) -> None:
    """Labels that are NaN are unknown; all else is what is in the archive."""
    graph = write_archives(tmp_path, features="float16")
    data, raw = load_graph(graph), tmp_path / "ogbn_papers100M" / "raw"
    nodes, edges = data.nodes[DEFAULT_NTYPE].data, data.edges[DEFAULT_ETYPE]
    stored, label = np.load(raw / "data.npz"), np.load(raw / "node-label.npz")["node_label"]
    np.testing.assert_array_equal(np.stack([edges.src, edges.dst]), stored["edge_index"])
    np.testing.assert_array_equal(edges.data["relation"], stored["edge_reltype"][:, 0])
    np.testing.assert_array_equal(edges.data["feat"], stored["edge_feat"])
    np.testing.assert_array_equal(nodes["feat"], stored["node_feat"])
    np.testing.assert_array_equal(nodes["year"], stored["node_year"][:, 0])
    np.testing.assert_array_equal(nodes["label"], np.nan_to_num(label[:, 0], nan=-1))
    assert nodes["feat"].dtype == np.float16
    assert [int(nodes[mask].sum()) for mask in MASKS] == [10, 4, 4]
    both = load_graph(graph.model_copy(update={"undirected": True})).edges[DEFAULT_ETYPE]
    np.testing.assert_array_equal(both.src, stored["edge_index"].T.reshape(-1))
    np.testing.assert_array_equal(both.dst, stored["edge_index"][::-1].T.reshape(-1))


def test_nodes_of_several_types_are_those_of_the_package(tmp_path: Path) -> None:
    data = load_graph(write_typed(tmp_path))
    assert {ntype: frame.num for ntype, frame in data.nodes.items()} == TYPED
    assert {etype: frame.num for etype, frame in data.edges.items()} == TRIPLETS
    paper = data.nodes["paper"].data
    assert [int(paper[mask].sum()) for mask in MASKS] == [12, 4, 4]
    assert "label" not in data.nodes["author"].data
    reader = pytest.importorskip("ogb.io.read_graph_raw")
    raw = str(tmp_path / "ogbn_mag" / "raw")
    theirs = reader.read_csv_heterograph_raw(raw, False, ["node_year"], ["edge_reltype"])[0]
    for etype, frame in data.edges.items():
        ends = np.stack([frame.src, frame.dst])
        np.testing.assert_array_equal(ends, theirs["edge_index_dict"][etype])
        kinds = theirs["edge_reltype"][etype][:, 0]
        np.testing.assert_array_equal(frame.data["relation"], kinds)
    np.testing.assert_array_equal(paper["feat"], theirs["node_feat_dict"]["paper"])
    np.testing.assert_array_equal(paper["year"], theirs["node_year"]["paper"][:, 0])
    labels = reader.read_node_label_hetero(raw)["paper"]
    np.testing.assert_array_equal(paper["label"], labels[:, 0])


def test_several_labels_for_each_node(tmp_path: Path) -> None:
    nodes = load_graph(write_nodes(tmp_path, "ogbn-proteins", labels=7)).nodes[DEFAULT_NTYPE]
    assert "label" not in nodes.data
    assert nodes.data["labels"].shape == (NODES, 7)


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "before torch 1.6"])
@pytest.mark.parametrize("name", ["ogbl-collab", "ogbl-citation2", "ogbl-wikikg2"])
def test_links_of_all_splits_are_edges(name: str, legacy: bool, tmp_path: Path) -> None:
    graph, parts = write_links(tmp_path, name, legacy=legacy)
    data = load_graph(graph)
    (etype,) = data.edges
    assert (etype == ETYPE) == (name == "ogbl-wikikg2")
    edges, each = data.edges[etype], 2 if name == "ogbl-collab" else 1
    keys = {"ogbl-collab": None, "ogbl-citation2": ("source_node", "target_node")}
    for part, mask in zip(parts, MASKS, strict=True):
        rows = edges.data[mask]
        ends = keys.get(name, ("head", "tail"))
        pairs = part["edge"].T if ends is None else np.stack([part[end] for end in ends])
        found = np.stack([edges.src[rows], edges.dst[rows]])
        np.testing.assert_array_equal(found[:, ::each], pairs)
        if each == 2:
            np.testing.assert_array_equal(found[:, 1::2], pairs[::-1])
            np.testing.assert_array_equal(edges.data["year"][rows][::2], part["year"])
        if "relation" in part:
            np.testing.assert_array_equal(edges.data["relation"][rows], part["relation"])
    assert data.nodes[etype[0]].data["feat"].shape == (NODES, 4)


def test_triples_between_types(tmp_path: Path) -> None:
    graph, parts = write_links(tmp_path, "ogbl-biokg")
    data = load_graph(graph)
    for number, etype in enumerate(sorted(TRIPLETS, key=list(TRIPLETS).index)):
        edges = data.edges[etype]
        for part, mask in zip(parts, MASKS, strict=True):
            rows = part["relation"] == number
            np.testing.assert_array_equal(edges.src[edges.data[mask]], part["head"][rows])
            np.testing.assert_array_equal(edges.dst[edges.data[mask]], part["tail"][rows])


def test_a_partition_of_it(tmp_path: Path) -> None:
    graph = write_typed(tmp_path)
    meta = partition_graph(
        load_graph(graph), tmp_path / "p", parts=2, method="random", digest="d", source={}
    )
    labels = [load_part(meta, number).node_data["paper"]["label"] for number in (0, 1)]
    assert sum(map(len, labels)) == TYPED["paper"]


def test_the_directory_may_be_named_itself(tmp_path: Path) -> None:
    graph = write_nodes(tmp_path)
    inner = graph.model_copy(update={"path": tmp_path / "ogbn_arxiv"})
    assert digest(graph) == digest(inner)
    raw_text(tmp_path / "ogbn_arxiv" / "raw" / "node_year.csv.gz", "1999\n" * NODES)
    assert digest(graph) != digest(write_nodes(tmp_path / "again"))


def changed(file: str, text: str, build: Build = write_nodes) -> Build:
    def make(root: Path) -> OgbGraph:
        graph = build(root)
        (place,) = root.iterdir()
        if text:
            raw_text(place / file, text)
        else:
            (place / file).unlink()
        return graph

    return make


def links(name: str, value: Any) -> Build:
    """A link dataset whose validation split holds something else."""

    def make(root: Path) -> OgbGraph:
        graph, _ = write_links(root, name)
        torch.save(value, root / name.replace("-", "_") / "split" / "time" / "valid.pt")
        return graph

    return make


def cut(root: Path) -> OgbGraph:
    graph, _ = write_links(root, "ogbl-collab")
    file = root / "ogbl_collab" / "split" / "time" / "test.pt"
    file.write_bytes(file.read_bytes()[:-300])
    return graph


def two_splits(root: Path) -> OgbGraph:
    graph = write_nodes(root)
    (root / "ogbn_arxiv" / "split" / "random").mkdir()
    return graph


def binary(root: Path) -> OgbGraph:
    graph = write_nodes(root, "ogbn-mag")
    np.savez(root / "ogbn_mag" / "raw" / "edge_index_dict.npz", edge_index=np.zeros((2, 1)))
    return graph


def vessel(root: Path) -> OgbGraph:
    graph, _ = write_links(root, "ogbl-collab")
    np.savez(root / "ogbl_collab" / "raw" / "data.npz", edge_index=np.zeros((2, 1)))
    return graph


def archived(**changes: Any) -> Build:
    return lambda root: write_archives(root, **changes)


class Command:
    def __reduce__(self) -> Any:
        return (print, ("run",))


ROWS = "".join(f"{i},0\n" for i in range(EDGES - 1))
PAIRS = np.zeros((3, 2), np.int64)
MALFORMED: dict[str, tuple[Build, list[str]]] = {
    "no dataset": (
        lambda root: OgbGraph(format="ogb", path=root, name="ogbl-ppa"),
        ["no directory ogbl_ppa/raw", "from ogb.linkproppred import LinkPropPredDataset"],
    ),
    "binary, of several types": (binary, ["edge_index_dict.npz", "format: tables"]),
    "archive, of links": (vessel, ["data.npz", "not of links", "format: tables"]),
    "archive: end out of range": (
        archived(edge_index=np.full((2, EDGES), NODES)),
        ["data.npz: edge_index[0], row 0", "source 30 is not a node: there are 30"],
    ),
    "archive: ends of floats": (
        archived(edge_index=np.zeros((2, EDGES))),
        ["data.npz: edge_index[0]", "float64", "integer node ids"],
    ),
    "archive: pairs": (
        archived(edge_index=np.zeros((EDGES, 2), np.int64)),
        ["data.npz: edge_index", "(80, 2), and num_edges_list says 80"],
    ),
    "archive: no ends": (archived(edge_index=None), ["data.npz", "no array edge_index"]),
    "archive: many graphs": (
        archived(num_nodes_list=np.array([10, 20])),
        ["data.npz: num_nodes_list", "(2,)", "not one number"],
    ),
    "archive: fewer features": (
        archived(node_feat=np.ones((29, 4))),
        ["data.npz: node_feat", "(29, 4), but there are 30 nodes"],
    ),
    "archive: objects": (
        archived(node_feat=np.array([Command()] * NODES)),
        ["data.npz: node_feat", "refused", "pickles"],
    ),
    "archive: words": (
        archived(edge_kind=np.array(["a"] * EDGES)),
        ["data.npz: edge_kind", "dtype <U1"],
    ),
    "archive: infinite feature": (
        archived(node_feat=np.full((NODES, 3), np.nan)),
        ["data.npz: node_feat, row 0", "nan"],
    ),
    "archive: half a label": (
        archived(node_label=np.full((NODES, 1), 0.5)),
        ["node-label.npz: node_label, row 0", "0.5 is not an integer"],
    ),
    "archive: no label": (
        archived(node_label=np.full((NODES, 1), np.nan)),
        ["split", "in train_mask and has no label"],
    ),
    "two splits": (two_splits, ["2 splits", "random, time"]),
    "split that is not there": (
        lambda root: write_nodes(root).model_copy(update={"split": "species"}),
        ["no split 'species'", "time"],
    ),
    "no edges": (changed("raw/edge.csv.gz", ""), ["edge.csv.gz", "does not exist"]),
    "three columns": (changed("raw/edge.csv.gz", "1,2,3\n"), ["edge.csv.gz, row 1", "3 columns"]),
    "ragged": (
        changed("raw/edge.csv.gz", "1,2\n1\n"),
        ["edge.csv.gz, row 2 (line 2)", "1 columns, expected 2"],
    ),
    "end out of range": (
        changed("raw/edge.csv.gz", f"{ROWS}0,{NODES}\n".replace("29,0", "1,0", 1)),
        ["edge.csv.gz, row 31 (line 31), column '1'", "30 is no node: there are 30"],
    ),
    "end of words": (
        changed("raw/edge.csv.gz", "1,2\n1,x\n"),
        ["edge.csv.gz, row 2 (line 2), column '2'", "'x'"],
    ),
    "fewer edges": (changed("raw/edge.csv.gz", "1,2\n"), ["there are 1 edges", "says 80"]),
    "many graphs": (
        changed("raw/num-node-list.csv.gz", "10\n20\n"),
        ["num-node-list.csv.gz", "2 graphs"],
    ),
    "feature": (
        changed("raw/node-feat.csv.gz", "1,2\n3,nan\n"),
        ["node-feat.csv.gz, row 2 (line 2), column '2'", "nan"],
    ),
    "fewer features": (changed("raw/node-feat.csv.gz", "1,2\n"), ["1 rows, and 30 nodes"]),
    "label": (
        changed("raw/node-label.csv.gz", "1\n" * (NODES - 1) + "one\n"),
        ["node-label.csv.gz, row 30 (line 30), column '1'", "'one'"],
    ),
    "split out of range": (
        changed("split/time/valid.csv.gz", "1\n30\n"),
        ["valid.csv.gz, row 2 (line 2)", "30 is no node"],
    ),
    "node in two splits": (changed("split/time/valid.csv.gz", ROWS.replace(",0", "")[:8]), []),
    "typed: number of nodes": (
        changed("raw/num-node-dict.csv.gz", "author,field,paper\n1,many,3\n", write_typed),
        ["num-node-dict.csv.gz, row 2 (line 2), column '2'", "'many'"],
    ),
    "typed: unknown type": (
        changed("raw/triplet-type-list.csv.gz", "author,writes,book\n", write_typed),
        ["triplet-type-list.csv.gz, row 1 (line 1), column '3'", "no node type 'book'"],
    ),
    "links: truncated": (cut, ["test.pt"]),
    "links: code": (links("ogbl-collab", {"edge": Command()}), ["valid.pt", "refused", "print"]),
    "links: tensors": (links("ogbl-collab", {"edge": torch.zeros(3, 2)}), ["valid.pt", "refused"]),
    "links: a list": (links("ogbl-collab", [PAIRS]), ["valid.pt", "where a dict of arrays"]),
    "links: no array": (links("ogbl-citation2", {"a": PAIRS}), ["valid.pt: 'head'", "'a'"]),
    "links: floats": (links("ogbl-collab", {"edge": PAIRS + 0.5}), ["float64, not integers"]),
    "links: out of range": (
        links("ogbl-collab", {"edge": PAIRS + 29 + np.eye(3, 2, -1, np.int64)}),
        ["valid.pt: 'edge', row 2", "30"],
    ),
    "links: uneven": (
        links("ogbl-citation2", {"source_node": PAIRS[:, 0], "target_node": PAIRS[:2, 0]}),
        ["valid.pt", "differ in shape"],
    ),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_datasets_are_refused(name: str, tmp_path: Path) -> None:
    build, expected = MALFORMED[name]
    graph = build(tmp_path)
    assert_refused(lambda: load_graph(graph), [str(tmp_path), *expected])
