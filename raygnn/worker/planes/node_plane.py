"""Data plane of a graph whose nodes are the seeds."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn

from raygnn.errors import InputError
from raygnn.models.heads import NodeHead
from raygnn.models.network import Direct, Network
from raygnn.models.registry import build_model
from raygnn.sampling.features import row_width
from raygnn.sampling.loader import BatchMaker
from raygnn.sampling.plan import resolve_fanouts
from raygnn.sampling.seeds import TaskSeeds, gather_seeds, owned_nodes
from raygnn.tasks.lightning_modules import TaskModule
from raygnn.tasks.metrics import measure
from raygnn.worker.job import Request
from raygnn.worker.planes.partition_plane import PartitionPlane
from raygnn.worker.planes.plane import Kept, build, loss_of, make_task
from raygnn.worker.planes.prediction_rows import (
    Embedded,
    Predictions,
    chosen_nodes,
    chunk_rows,
    embedded_nodes,
    node_splits,
    pick_ntype,
)


class NodePlane(PartitionPlane):
    """A shard of one graph, whose nodes are the seeds."""

    @property
    def ntype(self) -> str:
        """Type of the seeds."""
        assert self.job.ntype is not None
        return self.job.ntype

    @property
    def seed_type(self) -> str:
        return self.ntype

    def task(self) -> TaskModule:
        config = self.config
        schema = self.schema(self.ntype, self.out_features)
        return self._finish(self.task_of(build(config, lambda: build_model(config.model, schema))))

    def task_of(self, model: nn.Module | None) -> TaskModule:
        """Return the task with a model."""
        loss = loss_of(self.job, self.ranks, self._trained, self.out_features)
        return make_task(self.job, self.ranks, model or nn.Identity(), loss, self.out_features)

    def _trained(self) -> Tensor:
        return self.labels[owned_nodes(self.shard, self.ntype, "train", self.labels)]

    @cached_property
    def out_features(self) -> int:
        """Number of classes, or width of a regression target. Collective."""
        if self.config.task.classifies:
            return self.classes(self.labels)
        return self.resolve("numbers", row_width(self.labels))

    @property
    def ntypes(self) -> list[str]:
        """Node types with outputs."""
        return [self.ntype]

    def head(self, width: int) -> NodeHead:
        """See `MultitaskModel`."""
        model = self.config.model
        return NodeHead(self.ntype, width, self.out_features, model.dropout)

    def evaluate(self, task: TaskModule, split: str, keep: Kept | None = None) -> dict[str, float]:
        (owned,) = self.read(split).values()
        again = self.validates(split)
        outputs = self.inference.outputs(
            task.model, self.ntype, owned, times=self._times(owned), again=again
        )
        targets = self.labels[torch.from_numpy(owned - self.shard.first(self.ntype))]
        return measure(
            outputs, targets, self.config.task, task.loss, self.control, self.positive, keep
        )

    def read(self, split: str) -> dict[str, np.ndarray]:
        """Return node type → global ids of the nodes that an evaluation needs."""
        owned = owned_nodes(self.shard, self.ntype, split, self.labels)
        return {self.ntype: owned + self.shard.first(self.ntype)}

    def predict(self, task: TaskModule, request: Request) -> Iterator[Predictions]:
        ntype, splits, fanouts = self.ntype, node_splits(self.shard, self.ntype), None
        chosen = chosen_nodes(self.job, request, self.shard, ntype)
        if not self.control.max(len(chosen)):
            return
        original, ids = self.shard.original[ntype], chosen + self.shard.first(ntype)
        if request.fanout is not None:
            fanouts = resolve_fanouts(request.fanout, self.shard.etypes)
        outputs = self.inference.outputs(task.model, ntype, ids, fanouts, times=self._times(ids))
        size = chunk_rows(outputs.shape[1])
        for start in range(0, len(chosen), size):
            some = chosen[start : start + size]
            yield Predictions(
                ids=original[some].astype(np.int64),
                outputs=outputs[start : start + size],
                targets=self.labels[torch.from_numpy(some)],
                splits=splits[some],
            )

    def embed(self, task: TaskModule, request: Request) -> Iterator[Embedded]:
        """Yield the inputs of the last layer, or of the only, linear one: see `Plane`."""
        model = task.model
        if isinstance(model, Direct):
            there = [self.ntype]
        elif isinstance(model, Network) and model.num_layers > 1:
            there = model.computes(model.num_layers - 2)
        else:
            raise InputError(
                "the model has no hidden layer",
                where="model.layers" if isinstance(model, Network) else "model.kind",
                remedy="embeddings are of built-in kinds with 2 layers or more",
            )
        ntype = pick_ntype(request.ntype or self.ntype, there)

        def rows_of(ids: np.ndarray) -> Tensor:
            if isinstance(model, Network):
                return self.inference.hidden(model, ntype, ids)
            return self.inference.represent(model, {ntype: ids})[ntype].select(ids)

        yield from embedded_nodes(self.job, request, self.shard, ntype, rows_of)

    @cached_property
    def labels(self) -> Tensor:
        """Labels of the owned nodes: see `labels_of`."""
        stored = self.shard.node_data[self.ntype].get(self.config.task.target)
        return self.labels_of(stored, self.shard.owned(self.ntype))

    def _times(self, owned: np.ndarray) -> np.ndarray | None:
        """Return the times of owned nodes, int64; None if they have none."""
        times = self.node_times(self.ntype)
        return None if times is None else times[owned - self.shard.first(self.ntype)]

    def batches(self, task: TaskModule) -> BatchMaker:
        seeds, own, share = self.seeds()
        return self.make_batches(task.model, seeds, own, share)

    def warnings(self) -> list[str]:
        ids = owned_nodes(self.shard, self.ntype, "train", self.labels)
        ids = ids + self.shard.first(self.ntype)
        reached = self.unreached(self.ntype, ids, self._times(ids))
        return [*reached, *self.one_class(self._trained())]

    def seeds(self) -> tuple[TaskSeeds, dict[str, np.ndarray], int]:
        """Return the assigned seeds, with ``own`` and ``share`` of `make_batches`. Collective.

        Raises:
            DataError: there are none.
        """
        first = self.shard.first(self.ntype)
        times = self._times(first + np.arange(self.shard.owned(self.ntype)))
        seeds = gather_seeds(self.shard, self.control, self.ntype, self.labels, times)
        ids = seeds.ids(np.arange(seeds.num))
        own = ids[(ids >= first) & (ids < first + self.shard.owned(self.ntype))]
        return self.assigned(seeds), {self.ntype: own}, self.batch_share

    def count(self, split: str) -> int:
        owned = len(owned_nodes(self.shard, self.ntype, split, self.labels))
        return int(self.control.sum(torch.tensor(owned)))
