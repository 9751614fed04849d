"""Predictions of a finished run: exact, in the user's numbering, whole or not there."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
import signal
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

import raygnn
from raygnn.checkpoint import weights
from raygnn.checkpoint.hashed_files import sha256
from raygnn.config.schema import Config
from raygnn.errors import ConfigError, DataError, InputError
from raygnn.graph.sources import load_graph
from raygnn.models.network import Schema
from raygnn.models.registry import build_model
from raygnn.prediction import merge
from raygnn.prediction import request as asking
from raygnn.prediction.worker_side import Predicting
from raygnn.runs.run import Run, run_verb
from raygnn.runs.trust import is_own
from raygnn.sampling.exchange import Exchange
from raygnn.worker.job import ROWS, Job, Request
from raygnn.worker.planes import prediction_rows
from tests.checkpoint.test_saving import mounted
from tests.driver.test_command import Command
from tests.support.graphs import on_whole_graph
from tests.support.ranks import run_ranks
from tests.support.small_jobs import (
    JobFactory,
    _data,
    goals_of,
    lists_of,
    runtime,
    train_on_ranks,
)
from tests.worker.test_graph_tasks import dataset, make

SCHEMA = pa.schema([("id", pa.int64()), ("file", pa.int64())])
MODELS = "tests.support.own_models"


def _predict(exchange: Exchange, job: Job) -> dict[str, Any]:
    return Predicting(job, runtime(exchange)).run()


def ask(run: Run, config: Config, workers: int, *, split: str = "all", **more: Any) -> Any:
    """Run the part of `raygnn.predict` that follows Ray's start, on forked ranks; return its table,
    or the metrics."""
    wanted = {"rows": True, "scores": True, **more}
    found = weights.find(run.path / "checkpoints")
    place = _data(config, 2)
    aside = run.path.parent / ".predicting" / f"{split}-{workers}"
    aside.mkdir(parents=True, exist_ok=True)
    request = Request(found, split, **wanted)
    job = Job(
        config,
        place,
        aside,
        goals_of(config, place),
        False,
        0.0,
        128,
        request=request,
        lists=lists_of(config, place),
    )
    result, *others = run_ranks(workers, _predict, job)
    for other in others:
        np.testing.assert_equal(other, result)  # also where metrics are NaN
    if not request.rows:
        return result["metrics"]
    out = aside / "out.parquet"
    with open(out, "wb") as file:
        task = (config.of(request.task) if request.task else config).task
        key = "node" if request.embeddings and task.of_edges else task.unit
        key = "row" if getattr(task, "table", None) else key
        key = "source" if request.lists else key
        files = sorted((aside / ROWS).iterdir())
        assert merge.merge_files(files, file, key) == result["rows"]
    return pq.read_table(out)


@pytest.mark.parametrize("typed", [False, True])
def test_predictions_equal_those_on_the_whole_graph(
    typed: bool, make_job: JobFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows have the ids of the user's graph, whichever rank owns a node."""
    monkeypatch.setattr(prediction_rows, "_MOST", 100)  # many chunks on each rank
    monkeypatch.setattr(prediction_rows, "_FEWEST", 100)
    monkeypatch.setattr(merge, "_ROWS", 300)
    monkeypatch.setattr(merge, "_FEWEST", 70)
    config = make_job(graph={"typed": typed})
    run = train_on_ranks(config)
    assert config.graph is not None
    data = load_graph(config.graph)
    target = "item" if typed else "_N"
    widths = {t: frame.data["feat"].shape[1] for t, frame in data.nodes.items()}
    model = build_model(config.model, Schema(widths, list(data.edges), 4, target=target))
    model.load_state_dict(torch.load(run.path / "checkpoints" / "selected.pt"))
    shares = on_whole_graph(model, 2, data).softmax(1)

    nodes = data.nodes[target]
    for workers in (1, 2):
        table = ask(run, config, workers)
        columns = ["node", "prediction", "probability", "split", "label", "scores"]
        assert table.column_names == columns
        frame = table.to_pandas()
        assert frame["node"].tolist() == list(range(nodes.num))
        scores = np.stack(frame["scores"])
        assert np.abs(scores - shares.numpy()).max() < 1e-5
        assert (scores.argmax(1) == frame["prediction"]).all()
        assert (scores.max(1) == frame["probability"]).all()
        assert frame["label"].tolist() == nodes.data["label"].tolist()
        for split in ("train", "val", "test"):
            assert ((frame["split"] == split) == nodes.data[f"{split}_mask"]).all()

        tests = ask(run, config, workers, split="test", scores=False).to_pandas()
        only = frame[frame["split"] == "test"].drop(columns="scores").reset_index(drop=True)
        pandas.testing.assert_frame_equal(tests, only)
        metrics = ask(run, config, workers, split="test", rows=False)
        wanted = {k: v for k, v in run.summary["metrics"].items() if k.startswith("test/")}
        assert metrics == (wanted if workers == 2 else pytest.approx(wanted, abs=1e-5))
        right = (tests["prediction"] == tests["label"]).mean()
        assert right == pytest.approx(metrics["test/accuracy"], abs=1e-6)


