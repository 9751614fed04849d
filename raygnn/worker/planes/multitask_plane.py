"""Data plane of multi-task learning on one graph: one network, and a head for each task."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from functools import cached_property

from torch import nn

from raygnn.config.model import NO_LAYERS
from raygnn.config.schema import metric_name
from raygnn.errors import ConfigError
from raygnn.models.heads import MultitaskModel
from raygnn.models.registry import build_model
from raygnn.sampling.loader import BatchMaker
from raygnn.sampling.plan import MultitaskPlan
from raygnn.sampling.seeds import MultitaskSeeds
from raygnn.tasks.lightning_modules import MultitaskTask, TaskModule
from raygnn.worker.job import Request
from raygnn.worker.planes.edge_plane import EdgePlane
from raygnn.worker.planes.node_plane import NodePlane, RowPlane
from raygnn.worker.planes.partition_plane import PartitionPlane, union
from raygnn.worker.planes.plane import Kept, build
from raygnn.worker.planes.prediction_rows import Predictions


class MultitaskPlane(PartitionPlane):
    """A shard of one graph with several tasks on its nodes and edges."""

    @cached_property
    def planes(self) -> dict[str, NodePlane | EdgePlane]:
        """Planes of the tasks, by name, which use this one's data."""
        found: dict[str, NodePlane | EdgePlane] = {}
        for name, job in self.job.by_task.items():
            of_nodes = NodePlane if job.rows is None else RowPlane
            kind = of_nodes if job.goal.edges is None else EdgePlane
            found[name] = kind(job, self.ranks, self.shard, self.inputs, within=self)
        return found

    @property
    def ntypes(self) -> list[str]:
        """Node types with outputs of any task."""
        return list(dict.fromkeys(t for plane in self.planes.values() for t in plane.ntypes))

    def task(self) -> MultitaskTask:
        """See `Plane`. Raises ConfigError if the task that selects the best weights has no
        validation split, but another task has."""
        config, tasks = self.config, self.config.tasks
        assert tasks is not None
        assert config.model.kind != NO_LAYERS
        self._check_selection()
        width, planes = config.model.hidden, self.planes
        first, *others = self.ntypes
        schema = self.schema(first, width, tuple(others))
        # counts are collective, so all of them come before the heads are built
        made = {name: plane.task_of(None) for name, plane in planes.items()}
        for plane in planes.values():
            if isinstance(plane, EdgePlane):
                _ = plane.relations

        def several() -> nn.Module:
            encoder = build_model(config.model, schema)
            return MultitaskModel(
                encoder, {name: plane.head(width) for name, plane in planes.items()}
            )

        weights = {name: one.weight for name, one in tasks.items()}
        world, planned = self.ranks.world.size, self.job.planned
        model = build(config, several)
        return self._finish(MultitaskTask(model, made, weights, config.train, world, planned))

    def batches(self, task: TaskModule) -> BatchMaker:
        assert isinstance(task.model, MultitaskModel)
        tasks, own, shares = zip(*(plane.seeds() for plane in self.planes.values()))
        by_name = dict(zip(self.planes, tasks))
        plans = {name: seeds.plan for name, seeds in by_name.items()}
        seeds = MultitaskSeeds(MultitaskPlan(plans, self.config.train.accumulate), by_name)
        return self.make_batches(task.model.encoder, seeds, union(own), sum(shares))

    def evaluate(self, task: TaskModule, split: str, keep: Kept | None = None) -> dict[str, float]:
        """Return ``<task>/<metric>`` of each task that has seeds in the split: see `Plane`."""
        assert isinstance(task, MultitaskTask)
        assert isinstance(task.model, MultitaskModel)
        found: dict[str, float] = {}
        planes = {name: plane for name, plane in self._wanted.items() if plane.count(split)}
        if not planes:
            return found
        nodes = union(plane.read(split) for plane in planes.values())
        encoder, again = task.model.encoder, self.validates(split)
        timed = self.time is not None  # then each seed has its own time, and tasks share no rows
        shared = nullcontext() if timed else self.inference.represented(encoder, nodes, again=again)
        with shared:
            for name, plane in planes.items():
                kept: Kept = {}
                values = plane.evaluate(task.of(name), split, kept)
                if keep is not None and kept:
                    keep[name] = kept[""]
                found |= {metric_name(name, key): value for key, value in values.items()}
        return found

    def predict(self, task: TaskModule, request: Request) -> Iterator[Predictions]:
        assert isinstance(task, MultitaskTask)
        return self.planes[request.task].predict(task.of(request.task), request)

    def positives(self) -> dict[str, str]:
        found = {name: plane.positives() for name, plane in self.planes.items()}
        return {name: words[""] for name, words in found.items() if words}

    def warnings(self) -> list[str]:
        found = {name: plane.warnings() for name, plane in self.planes.items()}
        return [f"task {name}: {text}" for name, texts in found.items() for text in texts]

    def count(self, split: str) -> int:
        """See `Plane`: seeds of all tasks, or of the requested one."""
        return sum(plane.count(split) for plane in self._wanted.values())

    @property
    def _wanted(self) -> dict[str, NodePlane | EdgePlane]:
        """Planes of the requested task, or of all."""
        name = self.job.request and self.job.request.task
        return {name: self.planes[name]} if name else self.planes

    def _check_selection(self) -> None:
        if not self.config.trains:
            return
        names = list(self.planes)
        there = [name for name in names if self.planes[name].count("val")]
        if there and there[0] != names[0]:
            raise ConfigError(
                f"{names[0]}, the first of the tasks, selects the best weights, but has no "
                "validation split",
                where=f"tasks.{names[0]}",
                remedy=f"list {there[0]} first, or add a validation split",
            )
