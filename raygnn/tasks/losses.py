"""Losses of single seeds ``[B]`` from float32 outputs and targets, and losses of link prediction.

Link losses compare scores of edges ``[B]`` with those of negatives: for each replaced end, scores
``[B, K]`` and which of them count, bool ``[B, K]``. Each returns ``[B]``; both ends have equal
weight.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor

from raygnn.config.task import ClassTask, LinkPrediction, TaskConfig
from raygnn.errors import TrainingError
from raygnn.models.user import load_function
from raygnn.sampling.exchange import Exchange

Loss = Callable[[Tensor, Tensor], Tensor]

_GAMMA = 2.0  # of Lin et al.
_TINY = 1e-12


def make_loss(config: TaskConfig, weights: Sequence[float] | None = None) -> Loss:
    """Build the loss ``task.loss``; ``weights``: see `balance`."""
    if "loss" in config.own:
        return own_loss(config)
    if isinstance(config, ClassTask):
        gamma = _GAMMA if config.gamma is None else config.gamma
        return ClassLoss(
            label_entropy if config.several_labels else class_entropy,
            gamma if config.loss == "focal" else 0.0,
            config.label_smoothing,
            None if weights is None else tuple(weights),
        )
    return absolute if getattr(config, "loss", None) == "l1" else squared


@dataclass
class ClassLoss:
    """`class_entropy` or `label_entropy` of ``outputs`` and targets."""

    entropy: Callable[..., Tensor]
    gamma: float
    smoothing: float
    weights: tuple[float, ...] | None  # of classes, or of labels that are 1; None = 1

    def __call__(self, outputs: Tensor, y: Tensor) -> Tensor:
        weights = None
        if self.weights is not None:  # from page-locked memory, to avoid waiting for a GPU
            weights = torch.tensor(
                self.weights, dtype=outputs.dtype, pin_memory=outputs.is_cuda
            ).to(outputs.device, non_blocking=True)
        return self.entropy(outputs, y, weights, smoothing=self.smoothing, gamma=self.gamma)


def class_entropy(
    outputs: Tensor,
    y: Tensor,
    weights: Tensor | None = None,
    *,
    smoothing: float = 0.0,
    gamma: float = 0.0,
) -> Tensor:
    """Return the cross entropy of ``outputs [B, C]`` and classes ``y``, integers ``[B]`` or
    ``[B, 1]``.

    Args:
        weights: ``[C]``, of the classes.
        smoothing: share of each target that is spread over all classes (Szegedy et al., 2016).
        gamma: weight (1 - p)^gamma of a class of probability p (Lin et al., "Focal loss for dense
            object detection", ICCV 2017).
    """
    y = y.long().flatten()
    if not gamma:
        return F.cross_entropy(outputs, y, weights, reduction="none", label_smoothing=smoothing)
    logs = outputs.log_softmax(1)
    losses = -logs * (-logs.expm1()).clamp_min(_TINY) ** gamma
    losses = losses if weights is None else losses * weights
    of_class = losses.gather(1, y.unsqueeze(1)).squeeze(1)
    return (1 - smoothing) * of_class + smoothing * losses.mean(1)


def label_entropy(
    outputs: Tensor,
    y: Tensor,
    weights: Tensor | None = None,
    *,
    smoothing: float = 0.0,
    gamma: float = 0.0,
) -> Tensor:
    """Return the binary cross entropy of ``outputs [B, K]`` and labels ``y [B]`` or ``[B, K]``:
    the sum over the known labels (not -1 or NaN), divided by K.

    So each known label has the same weight, whatever else is known of its seed.

    Args:
        weights: ``[K]``, of labels that are 1, relative to labels that are 0.
        smoothing, gamma: see `class_entropy`, for the two classes of each label.
    """
    rows = y.float().view_as(outputs)
    known = rows >= 0
    rows = rows.masked_fill(~known, 0) * (1 - smoothing) + smoothing / 2
    if_one, if_zero = F.softplus(-outputs), F.softplus(outputs)  # minus the log. of probabilities
    ones, zeros = rows * if_one, (1 - rows) * if_zero
    if gamma:
        ones, zeros = ones * (-gamma * if_zero).exp(), zeros * (-gamma * if_one).exp()
    losses = (ones if weights is None else ones * weights) + zeros
    return losses.masked_fill(~known, 0).mean(1)


def balance(config: ClassTask, labels: Tensor, num: int, exchange: Exchange) -> list[float]:
    """Compute ``task.class_weights`` from the training seeds of all ranks. Collective.

    Class weights are scaled to a mean of 1 over the training seeds, so that the sum of losses
    divided by the number of seeds is the weighted mean. Label weights are not scaled.

    Args:
        labels: of this rank's training seeds, int64 ``[n]`` or ``[n, K]``.
        num: number of classes or labels.

    Returns:
        ``num`` weights, the same on all ranks.

    Raises:
        ConfigError: ``task.class_weights`` has another length.
    """
    given, several = config.class_weights, config.several_labels
    config.check_weights(num)
    if several:
        rows = labels.reshape(-1, num)
        ones, zeros = exchange.sum(torch.stack([(rows == v).sum(0) for v in (1, 0)])).double()
        weights = torch.where((ones > 0) & (zeros > 0), zeros / ones, 1.0)
    else:
        ones = exchange.sum(torch.bincount(labels.flatten(), minlength=num)).double()
        weights = torch.where(ones > 0, 1 / ones, 0.0)
    if isinstance(given, tuple):
        weights = torch.tensor(given).double()
    if not several:
        weights *= ones.sum() / (weights * ones).sum()
    return weights.tolist()


def own_loss(config: TaskConfig) -> Loss:
    """Return the loss of a user's function of ``outputs [B, …]`` and `plain_targets`, which returns
    a loss of each seed, ``[B]``. It is imported on first use, since predictions need none."""
    spec = config.own["loss"]
    load = cache(partial(load_function, spec, "task.loss"))

    def loss(outputs: Tensor, y: Tensor) -> Tensor:
        if not len(outputs):
            return outputs.new_zeros(0)
        losses = load()(outputs, plain_targets(config, outputs, y))
        if not isinstance(losses, Tensor) or losses.shape != outputs.shape[:1]:
            found = list(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
            what = f"{spec} returned {found}, expected [{len(outputs)}]: a loss of each seed"
            remedy = "return the losses of single seeds; raygnn averages them over all workers"
            raise TrainingError(what, where="task.loss", remedy=remedy)
        if outputs.requires_grad and not losses.requires_grad:
            what = f"the result of {spec} has no gradient"
            remedy = "compute it from the outputs with torch functions, without detach"
            raise TrainingError(what, where="task.loss", remedy=remedy)
        return losses.float()

    return loss


def plain_targets(config: TaskConfig, outputs: Tensor, y: Tensor) -> Tensor:
    """Return targets for a user's function: classes int64 ``[B]``; labels int64 ``[B, K]``, -1 if
    unknown; numbers float32 ``[B, K]``."""
    if config.classifies:
        return y.long().flatten()
    rows = y.view_as(outputs)
    return rows.nan_to_num(-1).long() if config.several_labels else rows.float()


def own_sources(config: TaskConfig) -> dict[str, str]:
    """Return keys of the task → hash of the user's function, for ranks to compare."""
    found = {}
    for key, spec in config.own.items():
        function = load_function(spec, f"task.{key}")
        # functions of extension modules have no source text
        text = inspect.getsource(function) if inspect.isfunction(function) else repr(type(function))
        found[f"{key} source"] = hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
    return found


def squared(outputs: Tensor, y: Tensor) -> Tensor:
    """Return the squared error of ``outputs [B, K]`` and ``y [B]`` or ``[B, K]``, averaged over
    K."""
    return F.mse_loss(outputs, y.float().view_as(outputs), reduction="none").mean(1)


def absolute(outputs: Tensor, y: Tensor) -> Tensor:
    """Return the absolute error; see `squared`."""
    return F.l1_loss(outputs, y.float().view_as(outputs), reduction="none").mean(1)


LinkLoss = Callable[..., Tensor]
PerEnd = Sequence[Tensor]  # for each replaced end

_MARGIN = 1.0
_SHIFT = 9.0  # γ of Sun et al. (2019) for FB15k-237


def make_link_loss(config: LinkPrediction, *, distance: bool) -> LinkLoss:
    """Build the link loss ``task.loss``. To negated distances (``distance``), ``task.margin`` is
    added in losses that depend on their sign."""
    shift = (_SHIFT if config.margin is None else config.margin) if distance else 0.0
    temperature = config.temperature or 1.0
    kinds: dict[str, LinkLoss] = {
        "bce": partial(binary_cross_entropy, shift=shift),
        "bpr": personalised_ranking,
        "softmax": partial(softmax_cross_entropy, temperature=temperature),
        "margin": partial(margin, gap=_MARGIN if config.margin is None else config.margin),
        "self_adversarial": partial(self_adversarial, shift=shift, temperature=temperature),
    }
    return kinds[config.chosen_loss]


def binary_cross_entropy(there: Tensor, absent: PerEnd, counts: PerEnd, *, shift: float) -> Tensor:
    """Return the binary cross entropy, half for the edge, half for the mean of the negatives."""
    others = [_mean(F.softplus(s + shift), c) for s, c in zip(absent, counts)]
    return (F.softplus(-there - shift) + _both(others)) / 2


def personalised_ranking(there: Tensor, absent: PerEnd, counts: PerEnd) -> Tensor:
    """Return the mean over the negatives of -log sigmoid(edge - negative): Rendle et al., "BPR:
    Bayesian personalized ranking from implicit feedback" (UAI 2009)."""
    return _both([_mean(F.softplus(s - there.unsqueeze(1)), c) for s, c in zip(absent, counts)])


def softmax_cross_entropy(
    there: Tensor, absent: PerEnd, counts: PerEnd, log_q: PerEnd = (), *, temperature: float
) -> Tensor:
    """Return the cross entropy of the edge among itself and the negatives, as Lacroix, Usunier &
    Obozinski, "Canonical tensor decomposition for knowledge base completion" (ICML 2018), with all
    nodes.

    Args:
        log_q: ``[B + K]`` for each end, logarithm of the sampling probability of the edges' own
            nodes and of the negatives, which is subtracted from their scores: Yi et al.,
            "Sampling-bias-corrected neural modeling for large corpus item recommendations" (RecSys
            2019). Empty = no correction.
    """
    found, there = [], there / temperature
    for number, (scores, counted) in enumerate(zip(absent, counts)):
        others = scores / temperature
        if log_q:  # relative to the edge's own node, whose score then needs no correction
            own, drawn = log_q[number].split([len(there), scores.shape[1]])
            others = others - (drawn - own.unsqueeze(1))
        others = others.masked_fill(~counted, -torch.inf)
        total = torch.cat([there.unsqueeze(1), others], dim=1).logsumexp(1)
        found.append(total - there)
    return _both(found)


def margin(there: Tensor, absent: PerEnd, counts: PerEnd, *, gap: float) -> Tensor:
    """Return the hinge loss of negatives scoring ``gap`` below the edge (Bordes et al., 2013)."""
    others = [_mean(F.relu(gap - there.unsqueeze(1) + s), c) for s, c in zip(absent, counts)]
    return _both(others)


def self_adversarial(
    there: Tensor, absent: PerEnd, counts: PerEnd, *, shift: float, temperature: float
) -> Tensor:
    """Return the loss of Sun et al., "RotatE" (ICLR 2019), equation 5: negatives are weighted by
    the exponential of their scores."""
    found = []
    for scores, counted in zip(absent, counts):
        weight = (scores.detach() * temperature).masked_fill(~counted, -torch.inf).softmax(1)
        weight = weight.nan_to_num()  # NaN for an edge without counted negatives
        found.append((weight * F.softplus(scores + shift)).sum(1))
    return (F.softplus(-there - shift) + _both(found)) / 2


def _mean(values: Tensor, counted: Tensor) -> Tensor:
    return values.masked_fill(~counted, 0).sum(1) / counted.sum(1).clamp_min(1)


def _both(losses: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(losses)).mean(0)
