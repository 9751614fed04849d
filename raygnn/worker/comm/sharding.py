"""Sharding of parameters, gradients and the optimizer's state: ``comm.shard``.

``full`` is torch's `fully_shard` under Lightning, on any device: Lightning's own strategies for it
need CUDA.
"""

from __future__ import annotations

import copy
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from raygnn.errors import GuardError, TrainingError
from raygnn.models.network import Stack
from raygnn.tasks.lightning_modules import TaskModule
from raygnn.worker.comm.process_groups import Ranks


class Sharding:
    """Sharding of a run; a single rank shards nothing.

    Attributes:
        full: parameters and gradients are sharded, too.
    """

    def __init__(self, ranks: Ranks):
        self._ranks = ranks
        kind = ranks.config.comm.shard if ranks.world.size > 1 else "none"
        self.full = kind == "full"
        self._optimizer = kind == "optimizer"
        self._twin: Twin | None = None

    def prepare(self, task: TaskModule) -> None:
        """Prepare a model for training.

        Raises:
            TrainingError: it cannot be sharded.
        """
        if self._optimizer or self.full:
            check_shardable(task.model, self._ranks.config.comm.shard)
        if self._optimizer:
            task.construct = self._make_optimizer
        if self.full:
            self._twin = Twin(task.model)

    def strategy(self, base: type[DDPStrategy], ddp: dict[str, Any]) -> DDPStrategy:
        """Return ``base`` with the arguments ``ddp``, or a fully sharded strategy on it."""
        if not self.full:
            return base(**ddp)
        kind: Any = type("FullySharded", (FullyShardedStrategy, base), {})
        strategy: DDPStrategy = kind(self._group())
        return strategy

    @contextmanager
    def whole(self, task: TaskModule) -> Iterator[None]:
        """Let ``task.model`` have all its parameters in the block, and run without the other ranks.
        Collective."""
        if self._twin is None:
            yield
            return
        sharded = task.model
        task.model = self._twin.unsharded(sharded)
        try:
            yield
        finally:
            task.model = sharded

    def collect(self, task: TaskModule) -> None:
        """Give ``task.model`` all its parameters after training. Collective."""
        if self._twin is not None:
            task.model, self._twin = self._twin.unsharded(task.model), None

    def _make_optimizer(
        self, kind: type[torch.optim.Optimizer], params: Any, options: dict[str, Any]
    ) -> torch.optim.Optimizer:
        """Return an optimizer in which each rank keeps the state of some parameters, updates those
        and sends them to all (ZeRO stage 1: Rajbhandari et al., SC 2020)."""
        from torch.distributed.optim import ZeroRedundancyOptimizer  # takes a quarter of a second

        return ZeroRedundancyOptimizer(
            params,
            optimizer_class=kind,
            process_group=self._group(),
            parameters_as_bucket_view=True,  # one broadcast for each rank
            **options,
        )

    def _group(self) -> dist.ProcessGroup | None:
        """Return the group of the exchanges that are not DDP's. Collective if ranks compare."""
        return self._ranks.group(dist.get_backend()) if self._ranks.compared else None


