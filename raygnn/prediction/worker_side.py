"""Rank of a prediction: data plane → trained weights → exact outputs → rows, or metrics."""

from __future__ import annotations

from typing import Any

import torch

from raygnn.checkpoint import weights
from raygnn.checkpoint.learned_rows import RowState
from raygnn.errors import DataError, InputError
from raygnn.tasks.lightning_modules import TaskModule
from raygnn.util.files import storage_errors
from raygnn.worker import blackbox
from raygnn.worker.comm.process_groups import Ranks
from raygnn.worker.job import ROWS, Job
from raygnn.worker.node_files import available_weights
from raygnn.worker.planes import open_plane, vocabulary
from raygnn.worker.planes.plane import Plane
from raygnn.worker.planes.prediction_rows import Format, write_rows
from raygnn.worker.rank_setup import Runtime


class Predicting:
    """Prediction by the ``request`` of a job, on one rank."""

    def __init__(self, job: Job, runtime: Runtime):
        assert job.request is not None
        self._job = job
        self._request = job.request
        torch.set_num_threads(job.config.cluster.cpus_per_worker)
        self._ranks = Ranks.join(job.config, runtime.world, runtime.device)

    def run(self) -> dict[str, Any]:
        """Predict; returns ``workers`` and either the number of ``rows`` or the ``metrics`` of all
        ranks, which are empty for an empty split. Collective.

        Raises:
            DataError: the data are not those of the training, or the weights are damaged.
            InputError: there is no free space for the rows.
        """
        request = self._request
        plane, task = open_trained(self._job, self._ranks)
        blackbox.note("predict")
        workers = self._ranks.world.size
        if request.rows:
            return {"workers": workers, "rows": self._write(plane, task)}
        there = plane.count(request.split) > 0
        metrics = plane.evaluate(task, request.split) if there else {}
        named = {f"{request.split}/{name}": value for name, value in metrics.items()}
        return {"workers": workers, "metrics": named}

    def _write(self, plane: Plane, task: Any) -> int:
        rank, request = self._ranks.world.rank, self._request
        config = self._job.config.of(request.task) if request.task else self._job.config
        about, unit = config.task, config.task.unit
        file = self._job.run_dir / ROWS / f"rank-{rank}.parquet"
        with storage_errors(file, InputError):
            file.parent.mkdir(exist_ok=True)
            file.unlink(missing_ok=True)  # of an earlier attempt
            if request.embeddings:
                key = "node" if about.of_edges else unit
                own = write_rows(file, (e.table(key) for e in plane.embed(task, request)))
            elif request.lists is not None:
                from raygnn.worker.planes.recommendations import recommend

                lists = recommend(plane, task, request)
                own = write_rows(file, (some.table() for some in lists))
            else:
                form = Format(
                    unit if config.table is None else "row",
                    about.classifies,
                    request.scores,
                    about.several_labels,
                    request.calibration,
                )
                own = write_rows(file, map(form.table, plane.predict(task, request)))
        return int(self._ranks.control.sum(torch.tensor(own)))


def open_trained(job: Job, ranks: Ranks) -> tuple[Plane, TaskModule]:
    """Open the plane of a request's data, and its task with the trained weights, on the device.
    Collective.

    Raises:
        DataError: the data are not those of the training, or the weights are damaged.
    """
    assert job.request is not None
    plane = open_plane(job, ranks)
    _check_data(job, plane.identity)
    task = plane.task()
    found = available_weights(job, job.request.weights, job.request.kept)
    weights.load(found, task.model)
    if task.embeddings is not None:
        if found.rows is None:
            what = "the embedding tables of nodes are missing"
            remedy = "put back selected.json and selected-rows, which training wrote beside it"
            raise DataError(what, where=str(found.path), remedy=remedy)
        timeout = job.config.fault.storage_timeout.seconds
        RowState(task.embeddings, ranks.control, timeout).read(found.rows_directory, found.rows)
    task.to(ranks.device)
    return plane, task


def _check_data(job: Job, found: str) -> None:
    assert job.request is not None
    trained = job.request.weights
    if job.request.sizes is not None:
        vocabulary.check(trained.words, vocabulary.words(job))
    elif trained.data != found:
        what = f"these are not the data that the run was trained on: {found} here, "
        what += f"{trained.data} in the training"
        remedy = "restore the data of the training, or train on these"
        raise DataError(what, where=str(job.partition), remedy=remedy)