@pytest.mark.dgl
def test_your_own_model(make_job: JobFactory) -> None:
    """The user's model is run on batches of the requested nodes."""
    config = make_job(
        model={"kind": f"{MODELS}:DglSage"}, sampling={"eval_batch_size": 37}, train={"epochs": 1}
    )
    run = train_on_ranks(config)
    metrics = ask(run, config, 2, split="val", rows=False)
    assert metrics.items() <= run.summary["metrics"].items()
    frame, other = (ask(run, config, workers, split="val").to_pandas() for workers in (1, 2))
    assert frame["node"].tolist() == other["node"].tolist() == sorted(frame["node"])
    assert np.allclose(np.stack(frame["scores"]), np.stack(other["scores"]), atol=1e-5)
    right = (frame["prediction"] == frame["label"]).mean()
    assert right == pytest.approx(metrics["val/accuracy"], abs=1e-6)


@pytest.mark.dgl
def test_classes_of_graphs(tmp_path: Path) -> None:
    config = make(tmp_path, train={"epochs": 1})
    run = train_on_ranks(config)
    frame = ask(run, config, 2).to_pandas()
    assert frame["graph"].tolist() == list(range(30))
    assert frame["split"].value_counts().to_dict() == {"train": 18, "val": 6, "test": 6}
    metrics = ask(run, config, 2, split="test", rows=False)
    assert metrics.items() <= run.summary["metrics"].items()
    tests = frame[frame["split"] == "test"]
    right = (tests["prediction"] == tests["label"]).mean()
    assert right == pytest.approx(metrics["test/accuracy"], abs=1e-6)


@pytest.mark.dgl
def test_numbers_of_graphs(tmp_path: Path) -> None:
    config = make(
        tmp_path,
        graph=dataset("Sums", num=30),
        task={"kind": "graph_regression", "metric": "mae"},
        train={"epochs": 1},
    )
    run = train_on_ranks(config)
    table = ask(run, config, 2, split="test")
    assert table.column_names == ["graph", "prediction", "split", "label"]
    frame = table.to_pandas()
    error = np.abs(np.stack(frame["prediction"]) - np.stack(frame["label"])).mean()
    assert error == pytest.approx(run.summary["metrics"]["test/mae"], abs=1e-5)


