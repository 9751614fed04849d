"""Reduction of gradients: DDP's own, in fewer bits, after the backward pass, or over a group that
compares; and sharding of the optimizer's state (``comm.shard``)."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from raygnn import compat
from raygnn.errors import TrainingError
from raygnn.tasks.lightning_modules import TaskModule
from raygnn.worker.comm.process_groups import Ranks

_NARROW = {"fp16": torch.float16, "bf16": torch.bfloat16}


class Reduction(pl.Callback):
    """Registers the DDP hook for ``comm.compression``, ``comm.overlap: false`` and process groups
    that compare, and counts the reduced bytes.

    Lightning's strategy registers hooks on CUDA only.

    DDP rebuilds its buckets after the first backward pass of each start, in the order in which
    gradients arrived. An element's position decides the order in which the ranks' values are added,
    which changes the last bits of the sum from three ranks on. So checkpoints hold that order, and
    a resumed run has the same buckets from its first step on.

    Attributes:
        whole: bytes of all gradients, uncompressed; 0 if DDP does not exchange them.
        bytes: sent to collectives by this rank so far.
    """

    def __init__(self, ranks: Ranks):
        self._ranks = ranks
        self._comm = ranks.config.comm
        self._group: dist.ProcessGroup | None = None
        self._ddp: DistributedDataParallel | None = None
        self._late: list[tuple[Tensor, Future[Tensor]]] = []  # buckets that wait for the last one
        self._came: list[Tensor] = []  # parameters, in the order of their first gradients
        self._watching: list[RemovableHandle] = []
        self._order: list[int] = []  # their numbers
        self.bytes = 0
        self.whole = 0
        self._hooked = False

    def on_fit_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Register the hook. Collective if collectives are compared."""
        if self._ranks.world.size == 1 or not isinstance(trainer.model, DistributedDataParallel):
            return
        ddp = self._ddp = trainer.model
        gradients = trained(ddp)
        self.whole = sum(p.numel() * p.element_size() for p in gradients)
        compression, overlap = self._comm.compression, self._comm.overlap
        relaid = not self._comm.find_unused_parameters  # else DDP keeps the first buckets
        # in place of a backward pass, DDP is given dense gradients of zeros
        embeddings = (m for m in ddp.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag)))
        sparse = any(embedding.sparse for embedding in embeddings)
        if relaid and sorted(self._order) == list(range(len(gradients))) and not sparse:
            ordered = [gradients[number] for number in self._order]
            relaid = not compat.lay_out_buckets(ddp, ordered)
        if relaid:
            came = self._came.append
            self._watching = [p.register_post_accumulate_grad_hook(came) for p in gradients]
        if compression == "none" and overlap and not self._ranks.compared:
            return  # DDP's own reduction costs no Python
        self._hooked = True
        if self._ranks.compared:
            self._group = self._ranks.compared_group

        # DDP refuses annotations that are strings
        def hook(state, bucket):  # type: ignore[no-untyped-def]
            buffer = bucket.buffer()
            return self._reduce(buffer) if overlap else self._at_the_end(buffer, bucket.is_last())

        ddp.register_comm_hook(None, hook)

    def on_train_batch_start(self, *_: Any) -> None:
        self._late.clear()  # of a backward pass that raised
        self._came.clear()  # or of one that DDP did not reduce

    def on_after_backward(self, *_: Any) -> None:
        if self._ddp is None or not self._ddp.require_backward_grad_sync:
            return
        if self._watching:
            self._learn_order(self._ddp)
        if not self._hooked:  # DDP has reduced all gradients once
            self.bytes += self.whole

    def _learn_order(self, ddp: DistributedDataParallel) -> None:
        for handle in self._watching:
            handle.remove()
        numbers = {id(p): number for number, p in enumerate(trained(ddp))}
        self._order = list(dict.fromkeys(numbers[id(p)] for p in self._came))
        self._watching, self._came = [], []

    def on_fit_end(self, *_: Any) -> None:
        self._ddp = None  # whose hook refers to this object

    def _reduce(self, buffer: Tensor) -> Future[Tensor]:
        """Average a bucket over the ranks, in place, with ``comm.compression``."""
        size = self._ranks.world.size
        dtype = _NARROW.get(self._comm.compression)
        if dtype is None:
            return self._sum(buffer.div_(size))
        narrow = buffer.to(dtype).div_(size)
        return self._sum(narrow).then(lambda done: buffer.copy_(done.value()))

    def _sum(self, values: Tensor) -> Future[Tensor]:
        self.bytes += values.nbytes
        work = dist.all_reduce(values, group=self._group, async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    def _at_the_end(self, buffer: Tensor, last: bool) -> Future[Tensor]:
        """Reduce all buckets after the last one is full."""
        device = buffer.device
        future: Future[Tensor] = Future(devices=[device] if device.type == "cuda" else None)
        self._late.append((buffer, future))
        if last:
            late, self._late = self._late, []
            running = [(future, self._reduce(buffer)) for buffer, future in late]
            for future, done in running:
                future.set_result(done.wait())
        return future

    def state_dict(self) -> dict[str, Any]:
        """Return the order of gradients on this rank; DDP uses rank 0's order."""
        return {"order": self._order}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._order = state.get("order", [])


def trained(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that get gradients, as DDP numbers them."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def shard_optimizer(ranks: Ranks, task: TaskModule) -> None:
    """Prepare a model for training with ``comm.shard``; a single rank shards nothing.

    Each rank keeps the optimizer's state of some parameters, updates these and sends them to all
    (ZeRO stage 1: Rajbhandari et al., SC 2020). Raises TrainingError if its parameters are of
    several types.
    """
    if ranks.config.comm.shard == "none" or ranks.world.size == 1:
        return
    check_shardable(task.model)

    def make(kind: type[torch.optim.Optimizer], params: Any, options: dict[str, Any]) -> Any:
        from torch.distributed.optim import ZeroRedundancyOptimizer  # takes a quarter of a second

        # the group of the exchanges that are not DDP's: collective if ranks compare
        group = ranks.group(dist.get_backend()) if ranks.compared else None
        optimizer = ZeroRedundancyOptimizer(
            params,
            optimizer_class=kind,
            process_group=group,
            parameters_as_bucket_view=True,  # one broadcast for each rank
            **options,
        )
        if options.get("fused"):
            optimizer.register_load_state_dict_post_hook(_counts_to_devices)
        return optimizer

    task.construct = make


def _counts_to_devices(optimizer: Any) -> None:
    """Move the counts of steps to their parameters' device, where a fused optimizer needs them;
    ZeroRedundancyOptimizer loads them to the CPU."""
    for parameter, state in optimizer.optim.state.items():
        state["step"] = state["step"].to(parameter.device)


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
