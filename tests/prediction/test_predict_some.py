"""Predictions for a list of nodes or graphs, and embeddings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import raygnn
from raygnn.config.load import load_config
from raygnn.driver.ray_cluster import RayCluster
from raygnn.driver.session import Session
from raygnn.errors import InputError
from raygnn.graph.sources import load_graph
from raygnn.models.network import Schema
from raygnn.models.registry import build_model
from raygnn.prediction.driver_side import _few
from raygnn.worker.planes.prediction_rows import Format, Predictions, numbers_of, read_wanted
from tests.prediction.test_predict import ask
from tests.support.graphs import on_whole_graph
from tests.support.small_jobs import JobFactory, job, train_on_ranks
from tests.worker.test_graph_tasks import make

pytestmark = pytest.mark.long

NODES = [3, 500, 77, 3, 901]


OWN = pytest.param("tests.support.own_models:DglSage", marks=pytest.mark.dgl)


@pytest.mark.parametrize("kind", ["gcn", "gat", OWN])
def test_a_list_of_nodes(kind: str, make_job: JobFactory) -> None:
    heads = {"heads": 2} if kind == "gat" else {}
    config = make_job(model={"kind": kind, **heads}, train={"epochs": 1})
    run = train_on_ranks(config)
    every = ask(run, config, 2).to_pandas().set_index("node")
    for workers in (1, 2):
        few = ask(run, config, workers, wanted=pa.array(NODES)).to_pandas().set_index("node")
        assert few.index.tolist() == sorted(set(NODES))
        full = every.loc[few.index]
        assert (few["label"] == full["label"]).all()
        assert np.allclose(np.stack(few["scores"]), np.stack(full["scores"]), atol=1e-5)


def test_drawn_neighbours_do_not_depend_on_the_company(make_job: JobFactory) -> None:
    config = make_job(train={"epochs": 1})
    run = train_on_ranks(config)
    exact = ask(run, config, 1, wanted=pa.array(NODES)).to_pandas()
    drawn = ask(run, config, 1, wanted=pa.array(NODES), fanout=(3, 2)).to_pandas()
    assert not np.allclose(np.stack(drawn["scores"]), np.stack(exact["scores"]), atol=1e-3)
    others = pa.array([*NODES, *range(100, 160)])
    for workers in (1, 3):
        more = ask(run, config, workers, wanted=others, fanout=(3, 2)).to_pandas()
        same = more[more["node"].isin(NODES)]
        assert np.allclose(np.stack(same["scores"]), np.stack(drawn["scores"]), atol=1e-5)


def test_sampled_sums_are_scaled_whatever_was_sampled_in_training(make_job: JobFactory) -> None:
    found, trained = [], []
    for fanout in (-1, 5):
        model = {"kind": "sage", "aggregator": "sum", "layers": 1}
        config = make_job(
            name=f"fanout{fanout}",
            graph={"degree": 20},
            model=model,
            sampling={"fanout": [fanout]},
            train={"epochs": 1},
        )
        trained = trained or [train_on_ranks(config)]
        few = ask(trained[0], config, 1, wanted=pa.array(NODES), fanout=(3,)).to_pandas()
        found.append(np.stack(few["scores"]))
    assert np.allclose(*found, atol=1e-6)


def test_a_list_and_a_split(make_job: JobFactory) -> None:
    config = make_job(train={"epochs": 1})
    run = train_on_ranks(config)
    every = ask(run, config, 1).to_pandas()
    tests = set(every["node"][every["split"] == "test"]) & set(range(200))
    found = ask(run, config, 2, split="test", wanted=pa.array(range(200))).to_pandas()
    assert found["node"].tolist() == sorted(tests)


@pytest.mark.parametrize("typed", [False, True])
def test_embeddings_are_what_the_last_layer_is_given(typed: bool, make_job: JobFactory) -> None:
    config = make_job(graph={"typed": typed}, train={"epochs": 1})
    run = train_on_ranks(config)
    assert config.graph is not None
    data = load_graph(config.graph)
    target = "item" if typed else "_N"
    widths = {t: frame.data["feat"].shape[1] for t, frame in data.nodes.items()}
    model = build_model(config.model, Schema(widths, list(data.edges), 4, target=target))
    model.load_state_dict(torch.load(run.path / "checkpoints" / "selected.pt"))

    class Hidden(nn.Module):
        def forward(self, blocks: Any, x: Any, degree: Any) -> Any:
            return model.layer(0, blocks[0], model.inputs(x), degree)[target]

    wanted = on_whole_graph(Hidden(), 1, data)
    for workers in (1, 3):
        table = ask(run, config, workers, scores=False, embeddings=True)
        assert table.column_names == ["node", "split", "embedding"]
        frame = table.to_pandas()
        assert frame["node"].tolist() == list(range(data.nodes[target].num))
        assert np.allclose(np.stack(frame["embedding"]), wanted, atol=1e-5)
    with pytest.raises(RuntimeError, match="no embeddings of node type 'gone'"):
        ask(run, config, 1, embeddings=True, ntype="gone")


def test_one_layer_hides_nothing(make_job: JobFactory) -> None:
    config = make_job(model={"layers": 1}, sampling={"fanout": [5]}, train={"epochs": 1})
    run = train_on_ranks(config)
    with pytest.raises(RuntimeError, match="no hidden layer"):
        ask(run, config, 1, embeddings=True)


@pytest.mark.dgl
def test_graphs(tmp_path: Path) -> None:
    config = make(tmp_path, train={"epochs": 1})
    run = train_on_ranks(config)
    every = ask(run, config, 1).to_pandas().set_index("graph")
    few = ask(run, config, 2, wanted=pa.array([7, 2, 7])).to_pandas().set_index("graph")
    assert few.index.tolist() == [2, 7]
    assert np.allclose(np.stack(few["scores"]), np.stack(every.loc[[2, 7]]["scores"]), atol=1e-5)
    weights = torch.load(run.path / "checkpoints" / "selected.pt")
    frame = ask(run, config, 2, embeddings=True).to_pandas()
    assert frame["graph"].tolist() == list(range(30))
    rows = torch.from_numpy(np.stack(frame["embedding"]))
    shares = nn.functional.linear(rows, weights["readout.weight"], weights["readout.bias"])
    assert np.allclose(shares.softmax(1), np.stack(every["scores"]), atol=1e-5)


@pytest.mark.parametrize(
    ("ids", "fanout", "what"),
    [
        (None, [1, 1], "for a list of nodes only"),
        ("some", [1], "2 layers"),
        ("some", [1, -2], "-2 is not between -1 and"),
        ("some", [1, 2**31], "2147483648 is not between"),
        ("gone", None, "no such file"),
        ("empty", None, "no ids"),
        ("latin", None, "UTF-8"),
        ("bad.parquet", None, "is not Parquet"),
        ("two.parquet", None, "no column 'node'; there are: a, b"),
    ],
)
def test_refused(
    ids: str | None, fanout: list[int] | None, what: str, tmp_path: Path, make_job: JobFactory
) -> None:
    (tmp_path / "some").write_text("1\n")
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "latin").write_bytes(b"\xe4\n")
    (tmp_path / "bad.parquet").write_text("1\n")
    pq.write_table(pa.table({"a": [1], "b": [2]}), tmp_path / "two.parquet")
    with pytest.raises(InputError, match=what) as caught:
        _few(make_job(), ids and tmp_path / ids, fanout)
    assert caught.value.where
    assert caught.value.remedy


LINKS = {"kind": "link_prediction", "etype": "buys"}
REFUSED: list[tuple[Any, dict[str, Any], dict[str, Any], str]] = [
    (raygnn.predict, {}, {"ids": "ids"}, "number 2 of the list"),
    (raygnn.embed, LINKS, {"ntype": "tag"}, "no embeddings of node type 'tag', but of user, item"),
    (raygnn.embed, LINKS, {}, "several node types: user, item"),
    (raygnn.embed, LINKS, {"ntype": "item"}, "a worker was started"),
]


def test_errors_come_before_workers_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: Any, **__: Any) -> Any:
        raise InputError("a worker was started")

    (tmp_path / "ids").write_text("1\n99999\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(RayCluster, "start", start)
    monkeypatch.setattr(Session, "launch", start)
    for verb, task, asked, what in REFUSED:
        name = "links" if task else "nodes"
        if not (tmp_path / name).exists():
            sections: dict[str, Any] = {"graph": {"typed": True}, "task": task, "name": name}
            run = train_on_ranks(load_config(job(tmp_path, **sections, train={"epochs": 1})))
            (place,) = (tmp_path / "partitions").iterdir()
            parts = {"directory": str(place), "parts": [{}, {}]}
            (run.path / "partition.json").write_text(json.dumps(parts))
        with pytest.raises(InputError, match=what):
            verb(run, out=tmp_path / "out.parquet", display=False, **asked)


def test_no_layers_draw_no_neighbours(tmp_path: Path) -> None:
    (tmp_path / "some").write_text("1\n")
    graph = {"format": "planted", "nodes": 50, "degree": 4, "classes": 3}
    config = load_config({"name": "test", "graph": graph, "model": {"kind": "none"}})
    assert _few(config, tmp_path / "some", [])["fanout"] == ()
    with pytest.raises(InputError, match="0 layers"):
        _few(config, tmp_path / "some", [5])


@given(st.lists(st.integers(0, 50), min_size=1), st.booleans(), st.booleans())
def test_ids_and_numbers(wanted: list[int], named: bool, text: bool) -> None:
    names = pa.array([f"n{i}" for i in range(51)], pa.large_string()) if named else None
    given = pa.array([f"n{i}" if named else str(i) if text else i for i in wanted])
    assert numbers_of(given, names, 51).tolist() == sorted(set(wanted))


@pytest.mark.parametrize(
    ("wanted", "names", "which"),
    [
        (["1", "x", "2"], None, r"'x' .* number 2"),
        ([0, 5], None, r"5 .* number 2"),
        ([-1], None, r"-1 .* number 1"),
        (["b", "c"], pa.array(["a", "b"]), r"'c' .* number 2"),
        ([1.5], None, "double"),
        ([None], None, "None"),
        ([[1]], None, "list"),
        ([{"a": 1}], pa.array(["a"]), "struct"),
    ],
)
def test_ids_that_are_not_there(wanted: list[Any], names: Any, which: str) -> None:
    with pytest.raises(InputError, match=which):
        numbers_of(pa.array(wanted), names, 5)


def test_files_of_ids(tmp_path: Path) -> None:
    lines, column = tmp_path / "ids.txt", tmp_path / "ids.parquet"
    lines.write_text(" a\r\n\n b c \n")
    assert read_wanted(lines, "node").to_pylist() == ["a", "b c"]
    lines.write_text("\ufeffa\x85b\nc\u2028d\n", "utf-8")  # only ends of lines end ids
    assert read_wanted(lines, "node").to_pylist() == ["a\x85b", "c\u2028d"]
    pq.write_table(pa.table({"x": [1], "node": ["q"]}), column)
    assert read_wanted(column, "node").to_pylist() == ["q"]


def test_numbers_that_are_not_known_have_no_label() -> None:
    ids, splits = np.arange(3), np.full(3, -1, np.int8)
    nan = float("nan")
    for targets, outputs, wanted in (
        ([1.0, nan, 2.0], torch.zeros(3, 1), [1.0, None, 2.0]),
        ([[1.0, 2.0], [nan, 3.0], [4.0, 5.0]], torch.zeros(3, 2), [[1.0, 2.0], None, [4.0, 5.0]]),
    ):
        found = Predictions(ids, outputs, torch.tensor(targets), splits)
        assert Format("node", classifies=False).table(found)["label"].to_pylist() == wanted
