"""Rows in a request are answered as if the tables had them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml

from raygnn.config.load import load_config
from raygnn.config.schema import Config
from raygnn.errors import InputError
from raygnn.graph.staging.neighbourhood import neighbourhood
from raygnn.runs.run import Run
from raygnn.sampling.collate import names_of
from raygnn.serving import node_answers
from raygnn.serving.new_rows import AllRows
from raygnn.serving.node_answers import NodeAnswers
from raygnn.serving.questions import NodeQuestion, Update
from raygnn.worker.planes.vocabulary import edge_reads
from tests.prediction.test_new_data import asked
from tests.prediction.test_predict import ask
from tests.serving.test_answers import error, rows, serve
from tests.support.small_jobs import JobFactory, job, train_on_ranks

pytestmark = pytest.mark.long

CUSTOMERS, ITEMS, SALES, KINSHIPS = 60, 30, 400, 80

NODES: dict[str, Any] = {
    "customer": [
        {"id": "new1", "age": 33, "city": "Bern", "shop": 2},
        {"id": "new2", "age": None, "city": "Atlantis", "shop": None},
    ],
    "item": [{"code": 901, "price": 3.5}],
}
EDGES: dict[str, Any] = {
    "customer:buys:item": [
        {"customer": "new1", "item": 3, "amount": 3.5, "way": "web"},
        {"customer": "new1", "item": 901, "amount": None, "way": "fax"},
        {"customer": "c1", "item": 901, "amount": 7, "way": "shop"},
        {"customer": "c1", "item": 3, "amount": 9.0, "way": "web"},
    ],
    "customer:kin:customer": [{"one": "new1", "other": "c2"}, {"one": "new1", "other": "new1"}],
}
DAYS = ["2024-03-01", "2024-01-05", "2024-02-01", "2024-02-11"]  # of the sales
SINCE = "2024-03-15"  # of the customers
IDS = ["new1", "c1", "new2", "c2", "c7", "new1"]


def write(place: Path, more: bool = False, timed: bool = False) -> Path:
    """Write the tables, with the new rows if ``more``; returns the description's path."""
    place.mkdir()
    random = np.random.default_rng(5)
    customers = pd.DataFrame(
        {
            "id": [f"c{i}" for i in range(CUSTOMERS)],
            "age": np.where(random.random(CUSTOMERS) < 0.2, np.nan, random.random(CUSTOMERS) * 80),
            "city": random.choice(["Bern", "Basel", "Chur"], CUSTOMERS),
            "shop": random.integers(0, 4, CUSTOMERS),
            "good": random.choice(["no", "yes"], CUSTOMERS),
            "fold": random.choice(["train", "val"], CUSTOMERS),
        }
    )  # fmt: skip
    days = pd.date_range("2024-01-01", periods=90).strftime("%Y-%m-%d")
    customers["since"] = random.choice(days[60:], CUSTOMERS)
    tables = {
        "customer": customers,
        "item": pd.DataFrame({"code": np.arange(ITEMS), "price": random.random(ITEMS)}),
        "shop": pd.DataFrame({"number": np.arange(4), "size": random.random(4)}),
        "customer:buys:item": pd.DataFrame(
            {
                "customer": random.choice(customers["id"], SALES),
                "item": random.integers(0, ITEMS, SALES),
                "amount": np.where(random.random(SALES) < 0.1, np.nan, random.random(SALES) * 9),
                "way": random.choice(["web", "shop"], SALES),
                "day": random.choice(days, SALES),
            }
        ),
        "customer:kin:customer": pd.DataFrame(
            {c: random.choice(customers["id"], KINSHIPS) for c in ("one", "other")}
        ),
    }
    for number, (key, table) in enumerate(tables.items()):
        new = given(timed)
        added = pd.DataFrame([*new["nodes"].get(key, []), *new["edges"].get(key, [])] * more)
        joined = pd.concat([table, added]) if len(added) else table
        joined = joined.astype({"shop": "Int64"}) if key == "customer" else joined
        joined.to_csv(place / f"{number}.csv", index=False)
    scaled: dict[str, Any] = {"impute": "mean", "indicator": True, "scale": "standard"}
    words = {"onehot": True, "unknown": "bucket"}
    sales = {"source": "customer", "target": "item", "reverse": "bought_by"}
    described: dict[str, Any] = {
        "nodes": {
            "customer": {
                "files": "0.csv",
                "id": "id",
                "features": {"feat": [{"column": "age", **scaled}]},
                "categories": {"city": {"column": "city", "unknown": "bucket"}},
                "keys": {"shop": {"table": "shop", "missing": "refuse"}},
                "label": "good",
                "split": "fold",
            },
            "item": {"files": "1.csv", "id": "code", "features": {"feat": "price"}},
            "shop": {"files": "2.csv", "id": "number", "features": {"feat": "size"}},
        },
        "edges": {
            "customer:buys:item": {
                "files": "3.csv",
                "features": {"how": [{"column": "amount", **scaled}, {"column": "way", **words}]},
                **sales,
            },
            "customer:kin:customer": {
                "files": "4.csv", "source": "one", "target": "other", "undirected": True,
            },
        },
    }  # fmt: skip
    if timed:
        described["nodes"]["customer"]["time"] = "since"
        described["edges"]["customer:buys:item"]["time"] = "day"
    (place / "tables.yaml").write_text(yaml.safe_dump(described))
    return place / "tables.yaml"


