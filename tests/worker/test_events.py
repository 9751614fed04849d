"""Edges with times, and seeds with times: nothing of the future reaches a seed, in any task, and
what only the order of edges tells is learned."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from raygnn.config.load import load_config
from raygnn.config.task import NegativesConfig
from raygnn.errors import DataError
from raygnn.graph.data import DEFAULT_ETYPE
from raygnn.graph.dgl import dgl
from raygnn.runs.run import Run
from raygnn.runs.run_directory import EVENTS
from raygnn.sampling.negatives import ENDS, Negatives
from raygnn.sampling.seeds import _nodes
from raygnn.worker.planes.partition_plane import PartitionPlane
from tests.support.small_jobs import job, train_on_ranks

pytestmark = pytest.mark.long

NODES, EDGES, CLASSES = 300, 4000, 3
VAL, TEST, END = 600, 800, 1000  # from when on there are seeds to validate, and to test
METRICS = {"node_classification": "loss", "edge_classification": "loss", "link_prediction": "mrr"}
LATEST: tuple[dict[str, Any], ...] = (
    {"kind": "gatv2", "hidden": 16, "heads": 2, "time_encoding": 4},
    {"strategy": "latest"},
)


def events(file: Path, changed_from: int = END + 1) -> None:
    """Nodes and edges at random times. From one time on all is other than without ``changed_from``:
    where edges come from, what they carry, and what is to be predicted of nodes and edges."""
    rng = np.random.default_rng(0)
    at, when = rng.integers(0, END, EDGES), rng.integers(0, END, NODES)
    columns = {}
    for turn in range(2):
        columns[turn] = {
            "src": rng.integers(0, NODES, EDGES),
            "amount": rng.normal(size=EDGES).astype(np.float32),
            "kind": rng.integers(0, CLASSES, EDGES),
            "label": rng.integers(0, CLASSES, NODES),
        }
    later = {name: (when if name == "label" else at) >= changed_from for name in columns[0]}
    data = {n: np.where(late, columns[1][n], columns[0][n]) for n, late in later.items()}
    graph = dgl().graph((data["src"], rng.integers(0, NODES, EDGES)), num_nodes=NODES)
    graph.ndata["feat"] = torch.from_numpy(rng.normal(size=(NODES, 5)).astype(np.float32))
    graph.ndata["label"] = torch.from_numpy(data["label"])
    graph.ndata["when"] = torch.from_numpy(when)
    for name in ("amount", "kind"):
        graph.edata[name] = torch.from_numpy(data[name])
    graph.edata["at"] = torch.from_numpy(at)
    dgl().save_graphs(str(file), [graph])


def run(place: Path, file: Path, kind: str, **sections: Any) -> Run:
    """Train a task on ``file``, whose seeds see earlier events only."""
    time: dict[str, Any] = {"edges": "at", **sections.pop("time", {})}
    task: dict[str, Any] = {"kind": kind, "split": {"by": "time", "val": VAL, "test": TEST}}
    if kind == "node_classification":
        time.setdefault("seeds", "when")
    elif kind == "edge_classification":
        task["target"] = "kind"
    fanout = {"fanout": [4, 3], "batch_size": 100, "time": time}
    values = job(
        place,
        task={**task, **sections.pop("task", {})},
        partition={"method": "random"},
        model={"kind": "sage", "edge_features": "amount", **sections.pop("model", {})},
        sampling={**fanout, **sections.pop("sampling", {})},
        **sections,
    )
    values["graph"] = {"format": "dgl", "path": str(file)}
    return train_on_ranks(load_config(values), replicated=values.get("name") != "partitioned")


@pytest.mark.dgl
@pytest.mark.parametrize(
    ("model", "time", "kind"),
    [
        pytest.param(*LATEST, "edge_classification", id="latest-edge_classification"),
        pytest.param(*LATEST, "link_prediction", id="latest-link_prediction"),
        pytest.param(
            {"kind": "sage", "categories": {}}, {"window": 300}, "node_classification", id="window"
        ),
    ],
)
def test_the_future_changes_nothing(
    kind: str, model: dict[str, Any], time: dict[str, Any], tmp_path: Path
) -> None:
    """Training and validation are bitwise identical, whatever happens later."""
    curves, tests = [], []
    for name, changed_from in (("as it was", END + 1), ("changed", TEST)):
        file = tmp_path / f"{name}.dgl"
        events(file, changed_from)
        done = run(tmp_path / name, file, kind, model=model, time=time)
        metrics = done.metrics.set_index("step")
        curves.append(metrics[["train/loss", f"val/{METRICS[kind]}"]])
        tests.append(done.summary["metrics"][f"test/{METRICS[kind]}"])
    assert curves[0]["train/loss"].count() > 1
    assert curves[0].equals(curves[1])
    assert tests[0] != tests[1]


@pytest.mark.dgl
@pytest.mark.parametrize("kind", METRICS)
def test_any_workers_and_topology_train_the_same(kind: str, tmp_path: Path) -> None:
    file, curves = tmp_path / "graph.dgl", []
    events(file)
    for name, workers in (("one", 1), ("partitioned", 2)):
        more = {"cluster": {"workers": workers}, "sampling": {"batch_size": 120 // workers}}
        done = run(tmp_path / name, file, kind, name=name, **more)
        curves.append(done.metrics[["train/loss", f"val/{METRICS[kind]}"]].dropna(how="all"))
    np.testing.assert_allclose(*curves, atol=2e-5)


@pytest.mark.dgl
def test_an_evaluation_in_time_has_the_loss_of_the_task(tmp_path: Path) -> None:
    """Its class weights apply: weights near 0 leave the loss of a single class."""
    events(tmp_path / "graph.dgl")
    found = []
    for name, own in (("plain", {}), ("weighted", {"class_weights": [1.0, 1e-6, 1e-6]})):
        task, train = {**own, "metric": "mcc"}, {"epochs": 1, "lr": 1e-9}
        done = run(tmp_path / name, tmp_path / "graph.dgl", "edge_classification",
                   task=task, train=train, cluster={"workers": 1})  # fmt: skip
        found.append(done.summary["metrics"])
    assert found[0]["test/mcc"] == found[1]["test/mcc"]
    assert abs(found[0]["test/loss"] - found[1]["test/loss"]) > 1e-3


@pytest.mark.dgl
def test_edges_that_are_predicted_later_than_they_are_do_not_see_themselves(tmp_path: Path) -> None:
    """Nor do the arrays of a target's only edge reveal its label."""
    rng, file, count = np.random.default_rng(0), tmp_path / "graph.dgl", 600
    graph = dgl().graph((rng.integers(0, 30, count), np.arange(count) + 30), num_nodes=count + 30)
    graph.ndata["feat"] = torch.zeros(count + 30, 5)
    graph.edata["kind"] = torch.from_numpy(rng.integers(0, CLASSES, count))
    graph.edata["told"] = torch.eye(CLASSES)[graph.edata["kind"]]
    graph.edata["at"] = torch.from_numpy(rng.integers(0, END, count))
    graph.edata["settled"] = graph.edata["at"] + 100
    dgl().save_graphs(str(file), [graph])
    model, train = {"edge_features": "told", "hidden": 32}, {"epochs": 8, "lr": 0.05}
    time = {"seeds": "settled"}
    done = run(tmp_path, file, "edge_classification", time=time, model=model, train=train)
    assert done.summary["metrics"]["test/accuracy"] < 0.6


