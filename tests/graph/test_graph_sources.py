"""Files of many graphs: GIN's text, and what dgl.save_graphs writes with labels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import assert_damage_is_harmless, assert_refused

from raygnn.errors import DataError
from raygnn.graph.data import DEFAULT_ETYPE, DEFAULT_NTYPE, GraphData
from raygnn.graph.dgl import dgl
from raygnn.graph.partition.dgl_format import open_graphs
from raygnn.graph.sources import gin_text, saved_graphs

TINY = "2\n3 7\n5 1 1\n-2 2 0 2\n5 1 1\n1 -1\n9 0\n"


def read_text(path: Path, text: str) -> tuple[dict[str, Any], list[GraphData]]:
    path.write_text(text)
    with gin_text.read_all(path) as graphs:
        return {"labels": graphs.labels, "values": graphs.values}, list(graphs.graphs)


def test_edge_ids_that_are_there_twice() -> None:
    with pytest.raises(DataError, match="0 to 2, each once"):
        saved_graphs._inverse(np.array([0, 0, 2]), "a.bin")


def test_text(tmp_path: Path) -> None:
    facts, (first, second) = read_text(tmp_path / "g.txt", TINY)
    assert facts["labels"]["label"].tolist() == [1, 0]
    assert facts["values"] == {"label": [-1, 7], "tag": [-2, 5, 9]}
    data = first.nodes[DEFAULT_NTYPE].data
    assert data["tag"].tolist() == [1, 0, 1]
    assert data["feat"].tolist() == [[0, 1, 0], [1, 0, 0], [0, 1, 0]]
    assert data["feat"].dtype == np.float32
    assert "attr" not in data
    edges = first.edges[DEFAULT_ETYPE]
    assert list(zip(edges.src.tolist(), edges.dst.tolist())) == [(0, 1), (1, 0), (1, 2), (2, 1)]
    assert second.num_nodes == 1
    assert second.num_edges == 0
    assert second.nodes[DEFAULT_NTYPE].data["feat"].tolist() == [[0, 0, 1]]


def test_text_that_is_numbered_as_another(tmp_path: Path) -> None:
    (tmp_path / "g.txt").write_text(TINY)
    with gin_text.read_all(tmp_path / "g.txt", tags=[9, 3, 5, -2], labels=[7]) as graphs:
        assert graphs.labels["label"].tolist() == [0, -1]  # which is not known
        assert graphs.values == {"label": [7], "tag": [9, 3, 5, -2]}
        first, second = graphs.graphs
    assert first.nodes[DEFAULT_NTYPE].data["tag"].tolist() == [2, 3, 2]
    assert second.nodes[DEFAULT_NTYPE].data["feat"].tolist() == [[1, 0, 0, 0]]


def test_text_with_attributes_and_empty_graphs(tmp_path: Path) -> None:
    text = "3\n0 0\n2 0\n1 1 1 0.5 -2\n1 1 0 1e3 7\n1 1\n1 0 3 4\n\n"
    _, (empty, *graphs) = read_text(tmp_path / "g.txt", text)
    assert empty.num_nodes == 0  # says nothing of attributes
    attr = [graph.nodes[DEFAULT_NTYPE].data["attr"] for graph in graphs]
    assert [rows.tolist() for rows in attr] == [[[0.5, -2], [1000, 7]], [[3, 4]]]
    assert attr[0].dtype == np.float32


def test_mutag(data_dir: Path) -> None:
    with gin_text.read_all(data_dir / "graphs" / "MUTAG.txt") as graphs:
        assert graphs.num == 188
        assert np.bincount(graphs.labels["label"]).tolist() == [63, 125]
        every = list(graphs.graphs)
    assert sum(graph.num_nodes for graph in every) == 3371
    for graph in every[1:]:  # the first one's first lines are damaged in this copy
        edges = graph.edges[DEFAULT_ETYPE]
        ends = set(zip(edges.src.tolist(), edges.dst.tolist()))
        assert ends == {(dst, src) for src, dst in ends}
        feat = graph.nodes[DEFAULT_NTYPE].data["feat"]
        assert (feat.sum(1) == 1).all()


@pytest.mark.parametrize(
    ("text", "fragments"),
    [
        ("2 3\n", ["line 1", "the number of graphs"]),
        ("-1\n", ["line 1", "-1"]),
        ("x\n", ["line 1", "'x'"]),
        ("1\n", ["line 2 (graph 0 of 1)", "truncated"]),
        ("1\n3\n", ["line 2", "'n label'"]),
        ("1\n3 1.5\n", ["line 2", "'3 1.5'"]),
        ("1\n-3 1\n", ["line 2", "number of nodes is -3"]),
        (TINY.replace("9 0", "9"), ["line 7 (graph 1 of 2)", "'tag degree neighbours'"]),
        (TINY.replace("-2 2 0 2", "-2 3 0 2"), ["line 4", "as the degree says"]),
        (TINY.replace("-2 2 0 2", "-2 -1 0 2"), ["line 4", "as the degree says"]),
        (TINY.replace("-2 2 0 2", "-2 1 0 2"), ["line 4", "1 attributes, but 0"]),
        (TINY.replace("-2 2 0 2", "-2 2 0 3"), ["line 4", "neighbour 3", "there are 3"]),
        (TINY.replace("5 1 1\n1 -1", "5 1 -1\n1 -1"), ["line 5", "neighbour -1"]),
        (TINY.replace("-2 2 0 2", "-2 2 0 b"), ["line 4", "'0 b'"]),
        (TINY.replace("-2 2 0 2", f"{2**63} 2 0 2"), ["line 4", "64 bits"]),
        (TINY.replace("9 0", ""), ["line 7", "expected 'tag"]),
        (TINY + "1 0\n", ["line 8", "after its last graph"]),
        ("1\n1 0\n1 0 nan\n", ["line 3", "finite", "nan"]),
        ("1\n1 0\n1 0 1e39\n", ["line 3", "finite"]),
        ("1\n1 0\n1 0 x\n", ["line 3", "numbers", "'x'"]),
        ("1\n99999999999 0\n1 0\n", ["line 4", "truncated"]),
        ("99999999999\n1 0\n1 0\n", ["line 4", "truncated"]),
    ],
)
def test_malformed_text(text: str, fragments: list[str], tmp_path: Path) -> None:
    assert_refused(lambda: read_text(tmp_path / "bad.txt", text), ["bad.txt", *fragments])


def test_tags_of_too_many_kinds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raygnn.graph.sources.input_files.memory", lambda: (64, 64))
    read_text(tmp_path / "g.txt", "1\n3 0\n1 0\n2 0\n3 0\n")
    with pytest.raises(DataError, match="5 nodes, of 5 kinds, would take"):
        read_text(tmp_path / "g.txt", "1\n5 0\n1 0\n2 0\n3 0\n4 0\n5 0\n")


def read_everything(file: Path) -> None:
    with (gin_text if file.suffix == ".txt" else saved_graphs).read_all(file) as graphs:
        list(graphs.graphs)


def test_damaged_text_is_refused_or_harmless(tmp_path: Path) -> None:
    (tmp_path / "g.txt").write_text(TINY)
    assert_damage_is_harmless(lambda: read_everything(tmp_path / "g.txt"), tmp_path)


# --- what DGL wrote ------------------------------------------------------------------------------


def save(path: Path, graphs: list[Any], labels: dict[str, Any] | None = None) -> Path:
    dgl().save_graphs(str(path), graphs, labels)
    return path


@pytest.mark.dgl
def test_labels_are_read(tmp_path: Path) -> None:
    graph = dgl().graph((torch.tensor([0, 1]), torch.tensor([1, 0])))
    labels = {
        "y": torch.tensor([3, 4]),
        "z": torch.rand(2, 3, dtype=torch.float64),
        "half": torch.rand(2).bfloat16(),
    }
    with open_graphs(save(tmp_path / "g.bin", [graph, graph], labels)) as file:
        assert file.count == 2
        assert file.labels.keys() == labels.keys()
        for name, label in labels.items():
            assert torch.equal(torch.as_tensor(file.labels[name]), label), name
        assert len(list(file.graphs)) == 2
    with open_graphs(save(tmp_path / "g.bin", [graph])) as file:
        assert file.labels == {}


@pytest.mark.dgl
def test_labels_that_end_elsewhere(tmp_path: Path) -> None:
    graph = dgl().graph((torch.tensor([0]), torch.tensor([1])))
    path = save(tmp_path / "g.bin", [graph], {"y": torch.tensor([3])})
    data = bytearray(path.read_bytes())
    data[4096] ^= 8
    path.write_bytes(bytes(data))
    with pytest.raises(DataError, match="labels that do not end at byte"), open_graphs(path):
        pass


@pytest.mark.dgl
@pytest.mark.parametrize("label", [torch.tensor([1]), torch.tensor(1), torch.zeros(3, 2)])
def test_labels_of_another_number(label: torch.Tensor, tmp_path: Path) -> None:
    graph = dgl().graph((torch.tensor([0]), torch.tensor([1])))
    path = save(tmp_path / "g.bin", [graph, graph], {"y": label})
    with (
        pytest.raises(DataError, match=r"labels 'y': .*there are 2 graphs"),
        saved_graphs.read_all(path),
    ):
        pass


@pytest.mark.dgl
def test_damaged_shards_are_refused_or_harmless(tmp_path: Path) -> None:
    graph = dgl().graph((torch.tensor([0, 1]), torch.tensor([1, 0])))
    graph.ndata["feat"] = torch.rand(2, 3)
    file = save(tmp_path / "g.bin", [graph, graph], {"y": torch.tensor([0, 1])})
    assert_damage_is_harmless(lambda: read_everything(file), tmp_path)
    for kept in range(0, file.stat().st_size, 97):
        (tmp_path / "cut.bin").write_bytes(file.read_bytes()[:kept])
        with pytest.raises(DataError, match=r"cut\.bin"):
            read_everything(tmp_path / "cut.bin")
