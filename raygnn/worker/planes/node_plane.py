"""Data planes of a graph whose seeds are nodes, or nodes at times: the rows of a training table."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor, nn

from raygnn.errors import InputError
from raygnn.graph.data import TrainingRows
from raygnn.models.heads import NodeHead
from raygnn.models.network import Direct, Network
from raygnn.models.registry import build_model
from raygnn.sampling.features import row_width
from raygnn.sampling.loader import BatchMaker
from raygnn.sampling.plan import Fanout, resolve_fanouts
from raygnn.sampling.seeds import NodeSeeds, TaskSeeds, distinct, gather_seeds, known, owned_nodes
from raygnn.tasks.lightning_modules import TaskModule
from raygnn.worker.job import SPLITS, Request
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
from raygnn.worker.planes.vocabulary import one_class_warnings


class NodePlane(PartitionPlane):
    """A shard of one graph, whose nodes are the seeds."""

    @property
    def ntype(self) -> str:
        """Type of the seeds."""
        assert self.job.goal.ntype is not None
        return self.job.goal.ntype

    @property
    def seed_type(self) -> str:
        return self.ntype

    def task(self) -> TaskModule:
        config = self.config
        schema = self.schema(self.ntype, self.out_features)
        return self._finish(self.task_of(build(config, lambda: build_model(config.model, schema))))

    def task_of(self, model: nn.Module | None) -> TaskModule:
        loss = loss_of(self.job, self.ranks, self._trained, self.out_features)
        return make_task(self.job, self.ranks, model or nn.Identity(), loss, self.out_features)

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
        chosen = self._chosen(split)
        outputs = self._outputs(task, chosen, again=self.validates(split))
        return self.measured(outputs, self.labels[torch.from_numpy(chosen)], task.loss, keep)

    def read(self, split: str) -> dict[str, np.ndarray]:
        """Return node type → global ids of the nodes that an evaluation needs."""
        return {self.ntype: self._ids(self._chosen(split))}

    def _chosen(self, split: str) -> np.ndarray:
        """Return the positions of this rank's seeds that are in a split and have a target."""
        return owned_nodes(self.shard, self.ntype, split, self.labels)

    def _ids(self, chosen: np.ndarray) -> np.ndarray:
        return chosen + self.shard.first(self.ntype)

    def _outputs(
        self,
        task: TaskModule,
        chosen: np.ndarray,
        fanouts: list[Fanout] | None = None,
        *,
        again: bool = False,
    ) -> Tensor:
        """Return the outputs of this rank's seeds at these positions. Collective."""
        ids, times = self._ids(chosen), self._times(chosen)
        return self.inference.outputs(
            task.model, self.ntype, ids, fanouts, times=times, again=again
        )

    def predict(self, task: TaskModule, request: Request) -> Iterator[Predictions]:
        chosen, fanouts = self._asked(request), None
        if not self.control.max(len(chosen)):
            return
        if request.fanout is not None:
            fanouts = resolve_fanouts(request.fanout, self.shard.etypes)
        outputs = self._outputs(task, chosen, fanouts)
        size = chunk_rows(outputs.shape[1])
        for start in range(0, len(chosen), size):
            some = chosen[start : start + size]
            yield self._predictions(some, outputs[start : start + size])

    def _asked(self, request: Request) -> np.ndarray:
        """Return the positions of the requested seeds of this rank, ascending by their ids."""
        return chosen_nodes(self.job, request, self.shard, self.ntype)

    def _predictions(self, chosen: np.ndarray, outputs: Tensor) -> Predictions:
        """Return the outputs of this rank's seeds at these positions, with targets and splits."""
        ids = self.shard.original[self.ntype][chosen].astype(np.int64)
        targets = self.labels[torch.from_numpy(chosen)]
        return Predictions(ids, outputs, targets, self._splits[chosen])

    @cached_property
    def _splits(self) -> np.ndarray:
        """Splits of this rank's seeds: see `Predictions`."""
        return node_splits(self.shard, self.ntype)

    def embed(self, task: TaskModule, request: Request) -> Iterator[Embedded]:
        """Yield the inputs of the last layer, or of the only, linear one: see `Plane`."""
        model = task.model
        if isinstance(model, Direct):
            there = [self.ntype]
        elif isinstance(model, Network) and model.num_layers > 1:
            there = model.computes(model.num_layers - 2)
        else:
            where = "model.layers" if isinstance(model, Network) else "model.kind"
            remedy = "built-in kinds with 2 layers or more have embeddings"
            raise InputError("the model has no hidden layer", where=where, remedy=remedy)
        ntype = pick_ntype(request.ntype or self.ntype, there)

        rows_of = self._rows_of(model, ntype)
        if isinstance(model, Network):
            layers = model.num_layers - 1
            rows_of = lambda ids: self.inference.outputs(model, ntype, ids, layers=layers)  # noqa: E731
        yield from embedded_nodes(self.job, request, self.shard, ntype, rows_of)

    @cached_property
    def labels(self) -> Tensor:
        """Labels of the owned nodes: see `labels_of`."""
        stored = self.shard.node_data[self.ntype].get(self.config.task.target)
        return self.labels_of(stored, self.shard.owned(self.ntype))

    def _times(self, chosen: np.ndarray) -> np.ndarray | None:
        """Return the times of this rank's seeds, int64; None if they have none. Collective."""
        times = self.node_times(self.ntype)
        return None if times is None else times[chosen]

    def batches(self, task: TaskModule) -> BatchMaker:
        seeds, own, share = self.seeds()
        return self.make_batches(task.model, seeds, own, share)

    def warnings(self) -> list[str]:
        chosen = self._chosen("train")
        reached = self.unreached(self.ntype, self._ids(chosen), self._times(chosen))
        own = one_class_warnings(self.job, self._trained(), self.out_features, self.control)
        return [*reached, *own]

    def seeds(self) -> tuple[TaskSeeds, dict[str, np.ndarray], int]:
        """Return the assigned seeds, with ``own`` and ``share`` of `make_batches`. Collective.
        Raises DataError if there are none."""
        first = self.shard.first(self.ntype)
        seeds = self._gathered()
        ids = seeds.ids(np.arange(seeds.num))
        own = ids[(ids >= first) & (ids < first + self.shard.owned(self.ntype))]
        return self.assigned(seeds), {self.ntype: own}, self.batch_share

    def _gathered(self) -> NodeSeeds:
        """Return the seeds of all ranks for training. Collective."""
        times = self._times(np.arange(self.shard.owned(self.ntype)))
        return gather_seeds(self.shard, self.control, self.ntype, self.labels, times)


