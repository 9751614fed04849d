"""Explanations: they add up, are repeatable, and name what the answer is known to depend on."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

import raygnn
from raygnn.cli import main
from raygnn.config.load import load_config
from raygnn.errors import InputError
from raygnn.sampling.batch import Adjacency, Block
from raygnn.serving import explanations
from raygnn.serving.explanations import largest, unroll
from raygnn.serving.node_answers import NodeAnswers
from raygnn.serving.questions import LARGEST_TREE, NodeQuestion, RequestError
from tests.prediction.test_predict_at import trained
from tests.serving.test_answers import rows, serve
from tests.support.small_jobs import JobFactory, job, train_on_ranks
from tests.worker.test_edge_tasks import LINKS, config_of
from tests.worker.test_training_tables import of, write

pytestmark = pytest.mark.long

EVERY = LARGEST_TREE  # contributions
ITEMS, EACH = 400, 6  # and links of either type to each of them


def explained(model: NodeAnswers, *ids: Any, **more: Any) -> list[dict[str, Any]]:
    question = NodeQuestion(list(ids), **{"explain": EVERY, **more})
    found: list[dict[str, Any]] = rows(model, question)["explanation"].tolist()
    return found


def total(explanation: dict[str, Any], kind: str) -> float:
    return sum(one["contribution"] for one in explanation[kind])


def check_sums(explanation: dict[str, Any]) -> None:
    difference = explanation["score"] - explanation["without"]
    for kind in ("features", "nodes"):
        assert total(explanation, kind) == pytest.approx(difference, abs=1.1e-3)


@pytest.mark.parametrize(
    ("kind", "typed", "fanout"),
    [("sage", False, None), ("gcn", False, (3, 2)), ("gin", False, None), ("gatv2", False, (3, 2)),
     ("gat", True, None), ("sage", True, (3, 2)), ("hgt", True, (3, 2)), ("han", True, None)],
)  # fmt: skip
def test_contributions_add_up_to_the_prediction(
    kind: str, typed: bool, fanout: tuple[int, ...] | None, make_job: JobFactory
) -> None:
    """The tree's prediction is that of the neighbourhood; nothing differs the second time."""
    config = make_job(graph={"typed": typed}, model={"kind": kind}, train={"epochs": 1})
    model = serve(train_on_ranks(config))
    answer = rows(model, NodeQuestion([3, 77], fanout, explain=EVERY))
    for explanation, probability in zip(answer["explanation"], answer["probability"]):
        assert explanation["score"] == pytest.approx(probability, abs=1e-5)
        check_sums(explanation)
        assert len(explanation["edges"]) > 2
    assert explained(model, 3, 77, fanout=fanout) == answer["explanation"].tolist()


@pytest.mark.dgl
def test_a_model_of_ones_own(make_job: JobFactory) -> None:
    model = {"kind": "examples.own_model:JumpingSage", "args": {"hidden": 8}}
    served = serve(train_on_ranks(make_job(model=model, train={"epochs": 1})))
    for explanation in explained(served, 3, 77):
        check_sums(explanation)
        assert len(explanation["edges"]) > 2


@pytest.mark.dgl
@pytest.mark.parametrize("strategy", ["uniform", "latest"])
def test_nodes_at_times(strategy: str, tmp_path: Path) -> None:
    run, _ = trained(tmp_path, "node_classification", time={"strategy": strategy})
    model = serve(run)
    for at in (60, 90):
        check_sums(explained(model, 7, at=at)[0])


def test_learned_columns_and_rows_of_training_tables(tmp_path: Path) -> None:
    write(tmp_path)
    model = {"columns": "learned", "time_encoding": 4}
    served = serve(train_on_ranks(of(tmp_path, "rows", train={"epochs": 1}, model=model)))
    (found,) = explained(served, "c07", at="2024-12-01")
    check_sums(found)
    assert {(one["type"], one["feature"]) for one in found["features"]} == {
        ("customer", "age"),
        ("purchase", "amount"),
    }
    assert {one["node"] for one in found["nodes"] if one["type"] == "customer"} == {"c07"}