class FullyShardedStrategy(DDPStrategy):
    """Shards parameters, gradients and the optimizer's state (ZeRO stage 3: Rajbhandari et al.,
    "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020; Zhao et al.,
    "PyTorch FSDP", VLDB 2023).

    Each of `units` gathers its parameters for its own forward and backward pass and scatters its
    gradients, averaged over the ranks. Buffers are rank 0's at the beginning of every window of
    accumulated batches. Both are as with DDP.

    The state of model and optimizers that Lightning saves is complete, on rank 0, under the names
    and numbers of an unsharded run. Each rank loads its shard of such a state.

    A mixin in front of the strategy that knows about devices and ranks.

    Args:
        group: of all ranks; None = the default group.
    """

    def __init__(self, group: dist.ProcessGroup | None = None):
        super().__init__()
        self._group = group
        self._used: _Used | None = None
        self._begins = True  # the next batch is the first since the last exchange of gradients
        self._exchanges = True  # the next backward pass exchanges gradients

    def configure_ddp(self) -> None:
        """Shard the model, where Lightning would wrap it in DDP."""
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import fully_shard

        assert self.lightning_module is not None
        model = self.lightning_module.model
        found = units(model)
        self._used = _Used(model, found)  # its hooks come before those that free parameters
        group = self._group or dist.group.WORLD
        assert group is not None
        mesh = DeviceMesh.from_group(group, self.root_device.type)
        for unit in found:
            sharded = fully_shard(unit, mesh=mesh)
            if self.root_device.type == "cpu":
                # gloo's own mean is a sum in some versions (pytorch#162338)
                sharded.set_force_sum_reduction_for_comms(True)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._begins:
            self._share_buffers()
        self._begins = self._exchanges
        return super().training_step(*args, **kwargs)

    def pre_backward(self, closure_loss: Tensor) -> None:
        if self._exchanges:
            assert self._used is not None
            self._used.check(closure_loss, self.global_rank)

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Add up gradients unsharded while batches accumulate."""
        assert self.lightning_module is not None
        model: Any = self.lightning_module.model
        model.set_requires_gradient_sync(False)
        self._exchanges = False
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)
            self._exchanges = True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the complete state on rank 0. Collective."""
        state: dict[str, Any] = super().lightning_module_state_dict()
        return self._gathered(state)

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the complete state on rank 0. Collective."""
        return self._gathered(super().optimizer_state(optimizer))

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"]):
            optimizer.load_state_dict(_sharded(state, optimizer))

    def _gathered(self, state: dict[str, Any]) -> dict[str, Any]:
        from torch.distributed.tensor import DTensor

        def gather(value: Tensor) -> Tensor:
            tensor = whole(value)
            return tensor.cpu() if self.is_global_zero else tensor.new_empty(0)

        gathered: dict[str, Any] = apply_to_collection(state, DTensor, gather)
        return gathered

    def _share_buffers(self) -> None:
        """Copy rank 0's buffers to all ranks, in one broadcast per dtype."""
        assert self.lightning_module is not None
        by_type: dict[torch.dtype, list[Tensor]] = {}
        for buffer in self.lightning_module.buffers():
            by_type.setdefault(buffer.dtype, []).append(buffer.detach())
        for buffers in by_type.values():
            flat = torch.cat([buffer.flatten() for buffer in buffers])
            dist.broadcast(flat, 0, group=self._group)
            for buffer, part in zip(buffers, flat.split([b.numel() for b in buffers])):
                buffer.copy_(part.view_as(buffer))


class Twin:
    """Builds unsharded copies of a model, which run without collectives.

    Args:
        model: before it is sharded; a copy of it without parameters is kept.

    Raises:
        TrainingError: the model cannot be copied.
    """

    def __init__(self, model: nn.Module):
        empty: dict[int, Any] = {
            id(p): nn.Parameter(p.detach().to("meta"), requires_grad=p.requires_grad)
            for p in model.parameters()
        }
        try:
            self._empty = copy.deepcopy(model, empty)
        except Exception as error:
            raise TrainingError(
                f"the model cannot be copied, as comm.shard: full does to evaluate it: {error}",
                where="model.kind",
                remedy="remove from the module what copy.deepcopy refuses, or set comm.shard to "
                "optimizer",
            ) from error

    def unsharded(self, model: nn.Module) -> nn.Module:
        """Return a copy of the sharded model as it is now. Collective."""
        twin = copy.deepcopy(self._empty)
        state = {name: whole(value) for name, value in model.state_dict().items()}
        twin.load_state_dict(state, assign=True)
        for own, there in zip(twin.buffers(), model.buffers()):
            own.copy_(there)  # non-persistent ones, too
        return twin.to(next(model.parameters()).device).train(model.training)


def units(model: nn.Module) -> list[nn.Module]:
    """Return the modules that gather their parameters at once: each layer, and then the model.

    A module of a user's class may read another one's parameters, so such a model is one unit.
    """
    return [*model.layers, model] if isinstance(model, Stack) else [model]


