"""Node datasets of the Open Graph Benchmark in archives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raygnn.config.graph import OgbGraph
from raygnn.graph.data import DEFAULT_ETYPE, DEFAULT_NTYPE, MASKS
from raygnn.graph.sources import digest, load_graph
from tests.support.builders import assert_refused
from tests.support.ogb_builder import EDGES, NODES, raw_text, write_archives

OgbBuilder = Callable[[Path], OgbGraph]


def test_archives_are_read_as_they_are_stored(tmp_path: Path) -> None:
    """Labels that are NaN are unknown; all other values are the archive's."""
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
    kinds = np.repeat(stored["edge_reltype"][:, 0], 2)
    np.testing.assert_array_equal(both.data["relation"], kinds)


@pytest.mark.parametrize("labels", [1, 7])
def test_the_directory_may_be_named_itself(labels: int, tmp_path: Path) -> None:
    many = np.arange(NODES * labels).reshape(NODES, labels) % 2
    graph = write_archives(tmp_path, node_label=many)
    inner = graph.model_copy(update={"path": tmp_path / "ogbn_papers100M"})
    assert digest(graph) == digest(inner)
    nodes = load_graph(inner).nodes[DEFAULT_NTYPE].data
    name = "label" if labels == 1 else "labels"
    np.testing.assert_array_equal(nodes[name], many.squeeze())
    raw_text(tmp_path / "ogbn_papers100M" / "split" / "time" / "test.csv.gz", "1\n")
    assert digest(graph) != digest(
        inner.model_copy(update={"path": write_archives(tmp_path / "b").path})
    )


def split_of(text: str) -> OgbBuilder:
    def make(root: Path) -> OgbGraph:
        graph = write_archives(root)
        file = root / "ogbn_papers100M" / "split" / "time" / "valid.csv.gz"
        raw_text(file, text) if text else file.unlink()
        return graph

    return make


def two_splits(root: Path) -> OgbGraph:
    graph = write_archives(root)
    (root / "ogbn_papers100M" / "split" / "random").mkdir()
    return graph


def archived(**changes: Any) -> OgbBuilder:
    return lambda root: write_archives(root, **changes)


class PickledCommand:
    def __reduce__(self) -> Any:
        return (print, ("run",))


MALFORMED: dict[str, tuple[OgbBuilder, list[str]]] = {
    "no dataset": (
        lambda root: OgbGraph(format="ogb", path=root, name="ogbl-ppa"),
        ["no archive ogbl_ppa/raw/data.npz", "ogb.linkproppred:LinkPropPredDataset"],
    ),
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
        archived(node_feat=np.array([PickledCommand()] * NODES)),
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
        lambda root: write_archives(root).model_copy(update={"split": "species"}),
        ["no split 'species'", "time"],
    ),
    "no split": (split_of(""), ["valid.csv.gz", "not found"]),
    "split of words": (split_of("1\none\n"), ["valid.csv.gz", "'one'"]),
    "split out of range": (split_of("1\n30\n"), ["valid.csv.gz, row 1", "30 is not a node"]),
    "node in two splits": (split_of("".join(f"{i}\n" for i in range(NODES))), []),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_datasets_are_refused(name: str, tmp_path: Path) -> None:
    build, expected = MALFORMED[name]
    graph = build(tmp_path)
    assert_refused(lambda: load_graph(graph), [str(tmp_path), *expected])
