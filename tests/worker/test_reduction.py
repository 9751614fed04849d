"""What reduces the gradients is what the configuration says, on gloo, too."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from raygnn.config.execution import PowerSgdComm
from raygnn.config.schema import Config
from raygnn.sampling.exchange import Exchange
from raygnn.tasks.lightning_modules import Task
from raygnn.worker.comm import reduction
from raygnn.worker.comm.process_groups import Ranks
from raygnn.worker.comm.reduction import LowRank
from raygnn.worker.guard import callback
from raygnn.worker.job import Job
from raygnn.worker.records import Records
from tests.driver.test_resume import stopped
from tests.ranks import run_ranks
from tests.small_jobs import JobFactory, _train, job_of, losses, selected, train_on_ranks


@pytest.mark.parametrize("compression", ["fp16", "bf16"])
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
    """Rank 1 compresses to another type than rank 0, unknown to whoever compares options."""
    if exchange.world.rank:
        reduction._NARROW["bf16"] = torch.float16
    try:
        _train(exchange, job)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "trained"


@pytest.mark.parametrize("mode", ["on", "deep"])
def test_deep_compares_the_reductions_themselves(mode: str, make_job: JobFactory) -> None:
    """Without it, gloo adds bf16 to fp16 and says nothing."""
    config = make_job(
        guard=mode, comm={"compression": "bf16", "timeout": 20}, train={"max_steps": 2}
    )
    said = run_ranks(2, _with_a_wrong_hook, job_of(config), fresh=True)
    if mode == "on":
        assert said == ["trained", "trained"]
    else:
        assert all("Detected mismatch between collectives" in text for text in said), said


def _live(exchange: Exchange, job: Job) -> dict[str, Any]:
    """What the run's `DistributedDataParallel` says of itself, and over which group it reduced."""
    groups, found = set(), {}
    note, reduce = Records.on_train_end, reduction.dist.all_reduce

    def end(self: Records, trainer: Any, *args: Any) -> None:
        ddp = trainer.model
        found.update(
            bucket_cap_mb=ddp.bucket_bytes_cap / 2**20,
            find_unused_parameters=ddp.find_unused_parameters,
            static_graph=ddp.static_graph,
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
    "static_graph": False,
    "gradient_as_bucket_view": True,
    "hooked": False,
    "groups": set(),
}


@pytest.mark.parametrize(
    ("comm", "guard", "expected"),
    [
        ({}, "on", {}),
        (
            {"bucket_cap_mb": 1, "find_unused_parameters": True, "gradient_as_bucket_view": False},
            "on",
            {},
        ),
        ({"static_graph": True, "overlap": False}, "on", {"hooked": True, "groups": {"default"}}),
        ({"compression": "fp16"}, "on", {"hooked": True, "groups": {"default"}}),
        ({"compression": "bf16"}, "deep", {"hooked": True, "groups": {"another"}}),
        ({"debug": True}, "off", {"hooked": True, "groups": {"another"}}),
    ],
)
def test_the_keys_reach_what_they_name(
    comm: dict[str, Any], guard: str, expected: dict[str, Any], make_job: JobFactory
) -> None:
    config = make_job(comm=comm, guard=guard, train={"max_steps": 1})
    told = {key: value for key, value in comm.items() if key in USUAL}
    assert run_ranks(2, _live, job_of(config), fresh=True) == [USUAL | told | expected] * 2


def test_reduction_at_the_end_changes_nothing(make_job: JobFactory) -> None:
    """Several buckets, and batches that accumulate."""
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
    """Half of them with half the bits, and each gradient once in two batches that accumulate."""
    options: dict[str, Any] = {"train": {"max_steps": 12}, "model": {"hidden": 256}}
    sizes = {}
    for compression in ("none", "bf16", "fp16"):
        config = make_job(name=compression, comm={"compression": compression}, **options)
        run = train_on_ranks(config)
        sizes[compression] = run.metrics["bytes/gradients"].dropna().unique().tolist()
    whole = 4 * sum(tensor.numel() for tensor in selected(run).values())
    assert sizes == {"none": [whole], "bf16": [whole / 2], "fp16": [whole / 2]}
    options["train"] = {"max_steps": 6, "accumulate": 2}
    run = train_on_ranks(make_job(name="accumulate", **options))
    assert run.metrics["bytes/gradients"].dropna().unique().tolist() == [whole / 2]
    thin = {"compression": "powersgd", "powersgd_rank": 1, "powersgd_start": 3}
    run = train_on_ranks(make_job(name="thin", comm=thin, **options))
    sent = run.metrics["bytes/gradients"].dropna().tolist()
    assert sent[:3] == [whole / 2] * 3
    assert max(sent[3:]) < whole / 8


