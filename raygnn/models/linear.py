"""Linear transforms that suit the processor's arithmetic, and a fast dropout."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from raygnn.compat import linear_of_mkldnn
from raygnn.models import compiled

# numbers of rows in oneDNN's products are multiples of _EVEN, or powers of 2 of at least _LEAST
_EVEN, _LEAST = 512, 16
_NARROW = 16  # columns
_MANY = 128  # rows from which oneDNN's fp32 products are faster
_SUMMED = 512  # rows per step of a weight's gradient, transposed within the cache
_FEW = 2  # threads up to which compiled single-threaded passes are faster than torch's


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute `torch.nn.functional.linear`: ``[N, F_in]``, ``[F_out, F_in]`` → ``[N, F_out]``."""
    return affine([x], [weight], bias)


def transform(module: Any, x: Tensor) -> Tensor:
    """Apply a `torch.nn.Linear` by `linear`."""
    return affine([x], [module.weight], module.bias)


def affine(
    rows: Sequence[Tensor],
    weights: Sequence[Tensor],
    bias: Tensor | None = None,
    *,
    relu: bool = False,
) -> Tensor:
    """Compute the sum of linear transforms by one product, without copies of adjacent inputs.

    On x86 processors without bf16 instructions torch's bf16 products take more than twice as long
    as fp32 products including conversion; there bf16 is multiplied in fp32. For processors with
    them see `_Even`, for fp32 on few threads `_Joint`.

    Args:
        rows: ``[N, F_i]`` each; weights: ``[F_out, F_i]`` each; bias: ``[F_out]``.
        relu: apply ReLU.

    Returns:
        ``[N, F_out]``.
    """
    weight = join(weights)
    narrow = _multiplies_bf16(*rows, weight)
    here = all(x.device.type == "cpu" and x.dim() == 2 for x in rows)
    if here and not torch.compiler.is_compiling():
        if narrow and not _emulated():
            return _Even.apply(relu, weight, bias, *rows)
        passes = len(rows) > 1 or bias is not None or relu  # besides the product
        # for few columns torch's own gradient of the weight takes up to 15 times as long
        faster = passes or weight.shape[1] < _NARROW or _mkl_is_slow()
        if faster and torch.get_num_threads() <= _FEW and _is_plain_fp32(*rows, weight, bias):
            return _Joint.apply(relu, weight, bias, *rows)
    if here and narrow:
        with torch.autocast("cpu", enabled=False):
            wide = None if bias is None else bias.float()
            out = F.linear(join(rows).float(), weight.float(), wide).to(torch.bfloat16)
    else:
        out = F.linear(join(rows), weight, bias)
    return F.relu(out, inplace=True) if relu else out


def join(columns: Sequence[Tensor]) -> Tensor:
    """Join ``[N, F_i]`` side by side; a view if they are adjacent and need no gradient."""
    first = columns[0]
    if len(columns) == 1:
        return first
    if first.device.type == "cpu" and not torch.compiler.is_compiling() and _are_beside(columns):
        return first.as_strided((len(first), sum(c.shape[1] for c in columns)), first.stride())
    return torch.cat(list(columns), dim=1)


def _are_beside(columns: Sequence[Tensor]) -> bool:
    """Return True if each begins where the previous one ends, row by row."""
    first = columns[0]
    if any(c.requires_grad or c.dim() != 2 or c.stride(1) != 1 for c in columns):
        return False
    at, memory = first.storage_offset(), first.untyped_storage().data_ptr()
    for c in columns:
        if c.untyped_storage().data_ptr() != memory or c.storage_offset() != at:
            return False
        if c.dtype != first.dtype or c.stride(0) != first.stride(0) or len(c) != len(first):
            return False
        at += c.shape[1]
    return at - first.storage_offset() <= first.stride(0)


def _multiplies_bf16(*tensors: Tensor) -> bool:
    dtypes = {tensor.dtype for tensor in tensors}
    if torch.is_autocast_enabled("cpu"):
        return torch.get_autocast_dtype("cpu") == torch.bfloat16 and torch.float64 not in dtypes
    return dtypes == {torch.bfloat16}


def _is_plain_fp32(*tensors: Tensor | None) -> bool:
    dtypes = {tensor.dtype for tensor in tensors if tensor is not None}
    return dtypes == {torch.float32} and not torch.is_autocast_enabled("cpu")


