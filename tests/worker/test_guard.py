"""Ranks that are about to do different things fail together, on real process groups."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn

from raygnn.config.execution import GuardConfig
from raygnn.errors import GuardError
from raygnn.sampling.batch import Batch
from raygnn.sampling.exchange import Exchange, World
from raygnn.worker.comm import fingerprint
from raygnn.worker.comm import guard as guard_module
from raygnn.worker.comm.guard import Guard
from tests.support.ranks import run_ranks
from tests.support.small_jobs import runtime

Change = Callable[[int, "Setup"], None]
SAID = ("what", "where", "remedy", "rank")  # of an error


class TwoBranches(nn.Module):
    """Two branches, of which a batch may take one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 3)
        self.branch = nn.Linear(3, 3)
        self.last = nn.Linear(3, 1)

    def forward(self, x: Tensor, both: bool) -> Tensor:
        h = self.first(x)
        return self.last(self.branch(h) if both else h)


class GuardedTask(pl.LightningModule):
    def __init__(self, setup: Setup):
        super().__init__()
        self.model = setup.net
        self.setting = setup

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        number = batch.epoch * len(self.setting.batches) + batch.step
        own = torch.autocast("cpu", torch.bfloat16) if self.setting.autocast else nullcontext()
        with own:
            loss = self.model(batch.x["_N"], number not in self.setting.one_branch).mean()
        return loss * self.setting.factors.get(number, 1.0)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.setting.optimizer(self.parameters())


def batch(step: int, rows: int, **changes: Any) -> Batch:
    x = torch.linspace(-1, 1, 4).expand(rows, 4) + step
    values: dict[str, Any] = {
        "blocks": [],
        "x": {"_N": x},
        "combined": {},
        "degree": {},
        "categories": {},
        "seeds": torch.arange(rows),
        "pairs": torch.zeros(2, rows, dtype=torch.int64),
        "y": torch.zeros(rows),
        "weight": torch.ones(rows),
        "total": 5,
        "window": 5,
        "epoch": 0,
        "step": step,
    }
    return Batch(**{**values, **changes})


@dataclass
class Setup:
    """Job of a rank, for a test to tamper with.

    Attributes:
        one_branch: batches that leave the middle layer out.
        factors: batch → what its loss is multiplied by.
    """

    batches: list[Batch]
    net: nn.Module = field(default_factory=TwoBranches)
    guard: dict[str, Any] | None = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=lambda: {"bucket_cap_mb": 25})
    optimizer: Any = field(default_factory=lambda: partial(torch.optim.SGD, lr=0.1))
    precision: str | None = "32-true"
    plugin: Any = None
    accumulate: int = 1
    clip: float | None = None
    autocast: bool = False
    one_branch: set[int] = field(default_factory=set)
    factors: dict[int, float] = field(default_factory=dict)
    global_step: int = 0


class Loader:
    """Loader of batches; Lightning would take each batch of a list for a loader."""

    def __init__(self, batches: list[Batch]):
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Batch]:
        return iter(self._batches)


