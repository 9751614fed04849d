"""From numbers as they are stored to numbers as they are computed with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def to_compute(rows: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Floating-point tensors as ``dtype``; whole numbers, masks and ids as they are."""
    return [each.to(dtype) if each.is_floating_point() else each for each in rows]
