"""Calibrated probabilities and thresholds, against direct counts and against fits by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from raygnn.sampling.exchange import Exchange
from raygnn.tasks import calibration
from raygnn.tasks.calibration import Evaluated, calibrate, fit, thresholds
from tests.support.builders import read_task
from tests.support.ranks import run_ranks

CLASSES = read_task(kind="node_classification")
LABELS = read_task(kind="node_classification", labels="multi")


def drawn(classes: int, num: int, scale: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return log probabilities, and classes sampled from them."""
    random = torch.Generator().manual_seed(seed)
    logs = (scale * torch.randn(num, classes, generator=random)).double().log_softmax(1)
    return logs, torch.multinomial(logs.exp(), 1, generator=random).flatten()


@pytest.mark.parametrize("classes", [2, 5])
def test_a_known_distortion_of_logits_is_found(classes: int) -> None:
    """The fit finds a temperature, and the differences between the classes' weights."""
    logs, targets = drawn(classes, 40_000, 1.5)
    shift = torch.linspace(-2, 3, classes).double()
    found = fit((logs + shift) * 3, targets)
    assert found.scale[0] == pytest.approx(1 / 3, rel=0.05)
    bias = torch.tensor(found.bias).double()
    assert bias - bias.mean() == pytest.approx((shift.mean() - shift).numpy(), abs=0.1)
    chances = found.apply((logs + shift) * 3).softmax(1)
    shares = F.one_hot(targets, classes).double().mean(0)
    assert chances.mean(0) == pytest.approx(shares.numpy(), abs=1e-3)
    assert (chances - logs.exp()).abs().max() < 0.03


def test_each_of_several_labels_has_its_own() -> None:
    random = torch.Generator().manual_seed(0)
    true = torch.randn(20_000, 2, generator=random).double()
    labels = torch.bernoulli(true.sigmoid(), generator=random).long()
    labels[::5, 1] = -1
    found = fit(torch.stack([2 * true[:, 0] + 1, true[:, 1] / 2 - 3], 1), labels)
    assert found.scale == pytest.approx((0.5, 2), rel=0.06)
    assert found.bias == pytest.approx((-0.5, 6), abs=0.3)


@pytest.mark.parametrize("size", [1e-6, 1e-4, 1e3])
@pytest.mark.parametrize("kind", ["classes", "labels"])
def test_logits_of_any_size_are_fitted_alike(size: float, kind: str) -> None:
    logs, targets = drawn(3, 5000, 1.5)
    targets = targets if kind == "classes" else F.one_hot(targets)
    found = fit(logs * size, targets).apply(logs * size)
    expected = fit(logs, targets).apply(logs)
    assert found.softmax(1).numpy() == pytest.approx(expected.softmax(1).numpy(), abs=1e-3)
    assert fit(0 * logs, targets).scale == pytest.approx([1.0] * len(fit(logs, targets).scale))


@settings(deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 40), st.integers(2, 4), st.floats(-9, 3))
def test_always_finite_and_never_worse(seed: int, num: int, classes: int, power: float) -> None:
    """A class may be absent, or all predictions correct."""
    logs, targets = drawn(classes, num, 10.0**power, seed)
    found = fit(logs, targets)
    after = F.cross_entropy(found.apply(logs), targets)
    assert np.isfinite([*found.scale, *found.bias]).all()
    assert after <= F.cross_entropy(logs, targets) + 1e-9
    unknown = fit(logs, targets - classes)
    assert (set(unknown.scale), set(unknown.bias)) == ({1.0}, {0.0})
    assert fit(torch.eye(2).double().repeat(20, 1), torch.arange(40) % 2).scale[0] < 8


def _share(exchange: Exchange, outputs: Tensor, targets: Tensor, cuts: list[int]) -> object:
    mine = slice(cuts[exchange.world.rank], cuts[exchange.world.rank + 1])
    task = CLASSES if targets.dim() == 1 else LABELS
    return calibrate(Evaluated(outputs[mine], targets[mine], None), task, exchange)


def test_all_ranks_fit_what_one_does() -> None:
    logs, targets = drawn(2, 900, 2.0)
    outputs = logs.float()
    (alone,) = run_ranks(1, _share, outputs, targets, [0, 900])
    found = run_ranks(3, _share, outputs, targets, [0, 500, 500, 900])
    assert found[0] == found[1] == found[2]
    for name, value in alone[0].items():
        assert found[0][0][name] == pytest.approx(value, rel=1e-6)
    assert len(found[0][1]) == len(alone[1]) == 12
    for mine, his in zip(found[0][1], alone[1]):
        assert mine == pytest.approx(his, rel=1e-6)
    about = alone[0]
    assert about["loss"] < about["before"]
    assert about["seeds"] == 900
    (labels,) = run_ranks(1, _share, outputs, torch.stack([targets, 1 - targets], 1), [0, 900])
    assert (len(labels[0]["scale"]), labels[1]) == (2, [])


def test_regression_and_non_finite_outputs_have_no_calibration() -> None:
    numbers = read_task(kind="node_regression", target="y")
    seen = Evaluated(torch.full((3, 2), torch.nan), torch.tensor([0, 1, 1]), None)

    def both(exchange: Exchange) -> object:
        return calibrate(seen, numbers, exchange), calibrate(seen, CLASSES, exchange)

    assert run_ranks(1, both) == [(None, None)]


def test_with_more_classes_a_row_has_no_calibrated_threshold() -> None:
    """Biases of three classes change which seeds are the most likely of a class."""
    logs, targets = drawn(3, 900, 2.0)
    seen = Evaluated(logs.float(), targets, 2)
    ((_, rows),) = run_ranks(1, lambda exchange: calibrate(seen, CLASSES, exchange))
    assert [row["calibrated"] for row in rows] == [None] * len(rows)
    assert rows == thresholds(logs.float().softmax(1)[:, 2], None, targets == 2)


def test_few_rows_of_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "_ROWS", 100)
    logs, targets = drawn(2, 950, 2.0)
    ((about, _),) = run_ranks(1, _share, logs.float(), targets, [0, 950])
    assert about["seeds"] == 95


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(-4, 4), st.booleans()), min_size=2, max_size=40))
def test_thresholds_are_counted(pairs: list[tuple[int, bool]]) -> None:
    """Seeds with equal scores are selected together; recalls are reached, and not before."""
    scores = torch.tensor([float(score) for score, _ in pairs]).sigmoid()
    truth = torch.tensor([holds for _, holds in pairs])
    for after in ((3 * scores).round(), scores / 2):  # calibrated ones may round to one another
        rows = thresholds(scores, after, truth)
        assert bool(rows) == (0 < int(truth.sum()) < len(pairs))
        for row in rows:
            chosen = scores >= row["threshold"]
            assert torch.equal(after >= row["calibrated"], chosen)
            counts = {"share": chosen, "precision": truth[chosen], "recall": chosen[truth]}
            assert all(row[n] == pytest.approx(float(c.double().mean())) for n, c in counts.items())
    levels = sorted({float(score) for score in scores})
    for wanted in calibration._RECALLS if rows else ():
        reached = [level for level in levels if (scores[truth] >= level).double().mean() >= wanted]
        assert any(row["threshold"] == max(reached) for row in rows)
