"""Time of training steps by part, on a CPU or along a CUDA stream."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

_PENDING = 1024  # unread laps on a GPU


class StepClock:
    """Adds up laps: the time between two calls of `lap` belongs to the second one's part.

    So the parts sum to the elapsed time, without what was skipped. On a GPU laps are measured by
    events on the computing stream, without waiting: a part includes the GPU's idle time.

    Attributes:
        seconds: part → seconds since the last `read`; on a GPU complete only in `read`.
        reductions: the ``communicate`` laps since the last `read`, each with the number of its
            batch since then.
    """

    def __init__(self, device: torch.device | None = None):
        self._event: Callable[[], Any] | None = None
        if device is not None and device.type == "cuda":
            self._event = lambda: torch.cuda.Event(enable_timing=True)
            # threads of the backward pass use the streams of the forward operations
            self._stream = torch.cuda.current_stream(device)
        self.seconds: dict[str, float] = {}
        self.reductions: list[tuple[int, float]] = []
        self.batches = 0
        self._pending: list[tuple[str | None, int, Any, Any]] = []
        self._last = self._mark()

    def lap(self, part: str | None) -> None:
        """Assign the time since the last lap to a part; None skips it."""
        now = self._mark()
        if self._event is None:
            self._count(part, self.batches, now - self._last)
        else:
            self._pending.append((part, self.batches, self._last, now))
            if len(self._pending) > _PENDING:
                self._count_events(self._pending[: _PENDING // 2])
                del self._pending[: _PENDING // 2]
        self._last = now

    def spend(self, part: str, seconds: float) -> None:
        """Add time measured by another thread's clock."""
        self.seconds[part] = self.seconds.get(part, 0.0) + seconds

    def read(self) -> tuple[dict[str, float], list[tuple[int, float]]]:
        """Return and reset ``seconds`` and ``reductions``. Waits for the GPU."""
        self._count_events(self._pending)
        self._pending.clear()
        taken = self.seconds, self.reductions
        self.seconds, self.reductions, self.batches = {}, [], 0
        return taken

    def _mark(self) -> Any:
        """Return seconds on a CPU, an event on a GPU."""
        if self._event is None:
            return time.perf_counter()
        event = self._event()
        event.record(self._stream)
        return event

    def _count_events(self, laps: list[tuple[str | None, int, Any, Any]]) -> None:
        if laps:
            laps[-1][-1].synchronize()
        for part, batch, begin, end in laps:
            self._count(part, batch, begin.elapsed_time(end) / 1e3)

    def _count(self, part: str | None, batch: int, seconds: float) -> None:
        if part is not None:
            self.spend(part, seconds)
        if part == "communicate":
            self.reductions.append((batch, seconds))


class LastGradient:
    """Reports when a rank's last gradient is complete: communication after it is exposed.

    The first backward pass shows which parameter's gradient is last. A pass without this parameter
    reports nothing.

    Args:
        notify: called from the thread of the backward pass.
    """

    def __init__(self, notify: Callable[[], None]):
        self._notify = notify
        self._handles: list[Any] = []
        self._order: list[nn.Parameter] = []

    def watch(self, module: nn.Module) -> None:
        """Watch a module's backward passes, learning from the first one."""
        self.forget()
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._order.append)
            for parameter in module.parameters()
            if parameter.requires_grad
        ]

    def learn(self) -> None:
        """Watch the last gradient of the first backward pass; call it after each one."""
        if not self._order:
            return
        last = self._order[-1]
        self.forget()
        self._handles = [last.register_post_accumulate_grad_hook(lambda _: self._notify())]

    def forget(self) -> None:
        """Stop watching."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._order = [], []
