"""Graphs out of files: small ones against DGL, and what all formats share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raygnn.config.graph import TriplesGraph
from raygnn.errors import ConfigError, DataError
from raygnn.graph import sources
from raygnn.graph.arrays import both_directions
from raygnn.graph.data import DEFAULT_ETYPE, DEFAULT_NTYPE, EdgeFrame, GraphData, NodeFrame
from raygnn.graph.partition.dgl_format import write_graph
from raygnn.graph.sources import digest, load_graph, normalize
from tests.support.builders import assert_not_imported, graph_config, write_dgl


def load(section: dict[str, Any]) -> GraphData:
    return load_graph(graph_config(section))


def nodes(data: GraphData) -> dict[str, Any]:
    return data.nodes[DEFAULT_NTYPE].data


def edge_set(data: GraphData) -> set[tuple[int, int]]:
    edges = data.edges[DEFAULT_ETYPE]
    return set(zip(edges.src.tolist(), edges.dst.tolist(), strict=True))


def assert_sound(data: GraphData) -> None:
    """Check the dtypes that the rest of the package relies on."""
    for frame in data.nodes.values():
        for name, array in frame.data.items():
            assert len(array) == frame.num
            if name == "label":
                assert array.dtype == np.int64
            elif name.endswith("_mask"):
                assert array.dtype == np.bool_
    for edges in data.edges.values():
        assert edges.src.dtype == edges.dst.dtype == np.int64
        assert edges.src.flags.c_contiguous
        assert edges.dst.flags.c_contiguous


@given(
    st.integers(1, 9).flatmap(
        lambda num: st.tuples(
            st.just(num),
            st.lists(st.tuples(st.integers(0, num - 1), st.integers(0, num - 1)), max_size=30),
        )
    )
)
def test_both_directions(case: tuple[int, list[tuple[int, int]]]) -> None:
    num, pairs = case
    array = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    source, target = both_directions(array[:, 0], array[:, 1], num)
    expected = {(a, b) for a, b in pairs} | {(b, a) for a, b in pairs}
    got = list(zip(target.tolist(), source.tolist(), strict=True))
    assert got == sorted(expected)


# --- dgl


@st.composite
def typed_graphs(draw: st.DrawFn) -> tuple[dict, dict, list[str]]:
    counts = {name: draw(st.integers(1, 5)) for name in ("author", "paper")}
    edges = {}
    for etype in (
        ("author", "writes", "paper"),
        ("paper", "cites", "paper"),
        ("paper", "by", "author"),
    ):
        ends = [st.integers(0, counts[end] - 1) for end in (etype[0], etype[2])]
        edges[etype] = draw(st.lists(st.tuples(*ends), max_size=12))
    formats = draw(
        st.sampled_from([["coo"], ["csr"], ["csc"], ["csr", "csc"], ["coo", "csr", "csc"]])
    )
    return counts, edges, formats


@pytest.mark.dgl
@settings(deadline=None, max_examples=40)
@given(typed_graphs(), st.booleans())
def test_dgl_file_agrees_with_dgl(
    tmp_path_factory: pytest.TempPathFactory, case: tuple[dict, dict, list[str]], narrow: bool
) -> None:
    import torch

    from raygnn.graph.dgl import dgl

    counts, pairs, formats = case
    ends = {
        etype: tuple(torch.tensor([pair[i] for pair in edges], dtype=torch.int64) for i in (0, 1))
        for etype, edges in pairs.items()
    }
    graph = dgl().heterograph(ends, num_nodes_dict=counts)
    for ntype, num in counts.items():
        graph.nodes[ntype].data["feat"] = torch.randn(num, 3).bfloat16()
    graph.nodes["paper"].data["label"] = torch.arange(counts["paper"], dtype=torch.int32)
    graph.nodes["paper"].data["train_mask"] = torch.ones(counts["paper"], dtype=torch.bool)
    for etype, edges in pairs.items():
        graph.edges[etype].data["weight"] = torch.arange(len(edges))
    if narrow:
        graph = graph.int()
    path = tmp_path_factory.mktemp("dgl") / "typed graph.dgl"
    decoy = dgl().graph(([0], [1]))
    dgl().save_graphs(str(path), [decoy, graph], formats=formats)

    config = graph_config({"format": "dgl", "path": str(path), "index": 1})
    if not any(pairs.values()):
        with pytest.raises(DataError, match="no edges"):
            load_graph(config)
        return
    data = load_graph(config)
    assert_sound(data)
    assert data.name == "typed_graph"
    assert {ntype: frame.num for ntype, frame in data.nodes.items()} == counts
    assert list(data.nodes) == graph.ntypes
    assert list(data.edges) == graph.canonical_etypes
    for etype, edges in pairs.items():
        got = data.edges[etype]
        assert list(zip(got.src.tolist(), got.dst.tolist(), strict=True)) == edges
        assert got.data["weight"].tolist() == list(range(len(edges)))
    for ntype in counts:
        feat = data.nodes[ntype].data["feat"]
        assert feat.dtype == torch.bfloat16
        assert torch.equal(feat, graph.nodes[ntype].data["feat"])


def test_dgl_keeps_the_stored_dtype(tmp_path: Path) -> None:
    import torch

    for dtype, expected in ((torch.float64, np.float64), (torch.float16, np.float16)):
        data = load(write_dgl(tmp_path, feat=torch.ones(4, 2, dtype=dtype)))
        assert nodes(data)["feat"].dtype == expected
    wide = torch.arange(8.0).reshape(4, 2).bfloat16()
    data = load({**write_dgl(tmp_path, feat=wide), "normalize": "standard"})
    assert nodes(data)["feat"].dtype == torch.bfloat16
    deviation = nodes(data)["feat"].float().std(dim=0, correction=0)
    assert torch.allclose(deviation, torch.ones(2), atol=1e-2)


def test_dgl_masks_of_edges_are_bool(tmp_path: Path) -> None:
    """DGL's files hold them as uint8, and nodes need no masks beside them."""
    train = np.array([True, False])
    edges = {DEFAULT_ETYPE: EdgeFrame(np.arange(2), np.arange(1, 3), {"train_mask": train})}
    write_graph(tmp_path / "g.dgl", GraphData("g", {DEFAULT_NTYPE: NodeFrame(3, {})}, edges))
    found = load({"format": "dgl", "path": str(tmp_path / "g.dgl")}).edges[DEFAULT_ETYPE].data
    assert found["train_mask"].dtype == np.bool_
    assert found["train_mask"].tolist() == train.tolist()


