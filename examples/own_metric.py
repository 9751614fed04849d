"""A metric of your own: the gain from acting on the predictions.

Each node that is predicted as class 1 is inspected. An inspection has a cost, and a gain if the
prediction is correct.
"""

from __future__ import annotations

from torch import Tensor

COST, GAIN = 1.0, 8.0  # of an inspection, and of a correct prediction


def net_gain(outputs: Tensor, targets: Tensor) -> float:
    """Return the mean gain per seed at the best threshold; higher is better.

    One worker calls it, with all seeds of the split of all workers, in any order.

    Args:
        outputs: outputs of the model, float32 ``[n, classes]``.
        targets: as for a loss, see own_loss.py.
    """
    scores = outputs[:, 1] - outputs[:, 0]  # in the order of the probability, which can round to 1
    gains = GAIN * (targets == 1)[scores.argsort(descending=True)] - COST
    return max(0.0, float(gains.cumsum(0).max())) / len(targets)
