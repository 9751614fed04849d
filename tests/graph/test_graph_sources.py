"""Files of many graphs: what dgl.save_graphs writes with labels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from raygnn.errors import DataError
from raygnn.graph.dgl import dgl
from raygnn.graph.partition.dgl_format import open_graphs
from raygnn.graph.sources import library_graphs
from tests.support.builders import assert_damage_is_harmless


def test_edge_ids_that_are_there_twice() -> None:
    with pytest.raises(DataError, match="0 to 2, each once"):
        library_graphs._inverse(np.array([0, 0, 2]), "a.bin")


def read_everything(file: Path) -> None:
    with library_graphs.read_all(file) as graphs:
        list(graphs.graphs)


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
    with open_graphs(save(tmp_path / "g.bin", [graph, graph], labels)) as (count, found, graphs):
        assert count == 2
        assert found.keys() == labels.keys()
        for name, label in labels.items():
            assert torch.equal(torch.as_tensor(found[name]), label), name
        assert len(list(graphs)) == 2
    with open_graphs(save(tmp_path / "g.bin", [graph])) as (_, found, _):
        assert found == {}


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
        library_graphs.read_all(path),
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
