"""Graphs that a Python program holds: what becomes of them, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from raygnn.config.load import load_config
from raygnn.errors import ConfigError, DataError
from raygnn.graph.data import DEFAULT_ETYPE, DEFAULT_NTYPE
from raygnn.graph.dgl import dgl
from raygnn.graph.sources import load_graph
from raygnn.graph.sources.library_graphs import graph_data, with_graph, write_graph_file

pyg = pytest.importorskip("torch_geometric.data")

USERS, ITEMS, EDGES = 5, 3, 7
BUYS = ("user", "buys", "item")


def arrays(num: int) -> dict[str, torch.Tensor]:
    return {
        "feat": torch.randn(num, 4).bfloat16(),
        "label": torch.arange(num) % 2,
        "train_mask": torch.arange(num) < 2,
        "val_mask": torch.arange(num) == 2,
        "test_mask": torch.arange(num) > 2,
    }


ENDS = torch.randint(USERS, (EDGES,)), torch.randint(ITEMS, (EDGES,))
OF_USERS, OF_ITEMS = arrays(USERS), {"price": torch.randn(ITEMS, 1, dtype=torch.float64)}
AMOUNT = torch.randn(EDGES, 2)


def of_dgl() -> Any:
    graph = dgl().heterograph({BUYS: ENDS}, {"user": USERS, "item": ITEMS})
    graph.nodes["user"].data.update(OF_USERS)
    graph.nodes["item"].data.update(OF_ITEMS)
    graph.edges["buys"].data["amount"] = AMOUNT
    return graph


def of_pyg() -> Any:
    graph = pyg.HeteroData()
    named = {"x": OF_USERS["feat"], "y": OF_USERS["label"]}
    for name, array in {**OF_USERS, **named}.items():
        if name not in ("feat", "label"):
            graph["user"][name] = array
    graph["item"].price = OF_ITEMS["price"]
    graph["item"].num_nodes = ITEMS
    graph[BUYS].edge_index = torch.stack(ENDS)
    graph[BUYS].amount = AMOUNT
    graph.of_the_whole = torch.ones(1)
    return graph


def same(found: Any, array: torch.Tensor) -> bool:
    """Return True if two arrays have equal elements; masks may be stored as bytes or bool."""
    return torch.equal(torch.as_tensor(found).to(array.dtype), array)


@pytest.mark.parametrize("make", [pytest.param(of_dgl, marks=pytest.mark.dgl), of_pyg])
def test_a_typed_graph(make: Any, tmp_path: Path) -> None:
    config = with_graph(
        {"name": "shop", "storage": str(tmp_path), "model": {"kind": "rgcn"}}, make()
    )
    assert config.graph is not None
    read = load_graph(config.graph)
    assert {ntype: frame.num for ntype, frame in read.nodes.items()} == {"user": 5, "item": 3}
    assert read.nodes["user"].data.keys() == OF_USERS.keys()
    assert all(same(read.nodes["user"].data[name], array) for name, array in OF_USERS.items())
    assert read.nodes["user"].data["feat"].dtype == torch.bfloat16
    assert same(read.nodes["item"].data["price"], OF_ITEMS["price"])
    (frame,) = read.edges.values()
    assert (same(frame.src, ENDS[0]), same(frame.dst, ENDS[1])) == (True, True)
    assert same(frame.data["amount"], AMOUNT)
    assert "of_the_whole" not in {*read.nodes["user"].data, *read.nodes["item"].data, *frame.data}


def test_a_graph_of_one_type() -> None:
    index = torch.tensor([[0, 1, 2], [1, 2, 0]])
    graph = pyg.Data(
        torch.randn(4, 2), index, edge_weight=torch.ones(3), y=torch.arange(4)[:, None]
    )
    data = graph_data(graph)
    assert data.nodes[DEFAULT_NTYPE].num == 4
    assert data.nodes[DEFAULT_NTYPE].data.keys() == {"feat", "label"}
    assert same(data.edges[DEFAULT_ETYPE].dst, index[1])
    assert data.edges[DEFAULT_ETYPE].data.keys() == {"edge_weight"}


@pytest.mark.parametrize("y", [torch.randn(4), torch.ones(4, 3, dtype=torch.int64)])
def test_a_target_that_is_no_class(y: torch.Tensor) -> None:
    graph = pyg.Data(torch.randn(4, 2), torch.tensor([[0], [1]]), y=y)
    assert graph_data(graph).nodes[DEFAULT_NTYPE].data.keys() == {"feat", "y"}


@pytest.mark.dgl
def test_edges_keep_the_order_of_their_ids() -> None:
    graph = dgl().graph((torch.tensor([3, 0, 2]), torch.tensor([0, 0, 1])))
    graph.edata["at"] = torch.tensor([7, 8, 9])
    graph = graph.formats("csc")  # a format with another order of edges
    (frame,) = graph_data(graph).edges.values()
    assert frame.src.tolist() == [3, 0, 2]
    assert frame.data["at"].tolist() == [7, 8, 9]


def test_the_file_is_called_after_its_content(tmp_path: Path) -> None:
    graph = of_pyg()
    first, again = (write_graph_file(graph, tmp_path) for _ in range(2))
    graph[BUYS].amount = AMOUNT + 1
    other = write_graph_file(graph, tmp_path)
    assert first == again != other
    assert sorted(tmp_path.iterdir()) == sorted([first, other])


def with_waves() -> Any:
    graph = of_pyg()
    graph["item"].wave = torch.zeros(ITEMS, dtype=torch.complex64)
    return graph


def labelled(array: Any) -> Any:
    return pyg.Data(torch.eye(2), torch.zeros(2, 3, dtype=torch.int64), y=array)


REFUSED: list[Any] = [
    pytest.param(
        lambda: dgl().to_block(of_dgl()), "is no graph to train on", marks=pytest.mark.dgl
    ),
    (lambda: np.ones(3), "a numpy.ndarray is no graph"),
    (lambda: of_pyg()["user"], "is no graph"),
    (with_waves, "complex64, which cannot be stored"),
    (lambda: labelled(["a", "b"]), "is list, which cannot be stored"),
    (lambda: labelled(np.ones(2)), "is ndarray, which cannot be stored"),
    (lambda: labelled(torch.eye(2).to_sparse()), "is sparse_coo, which cannot be stored"),
    (lambda: pyg.Data(torch.randn(4, 2), edge_weight=torch.ones(3)), "has no edge_index"),
]


@pytest.mark.parametrize(("make", "message"), REFUSED)
def test_invalid_graphs_are_refused(make: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        write_graph_file(make(), tmp_path / "graphs")
    assert not (tmp_path / "graphs").exists()


def test_the_section_graph(tmp_path: Path) -> None:
    job = {"name": "shop", "storage": str(tmp_path), "model": {"kind": "rgcn"}}
    config = with_graph({**job, "graph": {"reverse": True}}, of_pyg())
    assert config.graph is not None
    assert len(load_graph(config.graph).edges) == 2
    assert with_graph(config, of_pyg()).to_dict() == config.to_dict()
    assert with_graph(job | {"graph": {"format": "planted", "nodes": 999}}, None) == load_config(
        job | {"graph": {"format": "planted", "nodes": 999}}
    )
    with pytest.raises(ConfigError, match=r"graph.nodes"):
        with_graph({**job, "graph": {"format": "planted", "nodes": 999}}, of_pyg())
