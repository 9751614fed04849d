"""Initial weights from another run, and frozen weights (``train.init``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from raygnn.checkpoint import weights
from raygnn.checkpoint.learned_rows import read_rows
from raygnn.config.model import InitConfig
from raygnn.errors import ConfigError
from raygnn.graph.partition.layout import read_meta
from raygnn.graph.partition.read import read_ids
from raygnn.tasks.embeddings import ROW, Embeddings
from raygnn.tasks.lightning_modules import TaskModule
from raygnn.worker.comm.process_groups import Ranks
from raygnn.worker.job import InitialWeights, Job
from raygnn.worker.node_files import available_weights
from raygnn.worker.planes import vocabulary

_SHOWN = 8  # names in a line of the log


class Transfer(pl.Callback):
    """Freezes weights, and loads another run's weights if training begins.

    Checkpoints hold a report of the loaded weights, so that a resumed run need not read the other
    run again. ``found``: the summary's ``init``: ``run``, its weights' ``sha256``, names that were
    ``taken``, ``left`` name → reason, ``rows`` table → counts of ``taken`` and ``new`` rows, names
    that are ``frozen``.
    """

    def __init__(self, init: InitConfig, task: TaskModule):
        self._init = init
        self.found: dict[str, Any] = {}
        self._warnings: list[str] = []
        self._freeze(task)

    @classmethod
    def from_job(cls, job: Job, task: TaskModule, ranks: Ranks, *, begins: bool) -> Transfer | None:
        """Freeze weights and, if the run ``begins``, load the other run's; None without
        ``train.init``. Collective. Raises ConfigError if a pattern matches nothing, everything is
        frozen, or nothing fits. Raises DataError if the other run's files are damaged."""
        if job.config.train.init is None:
            return None
        transfer = cls(job.config.train.init, task)
        if begins:
            assert job.initial is not None
            transfer._load(job, job.initial, task, ranks)
        return transfer

    def _freeze(self, task: TaskModule) -> None:
        init, named = self._init, dict(task.model.named_parameters())
        tables = [] if task.embeddings is None else [f"rows.{t}" for t in task.embeddings.rows]
        init.check("freeze", [*named, *tables])
        init.check("lr_scale", named)
        frozen = [name for name in named if init.matches("freeze", name)]
        if len(frozen) == len(named):
            what, remedy = "all weights are frozen", "let some train, such as the last layer"
            raise ConfigError(what, where="train.init.freeze", remedy=remedy)
        for name in frozen:
            named[name].requires_grad_(False)
        frozen_tables = [table for table in tables if init.matches("freeze", table)]
        if task.embeddings is not None:
            task.embeddings.frozen |= {table.removeprefix("rows.") for table in frozen_tables}
        self._frozen = frozen + frozen_tables

    def _load(self, job: Job, initial: InitialWeights, task: TaskModule, ranks: Ranks) -> None:
        found = available_weights(job, initial.weights, initial.kept)
        taken, left = take(self._init, weights.read(found), task.model.state_dict())
        rows = self._load_rows(job, initial, found, task.embeddings, ranks, left)
        if not taken and not rows:
            message = f"none of the weights of {initial.run} fits this model"
            remedy = "; ".join(f"{name}: {why}" for name, why in list(left.items())[:_SHOWN])
            raise ConfigError(message, where="train.init.run", remedy=remedy)
        self.found = {"run": initial.run, "sha256": found.sha256, "taken": taken, "left": left}
        self.found |= {"rows": rows, "frozen": self._frozen}
        before, now = found.words, vocabulary.words(job)
        self._warnings = [
            f"warn: the categories of {key} differ from the ones in {initial.run}: weights of a "
            "category may belong to another one; exclude them"
            for key in before.keys() & now.keys()
            if list(before[key]) != list(now[key])
        ]

    def _load_rows(
        self,
        job: Job,
        initial: InitialWeights,
        found: weights.Weights,
        embeddings: Embeddings | None,
        ranks: Ranks,
        left: dict[str, str],
    ) -> dict[str, dict[str, int]]:
        """Load embedding rows by the users' ids. Returns table → counts over all ranks; tables that
        are not used are added to ``left``."""
        counts: dict[str, dict[str, int]] = {}
        there = {file.ntype for file in found.rows.files} if found.rows else set()
        here = embeddings.rows if embeddings else {}
        for ntype in sorted(there | here.keys()):
            name = f"rows.{ntype}"
            if self._init.matches("exclude", name):
                left[name] = "excluded"
            elif found.rows is None or ntype not in there:
                left[name] = "not in the run"
            elif embeddings is None or ntype not in here:
                left[name] = "not in this model"
            elif found.rows.dim != embeddings.dim:
                left[name] = f"width {found.rows.dim} there, {embeddings.dim} here"
            else:
                ids, own = embeddings.ids[ntype], here[ntype].detach().numpy()
                taken = _copy_rows(job, initial, found, ntype, ids, own)
                total = ranks.control.sum(torch.tensor([taken, len(own) - taken])).tolist()
                counts[name] = dict(zip(("taken", "new"), total))
        return counts

    def notes(self) -> list[str]:
        """Return the lines of the log."""
        found = self.found
        lines = [f"init: {len(found['taken'])} weights of {found['run']}: {_few(found['taken'])}"]
        lines += [
            f"init: {name}: {count['taken']:,} rows of known ids, {count['new']:,} of new ones"
            for name, count in found["rows"].items()
        ]
        if left := [f"{name} ({why})" for name, why in found["left"].items()]:
            lines.append(f"init: not used: {_few(left)}")
        if found["frozen"]:
            lines.append(f"init: frozen: {_few(found['frozen'])}")
        return [*lines, *self._warnings]

    def state_dict(self) -> dict[str, Any]:
        return {"found": self.found}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.found = state_dict["found"]