def test_merging_wide_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row groups are limited by memory rather than by their number of rows; no files merge to
    none. Rows and types are those of the files, also below a directory with a name like id=7."""
    monkeypatch.setattr(merge, "_VALUES", 10_000)
    monkeypatch.setattr(merge, "_FEWEST", 3)
    scores = pa.array([[0.5] * 100] * 1000, pa.list_(pa.float32()))
    given, place = pa.table({"id": pa.array(range(1000)), "scores": scores}), tmp_path / "id=7"
    place.mkdir()
    pq.write_table(given, place / "wide")
    with open(tmp_path / "out", "wb") as out:
        assert merge.merge_files([place / "wide"], out, "id") == 1000
        assert merge.merge_files([], out, "id") == 0
    made = pq.ParquetFile(tmp_path / "out")
    assert made.read() == given
    groups = range(made.metadata.num_row_groups)
    assert {made.metadata.row_group(i).num_rows for i in groups} <= {99, 10}


@given(st.lists(st.lists(st.integers(0, 500), unique=True), max_size=5))
def test_merging(lists: list[list[int]]) -> None:
    """All rows of the files are in order, each with its values."""
    owner = {number: file for file, numbers in enumerate(lists) for number in numbers}
    files, out = [], pa.BufferOutputStream()
    for file in range(len(lists)):
        own = sorted(number for number, each in owner.items() if each == file)
        sink = pa.BufferOutputStream()
        pq.write_table(pa.table({"id": own, "file": [file] * len(own)}, SCHEMA), sink)
        files.append(pa.BufferReader(sink.getvalue()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(merge, "_ROWS", 12)
        patch.setattr(merge, "_FEWEST", 3)
        assert merge.merge_files(files, out, "id") == len(owner)
    if lists:
        found = pq.read_table(pa.BufferReader(out.getvalue())).to_pydict()
        assert found == {"id": sorted(owner), "file": [owner[number] for number in sorted(owner)]}


def copied(run: Run, place: Path) -> Run:
    """Return a copy of the run in another storage."""
    shutil.copytree(run.path, place / "test")
    return Run(place / "test")


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"split": "tests"}, "no split 'tests'"),
        ({"out": "gone/file.parquet"}, "no directory"),
        ({"out": "."}, "a directory or a device"),
        ({"out": "/dev/null", "overwrite": True}, "a directory or a device"),
        ({"out": "a" * 300}, "too long"),
        ({"out": "taken"}, "exists already"),
        ({"out": "rows.csv"}, "rows are written as .parquet"),
        ({"out": "/proc/file.parquet"}, "cannot be written"),
        ({"overrides": ["model.hidden=32"]}, "model.hidden was 16 and is 32"),
        ({"overrides": ["cluster.workers=none"]}, "workers"),
        ({"overrides": ["comm.env={TOKEN: '***'}"]}, "does not keep"),
        ({"overrides": ["graph.path=/nowhere"]}, "path"),
    ],
)
def test_refused_before_anything_starts(
    options: dict[str, Any], what: str, trained: Run, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("taken").touch()
    before = sorted(trained.path.parent.rglob("*"))
    with pytest.raises(InputError, match=what):
        raygnn.predict(trained, **{"out": "file.parquet", "display": False, **options})
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]
    assert sorted(trained.path.parent.rglob("*")) == before


@pytest.mark.parametrize("how", ["none", "cut", "about", "fifo"])
def test_weights_that_are_not_there(how: str, trained: Run, tmp_path: Path) -> None:
    run = copied(trained, tmp_path)
    file = run.path / "checkpoints" / "selected.pt"
    about = file.with_suffix(".json")
    if how == "cut":
        file.write_bytes(file.read_bytes()[:-1])
    elif how == "about":
        about.write_text("{")
    else:
        file.unlink()
    if how == "fifo":
        os.mkfifo(file)
    with pytest.raises(InputError, match="selected weights" if how == "none" else None) as caught:
        raygnn.evaluate(run, display=False)
    assert str(file.with_suffix("")) in str(caught.value.where)


class Bomb:
    def __reduce__(self) -> Any:
        return os.mkdir, (os.environ["BOMB"],)


@pytest.mark.parametrize("how", ["bomb", "garbage", "list", "other", "replaced"])
def test_weights_that_are_none(
    how: str, trained: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A right hash does not make a file one of weights."""
    run = copied(trained, tmp_path / "runs")
    file = run.path / "checkpoints" / "selected.pt"
    monkeypatch.setenv("BOMB", str(tmp_path / "exploded"))
    model = torch.nn.Linear(3, 3)
    if how == "garbage":
        file.write_bytes(b"garbage")
    elif how == "other":
        torch.save(model.state_dict(), file)
    elif how == "list":
        torch.save([1, 2], file)
    elif how == "bomb":
        torch.save(Bomb(), file)
    about = {"data": "", "sha256": sha256(file)}
    file.with_suffix(".json").write_text(json.dumps(about))
    found = weights.find(file.parent)
    if how == "replaced":
        file.write_bytes(file.read_bytes() + b" ")
    words = {
        "bomb": "more than numbers", "garbage": "cannot be read|more than numbers", "list": "list",
        "other": "do not belong to the model", "replaced": "has been replaced",
    }  # fmt: skip
    with pytest.raises(DataError, match=words[how]):
        weights.load(found, torch.nn.Linear(3, 4))
    assert not (tmp_path / "exploded").exists()
    if how == "bomb":
        pickle.loads(pickle.dumps(Bomb()))  # it is one
        assert (tmp_path / "exploded").exists()