def planted(place: Path, epochs: int = 30) -> Any:
    """A job whose class is the sign of a sum over links of one type, those of the other are noise;
    both begin at nodes with one random feature."""
    random = np.random.default_rng(0)
    sources = pandas.DataFrame({"id": range(ITEMS), "x": random.choice([-1.0, 1.0], ITEMS)})
    ends = {
        name: pandas.DataFrame(
            {
                "source": random.integers(0, ITEMS, ITEMS * EACH),
                "item": np.repeat(np.arange(ITEMS), EACH),
            }
        )
        for name in ("reason", "noise")
    }
    added = sources["x"].to_numpy()[ends["reason"]["source"]].reshape(ITEMS, EACH).sum(1)
    items = pandas.DataFrame({"id": range(ITEMS), "x": 1.0, "kind": (added > 0).astype(int)})
    items["fold"] = random.choice(["train", "val", "test"], ITEMS, p=[0.8, 0.1, 0.1])
    for name, frame in {"items": items, "sources": sources, **ends}.items():
        frame.to_csv(place / f"{name}.csv", index=False)
    feat = {"features": {"feat": "x"}}
    tables = {
        "nodes": {
            "item": {"files": "items.csv", "id": "id", "label": "kind", "split": "fold", **feat},
            "thing": {"files": "sources.csv", "id": "id", **feat},
        },
        "edges": {
            f"thing:{name}:item": {"files": f"{name}.csv", "source": "source", "target": "item"}
            for name in ends
        },
    }
    (place / "tables.yaml").write_text(yaml.safe_dump(tables))
    values = job(
        place / "runs",
        task={"kind": "node_classification", "ntype": "item"},
        model={"kind": "sage", "hidden": 16, "layers": 1},
        sampling={"fanout": [-1], "batch_size": 40},
        train={"epochs": epochs, "lr": 0.02},
    )
    values["graph"] = {"format": "tables", "path": str(place / "tables.yaml")}
    return load_config(values)


def test_the_known_reason_comes_first_and_the_answer_depends_on_it(tmp_path: Path) -> None:
    """Links that decide the class rank above noise, and without the first ones the prediction
    changes more than without random ones."""
    run = train_on_ranks(planted(tmp_path))
    assert run.summary["metrics"]["val/accuracy"] > 0.9
    model = serve(run)
    ranks, fell, fell_at_random = [], [], []
    random = np.random.default_rng(0)
    for node in range(30):
        (found,) = explained(model, node)
        edges = pandas.DataFrame(found["edges"])
        is_reason = edges["type"] == "thing:reason:item"
        ranks.append(roc_auc_score(is_reason, edges["contribution"].abs()))
        helped = edges.sort_values("contribution", ascending=False)
        some = edges.sample(3, random_state=random)
        for fall, gone in ((fell, helped.head(3)), (fell_at_random, some)):
            fall.append(found["score"] - without(model, node, gone, found))
    assert np.mean(ranks) > 0.9
    assert np.mean(fell) > 3 * np.mean(fell_at_random)


def without(
    model: NodeAnswers, node: int, gone: pandas.DataFrame, explanation: dict[str, Any]
) -> float:
    """Return the explained class's probability without some edges."""
    plane = model._plane
    position = int(model.ids.positions([node], "ids")[0])
    (blocks, *more), sources = plane.inference.neighbourhood(
        {"item": np.array([position])}, model._hops(None), None
    )
    adj = {}
    for etype, lists in blocks[0].adj.items():
        left = gone[gone["type"] == ":".join(etype)]["source"].tolist()
        names = (
            model._model.ids("thing").names(
                plane.shard.original["thing"][np.asarray(sources["thing"])]
            )
            if etype[0] == "thing"
            else []
        )
        keep = [i for i, number in enumerate(lists.src.tolist()) if names[number] not in left]
        adj[etype] = Adjacency(torch.tensor([0, len(keep)]), lists.src[keep])
    with torch.no_grad():
        outputs = model._model.module.model([replace(blocks[0], adj=adj)], *more).softmax(1)[0]
        before = model._model.module.model(blocks, *more).softmax(1)[0]
    assert float(before.max()) == pytest.approx(explanation["score"], abs=1e-5)
    return float(outputs[before.argmax()])


