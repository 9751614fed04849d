"""Data planes of a rank: their interface `plane`, and one module for each kind of seeds."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from raygnn.worker.comm.process_groups import Ranks
    from raygnn.worker.job import Job
    from raygnn.worker.planes.plane import Plane


def open_plane(job: Job, ranks: Ranks) -> Plane:
    """Open the data plane of a job's task. Raises DataError if the data cannot be read or used."""
    if job.config.tasks is not None:
        from raygnn.worker.planes.multitask_plane import MultitaskPlane

        return MultitaskPlane.open(job, ranks)
    if job.config.task.of_graphs:
        from raygnn.worker.planes.graph_plane import GraphPlane

        return GraphPlane.open(job, ranks)
    if job.goal.edges is not None:
        from raygnn.worker.planes.edge_plane import EdgePlane

        return EdgePlane.open(job, ranks)
    from raygnn.worker.planes.node_plane import NodePlane, RowPlane

    return (NodePlane if job.rows is None else RowPlane).open(job, ranks)
