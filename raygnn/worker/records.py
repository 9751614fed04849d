"""Records of training: losses and times of all ranks, in windows of steps."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import psutil
import torch
from torch import Tensor

from raygnn.runs.metrics_files import COMPUTE, LOADER, STEP, MetricsWriter
from raygnn.sampling.batch import Share
from raygnn.sampling.exchange import Exchange
from raygnn.tasks.clock import LastGradient, StepClock
from raygnn.tasks.lightning_modules import TaskModule
from raygnn.worker import blackbox
from raygnn.worker.job import Job
from raygnn.worker.stragglers import Stragglers

PARTS = (*LOADER, *STEP)
BYTES = ("bytes/gradients", "bytes/exchange")
_BINS = 256  # bins of a window's reductions

log = logging.getLogger("raygnn")


@dataclass(frozen=True)
class _Window:
    """Figures of some steps up to ``step``. All but ``time``, seconds since the command began, and
    ``seconds``, the duration of the steps, are equal on all ranks."""

    step: int
    epoch: int
    time: float
    batches: int
    seeds: int
    seconds: float
    rate: float
    skipped: int


class Records(pl.Callback):
    """Writes a line of ``metrics.jsonl`` after the first step, every ``log_every`` and each epoch's
    last, and one about all ranks of ``ranks.jsonl``.

    Collective: losses and times are summed over the ranks during the next step; rank 0 writes.
    ``seconds/<part>`` are mean seconds per batch and rank: see `raygnn.runs.metrics_files`.
    ``ranks/slowest`` is the rank whose own work and wait for data took longest,
    ``ranks/slowest_seconds`` per batch; ``ranks/median_seconds`` is the median over the ranks.

    It is the first of the callbacks that take time, and `Closing` the last. For the crash dump they
    also record the phases of a step: ``batch`` (waiting for it), ``forward``, ``backward``,
    ``optimizer``, ``between`` (callbacks).

    Args:
        writers: rank 0's writers of ``metrics.jsonl`` and ``ranks.jsonl``; empty on other ranks.
        stragglers: receives the times of all ranks.
        sent: bytes that this rank has sent to collectives: of gradients, and of the data.
        skipped: number of skipped steps, equal on all ranks.
    """

    def __init__(
        self,
        exchange: Exchange,
        writers: Sequence[MetricsWriter],
        stragglers: Stragglers,
        sent: Callable[[], tuple[int, int]],
        skipped: Callable[[], int],
        job: Job,
    ):
        train = job.config.train
        self._exchange = exchange
        self._writers = writers
        self._stragglers = stragglers
        self._sent, self._skipped = sent, skipped
        self._log_every = train.log_every
        self._expected = max(1, train.log_every * train.accumulate)  # batches in a window
        self._started = job.started
        self._cpus = job.config.cluster.cpus_per_worker
        self._clock = StepClock()  # if no steps are left
        self._logged = -1
        self._seen = False
        self._counted = (0, 0)
        self._window_start = time.perf_counter()
        # work to wait for, and a function that then writes the newest window's records
        self._pending: tuple[torch.distributed.Work | None, Callable[[], None]] | None = None
        self._rate = 0.0
        self.totals = dict.fromkeys(PARTS, 0.0)  # seconds over all steps, mean over ranks
        self.bytes = dict.fromkeys(BYTES, 0.0)  # of all ranks
        self.seeds = 0
        self.first_step: float | None = None
        self.loss: float | None = None  # of the newest window

    def write(self, step: int, epoch: int, values: dict[str, float]) -> None:
        """Write a record (rank 0) after the steps' records; ``time`` is added."""
        self.write_pending()
        self._write(step, epoch, self._elapsed(), values)

    def write_pending(self, *, wait: bool = True) -> None:
        """Write the records of the newest window, with the other ranks' figures. ``wait``: wait for
        the figures; else skip records without them, as after a failure."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        work, write = pending
        if work is not None and wait:
            work.wait()
            self._clock.lap("peers")
        if work is None or work.is_completed():
            write()

    def _write(self, step: int, epoch: int, at: float, values: dict[str, float]) -> None:
        for writer in self._writers[:1]:
            waited = writer.waiting
            writer.write({"step": step, "epoch": epoch, "time": at, **values})
            if writer.waiting and not waited:
                log.warning("records wait for the storage: %s", writer.waiting)

    def close(self, patience: float) -> None:
        """Close the files; wait at most ``patience`` seconds for their storage."""
        self.write_pending()
        for writer in self._writers:
            writer.close(patience)

    def speed(self) -> dict[str, Any]:
        """Return seeds per second and the times of a step, without evaluations and checkpoints."""
        busy = sum(self.totals[name] for name in STEP)
        compute = sum(self.totals[name] for name in COMPUTE)
        return {
            "seeds_per_second": self.seeds / busy if busy else 0.0,
            "train_loss": self.loss,
            "seconds": {**self.totals, "compute": compute, "first_step": self.first_step},
        }

    def _elapsed(self) -> float:
        return round(time.time() - self._started, 3)

    def on_train_start(self, trainer: pl.Trainer, module: TaskModule) -> None:
        self._logged = trainer.global_step
        self._usage = Usage(self._cpus, module.device)
        module.clock = StepClock(module.device)
        self._last_gradient = LastGradient(self._came)
        self._clock = module.clock
        if self._exchange.world.size > 1:
            self._last_gradient.watch(module)
        self._counted = self._sent()
        self._window_start = time.perf_counter()

    def on_train_epoch_start(self, *_: Any) -> None:
        blackbox.note("batch")

    def on_train_batch_start(
        self, trainer: pl.Trainer, module: TaskModule, batch: Share, *_: Any
    ) -> None:
        self._seen = False
        blackbox.note("forward", epoch=batch.epoch, step=batch.step)

    def on_before_backward(self, *_: Any) -> None:
        self._clock.lap("forward")
        blackbox.note("backward")

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, module: TaskModule, optimizer: torch.optim.Optimizer
    ) -> None:
        self._rate = optimizer.param_groups[0]["lr"]  # a schedule changes it before the batch ends
        blackbox.note("optimizer")

    def _came(self) -> None:
        self._clock.lap("backward")
        self._seen = True

    def on_after_backward(self, *_: Any) -> None:
        self._clock.lap("communicate" if self._seen else "backward")
        if not self._seen:
            self._last_gradient.learn()

    def on_train_batch_end(self, trainer: pl.Trainer, module: TaskModule, *_: Any) -> None:
        self._clock.lap("optimizer")
        blackbox.note("between")
        self.write_pending()
        self._clock.batches += 1
        step = trainer.global_step
        if step != self._logged and (self.first_step is None or step % self._log_every == 0):
            self._flush(trainer, module)

    def on_train_epoch_end(self, trainer: pl.Trainer, module: TaskModule) -> None:
        blackbox.note("between")
        if trainer.global_step != self._logged and module.window.steps:
            self._flush(trainer, module)

    def on_train_end(self, *_: Any) -> None:
        self.write_pending()
        self._last_gradient.forget()

    @contextmanager
    def pause(self, phase: str = "between") -> Iterator[None]:
        """Exclude the time of the block, such as an evaluation or a checkpoint, from the steps'."""
        self.write_pending()  # a run that resumes from the checkpoint has the record, too
        self._clock.lap("rest")
        began = time.perf_counter()
        blackbox.note(phase)
        yield
        blackbox.note("between")
        self._clock.lap(None)
        self._window_start += time.perf_counter() - began

    def _flush(self, trainer: pl.Trainer, module: TaskModule) -> None:
        now = time.perf_counter()
        window, world = module.window, self._exchange.world
        self._clock.lap("rest")
        seconds, reductions = self._clock.read()
        own = {"loss": window.loss, **{name: seconds.get(name, 0.0) for name in PARTS}}
        own |= {f"loss/{name}": loss for name, loss in window.parts.items()}  # of several tasks
        counted = self._sent()
        own |= zip(BYTES, (a - b for a, b in zip(counted, self._counted)))
        own |= self._usage.read()
        self._counted = counted
        table = torch.zeros(world.size, len(own) + _BINS, dtype=torch.float64)
        table[world.rank, : len(own)] = torch.tensor(list(own.values()), dtype=torch.float64)
        for batch, value in reductions:
            at = min(_BINS - 1, batch * _BINS // max(self._expected, _BINS))
            table[world.rank, len(own) + at] += value
        facts = _Window(
            trainer.global_step,
            trainer.current_epoch,
            self._elapsed(),
            batches=window.steps,
            seeds=window.seeds,
            seconds=now - self._window_start,
            rate=float(self._rate),
            skipped=self._skipped(),
        )
        summed, work = self._exchange.begin_sum(table)

        def write() -> None:
            ranks = dict(zip(own, summed[:, : len(own)].T.tolist()))
            _split_reductions(ranks, summed[:, len(own) :])
            self._put(facts, ranks)

        self._pending = work, write
        self._logged = trainer.global_step
        window.reset()
        self._window_start = now
        if work is None:
            self.write_pending()

    def _put(self, window: _Window, ranks: dict[str, list[float]]) -> None:
        """Write the records of a window: means over the ranks, and figures of each rank."""
        size = self._exchange.world.size
        means = {name: sum(ranks[name]) / size for name in PARTS}
        for name, value in means.items():
            self.totals[name] += value
        for name in self.bytes:
            self.bytes[name] += sum(ranks[name])
        batches = window.batches
        self.seeds += window.seeds
        values = {
            "train/loss": sum(ranks["loss"]) / batches,
            **{
                f"train/{name.partition('/')[2]}/loss": sum(ranks[name]) / batches
                for name in ranks
                if name.startswith("loss/")
            },
            "train/lr": window.rate,
            "seeds_per_second": window.seeds / max(window.seconds, 1e-9),
        }
        values |= {f"seconds/{name}": value / batches for name, value in means.items()}
        values["guard/skipped_steps"] = window.skipped
        values["seconds/compute"] = sum(means[name] for name in COMPUTE) / batches
        values |= {name: sum(ranks[name]) / size / batches for name in BYTES}
        each = {name: [value / batches for value in ranks[name]] for name in (*PARTS, *BYTES)}
        if size > 1:
            values |= self._stragglers.add(window.step, each, batches)
        self._write(window.step, window.epoch, window.time, values)
        self.loss = values["train/loss"]
        for writer in self._writers[1:]:
            writer.write(
                {
                    "step": window.step,
                    "time": window.time,
                    "batches": batches,
                    "seconds": {name: each[name] for name in PARTS},
                    "bytes": {name.removeprefix("bytes/"): each[name] for name in BYTES},
                    "use": {name: ranks[name] for name in ("cpu", "gpu")},
                    "memory": {
                        "rss": ranks["rss"],
                        "gpu": ranks["gpu_memory"],
                        "gpu_share": ranks["gpu_share"],
                    },
                    "network": {name: ranks[name] for name in ("sent", "received")},
                }
            )
        if self.first_step is None:
            self.first_step = window.time


class Closing(pl.Callback):
    """Ends the clock's part of the callbacks, as the last of them; the next batch is awaited."""

    def on_train_batch_end(self, trainer: pl.Trainer, module: TaskModule, *_: Any) -> None:
        module.clock.lap("rest")
        blackbox.note("batch")


def _split_reductions(ranks: dict[str, list[float]], bins: Tensor) -> None:
    """Divide the ranks' time in reductions into the exchange itself and the wait for other ranks:
    the last rank to arrive does not wait. ``bins``: ``[W, _BINS]`` seconds; values in one bin are
    of the same reductions on all ranks."""
    exchange = float(bins.min(dim=0).values.sum())
    for rank, waited in enumerate(bins.sum(dim=1).tolist()):
        ranks["peers"][rank] += waited - exchange
        ranks["communicate"][rank] = exchange


# figures of a rank since the last reading, or at that moment
FACTS = ("cpu", "gpu", "rss", "gpu_memory", "gpu_share", "sent", "received")


class Usage:
    """Resource usage of this process and its host. Unknown values are NaN; nothing raises.
    ``cpus``: number of the rank's CPUs; ``device``: of the rank."""

    def __init__(self, cpus: int, device: torch.device):
        self._cpus = cpus
        self._device = device
        self._process = psutil.Process()
        self._at = self._cpu = 0.0
        self._sent = self._received = 0
        self.read()

    def read(self) -> dict[str, float]:
        """Return a value for each of `FACTS`, for the time since the last call.

        ``cpu``: busy share of the rank's CPUs (above 1 if it uses more); ``gpu``: current busy
        share of its GPU, by all processes; ``rss``, ``gpu_memory``: bytes held; ``gpu_share``:
        share of the GPU's memory; ``sent``, ``received``: bytes per second of the host,
        without its loopback.
        """
        now, cpu = time.monotonic(), time.process_time()
        seconds = max(now - self._at, 1e-9)
        facts = dict.fromkeys(FACTS, math.nan)
        facts["cpu"] = (cpu - self._cpu) / seconds / self._cpus
        with suppress(psutil.Error, OSError):
            facts["rss"] = float(self._process.memory_info().rss)
        with suppress(psutil.Error, OSError):
            sent, received = _network()
            facts["sent"] = (sent - self._sent) / seconds
            facts["received"] = (received - self._received) / seconds
            self._sent, self._received = sent, received
        if self._device.type == "cuda":
            with suppress(Exception):  # NVML may be missing, or not fit the driver
                facts["gpu"] = torch.cuda.utilization(self._device) / 100
            with suppress(RuntimeError):
                free, total = torch.cuda.mem_get_info(self._device)
                facts["gpu_memory"], facts["gpu_share"] = float(total - free), 1 - free / total
        self._at, self._cpu = now, cpu
        return facts


def _network() -> tuple[int, int]:
    """Return the bytes that this host has sent and received, without its loopback."""
    counters = psutil.net_io_counters(pernic=True)
    real = [counter for name, counter in counters.items() if name != "lo"]
    return sum(c.bytes_sent for c in real), sum(c.bytes_recv for c in real)