def check_shardable(model: nn.Module, shard: str) -> None:
    """Check that torch can shard the parameters.

    Args:
        shard: the config's ``comm.shard``.

    Raises:
        TrainingError: they are of several types, or one is a scalar.
    """
    scalars = [name for name, p in model.named_parameters() if not p.dim()]
    if scalars and shard == "full":
        raise TrainingError(
            f"comm.shard: full cannot shard a scalar, which {scalars[0]} is",
            where="model.kind",
            remedy="give it one dimension, torch.zeros(1), or set comm.shard to optimizer",
        )
    dtypes = {str(p.dtype): name for name, p in model.named_parameters()}
    if len(dtypes) > 1:
        raise TrainingError(
            f"comm.shard: {shard} needs parameters of one dtype, but there are: "
            + ", ".join(f"{name} ({dtype})" for dtype, name in sorted(dtypes.items())),
            where="model.kind",
            remedy="convert them, or set comm.shard to none",
        )


class _Used:
    """Checks that a loss depends on all parameters, before gradients are exchanged.

    A rank without the gradient of one exchanges less than the other ranks, which would wait, or
    take what arrives for another parameter's.
    """

    def __init__(self, model: nn.Module, found: list[nn.Module]):
        names = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
        self._names = set(names.values())
        self._seen: dict[int, str] = {}  # ids of tensors that forward passes read → names
        taken: set[nn.Module] = set()
        for unit in found:
            modules = [module for module in unit.modules() if module not in taken]
            taken.update(modules)
            own = [
                (module, key, names[id(p)])
                for module in modules
                for key, p in module.named_parameters(recurse=False)
                if p.requires_grad
            ]
            unit.register_forward_hook(self._note(own))

    def _note(self, own: list[tuple[nn.Module, str, str]]) -> Any:
        def note(*_: Any) -> None:
            for module, key, name in own:
                self._seen[id(getattr(module, key))] = name

        return note

    def check(self, loss: Tensor, rank: int) -> None:
        """Check a loss.

        Raises:
            GuardError: it does not depend on all parameters.
        """
        seen, self._seen = self._seen, {}
        missing = sorted(self._names - {seen[i] for i in _leaves(loss) if i in seen})
        if missing:
            raise no_gradient(
                missing,
                rank,
                "use the parameter in every branch of the model, or set comm.shard to none and "
                "comm.find_unused_parameters to true",
            )


def no_gradient(
    names: Sequence[str], rank: int, remedy: str, where: str | None = None
) -> GuardError:
    """Return the error for parameters without a gradient."""
    more = f" and {len(names) - 10} more" if len(names) > 10 else ""
    return GuardError(
        f"no gradient for {', '.join(names[:10])}{more} on rank {rank}, for which the other ranks "
        "would wait",
        where=where,
        remedy=remedy,
        rank=rank,
    )


def _leaves(loss: Tensor) -> Iterator[int]:
    """Yield the ids of the leaf tensors of a loss."""
    pending, known = [loss.grad_fn], {loss.grad_fn}
    while pending:
        node: Any = pending.pop()
        if node is None:
            continue
        if hasattr(node, "variable"):
            yield id(node.variable)
        for inner, _ in node.next_functions:
            if inner not in known:
                known.add(inner)
                pending.append(inner)


def _sharded(state: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return an optimizer's complete state with this rank's shards of its tensors. Collective."""
    from torch.distributed.tensor import distribute_tensor

    numbers = [number for group in state["param_groups"] for number in group["params"]]
    held = [p for group in optimizer.param_groups for p in group["params"]]
    like: dict[int, Any] = dict(zip(numbers, held))

    def share(number: int, value: Any) -> Any:
        p = like[number]
        if not isinstance(value, Tensor) or value.shape != p.shape or not is_sharded(p):
            return value  # such as a count of steps
        return distribute_tensor(value.to(p.device), p.device_mesh, p.placements)

    shares = {
        number: {key: share(number, value) for key, value in values.items()}
        for number, values in state["state"].items()
    }
    return {**state, "state": shares}


def whole(tensor: Tensor) -> Tensor:
    """Return a complete tensor, gathered from all ranks if it is sharded. Collective then."""
    if not is_sharded(tensor):
        return tensor
    full: Tensor = tensor.detach().full_tensor()  # type: ignore[attr-defined]
    return full


def is_sharded(tensor: Tensor) -> bool:
    return hasattr(tensor, "full_tensor")
