"""Checks of what is allowed and may not be meant: they find no errors."""

from __future__ import annotations

from collections.abc import Iterator

from raygnn.graph.data import MASKS, etype_str
from raygnn.graph.partition.edge_target import EdgeTarget
from raygnn.preflight.findings import Finding
from raygnn.preflight.job import Job


def batch_size_fits(job: Job) -> Iterator[Finding]:
    """A batch has no more seeds than there are to train on."""
    train, size = job.partition.splits.get("train"), job.config.sampling.batch_size
    if not train or not job.config.trains or job.config.tasks or train >= size * job.most:
        return
    seeds = job.config.task.seeds
    yield Finding(
        "batch_size_fits",
        "info",
        f"a batch of {job.most} × {size:,} seeds is larger than the {train:,} training {seeds}: "
        "every epoch is one step",
        f"set sampling.batch_size to less than {-(-train // job.most)} for more steps",
        values={"seeds": train, "batch": size * job.most},
    )


def edge_arrays_read(job: Job) -> Iterator[Finding]:
    """Every array of edges is read by the sampler or the task."""
    model = job.config.model
    read = {*MASKS, "label", job.config.sampling.edge_weight}
    if model.kind == "rgcn":
        read.add(model.relation or "relation")
    for one in job.by_task.values():
        if isinstance(one.edges, EdgeTarget):
            read |= {one.config.task.target, one.edges.relation}
    types: dict[tuple[str, ...], list[str]] = {}
    for etype, arrays in job.partition.edges.items():
        if unread := tuple(sorted(arrays.keys() - read)):
            types.setdefault(unread, []).append(etype_str(etype))
    for names, kinds in types.items():
        yield Finding(
            "edge_arrays_read",
            "info",
            f"edges of {', '.join(kinds)} have {', '.join(names)}, which no model reads yet: "
            "they are stored in the partition and have no effect",
            "leave them out of the graph, or name an array of weights in sampling.edge_weight",
            values={"arrays": list(names), "etypes": kinds},
        )
