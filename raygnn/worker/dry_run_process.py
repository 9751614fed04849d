"""Process of a dry run: see `raygnn.driver.dry_run`."""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import signal
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import torch.distributed as dist

from raygnn.config.schema import Config
from raygnn.errors import ClassError, ConfigError, RaygnnError, error_text, plain_text, trace_text
from raygnn.graph.data import MASKS, TABLE, EdgeFrame, EdgeType, GraphData, NodeFrame, TrainingRows
from raygnn.graph.outofcore.divide import make_partition
from raygnn.graph.partition.make import Missing
from raygnn.preflight.facts import ArrayType
from raygnn.runs.diagnose.causes import frames, own_modules, where
from raygnn.sampling.exchange import World
from raygnn.tasks.metrics import every_class, own_metric
from raygnn.util.files import write_atomic
from raygnn.worker.callbacks import user_hooks
from raygnn.worker.comm.process_groups import Ranks
from raygnn.worker.job import OUTCOME, DryRunRequest, Job
from raygnn.worker.planes import open_plane

_NODES = 32  # of each type
_DEGREE = 8  # in-edges of each node, of each edge type
_BATCH = 8  # seeds
_NOW = 1_700_000_000  # of times, so that dates and durations of the config apply
_WHOLE = 2  # integer arrays that are not classes hold smaller numbers

_OWN = ("model.", "task.", "train.callbacks")  # keys that name the user's classes
_REMEDY = (
    "correct the model there: forward gets the features and as many DGL blocks as "
    "sampling.fanout has numbers, whose only data are the arrays of model.edge_features"
)
_FUNCTION_REMEDY = (
    "correct the function there: it is called as function(outputs, targets), with tensors of one "
    "row per seed"
)
_GRAPH_REMEDY = "correct the model there: forward gets a batched DGL graph and its features"


def main() -> None:
    """Run the request of standard input, and write the outcome to the directory in ``argv``."""
    directory = Path(sys.argv[1])
    request: DryRunRequest = pickle.load(sys.stdin.buffer)
    signal.alarm(request.lifetime)
    sys.path[:] = request.path
    outcome: dict[str, Any] = {"what": None}
    trial = DryRunRank(request, directory)
    try:
        # a process group of this process alone, since a model may read its rank
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        trial.run()
    except BaseException as error:  # a model may raise SystemExit, too
        outcome = describe(error, request.config, sure=trial.stepping)
    sys.stdout.flush()
    write_atomic(directory / OUTCOME, json.dumps(outcome))
    os._exit(0)  # do not wait for the model's threads


class DryRunRank:
    """A rank that trains on one batch of a small graph, or of a few graphs. ``stepping``: the model
    has received the batch."""

    def __init__(self, request: DryRunRequest, directory: Path):
        self._request = request
        self._directory = directory
        self.stepping = False

    def run(self) -> None:
        """Construct the callbacks, build a batch as a rank does, and run forward and backward.
        Raises as the model does, or about its outputs."""
        job = self._job()
        config = job.config
        torch.set_num_threads(config.cluster.cpus_per_worker)
        ranks = Ranks(config, World(0, 1), torch.device("cpu"))
        if hooks := user_hooks(config.train):  # Lightning prints its own lines
            check_callbacks(hooks)
        plane = open_plane(job, ranks)
        task: Any = plane.task().train()
        batch: Any = plane.batches(task)(0, 0)
        if task.embeddings is not None:
            batch = task.embeddings.join(batch, ranks.device)
        mixed = config.arithmetic.autocast == "bf16-mixed"
        self.stepping = True
        task.on_train_batch_start(batch, 0)
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
            loss = task.training_step(batch, 0)
        task.on_before_backward(loss)
        loss.backward()
        for name, one in config.by_task.items():
            if "metric" in one.task.own:
                y = batch.parts[name].y if name else batch.y
                out = task.of(name).out_features if name else task.out_features
                y = every_class(one.task, y, out)
                own_metric(one.task, torch.zeros(len(y), out), y)

    def _job(self) -> Job:
        request, directory = self._request, self._directory
        staging = request.config.staging.model_copy(update={"path": directory / "stage"})
        config = request.config.model_copy(update={"staging": staging})
        place = request.collection
        if not config.task.of_graphs:
            place = directory / "partition"
            make_partition(Missing(place, 1, "random", "", {}, place), small_graph(request))
        assert place is not None
        return Job(
            config=config,
            partition=place,
            run_dir=directory,
            goals=request.goals,
            replicated=True,
            started=0.0,
            global_batch=min(_BATCH, config.sampling.batch_size),
            lists={name: {TABLE: _placed(rows)} for name, rows in request.rows.items()},
        )