@pytest.mark.parametrize("stop", [1, 4])  # before DDP has its buckets, and within an epoch
@pytest.mark.parametrize("comm", [{}, {"compression": "powersgd", "powersgd_start": 3}])
def test_three_ranks_go_on_to_the_bit(
    comm: dict[str, Any], stop: int, make_job: JobFactory
) -> None:
    """In whose sums the order of ranks counts, which is another one in each part of a bucket."""
    options: dict[str, Any] = {
        "cluster": {"workers": 3},
        "comm": {"bucket_cap_mb": 1, **comm},
        "model": {"kind": "sage", "hidden": 300, "layers": 3},
        "sampling": {"fanout": [3, 3, 3]},
        "fault": {"checkpoint_every": 1, "keep": 20},
    }
    whole = train_on_ranks(make_job(name="whole", **options))
    rest = train_on_ranks(stopped(whole, make_job(name="rest", **options), stop), resume=True)
    assert np.array_equal(losses(whole), losses(rest))
    kept = selected(rest)
    assert all(torch.equal(weight, kept[name]) for name, weight in selected(whole).items())
    fewer = {**options, "train": {"epochs": 5}, "cluster": {"workers": 2}}
    fewer["comm"] = {**options["comm"], "find_unused_parameters": not comm}
    more = train_on_ranks(make_job(name="rest", **fewer), resume=True)
    assert more.summary["epochs"] == 5


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
    """Of a user's own module; DDP takes no others for them."""
    options: dict[str, Any] = {
        "model": {"kind": f"{__name__}:SparseRows"},
        "train": {"optimizer": "sgd", "epochs": 2},
        "fault": {"checkpoint_every": 1, "keep": 20},
    }
    whole = train_on_ranks(make_job(name="whole", **options))
    rest = train_on_ranks(stopped(whole, make_job(name="rest", **options), 3), resume=True)
    assert np.array_equal(losses(whole), losses(rest))


# ── PowerSGD ─────────────────────────────────────────────────────────────────────────────────


class _Bucket:
    """What DDP would hand to a hook: one of all gradients."""

    def __init__(self, parameters: list[nn.Parameter], gradients: list[Tensor]):
        self._parameters = parameters
        self._flat = torch.cat([gradient.flatten() for gradient in gradients])

    def buffer(self) -> Tensor:
        return self._flat

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True

    def parameters(self) -> list[nn.Parameter]:
        return self._parameters

    def gradients(self) -> list[Tensor]:
        parts = self._flat.split([p.numel() for p in self._parameters])
        return [part.view_as(p) for part, p in zip(parts, self._parameters)]


def _low_rank(exchange: Exchange, config: Config, seed: int) -> list[float]:
    """How far what came out, with what is still left out, is from what went in, before and after
    a restart; and from the mean, of the first steps."""
    net = nn.Sequential(nn.Linear(20, 24), nn.Linear(24, 3))
    assert isinstance(config.comm, PowerSgdComm)
    comm, ranks = config.comm, Ranks(config, exchange.world, torch.device("cpu"))
    torch.manual_seed(seed + 100 * exchange.world.rank)
    power = LowRank(net, comm, seed, None, {}, relaid=True)
    reduction_of = reduction.Reduction(ranks)
    went = came = torch.zeros(sum(p.numel() for p in net.parameters()))
    exact, distances = 0.0, []
    for step in range(12):
        if step == 8:
            reduction_of.load_state_dict(
                {"steps": 8, "buckets": _shared(power.state(ranks), exchange)}
            )
            power = LowRank(net, comm, seed, None, reduction_of._saved, relaid=True)
        parameters = list(net.parameters())
        bucket = _Bucket(parameters, [torch.randn(p.shape) for p in parameters])
        mean = exchange.sum(bucket.buffer().clone()) / exchange.world.size
        out = power.reduce(bucket).wait()  # type: ignore[arg-type]
        went, came = went + mean, came + out
        if step < max(2, comm.powersgd_start):
            exact = max(exact, float((out - mean).abs().max()))
        elif step != 8:  # the first of a start is exact, and keeps what is left out for the next
            left = exchange.sum(power._state.error_dict[0].clone()) / exchange.world.size
            distances.append(float((went - came - left).abs().max()))
    return [exact, *distances]


def _shared(state: dict[str, Any], exchange: Exchange) -> dict[int, dict[str, Any]]:
    """Rank 0's state on all ranks, as a checkpoint would bring it."""
    (text,) = [t for t in exchange.gather_json(_plain(state["buckets"])) if t]
    return {
        int(index): {
            name: value if name == "names" else torch.tensor(value) for name, value in one.items()
        }
        for index, one in text.items()
    }


def _plain(buckets: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    return {
        index: {n: v.tolist() if isinstance(v, Tensor) else v for n, v in one.items()}
        for index, one in buckets.items()
    }


@pytest.mark.parametrize(("width", "start", "seed"), [(1, 0, 3), (2, 4, 5), (4, 2, 8)])
def test_powersgd_loses_nothing(width: int, start: int, seed: int, make_job: JobFactory) -> None:
    comm = {"compression": "powersgd", "powersgd_rank": width, "powersgd_start": start}
    for exact, *distances in run_ranks(2, _low_rank, make_job(comm=comm), seed):
        assert exact < 1e-6
        assert len(distances) == 11 - max(2, start)
        assert max(distances) < 1e-4


@pytest.mark.parametrize("on_gpu", [False, True])
def test_gradients_that_are_not_finite_once(
    on_gpu: bool, make_job: JobFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one rank, in one batch: that step is left out, and training goes on; also where the
    optimizer's kernel could decide on it."""
    monkeypatch.setattr(callback, "_on_gpu", lambda tensor: on_gpu)
    step = Task.training_step

    def odd(self: Task, batch: Any, index: int) -> Tensor:
        loss = step(self, batch, index)
        bad = self.global_rank == 1 and (batch.epoch, batch.step) == (1, 1)
        return loss * float("nan") if bad else loss

    monkeypatch.setattr(Task, "training_step", odd)
    thin = {"compression": "powersgd", "powersgd_rank": 1, "powersgd_start": 1}
    run = train_on_ranks(make_job(comm=thin, model={"hidden": 64}, train={"epochs": 3}))
    assert run.summary["skipped"]["steps"] == 1
    assert losses(run)[-1] < 1.0
