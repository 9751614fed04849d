"""How gradients are reduced: DDP's own way, in fewer bits, all at the end of the backward pass, or
over a group that compares.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from raygnn.config.execution import PowerSgdComm
from raygnn.worker.comm.powersgd import PowerSGD
from raygnn.worker.comm.process_groups import Ranks

_NARROW = {"fp16": torch.float16, "bf16": torch.bfloat16}


class Reduction(pl.Callback):
    """Gives DDP the hook that ``comm.compression``, ``comm.overlap: false`` and comparing process
    groups need, and counts what is reduced.

    Not through Lightning's strategy, which leaves hooks out wherever there is no CUDA.

    Args:
        ranks: whose group the gradients go over, where collectives are compared.

    Attributes:
        whole: bytes of all gradients, uncompressed; 0 where DDP does not exchange them.
        buckets: after the fit, bytes of each of DDP's buckets, as it laid them out; none where it
            came to no second step.
    """

    def __init__(self, ranks: Ranks):
        self._ranks = ranks
        self._comm = ranks.config.comm
        self._group: dist.ProcessGroup | None = None
        self._power: PowerSGD | None = None
        self._saved: dict[str, Any] | None = None
        self._ddp: DistributedDataParallel | None = None
        self._late: list[tuple[Tensor, Future[Tensor]]] = []  # buckets that wait for the last one
        self._gradients: list[tuple[nn.Parameter, Tensor]] = []  # of these
        self._bytes = 0
        self.whole = 0
        self.buckets: list[int] = []
        self._hooked = self._reduced = False

    @property
    def bytes(self) -> int:
        """Handed to the collectives by this rank so far."""
        return self._bytes + (self._power.bytes if self._power else 0)

    def on_fit_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Collective where collectives are compared: a group is made."""
        if self._ranks.world.size == 1 or not isinstance(trainer.model, DistributedDataParallel):
            return
        ddp = self._ddp = trainer.model
        gradients = [p for p in ddp.parameters() if p.requires_grad]
        self.whole = sum(p.numel() * p.element_size() for p in gradients)
        compression, overlap = self._comm.compression, self._comm.overlap
        if compression == "none" and overlap and not self._ranks.compared:
            return  # DDP's own way costs nothing in Python
        self._hooked = True
        if self._ranks.compared:
            self._group = self._ranks.compared_group
        reduce = self._reduce
        if compression == "powersgd":
            self._power = self._make_power(ddp)

        # DDP refuses annotations that are text
        def hook(state, bucket):  # type: ignore[no-untyped-def]
            buffer = bucket.buffer()
            if compression == "powersgd":
                gradients = list(zip(bucket.parameters(), bucket.gradients()))
                return self._low_rank(gradients, buffer, bucket.is_last())
            return reduce(buffer) if overlap else self._at_the_end(buffer, bucket.is_last())

        ddp.register_comm_hook(None, hook)

    def on_train_batch_start(self, *_: Any) -> None:
        # of a backward pass that raised
        self._late.clear()
        self._gradients.clear()

    def on_after_backward(self, *_: Any) -> None:
        self._reduced = self._ddp is not None and self._ddp.require_backward_grad_sync
        if self._reduced and not self._hooked:  # all gradients once, as they are
            self._bytes += self.whole

    def on_train_batch_end(self, *_: Any) -> None:
        if self._reduced and self._power is not None and self._ddp is not None:
            # whoever leaves a step out takes the gradients away
            self._power.settle(any(p.grad is not None for p in self._ddp.parameters()))

    def on_fit_end(self, *_: Any) -> None:
        if self._ddp is not None:
            told = self._ddp._get_ddp_logging_data()
            unlike = "bucket_sizes" if self._comm.find_unused_parameters else None
            sizes = told.get("rebuilt_bucket_sizes") or told.get(unlike) or ""
            self.buckets = [int(size) for size in sizes.split(", ") if size]
        self._ddp = None  # whose hook this is: the two would keep each other for ever

    def _make_power(self, ddp: DistributedDataParallel) -> PowerSGD:
        assert isinstance(self._comm, PowerSgdComm)
        power = PowerSGD(
            ddp.module.named_parameters(),
            self._comm.powersgd_rank,
            self._comm.powersgd_start,
            self._ranks.config.train.seed,
        )
        if self._saved is not None:
            power.load(self._saved)
        return power

    def _reduce(self, buffer: Tensor) -> Future[Tensor]:
        """The mean of a bucket over the ranks, in place, in as many bits as are configured."""
        size = self._ranks.world.size
        dtype = _NARROW.get(self._comm.compression)
        if dtype is None:
            return self._sum(buffer.div_(size))
        narrow = buffer.to(dtype).div_(size)
        return self._sum(narrow).then(lambda done: buffer.copy_(done.value()))

    def _sum(self, values: Tensor) -> Future[Tensor]:
        self._bytes += values.nbytes
        work = dist.all_reduce(values, group=self._group, async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    def _at_the_end(self, buffer: Tensor, last: bool) -> Future[Tensor]:
        """Begin no reduction before the last bucket is full."""
        self._late.append((buffer, _future(buffer.device)))
        future = self._late[-1][1]
        if last:
            late, self._late = self._late, []
            running = [(future, self._reduce(buffer)) for buffer, future in late]
            for future, done in running:
                future.set_result(done.wait())
        return future

    def _low_rank(
        self, gradients: list[tuple[nn.Parameter, Tensor]], buffer: Tensor, last: bool
    ) -> Future[Tensor]:
        """Reduce all buckets together, when the last one is full: two exchanges of little.

        A second exchange that began at the end of a bucket's first would be begun by a thread of
        gloo's, in an order that is another one on each rank.
        """
        self._late.append((buffer, _future(buffer.device)))
        future = self._late[-1][1]
        self._gradients += gradients
        if last:
            late, self._late = self._late, []
            found, self._gradients = self._gradients, []
            assert self._power is not None
            self._power.reduce([p for p, _ in found], [g for _, g in found], self._mean)
            for buffer, future in late:
                future.set_result(buffer)
        return late[-1][1] if last else future

    def _mean(self, values: Tensor) -> Tensor:
        dist.all_reduce(values.div_(self._ranks.world.size), group=self._group)
        return values

    def state_dict(self) -> dict[str, Any]:
        """What PowerSGD left out, of all ranks. Collective."""
        if self._power is None:
            return {}
        state = self._power.state()
        control = self._ranks.control
        # to rank 0, one after the other: the others keep nothing
        found = {name: control.gather(state["left"][name].cpu()) for name in sorted(state["left"])}
        return {**state, "left": {name: rows for name, rows in found.items() if rows is not None}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Each rank takes what it left out; another number of them share the mean of it, so that
        nothing is lost of what the gradients' mean lacks."""
        if not state:
            return
        world = self._ranks.world
        left = {
            name: rows[world.rank] if len(rows) == world.size else rows.double().mean(0)
            for name, rows in state["left"].items()
        }
        self._saved = {**state, "left": left}
        if self._power is not None:
            self._power.load(self._saved)


def _future(device: torch.device) -> Future[Tensor]:
    return Future(devices=[device] if device.type == "cuda" else None)
