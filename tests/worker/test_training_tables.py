"""Training tables: rows of an entity, a time and a target as seeds, any number for a node."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import yaml

import raygnn
from raygnn.checkpoint import weights
from raygnn.config.load import load_config
from raygnn.config.schema import Config
from raygnn.driver.inputs import PartitionInput
from raygnn.driver.ray_cluster import RayCluster
from raygnn.errors import InputError
from raygnn.graph import negative_lists
from raygnn.graph.partition.make import Missing, find_partition
from raygnn.graph.sources import load_graph
from raygnn.prediction.merge import _put_beside, check_names
from raygnn.prediction.request import ask as plan
from raygnn.prediction.request import of_rows
from raygnn.runs.display import NullDisplay
from raygnn.runs.run import Run
from raygnn.runs.run_directory import PARTITION
from raygnn.sampling.exchange import Exchange
from raygnn.util.files import write_json
from raygnn.worker.comm.process_groups import Ranks
from raygnn.worker.job import Job
from raygnn.worker.planes import open_plane
from tests.driver.test_resume import stopped
from tests.prediction.test_predict import ask
from tests.support.graphs import ensure_partition
from tests.support.ranks import run_ranks
from tests.support.small_jobs import job, job_of, losses, train_on_ranks

pytestmark = pytest.mark.long

CUSTOMERS, PURCHASES, ROWS = 60, 1500, 600
FIRST, DAYS = np.datetime64("2024-01-01"), 400
VAL, TEST = np.datetime64("2024-09-07"), np.datetime64("2024-11-16")  # first days of these splits
SPREAD = ((1, True), (2, True), (3, False))

DESCRIPTION = {
    "nodes": {
        "customer": {"files": "customers.csv", "id": "name", "features": {"feat": "age"}},
        "purchase": {
            "files": "purchases.csv",
            "keys": {"customer": "customer"},
            "time": "date",
            "features": {"feat": "amount"},
        },
    }
}


def write(place: Path, *, later: int = DAYS + 1, seed: int = 1) -> pd.DataFrame:
    """Write a company's tables and return its questions: was the mean of a customer's last three
    purchases, that day's included, above 0?

    Args:
        later: day from which on amounts are other ones.
        seed: of these.
    """
    place.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    names = np.array([f"c{n:02}" for n in range(CUSTOMERS)])
    pd.DataFrame({"name": names, "age": random.normal(size=CUSTOMERS)}).to_csv(
        place / "customers.csv", index=False
    )
    day = np.sort(random.integers(0, DAYS, PURCHASES))
    amounts = random.normal(size=PURCHASES)
    changed = np.random.default_rng(seed).normal(size=PURCHASES) + 3
    bought = pd.DataFrame(
        {
            "customer": random.choice(names, PURCHASES),
            "date": FIRST + day,
            "amount": np.where(day >= later, changed, amounts),
            "day": day,
        }
    )
    bought.drop(columns="day").to_csv(place / "purchases.csv", index=False)
    (place / "tables.yaml").write_text(yaml.safe_dump(DESCRIPTION, sort_keys=False))
    asked_at = np.sort(random.choice(np.flatnonzero(day >= 20), ROWS))  # days of purchases
    when = day[asked_at]
    rows = pd.DataFrame({"customer": bought.customer[asked_at].array, "date": FIRST + when})
    true = bought.assign(amount=amounts)
    last = [
        true[(true.customer == customer) & (true.day <= day)].amount.tail(3).mean()
        for customer, day in zip(rows.customer, when, strict=True)
    ]
    rows["mean"] = np.nan_to_num(np.array(last))
    rows["grew"] = np.where(rows["mean"] > 0, "yes", "no")
    split = np.searchsorted(np.array([VAL, TEST]), rows.date.to_numpy(), side="right")
    rows["fold"] = np.array(["train", "val", "test"])[split]
    rows.to_csv(place / "rows.csv", index=False)
    for fold, part in rows.groupby("fold"):
        part.to_csv(place / f"{fold}.csv", index=False)
    return rows


def files(place: Path) -> dict[str, str]:
    return {split: str(place / f"{split}.csv") for split in ("train", "val", "test")}


def of(place: Path, name: str, workers: int = 2, **sections: Any) -> Config:
    """Return the job of a table with a file for each split."""
    table = {"files": files(place), "entity": "customer", "time": "date", "target": "grew"}
    task = {"kind": "node_classification", "ntype": "customer", **sections.pop("task", {})}
    given = {**table, **task.pop("table", {})}
    task["table"] = {key: value for key, value in given.items() if value is not None}
    time = {"edges": "time", "strategy": "latest", **sections.pop("time", {})}
    values = job(
        place / "runs",
        name=name,
        graph={"format": "tables", "path": str(place / "tables.yaml")},
        partition={"method": "random"},
        task=task,
        model={
            "kind": "sage",
            "hidden": 16,
            "layers": 2,
            "dropout": 0.0,
            **sections.pop("model", {}),
        },
        sampling={"fanout": [3, 2], "batch_size": 60 // workers, "time": time},
        cluster={"workers": workers},
        **sections,
    )
    values["graph"] = {"format": "tables", "path": str(place / "tables.yaml")}
    return load_config(values)


def asked(run: Run, config: Config, workers: int = 2, **more: Any) -> Any:
    found = weights.find(run.path / "checkpoints")
    return ask(run, config.asking(found.words), workers, **more).to_pandas()


def test_any_ranks_train_the_same(tmp_path: Path) -> None:
    """A batch has a node at several times, and at one time twice."""
    rows = write(tmp_path)
    again = rows[rows.fold == "train"].head(40)
    pd.concat([again, rows[rows.fold == "train"]]).to_csv(tmp_path / "train.csv", index=False)
    found = []
    for workers, replicated in SPREAD:
        config = of(tmp_path, f"{workers}-{replicated}", workers, train={"epochs": 2})
        run = train_on_ranks(config, replicated=replicated)
        found.append((run.metrics["train/loss"].dropna().to_numpy(), run.summary["metrics"]))
    steps, metrics = found[0]
    assert len(steps) == 2 * -(-(len(again) + int((rows.fold == "train").sum())) // 60)
    for other, others in found[1:]:
        assert other == pytest.approx(steps, abs=1e-3)
        assert others == pytest.approx(metrics, abs=5e-3)


def test_what_only_the_time_of_a_row_tells_is_learned(tmp_path: Path) -> None:
    """One node has both answers, at different times; predictions are those of the evaluation."""
    rows = write(tmp_path)
    config = of(tmp_path, "learned", train={"epochs": 20, "lr": 0.02})
    run = train_on_ranks(config)
    metrics = run.summary["metrics"]
    assert metrics["test/accuracy"] > 0.85
    frame = asked(run, config, split="test")
    test = rows[rows.fold == "test"]
    assert frame["row"].tolist() == list(range(len(rows) - len(test), len(rows)))
    assert set(frame["split"]) == {"test"}
    assert (test.grew == "yes").tolist() == (frame["label"] == 1).tolist()
    right = (frame["prediction"] == frame["label"]).mean()
    assert right == pytest.approx(metrics["test/accuracy"], abs=1e-6)
    again = ask(run, config.asking(), 3, split="test", rows=False, scores=False)
    assert again["test/accuracy"] == pytest.approx(metrics["test/accuracy"], abs=1e-6)


@pytest.mark.parametrize("strict", [False, True])
def test_a_row_sees_what_was_known_at_its_time(tmp_path: Path, strict: bool) -> None:
    """What comes later changes nothing; what is of the same day does, unless time is strict."""
    rows = write(tmp_path)
    config = of(tmp_path, "one", time={"strict": strict}, train={"epochs": 1})
    run = train_on_ranks(config)
    before = asked(run, config)
    day = (rows.date.iloc[ROWS // 2] - FIRST).days
    write(tmp_path / "other", later=day)
    changed = of(tmp_path / "other", "other", time={"strict": strict}, train={"epochs": 1})
    sizes = weights.find(run.path / "checkpoints").sizes  # these are other data
    after = asked(run, changed, sizes=sizes)
    first = np.datetime64(FIRST + day, "us").astype(int)
    same = np.array([*map(np.array_equal, before["scores"], after["scores"])])
    times = before["time"].to_numpy()
    assert same[times < first].all()
    on_the_day = times == first
    assert on_the_day.any()
    assert not same[times > first].all()
    assert same[on_the_day].all() == strict


def aged(place: Path, rows: pd.DataFrame, customers: pd.DataFrame, **sections: Any) -> Config:
    """Return a job that encodes columns, and the times since customers' date ``joined``."""
    told = copy.deepcopy(DESCRIPTION)
    told["nodes"]["customer"]["features"]["joined"] = {"column": "joined", "since": "seed"}
    if not place.exists():
        place.mkdir()
        (place / "purchases.csv").write_bytes((place.parent / "purchases.csv").read_bytes())
    customers.to_csv(place / "customers.csv", index=False)
    (place / "tables.yaml").write_text(yaml.safe_dump(told, sort_keys=False))
    for fold, part in rows.groupby("fold"):
        part.to_csv(place / f"{fold}.csv", index=False)
    model = {"columns": "learned", "ages": {"joined": 8, "time": 4}}
    return of(place, sections.pop("name", "aged"), model=model, **sections)


