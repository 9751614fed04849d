"""Served run: its description before Ray starts, and its model in a replica's process."""

from __future__ import annotations

import copy
import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch

from raygnn.config.schema import Config
from raygnn.driver.inputs import CollectionInput, PartitionInput, find_input
from raygnn.driver.job_plan import goals_of
from raygnn.errors import InputError
from raygnn.graph.partition.layout import PartitionMeta
from raygnn.graph.partition.read import read_ids
from raygnn.prediction.request import ask
from raygnn.prediction.worker_side import open_trained
from raygnn.runs.run import Run, open_run
from raygnn.sampling.exchange import World
from raygnn.serving.questions import NodeIds, UserId
from raygnn.worker.comm.process_groups import Ranks
from raygnn.worker.job import Job, Request
from raygnn.worker.planes.recommendations import one_task


@dataclass(frozen=True)
class Served:
    """A run's selected weights for a task, and the partition that they were trained on.

    Attributes:
        config: the run's configuration, with all tasks.
        task: name of one of several tasks; "" = the only one.
        graph: section ``graph`` of the training; empty if it had none.
    """

    config: Config
    task: str
    given: PartitionInput | CollectionInput
    request: Request
    graph: Mapping[str, Any]

    @classmethod
    def find(
        cls,
        run: str | Path | Run,
        *,
        task: str | None = None,
        storage: str = "runs",
        at: Any = None,
        trust: bool = False,
        overrides: Sequence[str] = (),
    ) -> list[Served]:
        """Return the run for each task that can be served.

        Args:
            run: path of the run, or its name within ``storage``.
            task: name of one of several tasks; None = all that predict for nodes, links or graphs.
            at: predict from edges before this time; None = before a node's own time, if it has
                one, else before now. Link prediction in runs with ``sampling.time`` needs one.
            trust, overrides: see `raygnn.predict`.

        Raises:
            InputError: the run does not exist, lacks its weights or data, or has no task that can
                be served.
        """
        run = run if isinstance(run, Run) else open_run(run, storage)
        shown: dict[str, Any] = {"display": False, "tables": False}
        asked = ask(run, at=at, task=task, trust=trust, overrides=overrides, **shown)
        config = asked.config
        graph = (run.config if config.graph is None else config.to_dict()).get("graph") or {}
        names = [*config.tasks] if config.tasks and task is None else [asked.task]
        kinds = {name: config.of(name).task for name in names}
        served = [n for n, of in kinds.items() if of.of_edges == of.of_links]
        links, what, remedy = [name for name in served if kinds[name].of_links], None, ""
        if not served:
            what = f"models of {kinds[names[0]].kind} are not served"
            remedy = "use predict or export"
        elif any(config.of(name).model.pair_history for name in links):
            what, remedy = "model.pair_history reads earlier edges of each pair", "use predict"
        elif config.task.of_graphs and graph.get("normalize") == "standard":
            what = "graph.normalize: standard scales features over all graphs"
            remedy = "use predict, or scale the features in your dataset"
        elif links and at is None and config.sampling.time is not None:
            what = "in a run with sampling.time, scores of links depend on the time"
            remedy = "set it, such as --at 2026-01-31"
        if what is not None:
            raise InputError(what, where="serve", remedy=remedy)
        given = find_input(config)
        if given.meta is None:
            what = "the partition of the training does not exist"
            remedy = "build it with raygnn partition and the run's config.yaml"
            raise InputError(what, where=str(given.place), remedy=remedy)
        requests = (Request(asked.weights, "all", rows=True, at=asked.at, task=n) for n in served)
        return [cls(config, request.task, given, request, graph) for request in requests]

    @property
    def partition(self) -> PartitionMeta:
        meta = self.given.meta
        assert isinstance(meta, PartitionMeta)
        return meta

    @property
    def one(self) -> Config:
        """Configuration for this task alone."""
        return self.config.of(self.task)

    @property
    def fixed(self) -> str | None:
        """Why the graph cannot have new rows; None if it can."""
        if self.graph.get("format") != "tables":
            return "the graph of this run is not built from tables"
        if self.one.model.embedding is not None:
            return "new nodes have no rows in the embedding table (model.embedding)"
        if (how := self.graph.get("normalize") or "none") != "none":
            return f"features are scaled over all nodes (graph.normalize: {how})"
        return None

    @cached_property
    def words(self) -> Mapping[str, Sequence[Any]]:
        """Categories of each array."""
        return {**self.partition.names, **self.request.weights.words}


class ServedModel:
    """A run's model in this process, a world of one rank.

    Attributes:
        plane, module: data plane and module of the task.
        opened: data plane and module of all tasks.
    """

    def __init__(self, served: Served):
        self.served, config = served, served.config
        job = Job(
            config,
            served.given.place,
            config.run_dir,
            goals_of(config, served.given.facts(config)),
            replicated=True,
            started=time.time(),
            global_batch=1,
            request=served.request,
        )
        gpu = config.cluster.gpus_per_worker > 0 and torch.cuda.is_available()
        torch.set_num_threads(config.cluster.cpus_per_worker)
        ranks = Ranks.join(config, World(0, 1), torch.device("cuda:0" if gpu else "cpu"))
        self.opened = open_trained(job, ranks)
        self.plane, self.module = one_task(*self.opened, served.request)
        self._ids: dict[str, NodeIds] = {}

    def for_task(self, served: Served) -> ServedModel:
        """Return this model for another task of its run."""
        other = copy.copy(self)
        other.served = served
        other.plane, other.module = one_task(*self.opened, served.request)
        return other

    def ids(self, ntype: str) -> NodeIds:
        """Return the ids of a node type."""
        if ntype not in self._ids:
            names = read_ids(self.served.partition, ntype)
            self._ids[ntype] = NodeIds(names, self.plane.shard.original[ntype])
        return self._ids[ntype]

    def names(self, ntype: str, nodes: np.ndarray) -> list[UserId]:
        """Return the users' ids of nodes, global ids int64 ``[n]``."""
        shard = self.plane.shard
        return self.ids(ntype).names(shard.original[ntype][nodes - shard.first(ntype)])

    def schema(self, *ntypes: str) -> dict[str, Any]:
        """Describe the model for callers, as plain JSON types."""
        config = self.served.one
        return {
            "run": config.name,
            "weights": self.served.request.weights.sha256,
            "task": config.task.kind,
            "nodes": {t: self.served.partition.num_nodes(t) for t in ntypes},
            "ids": {t: "integer" if self.ids(t).whole else "string" for t in ntypes},
            "layers": config.model.depth,
        }


def check_updates(found: Sequence[Served], token_file: str | PathLike[str] | None) -> None:
    """Raise InputError if a service of these tasks cannot keep new rows."""
    why, remedy = found[0].fixed, "serve the run without updates"
    if token_file is None:
        why, remedy = "updates need a token", "pass a file with a token (--token-file)"
    elif all(served.one.task.of_edges or served.one.task.of_graphs for served in found):
        why = "only predictions for nodes see new rows"
    if why is not None:
        raise InputError(why, where="updates", remedy=remedy)


def digest_of(file: Path) -> str:
    """Return the SHA-256 of the token in a file, in hex. Raises InputError if there is none."""
    try:
        token = file.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        what, remedy = f"the token cannot be read: {error}", "pass a file with the token"
        raise InputError(what, where=str(file), remedy=remedy) from None
    if not token:
        raise InputError("the file is empty", where=str(file), remedy="write a token into it")
    return hashlib.sha256(token.encode()).hexdigest()
