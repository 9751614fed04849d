"""A loss of your own, for noisy labels.

Generalised cross entropy (Zhang & Sabuncu 2018, "Generalized cross entropy loss for training deep
neural networks with noisy labels"): between cross entropy (q → 0), which never gives up on a label
that the features contradict, and the mean absolute error (q = 1), which learns slowly.
"""

from __future__ import annotations

import torch
from torch import Tensor

Q = 0.7


def generalized_cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """The loss of each seed, ``[B]``: their mean over all workers is taken of it.

    Args:
        outputs: of the model, float32 ``[B, classes]``.
        targets: classes, int64 ``[B]``; with ``task.labels: multi`` 0, 1 and -1 (not known),
            ``[B, labels]``; of a regression float32 ``[B, numbers]``.
    """
    logs = outputs.log_softmax(1).gather(1, targets.unsqueeze(1)).squeeze(1)
    return -torch.expm1(Q * logs) / Q  # (1 - p^q) / q
