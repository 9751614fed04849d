"""A served model answers what predictions and recommendations of the same run say."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pandas
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raygnn.config.schema import Config
from raygnn.errors import InputError
from raygnn.runs.run import Run
from raygnn.runs.run_directory import PARTITION
from raygnn.serving.application import ModelReplica, _answers, _kinds, _load, _model
from raygnn.serving.link_graph_answers import LinkAnswers
from raygnn.serving.node_answers import NodeAnswers
from raygnn.serving.questions import (
    AnyQuestion,
    ListQuestion,
    NodeIds,
    NodeQuestion,
    PairQuestion,
    RequestError,
)
from raygnn.serving.served_run import Served, ServedModel
from raygnn.util.files import write_json
from raygnn.worker.job import TopLists
from tests.prediction.test_predict import ask
from tests.prediction.test_predict_at import AT, trained
from tests.prediction.test_recommend import lists
from tests.prediction.test_table_jobs import shop
from tests.support.graphs import ensure_partition
from tests.support.small_jobs import JobFactory, train_on_ranks
from tests.worker.test_edge_tasks import LINKS, config_of
from tests.worker.test_training_tables import of, write

pytestmark = pytest.mark.long

NODES = [3, 500, 77, 901]


def serve(run: Run, **options: Any) -> Any:
    """Serve a run of two ranks; as a command does, record the partition of one graph's tables."""
    config = Config.model_validate(run.config, strict=False)
    if config.graph is not None:
        meta = ensure_partition(config, 2)
        assert meta.manifest is not None
        parts = [part.row for part in meta.manifest.parts]
        write_json(run.path / PARTITION, {"directory": str(meta.directory), "parts": parts})
    (served,) = Served.find(run, **options)
    return (LinkAnswers if served.one.task.of_links else NodeAnswers)(ServedModel(served))


def rows(model: Any, question: AnyQuestion) -> pandas.DataFrame:
    (answer,) = model.answer([question])
    assert not isinstance(answer, InputError), answer
    return pandas.DataFrame(answer)


def error(model: Any, question: AnyQuestion) -> str:
    (answer,) = model.answer([question])
    assert isinstance(answer, RequestError)
    return str(answer)


@pytest.mark.parametrize("fanout", [None, (3, 2)])
@pytest.mark.parametrize("kind", ["gcn", "sage", "gat"])
def test_answers_are_predictions(
    kind: str, fanout: tuple[int, ...] | None, make_job: JobFactory
) -> None:
    config = make_job(model={"kind": kind}, train={"epochs": 1})
    run = train_on_ranks(config)
    model = serve(run)
    found = rows(model, NodeQuestion(NODES, fanout, scores=True))
    assert list(found) == ["node", "prediction", "probability", "scores"]
    assert found["node"].tolist() == NODES  # as they were asked for
    known = ask(run, config, 2, wanted=pa.array(NODES), fanout=fanout).to_pandas()
    known = known.set_index("node").loc[NODES]
    assert np.abs(np.stack(found["scores"]) - np.stack(known["scores"])).max() < 1e-6
    assert found["prediction"].tolist() == known["prediction"].tolist()
    if fanout is not None:
        exactly = ask(run, config, 1, wanted=pa.array(NODES), fanout=fanout).to_pandas()
        found = rows(model, NodeQuestion(sorted(NODES), fanout, scores=True))
        assert np.stack(found["scores"]).tolist() == np.stack(exactly["scores"]).tolist()


def test_questions_in_one_batch_are_answered_as_alone(make_job: JobFactory) -> None:
    model = serve(train_on_ranks(make_job(train={"epochs": 1})))
    fine: list[AnyQuestion] = [
        NodeQuestion([5, 5, 9]),
        NodeQuestion([9, 12], (3, 2)),
        NodeQuestion([700, 5], scores=True),
        NodeQuestion([44], (3, 2)),
    ]
    alone = [rows(model, one) for one in fine]
    assert alone[0]["node"].tolist() == [5, 5, 9]
    pandas.testing.assert_frame_equal(
        alone[0][1:].reset_index(drop=True), rows(model, NodeQuestion([5, 9])), atol=1e-6
    )
    wrong = [
        NodeQuestion([1, 10**7, 2]),
        NodeQuestion(["a"]),
        NodeQuestion([1], (3,)),
        NodeQuestion([1], at=5),
    ]
    answers = model.answer([wrong[0], *fine, *wrong[1:]])
    for answer, known in zip(answers[1:5], alone):
        assert isinstance(answer, list)
        pandas.testing.assert_frame_equal(pandas.DataFrame(answer), known, atol=1e-6)
    said = [answers[0], *answers[5:]]
    assert all(isinstance(one, RequestError) for one in said)
    for one, part in zip(
        said,
        ("no 10000000 among the 2,000", "no 'a' among", "2 layers", "without times"),
    ):
        assert part in str(one)
    assert said[0].where == "ids[1]"