def test_negatives_are_seen_at_the_time_of_their_edge() -> None:
    """Each edge has its own negatives, whatever other edges the batch has."""
    edge = DEFAULT_ETYPE
    when, numbers = np.array([5, 9, 5]), np.array([70, 71, 72])
    ends = np.array([[1, 2, 3], [4, 5, 6]])
    config = NegativesConfig(number=1)
    ids = {edge[0]: np.arange(40)}
    negatives = Negatives(dict.fromkeys(ENDS, edge[0]), config, 7, number=4, ids=ids)
    drawn = negatives.draw_each(0, 3, numbers)
    alone = negatives.draw_each(0, 3, numbers[1:2])
    for end in ENDS:
        assert drawn[end].shape == (3, 4)
        assert np.array_equal(drawn[end][1:2], alone[end])
    nodes, times, pairs, instead = _nodes(edge, ends, drawn, when)
    known = {(int(n), int(t)) for n, t in zip(nodes[edge[0]], times[edge[0]])}
    assert len(known) == len(nodes[edge[0]])
    for column, end in enumerate(ENDS):
        assert np.array_equal(nodes[edge[0]][pairs[column]], ends[column])
        assert np.array_equal(times[edge[0]][pairs[column]], when)
        assert np.array_equal(nodes[edge[0]][instead[end]], drawn[end])
        assert (times[edge[0]][instead[end]] == when[:, None]).all()


