"""What two nodes had with each other before a time, and links ranked among all destinations."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import raygnn
from raygnn.config.load import load_config
from raygnn.config.schema import Config
from raygnn.errors import ConfigError, DataError
from raygnn.graph.dgl import dgl
from raygnn.sampling.exchange import Exchange, World
from raygnn.worker.planes import seed_times
from raygnn.worker.planes.seed_times import EdgeHistory
from tests.driver.test_resume import stopped
from tests.prediction.test_predict import ask
from tests.support.small_jobs import job, losses, train_on_ranks

pytestmark = pytest.mark.long

SOURCES, TARGETS, END = 50, 20, 1000
LEFT = ("mrr", "hits@1", "hits@10")


def edges(repeat: float, distinct: bool = False) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return sources, targets and times, of which each occurs twice. A source returns to its last
    target with probability ``repeat``; ``distinct``: it never does."""
    rng = np.random.default_rng(0)
    count = 2000 if not distinct else SOURCES * TARGETS * 3 // 4
    src = rng.integers(0, SOURCES, count)
    last, dst = rng.integers(0, TARGETS, SOURCES), np.empty(count, np.int64)
    for i, source in enumerate(src):
        if rng.random() > repeat:
            last[source] = rng.integers(0, TARGETS)
        dst[i] = last[source]
    if distinct:
        src, dst = np.divmod(rng.permutation(SOURCES * TARGETS)[:count], TARGETS)
        src[1::2] = src[::2]  # at one time
        dst[1::2] = (dst[::2] + 1) % TARGETS
        both = np.unique(np.stack([src, dst]), axis=1, return_index=True)[1]
        kept = np.sort(both)
        return src[kept], dst[kept] + SOURCES, (np.arange(count) // 2)[kept]
    return src, dst + SOURCES, np.arange(count) // 2


def config_of(
    place: Path,
    name: str,
    data: tuple[np.ndarray, np.ndarray, np.ndarray],
    workers: int = 1,
    ranking: Any = None,
    **sections: Any,
) -> Config:
    file = place / "graph.dgl"
    if not file.exists():
        graph = dgl().graph(data[:2], num_nodes=SOURCES + TARGETS)
        graph.ndata["feat"] = torch.ones(SOURCES + TARGETS, 1)
        graph.edata["at"] = torch.from_numpy(data[2])
        dgl().save_graphs(str(file), [graph])
    values = job(
        place,
        name=name,
        task={
            "kind": "link_prediction",
            "split": {"by": "time", "val": 0.15, "test": 0.15},
            "negatives": {"ends": "target", "each": 5},
            "ranking": {"candidates": "destinations", **(ranking or {})},
        },
        partition={"method": "random"},
        model={"layers": 1, "decoder": "mlp", "pair_history": True, **sections.pop("model", {})},
        sampling={"fanout": [4], "batch_size": 100 // workers, "eval_batch_size": 64,
                  "time": {"edges": "at", "strategy": "latest"}},
        cluster={"workers": workers},
        **sections,
    )  # fmt: skip
    values["graph"] = {"format": "dgl", "path": str(file)}
    return load_config(values)


def history(count: int = 300) -> tuple[EdgeHistory, list[np.ndarray]]:
    rng = np.random.default_rng(0)
    columns = [rng.integers(low, high, count) for low, high in ((0, 8), (5, 12), (0, 2), (0, 40))]
    src, dst, kind, when = columns
    of: Any = SimpleNamespace(
        src=src,
        dst=dst,
        bounds=np.array([0, count]),
        etype=("_N", "_E", "_N"),
        exchange=Exchange(World(0, 1)),
        column={"kind": kind, "at": when}.__getitem__,
    )
    return EdgeHistory(of, "at", "kind", 2), columns


def test_a_history_ends_before_the_time() -> None:
    """All numbers equal a direct computation, also for nodes and times without any edge."""
    found, (src, dst, kind, when) = history()
    assert found.targets.tolist() == list(range(5, 12))
    grid = [np.array(axis) for axis in (range(9), range(4, 13), range(2), range(-1, 42, 2))]
    asked = [axis.ravel() for axis in np.meshgrid(*grid)]
    wanted, there = [], []
    for s, d, k, t in zip(*asked):
        pair = (src == s) & (dst == d) & (kind == k)
        sent, came, met = (chosen & (when < t) for chosen in (src == s, dst == d, pair))
        since = sent & (when > when[met].max(initial=-1))
        counts = [chosen.sum() for chosen in (met, since, sent, came)]
        ages = [t - when[chosen].max() if chosen.any() else 0 for chosen in (met, sent, came)]
        numbers = counts[0], ages[0], counts[1], counts[2], ages[1], counts[3], ages[2]
        wanted.append([met.any(), *np.log1p(numbers)])
        there.append((pair & (when == t)).any())
    np.testing.assert_allclose(found.features(*asked), wanted, atol=1e-6)
    assert np.array_equal(found.exist(*asked), there)


def test_a_history_of_too_many_edges_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seed_times, "_REMEMBERED", 299)
    with pytest.raises(DataError, match="the type has 300 edges"):
        history()


