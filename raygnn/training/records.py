"""Records of training: losses and times of all ranks, in windows of some steps."""

from __future__ import annotations

import logging
import time
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from raygnn.runs.metrics import MetricsWriter
from raygnn.sampling.batch import Share
from raygnn.sampling.exchange import Exchange
from raygnn.tasks.task import Task
from raygnn.training.stragglers import Stragglers

PARTS = ("sample", "features", "compute", "communicate", "wait")

log = logging.getLogger("raygnn")


class Records(pl.Callback):
    """A line in ``metrics.jsonl`` after the first step, every ``log_every`` and each epoch's last.

    Collective: losses and times are summed over the ranks; rank 0 writes. ``seconds/<part>`` are
    mean seconds of a batch and rank: ``sample`` and ``features`` happen in the prefetch thread,
    ``compute`` is forward, backward and optimizer, ``communicate`` is what the gradients' exchange
    adds to the backward pass, slower ranks included, ``wait`` is from the end of a batch to the
    start of the next one. ``ranks/slowest`` is the rank whose ``compute`` and ``wait`` together
    took longest, which is ``ranks/slowest_seconds`` a batch; ``ranks/median_seconds`` is the
    median over the ranks. On GPUs, whose work is only started within these times, they say little.

    Args:
        writer: rank 0's; None elsewhere.
        stragglers: told of all ranks' times.
        started: when the command began, seconds since the epoch.
    """

    def __init__(
        self,
        exchange: Exchange,
        writer: MetricsWriter | None,
        stragglers: Stragglers,
        *,
        log_every: int,
        started: float,
    ):
        self._exchange = exchange
        self._writer = writer
        self._stragglers = stragglers
        self._clock = ReductionClock()
        self._log_every = log_every
        self._started = started
        self._logged = -1
        self._rate = 0.0
        self._mark = self._window_start = time.perf_counter()
        self.totals = dict.fromkeys(PARTS, 0.0)  # seconds over all steps, mean over ranks
        self.seeds = 0
        self.first_step: float | None = None

    def write(self, step: int, epoch: int, values: dict[str, float]) -> None:
        """Write one record (rank 0); ``time`` is added."""
        if self._writer is not None:
            elapsed = round(time.time() - self._started, 3)
            waited = self._writer.waiting
            self._writer.write({"step": step, "epoch": epoch, "time": elapsed, **values})
            if self._writer.waiting and not waited:
                log.warning("records wait for the storage: %s", self._writer.waiting)

    def on_train_start(self, trainer: pl.Trainer, module: Task) -> None:
        self._mark = self._window_start = time.perf_counter()
        self._logged = trainer.global_step
        if self._exchange.world.size > 1:
            self._clock.watch(module)

    def on_train_batch_start(
        self, trainer: pl.Trainer, module: Task, batch: Share, batch_idx: int
    ) -> None:
        now = time.perf_counter()
        module.window.spend("wait", now - self._mark)
        self._mark = now
        self._clock.start()

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, module: Task, optimizer: torch.optim.Optimizer
    ) -> None:
        self._rate = optimizer.param_groups[0]["lr"]  # a schedule moves on before the batch's end

    def on_after_backward(self, trainer: pl.Trainer, module: Task) -> None:
        waited = self._clock.waited()
        module.window.spend("communicate", waited)
        module.window.spend("compute", -waited)

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        module: Task,
        outputs: Any,
        batch: Share,
        batch_idx: int,
    ) -> None:
        now = time.perf_counter()
        module.window.spend("compute", now - self._mark)
        self._mark = now
        step = trainer.global_step
        if step != self._logged and (self.first_step is None or step % self._log_every == 0):
            self._flush(trainer, module)

    def on_train_epoch_end(self, trainer: pl.Trainer, module: Task) -> None:
        if trainer.global_step != self._logged and module.window.steps:
            self._flush(trainer, module)

    def resume_clock(self) -> None:
        """Leave out what happened since the last step (an evaluation, a checkpoint)."""
        now = time.perf_counter()
        self._window_start += now - self._mark
        self._mark = now

    def _flush(self, trainer: pl.Trainer, module: Task) -> None:
        now = time.perf_counter()
        window, world = module.window, self._exchange.world
        table = torch.zeros(world.size, 1 + len(PARTS), dtype=torch.float64)
        own = [window.loss, *(window.seconds.get(name, 0.0) for name in PARTS)]
        table[world.rank] = torch.tensor(own, dtype=torch.float64)
        table = self._exchange.sum(table)
        loss, *seconds = table.sum(0).tolist()
        for name, value in zip(PARTS, seconds):
            self.totals[name] += value / world.size
        self.seeds += window.seeds
        values = {
            "train/loss": loss / window.steps,
            "train/lr": float(self._rate),
            "seeds_per_second": window.seeds / max(now - self._window_start, 1e-9),
        }
        values |= {
            f"seconds/{name}": value / world.size / window.steps
            for name, value in zip(PARTS, seconds)
        }
        if world.size > 1:
            columns = dict(zip(PARTS, (table[:, 1:] / window.steps).T.tolist()))
            values |= self._stragglers.add(trainer.global_step, columns, window.steps)
        self.write(trainer.global_step, trainer.current_epoch, values)
        if self.first_step is None:
            self.first_step = time.time() - self._started
        self._logged = trainer.global_step
        window.reset()
        self._window_start = self._mark = time.perf_counter()


class ReductionClock:
    """Tells how long a backward pass waited for the exchange of gradients: from when this rank's
    last gradient was there to its end.

    Which parameter's gradient comes last, the first pass with all of them shows.
    """

    def __init__(self) -> None:
        self._handles: list[Any] = []
        self._last: nn.Parameter | None = None
        self._came: float | None = None

    def watch(self, module: nn.Module) -> None:
        """Measure this module's backward passes from now on."""
        for handle in self._handles:
            handle.remove()
        self._last = self._came = None
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._note)
            for parameter in module.parameters()
            if parameter.requires_grad
        ]

    def start(self) -> None:
        """A batch begins."""
        self._came = None

    def waited(self) -> float:
        """Seconds; to be called right after the backward pass. 0 where it is not known."""
        if self._came is None:
            return 0.0
        waited = time.perf_counter() - self._came
        if len(self._handles) > 1 and self._last is not None:
            for handle in self._handles:
                handle.remove()
            self._handles = [self._last.register_post_accumulate_grad_hook(self._note)]
            self._last = None  # not to hold on to it
        return waited

    def _note(self, parameter: Tensor) -> None:
        self._came = time.perf_counter()
        if len(self._handles) > 1:
            assert isinstance(parameter, nn.Parameter)
            self._last = parameter
