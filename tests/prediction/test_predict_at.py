"""A model asked at a time: whatever comes after it changes nothing, and what cannot be is refused
before anything starts."""

from __future__ import annotations

from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import yaml

from raygnn import embed
from raygnn.config.schema import Config
from raygnn.errors import DataError, InputError
from raygnn.graph.dgl import dgl
from raygnn.prediction.request import Asked
from raygnn.prediction.request import ask as plan
from raygnn.preflight.data_checks import times_usable
from raygnn.preflight.partition_facts import partition_facts
from raygnn.runs.run import Run
from tests.prediction.test_new_data import asked
from tests.prediction.test_predict import ask
from tests.support.commands import Command
from tests.support.facts import make_job
from tests.support.graphs import ensure_partition
from tests.support.small_jobs import job
from tests.worker.test_events import END, events, run

pytestmark = pytest.mark.long

AT = 703  # which nodes and edges are at
VALUES = {"link_prediction": "score"}


def trained(place: Path, kind: str, **more: Any) -> tuple[Run, Config]:
    events(place / "graph.dgl")
    made = run(place, place / "graph.dgl", kind, train={"epochs": 1}, **more)
    return made, Config.model_validate(made.config, strict=False)


def values(frame: pandas.DataFrame, kind: str) -> np.ndarray:
    if kind in VALUES:
        return frame[VALUES[kind]].to_numpy()
    return np.stack(frame["scores"].tolist())


@pytest.mark.dgl
@pytest.mark.parametrize(
    ("strategy", "kind"),
    [("uniform", "node_classification"), ("latest", "edge_classification"),
     ("latest", "link_prediction")],
)  # fmt: skip
def test_later_events_do_not_change_predictions(strategy: str, kind: str, tmp_path: Path) -> None:
    """The same holds for any number of workers; events at that very time count as without --at."""
    made, config = trained(tmp_path, kind, time={"strategy": strategy})
    frames = [ask(made, config, workers, at=AT).to_pandas() for workers in (1, 2)]
    known = values(frames[0], kind)
    assert values(frames[1], kind) == pytest.approx(known, abs=1e-4)

    events(tmp_path / "other.dgl", changed_from=AT)
    other = asked(made, f"graph.path={tmp_path / 'other.dgl'}")
    later = ask(made, other.config, 2, at=AT, sizes=other.weights.sizes).to_pandas()
    (graph,), _ = dgl().load_graphs(str(tmp_path / "graph.dgl"))
    of_nodes = kind == "node_classification"
    times = (graph.ndata["when"] if of_nodes else graph.edata["at"]).numpy()
    same = np.ones(len(times), bool) if of_nodes else times < AT  # other edges end elsewhere
    assert values(later, kind)[same] == pytest.approx(known[same], abs=1e-4)

    whole = values(ask(made, config, 2, at=END).to_pandas(), kind)
    assert np.abs(whole - known).max() > 1e-3
    now, apart = times == AT, values(ask(made, config, 2).to_pandas(), kind)
    assert now.any()
    assert apart[now] == pytest.approx(known[now], abs=1e-4)


@pytest.mark.dgl
def test_embeddings_at_a_time(tmp_path: Path) -> None:
    made, config = trained(tmp_path, "link_prediction")
    rows = [
        np.stack(ask(made, config, 2, embeddings=True, at=at).to_pandas()["embedding"].tolist())
        for at in (AT, END)
    ]
    assert rows[0].shape == rows[1].shape
    assert np.abs(rows[0] - rows[1]).max() > 1e-3
    with pytest.raises(InputError, match="embeddings of nodes depend on the time") as error:
        embed(made, out=tmp_path / "rows.parquet")
    assert "--at 2026-01-31" in str(error.value)


def at_time(made: Run, at: Any) -> Asked:
    return plan(made, display=False, at=at)


@pytest.mark.dgl
def test_numbers_and_dates(tmp_path: Path) -> None:
    made, config = trained(tmp_path, "node_classification")
    for given in (AT, str(AT), f" {AT} "):
        assert at_time(made, given).at == AT
        assert at_time(made, given).config.seed_time is None
    assert at_time(made, -AT).at == at_time(made, str(-AT)).at == -AT
    assert at_time(made, date(2026, 1, 31)).at == at_time(made, "2026-01-31").at
    with pytest.raises(InputError, match=r"--at soon: expected a time, such as 2026-01-31"):
        at_time(made, "soon")
    # these are no points in time
    for at, message in (("2026-01-31", "the latest time is 9"), (1_700_000_000, "times are in di")):
        with pytest.raises((DataError, RuntimeError), match=f"--at {at}: {message}"):
            ask(made, config, 1, at=at)


