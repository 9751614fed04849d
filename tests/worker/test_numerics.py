"""Numerical results: a job computes the same on any number of ranks."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy

from raygnn.runs.run import Run
from raygnn.sampling.exchange import Exchange
from raygnn.worker.job import Job
from raygnn.worker.rank import Rank
from raygnn.worker.rank_setup import Runtime
from tests.support.ranks import run_ranks
from tests.support.small_jobs import JobFactory, slow_but, train_on_ranks


def losses(run: Run) -> list[float]:
    return [float(v) for v in run.metrics["train/loss"].dropna()]


LONG = {"epochs": 8, "eval_every": 8}
KINDS = ["gcn", "sage", "gat", "rgcn", "hgt", "han"]


@pytest.mark.parametrize("kind", slow_but(("gcn", "gat", "hgt"), KINDS))
def test_one_worker_and_several_train_the_same_model(kind: str, make_job: JobFactory) -> None:
    """With full neighbourhoods, no dropout and the same global batches, losses agree to 1e-4.

    This can only hold if halo, remote features, degrees and the averaging of gradients over
    unequal shares are right.
    """
    curves = {}
    for workers, batch in ((1, 120), (3, 40)):
        config = make_job(
            name=f"{kind}-{workers}",
            model={"kind": kind},
            sampling={"fanout": [-1, -1], "batch_size": batch},
            train={"epochs": 4, "eval_every": 4},
            cluster={"workers": workers},
        )
        curves[workers] = losses(train_on_ranks(config))
        assert len(curves[workers]) == 16
    assert curves[1][-1] < 0.9 * curves[1][0]
    assert np.allclose(curves[1], curves[3], atol=1e-4), curves


def test_sampled_training_is_the_same_for_any_topology(make_job: JobFactory) -> None:
    """Sampling is keyed, so fanouts and the cache do not matter either."""
    cases = [(True, 1, 120, 0.0), (True, 2, 60, 0.5), (False, 3, 40, 0.2), (False, 2, 60, 0.0)]
    curves = []
    for number, (replicated, workers, batch, cache) in enumerate(cases):
        config = make_job(
            name=f"run-{number}",
            sampling={"batch_size": batch, "cache": cache, "prefetch": number % 3},
            cluster={"workers": workers},
        )
        curves.append(losses(train_on_ranks(config, replicated=replicated)))
    for curve in curves[1:]:
        assert np.allclose(curves[0], curve, atol=1e-4), curves


@pytest.mark.parametrize("kind", slow_but("sage", ["sage", "gat"]))
def test_precision(kind: str, make_job: JobFactory) -> None:
    """The model learns in each precision, and its weights are kept in the expected dtype."""
    curves, dtypes = {}, {}
    for precision in ("fp32", "bf16", "bf16-mixed"):
        config = make_job(name=precision, precision=precision, model={"kind": kind}, train=LONG)
        run = train_on_ranks(config)
        assert run.summary["metrics"]["test/accuracy"] > 0.8
        curves[precision] = np.array(losses(run)[:4])
        weights = torch.load(run.path / "checkpoints" / "selected.pt", weights_only=True)
        dtypes[precision] = {tensor.dtype for tensor in weights.values()}
    assert dtypes == {
        "fp32": {torch.float32},
        "bf16": {torch.bfloat16},
        "bf16-mixed": {torch.float32},
    }
    for precision in ("bf16", "bf16-mixed"):
        assert 1e-5 < np.abs(curves[precision] - curves["fp32"]).max() < 0.1


def test_knobs_reach_the_loop(make_job: JobFactory) -> None:
    train = {
        "epochs": 50,
        "max_steps": 5,
        "accumulate": 2,
        "clip": 1.0,
        "optimizer": "sgd",
        "momentum": 0.9,
        "lr": 0.1,
        "lr_scaling": "sqrt",
    }
    config = make_job(train=train, sampling={"prefetch": 0, "replace": True})
    run = train_on_ranks(config)
    assert run.summary["steps"] == 5
    assert run.metrics["train/lr"].dropna().iloc[0] == pytest.approx(0.1 * 2**0.5)
    assert run.metrics["val/accuracy"].notna().any()  # also when it ends within an epoch


@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
def test_clipping_under_autocast(optimizer: str, make_job: JobFactory) -> None:
    train = {"optimizer": optimizer, "clip": 1.0}
    config = make_job(train=train, precision="bf16-mixed", cluster={"workers": 1})
    assert losses(train_on_ranks(config))[-1] < 1.5  # Lightning clips no fused optimizer there


@pytest.mark.parametrize("compression", ["none", "bf16"])
def test_comparing_collectives_changes_nothing(compression: str, make_job: JobFactory) -> None:
    curves = [
        losses(train_on_ranks(make_job(name=f"{d}", comm={"debug": d, "compression": compression})))
        for d in (False, True)
    ]
    assert np.allclose(*curves, atol=1e-6)


def _disagree(exchange: Exchange, job: Job) -> str:
    """Reduce another dtype on each rank, which gloo does without an error."""
    given = exchange.world, torch.device("cpu"), DDPStrategy, LightningEnvironment()
    runtime = Runtime(*given, lambda: None)
    rank = Rank(job, runtime)
    dtype = torch.bfloat16 if exchange.world.rank else torch.float16
    try:
        dist.all_reduce(torch.ones(4, dtype=dtype), group=rank.ranks.data.group)
    except RuntimeError as error:
        return str(error)
    return ""


def test_debug_compares_collectives(make_job: JobFactory) -> None:
    for debug, word in ((False, ""), (True, "Detected mismatch between collectives")):
        config = make_job(name=f"{debug}", comm={"debug": debug, "timeout": 20})
        job = Job(config, Path(), Path(), {}, True, 0.0, 128)
        said = run_ranks(2, _disagree, job)
        assert all(word in text if word else not text for text in said)


def test_patience_stops_and_the_best_weights_are_tested(make_job: JobFactory) -> None:
    config = make_job(train={"epochs": 40, "patience": 2, "lr": 0.3})
    run = train_on_ranks(config)
    scores = run.metrics["val/accuracy"].dropna().to_list()
    assert run.summary["epochs"] < 40
    assert run.summary["metrics"]["val/accuracy"] == pytest.approx(max(scores), abs=1e-6)
    assert run.summary["best_epoch"] == int(np.argmax(scores))


@pytest.mark.parametrize("norm", ["none", "batch"])
def test_more_workers_than_seeds(norm: str, make_job: JobFactory) -> None:
    """With two seeds on three ranks, a rank has none of its own, and does not hang."""
    graph = {"nodes": 60, "degree": 6, "classes": 2, "features": 4, "train": 0.05, "val": 0.2}
    model = {"norm": norm}
    curves = [
        losses(
            train_on_ranks(make_job(name=f"{w}", graph=graph, model=model, cluster={"workers": w}))
        )
        for w in (1, 4)
    ]
    assert np.allclose(*curves, atol=1e-4)


def test_accumulated_batches_are_one_batch(make_job: JobFactory) -> None:
    """Plain SGD shows the scale of a gradient, also at the short end of an epoch."""
    train = {"epochs": 3, "optimizer": "sgd", "lr": 0.5}
    common: dict[str, Any] = {"sampling": {"fanout": [-1, -1]}, "cluster": {"workers": 1}}
    weights = []
    for batch, accumulate in ((300, 1), (150, 2), (100, 3), (75, 4)):
        options = copy.deepcopy(common)
        options["sampling"]["batch_size"] = batch
        options["train"] = {**train, "accumulate": accumulate}
        run = train_on_ranks(make_job(name=f"by-{accumulate}", **options))
        assert run.summary["steps"] == 6  # 400 seeds: 300 and 100, three times
        weights.append(torch.load(run.path / "checkpoints" / "selected.pt", weights_only=True))
    for other in weights[1:]:
        for name, tensor in weights[0].items():
            assert torch.allclose(tensor, other[name], atol=1e-4), name


@pytest.mark.parametrize(  # after layers, and within
    ("kind", "fanout"),
    [
        ("gin", -1),
        ("hgt", 4),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in zip(KINDS, (-1, 4, -1))),
    ],
)
def test_batch_norm_is_that_of_the_global_batch(
    kind: str, fanout: int, make_job: JobFactory
) -> None:
    """For any number of workers, although each has a community of its own: the same losses, the
    same metrics, and the same running statistics in the weights that are kept."""
    curves, kept, metrics = [], [], []
    for workers, batch in ((1, 120), (3, 40)):
        config = make_job(
            name=f"by-{workers}",
            model={"kind": kind, "norm": "batch"},
            partition={"method": "metis"},
            sampling={"fanout": [fanout, fanout], "batch_size": batch},
            cluster={"workers": workers},
        )
        run = train_on_ranks(config)
        curves.append(losses(run))
        metrics.append(run.summary["metrics"])
        kept.append(torch.load(run.path / "checkpoints" / "selected.pt", weights_only=True))
    for curve, weights, found in zip(curves[1:], kept[1:], metrics[1:], strict=True):
        assert np.allclose(curves[0], curve, atol=1e-4), curves
        assert found == pytest.approx(metrics[0], abs=2e-4)
        statistics = [name for name in weights if "running_" in name]
        assert statistics
        for name in statistics:
            assert torch.allclose(weights[name], kept[0][name], rtol=1e-3, atol=1e-3), name


def test_sums_are_evaluated_at_the_scale_of_training(make_job: JobFactory) -> None:
    """With five neighbours of forty, an unscaled sum would be so much smaller that the losses of
    nearly constant weights would be far apart."""
    config = make_job(
        graph={"degree": 40, "train": 0.5},
        model={"kind": "sage", "aggregator": "sum"},
        sampling={"fanout": [5, 5]},
        train={"epochs": 1, "lr": 1e-8},
    )
    summary = train_on_ranks(config).summary
    assert summary["metrics"]["val/loss"] == pytest.approx(summary["train_loss"], rel=0.4)


def test_layers_that_are_computed_again_train_the_same_model(make_job: JobFactory) -> None:
    """Results are bitwise identical, with dropout, running statistics and accumulated batches."""
    found = []
    for recompute in (False, True):
        model = {"kind": "gatv2", "norm": "batch", "dropout": 0.3, "recompute": recompute}
        config = make_job(
            name=f"{recompute}", model=model, train={"accumulate": 2, "max_steps": 4, "epochs": 3}
        )
        run = train_on_ranks(config)
        weights = torch.load(run.path / "checkpoints" / "selected.pt")
        found.append((losses(run), run.summary["metrics"], weights))
    assert found[0][:2] == found[1][:2]
    assert all(torch.equal(tensor, found[1][2][name]) for name, tensor in found[0][2].items())


def test_what_the_target_does_not_depend_on_is_left_out(make_job: JobFactory) -> None:
    """With one layer on a typed graph, no rank computes users, and no parameter is unused."""
    config = make_job(
        graph={"typed": True},
        model={"kind": "gat", "layers": 1},
        sampling={"fanout": [5]},
        train={"epochs": 12, "lr": 0.03, "eval_every": 12},
    )
    assert train_on_ranks(config).summary["metrics"]["test/accuracy"] > 0.5
