"""``raygnn export``: a trained network as one file, for serving without raygnn."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raygnn.checkpoint import weights
from raygnn.config.model import MODEL_FAMILIES, read_model
from raygnn.config.task import read_task
from raygnn.errors import DataError, InputError
from raygnn.prediction.driver_side import free_file
from raygnn.runs.run import Run, open_run
from raygnn.util.files import read_json, replacing, storage_errors

if TYPE_CHECKING:
    from os import PathLike


@dataclass(frozen=True)
class Exported:
    """A file that ``torch.export.load`` reads.

    Attributes:
        path: of the file.
        features: node type → width of its rows, of those that have any.
        edges: the edge types, as ``source:relation:target``.
        relations: edge type → how many relations there are, of those whose edges have some.
        categories: node type → name → how many categories there are.
        edge_features: edge type → width of its edges' features, of those that have any, in the
            order of the config's model.edge_features.
        edge_categories: edge type → name → how many categories there are.
        target: the node type that it gives rows for.
        out_features: their width.
    """

    path: Path
    features: dict[str, int]
    edges: list[str]
    relations: dict[str, int]
    categories: dict[str, dict[str, int]]
    edge_features: dict[str, int]
    edge_categories: dict[str, dict[str, int]]
    target: str
    out_features: int

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {**asdict(self), "path": str(self.path)}


def export(
    run: str | Path | Run,
    *,
    out: str | PathLike[str],
    storage: str = "runs",
    overwrite: bool = False,
) -> Exported:
    """Write the network that a run was tested with as a program of torch's own operations.

    Args:
        run: its path, or its name within ``storage``.
        out: the file to write (``.pt2``); whole, or not at all.
        overwrite: replace ``out`` if it is there.

    Returns:
        The file and its inputs: see `raygnn.models.program.export`.

    Raises:
        InputError: ``out`` cannot be written, the run has no weights yet, or its network is not
            one that can be exported.
        DataError: the weights are damaged.
    """
    file = free_file(Path(out).expanduser().absolute(), overwrite, ".pt2")
    found = run if isinstance(run, Run) else open_run(run, storage=storage)
    # these sections alone: neither the data nor a cluster need be there
    model = read_model(**found.config["model"])
    task = read_task(**found.config.get("task", {}))
    if found.config.get("tasks"):
        raise InputError(
            "a network for several tasks can not be exported",
            where=found.shown,
            remedy="write what it says of nodes with raygnn embed, or train one task alone",
        )
    if task.unit != "node" or model.kind not in MODEL_FAMILIES:
        raise InputError(
            f"a network of kind {model.kind} for {task.kind} can not be exported",
            where=found.shown,
            remedy=f"tasks on nodes with model.kind {', '.join(MODEL_FAMILIES)} can; export your "
            "own class with torch.export, where it is defined",
        )
    checkpoints = found.checkpoints(weights.FILE, weights.ABOUT, weights.ROWS)
    chosen = weights.find(checkpoints)
    described = read_json(checkpoints / weights.ABOUT).get("schema")

    import torch

    from raygnn.graph.data import etype_str
    from raygnn.models.network import Network
    from raygnn.models.program import export as trace
    from raygnn.models.program import restore
    from raygnn.models.registry import build_model

    try:
        schema = restore(described)
    except ValueError as error:
        raise DataError(
            "it is not recorded what data the network is for",
            where=str(checkpoints / weights.ABOUT),
            remedy="put back the file that training wrote, or train again with this version",
        ) from error
    network = build_model(model, schema)
    assert isinstance(network, Network)
    weights.load(chosen, network)
    program = trace(network)
    with storage_errors(file, InputError, "choose another --out"), replacing(file) as stream:
        torch.export.save(program, stream)
    return Exported(
        path=file,
        features={t: width for t, width in schema.in_features.items() if width},
        edges=[etype_str(etype) for etype in schema.etypes],
        relations={etype_str(etype): num for etype, num in schema.relations.items()},
        categories={
            t: {n: c for n, (c, _) in named.items()} for t, named in schema.categories.items()
        },
        edge_features={etype_str(etype): width for etype, width in schema.edge_features.items()},
        edge_categories={
            etype_str(e): {n: c for n, (c, _) in named.items()}
            for e, named in schema.edge_categories.items()
        },
        target=schema.target,
        out_features=schema.out_features,
    )