class _Joint(torch.autograd.Function):
    """`affine` in fp32 on few threads with the fewest passes: on one thread torch's separate passes
    for bias, ReLU and their gradients take half as long as the products."""

    @staticmethod
    def forward(ctx: Any, relu: bool, weight: Tensor, bias: Tensor | None, *rows: Tensor) -> Tensor:
        x = join(rows)
        out = _product(x, weight)
        if relu or bias is not None:
            added = np.zeros(len(weight), np.float32) if bias is None else bias.detach().numpy()
            compiled.finish(out.numpy(), added, relu)
        ctx.save_for_backward(weight, out if relu else None, x)
        ctx.has_bias = bias is not None
        ctx.widths = [each.shape[1] for each in rows]
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, out, x = ctx.saved_tensors
        _, for_weight, for_bias, *for_rows = ctx.needs_input_grad
        if out is None:
            d_bias = grad.sum(0) if ctx.has_bias and for_bias else None
        else:
            given = grad.contiguous()
            grad = out.new_empty((_even_rows(len(out)), out.shape[1]))[: len(out)]
            total = compiled.passed(_bits(given), _bits(out), _bits(grad))
            d_bias = torch.from_numpy(total).float() if ctx.has_bias else None
        d_weight = None
        if for_weight:
            # MKL takes down to half the time if the longer side of the result comes last
            tall = weight.shape[0] > weight.shape[1]
            d_weight = _crossed(x, grad).t().contiguous() if tall else _crossed(grad, x)
        d_x = _product(grad, weight.t()) if any(for_rows) else None
        return (None, d_weight, d_bias, *_columns(d_x, ctx.widths, for_rows))


@cache
def _mkl_is_slow() -> bool:
    """Return True if MKL does not use AVX-512, as on AMD processors: on Zen 5 it reaches 117
    GFLOP/s in fp32, oneDNN 265 (Zen 4 was not measured). Decided by the processor's name, not by
    measuring, because the choice changes the last bits."""
    if _has_bf16() is None or not torch.backends.mkldnn.is_available():
        return False
    has = torch.cpu.get_capabilities()
    return bool(has.get("avx512_f")) and "AMD" in str(has.get("cpu_name"))


def _product(x: Tensor, weight: Tensor) -> Tensor:
    """Return ``x @ weight.t()``, fp32."""
    fits = len(weight) and 0 < x.shape[1] == weight.shape[1]
    if not (_mkl_is_slow() and len(x) >= _MANY and fits):
        return x @ weight.t()
    out: Tensor = linear_of_mkldnn(_with_room(x), weight, None)
    return out.resize_(len(x), len(weight))


def _crossed(narrow: Tensor, wide: Tensor) -> Tensor:
    """Return ``narrow.t() @ wide``, fp32, of many rows."""
    if not (_mkl_is_slow() and narrow.shape[1] and wide.shape[1]):
        return narrow.t() @ wide
    whole = len(narrow) // _SUMMED * _SUMMED
    total = narrow[whole:].t() @ wide[whole:]
    for start in range(0, whole, _SUMMED):
        some = slice(start, start + _SUMMED)
        total += linear_of_mkldnn(narrow[some].t().contiguous(), wide[some].t(), None)
    return total


def _with_room(x: Tensor) -> Tensor:
    """Extend ``x`` to `_even_rows` by arbitrary rows, if possible by the memory behind it."""
    num, (step, each) = _even_rows(len(x)), x.stride()
    if num == len(x):
        return x
    end = x.storage_offset() + (num - 1) * step + x.shape[1]
    if each == 1 and end * x.element_size() <= x.untyped_storage().nbytes():
        return x.as_strided((num, x.shape[1]), x.stride())
    out = x.new_empty((num, x.shape[1]))
    out[: len(x)] = x
    return out