def take(
    init: InitConfig, given: Mapping[str, Any], own: Mapping[str, Tensor]
) -> tuple[list[str], dict[str, str]]:
    """Copy weights of equal name and shape. Returns the names that were copied, and name → reason
    of the other ones.

    Models of nodes alone are encoders without a name; models of edges and of several tasks have an
    ``encoder``. ``given``: weights of the other run; ``own``: weights of this model, which are
    changed.
    """
    there = {name.removeprefix("encoder."): value for name, value in given.items()}
    here = {name.removeprefix("encoder.") for name in own}
    left = {name: "not in this model" for name in there if name not in here}
    taken = []
    for name, value in own.items():
        other = there.get(name.removeprefix("encoder."))
        if init.matches("exclude", name):
            left[name] = "excluded"
        elif other is None:
            left[name] = "not in the run"
        elif other.shape != value.shape:
            left[name] = f"shape {list(other.shape)} there, {list(value.shape)} here"
        else:
            value.copy_(other)
            taken.append(name)
    return taken, left


def _copy_rows(
    job: Job,
    initial: InitialWeights,
    found: weights.Weights,
    ntype: str,
    ids: np.ndarray,
    own: np.ndarray,
) -> int:
    """Copy the rows of this rank's nodes whose ids the other run had; returns their number.
    ``ids``: node numbers in the graph, ``[n]``; ``own``: their rows, ``[n, dim]``."""
    assert found.rows is not None
    assert initial.partition is not None
    files = [file for file in found.rows.files if file.ntype == ntype]
    there, here = read_ids(read_meta(initial.partition), ntype), read_ids(job.meta, ntype)
    keys = pa.array(np.asarray(ids, np.int64))
    keys = keys if here is None else here.take(keys)
    there = pa.array(np.arange(sum(file.rows for file in files))) if there is None else there
    if there.type != keys.type:
        return 0
    # number in the other graph → position among this rank's rows, -1 = not among them
    at = pc.fill_null(pc.index_in(there, value_set=keys), -1).to_numpy()
    count = 0
    for file in files:
        path = found.rows_directory / file.name
        for numbers, arrays in read_rows(path, file, found.rows.dim, (ROW,)):
            places = at[numbers]
            mine = places >= 0
            own[places[mine]] = arrays[ROW][mine]
            count += int(mine.sum())
    return count


def _few(names: list[str]) -> str:
    more = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
