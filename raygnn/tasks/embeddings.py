"""Node embeddings: each rank stores the embedding table rows of its nodes.

In a step the rows of a batch are fetched from their owners by one all-to-all and are a leaf of the
backward pass; another all-to-all returns their gradients. The owner sums these in a fixed order,
and torch's sparse optimizers update the rows that were read. The owner applies dropout to sent rows
and to returned gradients, keyed by the node's id, so that all ranks read equal rows. Rows,
gradients and optimizer state are fp32, and on the rank's GPU while it trains if they fit there.
"""

from __future__ import annotations

import warnings
from collections.abc import Container, Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raygnn.config.model import EmbeddingConfig
from raygnn.sampling.batch import Batch
from raygnn.sampling.exchange import Exchange, Ids, RowRoutes, as_ids
from raygnn.util.hashing import derive_key, mix

ROW, BEST = "row", "best"  # names of arrays: current rows, and the best ones

_AT_ONCE = 1 << 20  # numbers of initial rows that are generated at a time
_ROOM = 12  # times the size of the rows: free memory of a GPU that holds them and five copies
_CLIP_EPS = 1e-6  # of torch.nn.utils.clip_grad_norm_
_DROPOUT = 1  # distinguishes its keys from the keys of sampling


class Embeddings:
    """Embedding table rows of this rank's nodes.

    Used by the training thread only, over a separate process group. `join`, `send_back` and
    `update` are collective.

    Args:
        tables: node type → float32 ``[nodes of the type, dim]``, this rank's rows first: a column
            of a `FeatureStore`, which sees updates after `publish`.
        ids: node type → ``[owned]``, original ids of this rank's nodes.
        dtype: compute dtype of the model.
        rate: learning rate, relative to that of dense parameters.
        seed: of dropout.
        on_gpu: train them on the GPU if they fit.

    Attributes:
        rows: node type → this rank's rows, float32 ``[owned, dim]``.
        best: copies of them by `keep`.
        frozen: node types whose rows do not train.
        read: distinct rows that batches of this rank have read so far; remote: how many of them
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
        on_gpu: bool = True,
    ):
        self.tables, self.ids, self.exchange = dict(tables), dict(ids), exchange
        self.rows = {t: nn.Parameter(table[: len(ids[t])]) for t, table in tables.items()}
        self._kind, self.dim = config.optimizer, config.dim
        self.best: dict[str, Tensor] = {}
        self.frozen: set[str] = set()
        self._dtype, self._rate, self._seed, self._on_gpu = dtype, rate, seed, on_gpu
        self._device = torch.device("cpu")  # of the rows
        self._moved = False  # the rows are not the tables' memory
        self._stale = False  # rows have changed since `publish`
        self._decay, self._dropout = config.weight_decay, config.dropout
        self._kept: Tensor | None = None  # dropout factors of the rows sent last
        self._joined: Any = None  # routes and rows of the batch
        self._came: list[tuple[RowRoutes, Tensor]] = []  # since the last step
        self.read = self.remote = 0

    @cached_property
    def optimizer(self) -> torch.optim.Optimizer:
        """Optimizer of the rows; the learning rate is set before each step."""
        kind = torch.optim.Adagrad if self._kind == "adagrad" else torch.optim.SparseAdam
        return kind(self.rows.values())

    def begin(self, device: torch.device) -> None:
        """Discard gradients of an unfinished step when training (re)starts on ``device``, and move
        the rows there if they fit."""
        self._came.clear()
        if self._moved or not (self._on_gpu and _fits(self.rows.values(), device)):
            return
        self._device, self._moved = device, True
        for ntype, rows in self.rows.items():
            if state := self.optimizer.state.get(rows):
                state |= {n: a.to(device) for n, a in self.arrays(ntype).items() if n in state}
            rows.data = rows.data.to(device, copy=True)
        self.best = {t: rows.to(device) for t, rows in self.best.items()}

    def publish(self) -> None:
        """Copy the rows to the tables, for readers of these, if they are not the same memory."""
        if self._moved and self._stale:
            for ntype, rows in self.rows.items():
                self.tables[ntype][: len(rows)].copy_(rows.detach())
        self._stale = False

    def join(self, batch: Batch, device: torch.device) -> Batch:
        """Return the batch with its input nodes' embeddings appended to their features."""
        assert batch.routes is not None
        routes = batch.routes.to(self._device)
        leaf = self._fetch(routes, batch.epoch, batch.step).to(device).requires_grad_()
        self._joined = routes, leaf
        x = dict(batch.x)
        for ntype, piece in zip(self.rows, leaf.split(list(batch.routes.num.values()))):
            piece = piece.to(self._dtype)
            x[ntype] = torch.cat([x[ntype], piece], dim=1) if ntype in x else piece
        return replace(batch, x=x)

    def send_back(self, parameters: Iterable[nn.Parameter]) -> None:
        """Send the gradients of a backward pass to the rows' owners. If a gradient of any rank is
        not finite, a parameter's is set to NaN, where the check that skips such steps finds it."""
        (routes, leaf), self._joined = self._joined, None
        own = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        values = own.to(self._device).index_select(0, routes.order)
        came = values.new_empty((int(routes.send.sum()), self.dim))
        self.exchange.columns([values], routes.receive, routes.send, [came])
        if self._kept is not None:
            came.mul_(self._kept)
        self._came.append((routes, came))
        if not np.isfinite(float(self.exchange.sum(_squares([came])))):
            # there is one, since DDP refuses a model without parameters
            next(p.grad for p in parameters if p.grad is not None).fill_(torch.nan)

    def update(
        self, parameters: Iterable[nn.Parameter], clip: float | None, lr: float, scale: float | None
    ) -> None:
        """Update the rows right before the optimizer updates the parameters, unless the step is
        skipped.

        Args:
            parameters: with the gradients of the optimizer's step; without any, or with one that is
                not finite, the step is skipped.
            clip: largest norm of the gradient of parameters and rows together; None = unlimited.
            lr: learning rate of the parameters in this step.
            scale: loss scale of a gradient scaler, which skips steps itself; None = no scaler.
        """
        came, self._came = self._came, []
        dense = [p.grad for p in parameters if p.grad is not None]
        if not dense:
            return
        found = {t: self._summed(t, came, scale or 1.0) for t in self.rows if t not in self.frozen}
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
            known: dict[str, Any] = {"is_coalesced": True, "check_invariants": False}
            at = index.unsqueeze(0)
            parameter.grad = torch.sparse_coo_tensor(at, values, parameter.shape, **known)
        with warnings.catch_warnings():
            # raised for sparse tensors that the optimizers build from the valid indices above
            warnings.filterwarnings("ignore", "Sparse invariant checks", UserWarning)
            self.optimizer.step()
        self.optimizer.zero_grad()
        self._stale = True

    def keep(self) -> None:
        """Copy the rows as the best so far."""
        for ntype, rows in self.rows.items():
            if ntype in self.best:
                self.best[ntype].copy_(rows.detach())
            else:
                self.best[ntype] = rows.detach().clone()

    def restore(self) -> None:
        """Restore the best rows, if there are any."""
        for ntype, rows in self.best.items():
            self.rows[ntype].detach().copy_(rows)
            self._stale = True

    @property
    def steps(self) -> int:
        """Number of steps of the optimizer."""
        return max((int(state["step"]) for state in self.optimizer.state.values()), default=0)

    def arrays(self, ntype: str) -> dict[str, Tensor]:
        """Return a type's arrays ``[owned, dim]`` by name, not copied: the rows, the optimizer's
        state and the best rows."""
        rows = self.rows[ntype]
        found = {ROW: rows.detach(), **self.optimizer.state.get(rows, {})}
        found |= {BEST: self.best[ntype]} if ntype in self.best else {}
        return {n: a for n, a in found.items() if getattr(a, "shape", None) == rows.shape}

    def begin_state(self, steps: int, names: Container[str]) -> None:
        """Allocate optimizer state after ``steps`` steps, and best rows if among ``names``, so that
        `arrays` returns them."""
        for rows in self.rows.values():
            state = self.optimizer.state[rows]
            if self._kind == "adam":
                state |= {n: torch.zeros_like(rows) for n in ("exp_avg", "exp_avg_sq")}
            state["step"] = torch.tensor(float(steps)) if self._kind == "adagrad" else steps
        if BEST in names:
            self.best = {t: torch.empty_like(rows).detach() for t, rows in self.rows.items()}

    def _fetch(self, routes: RowRoutes, epoch: int, step: int) -> Tensor:
        """Fetch a batch's rows of all types, ``[R, dim]``, in the order of its nodes."""
        answer = torch.empty(int(routes.send.sum()), self.dim, device=self._device)
        for ntype, rows in self.rows.items():
            answer[routes.places[ntype]] = rows.detach().index_select(0, routes.given[ntype])
        if self._dropout:
            self._kept = torch.empty_like(answer)
            for ntype, given in routes.given.items():
                key = derive_key(self._seed, _DROPOUT, epoch, step, *ntype.encode())
                ids = self.ids[ntype][given.cpu().numpy()]
                factors = kept(ids, key, self.dim, self._dropout)
                self._kept[routes.places[ntype]] = factors.to(self._device)
            answer.mul_(self._kept)
        came = answer.new_empty((len(routes.order), self.dim))
        self.exchange.columns([answer], routes.send, routes.receive, [came])
        self.read += len(came)
        self.remote += len(came) - int(routes.receive[self.exchange.world.rank, 0])
        named = torch.empty_like(came)
        named[routes.order] = came
        return named

    def _summed(
        self, ntype: str, came: list[tuple[RowRoutes, Tensor]], scale: float
    ) -> tuple[Tensor, Tensor]:
        """Return the rows that were read, ascending, int64 ``[n]``, and their gradients ``[n,
        dim]``, averaged over ranks like the gradients of parameters."""
        index = torch.cat([routes.given[ntype] for routes, _ in came])
        values = torch.cat([v.index_select(0, routes.places[ntype]) for routes, v in came])
        distinct, count = torch.unique(index, return_counts=True)
        order = torch.argsort(index, stable=True)
        ends = F.pad(count.cumsum(0), (1, 0))
        summed = F.embedding_bag(order, values, ends, mode="sum", include_last_offset=True)
        return distinct, summed.div_(self.exchange.world.size * scale)


