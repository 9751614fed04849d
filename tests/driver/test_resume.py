"""A run that stopped goes on as if it had not: the same batches, losses and weights."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lightning.pytorch import callbacks

import raygnn
from raygnn.checkpoint import store
from raygnn.config.load import load_config
from raygnn.config.rules import changes, fixed
from raygnn.config.schema import Config
from raygnn.driver.ray_cluster import RayCluster
from raygnn.driver.resume import StartPoint, finished
from raygnn.errors import InputError
from raygnn.runs.run import Run
from raygnn.runs.run_directory import RunDir
from raygnn.tasks.lightning_modules import TaskModule
from raygnn.worker.comm.guard import Guard
from raygnn.worker.rank import Rank
from tests.support.small_jobs import JobFactory, about, job, train_on_ranks


def cut(run_dir: Path, stop: int) -> None:
    """Remove everything after a step, as if the run had been killed there."""
    for path in run_dir.glob("checkpoints/step-*"):
        if int(path.name.removeprefix("step-")) > stop:
            (path / "manifest.json").unlink()


def stopped(whole: Run, config: Config, step: int) -> Config:
    """Return a job's config with the state of ``whole``, killed after a step."""
    shutil.copytree(whole.path, config.run_dir)
    cut(config.run_dir, step)
    return config


# within an epoch, and at the end of the first and the last
@pytest.mark.parametrize(("stop", "every"), [(3, 1), (4, 3), (12, 3)])
def test_a_stopped_run_resumes_bitwise(stop: int, every: int, make_job: JobFactory) -> None:
    options: dict[str, Any] = {
        "train": {"epochs": 3, "eval_every": every, "lr": 0.05},
        "model": {"dropout": 0.5},
        "fault": {"checkpoint_every": 1, "keep": 20},
    }
    whole = train_on_ranks(make_job(name="whole", **options))
    resumed = train_on_ranks(stopped(whole, make_job(name="part", **options), stop), resume=True)
    assert resumed.summary["checkpoints"]["saved"] <= 12 - stop  # it did not begin anew
    for column in ("train/loss", "val/accuracy", "val/loss"):
        new, old = (r.metrics.set_index("step")[column].dropna() for r in (resumed, whole))
        assert new.to_dict() == old.to_dict(), column  # to the bit
    assert resumed.summary["best_epoch"] == whole.summary["best_epoch"]
    assert resumed.summary["metrics"] == whole.summary["metrics"]
    weights = [torch.load(r.path / "checkpoints" / "selected.pt") for r in (resumed, whole)]
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())


# epochs have 4 steps: killed at the end of one, and then anywhere, again and again
@pytest.mark.parametrize("stops", [(8, 20), (8, 9, 13)])
def test_a_resumed_run_can_be_resumed_again(stops: tuple[int, ...], make_job: JobFactory) -> None:
    options: dict[str, Any] = {
        "train": {"epochs": 6, "lr": 0.05},
        "fault": {"checkpoint_every": 1, "keep": 40},
        "sampling": {"batch_size": 128},
        "cluster": {"workers": 1},
    }
    whole = train_on_ranks(make_job(name="whole", **options))
    config = stopped(whole, make_job(name="part", **options), stops[0])
    resumed = train_on_ranks(config, resume=True)
    for stop in stops[1:]:
        cut(config.run_dir, stop)
        resumed = train_on_ranks(config, resume=True)
    assert resumed.summary["steps"] == whole.summary["steps"] == 24
    assert resumed.summary["epochs"] == whole.summary["epochs"] == 6
    for column in ("train/loss", "val/loss", "epoch"):
        new, old = (r.metrics.set_index("step")[column].dropna() for r in (resumed, whole))
        assert new.to_dict() == old.to_dict(), column  # to the bit


@pytest.mark.parametrize("steps", [8, 10])  # at the end of an epoch of 4, and within one
def test_a_resume_after_the_last_step_only_evaluates(steps: int, make_job: JobFactory) -> None:
    """The run was stopped between its last step and the evaluation."""
    train = {"epochs": 9, "max_steps": steps, "eval_every": 2, "lr": 0.03}
    config = make_job(train=train, fault={"checkpoint_every": 1})
    whole = train_on_ranks(config)
    known = dict(whole.summary)
    (whole.path / "metrics.jsonl").unlink()
    again = train_on_ranks(config, resume=True).summary
    assert again["steps"] == known["steps"] == steps
    assert again["metrics"] == known["metrics"]
    assert again["best_epoch"] == known["best_epoch"] == (steps - 1) // 4
    for figures in ("seeds_per_second", "seconds", "remote", "gradients", "ranks"):
        assert again[figures] == known[figures]  # of the start that made steps