@pytest.mark.dgl
def test_temporal_sampling_learns_from_the_order_of_events(tmp_path: Path) -> None:
    """A node's class is that of the last event before its seed time, which the latest neighbours
    reveal. All classes are equally frequent among its edges, and later edges mislead the sampler
    without times."""
    rng = np.random.default_rng(1)
    heard, asked = 40, 500
    src = rng.integers(0, CLASSES * 10, (asked, heard))  # ten sources for each class
    at = np.tile(np.arange(heard), (asked, 1)) * 10
    when = rng.integers(10, 200, asked)
    last = src[np.arange(asked), (when - 1) // 10]
    src[np.arange(asked)[:, None], 20 + np.arange(20)] = last[:, None]  # later events
    people = CLASSES * 10
    ends = src.ravel(), np.repeat(np.arange(asked) + people, heard)
    graph = dgl().graph(ends, num_nodes=people + asked)
    classes = np.arange(people) % CLASSES
    feat = np.zeros((people + asked, CLASSES), np.float32)
    feat[np.arange(people), classes] = 1
    graph.ndata["feat"] = torch.from_numpy(feat)
    graph.ndata["label"] = torch.from_numpy(np.concatenate([np.full(people, -1), classes[last]]))
    graph.ndata["when"] = torch.from_numpy(np.concatenate([np.zeros(people, np.int64), when]))
    graph.edata["at"] = torch.from_numpy(at.ravel())
    for number, name in enumerate(("train", "val", "test")):
        mask = np.concatenate([np.zeros(people, bool), np.arange(asked) % 3 == number])
        graph.ndata[f"{name}_mask"] = torch.from_numpy(mask)
    file = tmp_path / "graph.dgl"
    dgl().save_graphs(str(file), [graph])

    def accuracy(name: str, **sampling: Any) -> float:
        values = job(
            tmp_path / name,
            model={"kind": "sage", "layers": 1},
            sampling={"fanout": [1], "batch_size": 50, **sampling},
            train={"epochs": 15, "lr": 0.03, "eval_every": 5},
        )
        values["graph"] = {"format": "dgl", "path": str(file)}
        return float(train_on_ranks(load_config(values)).summary["metrics"]["test/accuracy"])

    time = {"edges": "at", "seeds": "when"}
    assert accuracy("latest", time={**time, "strategy": "latest"}) >= 0.95
    assert accuracy("any of the past", time=time) < 0.6
    assert accuracy("plain", fanout=[-1]) > 0.8  # it knows the future


@pytest.mark.dgl
def test_arrays_that_are_no_times(tmp_path: Path) -> None:
    file = tmp_path / "graph.dgl"
    events(file)
    with pytest.raises(
        (DataError, RuntimeError), match="'feat' of node type '_N' must hold their times"
    ):
        run(tmp_path, file, "node_classification", time={"seeds": "feat"})


@pytest.mark.dgl
@pytest.mark.parametrize("edges_in", [1, 10**6])
def test_seeds_in_other_units_than_edges(edges_in: int, tmp_path: Path) -> None:
    """Seconds beside microseconds would see all later events, or none at all."""
    file, begin = tmp_path / "graph.dgl", 1_700_000_000
    events(file)
    (graph,), _ = dgl().load_graphs(str(file))
    graph.edata["at"] = (graph.edata["at"] + begin) * edges_in
    graph.ndata["when"] = (graph.ndata["when"] + begin) * (10**6 // edges_in)
    dgl().save_graphs(str(file), [graph])
    names = ["seconds", "microseconds"][:: -1 if edges_in > 1 else 1]
    message = "'at' of edge type .*, {} since 1970 .*'when' of node type .*, {} since".format(
        *names
    )
    with pytest.raises((DataError, RuntimeError), match=message):
        run(tmp_path, file, "node_classification", task={"split": {"by": "time"}})


@pytest.mark.dgl
def test_times_far_away_are_named(tmp_path: Path) -> None:
    file, begin = tmp_path / "graph.dgl", 1_700_000_000
    events(file)
    (graph,), _ = dgl().load_graphs(str(file))
    graph.edata["at"] = graph.edata["at"] + begin
    graph.ndata["when"] = graph.ndata["when"] + begin
    graph.edata["at"][:40] = 253_402_214_400
    dgl().save_graphs(str(file), [graph])
    done = run(tmp_path, file, "node_classification", task={"split": {"by": "time"}})
    told = " ".join(json.loads(line)["text"] for line in (done.path / "logs" / EVENTS).open())
    assert "'at' of edge type '_N:_E:_N': some times are after the year 2200, such as 25340" in told


@pytest.mark.dgl
@pytest.mark.parametrize("kind", ["node_classification", "edge_classification"])
def test_seeds_that_see_nothing_are_named(kind: str, tmp_path: Path) -> None:
    """Edges at a seed's own time count as later."""
    file = tmp_path / "graph.dgl"
    events(file)
    (graph,), _ = dgl().load_graphs(str(file))
    graph.ndata["when"][:] = graph.edata["at"][:] = 7
    masks = torch.arange(len(graph.edata["at"])) % 3, torch.arange(graph.num_nodes()) % 3
    for code, split in enumerate(("train", "val", "test")):
        graph.edata[f"{split}_mask"], graph.ndata[f"{split}_mask"] = (m == code for m in masks)
    dgl().save_graphs(str(file), [graph])
    done = run(tmp_path, file, kind, task={"split": None})
    told = " ".join(json.loads(line)["text"] for line in (done.path / "logs" / EVENTS).open())
    assert "seeds for training have an in-edge that is earlier than the seed" in told
    assert told.startswith(f"warn: 0 of {100 if kind.startswith('node') else '1,334'} ")


@pytest.mark.parametrize("early", [True, False])
def test_an_edge_type_without_earlier_edges_is_named(early: bool, tmp_path: Path) -> None:
    """Only seeds without any in-edge see nothing but themselves."""
    topology = {
        ("user", kind, "item"): SimpleNamespace(
            indptr=np.arange(3), first=0, times=np.array([at, at])
        )
        for kind, at in (("buys", 1), ("sees", 1 if early else 9))
    }
    plane: Any = SimpleNamespace(
        config=load_config(job(tmp_path)),
        shard=SimpleNamespace(topology=topology),
        control=SimpleNamespace(sum=lambda counts: counts),
        clock=SimpleNamespace(warnings=[]),
    )
    ids, times = np.array([0, 1]), np.array([5, 5])
    warned = PartitionPlane.unreached(plane, "item", ids, times)
    told = "2 of 2 seeds for training have an in-edge that is earlier than the seed ("
    assert [text.startswith(told) for text in warned] == ([] if early else [True])
    assert ["sees:item: 0" in text for text in warned] == ([] if early else [True])
    *_, nowhere = PartitionPlane.unreached(plane, "user", ids, times)
    assert nowhere.endswith("(no edge type ends at node type 'user'; see reverse)")


@pytest.mark.dgl
def test_seeds_of_several_labels_are_split_by_those_with_any(tmp_path: Path) -> None:
    file = tmp_path / "graph.dgl"
    events(file)
    (graph,), _ = dgl().load_graphs(str(file))
    labels = graph.ndata["label"] % 2
    graph.ndata["labels"] = torch.stack([torch.full_like(labels, -1), labels], 1)
    dgl().save_graphs(str(file), [graph])
    task = {"target": "labels", "labels": "multi", "split": {"by": "time"}}
    metrics = run(tmp_path, file, "node_classification", task=task).summary["metrics"]
    assert {"val/roc_auc", "test/roc_auc"} <= metrics.keys()


@pytest.mark.dgl
@pytest.mark.parametrize("kind", ["node_classification", "link_prediction"])
def test_times_that_leave_nothing_to_validate_or_test_on(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "graph.dgl"
    events(file)
    split = {"by": "time", "val": 10**6, "test": 10**6}
    made = run(tmp_path, file, kind, task={"split": split}, train={"epochs": 1})
    told = [json.loads(line)["text"] for line in (made.path / "logs" / EVENTS).open()]
    unit = kind[:4] if kind.startswith("node") else "edge"
    assert told[:2] == [f"no {unit}s are in the split {split!r}" for split in ("val", "test")]


@pytest.mark.dgl
def test_a_time_that_leaves_nothing_to_train_on(tmp_path: Path) -> None:
    file = tmp_path / "graph.dgl"
    events(file)
    split = {"by": "time", "val": -9, "test": -5}
    message = r"(?s)none of the edges of .* is for training .* from when on task\.split is"
    with pytest.raises((DataError, RuntimeError), match=message):
        run(tmp_path, file, "link_prediction", task={"split": split})
