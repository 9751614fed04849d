"""Reduction of gradients: it is the configured one, on gloo, too."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from raygnn.sampling.exchange import Exchange
from raygnn.worker.comm import reduction
from raygnn.worker.job import Job
from raygnn.worker.records import Records
from tests.driver.test_resume import stopped
from tests.support.ranks import run_ranks
from tests.support.small_jobs import JobFactory, _train, job_of, losses, selected, train_on_ranks

pytestmark = pytest.mark.long


@pytest.mark.parametrize("compression", ["fp16"])
def test_compressed_gradients_train_nearly_the_same(compression: str, make_job: JobFactory) -> None:
    plain, short = (
        losses(
            train_on_ranks(
                make_job(
                    name=kind,
                    comm={"compression": kind},
                    model={"hidden": 64},
                    train={"optimizer": "sgd", "lr": 0.5},  # which sees the scale of a gradient
                )
            )
        )
        for kind in ("none", compression)
    )
    assert np.allclose(plain, short, atol=0.02)
    assert not np.array_equal(plain, short)  # rounded, so they were compressed


def _with_a_wrong_hook(exchange: Exchange, job: Job) -> str:
    """Let rank 1 compress to another dtype than rank 0, invisibly to a comparison of options."""
    if exchange.world.rank:
        reduction._NARROW["bf16"] = torch.float16
    try:
        _train(exchange, job)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "trained"


@pytest.mark.parametrize("mode", ["on", "deep"])
def test_deep_compares_the_reductions_themselves(mode: str, make_job: JobFactory) -> None:
    """Without it, gloo adds bf16 to fp16 silently."""
    config = make_job(
        guard={"mode": mode}, comm={"compression": "bf16", "timeout": 20}, train={"max_steps": 2}
    )
    said = run_ranks(2, _with_a_wrong_hook, job_of(config), fresh=True)
    if mode == "on":
        assert said == ["trained", "trained"]
    else:
        assert all("Detected mismatch between collectives" in text for text in said), said


def _live(exchange: Exchange, job: Job) -> dict[str, Any]:
    """Return the settings of the run's `DistributedDataParallel`, and the groups that it reduced
    over."""
    groups, found = set(), {}
    note, reduce = Records.on_train_end, reduction.dist.all_reduce

    def end(self: Records, trainer: Any, *args: Any) -> None:
        ddp = trainer.model
        found.update(
            bucket_cap_mb=ddp.bucket_bytes_cap / 2**20,
            find_unused_parameters=ddp.find_unused_parameters,
            gradient_as_bucket_view=ddp.gradient_as_bucket_view,
            hooked=bool(ddp._get_ddp_logging_data().get("comm_hook")),
        )
        note(self, trainer, *args)

    def seen(values: Tensor, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("async_op") and values.dtype != torch.float64:  # which records are summed in
            groups.add("default" if kwargs["group"] is None else "another")
        return reduce(values, *args, **kwargs)

    Records.on_train_end = end  # type: ignore[method-assign]
    reduction.dist.all_reduce = seen
    _train(exchange, job)
    return {**found, "groups": groups}


USUAL = {
    "bucket_cap_mb": 25,
    "find_unused_parameters": False,
    "gradient_as_bucket_view": True,
    "hooked": False,
    "groups": set(),
}


@pytest.mark.parametrize(
    ("comm", "guard", "expected"),
    [
        ({}, "on", {}),
        ({"bucket_cap_mb": 1, "find_unused_parameters": True}, "on", {}),
        ({"overlap": False}, "on", {"hooked": True, "groups": {"default"}}),
        ({"compression": "bf16"}, "deep", {"hooked": True, "groups": {"another"}}),
    ],
)
def test_the_keys_reach_what_they_name(
    comm: dict[str, Any], guard: str, expected: dict[str, Any], make_job: JobFactory
) -> None:
    config = make_job(comm=comm, guard={"mode": guard}, train={"max_steps": 1})
    told = {key: value for key, value in comm.items() if key in USUAL}
    assert run_ranks(2, _live, job_of(config), fresh=True) == [USUAL | told | expected] * 2


def test_reduction_at_the_end_changes_nothing(make_job: JobFactory) -> None:
    """Gradients have several buckets, and batches accumulate."""
    for compression in ("none", "bf16"):
        runs = [
            train_on_ranks(
                make_job(
                    name=f"{compression}-{overlap}",
                    comm={"compression": compression, "overlap": overlap, "bucket_cap_mb": 1},
                    model={"hidden": 512, "layers": 3},
                    sampling={"fanout": [3, 3, 3]},
                    train={"max_steps": 5, "accumulate": 2},
                )
            )
            for overlap in (True, False)
        ]
        assert np.array_equal(*map(losses, runs))


def test_bytes_that_are_reduced(make_job: JobFactory) -> None:
    """Half the bits need half the bytes, and two accumulated batches reduce each gradient once."""
    options: dict[str, Any] = {"train": {"max_steps": 3}, "model": {"hidden": 256}}
    sizes = {}
    for compression in ("none", "bf16"):
        config = make_job(name=compression, comm={"compression": compression}, **options)
        run = train_on_ranks(config)
        sizes[compression] = run.metrics["bytes/gradients"].dropna().unique().tolist()
    whole = 4 * sum(tensor.numel() for tensor in selected(run).values())
    assert sizes == {"none": [whole], "bf16": [whole / 2]}
    options["train"] = {"max_steps": 6, "accumulate": 2}
    run = train_on_ranks(make_job(name="accumulate", **options))
    assert run.metrics["bytes/gradients"].dropna().unique().tolist() == [whole / 2]


@pytest.mark.parametrize("stop", [1, 4])  # before DDP has its buckets, and within an epoch
def test_three_ranks_go_on_to_the_bit(stop: int, make_job: JobFactory) -> None:
    """A resume is bitwise identical, though the order of ranks affects sums of three, and differs
    between the parts of a bucket."""
    options: dict[str, Any] = {
        "cluster": {"workers": 3},
        "comm": {"bucket_cap_mb": 1},
        "model": {"kind": "sage", "hidden": 300, "layers": 3},
        "sampling": {"fanout": [3, 3, 3]},
        "fault": {"checkpoint_every": 1, "keep": 20},
    }
    whole = train_on_ranks(make_job(name="whole", **options))
    rest = train_on_ranks(stopped(whole, make_job(name="rest", **options), stop), resume=True)
    assert np.array_equal(losses(whole), losses(rest))
    kept = selected(rest)
    assert all(torch.equal(weight, kept[name]) for name, weight in selected(whole).items())
    fewer = {**options, "train": {"epochs": 3}, "cluster": {"workers": 2}}
    fewer["comm"] = {**options["comm"], "find_unused_parameters": True}
    more = train_on_ranks(make_job(name="rest", **fewer), resume=True)
    assert more.summary["epochs"] == 3


class SparseRows(nn.Module):
    def __init__(self, in_features: int, out_features: int):
        super().__init__()
        self.register_buffer("sparse", torch.zeros(3))  # a name like any other
        self.rows = nn.Embedding(2, out_features, sparse=True)
        self.linear = nn.Linear(in_features, out_features)

    def forward(self, blocks: Any, x: Tensor) -> Tensor:
        seeds = x[: blocks[-1].num_dst_nodes()]
        return self.linear(seeds) + self.rows((seeds[:, 0] > 0).long())


@pytest.mark.dgl
def test_sparse_gradients_go_on(make_job: JobFactory) -> None:
    """A user's module keeps sparse gradients after a resume; DDP accepts no dense ones for it."""
    options: dict[str, Any] = {
        "model": {"kind": f"{__name__}:SparseRows"},
        "train": {"optimizer": "sgd", "epochs": 2},
        "fault": {"checkpoint_every": 1, "keep": 20},
    }
    whole = train_on_ranks(make_job(name="whole", **options))
    rest = train_on_ranks(stopped(whole, make_job(name="rest", **options), 3), resume=True)
    assert np.array_equal(losses(whole), losses(rest))
