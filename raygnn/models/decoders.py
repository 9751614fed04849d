"""Decoders: scores of edges from the rows of their two ends. B edges, K nodes of width D.

A decoder compares a query, computed from one end and the relation, with the other end. So scores of
B edges with each of K nodes at one end are one matrix product, or one table of distances.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raygnn.config.model import ModelConfig

_AT_ONCE = 1 << 24  # numbers materialised at a time for distances in an evaluation
ROWS = 512  # a multiple of products' rows: BLAS computes the last of others with other kernels


class Decoder(nn.Module):
    """Scores edges; higher means likelier. ``width``: D; ``relations``: their number, at least
    1."""

    distance = False  # True if scores are negated distances
    arguments: dict[str, Any]  # of `make_decoder`

    def __init__(self, width: int, relations: int):
        super().__init__()
        self.width, self.relations = width, relations

    @abstractmethod
    def query(self, kept: Tensor, relation: Tensor | None, end: str) -> Tensor:
        """Return the rows that nodes at ``end``, "source" or "target", are compared with, from
        rows ``kept`` of the other end, ``[B, D]`` each; ``relation``: int64 ``[B]``; None = 0."""

    def compare(self, query: Tensor, nodes: Tensor) -> Tensor:
        """Compare ``[B, D]`` with ``[B, D]`` → ``[B]``; inner products by default."""
        return (query * nodes).sum(1)

    def table(self, query: Tensor, nodes: Tensor) -> Tensor:
        """Compare all pairs of ``[B, D]`` and ``[K, D]`` → ``[B, K]``."""
        return query @ nodes.T

    def forward(self, source: Tensor, target: Tensor, relation: Tensor | None, *_: Any) -> Tensor:
        """Return scores of edges, ``[B, 1]``."""
        return self.compare(self.query(source, relation, "target"), target).unsqueeze(1)

    def scores(
        self, source: Tensor, target: Tensor, relation: Tensor | None, *features: Tensor
    ) -> Tensor:
        """Return scores of edges, ``[B]``; without gradients, equal rows get equal ones."""
        num, rows = len(source), (source, target, *features)
        if more := 0 if torch.is_grad_enabled() else -num % ROWS:
            rows = tuple(F.pad(some, (0, 0, 0, more)) for some in rows)
            relation = None if relation is None else F.pad(relation, (0, more))
        return torch.flatten(self(*rows[:2], relation, *rows[2:]))[:num]

    def against(self, kept: Tensor, nodes: Tensor, relation: Tensor | None, end: str) -> Tensor:
        """Return scores ``[B, K]`` with each of ``nodes`` ``[K, D]`` at ``end``; see `query`."""
        return self.table(self.query(kept, relation, end), nodes)


class Dot(Decoder):
    """Inner product; relations are ignored."""

    def query(self, kept: Tensor, relation: Tensor | None, end: str) -> Tensor:
        return kept


class Cosine(Dot):
    """Cosine of the angle between the two rows; relations are ignored."""

    def query(self, kept: Tensor, relation: Tensor | None, end: str) -> Tensor:
        return F.normalize(kept, dim=1)

    def compare(self, query: Tensor, nodes: Tensor) -> Tensor:
        return super().compare(query, F.normalize(nodes, dim=1))

    def table(self, query: Tensor, nodes: Tensor) -> Tensor:
        return super().table(query, F.normalize(nodes, dim=1))


class Relational(Decoder):
    """One vector for each relation, of width ``numbers``; None = D."""

    def __init__(self, width: int, relations: int, numbers: int | None = None):
        super().__init__(width, relations)
        self.relation = nn.Parameter(torch.empty(relations, numbers or width))
        nn.init.xavier_uniform_(self.relation)

    def rows(self, kept: Tensor, relation: Tensor | None) -> Tensor:
        """Return the vectors of relations, ``[B, …]``."""
        if relation is None:
            return self.relation[:1].expand(kept.shape[0], -1)
        return F.embedding(relation, self.relation)


class DistMult(Relational):
    """Yang, Yih, He, Gao & Deng, "Embedding entities and relations for learning and inference in
    knowledge bases" (ICLR 2015)."""

    def query(self, kept: Tensor, relation: Tensor | None, end: str) -> Tensor:
        return kept * self.rows(kept, relation)


class ComplEx(DistMult):
    """Trouillon, Welbl, Riedel, Gaussier & Bouchard, "Complex embeddings for simple link
    prediction" (ICML 2016). The first half of a row are real parts, the second imaginary ones."""

    def query(self, kept: Tensor, relation: Tensor | None, end: str) -> Tensor:
        # Re(s · r · conj(t)) is the inner product of t with s · r, and of s with conj(r) · t
        return _product(kept, self.rows(kept, relation), conjugate=end == "source")


