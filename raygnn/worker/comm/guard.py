"""Lightning callback that compares the ranks and skips steps without finite gradients."""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import get_total_norm

from raygnn import compat
from raygnn.config.execution import GuardConfig
from raygnn.errors import GuardError
from raygnn.sampling.batch import Share
from raygnn.sampling.exchange import Exchange
from raygnn.worker.comm import fingerprint
from raygnn.worker.comm.fingerprint import compare, ranks_text

log = logging.getLogger("raygnn")

_PENDING = 64  # steps on a GPU whose outcome the host may not know yet

_UNUSED = re.compile(r"did not receive grad for rank \d+: ([\d ]+)")


class Guard(pl.Callback):
    """Makes ranks that differ fail together, with the reason, and skips steps without a finite
    gradient.

    - Before anything is reduced, DDP's own broadcasts included, `check_model` compares parameters,
      buffers, options, arithmetic and software. Call it right before ``trainer.fit``.
    - At the first batch of every start, and at each ``every``-th one from there, it compares
      position, batch, optimizer and parameters before the step, and the autocast that the model
      ran in before the backward pass, which is where gradients are first reduced.
    - If user code takes part in steps, it also compares, at the same batches and at the end, the
      contents of parameters and gradients, and whether a callback has changed the loss.
    - If there are user callbacks, it compares, after them, at both ends of an epoch and the end of
      each batch, whether training stops, the loop's counts, and the modules' mode. The other ranks
      would wait for a rank that stopped alone.
    - After a backward pass that reduces, a rank on which a parameter got no gradient fails at once,
      since the other ranks wait for it in the reduction.
    - A step whose gradient is not finite is skipped, and the running statistics of its forward
      passes are restored. Reduced gradients are equal on all ranks, and so is the decision. With
      fp16-mixed the gradient scaler does this. On a GPU, adam and adamw decide themselves; the host
      learns of it with the next record, or of 64 steps at once.

    ``mode: off`` does the last alone. With ``mode: deep`` the process groups compare, too.

    Its place is after the user's callbacks, and before callbacks that checkpoint. The module has
    ``model``, the network, and may have ``returned``, the result of its ``training_step``.

    Args:
        exchange: control messages, for the training thread alone.
        config: the ``guard`` section.
        own_steps: user code takes part in steps.
        callbacks: names of the user's callbacks.

    Attributes:
        skipped_steps: number of steps of the whole run whose gradient was not finite.
    """

    def __init__(
        self,
        exchange: Exchange,
        config: GuardConfig,
        *,
        own_steps: bool = False,
        callbacks: Iterable[str] = (),
    ):
        self._exchange = exchange
        self._config = config
        self._contents = own_steps and config.mode != "off"
        self._callbacks = ", ".join(callbacks) if config.mode != "off" else ""
        self._checking_step = False
        self._changed = torch.tensor(False)  # the loss was changed since the last comparison
        self._batches = 0  # since the start: equal on all ranks, also if their positions differ
        self._checking = False
        self._place = (0, 0)  # epoch and step of the batch
        self._numerics: fingerprint.FingerprintSection = {}
        self._ddp: DistributedDataParallel | None = None  # if its reductions are watched
        self._names: list[str] = []
        self._losses: list[tuple[int, int, Tensor]] = []  # epoch, step, loss since the last step
        self._in_a_row = self._skipped = 0
        # steps that the GPU decides on: whether it skipped them, losses, place
        self._pending: list[tuple[Tensor, list[tuple[int, int, Tensor]], str]] = []
        self._gradients = _Gradients()
        self._buffers: _Buffers | None = None  # if the module has any
        self._begins = True  # the next batch is the first since the last optimizer step

    @property
    def skipped_steps(self) -> int:
        """See the class. Collective, as `count_skipped`."""
        self.count_skipped()
        return self._skipped

    def check_model(self, module: nn.Module, options: Mapping[str, Any]) -> None:
        """Compare the ranks before the trainer runs. Collective. ``options``: options of the
        strategy and the trainer that must not differ. Raises GuardError if ranks differ."""
        if self._config.mode == "off":
            return
        sections = {
            "software": fingerprint.software(),
            "position": fingerprint.position(self._exchange.world.size, 0),
            "options": fingerprint.options(options),
            "parameters": fingerprint.parameters(module),
            "numerics": fingerprint.numerics(),
        }
        compare(self._exchange, sections, "before training")

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._batches = 0
        self._losses.clear()
        watched = self._config.mode != "off" and isinstance(trainer.model, DistributedDataParallel)
        self._ddp = trainer.model if watched else None
        # as DDP numbers them
        self._names = [name for name, p in module.named_parameters() if p.requires_grad]
        self._buffers = _Buffers.from_module(module)
        self._begins = True

    def on_train_batch_start(
        self, trainer: pl.Trainer, module: pl.LightningModule, batch: Share, batch_idx: int
    ) -> None:
        self._place = (batch.epoch, batch.step)
        self._checking = self._config.mode != "off" and self._batches % self._config.every == 0
        self._batches += 1
        self._checking_step |= self._checking
        if self._checking:
            self._check_batch(trainer, module, batch)
        if self._begins and self._buffers is not None:
            self._buffers.keep()
        self._begins = False

    def _check_loop(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        if self._callbacks:
            where = f"{_where(trainer)}, after train.callbacks ({self._callbacks})"
            compare(self._exchange, {"loop": fingerprint.loop(trainer, module)}, where)

    on_train_epoch_start = on_train_batch_end = on_train_epoch_end = _check_loop

    def on_before_backward(
        self, trainer: pl.Trainer, module: pl.LightningModule, loss: Tensor
    ) -> None:
        self._losses.append((*self._place, loss.detach()))
        returned = getattr(module, "returned", None)
        if self._contents and returned is not None:
            scaler = getattr(trainer.precision_plugin, "scaler", None)
            factor = (scaler.get_scale() if scaler else 1.0) / trainer.accumulate_grad_batches
            same = torch.isclose(loss.detach(), returned * factor, rtol=1e-2, equal_nan=True)
            self._changed = self._changed.to(same.device) | ~same
        if self._checking:
            compare(self._exchange, {"numerics": self._numerics}, _where(trainer))

    def on_after_backward(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        ddp = self._ddp
        if ddp is not None and ddp.require_backward_grad_sync:  # not while batches accumulate
            self._check_reduced(ddp, trainer)

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        losses, self._losses = self._losses, []
        self._begins = True
        if self._checking_step and self._contents:
            named = ((f"gradient {n}", p.grad) for n, p in module.named_parameters())
            compare(self._exchange, {"contents": fingerprint.contents(named)}, _where(trainer))
        self._checking_step = False
        held = (p.grad for group in optimizer.param_groups for p in group["params"])
        gradients = [gradient for gradient in held if gradient is not None]
        if getattr(trainer.precision_plugin, "scaler", None) is not None:
            return
        if _decides_itself(optimizer, gradients, module) and compat.skip_step_where(
            optimizer, bad := not_finite(gradients)
        ):
            if self._buffers is not None:
                self._buffers.put_back(bad)
            self._pending.append((bad, losses, _where(trainer)))
            if len(self._pending) == _PENDING:
                self.count_skipped()
            return
        if self._gradients.are_finite(gradients):
            self._in_a_row = 0
            return
        # without gradients an optimizer changes neither parameters, by weight decay either, nor its
        # own state; Lightning clips after this
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None
        if self._buffers is not None:
            self._buffers.put_back()
        self._count(losses, _where(trainer))

    def count_skipped(self) -> None:
        """Count the steps that a GPU has skipped. Collective: there may be too many in a row."""
        pending, self._pending = self._pending, []
        skipped = torch.stack([bad for bad, _, _ in pending]).tolist() if pending else []
        for bad, (_, losses, where) in zip(skipped, pending):
            if bad:
                self._count(losses, where)
            else:
                self._in_a_row = 0

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.count_skipped()
        if self._contents:
            compare(self._exchange, {"contents": self._parameters(module)}, _where(trainer))

    def _parameters(self, module: nn.Module) -> fingerprint.FingerprintSection:
        changed, self._changed = bool(self._changed), torch.tensor(False)
        named = ((f"contents of {name}", p) for name, p in module.named_parameters())
        return {"loss changed": json.dumps(changed), **fingerprint.contents(named)}

    def state_dict(self) -> dict[str, int]:
        return {"skipped_steps": self.skipped_steps, "in_a_row": self._in_a_row}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._skipped, self._in_a_row = state["skipped_steps"], state["in_a_row"]

    def _check_batch(self, trainer: pl.Trainer, module: Any, batch: Share) -> None:
        world, step = self._exchange.world.size, trainer.global_step
        sections = {
            "position": fingerprint.position(world, step, batch),
            "batch": fingerprint.batch(batch),
            "parameters": fingerprint.parameters(module),
            "optimizers": fingerprint.optimizers(trainer.optimizers, module),
        }
        if self._contents:
            sections["contents"] = self._parameters(module)
        compare(self._exchange, sections, _where(trainer))
        # training_step may enter autocast, too, so its state is read where the model runs. It is
        # compared later, since a rank may not reach this point.
        self._numerics = {}

        def note(*_: Any) -> None:
            self._numerics = fingerprint.numerics()
            handle.remove()

        handle = module.model.register_forward_pre_hook(note)

    def _check_reduced(self, ddp: DistributedDataParallel, trainer: pl.Trainer) -> None:
        try:
            compat.check_reduced(ddp)
        except RuntimeError as error:
            found = _UNUSED.search(str(error))
            if found is None:
                raise
            names = [self._names[int(number)] for number in found[1].split()]
            more = f" and {len(names) - 10} more" if len(names) > 10 else ""
            rank = self._exchange.world.rank
            raise GuardError(
                f"no gradient for {', '.join(names[:10])}{more} on rank {rank}, for which the "
                "other ranks would wait",
                where=_where(trainer),
                remedy="set comm.find_unused_parameters: true, or use the parameter in every "
                "branch of the model",
                rank=rank,
            ) from None

    def _count(self, losses: list[tuple[int, int, Tensor]], where: str) -> None:
        self._skipped += 1
        self._in_a_row += 1
        if self._in_a_row == 1:
            log.warning("%s skipped: its gradient is not finite", where)
        if self._in_a_row > self._config.nan_steps:
            raise self._not_finite(losses, where)

    def _not_finite(self, losses: list[tuple[int, int, Tensor]], where: str) -> GuardError:
        """Return the error about steps in a row, with the ranks whose loss was bad. Collective."""
        bad = [(e, s) for e, s, loss in losses if not math.isfinite(loss)]
        own = torch.tensor([[bool(bad), *(bad[0] if bad else losses[-1][:2])]])
        gathered = self._exchange.gather_rows(own).tolist()
        ranks = [rank for rank, (is_bad, _, _) in enumerate(gathered) if is_bad]
        _, epoch, step = gathered[ranks[0] if ranks else self._exchange.world.rank]
        cause = "every rank's loss was finite, so it is the backward pass that overflows"
        if ranks:
            cause = f"the loss was not finite on {ranks_text(ranks)}"
        limit = self._config.nan_steps
        return GuardError(
            f"the gradient was not finite in {self._in_a_row} steps in a row (guard.nan_steps: "
            f"{limit}): {cause}, in epoch {epoch}, batch {step}",
            where=where,
            remedy="lower train.lr, set train.clip, use a precision with a wider range (fp32, "
            "bf16-mixed), or look for values in the data that are not finite",
            rank=ranks[0] if ranks else None,
        )


class _Buffers:
    """Copies of a module's buffers at the beginning of a window of batches.

    The forward pass updates running statistics (batch normalization) before it is known whether the
    step is skipped, and values that are not finite would stay in them. Each rank keeps its own: DDP
    copies rank 0's in the next window's first forward pass.
    """

    def __init__(self, buffers: list[Tensor]):
        self._pairs = [(own, torch.empty_like(own)) for own in buffers]

    @classmethod
    def from_module(cls, module: nn.Module) -> _Buffers | None:
        """Copy floating-point buffers and their counts; return None if there are none."""
        moving = [
            buffer.detach()
            for name, buffer in module.named_buffers()
            if (buffer.is_floating_point() or name.endswith("num_batches_tracked"))
            and buffer.layout is torch.strided
        ]
        return cls(moving) if moving else None

    def keep(self) -> None:
        for own, copy in self._pairs:
            copy.copy_(own)

    def put_back(self, bad: Tensor | None = None) -> None:
        """Restore the buffers; with ``bad``, a tensor of 0 or 1, only if that is 1."""
        for own, copy in self._pairs:
            own.copy_(copy if bad is None else torch.where(bad > 0, copy, own))


def _where(trainer: pl.Trainer) -> str:
    return f"step {trainer.global_step}"


def _decides_itself(
    optimizer: torch.optim.Optimizer, gradients: list[Tensor], module: pl.LightningModule
) -> bool:
    """Return whether the optimizer's kernel can skip a step itself: adam's on a GPU, if all ranks
    have all gradients, and no embedding tables are trained."""
    return (
        type(optimizer) in (torch.optim.Adam, torch.optim.AdamW)
        and all(group["fused"] for group in optimizer.param_groups)
        and len({gradient.device for gradient in gradients}) == 1
        and _on_gpu(gradients[0])  # which tests replace
        and getattr(module, "embeddings", None) is None
    )


def _on_gpu(tensor: Tensor) -> bool:
    return tensor.is_cuda


class _Gradients:
    """Checks exactly, for the price of one sum, whether all elements of gradients are finite.

    A sum, or norm, is not finite if an element is not. The reverse may fail by overflow, which
    might depend on the processor, so then the elements are checked.

    On a CPU most parameters have so few elements that a call of torch costs more than their sum. So
    gradients that fill one storage, as in DDP's buckets, are summed as one tensor, which is cached
    while their addresses stay the same.
    """

    def __init__(self) -> None:
        self._places: list[int] = []
        self._merged: list[Tensor] = []  # keeps the storage, so that no other one gets its address

    def are_finite(self, gradients: list[Tensor]) -> bool:
        if not gradients:
            return True
        if math.isfinite(self._total(gradients)):
            return True
        values = (g.coalesce().values() if g.is_sparse else g for g in gradients)
        return all(bool(value.isfinite().all()) for value in values)

    def _total(self, gradients: list[Tensor]) -> float:
        if any(g.is_sparse for g in gradients):
            return sum(g.sum().item() for g in gradients)
        if gradients[0].is_cuda:  # one kernel for many
            return float(get_total_norm(gradients))
        places = [g.data_ptr() for g in gradients]
        if places != self._places:
            self._places, self._merged = places, _merge(gradients)
        return sum(g.sum().item() for g in self._merged)


def not_finite(gradients: list[Tensor]) -> Tensor:
    """Return 1 if an element of any gradient is not finite, else 0: float32 ``[]`` on their device,
    without waiting for it."""
    # not by the kernel of torch's gradient scaler, which has no bf16 (pytorch#127176)
    return (~get_total_norm(gradients).isfinite()).float()


def _merge(gradients: list[Tensor]) -> list[Tensor]:
    """Return one tensor for all gradients that fill a storage together."""
    by_storage: dict[int, list[Tensor]] = {}
    for gradient in gradients:
        by_storage.setdefault(gradient.untyped_storage().data_ptr(), []).append(gradient)
    merged: list[Tensor] = []
    for group in by_storage.values():
        first, size = group[0], sum(g.numel() for g in group)
        fills = size * first.element_size() == first.untyped_storage().nbytes()
        merged += [first.as_strided((size,), (1,), 0)] if fills else group
    return merged