def test_times_relative_to_the_seeds(tmp_path: Path) -> None:
    """Only the time from a customer's date to the row's says the class. Dates after a row's, and
    missing ones, say nothing to it: whatever they are, its prediction is the same."""
    rows = write(tmp_path)
    customers = pd.read_csv(tmp_path / "customers.csv")
    joined = np.random.default_rng(3).integers(-100, DAYS, CUSTOMERS)
    ago = (rows.date - FIRST).dt.days - rows.customer.map(dict(zip(customers.name, joined)))
    rows["grew"] = np.where((ago > 0) & (ago < 60), "yes", "no")
    dates = FIRST + joined
    config = aged(tmp_path, rows, customers.assign(joined=dates), train={"epochs": 40, "lr": 0.02})
    run = train_on_ranks(config)
    metrics = run.summary["metrics"]
    assert metrics["test/accuracy"] > 0.9
    again = ask(run, config.asking(), 3, split="test", rows=False, scores=False)
    assert again["test/accuracy"] == pytest.approx(metrics["test/accuracy"], abs=1e-6)
    before = asked(run, config)
    day = 200
    other = np.where(joined > day, np.datetime64("2090-01-01"), dates)
    other[(joined > day) & (joined % 2 == 0)] = np.datetime64("NaT")
    sizes = weights.find(run.path / "checkpoints").sizes
    after = asked(run, aged(tmp_path / "other", rows, customers.assign(joined=other)), sizes=sizes)
    same = np.array([*map(np.array_equal, before["scores"], after["scores"])])
    known = before["time"].to_numpy() < np.datetime64(FIRST + day, "us").astype(int)
    assert same[known].all()
    assert not same[~known].all()


