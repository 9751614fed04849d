"""Normalisation and activation, by their names in the config."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from raygnn.models.message_passing import widened

# sums values over the ranks, in place; arguments: values, and the pass, "forward" or "backward"
Sum = Callable[[Tensor, str], Tensor]


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """Return an in-place activation; no layer before it needs its output in the backward pass."""
    if name == "none":
        return lambda x: x
    return partial(F.relu if name == "relu" else F.elu, inplace=True)


def norm(kind: str, width: int) -> nn.Module:
    """Build the config's ``model.norm`` for rows ``[N, width]``."""
    if kind == "layer":
        return nn.LayerNorm(width)
    if kind == "batch":
        return BatchNorm(width)
    return nn.Identity()


def normalise(module: nn.Module, x: Tensor, counted: Tensor | None) -> Tensor:
    """Apply a module from `norm` to rows ``[N, width]``; ``counted``: see `BatchNorm.forward`."""
    return module(x, counted) if isinstance(module, BatchNorm) else module(x)


def drop_biases(module: nn.Module, names: Iterable[str]) -> None:
    """Remove biases that add the same row to all nodes of a type, which batch normalisation then
    subtracts. The gradient of such a bias is rounding error, which Adam turns into full-size steps;
    running means lag behind, so that evaluation would depend on rounding."""
    for name in dict.fromkeys(names):
        path, _, last = name.rpartition(".")
        owner = module.get_submodule(path)
        if isinstance(owner, nn.ParameterDict):
            del owner[last]
        else:
            setattr(owner, last, None)


@contextmanager
def repeated() -> Iterator[None]:
    """Mark a recomputation, whose rows running statistics already include."""
    before, _repeats.now = _repeats.now, True
    try:
        yield
    finally:
        _repeats.now = before


class _Repeats(threading.local):  # a backward pass may run in a thread of torch's own
    now = False


_repeats = _Repeats()


class BatchNorm(nn.BatchNorm1d):
    """Batch normalisation over the rows of all ranks, each node of the global batch once.

    With one rank, and in evaluation, it is torch's own. A single row, which a last batch may have,
    is normalised by running statistics.
    """

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor
    momentum: float

    def __init__(self, width: int):
        super().__init__(width)
        self.join(0, 1, lambda values, part: values)
        self._moments = torch.empty(0)  # of the last batch, for `repeated`

    def join(self, rank: int, size: int, over_ranks: Sum) -> None:
        """Normalise over the rows of ``size`` ranks; ``over_ranks`` is collective, and called by
        the training thread only."""
        self._rank, self._size, self._sum = rank, size, over_ranks

    def forward(self, x: Tensor, counted: Tensor | None = None) -> Tensor:
        """Normalise rows ``[N, F]``. Collective in training. ``counted``: rows of this rank that
        statistics include, bool ``[N]``; None = all."""
        if not self.training:
            return super().forward(x)
        if counted is None and self._size == 1:
            several = len(x) > 1
            if several and not _repeats.now:
                return super().forward(x)
            mean, var = self.running_mean.clone(), self.running_var.clone()
            return F.batch_norm(x, mean, var, self.weight, self.bias, several, 0.0, self.eps)
        if not _repeats.now:
            self._moments = self._over_ranks(x.detach(), counted)
        count = float(self._moments[0])
        mean, deviations = self._moments[1:].chunk(2)
        if count <= 1:
            mean, var = self.running_mean, self.running_var
            return F.batch_norm(x, mean, var, self.weight, self.bias, False, 0.0, self.eps)
        var = deviations / count
        if not _repeats.now:
            self._track(count, mean, var)
        given = (mean, var, count, counted, self._sum, self.eps)
        return _Normalised.apply(x, self.weight, self.bias, *given)

    def _over_ranks(self, x: Tensor, counted: Tensor | None) -> Tensor:
        """Return the moments of all ranks' counted rows, bitwise identical on each. Collective."""
        own = moments(x if counted is None else x[counted])
        parts = own.new_zeros(self._size, len(own))
        parts[self._rank] = own
        return merged(self._sum(parts, "forward"))

    @torch.no_grad()
    def _track(self, count: float, mean: Tensor, var: Tensor) -> None:
        unbiased = var * (count / (count - 1))
        for running, value in ((self.running_mean, mean), (self.running_var, unbiased)):
            running.copy_(running.double().lerp_(value, self.momentum))
        self.num_batches_tracked.add_(1)


def moments(x: Tensor) -> Tensor:
    """Return count, mean and sum of squared deviations of the columns of ``x [N, F]``: float64
    ``[1 + 2 F]``, all 0 without rows."""
    num, width = x.shape
    found = x.new_zeros(1 + 2 * width, dtype=torch.float64)
    if num:
        wide = widened(x)
        mean = wide.mean(0)
        found[0], found[1 : 1 + width] = num, mean
        found[1 + width :] = (wide - mean).square_().sum(0)
    return found


def merged(parts: Tensor) -> Tensor:
    """Merge the moments of W groups, ``[W, 1 + 2 F]`` (Chan, Golub & LeVeque, "Updating formulae
    and a pairwise algorithm for computing sample variances", 1979)."""
    counts, (means, deviations) = parts[:, :1], parts[:, 1:].chunk(2, dim=1)
    count = counts.sum(0)
    mean = (counts * means).sum(0) / count.clamp(min=1)
    return torch.cat([count, mean, (deviations + counts * (means - mean).square()).sum(0)])


class _Normalised(torch.autograd.Function):
    """Batch normalisation by statistics over all ranks.

    In the backward pass a counted row's gradient also goes through mean and variance, to which all
    ranks contribute (Ioffe & Szegedy, "Batch normalization", 2015, with sums over ranks). Weight
    and bias receive this rank's sums, which data-parallel training averages. ``given``: mean and
    variance over all ranks' rows, and the number of these rows; the rest as in `BatchNorm`.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, *given: Any) -> Tensor:
        mean, var, count, counted, over_ranks, eps = given
        wide = widened(x)
        mean, var = mean.to(wide.dtype), var.to(wide.dtype)
        ctx.save_for_backward(x, weight, mean, var, counted)
        ctx.count, ctx.sum, ctx.eps, ctx.dtype = count, over_ranks, eps, weight.dtype
        affine = weight.to(wide.dtype), bias.to(wide.dtype)
        return F.batch_norm(wide, mean, var, *affine, False, 0.0, eps).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, var, counted = ctx.saved_tensors
        grad, weight = grad.to(mean.dtype), weight.to(mean.dtype)
        centred, scale = widened(x) - mean, (var + ctx.eps).rsqrt()
        d_weight, d_bias = (grad * centred).sum(0) * scale, grad.sum(0)
        sums = ctx.sum(torch.stack([d_bias, d_weight]).double(), "backward").to(grad.dtype)
        through_mean, through_var = sums * (weight * scale / ctx.count)
        lost = torch.addcmul(through_mean, centred, through_var * scale)
        if counted is not None:
            lost *= counted.unsqueeze(1)
        d_x = (grad * (weight * scale)).sub_(lost)
        kind = ctx.dtype
        return (d_x.to(x.dtype), d_weight.to(kind), d_bias.to(kind), *[None] * 6)