class Watch(pl.Callback):
    """Records parameters, gradients and optimizer state after each batch."""

    def __init__(self, setup: Setup):
        self.setup_ = setup
        self.parameters: list[list[float]] = []
        self.gradients: list[list[float]] = []
        self.states: list[list[float]] = []
        self.reduced = 0
        self.buffers: list[list[float]] = []

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        loop = trainer.fit_loop.epoch_loop.automatic_optimization
        loop.optim_progress.optimizer.step.total.completed = self.setup_.global_step
        self._note(trainer, module)

    def on_after_backward(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.reduced += 1
        found = [p.grad for p in module.parameters() if p.grad is not None]
        self.gradients.append(torch.cat([g.flatten() for g in found]).tolist())

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        self._note(trainer, module)

    def _note(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        values = [p.detach().flatten() for p in module.parameters()]
        self.parameters.append(torch.cat(values).tolist())
        self.buffers.append([v for b in module.buffers() for v in b.double().flatten().tolist()])
        state = trainer.optimizers[0].state
        own = [v for p in module.parameters() for v in state.get(p, {}).values()]
        self.states.append([float(v.double().sum()) for v in own if v is not None])


def train(exchange: Exchange, change: Change, batches: int = 3) -> dict[str, Any]:
    """Train on one rank with the guard's calls as in a run; return what it observed."""
    rank, place = exchange.world.rank, runtime(exchange) if exchange.world.size > 1 else None
    setup = Setup([batch(step, rows=2 + rank) for step in range(batches)])
    change(rank, setup)
    task, watch = GuardedTask(setup), Watch(setup)
    guard = None if setup.guard is None else Guard(exchange, GuardConfig(**setup.guard))
    trainer = pl.Trainer(
        accelerator="cpu" if place is None else place.device.type,
        devices=1,
        strategy=place.strategy(**setup.options) if place else "auto",
        plugins=[
            *([place.environment] if place else []),
            *([setup.plugin] if setup.plugin else []),
        ],
        precision=setup.precision,
        accumulate_grad_batches=setup.accumulate,
        gradient_clip_val=setup.clip,
        max_epochs=1,
        callbacks=[watch] if guard is None else [guard, watch],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    met: dict[str, Any] = {}
    try:
        if guard is not None:
            guard.check_model(task, setup.options)
        trainer.fit(task, Loader(setup.batches))
    except GuardError as error:
        met = {name: getattr(error, name) for name in SAID}
    except RuntimeError as error:
        met = {"other": str(error)}
    if guard is not None:
        met |= {"skipped": guard.skipped_steps, "state": guard.state_dict()}
    names = ("parameters", "gradients", "states", "reduced", "buffers")
    return met | {name: getattr(watch, name) for name in names}


def alike(size: int, change: Change, batches: int = 3) -> dict[str, Any]:
    """Train on ``size`` ranks, which must all fail with the same error; return rank 0's."""
    met = run_ranks(size, train, change, batches)
    for name in SAID:
        assert all(own.get(name) == met[0].get(name) for own in met), met
    assert "what" in met[0], met[0]
    return met[0]


def unlike(rank: int, change: Callable[[Setup], object]) -> Change:
    """Return a change that applies to one rank only."""

    def apply(own: int, setup: Setup) -> None:
        if own == rank:
            change(setup)

    return apply


def told(setup: Setup) -> None:
    """No change: what happens without one is a test's foundation."""


# ranks that agree


@pytest.mark.parametrize("size", [1, 2, 3])
def test_ranks_that_agree_train(size: int) -> None:
    """Batches of different lengths, and pairs whose rows are their second dimension."""
    if size == 1:
        met = [train(Exchange(World(0, 1)), unlike(0, told))]
    else:
        met = run_ranks(size, train, unlike(0, told))
    for own in met:
        assert "what" not in own, own
        assert own["parameters"] == met[0]["parameters"]
        assert own["parameters"][0] != own["parameters"][1] != own["parameters"][2]
        assert own["skipped"] == 0


def test_a_batch_without_rows_is_compared() -> None:
    def change(rank: int, setup: Setup) -> None:
        if rank == 1:
            dtype = torch.float16
            setup.batches[0].categories["_N"] = {"kind": torch.zeros(0, dtype=dtype)}
        else:
            setup.batches[0].categories["_N"] = {"kind": torch.zeros(3, dtype=torch.int64)}

    error = alike(2, change)
    assert error["what"] == (
        "ranks differ: batch categories/_N/kind: "
        "dtype torch.int64 on rank 0, torch.float16 on rank 1"
    )


def _count_compares(exchange: Exchange) -> list[tuple[str, list[str]]]:
    seen = []

    def count(exchange: Exchange, sections: Any, where: str) -> None:
        seen.append((where, list(sections)))
        fingerprint.compare(exchange, sections, where)

    guard_module.compare = count  # in this process alone, which is fresh

    def every_two(rank: int, setup: Setup) -> None:
        setup.guard = {"every": 2}
        setup.accumulate = 3

    train(exchange, every_two, 5)
    return seen


def test_first_batch_and_every_so_many_are_compared() -> None:
    """The interval counts batches, since steps do not advance while batches are accumulated."""
    for seen in run_ranks(2, _count_compares, fresh=True):
        wheres = [where for where, _ in seen]
        assert wheres == ["before training", *(2 * ["step 0"]), *(2 * ["step 0"])] + 2 * ["step 1"]
        before_step = ["position", "batch", "parameters", "optimizers"]
        assert [names for _, names in seen[1:]] == 3 * [before_step, ["numerics"]]


def test_batches_are_not_held_on_to() -> None:
    guard = Guard(Exchange(World(0, 1)), GuardConfig(mode="off"))
    share = batch(0, rows=2)
    alive = weakref.ref(share)
    guard.on_train_batch_start(None, None, share, 0)
    del share
    assert alive() is None


# before training


def reordered(setup: Setup) -> None:
    first = setup.net.first
    del setup.net.first
    setup.net.first = first


def converted(setup: Setup) -> None:
    for own in setup.batches:
        own.x = {"_N": own.x["_N"].bfloat16()}


# ranks, the one that is unlike the others, what is done to it, what is said of it (to a ";": and
# more), and the section whose remedy is given
DIFFERENCES: dict[str, tuple[int, int, Callable[[Setup], object], str, str]] = {
    "half": (
        2,
        1,
        lambda s: s.net.half(),
        "parameter model.first.weight: dtype torch.float32 on rank 0, torch.float16 on rank 1;",
        "parameters",
    ),
    "bf16": (
        3,
        1,
        lambda s: s.net.bfloat16(),
        "parameter model.first.weight: dtype torch.float32 on ranks 0 and 2, torch.bfloat16 on "
        "rank 1;",
        "parameters",
    ),
    "frozen": (
        3,
        2,
        lambda s: s.net.branch.requires_grad_(False),
        "parameter model.branch.weight: requires_grad true on ranks 0 and 1, false on rank 2; "
        "parameter model.branch.bias: requires_grad true on ranks 0 and 1, false on rank 2",
        "parameters",
    ),
    "order": (
        2,
        0,
        reordered,
        "parameter 0 is model.branch.weight on rank 0, model.first.weight on rank 1;",
        "order",
    ),
    "options": (
        3,
        0,
        lambda s: setattr(s, "options", {"bucket_cap_mb": 1, "overlap": True}),
        "option bucket_cap_mb: 25 on ranks 1 and 2, 1 on rank 0; "
        "option overlap: missing on ranks 1 and 2, present on rank 0",
        "options",
    ),
    "lr": (
        3,
        2,
        lambda s: setattr(s, "optimizer", partial(torch.optim.SGD, lr=0.2)),
        "optimizer group 0: lr 0.1 on ranks 0 and 1, 0.2 on rank 2",
        "optimizers",
    ),
    "batch": (
        3,
        1,
        converted,
        "batch x/_N: dtype torch.float32 on ranks 0 and 2, torch.bfloat16 on rank 1",
        "batch",
    ),
    "global step": (
        3,
        0,
        lambda s: setattr(s, "global_step", 4),
        "global step: 0 on ranks 1 and 2, 4 on rank 0",
        "position",
    ),
    "step": (
        3,
        0,
        lambda s: setattr(s.batches[0], "step", 4),
        "batch step: 0 on ranks 1 and 2, 4 on rank 0",
        "position",
    ),
    "total": (
        3,
        0,
        lambda s: setattr(s.batches[0], "total", 4),
        "batch total: 5 on ranks 1 and 2, 4 on rank 0",
        "position",
    ),
    # Read where the model runs: Lightning enters autocast around training_step, a module's own
    # code within it; either is found before a gradient is reduced.
    "autocast of the module": (
        2,
        1,
        lambda s: setattr(s, "autocast", True),
        "autocast cpu: off on rank 0, torch.bfloat16 on rank 1",
        "numerics",
    ),
    "autocast of the trainer": (
        2,
        1,
        lambda s: setattr(s, "precision", "bf16-mixed"),
        "autocast cpu: off on rank 0, torch.bfloat16 on rank 1",
        "numerics",
    ),
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_ranks_that_differ(name: str) -> None:
    size, rank, change, what, section = DIFFERENCES[name]
    error = alike(size, unlike(rank, change))
    said = error["what"].removeprefix("ranks differ: ")
    assert said.startswith(what) if what.endswith(";") else said == what
    assert error["remedy"] == fingerprint.REMEDIES[section]
    assert error["rank"] == (rank if size == 3 else 0)  # of two ranks, either may be right
    before = section in ("parameters", "order", "options")
    assert error["where"] == ("before training" if before else "step 0")  # as most ranks see it
    assert error["reduced"] == 0
    assert not (before and error["parameters"])  # the trainer had not begun


def test_a_layer_more() -> None:
    def change(setup: Setup) -> None:
        setup.net.extra = nn.ModuleList(nn.Linear(2, 2) for _ in range(300))

    error = alike(3, unlike(1, change))
    assert error["what"].count("present on rank 1") == 10
    assert error["what"].endswith(" more")


def test_an_array_that_comes_later_on_one_rank() -> None:
    def change(setup: Setup) -> None:
        setup.guard = {"every": 2}
        setup.batches[2].x["late"] = torch.zeros(1)

    def both(rank: int, setup: Setup) -> None:
        setup.guard = {"every": 2}
        unlike(1, change)(rank, setup)

    error = alike(2, both)
    assert error["what"] == "ranks differ: batch x/late: missing on rank 0, present on rank 1"
    assert (error["where"], error["reduced"]) == ("step 2", 2)


def test_autocast_on_all_ranks_is_fine() -> None:
    def change(rank: int, setup: Setup) -> None:
        setup.precision = "bf16-mixed"

    for own in run_ranks(2, train, change):
        assert "what" not in own


# parameters without a gradient


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_parameter_that_is_not_used_on_one_rank(accumulate: int) -> None:
    def change(rank: int, setup: Setup) -> None:
        setup.accumulate = accumulate
        if rank == 1:
            setup.one_branch = {1}

    other, own = run_ranks(2, train, change, fresh=True)
    assert own["what"] == (
        "no gradient for model.branch.weight, model.branch.bias on rank 1, for which the "
        "other ranks would wait"
    )
    assert own["where"] == ("step 1" if accumulate == 1 else "step 0")
    assert own["rank"] == 1
    assert "comm.find_unused_parameters: true" in own["remedy"]
    assert "Connection" in other["other"]  # that rank's end, not the timeout
    assert len(own["parameters"]) == 2  # before the batch, and after the valid one


def test_a_parameter_that_is_used_on_no_rank() -> None:
    error_of = run_ranks(
        2, train, lambda rank, setup: setattr(setup, "one_branch", {0, 1, 2}) or None
    )
    assert ["no gradient for model.branch.weight" in own["what"] for own in error_of] == 2 * [True]


def test_without_a_guard_the_next_step_meets_it() -> None:
    def change(rank: int, setup: Setup) -> None:
        setup.guard = {"mode": "off"}
        setup.one_branch = {0, 1, 2}

    for own in run_ranks(2, train, change):
        assert "what" not in own
        assert len(own["parameters"]) == 2  # the first step seemed to be right


@pytest.mark.parametrize("accumulate", [1, 2])
def test_unused_parameters_that_are_looked_for_reduce_to_the_mean(accumulate: int) -> None:
    def change(rank: int, setup: Setup) -> None:
        setup.options = {"find_unused_parameters": True}
        setup.accumulate = accumulate
        if rank == 1:
            setup.one_branch = {accumulate - 1}

    met = run_ranks(2, train, change)
    assert all("what" not in own for own in met)
    gradients = []
    for rank in range(2):
        net = TwoBranches()
        for step in range(accumulate):
            own = batch(step, rows=2 + rank)
            both = not (rank == 1 and step == accumulate - 1)
            (net(own.x["_N"], both).mean() / accumulate).backward()
        parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in net.parameters()]
        gradients.append(torch.cat([part.flatten() for part in parts]))
    expected = (gradients[0] + gradients[1]) / 2
    for own in met:
        assert torch.allclose(torch.tensor(own["gradients"][accumulate - 1]), expected, atol=1e-6)


# steps that are left out


@pytest.fixture
def as_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let optimizers decide about steps by themselves, as their kernels on a GPU do."""
    monkeypatch.setattr(guard_module, "_on_gpu", lambda tensor: True)
    monkeypatch.delattr(guard_module._Gradients, "are_finite")


FUSED = partial(torch.optim.AdamW, fused=True)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, FUSED])
def test_a_step_that_is_not_finite_moves_nothing(
    kind: Any, bad: float, request: pytest.FixtureRequest
) -> None:
    """Parameters and optimizer state, decay and momentum included, stay on all ranks; clipping sees
    no gradient."""
    extra = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    if kind is FUSED:
        request.getfixturevalue("as_a_gpu")

    def change(rank: int, setup: Setup) -> None:
        setup.optimizer = partial(kind, lr=0.1, weight_decay=0.1, **extra)
        setup.clip = 1.0
        if rank == 1:
            setup.factors = {1: bad}

    met = run_ranks(3, train, change)
    for own in met:
        start, first, second, third = own["parameters"]
        assert start != first == second != third
        assert own["states"][1] == own["states"][2] != own["states"][3]
        assert (own["skipped"], own["state"]) == (1, {"skipped_steps": 1, "in_a_row": 0})
        assert all(map(math.isfinite, third))
        assert own["parameters"] == met[0]["parameters"]


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("later", [False, True])
def test_too_many_in_a_row(
    accumulate: int, later: bool, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit holds also if it is known ``later`` by some steps, in the middle or after the last
    one."""
    if later:
        request.getfixturevalue("as_a_gpu")
        monkeypatch.setattr(guard_module, "_PENDING", 2 * accumulate)

    def change(rank: int, setup: Setup) -> None:
        setup.guard = {"nan_steps": 2}
        if later:
            setup.optimizer = partial(FUSED, lr=0.1)
        setup.accumulate = accumulate
        if rank != 1:
            # once, then a good step, then one too many; of a window, its first batch
            factors = {0: math.nan, 2: math.nan, 3: math.nan, 4: math.nan, 5: math.nan}
            setup.factors = {accumulate * n: value for n, value in factors.items()}

    error = alike(3, change, batches=7 * accumulate)
    assert error["what"] == (
        "the gradient was not finite in 3 steps in a row (guard.nan_steps: 2): the loss was not "
        f"finite on ranks 0 and 2, in epoch 0, batch {4 * accumulate}"
    )
    assert (error["where"], error["rank"], error["skipped"]) == ("step 4", 0, 4)
    assert "train.lr" in error["remedy"]


def test_an_overflow_in_the_backward_pass() -> None:
    def change(rank: int, setup: Setup) -> None:
        setup.guard = {"nan_steps": 0}
        setup.net.last.weight.register_hook(lambda gradient: gradient * math.inf)

    error = alike(2, change)
    assert "every rank's loss was finite" in error["what"]
    assert "in epoch 0, batch 0" in error["what"]
    assert error["rank"] is None


def test_the_gradient_scaler_of_fp16_does_it_alone() -> None:
    def change(rank: int, setup: Setup) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        setup.precision = None
        setup.plugin = MixedPrecision("16-mixed", "cpu", scaler)
        setup.guard = {"nan_steps": 0}
        setup.factors = {1: math.inf} if rank == 1 else {}

    for own in run_ranks(2, train, change):
        assert "what" not in own
        assert own["skipped"] == 0
        start, first, second, third = own["parameters"]
        assert start != first == second != third


def test_counts_go_on_after_a_restart() -> None:
    exchange = Exchange(World(0, 1))
    guard = Guard(exchange, GuardConfig())
    guard.load_state_dict({"skipped_steps": 5, "in_a_row": 2})
    assert guard.skipped_steps == 5
    assert guard.state_dict() == {"skipped_steps": 5, "in_a_row": 2}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_finite_is_exact(dtype: torch.dtype, bad: float) -> None:
    large = torch.full((1000,), torch.finfo(dtype).max, dtype=dtype)  # their sum overflows
    small = torch.ones(3, dtype=dtype)
    sparse = torch.sparse_coo_tensor([[0, 2]], large[:2], (5,))
    gradients = guard_module._Gradients()
    assert gradients.are_finite([])
    assert gradients.are_finite([large, small, sparse])
    for gradient in (large.clone(), sparse.clone().coalesce()):
        values = gradient.values() if gradient.is_sparse else gradient
        values[1] = bad
        assert not gradients.are_finite([small, gradient])


def test_finite_is_seen_wherever_gradients_lie() -> None:
    def views(bucket: Tensor) -> list[Tensor]:
        return [bucket[:6].view(2, 3), bucket[6:]]

    gradients = guard_module._Gradients()
    first, second, roomy = torch.ones(10), torch.ones(10), torch.ones(12)
    for bucket in (first, first, second):
        assert gradients.are_finite(views(bucket))
    roomy[10:] = math.nan  # spare rows
    assert gradients.are_finite([roomy[:6].view(2, 3), roomy[6:10], torch.ones(3)])
    assert gradients.are_finite(views(first))
    for place in (0, 9):
        first[place] = math.inf
        assert not gradients.are_finite(views(first))
        first[place] = 1
    second[7] = math.nan
    assert not gradients.are_finite(views(second))
    assert gradients.are_finite(views(first))


class Normed(TwoBranches):
    """The network with running statistics, and with an unrelated buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("table", torch.arange(4))

    def forward(self, x: Tensor, both: bool) -> Tensor:
        return self.last(self.branch(self.norm(self.first(x)))).square()


def normed(accumulate: int, bad: dict[int, int], left_out: Collection[int] = ()) -> Change:
    """``bad``: batch → the rank whose input is not finite there; ``left_out``: batches."""

    def change(rank: int, setup: Setup) -> None:
        setup.net, setup.accumulate = Normed(), accumulate
        for own in setup.batches:
            torch.manual_seed(10 * own.step + rank)
            own.x = {"_N": torch.randn(4 + rank, 4)}
            if bad.get(own.step) == rank:
                own.x["_N"][1, 2] = math.nan
        setup.batches = [own for own in setup.batches if own.step not in left_out]

    return change


@pytest.mark.parametrize(
    ("accumulate", "bad", "window", "rank"),
    [
        (1, 1, {1}, 0),
        (1, 4, {4}, 1),
        (2, 2, {2, 3}, 1),
        (2, 3, {2, 3}, 0),
        (2, 4, {4}, 1),  # the last window, which has one batch
    ],
)
@pytest.mark.parametrize("later", [False, True])
def test_running_statistics_go_with_the_step(
    accumulate: int,
    bad: int,
    window: set[int],
    rank: int,
    later: bool,
    request: pytest.FixtureRequest,
) -> None:
    """Running statistics are as if the skipped step had not happened, on all ranks."""
    if later:
        request.getfixturevalue("as_a_gpu")

    def optimizer(change: Change) -> Change:
        def both(rank: int, setup: Setup) -> None:
            change(rank, setup)
            setup.optimizer = partial(FUSED, lr=0.1) if later else setup.optimizer

        return both

    met = run_ranks(2, train, optimizer(normed(accumulate, {bad: rank})), 5)
    without = run_ranks(2, train, optimizer(normed(accumulate, {}, window)), 5)
    for own, other in zip(met, without):
        assert (own["skipped"], other["skipped"]) == (1, 0)
        assert all(map(math.isfinite, own["buffers"][-1]))
        assert own["buffers"][-1] == other["buffers"][-1] != own["buffers"][0]
        assert own["parameters"][-1] == other["parameters"][-1]


def test_a_module_without_such_buffers_costs_nothing() -> None:
    module = TwoBranches()
    module.register_buffer("table", torch.arange(4))
    assert guard_module._Buffers.from_module(module) is None


def test_off_compares_nothing_and_still_leaves_steps_out() -> None:
    def change(rank: int, setup: Setup) -> None:
        setup.guard = {"mode": "off"}
        if rank == 1:
            setup.optimizer = partial(torch.optim.SGD, lr=0.2)
            setup.factors = {1: math.nan}

    for own in run_ranks(2, train, change):
        assert "what" not in own
        assert own["skipped"] == 1
