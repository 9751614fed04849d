"""Losses of links, against what the papers write for one edge; and of numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from raygnn.tasks.losses import make_link_loss, make_loss
from tests.support.builders import read_task


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def of_one(loss: str, p: float, ends: list[list[float]], *, shift: float, gap: float) -> float:
    """Return the loss of an edge with score ``p``; ``ends``: the negatives' scores for each end."""
    found = []
    for others in ends:
        if loss == "softmax":
            total = sum(math.exp(s) for s in [p, *others])
            found.append(-math.log(math.exp(p) / total))
        elif loss == "margin":
            found.append(sum(max(0.0, gap - p + s) for s in others) / max(1, len(others)))
        elif loss == "bpr":
            each = [-math.log(sigmoid(p - s)) for s in others]
            found.append(sum(each) / max(1, len(others)))
        elif loss == "bce":
            negative = sum(-math.log(1 - sigmoid(s + shift)) for s in others)
            found.append((-math.log(sigmoid(p + shift)) + negative / max(1, len(others))) / 2)
        else:
            total = sum(math.exp(2 * s) for s in others)
            negative = sum(-math.exp(2 * s) / total * math.log(sigmoid(-s - shift)) for s in others)
            found.append((-math.log(sigmoid(p + shift)) + negative) / 2)
    return sum(found) / len(found)


@pytest.mark.parametrize("loss", ["bce", "bpr", "softmax", "margin", "self_adversarial"])
@pytest.mark.parametrize("distance", [False, True])
@pytest.mark.parametrize("ends", [1, 2])
def test_losses(loss: Any, distance: bool, ends: int) -> None:
    draw = torch.Generator().manual_seed(0)
    scores = torch.randn(4, generator=draw, dtype=torch.float64)
    there = scores.clone().requires_grad_()
    absent = [torch.randn(4, 5, generator=draw, dtype=torch.float64) for _ in range(ends)]
    counts = [torch.rand(4, 5, generator=draw) < 0.6 for _ in range(ends)]
    counts[0][2] = False  # none counts
    more = {"temperature": 2.0} if loss == "self_adversarial" else {}
    if loss == "margin" or (distance and loss not in ("bpr", "softmax")):
        more["margin"] = 1.5
    config = read_task(kind="link_prediction", loss=loss, **more)
    found = make_link_loss(config, distance=distance)(there, absent, counts)
    wanted = [
        of_one(
            loss,
            float(p),
            [s[i][c[i]].tolist() for s, c in zip(absent, counts)],
            shift=1.5 if distance else 0.0,
            gap=1.5,
        )
        for i, p in enumerate(scores)
    ]
    assert found.tolist() == pytest.approx(wanted)
    found.sum().backward()
    assert there.grad is not None
    assert there.grad.isfinite().all()


def test_bpr_is_that_of_pyg() -> None:
    """One negative for each edge, without PyG's L2 regularization."""
    models = pytest.importorskip("torch_geometric.nn.models")
    draw = torch.Generator().manual_seed(0)
    there, absent = torch.randn(6, generator=draw), torch.randn(6, generator=draw)
    every = [torch.ones(6, 1, dtype=torch.bool)]
    loss = make_link_loss(read_task(kind="link_prediction", loss="bpr"), distance=False)
    wanted = models.LightGCN(3, 2, 1).recommendation_loss(
        there, absent, torch.arange(3), lambda_reg=0.0
    )
    torch.testing.assert_close(loss(there, [absent[:, None]], every).mean(), wanted)


def test_softmax_with_a_temperature_and_corrected_for_sampling() -> None:
    """Yi et al. (2019): the cross entropy of scores / temperature - log q, over the edge's own node
    and the negatives that count."""
    draw = torch.Generator().manual_seed(0)
    there, absent = torch.randn(4, generator=draw), torch.randn(4, 5, generator=draw)
    counted = torch.rand(4, 5, generator=draw) < 0.6
    log_q = torch.rand(9, generator=draw).log()
    config = read_task(kind="link_prediction", loss="softmax", temperature=0.2)
    loss = make_link_loss(config, distance=False)
    for given in ([], [log_q]):
        own, drawn = (given or [torch.zeros(9)])[0].split([4, 5])
        wanted = []
        for edge in range(4):
            logits = [float(there[edge] / 0.2 - own[edge])]
            each = (absent[edge] / 0.2 - drawn)[counted[edge]]
            logits += each.tolist()
            wanted.append(math.log(sum(map(math.exp, logits))) - logits[0])
        found = loss(there, [absent], [counted], *([given] if given else []))
        assert found.tolist() == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize("loss", ["bce", "self_adversarial"])
def test_distances_are_shifted_by_the_papers_margin(loss: Any) -> None:
    """The default γ is 9, as in Sun et al. (2019) for FB15k-237."""
    draw = torch.Generator().manual_seed(0)
    there, absent = -12 * torch.rand(4, generator=draw), -12 * torch.rand(4, 5, generator=draw)
    more = {"temperature": 2.0} if loss == "self_adversarial" else {}
    config = read_task(kind="link_prediction", loss=loss, **more)
    every = [torch.ones(4, 5, dtype=torch.bool)]
    found = make_link_loss(config, distance=True)(there, [absent], every)
    wanted = [
        of_one(loss, float(p), [others.tolist()], shift=9.0, gap=0.0)
        for p, others in zip(there, absent)
    ]
    assert found.tolist() == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize(("kind", "wanted"), [("mse", [2.5, 4.5]), ("l1", [1.5, 1.5])])
def test_losses_of_several_numbers_are_means(kind: Any, wanted: list[float]) -> None:
    loss = make_loss(read_task(kind="node_regression", loss=kind))
    outputs = torch.tensor([[1.0, 2.0], [3.0, 0.0]])
    assert loss(outputs, torch.zeros(2, 2)).tolist() == wanted
    assert loss(outputs[:, :1], torch.zeros(2)).shape == (2,)
