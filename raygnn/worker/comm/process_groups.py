"""The ranks of a run and the ways between them: one group each for gradients, ids and control."""

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
    """This rank among the others.

    Whoever started the ranks has made the default process group, which gradients use; the data
    plane and the control messages each have a gloo group of their own, so that no two threads
    share one. All groups are made in one order: `data`, `control`, `step`, then others.
    """

    config: Config
    world: World
    device: torch.device

    @classmethod
    def join(cls, config: Config, world: World, device: torch.device) -> Ranks:
        """Make the groups. Collective."""
        ranks = cls(config, world, device)
        assert ranks.data is not ranks.control
        assert world.rank in ranks.host.ranks
        if config.model.embedding is not None or getattr(config.model, "norm", None) == "batch":
            assert ranks.step is not ranks.control
        return ranks

    def for_config(self, config: Config) -> Ranks:
        """The same groups for another configuration."""
        other = Ranks(config, self.world, self.device)
        made = ("data", "control", "step", "host", "compared_group", "device_rows")
        other.__dict__.update({n: self.__dict__[n] for n in made if n in self.__dict__})
        return other

    @cached_property
    def compared_group(self) -> dist.ProcessGroup:
        """For gradients where collectives are compared, made when it is first needed. Collective
        then."""
        return self.group(dist.get_backend())

    @cached_property
    def data(self) -> Exchange:
        """The collectives of batches."""
        return self._exchange()

    @cached_property
    def control(self) -> Exchange:
        """The collectives of everything else but gradients."""
        return self._exchange()

    @cached_property
    def step(self) -> Exchange:
        """The collectives within a step but those of gradients: learned rows and their gradients,
        the moments of batch normalisation. Of the thread that trains alone."""
        return self._exchange()

    @cached_property
    def device_rows(self) -> Exchange:
        """Rows of other hosts that a GPU awaits, over the group that gradients use: NCCL's kernels
        of two groups can wait for each other for ever. Of the thread that trains alone, before
        each forward pass. Collective when it is first needed."""
        if self.world.size == 1:
            return Exchange(self.world)
        return Exchange(self.world, self.compared_group if self.compared else dist.group.WORLD)

    @cached_property
    def host(self) -> Host:
        """The ranks that share this one's memory, over `control`. Collective when it is first
        needed."""
        return Host.discover(self.control)

    @property
    def fetched_bytes(self) -> int:
        """What this rank sent for batches so far, of structure and features."""
        rows = self.__dict__.get("device_rows")
        return self.data.sent_bytes + (rows.sent_bytes if rows else 0)

    @property
    def sent_bytes(self) -> int:
        """The same with learned rows and their gradients."""
        learned = self.__dict__.get("step")
        return self.fetched_bytes + (learned.sent_bytes if learned else 0)

    @property
    def first(self) -> bool:
        return self.world.rank == 0

    @property
    def compared(self) -> bool:
        """Whether each collective is compared over the ranks before it runs."""
        deep = self.config.comm.debug or self.config.guard.mode == "deep"
        return deep and self.world.size > 1

    def alarm(self) -> FailureBroadcast:
        """What tells ranks of each other's failures."""
        store = None
        if self.world.size > 1:
            store = dist.PrefixStore("raygnn/alarm", compat.default_store())
        return FailureBroadcast(self.world, store)

    def group(self, backend: str) -> dist.ProcessGroup:
        """A process group of all ranks; one that compares if `compared`. Collective."""
        timeout = timedelta(seconds=self.config.comm.timeout.seconds)
        level = dist.get_debug_level()
        if self.compared:
            # Not by the variable: the default group would be one of these, too, and DDP's logger
            # dies of a segmentation fault on it (seen with torch 2.13).
            dist.set_debug_level(dist.DebugLevel.DETAIL)
        try:
            return dist.new_group(backend=backend, timeout=timeout)
        finally:
            dist.set_debug_level(level)

    def share_buffers(self, module: nn.Module) -> None:
        """Give all ranks rank 0's buffers, of which a user's own module may have some that differ,
        such as the running statistics of torch's batch normalisation. Collective.

        DDP gives them to the others before each forward pass, too, and a checkpoint holds them:
        what is evaluated after a resume is what was before.
        """
        if self.world.size == 1:
            return
        for buffer in module.buffers():
            if buffer.is_floating_point():
                own = buffer.detach().double().cpu()
                buffer.copy_(self.control.sum(own if self.first else torch.zeros_like(own)))

    def synchronise(self, task: TaskModule) -> None:
        """Have batch normalisation take the rows of all ranks."""

        def over_ranks(values: Tensor, part: str) -> Tensor:
            task.clock.lap(part)
            self.step.sum(values)
            task.clock.lap("communicate")  # and a wait, which is not this rank's own time
            return values

        for module in task.modules():
            if isinstance(module, BatchNorm):
                module.join(self.world.rank, self.world.size, over_ranks)

    def _exchange(self) -> Exchange:
        if self.world.size == 1:
            return Exchange(self.world)
        return Exchange(self.world, self.group("gloo"))