def test_other_data(
    trained: Run, make_job: JobFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, other = copied(trained, tmp_path / "runs"), make_job(graph={"seed": 7, "val": 0.0})
    with pytest.raises(RuntimeError, match="not the data that the run was trained on"):
        ask(run, other, 2)
    sizes = weights.find(run.path / "checkpoints").sizes  # of new data
    nothing = ask(run, other, 2, split="val", rows=False, sizes=sizes)
    assert nothing == {}

    session = Mock()
    session.launch.return_value = {"metrics": nothing, "workers": 2}
    monkeypatch.setattr(asking, "session_beside", lambda *args, **options: nullcontext(session))
    with pytest.raises(InputError, match="no labels in the split 'val'"):
        raygnn.evaluate(run, split="val", display=False)


def test_the_partition_of_the_training(trained: Run, tmp_path: Path) -> None:
    """The partition serves any number of workers, even without its graph; else an equal one is
    built."""
    run = copied(trained, tmp_path)
    place = next((trained.path.parent / "partitions").iterdir())
    about = {"directory": str(place), "parts": [{}, {}]}
    (run.path / "partition.json").write_text(json.dumps(about))
    config = asking.config_of(run, ["cluster.workers=1"])
    assert (config.graph, config.partition.path) == (None, place)
    assert config.run_dir == run.path
    (run.path / "partition.json").write_text(json.dumps({**about, "directory": "/gone"}))
    config = asking.config_of(run, ["cluster.workers=1"])
    assert config.graph is not None
    assert (config.partition.path, config.partition.parts) == (None, 2)


def test_values_that_the_config_does_not_keep(trained: Run, tmp_path: Path) -> None:
    """Variables have to be passed again, and a user's class must still exist."""
    run = copied(trained, tmp_path)
    values = run.config
    file = run.path / "config.yaml"
    mark = file.read_text().splitlines()[0]
    values["comm"]["env"] = {"MY_TOKEN": "***"}
    file.write_text(f"{mark}\n{yaml.safe_dump(values)}")
    assert asking.config_of(run, []).comm.env == {}
    assert asking.config_of(run, ["comm.env.MY_TOKEN=abc"]).comm.env == {"MY_TOKEN": "abc"}
    assert asking.config_of(run, ["comm.env={}"]).comm.env == {}

    values["comm"]["env"], values["model"] = {}, {"kind": "gone.models:Model"}
    file.write_text(f"{mark}\n{yaml.safe_dump(values)}")
    with pytest.raises(ConfigError, match="gone"):
        raygnn.evaluate(run, trust=True, display=False)


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_nothing_half_written(error: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(files: Any, out: Any, *_: Any) -> int:
        out.write(b"half")
        out.flush()
        raise error

    monkeypatch.setattr(merge, "merge_files", fails)
    found = {"rows": 1, "workers": 1}
    show = asking.display_of(False, False)
    with pytest.raises(KeyboardInterrupt if error is KeyboardInterrupt else InputError):
        merge.merge_rows(tmp_path, found, "node", tmp_path / "out", False, show, {})
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_while_merging(tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    ids = np.random.default_rng(0).permutation(200_000)
    pq.write_table(pa.table({"node": np.sort(ids), "x": ids}), tmp_path / "rows" / "rank-0.parquet")
    show = asking.display_of(False, False)
    found = {"rows": 200_000, "workers": 1}
    with mounted(tmp_path / "small", "size=100k") as disk:
        with pytest.raises(InputError, match="full") as caught:
            merge.merge_rows(tmp_path / "rows", found, "node", disk / "out", False, show, {})
        assert "--out" in str(caught.value.remedy)
        assert list(disk.iterdir()) == []


@pytest.mark.system
@pytest.mark.usefixtures("shared_ray")
def test_on_a_ray(make_job: JobFactory, tmp_path: Path) -> None:
    config = make_job(train={"epochs": 1})
    run = raygnn.train(config, display=False)
    assert is_own(run.config)
    files = {path: path.stat().st_mtime_ns for path in run.path.rglob("*") if path.is_file()}
    metrics = raygnn.evaluate(run, display=False)
    assert metrics == {k: v for k, v in run.summary["metrics"].items() if k.startswith("test/")}
    out = tmp_path / "out.parquet"
    made = raygnn.predict(run, out=out, overrides=["cluster.workers=1"], display=False)
    assert (made.rows, made.workers, made.path) == (2000, 1, out)
    frame = pandas.read_parquet(out)
    tests = frame[frame["split"] == "test"]
    right = (tests["prediction"] == tests["label"]).mean()
    assert right == pytest.approx(metrics["test/accuracy"], abs=1e-6)
    assert {p: p.stat().st_mtime_ns for p in run.path.rglob("*") if p.is_file()} == files
    storage = run.path.parent
    assert not (storage / ".predicting").exists()
    assert len(list((storage / "partitions").iterdir())) == 1

    selected = run.path / "checkpoints" / "selected.pt"
    torch.save({"weight": torch.ones(3)}, selected)
    about = selected.with_suffix(".json")
    sha256 = hashlib.sha256(selected.read_bytes()).hexdigest()
    about.write_text(json.dumps({**json.loads(about.read_text()), "sha256": sha256}))
    with pytest.raises(raygnn.TrainingError, match="do not belong") as caught:
        raygnn.predict(run, out=out, overwrite=True, display=False)
    assert caught.value.exit_code == InputError.exit_code
    pandas.testing.assert_frame_equal(pandas.read_parquet(out), frame)  # what was there
    assert not (storage / ".predicting").exists()


def test_errors_of_the_command(trained: Run) -> None:
    with pytest.raises(InputError, match="no split 'all'") as caught:
        trained.evaluate("all")
    assert "train" in str(caught.value.remedy)
    with pytest.raises(raygnn.TrainingError, match="took longer than"):
        run_verb("evaluate", str(trained.path), timeout=0.2)


@pytest.mark.slow
@pytest.mark.usefixtures("no_ray")
def test_ctrl_c(trained: Run, tmp_path: Path) -> None:
    run = copied(trained, tmp_path / "runs")
    log = run.path.parent / ".predicting" / "test" / "logs" / "rank-0.log"
    arguments = ["predict", str(run.path), "--out", "out.parquet", "--set", "cluster.address=local"]
    command = Command(arguments, tmp_path)
    try:
        deadline = time.monotonic() + 120
        while not log.exists() and time.monotonic() < deadline:
            assert command.process.poll() is None, command.process.communicate()
            time.sleep(0.05)
        os.killpg(command.process.pid, signal.SIGINT)
        code, _, err = command.finish(timeout=60)
        assert (code, "nothing was written" in err) == (130, True)
        assert command.left_behind() == []
        assert sorted(path.name for path in run.path.parent.iterdir()) == ["partitions", "test"]
        assert [path.name for path in tmp_path.iterdir()] == ["runs"]
    finally:
        if command.process.poll() is None:
            os.killpg(command.process.pid, signal.SIGKILL)
            command.process.wait()
