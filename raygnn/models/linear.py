"""A linear transform, in the arithmetic that the processor has."""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear`: ``x [N, F_in]``, ``weight [F_out, F_in]`` → ``[N, F_out]``.

    On an x86 processor without bf16 instructions torch's bf16 products take more than twice as
    long as the same in fp32, converting included; there bf16 is multiplied in fp32.
    """
    if x.dtype == weight.dtype == torch.bfloat16 and x.device.type == "cpu" and _emulated():
        wide = None if bias is None else bias.float()
        return F.linear(x.float(), weight.float(), wide).to(torch.bfloat16)
    return F.linear(x, weight, bias)


@cache
def _emulated() -> bool:
    """Whether this CPU is known to have no bf16 arithmetic; older torch versions can not tell."""
    if not hasattr(torch.cpu, "get_capabilities"):
        return False
    has = torch.cpu.get_capabilities()
    return has["architecture"] == "x86_64" and not (has["avx512_bf16"] or has["amx_bf16"])
