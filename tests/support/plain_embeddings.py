"""The same training in plain torch, in one process: `nn.Embedding` with sparse gradients."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raygnn.checkpoint import weights
from raygnn.checkpoint.learned_rows import read_rows
from raygnn.checkpoint.store import RowFiles
from raygnn.config.schema import Config
from raygnn.graph.data import GraphData
from raygnn.graph.sources import load_graph
from raygnn.models.network import Schema
from raygnn.models.registry import build_model
from raygnn.runs.run import Run
from raygnn.sampling.plan import SeedPlan
from raygnn.tasks.embeddings import first_rows, kept
from raygnn.util.hashing import derive_key


@dataclass
class PlainSage:
    """One layer of GraphSAGE (mean) over all neighbours of a graph of one type, on features and
    learned rows; ids are those of the graph that was given.

    Attributes:
        touched: the rows that each batch read.
        at: epoch and step of the batch under way.
    """

    config: Config
    data: GraphData = field(init=False)
    touched: list[np.ndarray] = field(default_factory=list)
    at: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        config = self.config
        embedding = config.model.embedding
        assert config.graph is not None
        assert embedding is not None
        self.data = load_graph(config.graph)
        (self._nodes,) = self.data.nodes.values()
        ((etype, edges),) = self.data.edges.items()
        (self._ntype,) = self.data.nodes
        order = np.argsort(edges.dst, kind="stable")
        self._src = torch.from_numpy(np.asarray(edges.src)[order].astype(np.int64))
        counts = np.bincount(edges.dst, minlength=self._nodes.num)
        self._indptr = torch.from_numpy(np.concatenate([[0], np.cumsum(counts)]))
        self._x = torch.from_numpy(np.asarray(self._nodes.data["feat"]))
        self._y = torch.from_numpy(np.asarray(self._nodes.data["label"])).long()
        rows = torch.empty(self._nodes.num, embedding.dim)
        first_rows(embedding, config.train.seed, self._ntype, np.arange(self._nodes.num), rows)
        self.rows = nn.Embedding.from_pretrained(rows, freeze=False, sparse=True)
        torch.manual_seed(config.train.seed)
        width = self._x.shape[1] + embedding.dim
        classes = int(self._y.max()) + 1
        model = build_model(
            config.model, Schema({self._ntype: width}, [etype], classes, target=self._ntype)
        )
        self.dense = {name: nn.Parameter(p.detach()) for name, p in model.named_parameters()}

    def train(self, steps: int) -> list[float]:
        """Train; returns the loss of each step."""
        train, embedding = self.config.train, self.config.model.embedding
        assert embedding is not None
        kind = {"adam": torch.optim.SparseAdam, "adagrad": torch.optim.Adagrad}
        rate = embedding.lr or train.lr
        sparse = kind[embedding.optimizer](list(self.rows.parameters()), lr=rate)
        dense = torch.optim.Adam(list(self.dense.values()), lr=train.lr)
        seeds = np.flatnonzero(self._nodes.data["train_mask"])
        workers = self.config.cluster.workers
        assert isinstance(workers, int)
        plan = SeedPlan(
            len(seeds),
            self.config.sampling.batch_size * workers,
            train.seed,
            accumulate=train.accumulate,
        )
        losses: list[float] = []
        number = 0
        while len(losses) < steps:
            sparse.zero_grad()
            dense.zero_grad()
            total, count = torch.zeros(()), 0
            for _ in range(train.accumulate):
                chosen = torch.from_numpy(seeds[plan.batch(*divmod(number, plan.steps_per_epoch))])
                self.at = divmod(number, plan.steps_per_epoch)
                total = total + F.cross_entropy(self._out(chosen), self._y[chosen], reduction="sum")
                count += len(chosen)
                number += 1
                if number % plan.steps_per_epoch == 0:
                    break
            loss = total / count
            loss.backward()
            if train.clip is not None:
                self._clip(train.clip)
            gradient = self.rows.weight.grad
            assert gradient is not None
            with torch.no_grad():
                self.rows.weight[gradient.coalesce().indices()[0]] *= (
                    1 - rate * embedding.weight_decay
                )
            sparse.step()
            dense.step()
            losses.append(float(loss.detach()))
        return losses

    def _out(self, seeds: Tensor) -> Tensor:
        lists = [self._src[self._indptr[s] : self._indptr[s + 1]] for s in seeds]
        ids = torch.unique(torch.cat([seeds, *lists]))
        self.touched.append(ids.numpy())
        x = torch.cat([self._x[ids], self._dropped(ids)], dim=1)
        own = x[torch.searchsorted(ids, seeds)]
        empty = torch.zeros_like(own[0])
        means = [x[torch.searchsorted(ids, each)].mean(0) if len(each) else empty for each in lists]
        (of_self,) = (p for name, p in self.dense.items() if ".own." in name)
        (of_others,) = (p for name, p in self.dense.items() if ".convs." in name)
        (bias,) = (p for name, p in self.dense.items() if ".bias." in name)
        return own @ of_self.T + torch.stack(means) @ of_others.T + bias

    def _dropped(self, ids: Tensor) -> Tensor:
        """Return the rows as a step reads them; dropout depends on (seed, epoch, step, node)."""
        embedding = self.config.model.embedding
        assert embedding is not None
        rows: Tensor = self.rows(ids)
        if not embedding.dropout:
            return rows
        key = derive_key(self.config.train.seed, 1, *self.at, *self._ntype.encode())
        return rows * kept(ids.numpy(), key, embedding.dim, embedding.dropout)

    def _clip(self, largest: float) -> None:
        found = [p.grad for p in self.dense.values()]
        rows = self.rows.weight.grad
        assert rows is not None
        self.rows.weight.grad = rows = rows.coalesce()
        pieces = [g.flatten() for g in found if g is not None]
        norm = torch.cat([*pieces, rows.values().flatten()]).norm()
        share = min(1.0, largest / (float(norm) + 1e-6))
        for gradient in (*pieces, rows.values()):
            gradient.mul_(share)


def learned_rows(run: Run, name: str = "row") -> dict[str, np.ndarray]:
    """Return the embedding tables of a finished run by node type, ``[nodes, dim]`` by id."""
    found = weights.find(run.path / "checkpoints")
    assert found.rows is not None
    return rows_in(found.rows_directory, found.rows, name)


def rows_in(directory: Path, files: RowFiles, name: str = "row") -> dict[str, np.ndarray]:
    """Return the rows of files by node type, sorted by node id."""
    found: dict[str, dict[int, np.ndarray]] = {}
    for file in files.files:
        for ids, arrays in read_rows(directory / file.name, file, files.dim):
            found.setdefault(file.ntype, {}).update(zip(ids.tolist(), arrays[name]))
    return {t: np.stack([rows[i] for i in sorted(rows)]) for t, rows in found.items()}
