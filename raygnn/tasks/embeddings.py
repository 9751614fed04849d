"""Rows that are learned for nodes: each rank keeps those of the nodes it owns.

In a step the rows of a batch come from their owners by one all-to-all, and are a leaf of the
backward pass; what it leaves goes back by another. The owner adds up what came for each row, in an
order that is always the same, and moves the rows that were read, and no others, by torch's own
sparse optimizers. What dropout takes of a row, its owner does not send, and takes of the gradient
that comes back: by the node's id, so that all who read a row get the same. Rows, gradients and the
optimizer's state are fp32, in the memory of the CPU.
"""

from __future__ import annotations

import warnings
from collections.abc import Container, Iterable, Mapping
from dataclasses import replace
from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raygnn.config.model import EmbeddingConfig
from raygnn.sampling.batch import Batch
from raygnn.sampling.exchange import Exchange, Ids, RowRoutes, as_ids
from raygnn.util.hashing import derive_key, mix

ROW, BEST = "row", "best"  # names of arrays: the rows as they are, and as they were best

_AT_ONCE = 1 << 20  # numbers of first rows that are made in one go
# of torch.nn.utils.clip_grad_norm_
_CLIP_EPS = 1e-6
_DROPOUT = 1  # tells its keys from those of sampling


class Embeddings:
    """The learned rows that this rank owns.

    Used by the thread that trains alone, over a process group of its own. Every method but `norm`
    of one rank, `step` and `drop` is collective.

    Args:
        tables: node type → float32 ``[nodes of the type, dim]``, of which this rank's own rows
            are the first: a column of a `FeatureStore`, which sees each step's rows at once.
        ids: node type → ``[owned]``, the ids of this rank's nodes in the user's graph.
        dtype: that the model computes in.
        rate: learning rate of the rows as a share of the dense parameters' one.
        seed: of dropout.

    Attributes:
        rows: node type → this rank's own, float32 ``[owned, dim]``.
        best: copies of them, see `keep`; none before.
        read: distinct rows that batches of this rank have read so far; remote: those of them that
            other ranks own.
    """

    def __init__(
        self,
        tables: Mapping[str, Tensor],
        ids: Mapping[str, np.ndarray],
        exchange: Exchange,
        config: EmbeddingConfig,
        *,
        dtype: torch.dtype,
        rate: float,
        seed: int = 0,
    ):
        self.tables = dict(tables)
        self.ids = dict(ids)
        self.rows = {t: nn.Parameter(table[: len(ids[t])]) for t, table in tables.items()}
        self.exchange = exchange
        self._kind = config.optimizer
        self.dim = config.dim
        self.best: dict[str, Tensor] = {}
        self._dtype = dtype
        self._rate = rate
        self._seed = seed
        self._decay, self._dropout = config.weight_decay, config.dropout
        self._kept: Tensor | None = None  # what dropout leaves of the rows that were sent last
        self._leaf: Tensor | None = None
        self._routes: RowRoutes | None = None
        self._came: list[tuple[RowRoutes, Tensor]] = []  # since the last step
        self.read = self.remote = 0

    @cached_property
    def optimizer(self) -> torch.optim.Optimizer:
        """What moves the rows; a rate is set before each step."""
        rows = list(self.rows.values())
        return (
            torch.optim.Adagrad(rows) if self._kind == "adagrad" else torch.optim.SparseAdam(rows)
        )

    def begin(self) -> None:
        """Forget what came for a step that was not made: training begins, perhaps again."""
        self._came.clear()

    def join(self, batch: Batch, device: torch.device) -> Batch:
        """The batch with the rows of its input nodes, which come after their features."""
        assert batch.routes is not None
        rows = self._fetch(batch.routes, batch.epoch, batch.step).to(device)
        self._leaf, self._routes = rows.requires_grad_(), batch.routes
        x = dict(batch.x)
        for ntype, piece in zip(self.rows, self._leaf.split(list(batch.routes.num.values()))):
            piece = piece.to(self._dtype)
            x[ntype] = torch.cat([x[ntype], piece], dim=1) if ntype in x else piece
        return replace(batch, x=x)

    def send_back(self, parameters: Iterable[nn.Parameter]) -> None:
        """After a backward pass: the gradients of the rows go to their owners.

        Where one of any rank is not finite, the parameters' gradient is made so, too: whoever
        leaves out steps whose gradient is not finite looks there.
        """
        routes, leaf = self._routes, self._leaf
        assert routes is not None
        assert leaf is not None
        self._routes = self._leaf = None
        own = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        values = own.to("cpu").index_select(0, routes.order)
        came = values.new_empty((sum(routes.send), self.dim))
        self.exchange.rows(values, routes.receive, routes.send, came)
        if self._kept is not None:
            came.mul_(self._kept)
        self._came.append((routes, came))
        if not np.isfinite(float(self.exchange.sum(_squares([came])))):
            dense = next((p.grad for p in parameters if p.grad is not None), None)
            assert dense is not None  # DDP has no use for a model without parameters
            dense.fill_(torch.nan)

    def update(
        self, parameters: Iterable[nn.Parameter], clip: float | None, lr: float, scale: float | None
    ) -> None:
        """Move the rows by what came for them, right before the optimizer moves the parameters;
        not where the step is left out.

        Args:
            parameters: with the gradients that the optimizer will find; none, or one that is not
                finite, where it will not move them.
            clip: largest norm of the whole gradient, of parameters and rows together; None = any.
            lr: rate of the parameters in this step.
            scale: that the loss, and so what came, was multiplied by, where a gradient scaler
                leaves out steps, and not whoever took their gradients away; None = there is none.
        """
        came, self._came = self._came, []
        dense = [p.grad for p in parameters if p.grad is not None]
        if not dense:
            return
        found = {t: self._summed(t, came, scale or 1.0) for t in self.rows}
        if clip is not None or scale is not None:
            squares = self.exchange.sum(_squares([values for _, values in found.values()]))
            norm = float((squares + _squares(dense)).sqrt())
            if not np.isfinite(norm):
                return
            share = 1.0 if clip is None else min(1.0, clip / (norm + _CLIP_EPS))
            for gradient in (*dense, *(values for _, values in found.values())):
                gradient.mul_(share)
        for group in self.optimizer.param_groups:
            group["lr"] = lr * self._rate
        for ntype, (index, values) in found.items():
            parameter = self.rows[ntype]
            if self._decay:
                rows = parameter.detach()
                decayed = rows.index_select(0, index).mul_(1 - lr * self._rate * self._decay)
                rows.index_copy_(0, index, decayed)
            parameter.grad = torch.sparse_coo_tensor(
                index.unsqueeze(0),
                values,
                parameter.shape,
                is_coalesced=True,
                check_invariants=False,
            )
        with warnings.catch_warnings():
            # of the optimizers' own sparse tensors, whose indices are those above
            warnings.filterwarnings("ignore", "Sparse invariant checks", UserWarning)
            self.optimizer.step()
        self.optimizer.zero_grad()

    def keep(self) -> None:
        """Remember the rows as they are: they are the best so far."""
        for ntype, rows in self.rows.items():
            if ntype in self.best:
                self.best[ntype].copy_(rows.detach())
            else:
                self.best[ntype] = rows.detach().clone()

    def restore(self) -> None:
        """Put back what was kept, if anything was."""
        for ntype, rows in self.best.items():
            self.rows[ntype].detach().copy_(rows)

    @property
    def steps(self) -> int:
        """That the optimizer has made."""
        return max((int(state["step"]) for state in self.optimizer.state.values()), default=0)

    def arrays(self, ntype: str) -> dict[str, Tensor]:
        """What there is of a type's rows, by name, ``[owned, dim]`` each: the rows, the
        optimizer's state and what was kept. Not copies."""
        rows = self.rows[ntype]
        state = {
            name: value
            for name, value in self.optimizer.state.get(rows, {}).items()
            if isinstance(value, Tensor) and value.shape == rows.shape
        }
        kept = {BEST: self.best[ntype]} if ntype in self.best else {}
        return {ROW: rows.detach(), **state, **kept}

    def begin_state(self, steps: int, names: Container[str]) -> None:
        """Make room for a state that has made ``steps`` and has arrays of these names, which
        `arrays` then has, too."""
        for rows in self.rows.values():
            state = self.optimizer.state[rows]
            if self._kind == "adam":
                state |= {n: torch.zeros_like(rows) for n in ("exp_avg", "exp_avg_sq")}
            state["step"] = torch.tensor(float(steps)) if self._kind == "adagrad" else steps
        if BEST in names:
            self.best = {t: torch.empty_like(rows).detach() for t, rows in self.rows.items()}

    def _fetch(self, routes: RowRoutes, epoch: int, step: int) -> Tensor:
        """The rows of a batch, ``[R, dim]``: of all types one after the other, as named."""
        answer = torch.empty(sum(routes.send), self.dim)
        for ntype, rows in self.rows.items():
            answer[routes.places[ntype]] = rows.detach().index_select(0, routes.given[ntype])
        if self._dropout:
            self._kept = torch.empty_like(answer)
            for ntype, given in routes.given.items():
                key = derive_key(self._seed, _DROPOUT, epoch, step, *ntype.encode())
                ids = self.ids[ntype][given.numpy()]
                self._kept[routes.places[ntype]] = kept(ids, key, self.dim, self._dropout)
            answer.mul_(self._kept)
        came = torch.empty(len(routes.order), self.dim)
        self.exchange.rows(answer, routes.send, routes.receive, came)
        self.read += len(came)
        self.remote += len(came) - routes.receive[self.exchange.world.rank]
        named = torch.empty_like(came)
        named[routes.order] = came
        return named

    def _summed(
        self, ntype: str, came: list[tuple[RowRoutes, Tensor]], scale: float
    ) -> tuple[Tensor, Tensor]:
        """The rows that were read, ascending, int64 ``[n]``, and the gradient of each, ``[n,
        dim]``: the mean over ranks of what came, as that of the parameters."""
        index = torch.cat([routes.given[ntype] for routes, _ in came])
        values = torch.cat([v.index_select(0, routes.places[ntype]) for routes, v in came])
        distinct, count = torch.unique(index, return_counts=True)
        order = torch.argsort(index, stable=True)
        ends = F.pad(count.cumsum(0), (1, 0))
        summed = F.embedding_bag(order, values, ends, mode="sum", include_last_offset=True)
        return distinct, summed.div_(self.exchange.world.size * scale)


