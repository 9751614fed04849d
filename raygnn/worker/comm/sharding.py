"""Sharding of the optimizer's state: ``comm.shard``."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from raygnn.errors import TrainingError
from raygnn.tasks.lightning_modules import TaskModule
from raygnn.worker.comm.process_groups import Ranks


def shard_optimizer(ranks: Ranks, task: TaskModule) -> None:
    """Prepare a model for training with ``comm.shard``; a single rank shards nothing.

    Each rank keeps the optimizer's state of some parameters, updates these and sends them to all
    (ZeRO stage 1: Rajbhandari et al., SC 2020).

    Raises:
        TrainingError: its parameters are of several types.
    """
    if ranks.config.comm.shard == "none" or ranks.world.size == 1:
        return
    check_shardable(task.model)

    def make(kind: type[torch.optim.Optimizer], params: Any, options: dict[str, Any]) -> Any:
        from torch.distributed.optim import ZeroRedundancyOptimizer  # takes a quarter of a second

        # the group of the exchanges that are not DDP's: collective if ranks compare
        group = ranks.group(dist.get_backend()) if ranks.compared else None
        return ZeroRedundancyOptimizer(
            params,
            optimizer_class=kind,
            process_group=group,
            parameters_as_bucket_view=True,  # one broadcast for each rank
            **options,
        )

    task.construct = make


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
