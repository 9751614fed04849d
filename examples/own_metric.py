"""A metric of your own: what acting on the predictions would bring.

Whoever is taken for class 1 is looked at, which costs something, and is worth it where it is right.
"""

from __future__ import annotations

from torch import Tensor

COST, GAIN = 1.0, 8.0  # of a look, and of one that finds something


def net_gain(outputs: Tensor, targets: Tensor) -> float:
    """The gain of each look at the best threshold, for each seed; the highest is the best.

    It is given all seeds of the split, of all workers, and called on one of them. The order of the
    rows says nothing.

    Args:
        outputs: of the model, float32 ``[n, classes]``.
        targets: as those of a loss: see own_loss.py.
    """
    scores = outputs[:, 1] - outputs[:, 0]  # in the order of the probability, which can round to 1
    gains = GAIN * (targets == 1)[scores.argsort(descending=True)] - COST
    return max(0.0, float(gains.cumsum(0).max())) / len(targets)