@pytest.mark.dgl
def test_new_data_that_do_not_say_when(tmp_path: Path) -> None:
    """Data without times are refused before anything starts, and accepted with `--at`."""
    made, config = trained(tmp_path, "node_classification")
    (graph,), _ = dgl().load_graphs(str(tmp_path / "graph.dgl"))
    del graph.ndata["when"]
    dgl().save_graphs(str(tmp_path / "new.dgl"), [graph])
    new = f"graph.path={tmp_path / 'new.dgl'}"
    found = asked(made, new)
    facts = partition_facts(found.config, ensure_partition(found.config, 2))
    checked = make_job(found.config, partition=facts)
    (finding,) = times_usable(checked)
    assert "'when' (sampling.time.seeds)" in finding.what
    assert "--at" in finding.remedy
    at = plan(made, overrides=[new], display=False, new_data=True, at=AT)
    assert not list(times_usable(replace(checked, config=at.config)))
    frame = ask(made, at.config, 2, sizes=at.weights.sizes, at=AT).to_pandas()
    known = ask(made, config, 2, at=AT).to_pandas()
    assert values(frame, "") == pytest.approx(values(known, ""), abs=1e-4)
    assert frame["split"].isna().all()
    assert known["split"].notna().all()


def shop(place: Path) -> None:
    """Tables of users who buy things, at points in time of the first 90 days of 2026, with a job
    of a model that tells from these which class a user is of when asked."""
    rng, users, days = np.random.default_rng(0), 60, 90
    start = pandas.Timestamp("2026-01-01")

    def some(count: int) -> pandas.DatetimeIndex:
        return start + pandas.to_timedelta(rng.integers(0, days * 86400, count), unit="s")

    who = pandas.DataFrame({"user": [f"u{i}" for i in range(users)], "when": some(users)})
    who["age"], who["label"] = rng.normal(size=users), rng.integers(0, 2, users)
    who.to_csv(place / "users.csv", index=False)
    pandas.DataFrame({"sku": range(30), "price": rng.normal(size=30)}).to_csv(
        place / "items.csv", index=False
    )
    bought = pandas.DataFrame({"user": rng.choice(who["user"], 900), "at": some(900)})
    bought["sku"], bought["amount"] = rng.integers(0, 30, 900), rng.normal(size=900)
    bought.to_csv(place / "bought.csv", index=False)
    bought[bought["at"] < "2026-01-31"].to_csv(place / "early.csv", index=False)
    edges = {"source": "user", "target": "sku", "time": "at", "reverse": "bought_by"}
    for name in ("bought", "early"):
        description = {
            "nodes": {
                "user": {
                    **{"files": "users.csv", "id": "user", "label": "label", "time": "when"},
                    "features": {"feat": "age"},
                },
                "item": {"files": "items.csv", "id": "sku", "features": {"feat": "price"}},
            },
            "edges": {
                "user:bought:item": {
                    **edges,
                    "files": f"{name}.csv",
                    "features": {"amount": "amount"},
                }
            },
        }
        (place / f"{name}.yaml").write_text(yaml.safe_dump(description))
    values = job(
        place / "runs",
        graph={"format": "tables", "path": "bought.yaml"},
        task={"ntype": "user", "split": {"by": "time", "val": "2026-03-01", "test": "2026-03-15"}},
        model={"edge_features": "amount", "time_encoding": 8},
        sampling={"batch_size": 16, "time": {"edges": "time", "seeds": "time", "window": "60d"}},
    )
    values["graph"] = {"format": "tables", "path": "bought.yaml"}
    (place / "job.yaml").write_text(yaml.safe_dump(values))


@pytest.mark.system
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("no_ray")
def test_the_commands(tmp_path: Path) -> None:
    """`raygnn train`, then `predict --at`: what comes later, with dates in tables, is not seen."""
    shop(tmp_path)

    def run(*command: str, code: int = 0) -> str:
        process = Command([*command], tmp_path)
        status, out, err = process.finish(200)
        assert status == code, out + err
        assert "Traceback" not in out + err
        assert process.left_behind() == []
        return out + err

    said = run("train", "job.yaml")
    assert "test/accuracy" in said
    at, new = ["--at", "2026-01-31"], ["--new-data", "--set", "graph.path=early.yaml"]
    run("predict", "test", "--scores", "--out", "at.parquet", *at)
    run("predict", "test", "--scores", "--out", "early.parquet", *at, *new)
    run("predict", "test", "--scores", "--out", "own.parquet", "--set", "cluster.workers=1")
    known, early, own = (
        pandas.read_parquet(tmp_path / f"{name}.parquet") for name in ("at", "early", "own")
    )
    assert known["node"].tolist() == [f"u{i}" for i in range(60)] == early["node"].tolist()
    assert values(early, "") == pytest.approx(values(known, ""), abs=1e-4)
    assert np.abs(values(own, "") - values(known, "")).max() > 1e-3
    assert own["split"].value_counts().sum() == 60
    said = run("predict", "test", "--out", "no.parquet", "--at", "soon", code=2)
    assert "expected a time, such as 2026-01-31" in said
    assert "at --at soon" in said
    assert not (tmp_path / "no.parquet").exists()
    assert not (tmp_path / "runs" / ".predicting").exists()
