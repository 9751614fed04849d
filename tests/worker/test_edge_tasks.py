"""Tasks on edges, and numbers of nodes: trained, measured, predicted, the same on any ranks."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pytest
import torch

from raygnn.config.load import load_config
from raygnn.config.schema import Config
from raygnn.driver.inputs import PartitionInput
from raygnn.graph.data import EdgeFrame, EdgeType, GraphData, NodeFrame
from raygnn.graph.partition.layout import read_meta
from raygnn.prediction.driver_side import _names
from raygnn.worker.job import TaskTarget
from tests.prediction.test_predict import ask
from tests.support.graphs import ensure_partition, partitioned
from tests.support.small_jobs import JobFactory, edges_of, job, losses, train_on_ranks

pytestmark = pytest.mark.long

PEOPLE, THINGS = 150, 100
TRAIN = {"epochs": 8, "lr": 0.02, "eval_every": 4}
LIKES: EdgeType = ("person", "likes", "thing")
LIKED_BY: EdgeType = ("thing", "liked_by", "person")


def shop(masks: bool = True) -> GraphData:
    """Build people who like things of their own group, which the features show with noise."""
    rng = np.random.default_rng(0)
    group = {"person": rng.integers(0, 4, PEOPLE), "thing": rng.integers(0, 4, THINGS)}
    src, dst = rng.integers(0, PEOPLE, 6000), rng.integers(0, THINGS, 6000)
    same = group["person"][src] == group["thing"][dst]
    keep = (same & (rng.random(6000) < 0.6)) | (rng.random(6000) < 0.02)
    src, dst, same = src[keep], dst[keep], same[keep]
    kind = rng.choice(4, len(src), p=[0.6, 0.2, 0.15, 0.05])
    data: dict[str, Any] = {
        "label": np.where(same, group["thing"][dst], 0).astype(np.int64),
        "stars": (group["person"][src] - group["thing"][dst] * 0.5).astype(np.float32),
        "relation": group["person"][src].astype(np.int64),
    }
    if masks:
        data |= {f"{name}_mask": kind == i for i, name in enumerate(("train", "val", "test"))}
    frames = {}
    for ntype, groups in group.items():
        feat = np.eye(4, dtype=np.float32)[groups] + 0.1 * rng.normal(size=(len(groups), 4))
        frames[ntype] = NodeFrame(len(groups), {"feat": feat.astype(np.float32)})
    split = rng.integers(0, 3, THINGS)
    frames["thing"].data |= {
        "price": (group["thing"] * 2.0).astype(np.float32),
        **{f"{name}_mask": split == i for i, name in enumerate(("train", "val", "test"))},
    }
    edges = {LIKES: EdgeFrame(src, dst, data), LIKED_BY: EdgeFrame(dst, src)}
    return GraphData("shop", frames, edges)


def config_of(
    tmp_path: Path, name: str, *, parts: int = 2, data: Any = None, **more: Any
) -> Config:
    meta = partitioned(data or shop(), tmp_path, parts)
    values = job(tmp_path, **{"name": name, "train": TRAIN, **more})
    values |= {"graph": None, "partition": {"path": str(meta.directory)}}
    return load_config(values)


LINKS: dict[str, Any] = {"kind": "link_prediction", "etype": "likes", "reverse": "liked_by"}


@pytest.mark.parametrize(
    ("negatives", "loss", "decoder"),
    [
        ({"kind": "uniform", "number": 40}, "softmax", "distmult"),
        ({"kind": "degree", "number": 40, "ends": "target"}, "bce", "mlp"),
        pytest.param({"kind": "in_batch"}, "margin", "complex", marks=pytest.mark.slow),
        pytest.param({"number": 30}, "self_adversarial", "rotate", marks=pytest.mark.slow),
    ],
)
def test_any_ranks_train_the_same(
    negatives: dict[str, Any], loss: str, decoder: str, tmp_path: Path
) -> None:
    """Losses, and metrics over all nodes, are equal for full neighbourhoods and the same
    batches."""
    found = []
    for workers, parts, replicated in ((1, 1, True), (2, 2, True), (2, 2, False)):
        config = config_of(
            tmp_path,
            f"{workers}-{replicated}",
            parts=parts,
            task={**LINKS, "negatives": negatives, "loss": loss},
            model={"hidden": 8, "decoder": decoder},
            sampling={"fanout": [-1, -1], "batch_size": 60 // workers},
            cluster={"workers": workers},
            train={"epochs": 1},
        )
        run = train_on_ranks(config, replicated=replicated)
        found.append((losses(run), run.summary["metrics"]))
    assert len(found[0][0]) > 5
    for other, metrics in found[1:]:
        assert np.abs(other - found[0][0]).max() < 1e-4
        assert metrics == pytest.approx(found[0][1], abs=1e-3)
    assert (found[1][0] == found[2][0]).all()  # the same with either topology, to the bit


@pytest.mark.parametrize("replicated", [True, False])
@pytest.mark.parametrize("model", [{"kind": "sage", "aggregator": "sum"}, {"kind": "gin"}])
def test_sums_are_scaled_to_the_edges_that_a_batch_may_sample(
    model: dict[str, Any], replicated: bool, tmp_path: Path
) -> None:
    """A fanout above every degree samples all of them, so that nothing is scaled: not by the
    batch's own edges either, of which there are parallel ones."""
    found = []
    for fanout in (-1, 10_000):
        config = config_of(
            tmp_path,
            f"fanout{fanout}",
            task={**LINKS, "negatives": {"kind": "uniform", "number": 20}},
            model={"hidden": 8, "layers": 1, **model},
            sampling={"fanout": [fanout], "batch_size": 30},
            cluster={"workers": 2},
            train={"epochs": 1, "max_steps": 6},
        )
        found.append(losses(train_on_ranks(config, replicated=replicated)))
    assert np.allclose(*found, atol=1e-6)


