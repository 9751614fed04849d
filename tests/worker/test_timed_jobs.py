"""Times beside all else that a job may have: several tasks, reversed edges, a cache, gradients in
bf16, tables, and being stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import yaml

from raygnn.config.load import load_config
from raygnn.config.schema import Config
from tests.driver.test_resume import stopped
from tests.support.small_jobs import job, train_on_ranks

USERS, SHOPS, VISITS, CLASSES = 150, 40, 1000, 3
VAL, TEST, END = 600, 800, 1000  # from when on there are seeds to validate, and to test
SPLIT = {"by": "time", "val": VAL, "test": TEST}
CURVES = ("train/loss", "val/kind/loss", "val/visit/mrr")


def tables(place: Path, changed_from: int = END) -> Path:
    """Users and what they visit; from one time on other visits, and users of other kinds, than
    without ``changed_from``."""
    place.mkdir()
    rng = np.random.default_rng(0)
    joined, at = rng.integers(0, END, USERS), rng.integers(0, END, VISITS)
    feat = {f"x{i}": rng.normal(size=USERS) for i in range(4)}
    shops = pd.DataFrame({"id": np.arange(SHOPS), **{n: x[:SHOPS] for n, x in feat.items()}})
    kinds, whom, where = (rng.integers(0, n, (2, m)) for n, m in
                          ((CLASSES, USERS), (USERS, VISITS), (SHOPS, VISITS)))  # fmt: skip
    kind, late = np.where(joined >= changed_from, kinds[1], kinds[0]), at >= changed_from
    ends = {"user": np.where(late, *whom[::-1]), "shop": np.where(late, *where[::-1])}
    users = pd.DataFrame({"id": np.arange(USERS), **feat, "kind": kind, "joined": joined})
    for name, frame in {"u": users, "s": shops, "v": pd.DataFrame({**ends, "at": at})}.items():
        frame.to_parquet(place / f"{name}.parquet")
    common = {"id": "id", "features": {"feat": list(feat)}}
    described = {
        "nodes": {
            "user": {"files": "u.parquet", **common, "label": "kind", "time": "joined"},
            "shop": {"files": "s.parquet", **common},
        },
        "edges": {
            "user:visits:shop": {
                "files": "v.parquet",
                "source": "user",
                "target": "shop",
                "time": "at",
                "reverse": "visited_by",
            }
        },
    }
    (place / "graph.yaml").write_text(yaml.safe_dump(described))
    return place / "graph.yaml"


def config_of(place: Path, graph: Path, name: str = "test", **sections: Any) -> Config:
    """Return a job that predicts a user's class and next visits from earlier events."""
    time = {"edges": "time", "seeds": "time", "strategy": "latest"}
    values = job(
        place,
        name=name,
        tasks={
            "kind": {"kind": "node_classification", "ntype": "user", "split": SPLIT},
            "visit": {"kind": "link_prediction", "etype": "visits", "split": SPLIT},
        },
        partition={"method": "random"},
        model={"kind": "gatv2", "heads": 2, "time_encoding": 4},
        sampling={"fanout": [4, 3], "time": time, **sections.pop("sampling", {})},
        **sections,
    )
    values["graph"] = {"format": "tables", "path": str(graph)}
    return load_config(values)


@pytest.mark.long
def test_several_tasks_and_reversed_edges_see_no_future(tmp_path: Path) -> None:
    """Reversed edges have the times of their originals, so that they do not reveal a link
    either."""
    found = []
    for name, changed_from in (("as it was", END), ("changed", TEST)):
        graph = tables(tmp_path / name, changed_from)
        rounds = {"eval_batch_size": 5}  # one rank has more of these rounds
        done = train_on_ranks(config_of(tmp_path / f"{name} run", graph, sampling=rounds))
        curves = done.metrics.set_index("step")
        found.append((curves[list(CURVES)], done.summary["metrics"]["test/visit/mrr"]))
    (one, tested), (other, tested_other) = found
    assert one["train/loss"].count() > 1
    assert one.equals(other)
    assert tested != tested_other


@pytest.mark.long
def test_a_resume_with_cache_and_partition_is_bitwise_identical(tmp_path: Path) -> None:
    """The run stops within an epoch, with a partition, a cache and gradients averaged in bf16."""
    graph = tables(tmp_path / "graph")
    more: dict[str, Any] = {
        "sampling": {"cache": 0.5},
        "comm": {"compression": "bf16"},
        "fault": {"checkpoint_every": 1, "keep": 40},
    }
    whole = train_on_ranks(config_of(tmp_path, graph, "whole", **more), replicated=False)
    config = stopped(whole, config_of(tmp_path, graph, "part", **more), 3)
    resumed = train_on_ranks(config, replicated=False, resume=True)
    assert resumed.summary["checkpoints"]["saved"] <= whole.summary["steps"] - 3
    for column in CURVES:
        new, old = (r.metrics.set_index("step")[column].dropna() for r in (resumed, whole))
        assert len(new)
        assert new.to_dict() == old.to_dict(), column
    assert resumed.summary["metrics"] == whole.summary["metrics"]
    weights = [torch.load(r.path / "checkpoints" / "selected.pt") for r in (resumed, whole)]
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())
    plain = train_on_ranks(config_of(tmp_path, graph, "plain"))
    losses = [r.metrics["train/loss"].dropna().to_numpy() for r in (plain, whole)]
    np.testing.assert_allclose(*losses, rtol=0.02)


def test_times_whose_unit_is_named_are_not_guessed(tmp_path: Path) -> None:
    """Clocks that begin at 0 have values of the size of seconds since 1970, and of steps."""
    graph = tables(tmp_path / "tables")
    text = graph.read_text().replace("time: joined", "time: {column: joined, unit: ms}")
    graph.write_text(text.replace("time: at", "time: {column: at, unit: s}"))
    task = {"kind": "node_classification", "ntype": "user"}
    task["split"] = {"by": "time", "val": 0.2, "test": 0.2}
    time = {"edges": "time", "seeds": "time", "window": "10m"}
    values = job(tmp_path, task=task, sampling={"fanout": [2, 2], "time": time})
    values["graph"] = {"format": "tables", "path": str(graph)}
    assert train_on_ranks(load_config(values)).summary["status"] == "done"
