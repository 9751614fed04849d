"""The generated graph: what it promises, and that a seed means the same everywhere."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

from raygnn.config.load import load_config
from raygnn.graph.data import GraphData
from raygnn.graph.sources import load_graph
from tests.support.builders import graph_config


def planted(**options: Any) -> GraphData:
    return load_graph(graph_config({"format": "planted", **options}))


@pytest.fixture(scope="module")
def graph() -> GraphData:
    return planted(nodes=20_000, degree=20.0)


def fingerprint(data: GraphData) -> str:
    digest = hashlib.sha256()
    for ntype, frame in data.nodes.items():
        for name in sorted(frame.data):
            digest.update(f"{ntype}/{name}".encode() + frame.data[name].tobytes())
    for edges in data.edges.values():
        digest.update(edges.src.tobytes() + edges.dst.tobytes())
    return digest.hexdigest()


def test_shape_and_split(graph: GraphData) -> None:
    frame = graph.nodes["_N"]
    assert frame.num == 20_000
    assert frame.data["feat"].shape == (20_000, 100)
    assert frame.data["feat"].dtype == np.float32
    assert abs(frame.data["feat"].std() - 1) < 0.01
    assert set(frame.data["label"].tolist()) == set(range(47))
    masks = [frame.data[f"{split}_mask"] for split in ("train", "val", "test")]
    assert [int(mask.sum()) for mask in masks] == [1600, 400, 18_000]
    assert (sum(mask.astype(int) for mask in masks) == 1).all()


def test_edges_are_simple_undirected_and_as_many_as_asked(graph: GraphData) -> None:
    (edges,) = graph.edges.values()
    matrix = sp.coo_matrix((np.ones(edges.num), (edges.src, edges.dst)), (20_000, 20_000)).tocsr()
    assert matrix.max() == 1
    assert not matrix.diagonal().any()
    assert abs(matrix - matrix.T).max() == 0
    assert 19 < edges.num / 20_000 < 20.5


def test_communities(graph: GraphData) -> None:
    (edges,) = graph.edges.values()
    label = graph.nodes["_N"].data["label"]
    within = (label[edges.src] == label[edges.dst]).mean()
    assert 0.77 < within < 0.83


@pytest.mark.parametrize("power", [2.5, 3.0, 4.0])
def test_degrees_follow_the_power_law(power: float) -> None:
    data = planted(nodes=30_000, degree=12.0, power=power, features=1, homophily=0.0)
    (edges,) = data.edges.values()
    degrees = np.bincount(edges.dst, minlength=30_000)
    assert degrees.max() <= np.sqrt(30_000 * 12) * 1.1
    # Hill's estimator of the tail exponent, over the upper tenth below the cut-off
    tail = np.sort(degrees[degrees < np.sqrt(30_000 * 12) / 2])[-3000:]
    exponent = 1 + 1 / np.mean(np.log(tail / tail[0]))
    assert abs(exponent - power) < 0.7


def test_features_need_the_neighbourhood(graph: GraphData) -> None:
    """The nearest community mean is found from the neighbours' mean, not from a node's own
    features."""
    frame = graph.nodes["_N"].data
    (edges,) = graph.edges.values()
    means = np.stack([frame["feat"][frame["label"] == c].mean(axis=0) for c in range(47)])
    matrix = sp.csr_matrix((np.ones(edges.num, np.float32), (edges.dst, edges.src)))
    near = matrix @ frame["feat"] / np.maximum(np.asarray(matrix.sum(axis=1)), 1)
    far = matrix @ near / np.maximum(np.asarray(matrix.sum(axis=1)), 1)
    own, around = (
        ((x @ means.T).argmax(axis=1) == frame["label"]).mean() for x in (frame["feat"], far)
    )
    assert 0.05 < own < 0.35
    assert around > 0.85


def test_a_seed_is_one_graph() -> None:
    """The digest was computed once, on x86-64, and holds across runs, machines and versions of
    numpy."""
    options = {"nodes": 2000, "degree": 8.0, "classes": 5, "features": 12}
    first = planted(**options)
    assert fingerprint(first) == fingerprint(planted(**options))
    assert fingerprint(first) != fingerprint(planted(**options, seed=1))
    assert fingerprint(first) == "e7dc6e3b754b77047efed4b2845393c4e2a9a12fbca265833527d5a294bb98c4"


def test_options_are_independent() -> None:
    """Another noise leaves the edges unchanged, and another degree the features."""
    options = {"nodes": 1000, "degree": 8.0, "classes": 5}
    plain = planted(**options)
    noisy = planted(**options, noise=1.0)
    dense = planted(**{**options, "degree": 12.0})
    (a,), (b,) = plain.edges.values(), noisy.edges.values()
    assert np.array_equal(a.src, b.src)
    assert not np.array_equal(plain.nodes["_N"].data["feat"], noisy.nodes["_N"].data["feat"])
    assert np.array_equal(plain.nodes["_N"].data["feat"], dense.nodes["_N"].data["feat"])


def test_typed() -> None:
    data = planted(nodes=5000, degree=15.0, classes=10, typed=True)
    assert {ntype: frame.num for ntype, frame in data.nodes.items()} == {"item": 4000, "user": 1000}
    assert list(data.edges) == [
        ("item", "also", "item"),
        ("user", "buys", "item"),
        ("item", "bought_by", "user"),
    ]
    assert "label" not in data.nodes["user"].data
    assert data.nodes["user"].data["feat"].shape == (1000, 50)
    assert data.nodes["item"].data["train_mask"].sum() == 320
    buys, bought = data.edges["user", "buys", "item"], data.edges["item", "bought_by", "user"]
    assert np.array_equal(buys.src, bought.dst)
    assert np.array_equal(buys.dst, bought.src)
    assert 2.5 < buys.num / 4000 <= 3.1
    pairs = set(zip(buys.src.tolist(), buys.dst.tolist(), strict=True))
    assert len(pairs) == buys.num


# The most that the configuration lets through: see tests/config/test_malformed_configs.py.
@pytest.mark.parametrize(
    "options",
    [
        {"nodes": 40, "degree": 20.0, "classes": 40, "train": 0.025},
        {"nodes": 50, "degree": 20.0, "classes": 2, "train": 0.025, "typed": True},
    ],
)
def test_just_enough_nodes(options: dict[str, Any]) -> None:
    job = {"name": "a", "graph": {"format": "planted", **options}, "model": {"kind": "gcn"}}
    load_config(job)
    data = planted(**options)
    labelled = next(iter(data.nodes.values()))
    assert labelled.num == 40
    assert labelled.data["train_mask"].sum() == 1


@pytest.mark.parametrize("nodes", [4, 5, 7, 30])
@pytest.mark.parametrize("typed", [False, True])
def test_tiny(nodes: int, typed: bool) -> None:
    data = planted(nodes=nodes, degree=1.0, classes=2, features=1, train=0.5, typed=typed)
    assert data.num_nodes == nodes
