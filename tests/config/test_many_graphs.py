"""Rules between the keys of ``graph: {format: graphs}``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from raygnn.config.load import load_config
from raygnn.config.schema import Config
from raygnn.errors import ConfigError


def load(graph: dict[str, Any], **sections: Any) -> Config:
    return load_config(
        {
            "name": "a",
            "graph": {"format": "graphs", **graph},
            "task": {"kind": "graph_classification"},
            "model": {"kind": "gin"},
            **sections,
        }
    )


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("class Molecules: ...\n")
    (tmp_path / "graphs.bin").write_bytes(b"")
    return "graphs.bin"


@pytest.mark.parametrize(
    "graph",
    [
        {},
        {"val": 0.4, "test": 0.5},
        {"val": 0.0, "test": 0.0},
        {"folds": 10, "fold": 9},
        {"folds": 2, "val": 0.95},
        {"folds": 2, "test": 0.1},
        {"normalize": "row"},
        {"normalize": None},
    ],
)
def test_valid_sections(graph: dict[str, Any], file: str, tmp_path: Path) -> None:
    for path in (file, str(tmp_path)):
        found = load({"path": path, **graph}).graph
        assert found is not None
        assert found.path == tmp_path / path
    load({"format": "dataset", "dataset": "mine:Molecules", "args": {"root": "x"}, **graph})


@pytest.mark.parametrize(
    ("graph", "key", "what"),
    [
        ({}, "graph.path", "is missing"),
        ({"format": "dataset", "dataset": "mine:Molecules", "index": 1}, "graph.index", "ignored"),
        ({"path": "graphs.bin", "dataset": "mine:A"}, "graph.dataset", "of graph.format dataset"),
        ({"format": "dataset", "dataset": "mine"}, "graph.dataset", "package.module:Class"),
        ({"path": "graphs.bin", "fold": 3}, "graph.fold", "graph.folds is null"),
        ({"path": "graphs.bin", "folds": 3, "fold": 3}, "graph.fold", "no fold 3 of 3"),
        ({"path": "graphs.bin", "folds": 3, "test": 0.2}, "graph.test", "would be ignored"),
        ({"path": "graphs.bin", "folds": 1}, "graph.folds", "1"),
        ({"path": "graphs.bin", "val": 0.5, "test": 0.5}, "graph.val", "leaves no graphs"),
        ({"path": "graphs.bin", "val": 1.0}, "graph.val", "below 1"),
    ],
)
def test_invalid_sections(graph: dict[str, Any], key: str, what: str, file: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(graph)
    message = str(caught.value)
    assert key in message
    assert what in message
    assert caught.value.remedy


def test_input_and_output_are_two_places(file: str) -> None:
    with pytest.raises(ConfigError, match="which is input"):
        load({"path": file}, partition={"path": file})
    load({"path": file}, partition={"path": "packed"})


@pytest.mark.parametrize(
    ("model", "key"),
    [
        ({"kind": "gcn", "edge_features": "w"}, "model.edge_features"),
        ({"kind": "none", "edge_features": "w"}, "model.edge_features"),
        ({"kind": "gin", "edge_features": ["w", "k"], "edge_categories": {"k": 2}}, "k is in"),
        ({"kind": "mine:Molecules", "edge_categories": {"k": 2}}, "model.edge_categories"),
    ],
)
def test_edge_features_that_nothing_would_read(model: dict[str, Any], key: str, file: str) -> None:
    with pytest.raises(ConfigError, match=key):
        load({"path": file}, model=model)


@pytest.mark.parametrize("kind", ["gat", "gatv2", "gin", "sage", "rgcn", "hgt", "han"])
def test_families_that_read_edges(kind: str, file: str) -> None:
    model = load({"path": file}, model={"kind": kind, "edge_features": "w"}).model
    assert model.edge_feature_names == ("w",)
    model = load({"path": file}, model={"kind": kind, "edge_categories": {"k": 2}}).model
    assert (model.edge_feature_names, model.edge_category_widths) == ((), {"k": 2})


def test_nodes_may_have_categories_alone(file: str) -> None:
    """Also where a run's configuration is read again."""
    model = {"kind": "gin", "features": None, "categories": {"element": 8}}
    config = load({"path": file}, model=model)
    again = load_config(config.to_dict())
    assert again.model.node_arrays == config.model.node_arrays == {"element": "model.categories"}
