"""Models as users write them: from dgl.nn, or with a fault."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn


class DglSage(nn.Module):
    """Two SAGEConv layers of dgl.nn."""

    def __init__(self, in_features: int, out_features: int, hidden: int = 16):
        super().__init__()
        from dgl.nn import SAGEConv

        self.first = SAGEConv(in_features, hidden, "mean")
        self.second = SAGEConv(hidden, out_features, "mean")

    def forward(self, blocks, x: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        h = torch.relu(self.first(blocks[0], (x, x[: blocks[0].num_dst_nodes()])))
        return self.second(blocks[1], (h, h[: blocks[1].num_dst_nodes()]))


class FailsOnRank1(DglSage):
    """Fails on rank 1 at one training step, as configured, once or always.

    Args:
        how: "raise", "die" (SIGKILL) or "hang".
        flag: a file that marks that it has happened; "" to fail every time.
    """

    def __init__(self, in_features: int, out_features: int, how: str, flag: str = ""):
        super().__init__(in_features, out_features)
        self.how, self.flag, self.calls = how, flag, 0

    def forward(self, blocks, x: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        if self.training:
            self.calls += 1
            if dist.get_rank() == 1 and self.calls == 6 and self._now():
                if self.how == "raise":
                    raise ValueError("the sixth batch is not to my liking")
                if self.how == "hang":
                    time.sleep(3600)
                os.kill(os.getpid(), 9)
        return super().forward(blocks, x)

    def _now(self) -> bool:
        if not self.flag:
            return True
        path = Path(self.flag)
        if path.exists():
            return False
        path.touch()
        return True


class Slow(DglSage):
    """Sleeps in each step, so that a test can interrupt it."""

    def forward(self, blocks, x: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        if self.training:
            time.sleep(0.5)
        return super().forward(blocks, x)


class Branching(DglSage):
    """Skips a layer in its fourth batch, on one rank or on all.

    Args:
        rank: which; -1 = all.
    """

    def __init__(self, in_features: int, out_features: int, rank: int):
        super().__init__(in_features, out_features)
        self.extra = nn.Linear(out_features, out_features)
        self.rank, self.calls = rank, 0

    def forward(self, blocks, x: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        out = super().forward(blocks, x)
        self.calls += self.training
        without = self.training and self.calls == 4 and self.rank in (-1, dist.get_rank())
        return out if without else self.extra(out)


class Dying(DglSage):
    """Sleeps in each step, and kills the rank on host1 at one step, once.

    Args:
        pause: seconds of a step.
        at: the step at which it dies.
        flag: a file of that host which marks that it has happened.
    """

    def __init__(self, in_features: int, out_features: int, pause: float, at: int, flag: str):
        super().__init__(in_features, out_features)
        self.pause, self.at, self.flag, self.calls = pause, at, Path(flag), 0

    def forward(self, blocks, x: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        if self.training:
            self.calls += 1
            time.sleep(self.pause)
            dies = socket.gethostname() == "host1" and self.calls == self.at
            if dies and not self.flag.exists():
                self.flag.touch()
                os.kill(os.getpid(), 9)
        return super().forward(blocks, x)