def trained(place: Path, timed: bool = False, **model: Any) -> tuple[Run, Config]:
    graph = {"format": "tables", "path": str(write(place / "old", timed=timed))}
    sections: dict[str, Any] = {"model": model, "train": {"epochs": 2}, "sampling": {}}
    sections["task"] = {"kind": "node_classification", "ntype": "customer"}
    if timed:
        sections["sampling"] = {"time": {"edges": "time", "seeds": "time"}}
    config = load_config({**job(place, **sections), "graph": graph})
    return train_on_ranks(config), config


def given(timed: bool) -> dict[str, Any]:
    """Return the rows of a request."""
    if not timed:
        return {"nodes": NODES, "edges": EDGES}
    customers = [{**row, "since": SINCE} for row in NODES["customer"]]
    sales = [{**row, "day": day} for row, day in zip(EDGES["customer:buys:item"], DAYS)]
    edges = {**EDGES, "customer:buys:item": sales}
    return {"nodes": {**NODES, "customer": customers}, "edges": edges}


@pytest.mark.parametrize(
    ("kind", "timed", "more"),
    [
        ("sage", False, {"edge_features": ["how"]}),
        ("gat", True, {"edge_features": ["how"]}),
        ("gcn", False, {}),
    ],
)
def test_answers_are_those_of_tables_with_the_rows(
    kind: str, timed: bool, more: dict[str, Any], tmp_path: Path
) -> None:
    run, _ = trained(tmp_path, timed, kind=kind, categories={"city": 3}, **more)
    model = serve(run)
    data = asked(run, f"graph.path={write(tmp_path / 'new', more=True, timed=timed)}")
    table = ask(run, data.config, 2, sizes=data.weights.sizes).to_pandas()
    names = pd.read_csv(tmp_path / "new" / "0.csv")["id"].tolist()
    before = rows(model, NodeQuestion(["c1", "c2"], scores=True))
    found = rows(model, NodeQuestion(IDS, scores=True, **given(timed)))
    assert found["node"].tolist() == IDS
    want = np.stack(table["scores"].tolist())[[names.index(name) for name in IDS]]
    assert np.abs(np.stack(found["scores"].tolist()) - want).max() < 1e-6
    again = rows(model, NodeQuestion(["c1", "c2"], scores=True))
    assert np.stack(again["scores"].tolist()).tolist() == np.stack(before["scores"]).tolist()
    if timed:
        sale = {**SALE, "customer": "c1", "day": 1_709_251_200}  # in seconds
        far = NodeQuestion(["c1"], edges={"customer:buys:item": [sale]})
        assert "different units" in error(model, far)
    known = AllRows(model._model)
    new = given(timed)
    updates = [Update(nodes=new["nodes"]), Update(edges=new["edges"])]
    known.keep(0, updates[:1])
    known.keep(0, updates)  # of which the first is kept already
    assert (known.count, known.kept.count) == (2, 9)
    kept = NodeAnswers(model._model, known)
    asked_together = [NodeQuestion(IDS[:3], scores=True), NodeQuestion(IDS[3:], scores=True)]
    first, second = kept.answer(asked_together)
    assert np.abs(np.stack([row["scores"] for row in first + second]) - want).max() < 1e-6
    changed = np.stack(found["scores"].tolist())[[1, 3]] - np.stack(before["scores"].tolist())
    assert (np.abs(changed).max(1) > 1e-5).all()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    run, _ = trained(tmp_path_factory.mktemp("new_rows"), kind="sage", edge_features=["how"])
    return serve(run)