def test_ids_and_classes_are_the_tables_words(tmp_path: Path) -> None:
    run = train_on_ranks(shop(tmp_path, train={"epochs": 8, "lr": 0.05}))
    model = serve(run)
    items = pandas.read_csv(tmp_path / "items.csv")
    found = rows(model, NodeQuestion(items["name"].tolist()))
    assert found["node"].tolist() == items["name"].tolist()
    assert (found["prediction"] == items["kind"]).mean() > 0.9
    assert model.schema()["classes"] == ["no", "yes"]
    assert "there is no 'item 1,'" in error(model, NodeQuestion(["item 1", "item 1,"]))
    assert "there is no 1 " in error(model, NodeQuestion([1]))


@pytest.mark.dgl
@pytest.mark.parametrize("strategy", ["uniform", "latest"])
def test_times(strategy: str, tmp_path: Path) -> None:
    """A request has a time, or the service, or else each node its own."""
    run, config = trained(tmp_path, "node_classification", time={"strategy": strategy})
    nodes = [*range(40)]
    model = serve(run)
    for at in (AT, None):
        known = ask(run, config, 2, wanted=pa.array(nodes), at=at).to_pandas()
        for served, asked in ((model, at), (serve(run, at=at), None)):
            found = rows(served, NodeQuestion(nodes, at=asked, scores=True))
            assert np.abs(np.stack(found["scores"]) - np.stack(known["scores"])).max() < 1e-5
    one, other = (NodeQuestion([7], at=at, scores=True) for at in (AT, 90))
    both = model.answer([one, other])  # the same node at two times
    then, now = (pandas.DataFrame(answer)["scores"][0] for answer in both)
    assert then == pytest.approx(rows(model, one)["scores"][0], abs=1e-6)
    assert now == pytest.approx(rows(model, other)["scores"][0], abs=1e-6)
    assert then != pytest.approx(now, abs=1e-3)
    assert "a time, such as 2026-01-31" in error(model, NodeQuestion([7], at="tomorrow"))
    assert "at" in error(model, NodeQuestion([7], at="2026-01-31"))  # times here are no dates


def test_rows_of_training_tables(tmp_path: Path) -> None:
    """An entity at a time gets what a row of that entity and time does."""
    write(tmp_path)
    config = of(tmp_path, "rows", train={"epochs": 1})
    run = train_on_ranks(config)
    known = ask(run, config, 2, split="test").to_pandas().head(20)
    model = serve(run)
    for _, row in known.iterrows():
        name = f"c{row['node']:02}"  # in the order of the table
        found = rows(model, NodeQuestion([name], at=int(row["time"]), scores=True))
        assert found["scores"][0] == pytest.approx(row["scores"], abs=1e-5)


def test_links(tmp_path: Path) -> None:
    """Lists are those of `recommend`, and pairs have the same scores."""
    given: dict[str, Any] = {"model": {"hidden": 8, "decoder": "distmult"}, "train": {"epochs": 1}}
    config = config_of(tmp_path, "links", task=LINKS, **given)
    run = train_on_ranks(config)
    model = serve(run)
    model._plane.inference._layer_by_layer = Mock(side_effect=AssertionError("computed again"))
    assert model.schema()["relations"] == ["0", "1", "2", "3"]
    for relation in ("0", "3"):
        for known in (True, False):
            every = lists(run, config, 2, TopLists(5, known, relation=relation))
            want = every[every["source"].isin([2, 9])].reset_index(drop=True)
            found = rows(model, ListQuestion([2, 9], 5, relation, "exclude" if known else "keep"))
            pandas.testing.assert_frame_equal(found, want, atol=1e-5, check_dtype=False)
        pairs = [(int(row["source"]), int(row["target"])) for _, row in want.iterrows()]
        scores = rows(model, PairQuestion(pairs, relation))
        assert scores["score"].tolist() == pytest.approx(want["score"].tolist(), abs=1e-5)
    assert "several relations" in error(model, PairQuestion([(2, 9)]))
    assert "no relation '4'" in error(model, ListQuestion([2], 3, "4"))
    far = error(model, PairQuestion([(2, 3), (2, 10**6)], "0"))
    assert "there is no 1000000" in far