def test_dgl_non_finite_bfloat16_is_found(tmp_path: Path) -> None:
    import torch

    feat = torch.zeros(4, 2).bfloat16()
    feat[3, 1] = float("inf")
    with pytest.raises(DataError, match=r"feat, row 3: the value in column 1 is inf"):
        load(write_dgl(tmp_path, feat=feat))


# --- what all formats share


def graph_of(feat: Any) -> GraphData:
    return GraphData("g", {"_N": NodeFrame(len(feat), {"feat": feat})}, {})


def test_normalize_rows() -> None:
    data = graph_of(np.array([[1, 3], [0, 0], [2, -1]], dtype=np.float32))
    normalize(data, "row")
    assert nodes(data)["feat"].tolist() == [[0.25, 0.75], [0, 0], [2, -1]]


def test_normalize_columns() -> None:
    random = np.random.default_rng(0)
    feat = random.normal(5, 3, (40000, 3)).astype(np.float32)
    feat[:, 1] = 7
    data = graph_of(feat.copy())
    normalize(data, "standard")
    got = nodes(data)["feat"]
    assert got.dtype == np.float32
    assert np.allclose(got.mean(axis=0, dtype=float), 0, atol=1e-5)
    assert np.allclose(got.std(axis=0, dtype=float), [1, 0, 1], atol=1e-5)


def test_normalize_integers_and_nothing() -> None:
    data = graph_of(np.array([[1, 1], [3, 1]]))
    normalize(data, "row")
    assert nodes(data)["feat"].dtype == np.float32
    assert nodes(data)["feat"].tolist() == [[0.5, 0.5], [0.75, 0.25]]
    with pytest.raises(ConfigError, match="no node type has one"):
        normalize(GraphData("g", {"_N": NodeFrame(1)}, {}), "row")


def test_check_counts_every_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first bad row is counted from the start of the array, not from that of the piece."""
    monkeypatch.setattr(sources, "_PIECE", 8)
    num = 50
    for bad in (0, 7, 8, 49):
        feat = np.ones((num, 3), dtype=np.float32)
        feat[bad, 2] = np.nan
        frame = NodeFrame(num, {"feat": feat, "train_mask": np.ones(num, dtype=bool)})
        ring = EdgeFrame(np.arange(num), (np.arange(num) + 1) % num)
        with pytest.raises(DataError, match=f"feat, row {bad}: the value in column 2"):
            sources.check(GraphData("g", {"_N": frame}, {DEFAULT_ETYPE: ring}))


def test_digest_is_of_contents_and_options(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    section = write_dgl(tmp_path / "a")
    original = digest(graph_config(section))
    assert len(original) == 64
    assert original == digest(graph_config(write_dgl(tmp_path / "b")))  # elsewhere, same
    assert original == digest(graph_config({**section, "normalize": "none"}))  # the default
    seen = {original, digest(graph_config({**section, "normalize": "row"}))}
    seen.add(digest(graph_config({**section, "index": 1})))
    seen.add(digest(graph_config(write_dgl(tmp_path / "b", feat=np.ones((4, 2), np.float32)))))
    planted = {"format": "planted", "nodes": 50}
    for change in ({}, {"seed": 1}, {"nodes": 51}, {"noise": 1.0}):
        seen.add(digest(graph_config({**planted, **change})))
    assert len(seen) == 8


def test_digest_does_not_confuse_neighbouring_files(tmp_path: Path) -> None:
    """Bytes that move from the end of a file to the start of the next change the digest."""
    config = TriplesGraph(format="triples", path=tmp_path)
    found = set()
    for train, valid in (("ab", "c"), ("a", "bc")):
        (tmp_path / "train.txt").write_text(train)
        (tmp_path / "valid.txt").write_text(valid)
        found.add(digest(config))
    assert len(found) == 2


def test_light_imports(tmp_path: Path) -> None:
    """Reading a graph loads neither dgl nor ray, and torch only for bfloat16."""
    section = write_dgl(tmp_path)
    assert_not_imported(
        "from raygnn.config.graph import DglGraph, PlantedGraph\n"
        "from raygnn.graph.sources import load_graph\n"
        f"load_graph(DglGraph(format='dgl', path={section['path']!r}))\n"
        "load_graph(PlantedGraph(format='planted', nodes=500, degree=5.0))\n"
        "import raygnn.graph.sources.datasets",
        *("torch", "torch_geometric", "dgl", "ray", "pandas"),
    )