SALE = EDGES["customer:buys:item"][0]


@pytest.mark.parametrize(
    ("nodes", "edges", "where", "what"),
    [
        ({"people": []}, {}, "nodes.people", "no such table"),
        ({}, {"buys": [{}]}, "edges.buys", "no such table"),
        ({"customer": [{"id": "n", "agee": 3}]}, {}, "nodes.customer[0].agee", "no such column"),
        ({"customer": [{"age": 3}]}, {}, "nodes.customer[0].id", "ids of customer are text"),
        ({"item": [{"code": True}]}, {}, "nodes.item[0].code", "are whole numbers"),
        ({"item": [{"code": 2}]}, {}, "nodes.item[0].code", "2 exists already"),
        ({"item": [{"code": 99, "price": 1}] * 2}, {}, "nodes.item[1].code", "exists already"),
        ({"item": [{"code": 99}]}, {}, "nodes.item[0].price", "there is no number"),
        ({"item": [{"code": 99, "price": [1, 2]}]}, {}, "nodes.item", "'feat' has 2 numbers"),
        ({"customer": [{"id": "n", "age": [1, 2]}]}, {}, "nodes, edges", "cannot be read"),
        ({"customer": [{"id": "n", "city": "\ud800"}]}, {}, "nodes, edges", "cannot be read"),
        ({"item": [{"code": 98, "price": 1}, {"code": 99, "price": "dear"}]}, {},
         "nodes.item.price", "'dear'"),
        ({"customer": [{"id": "n"}, {"id": "m", "shop": 9}]}, {},
         "nodes.customer[1].shop", "9 is no shop"),
        ({}, {"customer:buys:item": [SALE, {**SALE, "customer": "c1", "item": 77}]},
         "edges.customer:buys:item[0].customer", "'new1' is no customer"),
        ({}, {"customer:buys:item": [{**SALE, "customer": "c1", "amount": "x' or 1"}]},
         "edges.customer:buys:item[0].amount", "the value is"),
        ({"item": [{"code": 1000 + i, "price": 1} for i in range(1001)]}, {}, "nodes", "at most"),
    ],
)  # fmt: skip
def test_refused_rows(nodes: Any, edges: Any, where: str, what: str, model: Any) -> None:
    (answer,) = model.answer([NodeQuestion(["c1"], nodes=nodes, edges=edges)])
    assert answer.where == where
    assert what in answer.what
    assert answer.remedy


