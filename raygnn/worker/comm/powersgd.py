"""Gradients as products of thin matrices: PowerSGD (Vogels, Karimireddy, Jaggi, NeurIPS 2019).

torch has a hook of this name, which keeps what it left out by the number of DDP's bucket. Buckets
are laid out anew after the first backward pass of every start, so what it left out could not be
put back exactly when a run goes on from a checkpoint. Here all state belongs to a parameter.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn


class Mean(Protocol):
    """The mean over all ranks, in place; returns when it is there. Collective."""

    def __call__(self, values: Tensor) -> Tensor: ...


class PowerSGD:
    """Reduces gradients approximately; what is left out is added to the next ones.

    A gradient ``M`` ``[n, m]`` (more dimensions are flattened behind the first) becomes
    ``P Qᵀ``, ``P`` ``[n, r]`` and ``Q`` ``[m, r]``: one step of subspace iteration from the ``Q``
    of the step before. What is smaller than that, such as a vector, is reduced as it is. Each rank
    orthonormalises ``P`` itself, which on processors of one kind gives the same.

    Args:
        parameters: those to be reduced, by name; alike on all ranks.
        rank: r.
        start: steps that are exact, before the first that is not.
        seed: of the first ``Q``; the same on all ranks.

    Attributes:
        bytes: handed to the collectives so far.
    """

    def __init__(
        self, parameters: Iterable[tuple[str, nn.Parameter]], rank: int, start: int, seed: int
    ):
        named = [(name, p) for name, p in parameters if p.requires_grad]
        self._names = {id(parameter): name for name, parameter in named}
        self._rank = rank
        self._start = start
        self._done = dict.fromkeys((name for name, _ in named), 0)
        self._left: dict[str, Tensor] = {}
        self._q: dict[str, Tensor] = {}
        self._new: dict[str, tuple[Tensor, Tensor]] = {}  # what is left out and Q, of this step
        self.bytes = 0
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in named:
            if self._pays(parameter):
                m = parameter.numel() // len(parameter)
                q = torch.randn(m, rank, generator=generator, dtype=torch.float64)
                self._q[name] = q.to(parameter.device, _wide(parameter.dtype))

    def reduce(
        self, parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor], mean: Mean
    ) -> None:
        """Replace gradients by (an approximation of) their mean over the ranks. Collective.

        If a rank's gradient is not finite, all that are approximated become NaN on all ranks.
        What is left out counts only when `settle` says that the step was made.

        Args:
            parameters, gradients: all, or some; in the same order on all ranks.
        """
        names = [self._names[id(parameter)] for parameter in parameters]
        low: list[tuple[str, Tensor]] = []
        exact: list[Tensor] = []
        for name, gradient in zip(names, gradients):
            if name in self._q and self._done[name] >= self._start:
                low.append((name, gradient))
            else:
                exact.append(gradient)
        if exact:
            for gradient, reduced in zip(exact, self._mean(exact, mean)):
                gradient.copy_(reduced)
        if low:
            self._reduce_low([name for name, _ in low], [gradient for _, gradient in low], mean)

    def _reduce_low(self, names: list[str], gradients: list[Tensor], mean: Mean) -> None:
        matrices = []
        for name, gradient in zip(names, gradients):
            matrix = gradient.reshape(len(gradient), -1).to(_wide(gradient.dtype), copy=True)
            if name in self._left:
                matrix += self._left[name]
            matrices.append(matrix)
        ps = self._mean([matrix @ self._q[name] for matrix, name in zip(matrices, names)], mean)
        if not all(bool(p.isfinite().all()) for p in ps):  # alike on all ranks, as it is a mean
            for gradient in gradients:
                gradient.fill_(math.nan)
            return
        ps = [torch.linalg.qr(p)[0] for p in ps]
        qs = self._mean([matrix.T @ p for matrix, p in zip(matrices, ps)], mean)
        for name, gradient, matrix, p, q in zip(names, gradients, matrices, ps, qs):
            approximation = p @ q.T
            self._new[name] = matrix.sub_(approximation), q.clone()
            gradient.copy_(approximation.view_as(gradient))

    def settle(self, made: bool) -> None:
        """After each step: was it made, or left out, so that all is as if it had not been?"""
        if made:
            for name, (left, q) in self._new.items():
                self._left[name], self._q[name] = left, q
            for name in self._done:
                self._done[name] += 1
        self._new.clear()

    def _mean(self, tensors: list[Tensor], mean: Mean) -> list[Tensor]:
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        self.bytes += flat.nbytes
        parts = mean(flat).split([tensor.numel() for tensor in tensors])
        return [part.view_as(tensor) for part, tensor in zip(parts, tensors)]

    def _pays(self, parameter: Tensor) -> bool:
        if parameter.dim() < 2 or not parameter.numel():
            return False
        n, m = len(parameter), parameter.numel() // len(parameter)
        return (n + m) * self._rank * 2 < n * m

    def state(self) -> dict[str, dict[str, Tensor]]:
        """``left`` (this rank's own) and ``q`` and ``done`` (alike on all), by parameter."""
        done = {name: torch.tensor(count) for name, count in self._done.items()}
        return {"left": dict(self._left), "q": dict(self._q), "done": done}

    def load(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Go on from `state`; a matrix of another rank than was configured is passed over."""
        for name, q in state["q"].items():
            if name in self._q and self._q[name].shape == q.shape:
                self._q[name] = q.to(self._q[name])
        for name, left in state["left"].items():
            if name in self._q:
                self._left[name] = left.to(self._q[name])
        for name, count in state["done"].items():
            if name in self._done:
                self._done[name] = int(count)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """In which gradients are added up, approximated and exchanged: fp32 at least."""
    return torch.promote_types(dtype, torch.float32)
