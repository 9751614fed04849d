"""The graph operations that a layer is made of. Shape suffixes as in `native`."""

from __future__ import annotations

from typing import Literal, Protocol

from torch import Tensor

from raygnn.sampling.batch import Adjacency

Reduce = Literal["sum", "mean", "max"]


class Kernels(Protocol):
    """One implementation of them, equal to the others but for rounding."""

    def aggregate(
        self, adj: Adjacency, x: Tensor, reduce: Reduce, weight: Tensor | None = None
    ) -> Tensor:
        """Combine the source rows of each destination.

        Args:
            x: ``[S, F]``.
            reduce: a destination without edges gives 0.
            weight: ``[E]``, multiplies each source row ("sum" only).

        Returns:
            ``[D, F]`` in ``x``'s dtype.
        """
        ...

    def edge_softmax(self, adj: Adjacency, score: Tensor, num_src: int) -> Tensor:
        """Softmax of ``score`` ``[E, H]`` over the in-edges of each destination."""
        ...

    def attend(self, adj: Adjacency, x: Tensor, weight: Tensor) -> Tensor:
        """Sum of the source rows ``[S, H, F]`` weighted by ``[E, H]``: ``[D, H, F]``.

        In ``x``'s dtype.
        """
        ...