def test_one_of_several_tasks(tmp_path: Path) -> None:
    tasks = {
        "likes": LINKS,
        "price": {"kind": "node_regression", "ntype": "thing", "target": "price"},
    }
    given: dict[str, Any] = {"model": {"hidden": 8, "decoder": "dot"}, "train": {"epochs": 1}}
    config = config_of(tmp_path, "several", task=None, tasks=tasks, **given)
    run = train_on_ranks(config)
    known = ask(run, config, 1, task="price", wanted=pa.array([1, 4]), scores=False).to_pandas()
    found = rows(serve(run, task="price"), NodeQuestion([1, 4]))
    assert found["prediction"].tolist() == pytest.approx(known["prediction"].tolist(), abs=1e-5)
    want = lists(run, config, 1, TopLists(5), task="likes")
    found = rows(serve(run, task="likes"), ListQuestion([3], 5))
    want = want[want["source"] == 3].reset_index(drop=True)
    pandas.testing.assert_frame_equal(found, want, atol=1e-5, check_dtype=False)

    replica = ModelReplica(None, None)
    replica._loaded = loaded = _load({"run": run})
    assert set(replica.schema()["tasks"]) == {"likes", "price"}
    asked = (NodeQuestion([4]), ListQuestion([3], 5), NodeQuestion([1]))
    answers = _answers([(_model(loaded.models, one), loaded, one) for one in asked], [])
    assert loaded.name == "several"
    expected = known["prediction"].tolist()
    (four,), listed, (one,) = answers
    assert [one["prediction"], four["prediction"]] == pytest.approx(expected, abs=1e-5)
    pandas.testing.assert_frame_equal(pandas.DataFrame(listed), want, atol=1e-5, check_dtype=False)
    with pytest.raises(RequestError, match="no task 'price' answers this"):
        _model(loaded.models, ListQuestion([3], task="price"))
    assert _kinds(run, None) == {"link", "node"}
    assert _kinds(run, "likes") == {"link"}


def test_your_own_task_has_the_routes_of_the_kind_that_it_is_like() -> None:
    own: dict[str, Any] = {"kind": "steps:Own"}
    assert _kinds(Mock(Run, config={"task": own}), None) == {"node"}
    tasks = {"a": {**own, "like": "link_prediction"}, "b": {"kind": "graph_regression"}}
    assert _kinds(Mock(Run, config={"tasks": tasks}), None) == {"link", "graph"}
    assert _kinds(Mock(Run, config={"tasks": tasks}), "a") == {"link"}


@pytest.mark.parametrize("several", [False, True])
def test_which_task_answers(several: bool) -> None:
    first, other = Mock(NodeAnswers), Mock(NodeAnswers)
    models = {"a": first, "b": other} if several else {"": first}
    with pytest.raises(RequestError) as raised:
        _model(models, NodeQuestion([1], task="c"))
    assert raised.value.remedy == ("name one of a, b" if several else "leave it out")
    if several:
        assert _model(models, NodeQuestion([1], task="b")) is other
        with pytest.raises(RequestError, match="several tasks could answer"):
            _model(models, NodeQuestion([1]))
    else:
        assert _model(models, NodeQuestion([1])) is first


@given(
    st.one_of(st.sets(st.text()), st.sets(st.integers(-(2**62), 2**62))).flatmap(
        lambda names: st.tuples(st.permutations(sorted(names)), st.randoms())
    ),
    st.lists(st.one_of(st.text(), st.integers())),
)
def test_ids_are_found(drawn: Any, others: list[Any]) -> None:
    names, random = drawn
    original = np.array(random.sample(range(len(names)), len(names)), np.int64)
    kind = pa.int64() if names and isinstance(names[0], int) else pa.large_string()
    ids = NodeIds(pa.array(names, kind), original)
    found = ids.positions(names, "ids")
    assert [names[original[position]] for position in found] == [*names]
    assert ids.names(np.arange(len(names))) == [*names]
    for other in set(others) - set(names):
        with pytest.raises(RequestError, match="there is no"):
            ids.positions([other], "ids")
