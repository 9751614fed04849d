"""The job that every peer does, its model in DGL's own layers, and how it is timed: some steps of
it (`Result`), or all of it with its evaluations (`Job`)."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raygnn.graph.dgl import dgl

BATCH = 1000  # seeds per worker and step
FANOUT = (15, 10)  # from the seeds outward
HIDDEN = 256
CLASSES = 47
LEARNING_RATE = 0.003
SEED = 0
WARM_UP = 5  # steps before the first that counts


class Report:
    """What a peer prints as one line of JSON."""

    def line(self) -> str:
        return json.dumps(asdict(self))  # type: ignore[call-overload]

    @classmethod
    def find(cls, output: str) -> Self:
        """The line among all else that a program (and DGL in it) wrote."""
        start = f'{{"{fields(cls)[0].name}"'  # type: ignore[arg-type]
        _, found, line = output.rpartition(start)
        if not found:
            raise RuntimeError(f"a peer ended without a result:\n{output[-4000:]}")
        return cls(**json.loads(found + line.partition("\n")[0]))


@dataclass(frozen=True)
class Result(Report):
    """What one run measured.

    Attributes:
        seeds_per_second: of all workers together, over all steps that count.
        milliseconds: ``sample``, ``features`` and ``compute`` (forward, backward and what the
            workers say to each other in it, update) of one step; means over steps and workers.
        median_step: milliseconds, of the slowest worker.
        inputs: nodes whose features one step reads, the mean over steps and workers.
        steps: of each worker, those that count.
        workers, threads: in all; the threads of servers and loader processes are not in it.
        loss: of the last step, the mean over workers.
    """

    seeds_per_second: float
    milliseconds: dict[str, float]
    median_step: float
    inputs: float
    steps: int
    workers: int
    threads: int
    loss: float

    @staticmethod
    def together(each: list[Result]) -> Result:
        """Of workers that step together, from what each of them measured."""
        split = each[0].milliseconds
        return Result(
            # the last one to finish is whom they all wait for
            seeds_per_second=len(each) * min(result.seeds_per_second for result in each),
            milliseconds={
                part: statistics.fmean(result.milliseconds[part] for result in each)
                for part in split
            },
            median_step=max(result.median_step for result in each),
            inputs=statistics.fmean(result.inputs for result in each),
            steps=each[0].steps,
            workers=len(each),
            threads=sum(result.threads for result in each),
            loss=statistics.fmean(result.loss for result in each),
        )


@dataclass(frozen=True)
class Job(Report):
    """A whole job of some epochs, with an evaluation after each.

    Attributes:
        epoch_seconds: of the steps of each epoch.
        evaluation_seconds: of each evaluation; the last may be the test's.
        test: accuracy on the test nodes, of 1.
        finished: Unix time at which it was known.
    """

    epoch_seconds: list[float]
    evaluation_seconds: list[float]
    test: float
    finished: float


class SAGE(nn.Module):
    """GraphSAGE with mean aggregation (Hamilton et al. 2017), two layers of DGL's own.

    Without dropout, which takes longer on a CPU than the rest of the model does and would hide
    what is compared.
    """

    def __init__(self, features: int):
        super().__init__()
        conv = dgl().nn.SAGEConv
        self.widths = (features, HIDDEN, CLASSES)
        self.layers = nn.ModuleList([conv(a, b, "mean") for a, b in pairwise(self.widths)])

    def forward(self, blocks: list[Any], x: Tensor) -> Tensor:
        return self.layers[1](blocks[1], F.relu(self.layers[0](blocks[0], x)))


def sampler() -> Any:
    """DGL's neighbour sampler; it wants the layer at the seeds last."""
    return dgl().dataloading.NeighborSampler(list(reversed(FANOUT)))


def measure(
    loader: Iterable[Any],
    fetch: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    model: nn.Module,
    steps: int,
    together: Callable[[], None],
) -> Result:
    """Train for WARM_UP steps that do not count and ``steps`` that do.

    Args:
        loader: gives (input nodes, seeds, blocks), epoch after epoch.
        fetch: input nodes and seeds → their features and labels.
        together: called before the first step that counts, for workers to start as one.
    """
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    model.train()
    batches = _endless(loader)
    marks: list[tuple[float, ...]] = []
    inputs: list[int] = []
    for step in range(WARM_UP + steps):
        if step == WARM_UP:
            together()
            marks.clear()
            inputs.clear()
        started = time.perf_counter()
        input_nodes, seeds, blocks = next(batches)
        sampled = time.perf_counter()
        x, label = fetch(input_nodes, seeds)
        fetched = time.perf_counter()
        loss = F.cross_entropy(model(blocks, x), label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        marks.append((started, sampled, fetched, time.perf_counter()))
        inputs.append(len(input_nodes))
    parts = zip(*([end - start for start, end in pairwise(mark)] for mark in marks))
    return Result(
        seeds_per_second=BATCH * steps / (marks[-1][-1] - marks[0][0]),
        milliseconds={
            name: 1000 * statistics.fmean(part)
            for name, part in zip(("sample", "features", "compute"), parts)
        },
        median_step=1000 * statistics.median(mark[-1] - mark[0] for mark in marks),
        inputs=statistics.fmean(inputs),
        steps=steps,
        workers=1,
        threads=torch.get_num_threads(),
        loss=float(loss.detach()),
    )


def _endless(loader: Iterable[Any]) -> Iterator[Any]:
    while True:
        empty = True
        for batch in loader:
            empty = False
            yield batch
        if empty:
            raise RuntimeError(f"there are fewer than {BATCH} training nodes for a worker")


def train_whole(
    loader: Iterable[Any],
    fetch: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    model: nn.Module,
    epochs: int,
    evaluate: Callable[[bool], float],
) -> Job:
    """Train for some epochs.

    Args:
        loader: gives (input nodes, seeds, blocks) of one epoch.
        fetch: input nodes and seeds → their features and labels.
        evaluate: called after each epoch, True for the last; returns an accuracy, of the test nodes
            at the last.
    """
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    steps, evaluations = [], []
    accuracy = 0.0
    for epoch in range(epochs):
        started = time.perf_counter()
        model.train()
        for input_nodes, seeds, blocks in loader:
            x, label = fetch(input_nodes, seeds)
            loss = F.cross_entropy(model(blocks, x), label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        trained = time.perf_counter()
        model.eval()
        with torch.no_grad():
            accuracy = evaluate(epoch == epochs - 1)
        steps.append(trained - started)
        evaluations.append(time.perf_counter() - trained)
    return Job(steps, evaluations, accuracy, time.time())
