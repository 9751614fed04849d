"""Tensors of which each rank may hold a shard."""

from __future__ import annotations

from torch import Tensor


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, gathered from all ranks if it is sharded. Collective then."""
    if not is_sharded(tensor):
        return tensor
    full: Tensor = tensor.detach().full_tensor()  # type: ignore[attr-defined]
    return full


def is_sharded(tensor: Tensor) -> bool:
    return hasattr(tensor, "full_tensor")
