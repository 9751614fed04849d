"""Initial weights from another run, frozen weights, and learning rates of groups (`train.init`)."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from raygnn.config.load import load_config
from raygnn.config.places import Uri
from raygnn.driver.resume import initial_weights
from raygnn.errors import InputError
from raygnn.runs.run import Run
from raygnn.runs.run_directory import PARTITION
from raygnn.storage.remote import RemotePath
from raygnn.storage.replica import upload_directory
from raygnn.util.files import write_json
from tests.driver.test_resume import stopped
from tests.support.graphs import ensure_partition
from tests.support.plain_embeddings import learned_rows
from tests.support.small_jobs import JobFactory, job, losses, selected, train_on_ranks
from tests.support.stores import LocalStore

pytestmark = pytest.mark.long

FIRST = "layers.0.convs.:_N:_E:_N.weight"


def base(make_job: JobFactory, **sections: Any) -> Run:
    """Train a run to start from."""
    return train_on_ranks(make_job(name="base", **sections, train={"seed": 7, "epochs": 1}))


@pytest.mark.parametrize("workers", [1, 2])
def test_weights_are_taken_and_frozen_ones_stay(workers: int, make_job: JobFactory) -> None:
    """Excluded weights and those of other shapes are the model's own; frozen ones do not train."""
    there = selected(base(make_job, cluster={"workers": 1}))
    init = {"run": "base", "exclude": ["*.own.*"], "freeze": ["layers.0.convs.*"]}
    more: dict[str, Any] = {
        "graph": {"classes": 5},
        "cluster": {"workers": workers},
        "sampling": {"batch_size": 128 // workers},
    }
    still = {"lr": 1e-30, "weight_decay": 0.5, "select": "last", "epochs": 1}
    run = train_on_ranks(make_job(name="still", **more, train={**still, "init": init}))
    fresh = selected(train_on_ranks(make_job(name="fresh", **more, train=still)))
    for name, value in selected(run).items():
        of_base = name in (FIRST, "layers.0.bias.:_N")
        wanted = (there if of_base else fresh)[name]
        torch.testing.assert_close(value, wanted, rtol=0, atol=1e-20, msg=name)
    found = run.summary["init"]
    assert found["run"] == str(run.path.parent / "base")
    assert found["taken"] == [FIRST, "layers.0.bias.:_N"]
    assert found["left"] == {
        "layers.0.own.:_N.weight": "excluded",
        "layers.1.own.:_N.weight": "excluded",
        "layers.1.convs.:_N:_E:_N.weight": "shape [4, 16] there, [5, 16] here",
        "layers.1.bias.:_N": "shape [4] there, [5] here",
    }
    trained = train_on_ranks(make_job(name="next", **more, train={"init": init}))
    moved = {n for n, v in selected(trained).items() if not torch.equal(v, selected(run)[n])}
    assert moved == selected(run).keys() - {FIRST}
    assert trained.summary["init"]["frozen"] == [FIRST]
    # the frozen matrix of 16 by 16 is not reduced
    sent = [r.summary["gradients"]["bytes"] for r in (trained, run)]
    weights = sum(value.numel() for value in selected(run).values()) - 256
    assert sent == [4 * weights if workers > 1 else None] * 2
    lines = (trained.path / "logs" / "events.jsonl").read_text()
    assert "init: 2 weights of" in lines
    assert f"init: frozen: {FIRST}" in lines


def test_weights_come_from_a_store(make_job: JobFactory, store: LocalStore, tmp_path: Path) -> None:
    there = base(make_job)
    uri = Uri(store.uri) / "base"
    upload_directory(there.path, RemotePath.of(uri, "storage"), [])
    wanted = selected(there)
    shutil.rmtree(there.path)
    still = {"init": {"run": uri.text}, "lr": 1e-30, "max_steps": 1}
    run = train_on_ranks(make_job(name="still", train=still))
    for name, value in selected(run).items():
        torch.testing.assert_close(value, wanted[name], rtol=0, atol=1e-20)
    assert run.summary["init"]["run"] == uri.shared
    assert len(run.summary["init"]["taken"]) == len(wanted)


def test_a_model_of_links_starts_one_of_nodes(make_job: JobFactory) -> None:
    """And the other way round: the layers have the same names in both."""
    links = {"kind": "link_prediction", "split": {"val": 0.1, "test": 0.1}}
    tasks = {"of-links": links, "of-nodes": {}, "of-links-2": links}
    runs: list[Run] = []
    for name, task in tasks.items():
        train: dict[str, Any] = {"lr": 1e-30, "epochs": 1}
        if runs:
            train["init"] = {"run": str(runs[-1].path), "exclude": ["layers.1.own.*"]}
        config = make_job(name=name, task=task, train=train)
        runs.append(train_on_ranks(config))
    one, two, three = map(selected, runs)
    assert torch.equal(one[f"encoder.{FIRST}"], two[FIRST])
    assert torch.equal(one[f"encoder.{FIRST}"], three[f"encoder.{FIRST}"])
    left = runs[2].summary["init"]["left"]
    assert left["encoder.layers.1.bias.:_N"].startswith("shape [4]")
    assert left["encoder.layers.1.own.:_N.weight"] == "excluded"


@pytest.mark.parametrize("all_scaled", [True, False])
def test_learning_rates_of_groups(all_scaled: bool, make_job: JobFactory) -> None:
    """A step of a scaled weight is shorter by its factor; the first pattern counts."""
    before = selected(base(make_job, cluster={"workers": 1}))
    scale = {"layers.0.*": 0.5, "layers.*" if all_scaled else "layers.0.own*": 0.1}
    sgd = {"optimizer": "sgd", "lr": 0.05, "max_steps": 1, "select": "last"}
    runs = []
    for name, lr_scale in (("plain", {}), ("scaled", scale)):
        init = {"run": "base", "lr_scale": lr_scale}
        runs.append(train_on_ranks(make_job(name=name, train={**sgd, "init": init})))
    plain, scaled = map(selected, runs)
    for name, value in before.items():
        factor = 0.5 if name.startswith("layers.0.") else 0.1 if all_scaled else 1.0
        step, whole = scaled[name] - value, plain[name] - value
        assert whole.abs().max() > 1e-4
        torch.testing.assert_close(step, factor * whole, atol=1e-7, rtol=1e-3)
    rates = [run.metrics["train/lr"].dropna().tolist() for run in runs]
    assert rates == [[0.05], [0.05]]


@pytest.mark.parametrize("shard", ["none", "optimizer"])
def test_a_resume_is_bitwise_without_the_other_run(shard: str, make_job: JobFactory) -> None:
    """Groups, schedules and frozen weights are as in a run that was never stopped."""
    there = base(make_job)
    init = {"run": "base", "freeze": ["layers.0.bias*"], "lr_scale": {"layers.0.*": 0.1}}
    options: dict[str, Any] = {
        "train": {"epochs": 3, "lr": 0.05, "schedule": {"kind": "cosine"}, "init": init},
        "fault": {"checkpoint_every": 1, "keep": 20},
        "comm": {"shard": shard},
    }
    whole = train_on_ranks(make_job(name="whole", **options))
    shutil.rmtree(there.path)
    resumed = train_on_ranks(stopped(whole, make_job(name="part", **options), 5), resume=True)
    assert resumed.summary["checkpoints"]["saved"] <= 7
    assert losses(resumed).tolist() == losses(whole).tolist()
    assert resumed.summary["init"] == whole.summary["init"]
    assert all(torch.equal(v, selected(whole)[n]) for n, v in selected(resumed).items())


def write_month(directory: Path, users: list[str]) -> None:
    """Write tables of users, who have names, and of what they buy."""
    directory.mkdir(parents=True)
    rng = np.random.default_rng(0)
    pd.DataFrame({"id": users}).to_csv(directory / "users.csv", index=False)
    fold = rng.permutation(["train"] * 24 + ["val"] * 8 + ["test"] * 8)
    items = {"id": range(100, 140), "price": rng.normal(size=40), "fold": fold}
    frame = pd.DataFrame({**items, "label": rng.permutation([0, 1] * 20)})
    frame.to_csv(directory / "items.csv", index=False)
    buys = {"user": rng.choice(users, 300), "item": rng.integers(100, 140, 300)}
    pd.DataFrame(buys).to_csv(directory / "buys.csv", index=False)
    (directory / "shop.yaml").write_text(
        "nodes:\n"
        "  item: {files: items.csv, id: id, features: {feat: [price]}, label: label, split: fold}\n"
        "  user: {files: users.csv, id: id}\n"
        "edges:\n"
        "  user:bought:item: {files: buys.csv, source: user, target: item, reverse: by}\n"
    )


def of_tables(tmp_path: Path, name: str, month: str, workers: int, **train: Any) -> Run:
    """Train on these tables, with embedding rows of users."""
    values = job(
        tmp_path,
        name=name,
        task={"ntype": "item"},
        model={"embedding": {"dim": 8, "ntypes": ["user"]}},
        sampling={"batch_size": 6},
        cluster={"workers": workers},
        train={"lr": 0.1, "select": "last", **train},
    )
    graph = {"format": "tables", "path": str(tmp_path / "tables" / month / "shop.yaml")}
    config = load_config({**values, "graph": graph})
    place = ensure_partition(config, workers).directory
    run = train_on_ranks(config)
    write_json(run.path / PARTITION, {"directory": str(place), "parts": [{}] * workers})
    return run


@pytest.mark.parametrize("workers", [1, 2])
def test_rows_are_taken_by_the_users_ids(workers: int, tmp_path: Path) -> None:
    """Next month some users are gone, some are new, and all have other numbers."""
    early = [f"u{n}" for n in range(40)]
    late = [f"u{n}" for n in range(59, 19, -1)]
    write_month(tmp_path / "tables" / "may", early)
    write_month(tmp_path / "tables" / "june", late)
    there = of_tables(tmp_path, "may", "may", 3 - workers, epochs=4)
    init = {"run": "may", "freeze": ["rows.user"]}
    run = of_tables(tmp_path, "june", "june", workers, init=init)
    plain = of_tables(tmp_path, "plain", "june", workers, max_steps=1, lr=1e-30)
    old, new, fresh = (learned_rows(one)["user"] for one in (there, run, plain))
    for number, user in enumerate(late):
        known = user in early
        wanted = old[early.index(user)] if known else fresh[number]
        assert np.array_equal(new[number], wanted), user
    assert run.summary["init"]["rows"] == {"rows.user": {"taken": 20, "new": 20}}
    free = of_tables(tmp_path, "free", "june", workers, init={"run": "may"})
    assert not np.array_equal(learned_rows(free)["user"], new)  # rows train if they are not frozen
    left = of_tables(tmp_path, "left", "june", workers, init={"run": "may", "exclude": ["rows.*"]})
    assert left.summary["init"]["left"] == {"rows.user": "excluded"}


def test_rows_are_taken_by_numbers_without_names(make_job: JobFactory) -> None:
    embedding = {"model": {"embedding": {"dim": 8, "ntypes": ["_N"]}}}
    there = base(make_job, **embedding)
    place = ensure_partition(make_job(**embedding), 2).directory
    write_json(there.path / PARTITION, {"directory": str(place)})
    init = {"run": "base", "freeze": ["rows.*"]}
    run = train_on_ranks(make_job(**embedding, train={"init": init}))
    assert run.summary["init"]["rows"] == {"rows._N": {"taken": 2000, "new": 0}}
    assert np.array_equal(learned_rows(run)["_N"], learned_rows(there)["_N"])


def test_the_partition_of_rows_is_needed(make_job: JobFactory, tmp_path: Path) -> None:
    write_month(tmp_path / "tables" / "may", [f"u{n}" for n in range(40)])
    there = of_tables(tmp_path, "may", "may", 1)
    config = make_job(
        train={"init": {"run": "may"}}, model={"embedding": {"dim": 8, "ntypes": ["_N"]}}
    )
    assert initial_weights(config)
    (there.path / PARTITION).unlink()
    with pytest.raises(InputError, match="with the ids of its embedding rows, is gone"):
        initial_weights(config)


def test_refused_before_anything_starts(make_job: JobFactory) -> None:
    base(make_job, cluster={"workers": 1})
    cases: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({"run": "bse"}, {}, "there is no such run"),
        ({}, {"name": "base"}, "a run cannot start from its own weights"),
        ({"exclude": ["head.*"]}, {}, r"'head.\*' matches no weight"),
        ({}, {"precision": "bf16"}, "float32 weights"),
    ]
    for init, more, what in cases:
        with pytest.raises(InputError, match=what):
            initial_weights(make_job(train={"init": {"run": "base", **init}}, **more))


@pytest.mark.parametrize(
    ("init", "more", "what"),
    [
        ({"freeze": ["head.*"]}, {}, "'head.\\*' matches no weight"),
        ({"lr_scale": {"*.head": 0.1}}, {}, "'\\*.head' matches no weight"),
        ({"freeze": ["*"]}, {}, "all weights are frozen"),
        ({}, {"model": {"kind": "gat", "heads": 1}}, "none of the weights of .*base fits"),
    ],
)
def test_refused_by_the_ranks(
    init: dict[str, Any], more: dict[str, Any], what: str, make_job: JobFactory
) -> None:
    base(make_job, cluster={"workers": 1}, model={"hidden": 12})
    config = make_job(
        graph={"features": 17, "classes": 5}, train={"init": {"run": "base", **init}}, **more
    )
    with pytest.raises(RuntimeError, match=what):
        train_on_ranks(config)
