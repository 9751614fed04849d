"""What a job keeps in a node's memory, by what it is kept for."""

from __future__ import annotations

import math
from collections.abc import Mapping

from raygnn.config.schema import Config
from raygnn.config.values import NO_LAYERS
from raygnn.preflight.facts import PartitionFacts
from raygnn.preflight.job import Job

SHARE, CACHE, WEIGHTS, ROWS = (
    "its share of the partition",
    "the cache",
    "weights, gradients and optimizer state",
    "learned rows",
)
# what it is kept for → what to do if that is too much
REMEDIES = {
    SHARE: "add nodes (cluster.workers), or use nodes with more memory",
    CACHE: "lower sampling.cache, or use nodes with more memory",
    WEIGHTS: "lower model.hidden or model.layers, or set comm.shard",
    ROWS: "lower model.embedding.dim, or add nodes (cluster.workers)",
}


def memory_plan(job: Job, workers: int) -> dict[str, float]:
    """Bytes of a node with so many workers, about, by what they are kept for; batches and
    activations come on top. With GPUs the weights are in theirs.
    """
    config, facts = job.config, job.partition
    here = max(1, workers // max(1, len(job.holding)))  # workers that some node has at least
    part = min(1.0, here / max(1, workers))
    share, cache = facts.bytes * part, config.sampling.cache
    return {
        SHARE: share,
        CACHE: 0.0 if cache == "auto" else cache * (facts.bytes - share),
        WEIGHTS: 0.0 if config.cluster.gpus_per_worker else weight_bytes(job, workers) * here,
        ROWS: _row_bytes(config, facts) * part,
    }


def weight_bytes(job: Job, workers: int) -> float:
    """Of a worker's weights, gradients and optimizer state, in a step; see docs/sharding.md. Of
    the weights alone where nothing is trained."""
    config, state = job.config, _state_numbers(job.config)
    number = 2 if config.precision == "bf16" else 4
    if not config.trains:
        return parameters(config, job.partition) * number
    copies = {
        "none": 2 + state,
        "optimizer": 2 + state / workers,
        "full": (2 + state) / workers,
    }
    return parameters(config, job.partition) * number * copies[config.comm.shard]


def parameters(config: Config, facts: PartitionFacts) -> int:
    """How many weights the network has, about: a matrix for each layer and edge type. Of a class
    of the user's, and of a dataset that only the ranks open, 0."""
    model, task = config.model, config.task
    if ":" in model.kind or model.kind == NO_LAYERS:
        return 0
    widths = _widths(config, facts)
    into = [widths[etype[0]] for etype in facts.edges] or list(widths.values())
    # the classes are not known yet; what reads edges or graphs gets as much as a hidden layer gives
    last = model.hidden if config.tasks or task.of_edges or task.of_graphs else 1
    inputs = [sum(into), *[len(into) * model.hidden] * (model.layers - 1)]
    outputs = [*[model.hidden] * (model.layers - 1), last]
    return sum(width * out for width, out in zip(inputs, outputs, strict=True))


def _widths(config: Config, facts: PartitionFacts) -> dict[str, int]:
    """Node type → width of what goes into the first layer."""
    model, widths = config.model, {}
    for ntype in facts.nodes:
        columns = facts.columns.get(ntype, {})
        named = [columns[name][0] for name in model.feature_names if columns.get(name)]
        width = sum(math.prod(column.shape) for column in named)
        width += sum(size for name, size in model.categories.items() if name in columns)
        if model.embedding is not None and model.embedding.covers(ntype, bool(width)):
            width += model.embedding.dim
        widths[ntype] = width
    return widths


def _state_numbers(config: Config) -> int:
    """Numbers that the optimizer keeps for each weight."""
    train = config.train
    return int(train.momentum > 0) if train.optimizer == "sgd" else 2


def _row_bytes(config: Config, facts: PartitionFacts) -> float:
    """Of all learned rows, and where they are trained the state of their optimizer."""
    embedding = config.model.embedding
    if embedding is None:
        return 0.0
    rows = 0
    for ntype, number in facts.nodes.items():
        columns = facts.columns.get(ntype, {})
        names: Mapping[str, object] = {**config.model.categories}
        inputs = any(name in columns for name in (*config.model.feature_names, *names))
        rows += number if embedding.covers(ntype, inputs) else 0
    state = (2 if embedding.optimizer == "adam" else 1) if config.trains else 0
    return 4.0 * rows * embedding.dim * (1 + state)
