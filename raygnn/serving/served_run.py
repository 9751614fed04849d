"""A run to serve: what is known of it before Ray starts, and its model in a replica's process."""

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
from raygnn.driver.job_plan import goal_fields, goals_of
from raygnn.errors import InputError
from raygnn.graph.partition.layout import PartitionMeta
from raygnn.graph.partition.read import read_ids
from raygnn.prediction.request import ask
from raygnn.prediction.worker_side import open_trained
from raygnn.runs.run import Run, open_run
from raygnn.sampling.exchange import World
from raygnn.serving.questions import NodeIds, UserId, named
from raygnn.worker.comm.process_groups import Ranks
from raygnn.worker.job import Job, Request
from raygnn.worker.planes.recommendations import one_task


@dataclass(frozen=True)
class Served:
    """A run's selected weights, and the partition that they were trained on.

    Attributes:
        config: of the whole run.
        task: name of one of several tasks; "" = the only one.
        graph: the section ``graph`` of the training; empty = there was none.
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
        """Find them, for each task that can be served.

        Args:
            run: its path, or its name within ``storage``.
            task: name of one of several tasks; None = all that predict for nodes or links.
            at: predict from what was before this time; None = what was before a node's own time,
                if it has one, else before now. Link prediction in runs with ``sampling.time``
                needs one.
            trust: import the classes that the run names, though another user or machine trained
                it.
            overrides: as for `raygnn.predict`.

        Raises:
            InputError: there is no such run, it lacks its weights or data, or it predicts neither
                for nodes nor for links.
        """
        shown = False, False, None
        chosen: dict[str, Any] = {"task": task, "at": at, "trust": trust}
        run = run if isinstance(run, Run) else open_run(run, storage)
        asked = ask(run, ("all",), "all", storage, overrides, *shown, tables=False, **chosen)
        config, names = asked.config, [asked.task]
        graph = (run.config if config.graph is None else config.to_dict()).get("graph") or {}
        if asked.config.tasks and task is None:
            names = [*asked.config.tasks]
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
            remedy = "name it, such as --at 2026-01-31"
        if what is not None:
            raise InputError(what, where="serve", remedy=remedy)
        given = find_input(config)
        if given.meta is None:
            raise InputError(
                "the partition that it was trained on is not there",
                where=str(given.place),
                remedy="make it with raygnn partition and the run's config.yaml",
            )
        requests = (Request(asked.weights, "all", rows=True, at=asked.at, task=n) for n in served)
        return [cls(config, request.task, given, request, graph) for request in requests]

    @property
    def partition(self) -> PartitionMeta:
        meta = self.given.meta
        assert isinstance(meta, PartitionMeta)
        return meta

    @property
    def one(self) -> Config:
        """Configuration for the task alone."""
        return self.config.of(self.task)

    @property
    def fixed(self) -> str | None:
        """Why the graph cannot have new rows; None if it can."""
        if self.graph.get("format") != "tables":
            return "the graph of this run is not made of tables"
        if self.one.model.embedding is not None:
            return "new nodes have no rows in the embedding table (model.embedding)"
        how = self.graph.get("normalize") or "none"
        return (
            None
            if how == "none"
            else f"features are scaled by all of them (graph.normalize: {how})"
        )

    @cached_property
    def words(self) -> Mapping[str, Sequence[Any]]:
        """Names of categories, by array."""
        return {**self.partition.names, **(self.request.weights.words or {})}


class ServedModel:
    """The model of a run in this process, a world of one rank.

    Attributes:
        plane, module: of the task.
        opened: the plane and the module of all tasks.
    """

    def __init__(self, served: Served):
        self.served, config = served, served.config
        goals = goals_of(config, served.given.facts(config))
        job = Job(
            config,
            served.given.place,
            config.run_dir,
            **goal_fields(config, goals),
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
        self._names: dict[str, Any] = {}

    def for_task(self, served: Served) -> ServedModel:
        """Return this model for another task of its run."""
        other = copy.copy(self)
        other.served = served
        other.plane, other.module = one_task(*self.opened, served.request)
        return other

    def ids(self, ntype: str) -> NodeIds:
        """Return the ids of a node type, which are sorted at the first call."""
        if ntype not in self._ids:
            self._ids[ntype] = NodeIds(self._read(ntype), self.plane.shard.original[ntype])
        return self._ids[ntype]

    def names(self, ntype: str, nodes: np.ndarray) -> list[UserId]:
        """Return the users' ids of nodes, global ids int64 ``[n]``."""
        shard = self.plane.shard
        return named(self._read(ntype), shard.original[ntype][nodes - shard.first(ntype)])

    def _read(self, ntype: str) -> Any:
        if ntype not in self._names:
            self._names[ntype] = read_ids(self.served.partition, ntype)
        return self._names[ntype]

    def schema(self, *ntypes: str) -> dict[str, Any]:
        """Return what a caller must know of any model, as plain JSON types."""
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
        why, remedy = "updates need a token", "name a file with one (--token-file)"
    elif all(served.one.task.of_edges or served.one.task.of_graphs for served in found):
        why = "only predictions for nodes see new rows"
    if why is not None:
        raise InputError(why, where="updates", remedy=remedy)


def digest_of(file: Path) -> str:
    """Return the SHA-256 of the token in a file, in hex. Raises InputError if there is none."""
    try:
        token = file.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        what, remedy = f"it cannot be read: {error}", "name a file with the token"
        raise InputError(what, where=str(file), remedy=remedy) from None
    if not token:
        raise InputError("the file is empty", where=str(file), remedy="write a token into it")
    return hashlib.sha256(token.encode()).hexdigest()
