"""Dry run: one batch through the user's code, in a separate process, before anything starts.

The process builds a small graph with the types, arrays, dtypes and widths of the real one, samples
a batch as a rank does, and runs forward and backward on the CPU.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from raygnn.config.schema import Config
from raygnn.config.task import ClassTask, TaskConfig
from raygnn.driver.inputs import CollectionInput, Input
from raygnn.driver.ray_cluster import how_it_ended
from raygnn.errors import ConfigError
from raygnn.graph.collection import MissingCollection
from raygnn.graph.data import TABLE, EdgeFrame, NodeFrame, TrainingRows, etype_str
from raygnn.graph.partition.dgl_format import read_tensors
from raygnn.preflight.facts import PartitionFacts
from raygnn.preflight.findings import Finding, error, warn
from raygnn.worker.job import OUTCOME, DryRunRequest, TaskTarget

LIMIT = 120.0  # seconds, including imports of torch and DGL
_ROWS = 64  # of a training table
_OUTPUT = 500  # characters of the process's last output that a finding quotes

# errors of a model for GPUs on a machine without one
_NEEDS_GPU = re.compile(r"cuda|\bgpus?\b|nvidia|triton|\brocm\b|not implemented for '", re.I)


def request_of(
    config: Config,
    given: Input,
    facts: PartitionFacts,
    goals: Mapping[str, TaskTarget],
    lists: Mapping[str, Mapping[str, Any]],
) -> DryRunRequest | None:
    """Return the request of a dry run; None if no user code takes part in steps, or if a target is
    missing, which other findings report. ``lists``: see `Job`."""
    ready = config.task.of_graphs or all(g.ntype is not None or g.edges for g in goals.values())
    if not config.own_steps or not config.trains or not ready:
        return None
    rows = {name: _few(found[TABLE]) for name, found in lists.items() if TABLE in found}
    classes: dict[str, int] = {}
    for name in (each for each in goals if each not in rows):
        task = config.of(name).task
        if task.several_labels:
            classes[name] = 2
        elif task.classifies and (count := _classes(given, goals[name], task)) is not None:
            classes[name] = count
    collection = given.place if config.task.of_graphs else None
    end = math.ceil(2 * LIMIT)
    return DryRunRequest(config, facts, goals, classes, rows, collection, tuple(sys.path), end)


def _few(rows: TrainingRows) -> TrainingRows:
    """Return some of the rows for training."""
    some = (rows.splits == 0).nonzero()[0][:_ROWS]
    times = None if rows.times is None else rows.times[some]
    chosen = {"nodes": rows.nodes[some], "splits": rows.splits[some], "targets": rows.targets[some]}
    return replace(rows, times=times, **chosen)


def check_weights(config: Config, given: Input, goals: Mapping[str, TaskTarget]) -> None:
    """Raise ConfigError unless a task has one class weight per class, if their number is known."""
    for name, goal in goals.items() if config.trains else ():
        task, table = config.of(name).task, config.of(name).table
        where = f"tasks.{name}.class_weights" if name else "task.class_weights"
        if not isinstance(task, ClassTask) or not isinstance(task.class_weights, tuple):
            continue
        if table is None:
            task.check_weights(_classes(given, goal, task), where)
        elif rows := given.lists(config.of(name), name, None).get(TABLE):
            labels = rows.targets.shape[1] if task.several_labels else max(2, len(rows.words))
            task.check_weights(labels, where)


def _classes(given: Input, goal: TaskTarget, task: TaskConfig) -> int | None:
    """Return the number of classes or labels of a task's targets; None if the targets are missing,
    or only the ranks will read them."""
    if isinstance(given, CollectionInput):
        if isinstance(given.found, MissingCollection):
            return None
        if task.several_labels:
            return math.prod(given.found.target(task.target).shape)
        num = given.found.classes(task.target)
        return None if num is None else max(2, num)
    kind = goal.edges.etype if goal.edges else goal.ntype
    if kind is None:
        return None
    if given.data is not None:
        nodes, edges = given.data.nodes, given.data.edges
        frame: NodeFrame | EdgeFrame = nodes[kind] if isinstance(kind, str) else edges[kind]
        arrays = [frame.data.get(task.target)]
    else:
        assert given.meta is not None
        key = f"{kind if isinstance(kind, str) else etype_str(kind)}/{task.target}"
        files = given.meta.files
        paths = [f.node_feats if isinstance(kind, str) else f.edge_feats for f in files]
        arrays = [read_tensors(path, only=key).get(key) for path in paths]
    found = [array for array in arrays if array is not None and len(array)]
    if task.several_labels:
        return math.prod(found[0].shape[1:]) if found else None
    return max(2, *(int(array.max()) + 1 for array in found)) if found else None


@contextlib.contextmanager
def started(request: DryRunRequest) -> Iterator[Callable[[], Finding | None]]:
    """Start the process, and yield a function that waits for its finding; kill it on exit."""
    config = request.config
    with (
        TemporaryDirectory(prefix="raygnn-") as directory,
        open(Path(directory, "output"), "ab") as output,
    ):
        process = subprocess.Popen(
            [sys.executable, "-m", "raygnn.worker.dry_run_process", directory],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **config.comm.env, "CUDA_VISIBLE_DEVICES": ""},
            start_new_session=True,  # so that processes of the model are killed, too
        )
        began = time.monotonic()
        try:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError), process.stdin as stdin:
                pickle.dump(request, stdin)
            yield lambda: _outcome(process, Path(directory), config, began)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _outcome(
    process: subprocess.Popen[bytes], directory: Path, config: Config, began: float
) -> Finding | None:
    """Return the finding of the dry run, None if the model works; raise ConfigError if a class
    cannot be imported."""
    kind = " with ".join(config.own_steps)
    try:
        process.wait(max(0.0, began + LIMIT - time.monotonic()))
    except subprocess.TimeoutExpired:
        return warn(
            f"{kind} was not tried to the end: building it and running one batch takes longer than "
            f"{LIMIT:g} s on this machine's CPU",
            "make sure that it works, with a small graph and train.max_steps: 2",
        )
    try:
        facts = json.loads((directory / OUTCOME).read_text())
    except FileNotFoundError:
        return _death(process.returncode, directory, config)
    if facts["what"] is None:
        return None
    lacks_gpu = config.cluster.gpus_per_worker > 0 and bool(_NEEDS_GPU.search(facts["what"]))
    if facts["key"] and not lacks_gpu:
        raise ConfigError(facts["what"], where=config.where(facts["key"]), remedy=facts["remedy"])
    at = f", at {facts['where']}" if facts["where"] else ""
    if lacks_gpu or not facts["sure"]:
        why = "without a GPU" if lacks_gpu else "on a small graph"
        return warn(
            f"{kind} could not be tried {why}: {facts['what']}{at}",
            "make sure that it works, with train.max_steps: 2",
        )
    return error(f"{kind} fails on a batch: {facts['what']}{at}", facts["remedy"])


def _death(code: int, directory: Path, config: Config) -> Finding:
    printed = (directory / "output").read_bytes()[-_OUTPUT:].decode(errors="replace").strip()
    last = f"; it printed last: {printed}" if printed else ""
    # the kernel sends SIGKILL when memory runs out, which need not be the model's fault
    unsure = code == -signal.SIGKILL or config.cluster.gpus_per_worker > 0
    return (warn if unsure else error)(
        f"the process of {' with '.join(config.own_steps)} {how_it_ended(code)} on a batch{last}",
        "find out what ended the process: os._exit, a native library, or its use of memory",
    )
