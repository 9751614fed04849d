"""A model that brings down a run, in each of the ways in which runs go down."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.own_models import DglSage

ODD = 1  # the rank that fails
STEP = 6  # the call of the model, or the batch, with which it happens


def _raise() -> None:
    raise ValueError("the sixth batch is not to my liking")


def _sleep() -> None:
    time.sleep(3600)


def _allocate() -> None:
    bytearray(1 << 60)


def _take_another_collective() -> None:
    dist.all_reduce(torch.ones(3))


def _take_another_dtype() -> None:
    """Make both ranks enter a collective of the user's with different dtypes."""
    odd = dist.get_rank() == ODD
    group = _compared_group()
    dist.all_reduce(torch.ones(3, dtype=torch.float64 if odd else torch.float32), group=group)


def _compared_group() -> dist.ProcessGroup:
    """Create a process group as `comm.debug` does: each collective is compared before it runs."""
    level = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        return dist.new_group(backend="gloo")
    finally:
        dist.set_debug_level(level)


def _fill_storage(run: str) -> None:
    with contextlib.suppress(OSError), open(Path(run) / "ballast", "wb") as file:
        while True:
            file.write(bytes(4096))
            file.flush()


FAULTS: dict[str, Callable[..., None]] = {
    "raise": _raise,
    "hang": _sleep,
    "memory": _allocate,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "exit": lambda: os._exit(3),
    "abort": os.abort,
    "collective": _take_another_collective,
}
ON_ALL = {"dtype": _take_another_dtype}


class Faulty(DglSage):
    """Fails on one rank at one training step.

    Args:
        how: a key of `FAULTS` or `ON_ALL`; "data" fails while a batch is prepared, "storage"
            fills the file system of ``run`` and leaves a file for each process outside of it.
    """

    def __init__(self, in_features: int, out_features: int, how: str, run: str = ""):
        super().__init__(in_features, out_features)
        self.how, self.run, self.calls = how, run, 0
        if how == "storage":
            (Path(run).parents[1] / f"made-{os.getpid()}").touch()
        if how == "data" and dist.get_rank() == ODD:
            _break_sampling()

    def forward(self, blocks, x: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        if self.training:
            self.calls += 1
            if self.calls == STEP:
                self._fail()
        return super().forward(blocks, x)

    def _fail(self) -> None:
        if self.how in ON_ALL:
            ON_ALL[self.how]()
        elif dist.get_rank() == ODD and self.how == "storage":
            _fill_storage(self.run)
        elif dist.get_rank() == ODD and self.how in FAULTS:
            FAULTS[self.how]()


def _break_sampling() -> None:
    """Make the preparation of a batch fail in this process, as a user's transform might."""
    from raygnn.sampling.sampler import NeighborSampler

    sample = NeighborSampler.sample
    calls = 0

    def transform(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == STEP:
            raise KeyError("no such sample")
        return sample(self, *args, **kwargs)

    NeighborSampler.sample = transform  # type: ignore[method-assign]
