"""What data parallelism keeps whole on every rank, or shares out: ``comm.shard``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy

from raygnn.tasks.task import Task
from raygnn.worker.comm.fully_sharded import (
    FullyShardedStrategy,
    Twin,
    check_shardable,
    check_supported,
)
from raygnn.worker.comm.process_groups import Ranks


class Sharding:
    """How a run is sharded; one rank alone shards nothing.

    Attributes:
        full: whether parameters and gradients are, too.

    Raises:
        CapabilityError: torch is too old for it.
    """

    def __init__(self, ranks: Ranks):
        self._ranks = ranks
        kind = ranks.config.comm.shard if ranks.world.size > 1 else "none"
        self.full = kind == "full"
        self._optimizer = kind == "optimizer"
        self._twin: Twin | None = None
        if self.full:
            check_supported(ranks.device)

    def prepare(self, task: Task) -> None:
        """Before training begins.

        Raises:
            TrainingError: the model cannot be sharded so.
        """
        if self._optimizer or self.full:
            check_shardable(task.model, self._ranks.config.comm.shard)
        if self._optimizer:
            task.construct = self._make_optimizer
        if self.full:
            self._twin = Twin(task.model)

    def strategy(self, base: type[DDPStrategy], ddp: dict[str, Any]) -> DDPStrategy:
        """
        Args:
            base: what knows about devices and ranks.
            ddp: what DDP is told, where there is one.
        """
        if not self.full:
            return base(**ddp)
        kind: Any = type("FullySharded", (FullyShardedStrategy, base), {})
        strategy: DDPStrategy = kind(self._group())
        return strategy

    @contextmanager
    def whole(self, task: Task) -> Iterator[None]:
        """``task.model`` has all its parameters in the block, and needs no other rank to run.
        Collective."""
        if self._twin is None:
            yield
            return
        sharded = task.model
        task.model = self._twin.of(sharded)
        try:
            yield
        finally:
            task.model = sharded

    def collect(self, task: Task) -> None:
        """The same for good: when training is over. Collective."""
        if self._twin is not None:
            task.model, self._twin = self._twin.of(task.model), None

    def _make_optimizer(
        self, kind: type[torch.optim.Optimizer], params: Any, options: dict[str, Any]
    ) -> torch.optim.Optimizer:
        """Each rank keeps the state of some parameters, updates those and sends them to all (ZeRO
        stage 1: Rajbhandari et al., SC 2020)."""
        from torch.distributed.optim import ZeroRedundancyOptimizer  # takes a quarter of a second

        return ZeroRedundancyOptimizer(
            params,
            optimizer_class=kind,
            process_group=self._group(),
            parameters_as_bucket_view=True,  # one broadcast for each rank
            **options,
        )

    def _group(self) -> dist.ProcessGroup | None:
        """For what else is exchanged but gradients of DDP. Collective if ranks compare."""
        return self._ranks.group(dist.get_backend()) if self._ranks.compared else None
