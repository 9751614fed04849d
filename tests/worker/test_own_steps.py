"""Callbacks and tasks of the user's own: on every rank, in checkpoints, and watched."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from raygnn.config.load import load_config
from raygnn.errors import ConfigError
from raygnn.runs.diagnose.causes import own_modules
from raygnn.tasks.lightning_modules import TaskModule
from tests.conftest import CHECKOUT
from tests.driver.test_dry_run import outcome
from tests.driver.test_resume import stopped
from tests.prediction.test_predict import ask
from tests.support.pages import PAGES, blocks
from tests.support.small_jobs import JobFactory, losses, selected, train_on_ranks
from tests.worker.test_graph_tasks import dataset
from tests.worker.test_graph_tasks import losses as graph_losses
from tests.worker.test_graph_tasks import make as graph_job

pytestmark = pytest.mark.long

OWN = "tests.support.own_steps"
SMALL = {"nodes": 900, "degree": 8}
LINKS = {"like": "link_prediction", "negatives": {"number": 50}}


# ── callbacks ────────────────────────────────────────────────────────────────────────────────


def counts(place: Path) -> list[dict[str, Any]]:
    """Return what `Count` wrote on each rank."""
    return [json.loads(file.read_text()) for file in sorted(place.glob("rank-*"))]


def test_a_run_goes_on_with_their_state(make_job: JobFactory, tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "train": {"epochs": 3, "lr": 0.05, "callbacks": {f"{OWN}:Count": {"place": str(tmp_path)}}},
        "fault": {"checkpoint_every": 1, "keep": 20},
    }
    whole = train_on_ranks(make_job(name="whole", **options))
    before = counts(tmp_path)
    assert [said["batches"] for said in before] == [12, 12]  # on every rank
    train_on_ranks(stopped(whole, make_job(name="part", **options), 5), resume=True)
    after = counts(tmp_path)
    assert [said["batches"] for said in after] == [12, 12]
    assert after[0] == before[0]  # to the bit; a checkpoint has rank 0's


def test_the_same_on_all_ranks_is_as_they_like(make_job: JobFactory) -> None:
    """A callback may change anything that all ranks change alike; the run differs from one without
    it."""
    found = []
    for workers, callbacks in ((1, [f"{OWN}:Bound"]), (2, [f"{OWN}:Bound"]), (2, [])):
        config = make_job(
            name=f"{workers}-{len(callbacks)}",
            graph=SMALL,
            cluster={"workers": workers},
            guard={"every": 2},
            sampling={"batch_size": 64 // workers},
            train={"optimizer": "sgd", "lr": 0.5, "callbacks": callbacks},
        )
        run = train_on_ranks(config)
        found.append(losses(run))
        inside = max(float(value.abs().max()) for value in selected(run).values()) <= 0.2 + 1e-6
        assert inside is bool(callbacks)
    assert np.abs(found[0] - found[1]).max() < 1e-5
    assert np.abs(found[1] - found[2]).max() > 1e-3


UNLIKE = {
    "gradient": "ranks differ: gradient model.",
    "weight": "ranks differ: contents of model.",
    "noise": "ranks differ: contents of model.",
    "loss": "ranks differ: loss changed: false on rank 0, true on rank 1",
}


@pytest.mark.parametrize(
    ("every", "how"),
    [(2, "gradient"), (100, "gradient"), (2, "weight"), (100, "noise"), (2, "loss")],
)
def test_what_a_callback_does_on_one_rank(every: int, how: str, make_job: JobFactory) -> None:
    """The next comparison finds it, or the one at the end; a gradient is named if it is
    compared."""
    callbacks = {f"{OWN}:Unlike": {"how": how}}
    config = make_job(guard={"every": every}, train={"epochs": 1, "callbacks": callbacks})
    with pytest.raises(RuntimeError) as caught:
        train_on_ranks(config)
    said = UNLIKE["weight" if how == "gradient" and every == 100 else how]
    assert said in str(caught.value)
    assert "a separate torch.Generator" in str(caught.value)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("stop", "trainer.should_stop: false on rank 0, true on rank 1"),
        ("mode", "modules in evaluation mode: none on rank 0, all, model, "),
        ("count", "batch_idx of the epoch loop: 2 on rank 0, 3 on rank 1"),
        ("limit", "trainer.max_epochs: 2 on rank 0, 3 on rank 1"),
        ("batches", "trainer.num_training_batches: "),
    ],
)
def test_a_callback_that_changes_the_loop_on_one_rank(
    how: str, said: str, make_job: JobFactory
) -> None:
    """The failure comes after that batch, not at the timeout of the other ranks."""
    callbacks = {f"{OWN}:Unlike": {"how": how}}
    config = make_job(guard={"every": 100}, train={"epochs": 2, "callbacks": callbacks})
    with pytest.raises(RuntimeError) as caught:
        train_on_ranks(config)
    assert said in str(caught.value)
    assert f"after train.callbacks ({OWN}:Unlike)" in str(caught.value)
    assert "reduce_boolean_decision" in str(caught.value)


@pytest.mark.parametrize("epoch", [0, 1])
def test_weights_that_are_not_numbers_are_never_the_best(epoch: int, make_job: JobFactory) -> None:
    config = make_job(
        graph={"classes": 2},
        task={"kind": "node_classification", "metric": "roc_auc"},
        cluster={"workers": 1},
        train={"epochs": epoch + 1, "callbacks": {f"{OWN}:Diverge": {"epoch": epoch}}},
    )
    run = train_on_ranks(config)
    areas = run.metrics["val/roc_auc"].dropna()
    assert len(areas) == epoch  # NaN of the last epoch
    assert run.summary["best_epoch"] == (0 if epoch else None)


@pytest.mark.parametrize("kind", ["StopIteration", "KeyboardInterrupt", "SystemExit"])
def test_a_callback_that_raises_what_would_end_a_loop_or_a_process(
    kind: str, make_job: JobFactory
) -> None:
    callbacks = {f"{OWN}:Unlike": {"how": kind}}
    with pytest.raises(RuntimeError) as caught:
        train_on_ranks(make_job(train={"epochs": 1, "callbacks": callbacks}))
    assert f"{kind}: enough was raised in train.callbacks ({OWN}:Unlike)" in str(caught.value)
    assert "OSError: of the user's" in str(caught.value)


def test_the_guard_may_be_off(make_job: JobFactory) -> None:
    callbacks = {f"{OWN}:Unlike": {"how": "weight"}}
    train_on_ranks(make_job(guard={"mode": "off"}, train={"epochs": 1, "callbacks": callbacks}))


REFUSED: dict[str, tuple[Any, str]] = {
    "no callback": ([f"{OWN}:Plain"], "Plain is not a lightning.pytorch.Callback"),
    "arguments": ({f"{OWN}:Count": {"where": "x"}}, "unexpected keyword argument 'where'"),
    "state": ([f"{OWN}:Unkept"], "a checkpoint cannot hold the state of Unkept"),
    "checkpoints": ([f"{OWN}:SaveAll"], "Lightning refuses the callbacks: .*ModelCheckpoint"),
    "import": (["tests.graphless:Watch"], "tests.graphless:Watch could not be imported"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_before_it_starts(case: str, make_job: JobFactory, tmp_path: Path) -> None:
    callbacks, words = REFUSED[case]
    said = outcome(make_job(train={"callbacks": callbacks}), tmp_path)
    assert said is not None
    assert re.search(words, said["what"]), said
    assert said["sure"]
    assert (said["key"] == "train.callbacks") is (case in ("no callback", "import"))


def test_callbacks_of_a_configuration(make_job: JobFactory) -> None:
    config = make_job(train={"callbacks": [f"{OWN}:Bound"]})
    assert config.train.callbacks == {f"{OWN}:Bound": {}}
    assert load_config(config.to_dict()).train.callbacks == config.train.callbacks
    assert "/tests/support/own_steps.py" in own_modules(config.to_dict())
    for callbacks, words in (
        ([f"{OWN}:Bound", f"{OWN}:Bound"], "each name once"),
        ("tests.support.own_steps:Bound", "a list of names"),
        ({"Bound": {}}, "package.module:Class"),
    ):
        with pytest.raises(ConfigError, match=words):
            make_job(train={"callbacks": callbacks})


# ── tasks ────────────────────────────────────────────────────────────────────────────────────


def test_a_step_like_the_built_in_one(make_job: JobFactory) -> None:
    """Results are bitwise identical, with partial batches, and in predictions."""
    found, predicted = [], []
    for kind in ("node_classification", f"{OWN}:Plain"):
        config = make_job(
            name=kind.rpartition(":")[2],
            graph=SMALL,
            task={"kind": kind},
            train={"accumulate": 2},
            sampling={"batch_size": 50},
        )
        run = train_on_ranks(config)
        found.append((losses(run).tolist(), run.summary["metrics"]))
        predicted.append(ask(run, config, 2).drop_columns("split").to_pydict())
    assert found[0] == found[1]
    assert predicted[0] == predicted[1]


CASES: dict[str, dict[str, Any]] = {
    "nodes": {"task": {"kind": f"{OWN}:Denoising", "args": {"weight": 2.0}}},
    "links": {"task": {"kind": f"{OWN}:Ranking", **LINKS}},
    "bf16": {"task": {"kind": f"{OWN}:Denoising"}, "precision": "bf16"},
}


@pytest.mark.parametrize("case", CASES)
def test_the_same_on_any_ranks(case: str, make_job: JobFactory) -> None:
    found = []
    for workers, replicated in ((1, True), (2, False)):
        config = make_job(
            name=f"on-{workers}-{replicated}",
            partition={"parts": 2, "method": "random"},
            graph=SMALL,
            cluster={"workers": workers},
            sampling={"batch_size": 50 // workers},
            train={"optimizer": "sgd", "lr": 0.1, "max_steps": 12},
            **CASES[case],
        )
        found.append(losses(train_on_ranks(config, replicated=replicated)))
    for other in found[1:]:
        assert np.abs(other - found[0]).max() < (0.05 if case == "bf16" else 1e-4)


@pytest.mark.dgl
def test_whole_graphs(tmp_path: Path) -> None:
    task = {"kind": f"{OWN}:Plain", "like": "graph_classification"}
    found = [
        graph_losses(
            train_on_ranks(graph_job(tmp_path, name=name, task=one, graph=dataset(num=27)))
        )
        for name, one in (("own", task), ("built-in", {"kind": "graph_classification"}))
    ]
    assert found[0] == found[1]


def test_a_run_goes_on_with_layers_of_its_own(make_job: JobFactory) -> None:
    options: dict[str, Any] = {
        "task": {"kind": f"{OWN}:Denoising"},
        "fault": {"checkpoint_every": 1, "keep": 20},
    }
    whole = train_on_ranks(make_job(name="whole", **options))
    part = train_on_ranks(stopped(whole, make_job(name="part", **options), 5), resume=True)
    assert losses(part)[-3:].tolist() == losses(whole)[-3:].tolist()
    state = whole.path / "checkpoints" / "step-0000000008" / "state.ckpt"
    assert "back.weight" in torch.load(state, weights_only=True)["state_dict"]
    assert not any("back" in name for name in selected(whole))


WRONG = {
    "NoMean": ("training_step did not call self.mean", True),
    "MeanTwice": (r"training_step passed losses \[\] to self.mean, expected \[8\]", True),
    "StopsIteration": ("StopIteration was raised", True),
    "AsksTrainer": ("not attached to a `Trainer`", False),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors_of_user_steps_are_explained(
    name: str, make_job: JobFactory, tmp_path: Path
) -> None:
    words, sure = WRONG[name]
    said = outcome(make_job(task={"kind": f"{OWN}:{name}"}), tmp_path)
    assert said is not None
    assert re.search(words, said["what"]), said
    assert said["sure"] is sure


def test_what_only_a_real_step_has(make_job: JobFactory) -> None:
    config = make_job(task={"kind": f"{OWN}:AsksTrainer"}, graph=SMALL, train={"epochs": 1})
    train_on_ranks(config)


def test_a_task_that_is_none(make_job: JobFactory, tmp_path: Path) -> None:
    said = outcome(make_job(task={"kind": f"{OWN}:Count"}), tmp_path)
    assert said is not None
    assert "Count is not a raygnn.Task" in said["what"]
    assert said["key"] == "task.kind"


def test_tasks_of_a_configuration(make_job: JobFactory) -> None:
    config = make_job(task={"kind": f"{OWN}:Plain", "like": "node_regression", "loss": "l1"})
    assert config.task.unit == "node"
    assert config.task.chosen_metric == "mae"
    assert load_config(config.to_dict()).task == config.task
    several = {"one": {"kind": f"{OWN}:Plain"}, "other": {"kind": "node_regression"}}
    for sections, words in (
        ({"task": {"kind": f"{OWN}:Plain", "like": "nodes"}}, "unknown like 'nodes'"),
        ({"task": {"args": {"x": 1}}}, "args a section would be ignored"),
        ({"tasks": several}, "which all tasks share"),
    ):
        with pytest.raises(ConfigError, match=words):
            make_job(**sections)


def test_the_example(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(CHECKOUT / "examples")
    keys = {"storage": str(tmp_path), "train.epochs": 3, "logging.loggers": []}
    run = train_on_ranks(load_config("own_step.yaml", keys))
    assert run.summary["metrics"]["test/accuracy"] > 0.5
    lengths = [v.norm(dim=1).max() for v in selected(run).values() if v.dim() == 2]
    assert max(map(float, lengths)) <= 2.0 + 1e-5


def test_the_page_has_a_task(make_job: JobFactory) -> None:
    (page,) = [path for path in PAGES if path.name == "models.md"]
    found: dict[str, Any] = {}
    exec(compile("\n".join(blocks("py step", page)), "page", "exec"), found)
    assert issubclass(found["Smoothed"], TaskModule)


def test_it_is_public() -> None:
    import raygnn

    assert raygnn.Task is TaskModule
