"""dmlc/dgl#7851: graphs that are bf16 on some paths of their loader and not on others."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from raygnn.config.schema import Config
from raygnn.driver.train import train
from raygnn.errors import GuardError
from raygnn.sampling.collate import Collate
from raygnn.sampling.exchange import Exchange
from raygnn.worker.job import Job
from tests.support.ranks import run_ranks
from tests.support.small_jobs import _train, job_of, losses, train_on_ranks
from tests.worker.test_graph_tasks import dataset
from tests.worker.test_graph_tasks import make as graph_job

DATASET: dict[str, Any] = {"num": 24, "largest": 6, "edges": 2.0}


def make(storage: Path, precision: str, **sections: Any) -> Config:
    train = {"epochs": 8, "lr": 0.02, "optimizer": "adam"}
    graph = dataset("HalfConverted", **DATASET)
    job = {"graph": graph, "sampling": {"batch_size": 2}, "train": train, **sections}
    return graph_job(storage, precision=precision, **job)


@pytest.mark.dgl
@pytest.mark.system
@pytest.mark.usefixtures("shared_ray")
def test_without_us_the_job_dies(tmp_path: Path) -> None:
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    from tests.support.plain_graphs import loop

    trainer = TorchTrainer(
        loop,
        train_loop_config=DATASET,
        torch_config=TorchConfig(backend="gloo", timeout_s=20),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name="plain", storage_path=str(tmp_path)),
    )
    with pytest.raises(Exception, match=r"(?s)dtype|Float|BFloat16"):
        trainer.fit()


@pytest.mark.dgl
@pytest.mark.system
@pytest.mark.usefixtures("shared_ray")
def test_ours_trains(tmp_path: Path) -> None:
    run = train(make(tmp_path, "bf16"), display=False)
    curve = losses(run)
    assert np.isfinite(curve).all()
    assert curve[-6:].mean() < curve[:6].mean()


@pytest.mark.dgl
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-mixed"])
def test_losses_do_not_depend_on_the_stored_dtype(precision: str, tmp_path: Path) -> None:
    """Equal values in bf16, fp16, fp32, fp64 or a mixture give equal losses."""
    curves = []
    for number, dtypes in enumerate((["fp32"], ["bf16"], ["fp64", "bf16", "fp16", "fp32"])):
        graph = {**dataset(**DATASET, dtypes=dtypes), "val": 0.0, "test": 0.0}
        train = {"epochs": 2, "lr": 0.02}
        config = make(tmp_path, precision, graph=graph, name=f"run{number}", train=train)
        curves.append(losses(train_on_ranks(config)).tolist())
    assert curves[0] == curves[1] == curves[2]


def _broken_on_rank_1(exchange: Exchange, job: Job) -> str:
    if exchange.world.rank == 1:
        made = Collate.__call__

        def unconverted(self: Collate, samples: Any) -> dict[str, Any]:
            parts = made(self, samples)
            return {**parts, "x": {t: rows.float() for t, rows in parts["x"].items()}}

        Collate.__call__ = unconverted  # type: ignore[method-assign]
    try:
        _train(exchange, job)
    except GuardError as error:
        return str(error)
    return "trained"


@pytest.mark.dgl
def test_a_conversion_that_one_rank_leaves_out(tmp_path: Path) -> None:
    """Every rank names the array and the rank before the first gradient."""
    said = run_ranks(2, _broken_on_rank_1, job_of(make(tmp_path, "bf16")), fresh=True)
    assert said[0] == said[1]
    assert re.search(r"step 0\b", said[0])
    assert "x/_N" in said[0]
    assert "torch.float32 on rank 1" in said[0]
    assert "torch.bfloat16 on rank 0" in said[0]


def test_sums_of_bf16_are_made_in_fp32() -> None:
    """A thousand ones sum to a thousand, not to 256, where bf16 stops counting."""
    from raygnn.models.message_passing import NATIVE
    from raygnn.sampling.batch import Adjacency

    adj = Adjacency(torch.tensor([0, 1000]), torch.zeros(1000, dtype=torch.int64))
    ones = torch.ones(1, 4, dtype=torch.bfloat16)
    out = NATIVE.aggregate(adj, ones, "sum")
    assert out.tolist() == [[1000.0] * 4]
