"""From numbers as they are stored or given to numbers as they are computed with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

Ids: TypeAlias = np.ndarray | Tensor


def to_compute(rows: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Floating-point tensors as ``dtype``; whole numbers, masks and ids as they are."""
    return [each.to(dtype) if each.is_floating_point() else each for each in rows]


def as_ids(ids: Ids) -> np.ndarray:
    """Ids as look-ups take them, int64 ``[n]`` in the memory of the CPU.

    A tensor may lie on any device: it comes by one explicit transfer. Without it a look-up by ids
    on a GPU would fail, or be a copy that nobody sees.
    """
    if isinstance(ids, Tensor):
        ids = ids.detach().to("cpu").numpy()
    return np.ascontiguousarray(ids, np.int64)
