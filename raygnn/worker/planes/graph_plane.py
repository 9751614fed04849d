"""The data plane of many graphs, which are the seeds: collection → pattern → model → batches."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import torch
from torch import Tensor

from raygnn.checkpoint.weights import Weights
from raygnn.config.schema import Config
from raygnn.errors import DataError, InputError
from raygnn.graph.collection.mapped_collection import Collection, Sample, open_collection
from raygnn.models.network import GraphNetwork, GraphSchema
from raygnn.models.registry import build_graph_model
from raygnn.sampling.batch import EdgeType, GraphBatch, etype_str
from raygnn.sampling.collate import Collate, GraphBatchMaker, check_schema
from raygnn.sampling.features import Inputs, choose_edge_inputs, choose_inputs
from raygnn.sampling.seeds import as_labels, known
from raygnn.tasks.inference import graph_outputs
from raygnn.tasks.lightning_modules import TaskModule
from raygnn.worker.comm.process_groups import Ranks
from raygnn.worker.job import SPLITS, Job, Request, Sizes
from raygnn.worker.planes.plane import (
    Kept,
    Plane,
    build,
    category_sizes,
    loss_of,
    make_task,
    seed_plan,
)
from raygnn.worker.planes.prediction_rows import (
    NO_SPLIT,
    Embedded,
    Predictions,
    chunk_rows,
    numbers_of,
)

log = logging.getLogger("raygnn")


@dataclass
class GraphPlane(Plane):
    """A collection of graphs, which every rank sees.

    Attributes:
        pattern: graph whose schema all graphs must have.
        inputs: node type → the arrays that the model reads.
        edge_inputs: edge type → the arrays that the model reads, if there are any.
    """

    samples: Collection
    pattern: Sample
    inputs: dict[str, Inputs]
    edge_inputs: dict[EdgeType, Inputs]

    @classmethod
    def open(cls, job: Job, ranks: Ranks) -> GraphPlane:
        """Map the collection. Raises DataError if it cannot be read or trained on."""
        start = time.perf_counter()
        config = job.config
        others = job.others
        trains = others is None
        samples = job.read(lambda: open_collection(config, job.partition, others=not trains))
        train = samples.splits["train"]
        if not len(train) and trains:
            message = f"none of {samples.num} graphs is left to train on"
            remedy = "lower graph.val and graph.test, or provide more graphs"
            raise DataError(message, where=str(job.partition), remedy=remedy)
        pattern = samples[0] if others is None else _trained_on(others)
        model = config.model
        inputs = {
            t: choose_inputs(pattern.node_data.get(t, {}), model.feature_names, model.categories)
            for t in pattern.num_nodes
        }
        edge_inputs = choose_edge_inputs(
            {e: pattern.edge_data.get(e, {}) for e in pattern.edges},
            model.edge_feature_names,
            model.edge_category_widths,
        )
        _check_inputs(config, pattern, inputs)
        if not trains:
            check_schema(samples, pattern, {**inputs, **edge_inputs}, exact=model.takes_dgl)
        counts = ", ".join(f"{len(ids):,} {split}" for split, ids in samples.splits.items())
        seconds = time.perf_counter() - start
        log.info("%d graphs (%s); opened in %.1f s", samples.num, counts, seconds)
        return cls(job, ranks, samples, pattern, inputs, edge_inputs)

    def task(self) -> TaskModule:
        config, schema = self.config, self.schema
        model = build(config, lambda: build_graph_model(config.model, schema))
        loss = loss_of(self.job, self.ranks, self._trained, self.out_features)
        task = make_task(self.job, self.ranks, model, loss, self.out_features)
        self.ranks.synchronise(task)
        return task

    @cached_property
    def schema(self) -> GraphSchema:
        """Schema of the model."""
        pattern, model = self.pattern, self.config.model
        arrays, edge_arrays = pattern.node_data, pattern.edge_data
        return GraphSchema(
            in_features={t: i.width(arrays.get(t, {})) for t, i in self.inputs.items()},
            etypes=list(self.pattern.edges),
            out_features=self.out_features,
            categories=category_sizes(self.inputs, model.categories, self._count),
            edge_features={
                e: i.width(edge_arrays[e]) for e, i in self.edge_inputs.items() if i.plain
            },
            edge_categories=category_sizes(
                self.edge_inputs, model.edge_category_widths, self._count
            ),
        )

    def batches(self, task: TaskModule) -> GraphBatchMaker:
        return self._maker

    def evaluate(self, task: TaskModule, split: str, keep: Kept | None = None) -> dict[str, float]:
        mine = self._mine(self._numbers(split))
        outputs, y = self._outputs(task, mine)
        if self.job.others is not None:
            are = known(y)
            outputs, y = outputs[are], y[are]
            if not self.control.max(len(y)):
                raise DataError(
                    f"none of these graphs has a target {self.config.task.target!r}, so there is "
                    "nothing to compare with",
                    where=self._where,
                    remedy="predict their targets with raygnn predict",
                )
        return self.measured(outputs, y, task.loss, keep)

    def predict(self, task: TaskModule, request: Request) -> Iterator[Predictions]:
        for rows in self._chunks(task, request, self.out_features):
            yield Predictions(*rows)

    def embed(self, task: TaskModule, request: Request) -> Iterator[Embedded]:
        """Yield the pooled inputs of the last linear layer: see `Plane`."""
        model = task.model
        if not isinstance(model, GraphNetwork):
            message = "your own model class has no embeddings"
            remedy = "embeddings are available for the built-in kinds"
            raise InputError(message, where="model.kind", remedy=remedy)
        width, run = model.readout.in_features, model.represent
        for numbers, rows, _, splits in self._chunks(task, request, width, run):
            yield Embedded(numbers, rows, splits)

    def _chunks(
        self,
        task: TaskModule,
        request: Request,
        width: int,
        run: Callable[[GraphBatch], Tensor] | None = None,
    ) -> Iterator[tuple[np.ndarray, Tensor, Tensor, np.ndarray]]:
        """Yield numbers, outputs ``[n, width]``, targets and splits of this rank's part of the
        requested graphs, in chunks."""
        samples, chosen, size = self.samples, self._numbers(request.split), chunk_rows(width)
        splits = np.full(samples.num, NO_SPLIT, np.int8)
        for number, name in enumerate(SPLITS):
            splits[samples.splits[name]] = number
        if request.wanted is not None:
            chosen = np.intersect1d(chosen, numbers_of(request.wanted, None, samples.num))
        mine = self._mine(chosen)
        for start in range(0, len(mine), size):
            numbers = mine[start : start + size]
            outputs, y = self._outputs(task, numbers, run)
            yield numbers, outputs, y, splits[numbers]

    def _mine(self, numbers: np.ndarray) -> np.ndarray:
        """Return this rank's part of some graphs."""
        return numbers[self.ranks.world.rank :: self.ranks.world.size]

    def _numbers(self, split: str) -> np.ndarray:
        samples = self.samples
        return np.arange(samples.num) if split == "all" else np.sort(samples.splits[split])

    @property
    def _where(self) -> str:
        return str(self.job.partition)

    def outputs(self, task: TaskModule, samples: Sequence[Sample]) -> Tensor:
        """Return the outputs, float32 ``[n, out_features]``, of graphs of the same schema that are
        not in the collection."""
        return self._outputs(task, np.arange(len(samples)), among=samples)[0]

    def _outputs(
        self,
        task: TaskModule,
        numbers: np.ndarray,
        run: Callable[[GraphBatch], Tensor] | None = None,
        among: Sequence[Sample] | None = None,
    ) -> tuple[Tensor, Tensor]:
        sampling, device = self.config.sampling, self.ranks.device
        size = sampling.eval_batch_size or sampling.batch_size
        join = partial(self._maker.join, among=among)
        return graph_outputs(task, join, numbers, size, device, run or task.checked)

    @cached_property
    def sizes(self) -> Sizes:
        request = self.job.request
        return Sizes(None if request is None else request.sizes, self.pattern.describe())

    @property
    def identity(self) -> str:
        return self._maker.identity

    def count(self, split: str) -> int:
        return len(self._numbers(split))

    @cached_property
    def _maker(self) -> GraphBatchMaker:
        train, config = self.samples.splits["train"], self.config
        whole = config.model.takes_dgl
        collate = Collate(
            pattern=self.pattern,
            inputs=self.inputs,
            edge_inputs={} if whole else self.edge_inputs,
            dtype=config.arithmetic.dtype,
            whole=whole,
            classes=self.out_features if config.task.classifies else None,
            asked=self.job.others is not None,
            labels=config.task.several_labels,
        )
        return GraphBatchMaker(
            plan=seed_plan(self.job, len(train)),
            samples=self.samples,
            numbers=train,
            exchange=self.ranks.data,
            collate=collate,
        )

    def _trained(self) -> Tensor:
        mine = self._mine(self.samples.splits["train"])
        return self._targets()[torch.from_numpy(mine)].long()

    def _targets(self) -> Tensor:
        targets = self.samples.targets()
        return as_labels(targets, self._where) if self.config.task.several_labels else targets

    @cached_property
    def out_features(self) -> int:
        y, task, trains = self.pattern.y, self.config.task, self.job.others is None
        if task.several_labels and trains and not (self._targets() >= 0).any():
            message = f"no graph has a known label {task.target!r}"
            remedy = "provide labels of 0 and 1; -1 and NaN are unknown"
            raise DataError(message, where=self._where, remedy=remedy)
        if not task.classifies:
            return 1 if y is None else max(1, y.numel())
        classes = self.samples.num_classes or 0
        return self.sizes.resolve("classes", max(2, classes) if trains else classes)

    def _count(self, kind: str | EdgeType, name: str) -> int:
        what = f"categories of {kind if isinstance(kind, str) else etype_str(kind)}/{name}"
        return self.sizes.resolve(what, max(1, self._highest(kind, name) + 1))

    def _highest(self, kind: str | EdgeType, name: str) -> int:
        """Return the highest category in an array of a node or edge type, over all graphs; -1 if
        there is none."""
        column = self.samples.column(kind, name)
        if column is None or not len(column[0]):
            return -1
        values, dtype = column
        if "float" in dtype:
            problem, remedy = f"is {dtype}", "provide whole numbers from 0"
        elif values.min() < 0:
            problem, remedy = "has categories below 0", "number them from 0"
        else:
            return int(values.max())
        of = f"node type {kind!r}" if isinstance(kind, str) else f"edge type {etype_str(kind)!r}"
        raise DataError(f"array {name!r} of {of} {problem}", where=self._where, remedy=remedy)


def _trained_on(weights: Weights) -> Sample:
    try:
        return Sample.from_description(weights.like or {})
    except ValueError:
        message = "its schema of the training graphs is invalid"
        where = str(weights.path.with_suffix(".json"))
        remedy = "restore the file that training wrote, or train again"
        raise DataError(message, where=where, remedy=remedy) from None


def _check_inputs(config: Config, pattern: Sample, inputs: dict[str, Inputs]) -> None:
    named = " or ".join(map(repr, (*config.model.feature_names, *config.model.categories)))
    for ntype, chosen in inputs.items():
        if not (chosen.plain or chosen.scaled or chosen.categories):
            there = ", ".join(sorted(pattern.node_data.get(ntype, {}))) or "none"
            raise DataError(
                f"nodes of type {ntype!r} have no array {named} (model.features); the existing "
                f"arrays are: {there}",
                remedy="set model.features to existing arrays",
            )