def test_other_ways_of_splitting(tmp_path: Path) -> None:
    """A column, or the time of rows, says the same as files of each split."""
    write(tmp_path)
    whole = {"files": str(tmp_path / "rows.csv")}
    by_time = {"by": "time", "val": str(VAL), "test": str(TEST)}
    tasks: dict[str, dict[str, Any]] = {
        "files": {},
        "column": {"table": {**whole, "split": "fold"}},
        "time": {"table": {**whole, "split": None}, "split": by_time},
    }
    found = [
        train_on_ranks(of(tmp_path, name, task=task, train={"epochs": 1})).summary["metrics"]
        for name, task in tasks.items()
    ]
    assert found[0] == found[1] == found[2]


def test_numbers_and_labels(tmp_path: Path) -> None:
    rows = write(tmp_path)
    regression = of(
        tmp_path,
        "numbers",
        task={"kind": "node_regression", "table": {"target": "mean"}},
        train={"epochs": 10, "lr": 0.02},
    )
    run = train_on_ranks(regression)
    spread = rows[rows.fold == "test"]["mean"].std()
    assert run.summary["metrics"]["test/rmse"] < 0.7 * spread
    frame = asked(run, regression, split="test", scores=False)
    assert frame["label"].to_numpy() == pytest.approx(rows[rows.fold == "test"]["mean"], abs=1e-6)

    rows["up"], rows["down"] = (rows["mean"] > 0.3) * 1.0, (rows["mean"] < -0.3) * 1
    rows.loc[rows.index % 7 == 0, "up"] = np.nan
    for fold, part in rows.groupby("fold"):
        part.to_csv(tmp_path / f"{fold}.csv", index=False)
    labels = of(
        tmp_path,
        "labels",
        task={"labels": "multi", "table": {"target": ["up", "down"]}},
        train={"epochs": 10, "lr": 0.02},
    )
    run = train_on_ranks(labels)
    assert run.summary["metrics"]["test/roc_auc"] > 0.8


