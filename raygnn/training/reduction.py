"""How gradients are reduced: DDP's own way, in fewer bits, all at the end of the backward pass, or
over a group that compares.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from raygnn.training.powersgd import PowerSGD
from raygnn.training.ranks import Ranks

_NARROW = {"fp16": torch.float16, "bf16": torch.bfloat16}

Reduce = Callable[[Any, list[Tensor], Tensor], Future[Tensor]]  # parameters, gradients, buffer


class Reduction(pl.Callback):
    """Gives DDP the hook that ``comm.compression``, ``comm.overlap: false`` and comparing process
    groups need, and counts what is reduced.

    Not through Lightning's strategy, which leaves hooks out wherever there is no CUDA.

    Args:
        ranks: whose group the gradients go over, where collectives are compared.

    Attributes:
        whole: bytes of all gradients, uncompressed; 0 with one rank.
        buckets: bytes of each of DDP's buckets, as it lays them out.
    """

    def __init__(self, ranks: Ranks):
        self._ranks = ranks
        self._comm = ranks.config.comm
        self._group: dist.ProcessGroup | None = None
        self._power: PowerSGD | None = None
        self._saved: dict[str, Any] | None = None
        self._ddp: DistributedDataParallel | None = None
        self._late: list[tuple[Future[Tensor], Callable[[], Future[Tensor]]]] = []
        self._bytes = 0
        self.whole = 0
        self._hooked = False

    @property
    def bytes(self) -> int:
        """Handed to the collectives by this rank so far."""
        return self._bytes + (self._power.bytes if self._power else 0)

    @property
    def buckets(self) -> list[int]:
        if self._ddp is None:
            return []
        told = self._ddp._get_ddp_logging_data()
        sizes = told.get("rebuilt_bucket_sizes") or told.get("bucket_sizes") or ""
        return [int(size) for size in sizes.split(", ") if size]

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
            self._group = self._ranks.group(dist.get_backend())
        reduce: Reduce = self._plain
        if compression in _NARROW:
            reduce = self._narrow
        elif compression == "powersgd":
            seed = self._ranks.config.train.seed
            named = ddp.module.named_parameters()
            rank, start = self._comm.powersgd_rank, self._comm.powersgd_start
            power = self._power = PowerSGD(named, rank, start, seed)
            if self._saved is not None:
                power.load(self._saved)
            reduce = self._low_rank

        # DDP refuses annotations that are text
        def hook(state, bucket):  # type: ignore[no-untyped-def]
            args = list(bucket.parameters()), list(bucket.gradients()), bucket.buffer()
            if overlap:
                return reduce(*args)
            return self._at_the_end(lambda: reduce(*args), args[2].device, bucket.is_last())

        ddp.register_comm_hook(None, hook)

    def on_after_backward(self, *_: Any) -> None:
        # without a hook all gradients are reduced once, as they are
        if self._ddp is not None and not self._hooked and self._ddp.require_backward_grad_sync:
            self._bytes += self.whole

    def _plain(self, parameters: Any, gradients: list[Tensor], buffer: Tensor) -> Future[Tensor]:
        return self._sum(buffer.div_(self._ranks.world.size))

    def _narrow(self, parameters: Any, gradients: list[Tensor], buffer: Tensor) -> Future[Tensor]:
        narrow = buffer.to(_NARROW[self._comm.compression]).div_(self._ranks.world.size)

        def widen(done: Future[Tensor]) -> Tensor:
            return buffer.copy_(done.value())

        return self._sum(narrow).then(widen)

    def _low_rank(self, parameters: Any, gradients: list[Tensor], buffer: Tensor) -> Future[Tensor]:
        # One after the other: a second reduction from the first one's end would be begun by a
        # thread of gloo's, in an order that is another one on each rank.
        def mean(values: Tensor) -> Tensor:
            dist.all_reduce(values.div_(self._ranks.world.size), group=self._group)
            return values

        assert self._power is not None
        self._power.reduce(parameters, gradients, mean)
        return _done(buffer)

    def _sum(self, values: Tensor) -> Future[Tensor]:
        self._bytes += values.nbytes
        work = dist.all_reduce(values, group=self._group, async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    def _at_the_end(
        self, reduce: Callable[[], Future[Tensor]], device: torch.device, last: bool
    ) -> Future[Tensor]:
        """Begin no reduction before the last bucket is full."""
        self._late.append((_future(device), reduce))
        future = self._late[-1][0]
        if last:
            late, self._late = self._late, []
            running = [(future, reduce()) for future, reduce in late]
            for future, done in running:
                future.set_result(done.wait())
        return future

    def state_dict(self) -> dict[str, Any]:
        """What PowerSGD left out, of all ranks. Collective."""
        if self._power is None:
            return {}
        state = self._power.state()
        names = sorted(state["left"])
        control = self._ranks.control
        rows = {name: control.gather_rows(state["left"][name].cpu().unsqueeze(0)) for name in names}
        return {**state, "left": rows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Each rank takes what it left out; another number of them share the mean of it, so that
        nothing is lost of what the gradients' mean lacks."""
        if not state:
            return
        world = self._ranks.world
        left = {
            name: rows[world.rank] if len(rows) == world.size else rows.float().mean(0)
            for name, rows in state["left"].items()
        }
        self._saved = {**state, "left": left}
        if self._power is not None:
            self._power.load(self._saved)


def _done(value: Tensor) -> Future[Tensor]:
    future = _future(value.device)
    future.set_result(value)
    return future


def _future(device: torch.device) -> Future[Tensor]:
    return Future(devices=[device] if device.type == "cuda" else None)