def _even_rows(num: int) -> int:
    """Round ``num`` rows up to one of few numbers: see `_Even`."""
    return -(-num // _EVEN) * _EVEN if num > _EVEN else max(_LEAST, 1 << (num - 1).bit_length())


def _columns(x: Tensor | None, widths: list[int], wanted: list[bool]) -> list[Tensor | None]:
    columns = wanted if x is None else x.split(widths, 1)
    return [each if some else None for each, some in zip(columns, wanted)]


class _Even(torch.autograd.Function):
    """`affine` in bf16, padded with rows of zeros to one of few numbers of rows.

    oneDNN compiles a kernel for each shape and caches a thousand. Sampled batches all differ in
    their numbers of rows: compiling would cost more than multiplying, and the cached kernels
    fragment the heap, which then grows and is paged in again in each step.
    """

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.bfloat16)
    def forward(ctx: Any, relu: bool, weight: Tensor, bias: Tensor | None, *rows: Tensor) -> Tensor:
        num = len(rows[0])
        x = _padded(rows)
        out = _in_bf16(x, weight, bias, relu)
        out.resize_(num, len(weight))
        ctx.save_for_backward(weight, out if relu else None, x)
        ctx.has_bias = bias is not None
        ctx.widths = [each.shape[1] for each in rows]
        return out

    @staticmethod
    @once_differentiable
    @torch.amp.custom_bwd(device_type="cpu")  # without autocast, as forward
    def backward(  # type: ignore[override]
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor | None, ...]:
        weight, out, x = ctx.saved_tensors
        _, for_weight, for_bias, *for_rows = ctx.needs_input_grad
        num, total = len(grad), None
        if out is None:
            g = _padded([grad])
        else:
            g = grad.new_empty((len(x), len(weight)))
            total = compiled.passed(_bits(grad.contiguous()), _bits(out), _bits(g[:num]))
            g[num:] = 0
        d_bias = None
        if ctx.has_bias and for_bias:
            summed = g.sum(0) if total is None else torch.from_numpy(total)
            d_bias = summed.to(weight.dtype)
        d_x = (g @ weight).resize_(num, weight.shape[1]) if any(for_rows) else None
        d_weight = g.t() @ x if for_weight else None
        return (None, d_weight, d_bias, *_columns(d_x, ctx.widths, for_rows))


def _padded(rows: Sequence[Tensor]) -> Tensor:
    num = len(rows[0])
    even = _even_rows(num)
    if len(rows) == 1 and even == num:
        return rows[0]
    out = rows[0].new_empty((even, sum(x.shape[1] for x in rows)))
    torch.cat(list(rows), 1, out=out[:num])
    out[num:] = 0
    return out


def _bits(x: Tensor) -> np.ndarray:
    return x.view(torch.uint16 if x.dtype == torch.bfloat16 else torch.uint32).numpy()


def _in_bf16(x: Tensor, weight: Tensor, bias: Tensor | None, relu: bool) -> Tensor:
    out: Tensor = (linear_of_mkldnn if _fuses() else F.linear)(x, weight, bias)
    return out.relu_() if relu else out  # oneDNN's own would turn NaN into 0 and hide it


@cache
def _fuses() -> bool:
    """Return True if oneDNN multiplies bf16 here; tried, since ``ONEDNN_MAX_CPU_ISA`` may disable
    the processor's instructions."""
    if not _has_bf16():
        return False
    few = torch.zeros(_LEAST, 1, dtype=torch.bfloat16)
    try:
        linear_of_mkldnn(few, few, None)
    except RuntimeError:
        return False
    return True


@cache
def _emulated() -> bool:
    """Return True if this CPU is known to lack bf16 arithmetic."""
    return _has_bf16() is False


@cache
def _has_bf16() -> bool | None:
    """Return True if an x86 processor has bf16 arithmetic; None if unknown, as in older torch."""
    if not hasattr(torch.cpu, "get_capabilities"):
        return None
    has = torch.cpu.get_capabilities()
    if has["architecture"] != "x86_64":
        return None
    return bool(has["avx512_bf16"] or has["amx_bf16"])


_RANGE = 1 << 16


class Dropout(nn.Module):
    """`torch.nn.Dropout`, about three times as fast on a CPU: 64 random bits of torch's generator
    serve four elements, so that ``p`` is rounded to a multiple of 1/65536. Results are the same for
    any number of threads."""

    def __init__(self, p: float):
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        if x.device.type != "cpu":
            return F.dropout(x, self.p)
        dropped = min(round(self.p * _RANGE), _RANGE - 1)
        words = torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(-(2**63), None)
        lanes = words.view(torch.int16)[: x.numel()].view(x.shape)
        keep = (lanes >= dropped - _RANGE // 2).to(x.dtype)
        return x * keep.mul_(_RANGE / (_RANGE - dropped))