def check_callbacks(callbacks: list[pl.Callback]) -> None:
    """Raise ConfigError unless a trainer accepts the callbacks, and checkpoints can hold their
    states."""
    what, remedy = "Lightning refuses the callbacks", "remove those that write checkpoints"
    try:
        pl.Trainer(accelerator="cpu", callbacks=callbacks, enable_checkpointing=False, logger=False)
        for callback in callbacks:
            what = f"a checkpoint cannot hold the state of {type(callback).__name__}"
            remedy = "return plain values and tensors from state_dict"
            kept = io.BytesIO()
            torch.save(callback.state_dict(), kept)
            torch.load(io.BytesIO(kept.getvalue()), weights_only=True)
    except Exception as error:
        said = error_text(error).partition("\n")[0]
        raise ConfigError(f"{what}: {said}", where="train.callbacks", remedy=remedy) from error


def _placed(rows: TrainingRows) -> TrainingRows:
    """Return rows of a training table as rows of the small graph, later than its edges."""
    times = None if rows.times is None else np.full_like(rows.times, _NOW + _WHOLE)
    return replace(rows, nodes=rows.nodes % _NODES, times=times, in_microseconds=False)


def small_graph(request: DryRunRequest) -> GraphData:
    """Return a graph of random numbers with the types and arrays of the real one.

    Every node has in-edges of each possible type, since some layers of ``dgl.nn`` refuse nodes
    without, and it is unknown whether the real graph has such nodes.
    """
    facts, rng = request.facts, np.random.default_rng(0)
    classes, times = _classes(request), _times(request.config)

    def arrays(kind: str | EdgeType, num: int, columns: Mapping[str, ArrayType]) -> dict[str, Any]:
        return {
            name: _array(rng, num, name, column, classes.get((kind, name)), times)
            for name, column in columns.items()
        }

    nodes, edges = {}, {}
    for ntype in facts.nodes:
        columns = {n: c[0] for n, c in facts.columns.get(ntype, {}).items() if c}
        nodes[ntype] = NodeFrame(_NODES, arrays(ntype, _NODES, columns))
    for etype, edge_columns in facts.edges.items():
        dst = np.repeat(np.arange(_NODES), _DEGREE)
        src = rng.integers(0, _NODES, len(dst))
        edges[etype] = EdgeFrame(src, dst, arrays(etype, len(dst), edge_columns))
    return GraphData("small", nodes, edges, reverses=dict(facts.reverses))


def _classes(request: DryRunRequest) -> dict[tuple[str | EdgeType, str], int]:
    found: dict[tuple[str | EdgeType, str], int] = {}
    for name, goal in request.goals.items():
        kind = goal.edges.etype if goal.edges else goal.ntype
        if name in request.classes and kind is not None:
            found[kind, request.config.of(name).task.target] = request.classes[name]
    return found


def _times(config: Config) -> set[str | None]:
    time = config.sampling.time
    splits = {*config.model.ages, *(one.split_time for one in config.by_task.values())}
    return splits if time is None else {*splits, time.edges, time.seeds}


def _array(
    rng: np.random.Generator,
    num: int,
    name: str,
    column: ArrayType,
    classes: int | None,
    times: set[str | None],
) -> Any:
    shape, dtype = (num, *column.shape), column.dtype
    if name in MASKS:  # six of eight are for training, also of each node's in-edges
        split = np.maximum(np.arange(num) % _DEGREE - (_DEGREE - 3), 0)
        return (split == MASKS.index(name)).astype(dtype).reshape(num, *[1] * len(column.shape))
    if classes is not None:
        values = rng.integers(0, classes, shape)
        values.flat[0] = classes - 1
        return values.astype(dtype)
    if dtype == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    if re.match("u?int", dtype):
        whole = rng.integers(0, _WHOLE, shape)
        return (whole + _NOW if name in times else whole).astype(dtype)
    # from 0 to 1, since a model may use them as indices, and weights are not negative
    numbers = torch.from_numpy(rng.random(shape))
    return numbers.bfloat16() if dtype == "bfloat16" else numbers.numpy().astype(dtype)


def describe(error: BaseException, config: Config, *, sure: bool) -> dict[str, Any]:
    """Describe an error. ``sure``: the error was raised while the model worked on the batch; an
    earlier one is the model's only if the trace or the error says so."""
    place = where(frames(trace_text(error), own_modules(config.to_dict())))
    at = str(place) if place is not None and place.whose == "user" else None
    remedy = _GRAPH_REMEDY if config.task.of_graphs else _REMEDY
    if not config.model.takes_dgl:
        remedy = "correct it there: docs/models.md describes the arguments of your own classes"
    if ":" not in config.model.kind + config.task.kind:
        remedy = _FUNCTION_REMEDY
    ours = error if isinstance(error, RaygnnError) else None
    return {
        "what": error_text(error) if ours is None else plain_text(ours.what),
        "where": at or (ours and ours.where),
        "remedy": (ours and ours.remedy) or remedy,
        "key": ours.where if isinstance(ours, ClassError) else None,
        # the real step has a trainer
        "sure": (sure or at is not None or str(ours and ours.where).startswith(_OWN))
        and "not attached to a `Trainer`" not in str(error),
    }


if __name__ == "__main__":
    main()