@given(st.data())
def test_a_tree_has_a_copy_of_a_node_for_every_way_to_it(data: st.DataObject) -> None:
    """Against paths that are followed one by one."""
    sizes = [data.draw(st.integers(low, low + 2)) for low in (1, 3, 5)]
    blocks, etype = [], ("a", "to", "a")
    for few, many in pairwise(sizes):
        lists = [data.draw(st.lists(st.integers(0, many - 1), max_size=3)) for _ in range(few)]
        indptr = torch.tensor([0, *np.cumsum([len(one) for one in lists])])
        src = torch.tensor([i for one in lists for i in one], dtype=torch.int64)
        blocks.insert(0, Block({etype: Adjacency(indptr, src)}, {"a": many}, {"a": few}))
    tree = unroll(blocks, {"a": sizes[0]})

    def ways(node: int, hop: int) -> list[list[int]]:
        """Return the nodes on each way from an input to ``node``, the input first."""
        if hop < 0:
            return [[node]]
        adj = blocks[hop].adj[etype]
        below = adj.src[int(adj.indptr[node]) : int(adj.indptr[node + 1])].tolist()
        return [[*way, node] for one in [node, *below] for way in ways(one, hop - 1)]

    wanted = sorted(way[0] for node in range(sizes[0]) for way in ways(node, len(blocks) - 1))
    assert sorted(tree.nodes["a"].tolist()) == wanted
    assert [len(block.adj[etype].src) + block.num_dst["a"] for block in tree.blocks] == [
        block.num_src["a"] for block in tree.blocks
    ]
    for number, path in zip(tree.nodes["a"].tolist(), tree.paths["a"].T.tolist()):
        crossed = [tree.edges[edge] for edge in path if edge >= 0]
        if crossed:
            assert crossed[-1][1] == number  # the last edge begins at the input
            assert [e[1] for e in crossed[:-1]] == [e[2] for e in crossed[1:]]


def test_a_tree_that_is_too_large(make_job: JobFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explanations, "LARGEST_TREE", 20)
    model = serve(train_on_ranks(make_job(train={"epochs": 1})))
    (answer,) = model.answer([NodeQuestion([3], explain=1)])
    assert isinstance(answer, RequestError)
    assert "more than 20 edges" in answer.what
    (few,) = explained(model, 3, fanout=(2, 2))
    check_sums(few)


def test_the_largest_are_shown() -> None:
    assert largest({"a": 0.1, "b": -3.0, "c": 2.0}, 2) == [("b", -3.0), ("c", 2.0)]


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the ids of the tables; a list of numbers is text."""
    run = train_on_ranks(planted(tmp_path, epochs=1))
    serve(run)  # writes down the partition
    (tmp_path / "nodes.txt").write_text("3\n\n77\n")
    out = tmp_path / "why.parquet"
    asked = ["explain", str(run.path), "--ids", str(tmp_path / "nodes.txt"), "--out", str(out)]
    assert main([*asked, "--k", "2", "--fanout", "4"]) == 0
    found = pandas.read_parquet(out)
    assert found.groupby("node")["kind"].value_counts().to_dict() == {
        (node, kind): 2 for node in (3, 77) for kind in ("edge", "feature", "node")
    }
    edges = found[found["kind"] == "edge"]
    assert set(edges["target"]) == {3, 77}
    assert set(edges["type"]) <= {"thing:reason:item", "thing:noise:item"}
    assert main(asked) == 2  # it exists
    assert raygnn.explain(run, [3, 77], k=2, fanout=(4,)).equals(found)
    assert run.explain(3, 77, k=2, fanout=(4,)).equals(found)
    with pytest.raises(InputError, match="no 400 among") as told:
        raygnn.explain(run, [3, 400], k=1)
    assert told.value.where == "node 400"
    with pytest.raises(InputError, match="k is 0"):
        raygnn.explain(run, [3], k=0)
    monkeypatch.setitem(sys.modules, "captum.attr", None)
    with pytest.raises(InputError, match="Captum is not installed"):
        raygnn.explain(run, [3])


def test_links_are_not_explained(tmp_path: Path) -> None:
    run = train_on_ranks(config_of(tmp_path, "links", task=LINKS, train={"epochs": 1}))
    with pytest.raises(InputError, match="predictions for nodes are explained"):
        raygnn.explain(run, [3])
