"""Where the time of training steps goes, lap by lap, on a CPU or along a CUDA stream."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

_PENDING = 1024  # laps on a GPU that may wait to be read

Mark = Any  # seconds on a CPU, an event on a GPU


class StepClock:
    """Adds up laps: whatever lies between two calls of `lap` belongs to the second one's part.

    So the parts sum to the time that went by, but for what was left out. On a GPU laps are
    measured by events on the stream that computes, which the host does not wait for: a part is
    the time until the GPU was through with it, idle time included.

    Args:
        device: whose time it is.

    Attributes:
        seconds: part → seconds since the last `take`; on a GPU complete only in `take`.
        reductions: the ``communicate`` laps since the last `take`, each with the number of the
            batch, counted from there.
    """

    def __init__(self, device: torch.device | None = None):
        self._event: Callable[[], Any] | None = None
        if device is not None and device.type == "cuda":
            self._event = lambda: torch.cuda.Event(enable_timing=True)
            # a backward pass has threads of its own, whose streams are what its operations' were
            self._stream = torch.cuda.current_stream(device)
        self.seconds: dict[str, float] = {}
        self.reductions: list[tuple[int, float]] = []
        self.batches = 0
        self._pending: list[tuple[str | None, int, Mark, Mark]] = []
        self._last = self._mark()

    def lap(self, part: str | None) -> None:
        """The time since the last lap belongs to this part; None leaves it out."""
        now = self._mark()
        if self._event is None:
            self._count(part, self.batches, now - self._last)
        else:
            self._pending.append((part, self.batches, self._last, now))
            if len(self._pending) > _PENDING:
                self._read(self._pending[: _PENDING // 2])
                del self._pending[: _PENDING // 2]
        self._last = now

    def spend(self, part: str, seconds: float) -> None:
        """Add what another thread's clock has measured; not a part of this one's time."""
        self.seconds[part] = self.seconds.get(part, 0.0) + seconds

    def take(self) -> tuple[dict[str, float], list[tuple[int, float]]]:
        """``seconds`` and ``reductions`` so far; both begin anew. Waits for a GPU to get there."""
        self._read(self._pending)
        self._pending.clear()
        taken = self.seconds, self.reductions
        self.seconds, self.reductions, self.batches = {}, [], 0
        return taken

    def _mark(self) -> Mark:
        if self._event is None:
            return time.perf_counter()
        event = self._event()
        event.record(self._stream)
        return event

    def _read(self, laps: list[tuple[str | None, int, Mark, Mark]]) -> None:
        if laps:
            laps[-1][-1].synchronize()
        for part, batch, begin, end in laps:
            self._count(part, batch, begin.elapsed_time(end) / 1e3)

    def _count(self, part: str | None, batch: int, seconds: float) -> None:
        if part is None:
            return
        self.spend(part, seconds)
        if part == "communicate":
            self.reductions.append((batch, seconds))


class LastGradient:
    """Tells when a rank's last gradient is there: the exchange that is not over by then is exposed.

    Which parameter's gradient comes last, the first backward pass shows. A pass that does without
    that parameter tells nothing.

    Args:
        tell: called as soon as it is there, from the thread of the backward pass.
    """

    def __init__(self, tell: Callable[[], None]):
        self._tell = tell
        self._handles: list[Any] = []
        self._order: list[nn.Parameter] = []

    def watch(self, module: nn.Module) -> None:
        """Watch this module's backward passes from now on, the first to learn from."""
        self.forget()
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._order.append)
            for parameter in module.parameters()
            if parameter.requires_grad
        ]

    def learn(self) -> None:
        """After a backward pass: if it was the first, its last gradient is the one to watch."""
        if not self._order:
            return
        last = self._order[-1]
        self.forget()
        self._handles = [last.register_post_accumulate_grad_hook(lambda _: self._tell())]

    def forget(self) -> None:
        """Watch nothing."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._order = [], []
