"""What each ``precision`` means: the one place that decides about dtypes.

Features are converted when they are put into the store, alike on every rank; labels, ids and
masks never are; losses and metrics are computed in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True)
class Precision:
    """
    Attributes:
        dtype: of parameters and features.
        autocast: what Lightning is told; a module in bf16 needs nothing from it.
    """

    dtype: torch.dtype
    autocast: Literal["32-true", "bf16-mixed", "16-mixed"]


PRECISIONS: dict[str, Precision] = {
    "fp32": Precision(torch.float32, "32-true"),
    "bf16": Precision(torch.bfloat16, "32-true"),
    "bf16-mixed": Precision(torch.float32, "bf16-mixed"),
    "fp16-mixed": Precision(torch.float32, "16-mixed"),
}