def first_rows(config: EmbeddingConfig, seed: int, ntype: str, ids: Ids, out: Tensor) -> None:
    """Fill rows as training begins with them: each number a function of (seed, node type, id,
    column) alone, uniform within ``config.bound``.

    Args:
        ids: int64 ``[n]``, as in the user's graph, whatever the partition; on any device.
        out: float32 ``[n, dim]``.
    """
    there = as_ids(ids) if isinstance(ids, Tensor) else ids  # mapped, and read piece by piece
    columns = np.arange(1, config.dim + 1, dtype=np.uint64)
    key = np.uint64(derive_key(seed, *ntype.encode()))
    size = max(1, _AT_ONCE // config.dim)
    for start in range(0, len(there), size):
        some = there[start : start + size].astype(np.uint64)
        mixed = mix(mix(some ^ key)[:, None] ^ columns)
        share = (mixed >> np.uint64(40)).astype(np.float32) / np.float32(1 << 24)
        out[start : start + size] = torch.from_numpy((2 * share - 1) * np.float32(config.bound))


def kept(ids: np.ndarray, key: int, dim: int, dropout: float) -> Tensor:
    """What dropout (Srivastava et al., JMLR 2014) multiplies rows by, float32 ``[n, dim]``: 0, or
    ``1 / (1 - dropout)``; each number a function of (key, id, column) alone.

    Args:
        ids: ``[n]``, whole numbers.
        dropout: the share, which is rounded to 1/65,536: 16 bits decide about a number.
    """
    words = np.arange(1, -(-dim // 4) + 1, dtype=np.uint64)  # of 64 bits, for four columns each
    mixed = mix(mix(ids.astype(np.uint64) ^ np.uint64(key))[:, None] ^ words)
    draws = mixed.astype("<u8", copy=False).view("<u2")[:, :dim]
    scale = np.where(draws >= round(dropout * 65_536), np.float32(1 / (1 - dropout)), 0)
    return torch.from_numpy(scale.astype(np.float32, copy=False))


def _squares(values: Iterable[Tensor]) -> Tensor:
    """The sum of all squares, float64 on the CPU, in which none that is finite overflows."""
    total = torch.zeros((), dtype=torch.float64)
    for each in values:
        total += torch.linalg.vector_norm(each, dtype=torch.float64).square().to("cpu")
    return total
