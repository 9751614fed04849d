"""How gradients are reduced: DDP's own way, in fewer bits, or over a group that compares."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from raygnn.training.ranks import Ranks


def bf16_hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations as text
    """torch's bf16 hook, under a name that DDP does not refuse: gloo reduces bf16, too."""
    return default_hooks.bf16_compress_hook(state, bucket)


_COMPRESSED: dict[str, Callable[..., Any]] = {
    "fp16": default_hooks.fp16_compress_hook,
    "bf16": bf16_hook,
}


class Reduction(pl.Callback):
    """Gives DDP the hook that ``comm.compression`` and comparing process groups need.

    Not through Lightning's strategy, which leaves hooks out wherever there is no CUDA.

    Args:
        ranks: whose group the gradients go over, where collectives are compared.
    """

    def __init__(self, ranks: Ranks):
        self._ranks = ranks
        self.hook = _COMPRESSED.get(ranks.config.comm.compression)
        if self.hook is None and ranks.compared:
            self.hook = default_hooks.allreduce_hook

    def on_fit_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Collective where collectives are compared: a group is made."""
        if self.hook is None or self._ranks.world.size == 1:
            return
        assert isinstance(trainer.model, DistributedDataParallel)
        group = self._ranks.group(dist.get_backend()) if self._ranks.compared else None
        trainer.model.register_comm_hook(group, self.hook)
