"""Which implementation of the graph operations runs: plain torch, DGL's kernels, or scatters."""

from __future__ import annotations

from functools import cache
from typing import Literal, cast

import torch

from raygnn.errors import CapabilityError, ConfigError
from raygnn.models.kernels import dgl_ops, native, scatter
from raygnn.models.kernels.api import Kernels, Reduce
from raygnn.sampling.batch import dgl, require

__all__ = ["Choice", "Kernels", "Reduce", "select"]

Choice = Literal["auto", "torch", "dgl", "scatter"]


def select(choice: Choice, x: torch.Tensor, reduce: Reduce = "sum") -> Kernels:
    """The kernels for ``x``.

    "auto" is what was faster on one thread, forward and backward together, blocks as they come
    from a sampler (each used once, so that DGL builds its formats anew). In torch sums and means
    take 0.5 to 0.9 of DGL's time, weighted sums and attention 0.03 to 0.55, maxima 1.8 to 2.5.
    On a GPU, where the two were not compared, it is torch.

    Args:
        choice: the config's ``model.kernels``, or "scatter" for what is exported.
        reduce: "max" where maxima will be asked for.

    Raises:
        ConfigError: "dgl" for a device or dtype that this DGL has no kernels for.
    """
    if choice == "scatter":
        return cast("Kernels", scatter)
    reason = None
    if choice == "dgl" or (choice == "auto" and reduce == "max" and x.device.type == "cpu"):
        reason = _missing(x.device.type, x.dtype)
        if reason is None:
            return cast("Kernels", dgl_ops)
    if choice == "dgl":
        raise ConfigError(
            f"DGL's kernels can not run here: {reason}",
            where="model.kernels",
            remedy="use auto or torch",
        )
    return cast("Kernels", native)


@cache
def _missing(device: str, dtype: torch.dtype) -> str | None:
    """Why DGL can not work on such tensors; None where it can."""
    if device not in ("cpu", "cuda"):
        return f"it knows no device of type {device}"
    if device == "cpu" and dtype == torch.float16:
        return "it has no float16 on a CPU"
    try:
        dgl()
        if device == "cuda":
            require("cuda")
    except CapabilityError as error:
        return error.what
    return None
