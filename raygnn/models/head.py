"""A tensor and its first rows, for one gradient instead of two."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def with_head(x: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """``x [S, F]`` and ``x[:rows]``.

    For what only the convolutions read, whose gradients are tensors of their own: backward, the
    one of ``x`` is written to. It must not be passed on as it is (by ``x + y``, say).

    As slicing does it, but backward the head's gradient is added to the rest's: a slice's own
    gradient is a new tensor of zeros as large as ``x``, which on a CPU costs more than the sum.
    """
    if not (x.requires_grad and torch.is_grad_enabled()):
        return x, x[:rows]
    whole, head = _WithHead.apply(x, rows)
    return whole, head


class _WithHead(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.shape = x.shape
        return x.view_as(x), x[:rows]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, whole: Tensor | None, head: Tensor | None) -> tuple[Tensor | None, None]:
        if head is None:
            return whole, None
        if whole is None:
            whole = head.new_zeros(ctx.shape)
        elif whole._base is not None or not whole.is_contiguous():
            whole = whole.clone()
        # made by the convolutions' backward for this one use, so it may be written to
        whole[: len(head)] += head
        return whole, None
