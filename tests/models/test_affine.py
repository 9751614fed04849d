"""`raygnn.models.linear.affine` against torch's own operations."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from raygnn import compat
from raygnn.config.model import read_model
from raygnn.models import linear as linear_module
from raygnn.models.linear import affine, join
from raygnn.models.network import Schema
from raygnn.models.registry import build_model
from raygnn.sampling.batch import Adjacency, Block

FP32, BF16 = torch.float32, torch.bfloat16
ETYPE = ("_N", "_E", "_N")


@pytest.fixture(params=[1, 4])
def threads(request: pytest.FixtureRequest) -> int:
    """Number of threads; a small number selects other code."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture(params=["mkl", "onednn"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Library that multiplies fp32 matrices, chosen regardless of this processor."""
    monkeypatch.setattr(linear_module, "_mkl_is_slow", lambda: request.param == "onednn")


def leaves(tensors: list[Tensor], wanted: list[bool]) -> list[Tensor]:
    return [t.clone().requires_grad_(some) for t, some in zip(tensors, wanted)]


@pytest.mark.parametrize(
    ("rows", "widths", "biased", "relu", "out"),  # each pair of values once
    [(0, (5,), False, False, 4), (0, (3, 9), True, True, 30),
     (1, (5,), False, True, 30), (1, (3, 9), True, False, 4),
     (165, (5,), True, False, 30), (165, (3, 9), False, True, 4),
     (700, (5,), True, True, 4), (700, (3, 9), False, False, 30)],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_affine_is_torchs(
    rows: int,
    widths: tuple[int, ...],
    biased: bool,
    relu: bool,
    out: int,
    dtype: torch.dtype,
    threads: int,
    library: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(linear_module, "_emulated", lambda: False)
    torch.manual_seed(0)
    shapes = [*((rows, w) for w in widths), *((out, w) for w in widths), (out,)]
    given = [torch.randn(shape).to(dtype) for shape in shapes]
    wanted = [False, *[True] * (len(given) - 1)]  # features need no gradient
    num, grad = len(widths), torch.randn(rows, out).to(dtype)

    own = leaves(given, wanted)
    result = affine(own[:num], own[num:-1], own[-1] if biased else None, relu=relu)
    result.backward(grad)
    exact = leaves([t.double() for t in given], wanted)
    bias = exact[-1] if biased else None
    linear = F.linear(torch.cat(exact[:num], 1), torch.cat(exact[num:-1], 1), bias)
    expected = F.relu(linear) if relu else linear
    # near 0, rounding may change the sign
    (linear * (result.detach() > 0) if relu else linear).backward(grad.double())

    loose = {"atol": 1e-3, "rtol": 1e-4}
    if dtype == BF16:
        loose = {"atol": 0.02 * max(1, rows) ** 0.5, "rtol": 0.02}
    assert result.dtype == dtype
    torch.testing.assert_close(result.double(), expected, **loose)
    for mine, theirs in zip(own, exact):
        assert (mine.grad is None) == (theirs.grad is None)
        if mine.grad is not None and theirs.grad is not None:
            assert mine.grad.is_contiguous() or len(widths) > 1
            torch.testing.assert_close(mine.grad.double(), theirs.grad, **loose)


@pytest.mark.parametrize(("rows", "width", "out"), [(600, 0, 3), (600, 4, 0), (0, 0, 0)])
def test_without_columns(rows: int, width: int, out: int, library: None) -> None:
    weight = torch.ones(out, width, requires_grad=True)
    bias = torch.ones(out, requires_grad=True)
    result = affine([torch.ones(rows, width)], [weight], bias)
    assert torch.equal(result, torch.full((rows, out), 1.0 + width))
    result.sum().backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.full((out, width), float(rows)))


def test_widths_that_do_not_match_are_errors(library: None) -> None:
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        affine([torch.ones(600, 8)], [torch.ones(4, 7)], torch.ones(4))


def test_few_shapes_are_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    """For each number of rows, oneDNN compiles a product and keeps it."""
    monkeypatch.setattr(linear_module, "_mkl_is_slow", lambda: True)
    multiply, met = linear_module.linear_of_mkldnn, set()

    def noted(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        met.add((*x.shape, *weight.shape))
        return multiply(x, weight, bias)

    monkeypatch.setattr(linear_module, "linear_of_mkldnn", noted)
    weight = torch.ones(3, 4, requires_grad=True)
    for rows in range(100, 3000, 7):
        affine([torch.ones(rows, 4, requires_grad=True)], [weight], torch.ones(3)).sum().backward()
    assert 0 < len(met) <= 20


def test_rows_behind_those_given_are_neither_used_nor_written(library: None) -> None:
    """Products include spare rows of the memory."""
    behind = torch.full((512, 4), float("nan"))
    behind[:165] = torch.randn(165, 4)
    before, x = behind.clone(), behind[:165]
    weight = torch.randn(6, 4, requires_grad=True)
    out = affine([x], [weight], torch.ones(6))
    out.sum().backward()
    assert out.shape == (165, 6)
    torch.testing.assert_close(out, x @ weight.t() + 1)
    torch.testing.assert_close(weight.grad, x.sum(0).expand(6, 4), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(behind, before, equal_nan=True, atol=0, rtol=0)


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_non_finite_values_are_kept(
    dtype: torch.dtype, library: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear_module, "_emulated", lambda: False)
    x = torch.tensor([[float("nan")], [-float("nan")], [float("inf")], [-float("inf")], [1.0]])
    weight = torch.ones(1, 1, dtype=dtype, requires_grad=True)
    bias = torch.zeros(1, dtype=dtype, requires_grad=True)
    out = affine([x.to(dtype)], [weight], bias, relu=True)
    found = out.detach().flatten().float().numpy()
    np.testing.assert_array_equal(found, [np.nan, np.nan, np.inf, 0, 1])
    out.sum().backward()
    assert bias.grad is not None
    assert bias.grad.item() == 4


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_the_sum_of_many_gradients_is_exact(dtype: torch.dtype) -> None:
    """A sum of ones stops at 2²⁴ in fp32, and at 256 in bf16."""
    x = torch.ones(5000, 1, dtype=dtype)
    bias = torch.ones(2, dtype=dtype, requires_grad=True)
    affine([x], [torch.ones(2, 1, dtype=dtype)], bias, relu=True).sum().backward()
    assert bias.grad is not None
    assert bias.grad.tolist() == [torch.tensor(5000.0).to(dtype).item()] * 2


def test_the_gradient_that_is_given_stays_as_it_is() -> None:
    bias = torch.zeros(3, requires_grad=True)
    grad = torch.ones(7, 3)
    affine([torch.randn(7, 2)], [torch.randn(3, 2)], bias, relu=True).backward(grad)
    assert bool((grad == 1).all())


class TestJoin:
    def test_adjacent_columns_are_joined_without_a_copy(self) -> None:
        both = torch.arange(24.0).view(4, 6)
        for parts in ((2, 4), (1, 2, 3), (1, 2)):  # the last leave columns over
            joined = join(both.split(parts if sum(parts) == 6 else (*parts, 3), 1)[: len(parts)])
            assert joined.data_ptr() == both.data_ptr()
            assert torch.equal(joined, both[:, : sum(parts)])

    def test_anything_else_is_copied(self) -> None:
        both = torch.arange(24.0).view(4, 6)
        left, right = both.split(3, 1)
        other = torch.ones(4, 3)
        for columns in (
            [right, left],
            [left, left],
            [left[:, :2], right],
            [left, other],
            [left[:2], both[2:, 3:]],
            [left.clone().requires_grad_(), right],
            [both.t()[:, :2], both.t()[:, 2:]],
        ):
            joined = join(columns)
            assert joined.is_contiguous()
            assert torch.equal(joined, torch.cat(columns, 1))

    def test_rows_that_follow_each_other_do_not_lie_side_by_side(self) -> None:
        flat = torch.arange(6.0).view(3, 2)
        # each begins where the other's first row ends, which is where its own second row begins
        left, right = flat[:2], flat[1:]
        assert torch.equal(join([left, right]), torch.tensor([[0.0, 1, 2, 3], [2, 3, 4, 5]]))


@pytest.mark.parametrize("norm", ["none", "layer"])
@pytest.mark.parametrize("kind", ["sage", "gcn", "gin", "rgcn", "gat"])
def test_relu_comes_once_and_after_the_norm(kind: str, norm: str, threads: int) -> None:
    """Hidden layers equal the general path, which the same network in fp64 uses."""
    torch.manual_seed(0)
    edges = torch.randint(0, 6, (2, 20))
    adj = Adjacency.of_edges(edges[0], edges[1], 6)
    block = Block({ETYPE: adj}, {"_N": 6}, {"_N": 6})
    config = read_model(kind=kind, hidden=8, layers=3, dropout=0.0, norm=norm, activation="relu")
    model = build_model(config, Schema({"_N": 5}, [ETYPE], 3, target="_N"))
    x, degree = torch.randn(6, 5), {ETYPE: adj.degree}
    hidden = model.layer(0, block, {"_N": x}, degree)["_N"]
    assert bool((hidden >= 0).all())
    assert bool((hidden == 0).any())
    found = model([block] * 3, {"_N": x}, degree)
    expected = model.double()([block] * 3, {"_N": x.double()}, degree)
    torch.testing.assert_close(found.double(), expected, atol=1e-4, rtol=1e-4)


def test_with_public_names_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The result is the same on processors for which oneDNN is faster than MKL."""
    monkeypatch.setattr(linear_module, "_mkl_is_slow", lambda: True)
    monkeypatch.setenv(compat.PLAIN, "1")
    x, weight = torch.randn(5000, 8, requires_grad=True), torch.randn(4, 8, requires_grad=True)
    bias = torch.randn(4)
    (affine([x], [weight], bias) ** 2).sum().backward()
    found = [x.grad, weight.grad]
    x.grad = weight.grad = None
    (F.linear(x, weight, bias) ** 2).sum().backward()
    torch.testing.assert_close(found, [x.grad, weight.grad], rtol=1e-4, atol=1e-3)