class RotatE(Relational):
    """Sun, Deng, Nie & Tang, "RotatE: knowledge graph embedding by relational rotation in complex
    space" (ICLR 2019). Halves as `ComplEx`; a relation is an angle for each complex number."""

    distance = True

    def __init__(self, width: int, relations: int):
        super().__init__(width, relations, width // 2)
        nn.init.uniform_(self.relation, -math.pi, math.pi)

    def query(self, kept: Tensor, relation: Tensor | None, end: str) -> Tensor:
        angle = self.rows(kept, relation)
        turn = torch.cat([angle.cos(), angle.sin()], dim=1)
        # |s · r - t| = |s - conj(r) · t|, since |r| = 1
        return _product(kept, turn, conjugate=end == "source")

    def compare(self, query: Tensor, nodes: Tensor) -> Tensor:
        return -_moduli(query - nodes).sum(-1)

    def table(self, query: Tensor, nodes: Tensor) -> Tensor:
        return _by_rows(query, nodes, lambda q: self.compare(q.unsqueeze(1), nodes))


class TransE(Relational):
    """Bordes, Usunier, Garcia-Durán, Weston & Yakhnenko, "Translating embeddings for modeling
    multi-relational data" (NeurIPS 2013), with the sum of absolute differences as distance."""

    distance = True

    def query(self, kept: Tensor, relation: Tensor | None, end: str) -> Tensor:
        shift = self.rows(kept, relation)
        return kept + shift if end == "target" else kept - shift

    def compare(self, query: Tensor, nodes: Tensor) -> Tensor:
        return -(query - nodes).abs().sum(1)

    def table(self, query: Tensor, nodes: Tensor) -> Tensor:
        if query.dtype != torch.float64:  # torch has no distances of bf16
            query, nodes = query.float(), nodes.float()
        return -torch.cdist(query, nodes, p=1.0)


class Mlp(Decoder):
    """Two layers over both ends, the relation's vector and edge features.

    The first layer is a sum of separate products, so that with K nodes in place of an end only the
    sum and the second layer are computed for all pairs.

    Args:
        hidden: width of the first layer.
        out_features: number of classes or targets, or 1.
        features: width of edge features.
    """

    def __init__(
        self,
        width: int,
        relations: int,
        hidden: int,
        out_features: int,
        dropout: float,
        features: int = 0,
    ):
        super().__init__(width, relations)
        self.source = nn.Linear(width, hidden)
        self.target = nn.Linear(width, hidden, bias=False)
        self.relation = nn.Parameter(torch.zeros(relations, hidden)) if relations > 1 else None
        self.features = nn.Linear(features, hidden, bias=False) if features else None
        self.dropout = nn.Dropout(dropout)
        self.out = nn.Linear(hidden, out_features)

    def query(self, kept: Tensor, relation: Tensor | None, end: str) -> Tensor:
        query = (self.target if end == "source" else self.source)(kept)
        if self.relation is None or relation is None:
            return query
        return query + F.embedding(relation, self.relation)

    def compare(self, query: Tensor, nodes: Tensor) -> Tensor:
        """Return ``[…, out_features]``; see `Decoder.compare`."""
        return self.out(self.dropout(F.relu(query + nodes)))

    def table(self, query: Tensor, nodes: Tensor) -> Tensor:
        return _by_rows(query, nodes, lambda q: self.compare(q.unsqueeze(1), nodes).squeeze(-1))

    def forward(
        self, source: Tensor, target: Tensor, relation: Tensor | None, *features: Any
    ) -> Tensor:
        """Return outputs of edges, ``[B, out_features]``; ``features``: of edges, ``[B, F]``."""
        query = self.query(source, relation, "target")
        if self.features is not None:
            query = query + self.features(features[0].to(query.dtype))
        return self.compare(query, self.target(target))

    def against(self, kept: Tensor, nodes: Tensor, relation: Tensor | None, end: str) -> Tensor:
        other = self.source if end == "source" else self.target
        return self.table(self.query(kept, relation, end), other(nodes))


_SIMPLE: dict[str, type[Decoder]] = {
    "dot": Dot,
    "cosine": Cosine,
    "distmult": DistMult,
    "complex": ComplEx,
    "rotate": RotatE,
    "transe": TransE,
}


def make_decoder(
    config: ModelConfig, kind: str, width: int, relations: int, out: int, features: int = 0
) -> Decoder:
    """Build a decoder; ``out``: number of classes or targets, or 1; ``features``: their width."""
    if kind == "mlp":
        made: Decoder = Mlp(width, relations, config.hidden, out, config.dropout, features)
    else:
        made = _SIMPLE[kind](width, relations)
    given = {"width": width, "relations": relations, "out": out, "features": features}
    made.arguments = {"kind": kind, **given}
    return made


def _product(one: Tensor, other: Tensor, *, conjugate: bool) -> Tensor:
    (a, b), (c, d) = one.chunk(2, dim=-1), other.chunk(2, dim=-1)
    d = -d if conjugate else d
    return torch.cat([a * c - b * d, a * d + b * c], dim=-1)


def _moduli(value: Tensor) -> Tensor:
    if value.dtype == torch.float16:  # squares exceed its range
        value = value.float()
    real, imaginary = value.chunk(2, dim=-1)
    # avoids an infinite gradient at 0
    return (real.square() + imaginary.square()).clamp_min(1e-12).sqrt()


def _by_rows(query: Tensor, nodes: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply ``function`` to rows of ``query``, in chunks unless a backward pass needs them."""
    if torch.is_grad_enabled():
        return function(query)
    step = max(1, _AT_ONCE // max(1, nodes.numel()))
    return torch.cat([function(some) for some in query.split(step)])