def test_several_tables_on_one_graph(tmp_path: Path) -> None:
    write(tmp_path)
    table = {"files": files(tmp_path), "entity": "customer", "time": "date"}
    one = {"ntype": "customer"}
    tasks = {
        "grew": {"kind": "node_classification", "table": {**table, "target": "grew"}, **one},
        "mean": {"kind": "node_regression", "table": {**table, "target": "mean"}, **one},
    }
    found = []
    for workers in (1, 2):
        config = of(tmp_path, f"several-{workers}", workers, train={"epochs": 2})
        values = {**config.to_dict(), "tasks": tasks}
        del values["task"]
        run = train_on_ranks(load_config(values))
        found.append(run.summary["metrics"])
        frame = asked(run, load_config(values), task="mean", scores=False)
        assert len(frame) == ROWS
    assert found[1] == pytest.approx(found[0], abs=5e-3)
    assert {"test/grew/accuracy", "test/mean/mae"} <= found[0].keys()


def test_only_the_tables_of_a_request_are_read(tmp_path: Path) -> None:
    """A prediction for one of several tasks reads its table, and embeddings need none."""
    write(tmp_path)
    gone = {split: tmp_path / f"gone-{split}.csv" for split in files(tmp_path)}
    for split, file in files(tmp_path).items():
        gone[split].write_bytes(Path(file).read_bytes())
    table = {"entity": "customer", "time": "date"}
    one = {"ntype": "customer"}
    grew = {**table, "target": "grew", "files": {split: str(file) for split, file in gone.items()}}
    mean = {**table, "target": "mean", "files": files(tmp_path)}
    values = of(tmp_path, "needed", 1, train={"epochs": 1}).to_dict()
    del values["task"]
    values["tasks"] = {
        "grew": {"kind": "node_classification", "table": grew, **one},
        "mean": {"kind": "node_regression", "table": mean, **one},
    }
    config = load_config(values)
    run = train_on_ranks(config)
    for file in gone.values():
        file.unlink()
    found = weights.find(run.path / "checkpoints")
    planned = plan(run, display=False, task="mean", one=True).config
    assert planned.reads_rows("mean")
    assert not planned.reads_rows("grew")
    assert not plan(run, display=False, tables=False).config.reads_rows("mean")
    asking = config.asking(found.words, rows_of=("mean",))
    assert len(ask(run, asking, 1, task="mean", scores=False)) == ROWS
    asking = config.asking(found.words, rows_of=())
    moment = {"at": int(np.datetime64("2024-06-01", "us").astype(np.int64)), "embeddings": True}
    assert len(ask(run, asking, 1, ntype="customer", **moment)) == CUSTOMERS


def test_a_query_of_training_rows_is_asked_again(tmp_path: Path) -> None:
    """The partition alone has no tables to query, so predictions read the graph's description."""
    write(tmp_path)
    table = {"files": None, "sql": "select * from 'rows.csv'", "split": "fold"}
    config = of(tmp_path, "queried", train={"epochs": 1}, task={"table": table})
    run = train_on_ranks(config)
    place = ensure_partition(config, 2).directory
    write_json(run.path / PARTITION, {"directory": str(place), "parts": [{}] * 2})
    planned = plan(run, display=False, one=True).config
    assert len(asked(run, planned, scores=False)) == ROWS
    assert find_partition(planned, 2).directory == place


def test_a_resume_with_encoders_is_exact(tmp_path: Path) -> None:
    rows = write(tmp_path)
    customers = pd.read_csv(tmp_path / "customers.csv").assign(joined=FIRST)
    more = {"fault": {"checkpoint_every": 1, "keep": 40}, "train": {"epochs": 2}}
    config = aged(tmp_path, rows, customers, name="whole", **more)
    whole = train_on_ranks(config)
    part = stopped(whole, aged(tmp_path, rows, customers, name="part", **more), 3)
    resumed = train_on_ranks(part, resume=True)
    assert losses(resumed)[-3:].tolist() == losses(whole)[-3:].tolist()
    assert resumed.summary["metrics"] == whole.summary["metrics"]


def test_a_resume_is_exact_and_needs_the_same_rows(tmp_path: Path) -> None:
    write(tmp_path)
    whole = train_on_ranks(of(tmp_path, "whole", train={"epochs": 2}))
    half = of(tmp_path, "half", train={"epochs": 1})
    train_on_ranks(half)
    rest = of(tmp_path, "half", train={"epochs": 2})
    resumed = train_on_ranks(rest, resume=True)
    assert resumed.metrics["train/loss"].equals(whole.metrics["train/loss"])
    moved = {**files(tmp_path), "train": str((tmp_path / "train.csv").rename(tmp_path / "a.csv"))}
    longer = {"task": {"table": {"files": moved}}, "train": {"epochs": 3}}
    assert train_on_ranks(of(tmp_path, "half", **longer), resume=True).metrics["epoch"].max() == 2
    with (tmp_path / "a.csv").open("a") as file:
        file.write("c01,2024-02-01,0.5,yes,train\n")
    with pytest.raises(RuntimeError, match=r"other data|not the data"):
        train_on_ranks(of(tmp_path, "half", **{**longer, "train": {"epochs": 4}}), resume=True)


