"""The ranks of a run and their process groups: one each for gradients, batches and control."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor, nn

from raygnn import compat
from raygnn.config.schema import Config
from raygnn.models.norm import BatchNorm
from raygnn.sampling.exchange import Exchange, FailureBroadcast, World
from raygnn.sampling.host_memory import Host
from raygnn.tasks.lightning_modules import TaskModule


@dataclass(frozen=True)
class Ranks:
    """A rank and its process groups.

    Gradients use the default group, which exists already. The data plane and the control messages
    each have a gloo group of their own, so that no two threads share one. All ranks create the
    groups in one order: `data`, `control`, `step`, then the other groups.
    """

    config: Config
    world: World
    device: torch.device

    @classmethod
    def join(cls, config: Config, world: World, device: torch.device) -> Ranks:
        """Create the groups. Collective."""
        ranks = cls(config, world, device)
        assert ranks.data is not ranks.control
        assert world.rank in ranks.host.ranks
        if config.model.embedding is not None or getattr(config.model, "norm", None) == "batch":
            assert ranks.step is not ranks.control
        return ranks

    @cached_property
    def compared_group(self) -> dist.ProcessGroup:
        """Group of gradients where collectives are compared. Collective at first use."""
        return self.group(dist.get_backend())

    @cached_property
    def data(self) -> Exchange:
        """Collectives of batches."""
        return self._exchange()

    @cached_property
    def control(self) -> Exchange:
        """Collectives of everything else but gradients."""
        return self._exchange()

    @cached_property
    def step(self) -> Exchange:
        """Collectives of embedding rows, their gradients and batch normalization within a step; for
        the training thread alone."""
        return self._exchange()

    @cached_property
    def device_rows(self) -> Exchange:
        """Rows of other hosts for a GPU, over the group of gradients, since NCCL's kernels of two
        groups can deadlock. For the training thread alone, before each forward pass. Collective at
        first use."""
        if self.world.size == 1:
            return Exchange(self.world)
        return Exchange(self.world, self.compared_group if self.compared else dist.group.WORLD)

    @cached_property
    def host(self) -> Host:
        """Ranks that share this one's memory. Collective at first use."""
        return Host.discover(self.control)

    @property
    def fetched_bytes(self) -> int:
        """Bytes of structure and features that this rank has sent for batches."""
        rows = self.__dict__.get("device_rows")
        return self.data.sent_bytes + (rows.sent_bytes if rows else 0)

    @property
    def sent_bytes(self) -> int:
        """`fetched_bytes` and the bytes of embedding rows and their gradients."""
        step = self.__dict__.get("step")
        return self.fetched_bytes + (step.sent_bytes if step else 0)

    @property
    def first(self) -> bool:
        return self.world.rank == 0

    @property
    def compared(self) -> bool:
        """True if each collective is compared over the ranks before it runs."""
        deep = self.config.comm.debug or self.config.guard.mode == "deep"
        return deep and self.world.size > 1

    def alarm(self) -> FailureBroadcast:
        store = None
        if self.world.size > 1:
            store = dist.PrefixStore("raygnn/alarm", compat.default_store())
        return FailureBroadcast(self.world, store)

    def group(self, backend: str) -> dist.ProcessGroup:
        """Create a process group of all ranks, which compares if `compared`. Collective."""
        timeout = timedelta(seconds=self.config.comm.timeout.seconds)
        level = dist.get_debug_level()
        if self.compared:
            # Not by the variable: with the default group of this kind, too, DDP's logger ends in a
            # segmentation fault (torch 2.13).
            dist.set_debug_level(dist.DebugLevel.DETAIL)
        try:
            return dist.new_group(backend=backend, timeout=timeout)
        finally:
            dist.set_debug_level(level)

    def share_buffers(self, module: nn.Module) -> None:
        """Copy rank 0's buffers to all ranks. Collective.

        A user's module may have buffers that differ, such as torch's running statistics. DDP copies
        rank 0's before each forward pass, too, and a checkpoint holds rank 0's, so that an
        evaluation after a resume has the same result.
        """
        if self.world.size == 1:
            return
        for buffer in module.buffers():
            if buffer.is_floating_point():
                own = buffer.detach().double().cpu()
                buffer.copy_(self.control.sum(own if self.first else torch.zeros_like(own)))

    def synchronise(self, task: TaskModule) -> None:
        """Let batch normalization use the rows of all ranks."""

        def over_ranks(values: Tensor, part: str) -> Tensor:
            task.clock.lap(part)
            self.step.sum(values)
            task.clock.lap("communicate")  # includes the wait for other ranks
            return values

        for module in task.modules():
            if isinstance(module, BatchNorm):
                module.join(self.world.rank, self.world.size, over_ranks)

    def _exchange(self) -> Exchange:
        if self.world.size == 1:
            return Exchange(self.world)
        return Exchange(self.world, self.group("gloo"))
