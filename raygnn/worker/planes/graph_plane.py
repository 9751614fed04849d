"""The data plane of many graphs, which are the seeds: dataset → pattern → model → batches."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raygnn.checkpoint.weights import Weights
from raygnn.config.schema import Config
from raygnn.errors import DataError, InputError, RaygnnError
from raygnn.graph.collection import open_samples, read_collection
from raygnn.graph.collection.mapped_collection import Sample, Samples
from raygnn.models.network import GraphNetwork, GraphSchema
from raygnn.models.registry import build_graph_model
from raygnn.sampling.batch import EdgeType, GraphBatch, etype_str
from raygnn.sampling.collate import Collate, GraphBatchMaker, arrays_of, find_pattern, get
from raygnn.sampling.features import Inputs, choose_edge_inputs, choose_inputs
from raygnn.sampling.seeds import as_labels, known
from raygnn.tasks.inference import graph_outputs
from raygnn.tasks.lightning_modules import TaskModule
from raygnn.tasks.metrics import measure
from raygnn.worker import blackbox
from raygnn.worker.comm.process_groups import Ranks
from raygnn.worker.job import SPLITS, Job, Request, Sizes
from raygnn.worker.planes.plane import Kept, Traffic, build, loss_of, make_task, seed_plan
from raygnn.worker.planes.prediction_rows import (
    NO_SPLIT,
    Embedded,
    Predictions,
    chunk_rows,
    numbers_of,
)
from raygnn.worker.planes.vocabulary import positive_class, positive_word

log = logging.getLogger("raygnn")


@dataclass
class GraphPlane:
    """A dataset of graphs, which every rank sees.

    Attributes:
        pattern: graph whose schema all graphs must have.
        inputs: node type → the arrays that the model reads.
        edge_inputs: edge type → the arrays that the model reads, if there are any.
    """

    job: Job
    ranks: Ranks
    samples: Samples
    pattern: Sample
    inputs: dict[str, Inputs]
    edge_inputs: dict[EdgeType, Inputs]

    @classmethod
    def open(cls, job: Job, ranks: Ranks) -> GraphPlane:
        """Map the collection, or construct the user's dataset.

        Raises:
            ConfigError: the dataset cannot be imported or constructed.
            DataError: it cannot be read or trained on.
            Exception: as the user's dataset does.
        """
        start = time.perf_counter()
        config = job.config
        others = job.others
        samples = job.read(lambda: open_samples(config, job.partition, others=others is not None))
        train = samples.splits["train"]
        if not len(train) and others is None:
            raise DataError(
                f"none of {samples.num} graphs is left to train on",
                where=str(job.partition or "graph.dataset"),
                remedy="lower graph.val and graph.test, or give more graphs",
            )
        if others is not None:
            pattern = _trained_on(others)
        else:
            pattern = find_pattern(samples, train, config.guard.bad_samples > 0)
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
        counts = ", ".join(f"{len(ids):,} {split}" for split, ids in samples.splits.items())
        seconds = time.perf_counter() - start
        log.info("%d graphs (%s); opened in %.1f s", samples.num, counts, seconds)
        return cls(job, ranks, samples, pattern, inputs, edge_inputs)

    @property
    def config(self) -> Config:
        return self.job.config

    def task(self) -> TaskModule:
        config = self.config
        schema = self.schema
        model = build(config, lambda: build_graph_model(config.model, schema))
        loss = loss_of(self.job, self.ranks, self._trained, schema.out_features)
        task = make_task(self.job, self.ranks, model, loss, schema.out_features)
        self.ranks.synchronise(task)
        return task

    @cached_property
    def schema(self) -> GraphSchema:
        """Schema of the model. Collective."""
        pattern, model = self.pattern, self.config.model
        arrays, edge_arrays = pattern.node_data, pattern.edge_data
        widths, edge_widths = model.categories, model.edge_category_widths
        return GraphSchema(
            in_features={t: i.width(arrays.get(t, {})) for t, i in self.inputs.items()},
            etypes=list(self.pattern.edges),
            out_features=self._out_features(),
            categories={
                t: {n: (self._count(t, n), widths[n]) for n in i.categories}
                for t, i in self.inputs.items()
                if i.categories
            },
            edge_features={
                e: i.width(edge_arrays[e]) for e, i in self.edge_inputs.items() if i.plain
            },
            edge_categories={
                e: {n: (self._count(e, n), edge_widths[n]) for n in i.categories}
                for e, i in self.edge_inputs.items()
                if i.categories
            },
        )

    def batches(self, task: TaskModule) -> GraphBatchMaker:
        return self._maker

    @property
    def traffic(self) -> Traffic:
        return Traffic(skipped=len(self._maker.skipped))

    def evaluate(self, task: TaskModule, split: str, keep: Kept | None = None) -> dict[str, float]:
        world, config = self.ranks.world, self.config
        mine = self._numbers(split)[world.rank :: world.size]
        _, outputs, y = self._outputs(task, mine)
        left_out = self._left_out(len(y), len(mine), split)
        if self.job.others is not None:
            are = known(y)
            outputs, y = outputs[are], y[are]
            if not self.ranks.control.max(len(y)):
                raise DataError(
                    f"none of these graphs has a target {config.task.target!r}, so there is "
                    "nothing to compare with",
                    where=self._where,
                    remedy="see what the model says of them with raygnn predict",
                )
        of_class = config.task.classifies
        positive = positive_class(self.job, self.schema.out_features) if of_class else None
        values = measure(outputs, y, config.task, task.loss, self.ranks.control, positive, keep)
        return {**values, "left_out": float(left_out)} if left_out else values

    def predict(self, task: TaskModule, request: Request) -> Iterator[Predictions]:
        """See `Plane`; skipped graphs have no row."""
        for rows in self._chunks(task, request, self.schema.out_features):
            yield Predictions(*rows)

    def embed(self, task: TaskModule, request: Request) -> Iterator[Embedded]:
        """Yield the pooled inputs of the last linear layer: see `Plane`."""
        model = task.model
        if not isinstance(model, GraphNetwork):
            raise InputError(
                "your own model class has no embeddings",
                where="model.kind",
                remedy="embeddings are available for the built-in kinds",
            )
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
        requested graphs, in chunks. Collective."""
        mine, splits = self._asked(request)
        size, found = chunk_rows(width), 0
        for start in range(0, len(mine), size):
            there, outputs, y = self._outputs(task, mine[start : start + size], run)
            found += len(there)
            if len(there):
                yield there.numpy(), outputs, y, splits[there.numpy()]
        self._left_out(found, len(mine), request.split)

    def _asked(self, request: Request) -> tuple[np.ndarray, np.ndarray]:
        """Return the numbers of this rank's part of the requested graphs, ascending, and the splits
        of all graphs; see `Predictions`."""
        world, samples, split = self.ranks.world, self.samples, request.split
        splits = np.full(samples.num, NO_SPLIT, np.int8)
        for number, name in enumerate(SPLITS):
            splits[samples.splits[name]] = number
        chosen = self._numbers(split)
        if request.wanted is not None:
            chosen = np.intersect1d(chosen, numbers_of(request.wanted, None, samples.num))
        return chosen[world.rank :: world.size], splits

    def _numbers(self, split: str) -> np.ndarray:
        samples = self.samples
        return np.arange(samples.num) if split == "all" else np.sort(samples.splits[split])

    def _left_out(self, there: int, asked: int, split: str) -> int:
        """Return the number of graphs that could not be loaded, over all ranks. Collective.

        Args:
            there: number of graphs that this rank has loaded, of ``asked``.
        """
        counts = torch.tensor([there, asked - there])
        there, left_out = self.ranks.control.sum(counts).tolist()
        if left_out and not there:
            raise DataError(
                f"none of the graphs of split {split} can be loaded",
                where=self._where,
                remedy="see the ranks' logs for what was wrong with them",
            )
        return left_out

    @property
    def _where(self) -> str:
        return str(self.job.partition or "graph.dataset")

    def _outputs(
        self,
        task: TaskModule,
        numbers: np.ndarray,
        run: Callable[[GraphBatch], Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        sampling = self.config.sampling
        size = sampling.eval_batch_size or sampling.batch_size
        return graph_outputs(
            task, self._maker.join, numbers, size, self.ranks.device, run or task.checked
        )

    @cached_property
    def sizes(self) -> Sizes:
        request = self.job.request
        return Sizes(None if request is None else request.sizes, self.pattern.describe())

    @property
    def identity(self) -> str:
        return self._maker.identity

    def warnings(self) -> list[str]:
        return []

    def positives(self) -> dict[str, str]:
        if not self.config.task.classifies:
            return {}
        word = positive_word(self.job, self.schema.out_features)
        return {} if word is None else {"": word}

    def count(self, split: str) -> int:
        return len(self._numbers(split))

    @cached_property
    def _maker(self) -> GraphBatchMaker:
        config, place = self.config, self.job.partition
        meta = None if place is None else self.job.read(lambda: read_collection(Path(str(place))))
        train = self.samples.splits["train"]
        return GraphBatchMaker(
            plan=seed_plan(self.job, len(train)),
            samples=self.samples,
            numbers=train,
            exchange=self.ranks.data,
            collate=self._collate(),
            data="" if meta is None else meta.digest,
            skip=config.guard.bad_samples > 0,
            most_skipped=config.guard.bad_samples,
            note=blackbox.note,
        )

    def _trained(self) -> Tensor:
        world, size = self.ranks.world, 1024
        mine = self.samples.splits["train"][world.rank :: world.size]
        starts = range(0, max(1, len(mine)), size)
        batches = [self._maker.join(mine[start : start + size]) for start in starts]
        return torch.cat([batch.y[batch.weight > 0] for batch in batches])

    def _collate(self) -> Collate:
        config, schema = self.config, self.schema
        whole = config.model.takes_dgl
        categories: dict[Any, dict[str, tuple[int, int]]]
        categories = {**schema.categories, **schema.edge_categories}
        return Collate(
            pattern=self.pattern,
            inputs=self.inputs,
            edge_inputs={} if whole else self.edge_inputs,
            dtype=config.arithmetic.dtype,
            whole=whole,
            classes=schema.out_features if config.task.classifies else None,
            categories={
                kind: {name: count for name, (count, _) in named.items()}
                for kind, named in categories.items()
            },
            asked=self.job.others is not None,
            labels=config.task.several_labels,
        )

    def _out_features(self) -> int:
        y, task = self.pattern.y, self.config.task
        if task.several_labels and self.job.others is None and self._highest("", "") < 0:
            raise DataError(
                f"no graph has a known label {task.target!r}",
                where=self._where,
                remedy="provide labels of 0 and 1; -1 and NaN are unknown",
            )
        if not task.classifies:
            return 1 if y is None else max(1, y.numel())
        known = self.samples.num_classes
        if self.job.others is not None:  # graphs with higher ones are refused one by one
            return self.sizes.resolve("classes", known or 0)
        known = self._highest("", "") + 1 if known is None else known
        return self.sizes.resolve("classes", max(2, known))

    def _count(self, kind: str | EdgeType, name: str) -> int:
        what = f"categories of {kind if isinstance(kind, str) else etype_str(kind)}/{name}"
        if self.job.others is not None:
            return self.sizes.resolve(what, 0)
        return self.sizes.resolve(what, max(1, self._highest(kind, name) + 1))

    def _highest(self, kind: str | EdgeType, name: str) -> int:
        """Return the highest number in an array of a node or edge type in all graphs, or of the
        targets (``""``). Collective; each rank reads its part of the graphs."""
        world, highest, lowest = self.ranks.world, -1, 0
        skip = self.config.guard.bad_samples > 0
        used = np.concatenate(list(self.samples.splits.values()))
        for number in used[world.rank :: world.size].tolist():
            try:
                sample = get(self.samples, number)
                values = arrays_of(sample, kind).get(name) if name else sample.y
                if not name and self.config.task.several_labels and values is not None:
                    values = as_labels(values, f"graph {number} of the dataset")
                    values = values[values >= 0]
                low, high = _range(number, values)
            except RaygnnError:
                if not skip:
                    raise
                continue  # reported when it is loaded for training
            if low < 0 and skip:
                continue
            highest, lowest = max(highest, high), min(lowest, low)
        of = f"node type {kind!r}" if isinstance(kind, str) else f"edge type {etype_str(kind)!r}"
        what = f"array {name!r} of {of} has categories" if name else "targets are"
        if self.ranks.control.max(-lowest) > 0:
            raise DataError(f"{what} below 0", where=self._where, remedy="number them from 0")
        return self.ranks.control.max(highest)


def _trained_on(weights: Weights) -> Sample:
    """Return the schema of the training graphs."""
    try:
        return Sample.from_description(weights.like or {})
    except (ValueError, KeyError, TypeError, AttributeError):
        raise DataError(
            "its schema of the training graphs is invalid",
            where=str(weights.path.with_suffix(".json")),
            remedy="restore the file that training wrote, or train again",
        ) from None


def _range(number: int, values: Tensor | None) -> tuple[int, int]:
    if values is None or not values.numel():
        return 0, -1
    if values.is_floating_point():
        raise DataError(
            f"graph {number} has {values.dtype} where whole numbers are expected",
            where=f"graph {number} of the dataset",
            remedy="give class numbers from 0, or set task.kind to graph_regression",
        )
    return int(values.min()), int(values.max())


def _check_inputs(config: Config, pattern: Sample, inputs: dict[str, Inputs]) -> None:
    for ntype, chosen in inputs.items():
        if chosen.plain or chosen.scaled or chosen.categories:
            continue
        there = ", ".join(sorted(pattern.node_data.get(ntype, {}))) or "none"
        named = " or ".join(
            repr(n) for n in (*config.model.feature_names, *config.model.categories)
        )
        raise DataError(
            f"nodes of type {ntype!r} have no array {named} (model.features); there are: {there}",
            remedy="set model.features to existing arrays",
        )
