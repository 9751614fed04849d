"""A linear transform, in the arithmetic that the processor has."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

# rows of a bf16 product are a multiple of this: see `_EvenLinear`
_EVEN = 512


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear`: ``x [N, F_in]``, ``weight [F_out, F_in]`` → ``[N, F_out]``.

    On an x86 processor without bf16 instructions torch's bf16 products take more than twice as
    long as the same in fp32, converting included; there bf16 is multiplied in fp32. For those
    that have them see `_EvenLinear`.
    """
    if x.device.type != "cpu" or x.dim() != 2 or not _multiplies_bf16(x, weight):
        return F.linear(x, weight, bias)
    if _emulated():
        with torch.autocast("cpu", enabled=False):
            wide = None if bias is None else bias.float()
            return F.linear(x.float(), weight.float(), wide).to(torch.bfloat16)
    out: Tensor = _EvenLinear.apply(x, weight, bias)
    return out


def _multiplies_bf16(x: Tensor, weight: Tensor) -> bool:
    if torch.is_autocast_enabled("cpu"):
        wide = torch.float64 in (x.dtype, weight.dtype)
        return torch.get_autocast_dtype("cpu") == torch.bfloat16 and not wide
    return x.dtype == weight.dtype == torch.bfloat16


class _EvenLinear(torch.autograd.Function):
    """In bf16, but for the last rows, of which there are fewer than ``_EVEN``, in fp32.

    oneDNN compiles a kernel for each shape that it meets and keeps a thousand of them. Batches
    of a sampled graph all differ in their numbers of rows: each would pay for compiling more than
    for multiplying, and what is kept lies between the large tensors on the heap, which then
    grows and is paged in anew in each step. MKL's fp32 products do not depend on shapes.
    """

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.bfloat16)
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        out = x.new_empty((len(x), len(weight)))
        even, wide = _even(x), None if bias is None else bias.float()
        if even and bias is not None:
            torch.addmm(bias, x[:even], weight.t(), out=out[:even])
        elif even:
            torch.mm(x[:even], weight.t(), out=out[:even])
        out[even:] = F.linear(x[even:].float(), weight.float(), wide)
        return out

    @staticmethod
    @once_differentiable
    @torch.amp.custom_bwd(device_type="cpu")  # forward and backward alike without autocast
    def backward(  # type: ignore[override]
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        even = _even(x)
        d_x = d_weight = d_bias = None
        if ctx.needs_input_grad[0]:
            d_x = torch.empty_like(x)
            if even:
                torch.mm(grad[:even], weight, out=d_x[:even])
            d_x[even:] = grad[even:].float() @ weight.float()
        if ctx.needs_input_grad[1]:
            rest = grad[even:].float().t() @ x[even:].float()
            if even:
                rest += grad[:even].t() @ x[:even]
            d_weight = rest.to(weight.dtype)
        if ctx.has_bias and ctx.needs_input_grad[2]:
            d_bias = grad.sum(0)
        return d_x, d_weight, d_bias


def _even(x: Tensor) -> int:
    return len(x) // _EVEN * _EVEN


@cache
def _emulated() -> bool:
    """Whether this CPU is known to have no bf16 arithmetic; older torch versions can not tell."""
    if not hasattr(torch.cpu, "get_capabilities"):
        return False
    has = torch.cpu.get_capabilities()
    return has["architecture"] == "x86_64" and not (has["avx512_bf16"] or has["amx_bf16"])