@pytest.mark.dgl
@pytest.mark.parametrize("key", ["task.split.by=random", "sampling.time.seeds=asked"])
def test_a_history_of_held_out_edges_is_refused(key: str, tmp_path: Path) -> None:
    values = config_of(tmp_path, "run", edges(0.9)).to_dict()
    with pytest.raises(ConfigError, match="would count held-out edges"):
        load_config(values, [key])


@pytest.mark.dgl
def test_all_destinations_are_ranked_without_true_ones_of_the_time(tmp_path: Path) -> None:
    """The metrics equal those among lists of all other destinations, on any number of ranks; a
    sample of the edges is the same on any number of ranks."""
    data = edges(0.0, distinct=True)
    run = train_on_ranks(config_of(tmp_path, "run", data, train={"epochs": 1}))
    src, dst, when = data
    nodes = np.unique(dst)
    true = (src == src[:, None]) & (when == when[:, None])
    lists = [np.setdiff1d(nodes, dst[row]) for row in true]
    assert len({len(one) for one in lists}) > 1
    frame = {"source": src, "target": dst, "target_neg": lists}
    pd.DataFrame(frame).to_parquet(tmp_path / "all.parquet")
    listed = {"candidates": None, "file": str(tmp_path / "all.parquet")}
    wanted = ask(run, config_of(tmp_path, "run", data, ranking=listed), 1, split="test", rows=False)
    samples = []
    for workers in (1, 2):
        config = config_of(tmp_path, "run", data, workers)
        metrics = ask(run, config, workers, split="test", rows=False)
        for name in LEFT:
            assert metrics[f"test/{name}"] == pytest.approx(wanted[f"test/{name}"], abs=1e-9)
        assert "test/mrr_error" not in metrics
        config = config_of(tmp_path, "run", data, workers, {"edges": 50})
        samples.append(ask(run, config, workers, split="test", rows=False))
    assert samples[0] == pytest.approx(samples[1], abs=1e-6)
    error = samples[0]["test/mrr_error"]
    assert 0.01 < error < 0.1
    assert 0 < abs(samples[0]["test/mrr"] - wanted["test/mrr"]) < 4 * error


@pytest.mark.dgl
def test_pairs_that_meet_again_are_learned(tmp_path: Path) -> None:
    """Without their history, nothing tells destinations apart."""
    data, found = edges(0.9), {}
    for name, known in (("known", True), ("unknown", False)):
        more: dict[str, Any] = {"model": {"pair_history": known}, "train": {"epochs": 4}}
        config = config_of(tmp_path, name, data, **more)
        found[name] = train_on_ranks(config).summary["metrics"]["test/mrr"]
    assert found["known"] > 0.85
    assert found["unknown"] < 0.6


@pytest.mark.dgl
def test_the_history_of_later_edges_changes_nothing(tmp_path: Path) -> None:
    """Training and validation are bitwise identical, whatever pairs meet later."""
    src, dst, when = edges(0.9)
    curves = []
    for name in ("as it was", "changed"):
        place = tmp_path / name
        place.mkdir()
        dst = dst if name == "as it was" else np.where(when >= 860, SOURCES, dst)
        run = train_on_ranks(config_of(place, "run", (src, dst, when), train={"epochs": 1}))
        curves.append(run.metrics.set_index("step")[["train/loss", "val/mrr"]])
    assert curves[0].equals(curves[1])


@pytest.mark.dgl
def test_workers_resumes_and_exports_with_a_history(tmp_path: Path) -> None:
    """Any number of workers trains the same, a resumed run is bitwise identical, and the exported
    decoder reads the history."""
    data = edges(0.9)
    more: dict[str, Any] = {"train": {"epochs": 2}, "fault": {"checkpoint_every": 4, "keep": 20}}
    whole, two = (
        train_on_ranks(config_of(tmp_path, f"on-{n}", data, n, **more), replicated=n == 1)
        for n in (1, 2)
    )
    np.testing.assert_allclose(losses(whole), losses(two), atol=2e-5)
    resumed = train_on_ranks(
        stopped(whole, config_of(tmp_path, "part", data, **more), 6), resume=True
    )
    assert losses(resumed).tolist() == losses(whole).tolist()
    assert resumed.summary["metrics"] == whole.summary["metrics"]
    made = raygnn.export(whole, out=tmp_path / "served")
    assert made.programs["decoder.pt2"]["inputs"]["features"]["shape"] == ("pairs", 8)