def test_a_scheduler_and_averaged_weights_resume(
    make_job: JobFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their state is in the checkpoint, like that of everything that Lightning drives."""
    configure, trainer = TaskModule.configure_optimizers, Rank.trainer
    average = getattr(callbacks, "EMAWeightAveraging", None)  # of newer versions

    def scheduled(self: TaskModule) -> Any:
        optimizer = configure(self)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=13)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def averaged(self: Rank, others: list[Any], saver: Any) -> Any:
        return trainer(self, [average(decay=0.5), *others] if average else others, saver)

    monkeypatch.setattr(TaskModule, "configure_optimizers", scheduled)
    monkeypatch.setattr(Rank, "trainer", averaged)
    options: dict[str, Any] = {
        "train": {"epochs": 3, "select": "last"},
        "fault": {"checkpoint_every": 1, "keep": 20},
    }
    whole = train_on_ranks(make_job(name="whole", **options))
    resumed = train_on_ranks(stopped(whole, make_job(name="part", **options), 6), resume=True)
    for column in ("train/loss", "train/lr"):
        new, old = (r.metrics.set_index("step")[column].dropna() for r in (resumed, whole))
        assert new.to_dict() == old.to_dict(), column
    assert whole.metrics["train/lr"].nunique() > 9
    averages = [torch.load(r.path / "checkpoints" / "selected.pt") for r in (resumed, whole)]
    assert all(torch.equal(tensor, averages[1][name]) for name, tensor in averages[0].items())


def test_an_early_stopped_run_resumes_with_more_patience(make_job: JobFactory) -> None:
    """With a larger `patience`, a run stopped early resumes from its newest checkpoint."""
    every: dict[str, Any] = {"fault": {"checkpoint_every": 3}}
    train: dict[str, Any] = {"epochs": 9, "lr": 1e-12}  # which leads nowhere
    whole = train_on_ranks(make_job(name="whole", train={**train, "patience": 3}, **every))
    part = train_on_ranks(make_job(name="part", train={**train, "patience": 1}, **every))
    assert part.summary["steps"] == 8
    more = make_job(name="part", train={**train, "patience": 3}, **every)
    resumed = train_on_ranks(more, resume=True)
    assert resumed.summary["steps"] == whole.summary["steps"] == 16
    for column in ("train/loss", "val/loss"):
        new, old = (r.metrics.set_index("step")[column].dropna() for r in (resumed, whole))
        assert new.to_dict() == old.to_dict(), column


def test_other_numbers_of_workers_make_the_same_batches(
    make_job: JobFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 1, 2, 3 and 1 workers, each seed comes once in every epoch, and losses equal those of a
    run that never stopped."""
    seen = tmp_path / "seen"
    seen.mkdir()
    begin = Guard.on_train_batch_start

    def noting(self: Guard, trainer: Any, module: Any, batch: Any, number: int) -> None:
        rank = trainer.global_rank
        seeds = batch.seeds[batch.weight > 0].tolist()
        with open(seen / f"{rank}.jsonl", "a") as file:
            entry = [batch.epoch, batch.step, trainer.world_size, seeds, batch.total]
            file.write(json.dumps(entry) + "\n")
        begin(self, trainer, module, batch, number)

    monkeypatch.setattr(Guard, "on_train_batch_start", noting)
    options: dict[str, Any] = {
        "sampling": {"fanout": [-1, -1], "batch_size": 150},
        "train": {"epochs": 4, "lr": 0.03},
        "fault": {"checkpoint_every": 1, "keep": 20},
        "partition": {"parts": 3},
    }
    stops = ((1, 2), (2, 5), (3, 8), (1, None))  # workers, optimizer steps
    for number, (workers, stop) in enumerate(stops):
        config = make_job(
            name="part",
            **{**options, "train": {**options["train"], "max_steps": stop}},
            cluster={"workers": workers},
        )
        part = train_on_ranks(config, resume=number > 0)
    entries = [json.loads(line) for f in seen.glob("*") for line in f.read_text().splitlines()]
    whole = train_on_ranks(make_job(name="whole", **options, cluster={"workers": 1}))
    assert {world for _, _, world, _, _ in entries} == {1, 2, 3}
    steps = Counter({(e, s): t for e, s, _, _, t in entries})
    trained: dict[tuple[int, int], list[int]] = defaultdict(list)
    for epoch, step, _, seeds, _ in entries:
        trained[epoch, step] += seeds
    assert {when: len(seeds) for when, seeds in trained.items()} == steps
    epochs = [
        [n for (own, _), seeds in trained.items() if own == e for n in seeds] for e in range(4)
    ]
    assert all(len(seeds) == len(set(seeds)) == 400 for seeds in epochs)  # each once
    assert all(set(seeds) == set(epochs[0]) for seeds in epochs)
    new, old = (run.metrics.set_index("step")["train/loss"].dropna() for run in (part, whole))
    assert new.index.to_list() == old.index.to_list()
    assert np.allclose(new, old, atol=1e-4)


# ── what may change ──────────────────────────────────────────────────────────────────────────


def test_changes_of_fixed_keys_are_refused(make_job: JobFactory) -> None:
    options: dict[str, Any] = {"fault": {"checkpoint_every": 2}}
    train_on_ranks(make_job(**options))
    other: dict[str, Any] = {"model": {"hidden": 8}, "train": {"lr": 0.5, "epochs": 3}}
    with pytest.raises(InputError) as caught:
        train_on_ranks(make_job(**options, **other), resume=True)
    assert "model.hidden was 16 and is 8; train.lr was 0.01 and is 0.5" in caught.value.what
    assert "epochs" not in caught.value.what
    with pytest.raises(InputError, match="batch_size × workers was 128 and is 64"):
        train_on_ranks(make_job(**options, sampling={"batch_size": 32}), resume=True)
    longer = {"train": {"epochs": 3}, "sampling": {"batch_size": 128}, "cluster": {"workers": 1}}
    assert train_on_ranks(make_job(**options, **longer), resume=True).summary["steps"] == 12


@pytest.mark.parametrize(
    "change",
    [
        {"train": {"seed": 2}},
        {"train": {"accumulate": 2}},
        {"sampling": {"fanout": [5, 4]}},
        {"sampling": {"replace": True}},
        {"precision": "bf16"},
        {"model": {"dropout": 0.1}},
        {"graph": {"seed": 9}},
        {"task": {"metric": "roc_auc"}},
        {"model": {"categories": {"brand": 4}}},
    ],
)
def test_changes_are_named(change: dict[str, Any]) -> None:
    before = load_config(job(Path("runs")))
    after = load_config(job(Path("runs"), **change))
    (section, values), *_ = change.items()
    key = f"{section}.{next(iter(values))}" if isinstance(values, dict) else section
    (said,) = changes(fixed(before.to_dict()), after)
    assert said.startswith(f"{key} was ")


def test_a_section_that_comes_or_goes_is_named() -> None:
    plain = load_config(job(Path("runs")))
    learned = load_config(job(Path("runs"), model={"embedding": {"dim": 4}}))
    assert changes(fixed(learned.to_dict()), plain) == ["model.embedding is null and was not"]
    assert changes(fixed(plain.to_dict()), learned) == ["model.embedding was null and is not"]


@pytest.mark.parametrize(
    "change",
    [
        {"train": {"epochs": 9, "log_every": 3, "patience": 2}},
        {"sampling": {"prefetch": 0, "cache": 0.5, "topology": "partitioned"}},
        {"cluster": {"workers": 1}},
        {"comm": {"timeout": 99, "compression": "bf16"}},
        {"fault": {"keep": 9}},
        {"guard": {"mode": "deep"}},
        {"name": "another"},
    ],
)
def test_keys_that_may_change(change: dict[str, Any]) -> None:
    before = load_config(job(Path("runs")))
    after = load_config(job(Path("runs"), **change))
    assert changes(fixed(before.to_dict()), after) == []


# ── what can be trusted ──────────────────────────────────────────────────────────────────────


OURS, OTHER = (load_config(job(Path("runs"), model={"hidden": n})) for n in (16, 8))


def save(directory: Path, step: int, config: Config = OURS, data: str = "d", keep: int = 9) -> None:
    state = {"step": step, "weights": torch.arange(50.0)}
    store.write(directory, state, step, keep, about(config, data))


def found(directory: Path) -> int | None:
    best, _ = store.find(directory, OURS)
    return None if best is None else best.step


@given(
    name=st.sampled_from(["state.ckpt", "manifest.json"]),
    how=st.sampled_from(["truncated", "flipped", "deleted", "longer", "older"]),
    where=st.floats(0, 1),
    bit=st.integers(0, 7),
)
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_damage_is_found(name: str, how: str, where: float, bit: int, tmp_path: Path) -> None:
    directory = tmp_path / "checkpoints"
    shutil.rmtree(directory, ignore_errors=True)
    for step in (1, 2, 3):
        save(directory, step)
    assert found(directory) == 3
    newest = directory / "step-0000000003"
    file = newest / name
    content = bytearray(file.read_bytes())
    place = round(where * (len(content) - 1))
    match how:
        case "truncated":
            del content[place:]
        case "flipped":
            content[place] ^= 1 << bit
        case "deleted":
            file.unlink()
        case "longer":
            content += b"0"
        case "older":  # of another step
            content = bytearray((directory / "step-0000000002" / file.name).read_bytes())
    if file.exists():
        file.write_bytes(content)
    best, rejected = store.find(directory, OURS)
    assert best is not None
    assert best.manifest.global_batch == 128
    if best.step == 3:  # a space became another one
        assert file.name == "manifest.json"
        return
    assert best.step == 2
    assert len(rejected) == 1
    assert rejected[0].startswith("step-0000000003: ")


def test_a_manifest_that_was_edited_is_found(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path, step)
    manifest = tmp_path / "step-0000000002" / "manifest.json"
    text = manifest.read_text()
    assert text.count('"workers": 2') == 1
    manifest.write_text(text.replace('"workers": 2', '"workers": 3'))
    best, rejected = store.find(tmp_path, OURS)
    assert best is not None
    assert best.step == 1
    assert rejected == ["step-0000000002: manifest.json has changed since it was written"]


def test_checkpoints_of_another_run_are_rejected(tmp_path: Path) -> None:
    save(tmp_path / "a", 5)
    save(tmp_path / "b", 3)
    save(tmp_path / "other", 7, OTHER)
    shutil.copytree(tmp_path / "other" / "step-0000000007", tmp_path / "b" / "step-0000000007")
    best, rejected = store.find(tmp_path / "b", OURS)
    assert best is not None
    assert best.step == 3
    assert rejected == ["step-0000000007: its configuration differs: model.hidden was 8 and is 16"]
    save(tmp_path / "a", 6, data="of another graph")
    best, rejected = store.find(tmp_path / "a", OURS, "d")
    assert best is not None
    assert (best.step, len(rejected)) == (5, 1)
    shutil.rmtree(tmp_path / "a" / "step-0000000006")
    (tmp_path / "a" / "step-0000000005").rename(tmp_path / "a" / "step-0000000009")
    assert store.find(tmp_path / "a", OURS) == (
        None,
        ["step-0000000009: it holds the checkpoint of step 5"],
    )


def test_whole_ones_are_kept(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        save(tmp_path, step, keep=2)
    assert [path.name[-1] for path in sorted(tmp_path.iterdir())] == ["3", "4"]
    (tmp_path / "step-0000000004" / "state.ckpt").write_bytes(b"")
    assert found(tmp_path) == 3
    (tmp_path / "step-copy").mkdir()  # the user's
    save(tmp_path, 4, keep=2)
    assert found(tmp_path) == 4
    save(tmp_path, 2, keep=2)  # gone back, and on from there
    assert found(tmp_path) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "passed-over-step-0000000003",
        "passed-over-step-0000000004",
        "step-0000000002",
        "step-copy",
    ]


def test_unavailable_storage_does_not_reject_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    read = store.read_regular

    def away(path: Path, *args: Any, **options: Any) -> bytes:
        if path.parent.name == "step-0000000002":
            raise OSError(code, os.strerror(code))
        return read(path, *args, **options)

    monkeypatch.setattr(store, "read_regular", away)
    code = errno.ESTALE
    with pytest.raises(OSError, match="Stale"):
        found(tmp_path)
    code = errno.EIO  # a bad place on the disk
    assert found(tmp_path) == 1


def test_an_unreadable_directory_is_not_taken_for_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "there", 1)

    def closed(path: Path) -> Any:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "iterdir", closed)
    with pytest.raises(PermissionError):
        found(tmp_path / "there")
    assert store.newest(tmp_path / "there") == ""


