"""Sharding of the optimizer's state: ``comm.shard``."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from raygnn.errors import TrainingError
from raygnn.tasks.lightning_modules import TaskModule
from raygnn.worker.comm.process_groups import Ranks


class Sharding:
    """Sharding of a run; a single rank shards nothing."""

    def __init__(self, ranks: Ranks):
        self._ranks = ranks

    def prepare(self, task: TaskModule) -> None:
        """Prepare a model for training.

        Raises:
            TrainingError: its parameters are of several types.
        """
        if self._ranks.config.comm.shard != "none" and self._ranks.world.size > 1:
            check_shardable(task.model)
            task.construct = self._make_optimizer

    def _make_optimizer(
        self, kind: type[torch.optim.Optimizer], params: Any, options: dict[str, Any]
    ) -> torch.optim.Optimizer:
        """Return an optimizer in which each rank keeps the state of some parameters, updates those
        and sends them to all (ZeRO stage 1: Rajbhandari et al., SC 2020)."""
        from torch.distributed.optim import ZeroRedundancyOptimizer  # takes a quarter of a second

        # the group of the exchanges that are not DDP's: collective if ranks compare
        group = self._ranks.group(dist.get_backend()) if self._ranks.compared else None
        return ZeroRedundancyOptimizer(
            params,
            optimizer_class=kind,
            process_group=group,
            parameters_as_bucket_view=True,  # one broadcast for each rank
            **options,
        )


def check_shardable(model: nn.Module) -> None:
    """Raise TrainingError if parameters are of several types."""
    dtypes = {str(p.dtype): name for name, p in model.named_parameters()}
    if len(dtypes) > 1:
        raise TrainingError(
            "comm.shard: optimizer needs parameters of one dtype, but there are: "
            + ", ".join(f"{name} ({dtype})" for dtype, name in sorted(dtypes.items())),
            where="model.kind",
            remedy="convert them, or set comm.shard to none",
        )