def test_classes_are_those_of_the_training(tmp_path: Path) -> None:
    """Other rows have one of the two classes only, the second one."""
    rows = write(tmp_path)
    config = of(tmp_path, "trained", train={"epochs": 1})
    run = train_on_ranks(config)
    rows[rows.grew == "yes"].head(30).to_csv(tmp_path / "others.csv", index=False)
    frame = asked(run, of_rows(config, tmp_path / "others.csv", "", "all"))
    assert frame["label"].tolist() == [1] * 30
    assert frame["split"].isna().all()
    found = weights.find(run.path / "checkpoints")
    tested = of_rows(config, tmp_path / "others.csv", "", "test").asking(found.words)
    metrics = ask(run, tested, 2, split="test", rows=False)
    assert metrics["test/accuracy"] == pytest.approx((frame["prediction"] == 1).mean())


@pytest.mark.system
def test_rows_of_next_month(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file of predictions has the columns of the rows, and the prediction beside them; ids that
    no node has are refused before anything is written."""
    monkeypatch.chdir(tmp_path)
    rows = write(tmp_path)
    config = of(tmp_path, "trained", workers=1, train={"epochs": 10, "lr": 0.02})
    with RayCluster(config):
        run = raygnn.train(config, display=False)
        month = rows[rows.fold == "test"].sample(50, random_state=0)
        month = month.assign(note="x, y")[["note", "date", "customer", "grew"]]
        month.drop(columns="grew").to_csv("month.csv", index=False)
        made = raygnn.predict(run, rows="month.csv", out="scores.parquet", display=False)
        assert made.rows == len(month)
        frame = pd.read_parquet("scores.parquet")
        assert list(frame) == ["note", "date", "customer", "prediction", "probability"]
        assert frame["customer"].tolist() == month["customer"].tolist()
        right = (frame["prediction"].to_numpy() == month["grew"].to_numpy()).mean()
        assert right > 0.8
        metrics = run.evaluate(rows=month)
        assert metrics["test/accuracy"] == pytest.approx(right)
        with pytest.raises(InputError, match="have no labels"):
            run.evaluate(rows=month.drop(columns="grew"))
        month.assign(customer="nobody").to_csv("bad.csv", index=False)
        with pytest.raises(InputError, match=r"bad\.csv, row 1 .*there is no customer 'nobody'"):
            raygnn.predict(run, rows="bad.csv", out="bad.parquet", display=False)
        assert not Path("bad.parquet").exists()


def test_fewer_entities_than_ranks(tmp_path: Path) -> None:
    """A rank owns no node of the type, and none of the rows."""
    rows = write(tmp_path)
    one = rows[rows.customer == rows.customer[0]]
    described = yaml.safe_load((tmp_path / "tables.yaml").read_text())
    described["nodes"]["customer"]["files"] = "one.csv"
    described["nodes"]["purchase"]["keys"] = {"customer": {"table": "customer", "missing": "drop"}}
    (tmp_path / "tables.yaml").write_text(yaml.safe_dump(described))
    customers = pd.read_csv(tmp_path / "customers.csv")
    customers[customers.name == rows.customer[0]].to_csv(tmp_path / "one.csv", index=False)
    for fold in ("train", "val", "test"):
        one.assign(fold=fold, date="2024-06-01").to_csv(tmp_path / f"{fold}.csv", index=False)
    run = train_on_ranks(of(tmp_path, "few", train={"epochs": 1}))
    assert 0 <= run.summary["metrics"]["test/accuracy"] <= 1


def test_rows_of_three_classes_without_targets(tmp_path: Path) -> None:
    """The model has the classes of the training, whatever the rows have."""
    rows = write(tmp_path)
    for fold, part in rows.groupby("fold"):
        part.assign(grew=np.digitize(part["mean"], [-0.3, 0.3])).to_csv(
            tmp_path / f"{fold}.csv", index=False
        )
    config = of(tmp_path, "three", train={"epochs": 1})
    run = train_on_ranks(config)
    rows[["customer", "date"]].head(9).to_csv(tmp_path / "next.csv", index=False)
    frame = asked(run, of_rows(config, tmp_path / "next.csv", "", "all"))
    assert np.stack(frame["scores"].tolist()).shape == (9, 3)
    assert frame["label"].isna().all()


@pytest.mark.parametrize("strict", [False, True])
def test_the_window_is_that_of_other_seeds(tmp_path: Path, strict: bool) -> None:
    """An edge as old as the window is seen."""
    write(tmp_path)
    config = of(tmp_path, "window", time={"window": "10d", "strict": strict})
    job = job_of(config)
    windows = run_ranks(1, _window, job)
    day = 86_400_000_000
    assert windows == [10 * day + (not strict)]


def _window(exchange: Exchange, job: Job) -> int | None:
    ranks = Ranks.join(job.config, exchange.world, torch.device("cpu"))
    plane: Any = open_plane(job, ranks)
    timing = plane.clock.timing
    return None if timing is None else timing.window


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_predictions_stand_beside_their_rows(kind: str, tmp_path: Path) -> None:
    """Quotes, empty lines and names that differ by case alone stay as they are."""
    given = pd.DataFrame({"who": ["'a", "b'", "c"], "Who": ["x, y", "", "'"], "n": [1, 2, 3]})
    file, merged = tmp_path / f"date=2026.{kind}", tmp_path / "merged.parquet"
    getattr(given, f"to_{kind}")(file, index=False)
    chance = pd.DataFrame({"row": range(3), "probability_0": [0.1, 0.2, 0.3], "label_0": 0})
    chance.to_parquet(merged, index=False)
    check_names(file)
    with (tmp_path / "out").open("wb") as out:
        _put_beside(file, merged, out)
    found = pd.read_parquet(tmp_path / "out")
    assert list(found) == ["who", "Who", "n", "probability_0"]
    assert found["who"].tolist() == given["who"].tolist()
    assert found["n"].astype(int).tolist() == [1, 2, 3]
    assert found["probability_0"].tolist() == [0.1, 0.2, 0.3]
    for other in (chance.head(2), pd.concat([chance, chance])):
        other.to_parquet(merged, index=False)
        with pytest.raises(InputError, match="changed"), (tmp_path / "out").open("wb") as out:
            _put_beside(file, merged, out)


def test_rows_that_cannot_be_predicted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path)
    Path("good.csv").write_text("customer,date\nc01,2024-06-01\n")
    Path("taken.csv").write_text("customer,date,prediction\nc01,2024-06-01,yes\n")
    Path("ids.txt").write_text("c01\n")
    run = train_on_ranks(of(tmp_path, "trained", train={"epochs": 1}))
    cases: list[tuple[dict[str, Any], str]] = [
        ({"rows": "none.csv"}, "there is no such file"),
        ({"rows": "m*.csv"}, "there is no such file"),
        ({"rows": "taken.csv"}, "it has a column 'prediction' already"),
        ({"rows": "good.csv", "split": "test"}, "they are in no split"),
        ({"rows": "good.csv", "ids": "ids.txt"}, "they are in no split"),
        ({"ids": "ids.txt"}, "rows of a training table, which have no ids"),
    ]
    for options, said in cases:
        with pytest.raises(InputError) as refused:
            raygnn.predict(run, out="scores.parquet", display=False, **options)
        assert said in str(refused.value)


def test_a_table_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is read before the partition is made, and not again for the plan."""
    write(tmp_path)
    config, reads = of(tmp_path, "once"), list[Any]()
    found, read = find_partition(config, 2), negative_lists.read_training_rows
    assert isinstance(found, Missing)

    def count(*given: Any) -> Any:
        reads.append(given)
        return read(*given)

    monkeypatch.setattr(negative_lists, "read_training_rows", count)
    given = PartitionInput(found, load_graph(config.graph, needs_masks=False))
    given.check(config)
    made = given.made(NullDisplay())
    assert made.lists(config, "", None)["table"].counts["train"] > 0
    assert len(reads) == 1


def test_rows_need_a_table(tmp_path: Path) -> None:
    run = train_on_ranks(load_config(job(tmp_path, train={"epochs": 1})))
    with pytest.raises(InputError, match="this run has no training table"):
        plan(run, display=False, rows=tmp_path / "rows.csv")
