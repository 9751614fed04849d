"""Recording of a few steps with torch's profiler, on every rank."""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from raygnn.util.files import write_atomic
from raygnn.worker.records import Records

PROFILE = "profile"  # in the run directory

_SKIPPED = 3  # first steps, which set up buckets and warm up allocators
_PHASES = ("forward", "backward", "optimizer")
_TOP = 15  # operators in the table

log = logging.getLogger("raygnn")


class Profiling(pl.Callback):
    """Records steps of this rank into ``rank-<r>.json.gz``, for Perfetto or ``chrome://tracing``,
    and its operators into ``rank-<r>.txt``.

    The phases of a step are ranges in the trace, and NVTX ranges where there is a GPU, which
    Nsight Systems shows.

    Args:
        directory: created when it is needed.
        steps: number of steps to record, after the first three of this start.
        records: pauses its times for the overhead of the recording.

    Attributes:
        recorded: number of recorded steps.
        operators: top operators by their own time: ``operator``, ``calls``, ``self_ms`` and
            ``total_ms``, over the recorded steps.
    """

    def __init__(self, directory: Path, rank: int, steps: int, records: Records):
        self._directory = directory
        self._rank = rank
        self._steps = steps
        self._records = records
        self._seen = 0
        self._step = -1
        self._profile: profile | None = None
        self._range: ExitStack | None = None
        self.recorded = 0
        self.operators: list[dict[str, Any]] = []

    def summary(self) -> dict[str, Any] | None:
        """Return the top operators of this rank. None, without recorded steps, removes those of an
        earlier command from the run's summary."""
        return {"steps": self.recorded, "top": self.operators} if self.operators else None

    def on_train_batch_start(
        self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any
    ) -> None:
        if self._seen == _SKIPPED and self._steps and self._profile is None and not self.operators:
            kinds = [ProfilerActivity.CPU]
            kinds += [ProfilerActivity.CUDA] if module.device.type == "cuda" else []
            with self._records.pause():
                self._profile = profile(activities=kinds)
                self._profile.__enter__()
        self._begin(_PHASES[0])

    def on_before_backward(self, *_: Any) -> None:
        self._begin(_PHASES[1])

    def on_after_backward(self, *_: Any) -> None:
        self._begin(_PHASES[2])

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._begin(None)
        if trainer.global_step == self._step:  # batches accumulate
            return
        self._step = trainer.global_step
        self._seen += 1
        if self._seen == _SKIPPED + self._steps:
            with self._records.pause():
                self._finish()
                self._records.meet()

    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self._step = trainer.global_step

    def on_train_end(self, *_: Any) -> None:
        self._finish()
        if self._steps and not self.operators:
            log.warning("no step was recorded: there were only %d of them", self._seen)

    def on_exception(self, *_: Any) -> None:
        self._begin(None)
        self._finish()

    def _begin(self, phase: str | None) -> None:
        """Close the range of the previous phase and open the next one's."""
        if self._range is not None:
            self._range.close()
            self._range = None
        if self._profile is None or phase is None:
            return
        self._range = ExitStack()
        self._range.enter_context(record_function(phase))
        if torch.cuda.is_available():
            self._range.enter_context(torch.cuda.nvtx.range(phase))

    def _finish(self) -> None:
        if self._profile is None:
            return
        done, self._profile = self._profile, None
        self.recorded = self._seen - _SKIPPED
        done.__exit__(None, None, None)
        averages = done.key_averages()
        device = "device" if ProfilerActivity.CUDA in done.activities else "cpu"
        by = f"self_{device}_time_total"
        calls = (event for event in averages if event.key not in _PHASES)
        ranked = sorted(calls, key=lambda event: -getattr(event, by, 0))
        self.operators = [
            {
                "operator": event.key,
                "calls": event.count,
                "self_ms": getattr(event, by, 0) / 1e3,
                "total_ms": getattr(event, f"{device}_time_total", 0) / 1e3,
            }
            for event in ranked[:_TOP]
        ]
        try:
            self._directory.mkdir(exist_ok=True)
            table = averages.table(row_limit=100)
            write_atomic(self._directory / f"rank-{self._rank}.txt", table)
            part = self._directory / f".rank-{self._rank}.json.gz"
            done.export_chrome_trace(str(part))
            os.replace(part, part.with_name(part.name[1:]))
        except (OSError, RuntimeError) as error:
            log.warning("no profile was written: %s", error)
