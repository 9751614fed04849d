"""Relations of edges, from the file to the losses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import raygnn
from raygnn.config.load import load_config
from raygnn.config.schema import Config
from raygnn.errors import DataError, PreflightError, RaygnnError
from raygnn.graph.dgl import dgl
from raygnn.sampling.exchange import Exchange
from raygnn.worker.planes.vocabulary import count_numbers
from tests.support.ranks import run_ranks
from tests.support.small_jobs import job, train_on_ranks

pytestmark = pytest.mark.long

NODES, CLASSES, NOISE = 1200, 4, 5


def write_graph(file: Path, relation: torch.Tensor | None = None) -> None:
    """Write nodes whose class is that of their only neighbour by relation 0."""
    rng = np.random.default_rng(0)
    kind = rng.integers(0, CLASSES, NODES)
    friend = rng.integers(0, NODES, NODES)
    src = np.concatenate([friend, rng.integers(0, NODES, NODES * NOISE)])
    dst = np.concatenate([np.arange(NODES), np.repeat(np.arange(NODES), NOISE)])
    number = np.concatenate([np.zeros(NODES, np.int64), rng.integers(1, 40, NODES * NOISE)])
    order = rng.permutation(len(src))
    graph = dgl().graph((src[order], dst[order]), num_nodes=NODES)
    graph.ndata["feat"] = torch.nn.functional.one_hot(torch.from_numpy(kind)).float()
    graph.ndata["label"] = torch.from_numpy(kind[friend])
    split = rng.integers(0, 3, NODES)
    for place, name in enumerate(("train", "val", "test")):
        graph.ndata[f"{name}_mask"] = torch.from_numpy(split == place)
    graph.edata["kind"] = torch.from_numpy(number[order]) if relation is None else relation
    dgl().save_graphs(str(file), [graph])


def config(tmp_path: Path, **sections: Any) -> Config:
    file = tmp_path / "graph.dgl"
    if not file.exists():
        write_graph(file)
    model = {"kind": "rgcn", "hidden": 16, "layers": 1, "dropout": 0.0}
    values = job(tmp_path, model={**model, "relation": "kind", **sections.pop("model", {})})
    values |= {"graph": {"format": "dgl", "path": str(file)}}
    values["train"] |= {"epochs": 20, "lr": 0.05, "eval_every": 5}
    values["sampling"]["fanout"] = [4]
    for section, more in sections.items():
        values[section] = {**values.get(section, {}), **more} if isinstance(more, dict) else more
    return load_config(values)


@pytest.mark.dgl
@pytest.mark.parametrize(
    "regularizer",
    [{"bases": 4}, {"regularizer": "block", "bases": 2}, {"regularizer": "none"}],
    ids=["basis", "block", "none"],
)
def test_any_workers_and_topology_learn_what_relations_tell(
    regularizer: dict[str, Any], tmp_path: Path
) -> None:
    curves = []
    for workers, replicated in ((1, True), (2, True), (3, False)):
        job = config(
            tmp_path,
            name=f"run-{workers}-{replicated}",
            model=regularizer,
            sampling={"fanout": [4], "batch_size": 120 // workers},
            cluster={"workers": workers, "num_cpus": 4},
            train={"epochs": 4, "lr": 0.05, "eval_every": 4},
        )
        run = train_on_ranks(job, replicated=replicated)
        curves.append(run.metrics["train/loss"].dropna().to_numpy())
    assert curves[0][-1] < 0.9 * curves[0][0]
    for curve in curves[1:]:
        assert np.allclose(curves[0], curve, atol=1e-4), curves


@pytest.mark.dgl
def test_relations_tell_what_nothing_else_does(tmp_path: Path) -> None:
    full = {"fanout": [-1], "batch_size": 64}
    told = train_on_ranks(config(tmp_path, sampling=full)).summary["metrics"]["test/accuracy"]
    model = {"kind": "sage", "hidden": 16, "layers": 1, "dropout": 0.0}
    values = {**config(tmp_path, name="sage", sampling=full).to_dict(), "model": model}
    untold = train_on_ranks(load_config(values)).summary["metrics"]["test/accuracy"]
    assert told > 0.9
    assert untold < 0.7


@pytest.mark.dgl
def test_an_array_that_is_not_there(tmp_path: Path) -> None:
    wrong = config(tmp_path, model={"relation": "sort"})
    message = r"no edge type has an array 'sort' \(model.relation\); there are: kind"
    with pytest.raises(PreflightError, match=message):
        raygnn.train(wrong, display=False)


@pytest.mark.dgl
@pytest.mark.parametrize("values", [torch.full((NODES * 6,), -1), torch.rand(NODES * 6)])
def test_an_array_that_is_no_relation(values: torch.Tensor, tmp_path: Path) -> None:
    write_graph(tmp_path / "graph.dgl", values)
    with pytest.raises((RaygnnError, RuntimeError), match="whole number from 0"):
        train_on_ranks(config(tmp_path))


def counted(exchange: Exchange, own: np.ndarray) -> int | str:
    try:
        return count_numbers(("a", "b", "c"), "relation", own, exchange)
    except DataError as error:
        return str(error)


@pytest.mark.parametrize(
    ("own", "what"),
    [
        (np.array([0.0, 1.0]), "float64 [2]"),
        (np.array([[0], [1]]), "int64 [2, 1]"),
        (np.array([0, -1]), "numbers below 0"),
    ],
)
def test_arrays_that_hold_no_relations(own: np.ndarray, what: str) -> None:
    """A column would broadcast to a product of all edges with all edges."""
    for found in run_ranks(2, counted, own):
        assert what in str(found)
    assert run_ranks(2, counted, np.array([0, 4])) == [5, 5]