def test_fifos_in_checkpoints_do_not_block(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    for name, file in (("step-0000000003", "manifest.json"), ("step-0000000002", "state.ckpt")):
        (tmp_path / name / file).unlink()
        os.mkfifo(tmp_path / name / file)
    assert found(tmp_path) == 1


def test_a_run_that_is_done_is_not_begun_again(make_job: JobFactory) -> None:
    config = make_job(train={"epochs": 1})
    run = train_on_ranks(config)
    shutil.rmtree(run.path / "checkpoints" / "step-0000000004")  # of its last step
    records = (run.path / "metrics.jsonl").read_text()
    with pytest.raises(InputError, match="has no checkpoint to resume from"):
        train_on_ranks(make_job(train={"epochs": 2}), resume=True)
    assert (run.path / "metrics.jsonl").read_text() == records


@pytest.mark.parametrize(
    ("before", "after"),
    [({"epochs": 2}, {"epochs": 1}), ({"epochs": 1, "max_steps": 3}, {"epochs": 5})],
)
def test_a_finished_run_says_so_before_ray_starts(
    before: dict[str, int],
    after: dict[str, int],
    make_job: JobFactory,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    steps = train_on_ranks(make_job(train=before)).summary["steps"]
    monkeypatch.setattr(RayCluster, "start", lambda self: pytest.fail("Ray was started"))
    raygnn.train(make_job(train={**before, **after}), resume=True)
    assert f"this run is done: it made {steps} steps" in capsys.readouterr().out
    with pytest.raises(pytest.fail.Exception):  # more steps are allowed
        raygnn.train(make_job(train={"epochs": 9}), resume=True)


def test_a_run_that_a_callback_ended_early_may_continue(make_job: JobFactory) -> None:
    """Epochs have 10 steps; the fifth ended after 7 of them."""
    config = make_job(train={"epochs": 5})
    with RunDir(config.local_storage, config.name) as run:
        run.begin(config.recorded())
        run.update_summary(status="done", steps=47, epochs=5)
        start = StartPoint(None, 512, resumed=True)
        assert finished(config, run, start) == ""
        run.update_summary(steps=50)
        assert "it made 50 steps" in finished(config, run, start)


def test_a_run_with_a_damaged_summary_can_be_overwritten(make_job: JobFactory) -> None:
    config = make_job()
    with RunDir(config.local_storage, config.name) as run:
        run.begin(config.recorded())
    (run.path / "summary.json").write_text("{")
    with RunDir(config.local_storage, config.name, mode="overwrite") as run:
        assert finished(config, run, StartPoint(None, 512)) == ""


def test_a_damaged_checkpoint_falls_back_to_the_previous_one(make_job: JobFactory) -> None:
    options: dict[str, Any] = {"fault": {"checkpoint_every": 1, "keep": 20}}
    whole = train_on_ranks(make_job(**options))
    known = whole.metrics.set_index("step")["train/loss"].dropna().to_dict()
    newest = sorted(whole.path.glob("checkpoints/step-*"))[-1]
    state = newest / "state.ckpt"
    content = bytearray(state.read_bytes())
    content[len(content) // 2] ^= 1
    state.write_bytes(content)
    resumed = train_on_ranks(make_job(**options), resume=True)
    assert resumed.metrics.set_index("step")["train/loss"].dropna().to_dict() == known
    for path in whole.path.glob("checkpoints/step-*/state.ckpt"):
        path.write_bytes(b"")
    with pytest.raises(InputError, match="no checkpoint can be used: step-0000000008: state"):
        train_on_ranks(make_job(**options), resume=True)