def test_what_a_request_can_have(
    model: Any, monkeypatch: pytest.MonkeyPatch, make_job: JobFactory
) -> None:
    assert model.schema()["new"] == {
        "nodes": {
            "customer": {
                "age": "number", "city": "word", "shop": "id of shop", "id": "id of customer",
            },
            "item": {"price": "number", "code": "id of item"},
            "shop": {"size": "number", "number": "id of shop"},
        },
        "edges": {
            "customer:buys:item": {
                "amount": "number", "way": "word",
                "customer": "id of customer", "item": "id of item",
            },
            "customer:kin:customer": {"one": "id of customer", "other": "id of customer"},
        },
    }  # fmt: skip
    new = {"nodes": NODES, "edges": EDGES}
    assert "there is no 'c99'" in error(model, NodeQuestion(["c99"], **new))
    without = [{"customer": [{"id": "n", **shop}]} for shop in ({}, {"shop": ""})]
    one, other = (rows(model, NodeQuestion(["n"], nodes=nodes)) for nodes in without)
    assert one.equals(other)
    few = [model.answer([NodeQuestion(["new1", "c1"], (3, 2), **new)]) for _ in range(2)]
    assert few[0] == few[1]
    assert isinstance(few[0][0], list)
    monkeypatch.setattr(node_answers, "_MOST_EDGES", 20)
    assert "more than 20 edges within 2 layers" in error(model, NodeQuestion(["c1"], **new))
    few = [model.answer([NodeQuestion(["c1"], (1, 1), **new)] * 2) for _ in range(2)]
    assert few[0] == few[1]
    assert few[0][0][0]["node"] == "c1"
    other = serve(train_on_ranks(make_job(train={"epochs": 1})))
    assert "not built from tables" in error(other, NodeQuestion([1], **new))
    assert "new" not in other.schema()


def test_explanations_name_new_nodes(model: Any) -> None:
    new = {"nodes": NODES, "edges": EDGES}
    (row,) = rows(model, NodeQuestion(["new1"], explain=100, **new)).to_dict("records")
    found = row["explanation"]
    for kind in ("features", "nodes"):
        total = sum(one["contribution"] for one in found[kind])
        assert total == pytest.approx(found["score"] - found["without"], abs=1e-3)
    ends = {(edge["source"], edge["target"]) for edge in found["edges"]}
    assert {(901, "new1"), (3, "new1"), ("c2", "new1"), ("new1", "c2")} <= ends


def test_updates_that_cannot_be_read_together(model: Any) -> None:
    """One has numbers where another has the same as text."""
    known = AllRows(model._model)
    prices = ({"code": 901, "price": 3.5}, {"code": 902, "price": "4"})
    known.keep(0, [Update(nodes={"item": [row]}) for row in prices])
    price = known.kept.nodes["item"]["feat"].flatten().tolist()
    assert (known.count, price) == (2, [3.5, 4.0])
    assert [*known.kept.numbers["item"]] == [901, 902]
    known.keep(2, [Update(nodes={"item": []})])
    assert [*known.kept.numbers["item"]] == [901, 902]
    assert len(known.kept.nodes["item"]["feat"]) == 2
    with pytest.raises(InputError, match="902 exists already"):
        known.beside({"item": [{"code": 902, "price": 1}]}, {})


@pytest.mark.parametrize("cap", [1, 3, 7, 1000])
def test_some_edges_of_each_node(cap: int, model: Any) -> None:
    """They are edges of the graph or new ones, each at most once, and as many as there may be."""
    rows, shard = AllRows(model._model), model._plane.shard
    new, reads = rows.beside(NODES, EDGES), edge_reads(model._config)
    ids = np.append(np.arange(CUSTOMERS), [*new.numbers["customer"].values()])
    arrays = {t: {*names_of(inputs)} for t, inputs in model._plane.inputs.items()}
    given = shard, (new.nodes, new.edges), {"customer": ids}, 1, reads, arrays, 10**6
    whole, part = neighbourhood(*given), neighbourhood(*given, cap)
    for etype, every in whole.topology.items():
        some, t = part.topology[etype], etype[0]
        if etype[2] != "customer":
            continue
        assert np.array_equal(part.degrees[etype], whole.degrees[etype])
        for node in range(len(ids)):
            (all_of, few) = (
                of.ids[t][lists.src[lists.indptr[node] : lists.indptr[node + 1]]]
                for of, lists in ((whole, every), (part, some))
            )
            assert len(few) == min(cap, len(all_of))
            assert not Counter(few.tolist()) - Counter(all_of.tolist())
