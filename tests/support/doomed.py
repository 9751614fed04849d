"""A model whose process is killed, once, at a moment of the test's choice."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from raygnn.checkpoint import hashed_files, store
from tests.support.own_models import DglSage


class Doomed(nn.Module):
    """Two layers with dropout between them.

    Args:
        moment: ``train`` and ``evaluate`` (in the n-th such call of the model), ``write`` (at the
            n-th piece that a checkpoint's file is given), ``sync`` (at the n-th time that a
            checkpoint's file or directory is made durable), ``rename`` (right after that),
            ``time`` (n milliseconds after the model was made), ``never``.
        rank: who dies; of checkpoints, rank 0 does.
        flag: a file that marks that it has happened.
    """

    def __init__(
        self, in_features: int, out_features: int, moment: str, n: int, rank: int, flag: str
    ):
        super().__init__()
        self.layers = DglSage(in_features, out_features)
        self.moment, self.n, self.flag = moment, n, Path(flag)
        tried = dist.get_world_size() == 1  # before the run starts
        self.doomed = dist.get_rank() == rank and not (tried or self.flag.exists())
        self.doomed &= moment != "never"
        if self.doomed:
            self._prepare()

    def _prepare(self) -> None:
        if self.moment == "time":
            threading.Thread(target=self._after, args=(self.n / 1000,), daemon=True).start()
        elif self.moment == "write":
            hashed_files.Hashed.write = self._before(hashed_files.Hashed.write)
        elif self.moment == "sync":
            store.sync = hashed_files.sync = self._before(store.sync)
        elif self.moment == "rename":
            rename = os.rename

            def renamed(*args: Any) -> None:
                rename(*args)
                if Path(args[1]).name.startswith("step-"):
                    self._count()

            os.rename = renamed

    def forward(self, blocks: Any, x: Tensor) -> Tensor:
        if self.doomed and self.moment == ("train" if self.training else "evaluate"):
            self._count()
        return self.layers(blocks, torch.dropout(x, 0.3, self.training))

    def _before(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any) -> Any:
            self._count()
            return function(*args)

        return counted

    def _after(self, seconds: float) -> None:
        time.sleep(seconds)
        self._die()

    def _count(self) -> None:
        self.n -= 1
        if self.n == 0:
            self._die()

    def _die(self) -> None:
        self.flag.touch()
        os.kill(os.getpid(), signal.SIGKILL)
