"""The data plane of a graph whose nodes are the seeds."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from raygnn.models.registry import build_model
from raygnn.sampling.inputs import row_width
from raygnn.sampling.loader import BatchMaker
from raygnn.sampling.seeds import gather_seeds, owned_nodes
from raygnn.tasks.losses import make_loss
from raygnn.tasks.metrics import measure
from raygnn.tasks.node import NodeTask
from raygnn.tasks.task import Task
from raygnn.training.job import SPLITS
from raygnn.training.partition_plane import PartitionPlane
from raygnn.training.plane import build
from raygnn.training.rows import Predictions, chunk_rows


class NodePlane(PartitionPlane):
    """A shard of one graph, whose nodes are the seeds."""

    @property
    def ntype(self) -> str:
        """The type of the seeds."""
        assert self.job.ntype is not None
        return self.job.ntype

    @property
    def of(self) -> str:
        """See `PartitionPlane`."""
        return self.ntype

    def task(self) -> NodeTask:
        """See `Plane`."""
        config = self.config
        labels, classifies = self.labels, config.task.classifies
        out_features = self.classes(labels) if classifies else row_width(labels)
        schema = self.schema(self.ntype, out_features)
        model = build(config, lambda: build_model(config.model, schema))
        loss, world = make_loss(config.task), self.ranks.world.size
        planned = self.job.planned
        return self._finish(NodeTask(model, loss, config.train, world, out_features, planned))

    def evaluate(self, task: Task, split: str) -> dict[str, float]:
        """See `Plane`."""
        owned = owned_nodes(self.shard, self.ntype, split, self.labels)
        first = self.shard.first(self.ntype)
        outputs = self._inference.outputs(task.model, self.ntype, owned + first)
        wanted = self.labels[torch.from_numpy(owned)]
        return measure(outputs, wanted, self.config.task, self.control)

    def predict(self, task: Task, split: str) -> Iterator[Predictions]:
        """See `Plane`."""
        shard, ntype = self.shard, self.ntype
        splits = self._splits()
        chosen = np.arange(len(splits))
        if split != "all":
            chosen = chosen[splits == SPLITS.index(split)]
        if not self.control.max(len(chosen)):
            return
        original = shard.original[ntype]
        chosen = chosen[np.argsort(original[chosen])]
        outputs = self._inference.outputs(task.model, ntype, chosen + shard.first(ntype))
        size = chunk_rows(outputs.shape[1])
        for start in range(0, len(chosen), size):
            some = chosen[start : start + size]
            yield Predictions(
                ids=original[some].astype(np.int64),
                outputs=outputs[start : start + size],
                targets=self.labels[torch.from_numpy(some)],
                splits=splits[some],
            )

    def _splits(self) -> np.ndarray:
        """See `Predictions.splits`, of the owned nodes."""
        codes = np.full(self.shard.owned(self.ntype), -1, np.int8)
        for number, split in enumerate(SPLITS):
            mask = self.shard.node_data[self.ntype].get(f"{split}_mask")
            if mask is not None:
                codes[mask.bool().numpy()] = number
        return codes

    @cached_property
    def labels(self) -> Tensor:
        """Of the owned nodes: classes, int64 ``[owned]``, or numbers, float32 ``[owned, …]``."""
        task = self.config.task
        stored = self.shard.node_data[self.ntype][task.target]
        return stored.long().flatten() if task.classifies else stored.float()

    def batches(self, task: Task) -> BatchMaker:
        """See `Plane`."""
        seeds = gather_seeds(self.shard, self.control, self.ntype, self.labels)
        first = self.shard.first(self.ntype)
        ids = seeds.ids(np.arange(seeds.num))
        own = ids[(ids >= first) & (ids < first + self.shard.owned(self.ntype))]
        return self.make_batches(task.model, seeds, {self.ntype: own})

    def count(self, split: str) -> int:
        """See `Plane`."""
        owned = len(owned_nodes(self.shard, self.ntype, split, self.labels))
        return int(self.control.sum(torch.tensor(owned)))