def _fits(rows: Iterable[Tensor], device: torch.device) -> bool:
    size = sum(each.numel() * each.element_size() for each in rows)
    return device.type == "cuda" and _ROOM * size <= torch.cuda.mem_get_info(device)[0]


def first_rows(config: EmbeddingConfig, seed: int, ntype: str, ids: Ids, out: Tensor) -> None:
    """Initialise rows, uniform within ``config.bound``: each number is a function of (seed, node
    type, id, column) alone. ``ids``: original ids, int64 ``[n]``, on any device; ``out``: float32
    ``[n, dim]``."""
    there = as_ids(ids) if isinstance(ids, Tensor) else ids  # memory-mapped, read in chunks
    columns = np.arange(1, config.dim + 1, dtype=np.uint64)
    key = np.uint64(derive_key(seed, *ntype.encode()))
    size = max(1, _AT_ONCE // config.dim)
    for start in range(0, len(there), size):
        some = there[start : start + size].astype(np.uint64)
        mixed = mix(mix(some ^ key)[:, None] ^ columns)
        share = (mixed >> np.uint64(40)).astype(np.float32) / np.float32(1 << 24)
        out[start : start + size] = torch.from_numpy((2 * share - 1) * np.float32(config.bound))


def kept(ids: np.ndarray, key: int, dim: int, dropout: float) -> Tensor:
    """Return dropout factors (Srivastava et al., JMLR 2014) of rows, float32 ``[n, dim]``: 0, or
    ``1 / (1 - dropout)``; each is a function of (key, id, column) alone. ``ids``: integers ``[n]``;
    ``dropout``: probability, rounded to 1/65,536, since 16 bits decide each number."""
    words = np.arange(1, -(-dim // 4) + 1, dtype=np.uint64)  # of 64 bits, for four columns each
    mixed = mix(mix(ids.astype(np.uint64) ^ np.uint64(key))[:, None] ^ words)
    draws = mixed.astype("<u8", copy=False).view("<u2")[:, :dim]
    scale = np.where(draws >= round(dropout * 65_536), np.float32(1 / (1 - dropout)), 0)
    return torch.from_numpy(scale.astype(np.float32, copy=False))


def _squares(values: Iterable[Tensor]) -> Tensor:
    """Return the sum of squares as float64 on the CPU, which finite fp32 values cannot overflow."""
    total = torch.zeros((), dtype=torch.float64)
    for each in values:
        total += torch.linalg.vector_norm(each, dtype=torch.float64).square().to("cpu")
    return total