def test_batch_norm_is_that_of_the_global_batch(tmp_path: Path) -> None:
    """Nodes may be ends of several ranks' seeds."""
    curves = []
    for workers in (1, 2):
        config = config_of(
            tmp_path,
            f"on-{workers}",
            task={**LINKS, "negatives": {"kind": "uniform", "number": 40}},
            model={"kind": "gin", "norm": "batch", "hidden": 8, "decoder": "distmult"},
            sampling={"fanout": [4, 4], "batch_size": 60 // workers},
            cluster={"workers": workers},
            train={"epochs": 1, "max_steps": 8},
        )
        curves.append(losses(train_on_ranks(config, replicated=False)))
    assert np.abs(curves[0] - curves[1]).max() < 1e-4


def test_links_are_learnt_and_predicted(tmp_path: Path) -> None:
    task = {**LINKS, "negatives": {"number": 60}}
    config = config_of(tmp_path, "links", task=task, model={"decoder": "distmult"})
    run = train_on_ranks(config)
    metrics = run.summary["metrics"]
    assert metrics["test/mrr"] > 0.1  # a guess has 0.04
    assert metrics["test/hits@1"] <= metrics["test/hits@3"] <= metrics["test/hits@10"]
    assert run.summary["best_epoch"] is not None

    edges = shop().edges[LIKES]
    frames = [ask(run, config, workers).to_pandas() for workers in (1, 2, 3)]
    for frame in frames:
        assert list(frame) == ["edge", "source", "target", "relation", "score", "split"]
        assert frame["edge"].tolist() == list(range(edges.num))
        assert frame["source"].tolist() == edges.src.tolist()
        assert frame["target"].tolist() == edges.dst.tolist()
        assert frame["relation"].tolist() == edges.data["relation"].tolist()
        assert ((frame["split"] == "test") == edges.data["test_mask"]).all()
        assert frame["score"].to_numpy() == pytest.approx(frames[0]["score"].to_numpy(), abs=1e-4)
    test = ask(run, config, 2, split="test").to_pandas()
    assert test["edge"].tolist() == np.flatnonzero(edges.data["test_mask"]).tolist()
    for workers in (1, 3):
        again = ask(run, config, workers, split="test", rows=False)
        wanted = {name: value for name, value in metrics.items() if name.startswith("test/")}
        assert again == pytest.approx(wanted, abs=1e-3)


def test_no_score_is_dropped_out_of_a_ranking(tmp_path: Path) -> None:
    """Scores of a network in training are kept, too."""
    model = {"decoder": "mlp", "dropout": 0.9}
    config = config_of(tmp_path, "dropout", task=LINKS, model=model, train={"epochs": 2})
    run = train_on_ranks(config)
    again = ask(run, config, 1, split="test", rows=False)
    metrics = run.summary["metrics"]
    wanted = {name: value for name, value in metrics.items() if name.startswith("test/")}
    assert again == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize("masks", [False, True])
def test_classes_of_edges(masks: bool, tmp_path: Path) -> None:
    """The graph may lack masks."""
    task = {"kind": "edge_classification", "etype": "likes", "reverse": "liked_by"}
    config = config_of(tmp_path, "classes", data=shop(masks), task=task)
    run = train_on_ranks(config)
    assert run.summary["metrics"]["test/accuracy"] > 0.8
    frame = ask(run, config, 2).to_pandas()
    edges = shop().edges[LIKES]
    assert frame["label"].tolist() == edges.data["label"].tolist()
    assert frame["source"].tolist() == edges.src.tolist()
    tested = frame[frame["split"] == "test"]
    right = (tested["prediction"] == tested["label"]).mean()
    assert right == pytest.approx(run.summary["metrics"]["test/accuracy"], abs=1e-6)
    if not masks:
        shares = frame["split"].value_counts(normalize=True)
        assert abs(shares["val"] - 0.1) < 0.05
        assert abs(shares["test"] - 0.1) < 0.05


def paid() -> GraphData:
    """Build a graph in which edge features alone determine the label."""
    data, rng = shop(), np.random.default_rng(3)
    likes = data.edges[LIKES]
    amount = rng.normal(size=(likes.num, 2)).astype(np.float32)
    pieces = rng.integers(-3, 4, likes.num)
    likes.data |= {"amount": amount, "pieces": pieces}
    likes.data["label"] = (amount[:, 0] + pieces > 0).astype(np.int64)
    return data


def test_a_decoder_reads_what_the_edges_say(tmp_path: Path) -> None:
    """Relations are those of the same edges, on any number of ranks."""
    task = {"kind": "edge_classification", "etype": "likes", "reverse": "liked_by"}
    train = {"epochs": 4, "lr": 0.02}
    blind = train_on_ranks(config_of(tmp_path, "blind", data=paid(), task=task, train=train))
    assert blind.summary["metrics"]["test/accuracy"] < 0.65
    found = []
    for workers, parts, replicated in ((1, 1, True), (3, 2, False), (2, 2, True)):
        config = config_of(
            tmp_path,
            f"{workers}-{replicated}",
            parts=parts,
            data=paid(),
            task=task,
            train={**TRAIN, "max_steps": None if workers == 2 else 10},
            model={"decoder_features": ["amount", "pieces"], "hidden": 8},
            sampling={"fanout": [-1, -1], "batch_size": 60 // workers},
            cluster={"workers": workers},
        )
        run = train_on_ranks(config, replicated=replicated)
        found.append(losses(run)[:10])
    assert len(found[0]) == 10
    assert np.abs(np.stack(found) - found[0]).max() < 1e-4
    assert run.summary["metrics"]["test/accuracy"] >= 0.95
    frame = ask(run, config, 2).to_pandas()
    assert (frame["prediction"] == paid().edges[LIKES].data["label"]).mean() >= 0.95


def test_numbers_of_edges_and_nodes(tmp_path: Path) -> None:
    edges = {"kind": "edge_regression", "etype": "likes", "target": "stars", "metric": "r2"}
    run = train_on_ranks(config_of(tmp_path, "stars", task={**edges, "reverse": "liked_by"}))
    assert run.summary["metrics"]["test/r2"] > 0.7

    nodes = {"kind": "node_regression", "ntype": "thing", "target": "price", "metric": "rmse"}
    config = config_of(
        tmp_path, "price", task=nodes, sampling={"batch_size": 8}, train={**TRAIN, "epochs": 40}
    )
    run = train_on_ranks(config)
    assert run.summary["metrics"]["test/r2"] > 0.7
    frame = ask(run, config, 2).to_pandas()
    prices = shop().nodes["thing"].data["price"]
    assert frame["label"].tolist() == prices.tolist()
    test = frame[frame["split"] == "test"]
    rmse = np.sqrt(((test["prediction"] - test["label"]) ** 2).mean())
    assert rmse == pytest.approx(run.summary["metrics"]["test/rmse"], rel=1e-5)


@pytest.mark.dgl
def test_your_own_model(make_job: JobFactory) -> None:
    """The graph has no edge features; the evaluation uses full neighbourhoods."""
    config = make_job(
        graph={"nodes": 300, "degree": 6},
        task={"kind": "link_prediction", "negatives": {"number": 50}},
        model={"kind": "tests.support.own_models:DglSage"},
        sampling={"fanout": [-1, -1], "batch_size": 200, "eval_batch_size": 37},
    )
    run = train_on_ranks(config)
    assert losses(run)[-1] < losses(run)[0]
    metrics = ask(run, config, 3, split="val", rows=False)
    assert metrics == pytest.approx(
        {name: run.summary["metrics"][name] for name in metrics}, abs=1e-3
    )


def test_ranks_that_own_nothing(tmp_path: Path) -> None:
    """Two things are owned by three ranks, and some steps have fewer edges than ranks."""
    data = shop()
    likes, back = data.edges[LIKES], data.edges[LIKED_BY]
    keep = likes.dst < 2
    few = {name: array[keep] for name, array in likes.data.items()}
    data.edges[LIKES] = EdgeFrame(likes.src[keep], likes.dst[keep], few)
    data.edges[LIKED_BY] = EdgeFrame(back.src[keep], back.dst[keep])
    things = data.nodes["thing"]
    things.num, things.data = 2, {"feat": things.data["feat"][:2]}
    found = []
    for workers in (1, 3):
        config = config_of(
            tmp_path,
            f"few-{workers}",
            data=data,
            parts=2,
            task={**LINKS, "negatives": {"number": 5}},
            sampling={"fanout": [-1, -1], "batch_size": 6 // workers},
            cluster={"workers": workers},
            train={"epochs": 1},
        )
        run = train_on_ranks(config, replicated=False)
        assert len(ask(run, config, 3)) == keep.sum()
        found.append((losses(run), run.summary["metrics"]))
    assert np.abs(found[0][0] - found[1][0]).max() < 1e-4
    assert found[0][1] == pytest.approx(found[1][1], abs=1e-3)


def test_a_resume_is_bitwise_identical(tmp_path: Path) -> None:
    more: dict[str, Any] = {
        "task": {**LINKS, "negatives": {"number": 40}},
        "model": {"dropout": 0.3},
        "fault": {"checkpoint_every": 7},
    }
    whole = train_on_ranks(config_of(tmp_path, "whole", **more, train={"epochs": 2}))
    half = config_of(tmp_path, "half", **more, train={"epochs": 2, "max_steps": 10})
    train_on_ranks(half)
    rest = config_of(tmp_path, "half", **more, train={"epochs": 2})
    resumed = train_on_ranks(rest, resume=True)
    assert losses(resumed)[-5:].tolist() == losses(whole)[-5:].tolist()
    metrics = {k: v for k, v in resumed.summary["metrics"].items() if k.startswith("test/")}
    assert metrics.items() <= whole.summary["metrics"].items()


def test_triples_without_features(tmp_path: Path) -> None:
    """Nodes have embedding tables only; predictions name entities and relations as the files do."""
    rng = np.random.default_rng(1)
    lines = {f"e{i} r{i % 2} e{(i * (3 + i % 2) + 1) % 60}" for i in range(60)}
    lines |= {f"e{i} r1 e{(i + 1) % 60}" for i in range(60)}
    rows = [line.split() for line in sorted(lines)]
    place = tmp_path / "kg"
    place.mkdir()
    kind = rng.choice(3, len(rows), p=[0.7, 0.15, 0.15])
    for number, name in enumerate(("train", "valid", "test")):
        some = ["\t".join(row) for row, k in zip(rows, kind) if k == number]
        (place / f"{name}.txt").write_text("\n".join(some) + "\n")
    values = job(
        tmp_path,
        graph={},
        model={"kind": "none", "decoder": "distmult", "embedding": {"dim": 16}},
        task={"kind": "link_prediction", "negatives": {"number": 30}},
        sampling={"batch_size": 20},
        train={"epochs": 30, "lr": 0.05, "eval_every": 10},
    )
    values["graph"] = {"format": "triples", "path": str(place)}
    values["model"] = {"kind": "none", "decoder": "distmult", "embedding": {"dim": 16}}
    values["sampling"] = {"batch_size": 20}
    config = load_config(values)
    run = train_on_ranks(config)
    assert losses(run)[-1] < losses(run)[0] / 2
    meta = ensure_partition(config, 2)
    target = edges_of(config, meta.directory)

    class Planned:
        goals: ClassVar = {"": TaskTarget(None, target)}
        input = PartitionInput(read_meta(meta.directory), None)

    asked: Any = SimpleNamespace(task="", weights=SimpleNamespace(words={}), one=config)
    ids = _names(Planned(), asked, None, "edge")  # type: ignore[arg-type]
    frame = ask(run, config, 2).to_pandas()
    named = [
        tuple(ids[column].take(pa.array(frame[column]))[i].as_py() for column in order)
        for order in [("source", "relation", "target")]
        for i in range(len(frame))
    ]
    wanted = [tuple(row) for k in range(3) for row, at in zip(rows, kind) if at == k]
    assert named == wanted
    assert torch.tensor(frame["score"]).isfinite().all()


@pytest.mark.parametrize("kind", ["int32", "column", "bool"])
def test_classes_as_graphs_have_them(kind: str, tmp_path: Path) -> None:
    data = shop()
    found = data.edges[LIKES].data
    label = found["label"]
    found["label"] = {"int32": label.astype("int32"), "column": label[:, None], "bool": label > 1}[
        kind
    ]
    task = {"kind": "edge_classification", "etype": "likes", "reverse": "liked_by"}
    train = {"epochs": 1}
    run = train_on_ranks(config_of(tmp_path, "kinds", data=data, task=task, train=train))
    assert run.summary["metrics"]["test/accuracy"] > 0.3


def test_embeddings_of_two_types(tmp_path: Path) -> None:
    """The node type has to be passed, since the ends are of different types."""
    config = config_of(tmp_path, "two", task=LINKS, train={"epochs": 1})
    run = train_on_ranks(config)
    with pytest.raises(RuntimeError, match="several node types: person, thing"):
        ask(run, config, 1, embeddings=True)
    for ntype in ("person", "thing"):
        rows = ask(run, config, 2, embeddings=True, ntype=ntype).to_pandas()
        assert rows["node"].tolist() == list(range(shop().nodes[ntype].num))
        assert len(rows["embedding"][0]) == config.model.hidden