class RowPlane(NodePlane):
    """A shard of one graph; the rows of a training table are the seeds, each on the rank that owns
    its node."""

    @property
    def table(self) -> TrainingRows:
        """Rows of all ranks."""
        assert self.job.rows is not None
        return self.job.rows

    @property
    def seed_type(self) -> str:
        return f"the training table of {self.ntype}"

    @cached_property
    def _rows(self) -> np.ndarray:
        """Numbers of this rank's rows, int64 ``[n]``, ascending."""
        return np.flatnonzero(self._places >= 0)

    @cached_property
    def _places(self) -> np.ndarray:
        """Position of each row's node among the owned ones, int64 ``[N]``; -1 = another rank's."""
        own = pa.array(self.shard.original[self.ntype].astype(np.int64))
        found = pc.index_in(pa.array(self.table.nodes), value_set=own)
        return np.asarray(pc.fill_null(found, -1), np.int64)

    @cached_property
    def labels(self) -> Tensor:
        """Targets of this rank's rows: see `labels_of`."""
        return self._targets(self._rows)

    def _targets(self, rows: np.ndarray) -> Tensor:
        found = self.table.targets
        return self.labels_of(None if found is None else torch.from_numpy(found[rows]), len(rows))

    def _chosen(self, split: str) -> np.ndarray:
        return np.flatnonzero((self._splits == SPLITS.index(split)) & known(self.labels).numpy())

    def _ids(self, chosen: np.ndarray) -> np.ndarray:
        ids: np.ndarray = self._places[self._rows[chosen]] + self.shard.first(self.ntype)
        return ids

    def _times(self, chosen: np.ndarray) -> np.ndarray | None:
        times = self._until
        return None if times is None else times[self._rows[chosen]]

    @cached_property
    def _until(self) -> np.ndarray | None:
        """Time before which each row sees edges, int64 ``[N]``: right after its own time, since
        edges of that time are known (``sampling.time.strict``). Collective."""
        if self.time is None or self.table.times is None:
            return None
        own, explicit = self.table.times[self._rows], self.table.in_microseconds
        self.clock.check(own, self.ntype, self.time, explicit=explicit)
        time = self.config.sampling.time
        return self.table.times + (time is None or not time.strict)

    def _outputs(self, task: TaskModule, chosen: np.ndarray, *options: Any, **more: Any) -> Tensor:
        _, _, back = distinct(self._ids(chosen), self._times(chosen))
        _, firsts = np.unique(back, return_index=True)  # of rows of one node and time
        return super()._outputs(task, chosen[firsts], *options, **more)[torch.from_numpy(back)]

    def _gathered(self) -> NodeSeeds:
        chosen = self._chosen("train")
        own = np.stack([self._rows[chosen], self._ids(chosen)], 1)
        rows, ids = self.control.gather_rows(torch.from_numpy(own)).numpy().T
        order = np.argsort(rows)
        rows, until = rows[order], self._until
        times = None if until is None else until[rows]
        return NodeSeeds(self.ntype, ids[order], self._targets(rows), times, repeated=True)

    def _asked(self, request: Request) -> np.ndarray:
        if request.split == "all":
            return np.arange(len(self._rows))
        return np.flatnonzero(self._splits == SPLITS.index(request.split))

    def _predictions(self, chosen: np.ndarray, outputs: Tensor) -> Predictions:
        rows, times = self._rows[chosen], self.table.times
        return Predictions(
            rows,
            outputs,
            self.labels[torch.from_numpy(chosen)],
            self._splits[chosen],
            {"node": self.table.nodes[rows], "time": None if times is None else times[rows]},
        )

    @cached_property
    def _splits(self) -> np.ndarray:
        splits: np.ndarray = self.table.splits[self._rows]
        return splits
