"""Lists of the best targets of each source: measured and written, the same on any ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raygnn.config.schema import Config
from raygnn.graph.data import GraphData
from raygnn.runs.run import Run
from tests.prediction.test_predict import ask
from tests.support.small_jobs import train_on_ranks
from tests.support.top_lists import by_hand, rank_of
from tests.worker.test_edge_tasks import LIKES, LINKS, config_of, shop

SPLITS = ("train", "val", "test")


def plain_shop() -> GraphData:
    data = shop()
    del data.edges[LIKES].data["relation"]
    return data


def trained(tmp_path: Path, name: str, workers: int = 2, **more: Any) -> tuple[Run, Config]:
    task = {**LINKS, "metric": "recall@5", "ranking": {"top": [20, 1]}, **more}
    task["negatives"] = {"number": 40, "ends": "target"}
    config = config_of(
        tmp_path,
        name,
        data=plain_shop(),
        task=task,
        model={"hidden": 8},
        sampling={"fanout": [-1, -1], "batch_size": 60 // workers},
        cluster={"workers": workers},
        train={"epochs": 2, "eval_every": 1},
    )
    return train_on_ranks(config, replicated=False), config


def scores_of(run: Run, config: Config) -> np.ndarray:
    """Return the score of each person and thing, from their embeddings."""
    rows = []
    for ntype in ("person", "thing"):
        table = ask(run, config, 1, embeddings=True, ntype=ntype).to_pandas()
        rows.append(np.stack(table["embedding"]))
    return rows[0] @ rows[1].T


def test_metrics_per_source_select_the_weights(tmp_path: Path) -> None:
    """They equal those of plain Python, and are the same on any ranks; mrr is then not computed,
    and is of targets alone, as the negatives are."""
    run, config = trained(tmp_path, "two")
    metrics = run.summary["metrics"]
    assert run.summary["best_epoch"] is not None
    assert "test/mrr" not in metrics
    scores, likes = scores_of(run, config), plain_shop().edges[LIKES]
    splits = [likes.data[f"{name}_mask"] for name in SPLITS]
    for number, name in enumerate(SPLITS[1:], 1):
        earlier = ~np.any(splits[number:], axis=0)  # or in no split
        found = []
        for person in np.unique(likes.src[splits[number]]):
            mine = likes.src == person
            known = set(likes.dst[mine & earlier].tolist())
            true = set(likes.dst[mine & splits[number]].tolist()) - known
            ranks = [rank_of(scores[person], thing, known) for thing in true]
            if ranks:
                found.append({k: v for top in (1, 5, 20) for k, v in by_hand(ranks, top).items()})
        wanted = {f"{name}/{k}": np.mean([one[k] for one in found]) for k in found[0]}
        assert {k: metrics[k] for k in metrics if k.startswith(name)} == pytest.approx(wanted)
        again = ask(run, config, 3, split=name, rows=False)
        assert again == pytest.approx(wanted, abs=1e-6)
    alone, _ = trained(tmp_path, "alone", workers=1)
    assert alone.summary["metrics"] == pytest.approx(metrics, abs=1e-3)

    both = config.model_copy(update={"task": config.task.model_copy(update={"metric": None})})
    found = ask(run, both, 2, split="test", rows=False)
    every = {person: set(likes.dst[likes.src == person].tolist()) for person in range(150)}
    ranks = [
        rank_of(scores[person], thing, every[person] - {thing})
        for person, thing in zip(likes.src[splits[2]].tolist(), likes.dst[splits[2]].tolist())
    ]
    assert found["test/mrr"] == pytest.approx(np.mean(1 / np.array(ranks)), abs=1e-6)
    assert found["test/recall@20"] == pytest.approx(metrics["test/recall@20"], abs=1e-6)
