"""``raygnn export``: a trained model as `torch.export` programs, for serving without raygnn."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raygnn import __version__
from raygnn.checkpoint import weights
from raygnn.config.model import MODEL_FAMILIES, NO_LAYERS, ModelConfig, read_model
from raygnn.errors import DataError, InputError
from raygnn.prediction.merge import OTHER, check_free
from raygnn.runs.run import Run, open_run
from raygnn.util.files import (
    is_vacant,
    new_directory,
    publish,
    read_json,
    storage_errors,
    write_json,
)

if TYPE_CHECKING:
    from os import PathLike

    from torch import nn

FACTS = "export.json"  # in the directory
_SLACK = 2**20  # bytes of a file of weights besides them


@dataclass(frozen=True)
class Exported:
    """Exported model in a directory, as described in its ``export.json``.

    Attributes:
        programs: name of a file for ``torch.export.load`` → ``inputs`` (dtype, shape and range of
            each argument) and ``outputs`` (width, or width of each node type).
        goals: name of each task, "" for a single one → its target; empty for graphs.
        words: classes, categories and relations, in the order of their numbers.
        transforms: transforms of feature columns, with their state.
        columns: names of the columns of each array of features.
        weights: SHA-256 of the weights' file.
        raygnn, torch: their versions.
    """

    path: Path
    programs: dict[str, Any]
    goals: dict[str, Any]
    words: dict[str, Any]
    transforms: dict[str, Any]
    columns: dict[str, Any]
    weights: str
    raygnn: str
    torch: str

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return {**asdict(self), "path": str(self.path)}


def export(
    run: str | Path | Run,
    *,
    out: str | PathLike[str],
    storage: str = "runs",
    overwrite: bool = False,
) -> Exported:
    """Write a run's tested model as programs of torch's operations.

    Each program is first compared with the model for other sizes than it was traced with.

    Args:
        run: path of the run, or its name within ``storage``.
        out: directory, written in one step.
        overwrite: replace an existing export.

    Returns:
        The export; see `raygnn.models.program.programs`.

    Raises:
        InputError: ``out`` cannot be written, the run has no weights yet, or its model is a class
            from outside raygnn.
        DataError: the weights are damaged.
        CapabilityError: this torch cannot export the model, or its programs compute differently.
    """
    directory = Path(out).expanduser().absolute()
    _check_free(directory, overwrite)
    found = run if isinstance(run, Run) else open_run(run, storage=storage)
    # this section alone: neither data nor a cluster is needed
    try:
        model = read_model(**found.config["model"])
    except (KeyError, TypeError, ValueError) as error:
        what, remedy = "its section model is damaged", "put back the config.yaml of the training"
        raise DataError(what, where=found.shown, remedy=remedy) from error
    if model.kind not in (*MODEL_FAMILIES, NO_LAYERS):
        what = f"{model.kind} is a class from outside raygnn, which cannot be exported here"
        remedy = f"export it with torch.export and the weights of checkpoints/{weights.FILE}"
        raise InputError(what, where=found.shown, remedy=remedy)
    chosen = weights.find(found.checkpoints(weights.FILE, weights.ABOUT, weights.ROWS))
    network = _network(chosen, model)

    import torch

    from raygnn.models.program import describe_inputs, programs, write

    made = {}
    with storage_errors(directory, InputError, OTHER), new_directory(directory) as draft:
        for name, program in programs(network).items():
            outputs = write(program, draft / f"{name}.pt2")
            made[f"{name}.pt2"] = {"inputs": describe_inputs(program), "outputs": outputs}
        names = ("goals", "words", "transforms", "columns")
        facts: dict[str, Any] = {name: dict(getattr(chosen, name)) for name in names}
        facts |= {"weights": chosen.sha256, "raygnn": __version__, "torch": torch.__version__}
        facts = {"programs": made, **facts}
        write_json(draft / FACTS, facts)
        _put(draft, directory)
    return Exported(directory, **facts)


def _network(chosen: weights.Weights, model: ModelConfig) -> nn.Module:
    """Return the network that a run describes, with its weights. Raises DataError if description
    and weights are damaged or do not match."""
    import torch

    from raygnn.models.registry import restore

    try:
        about, stored = read_json(chosen.about), chosen.path.stat().st_size
        with torch.device("meta"):  # takes no memory, whatever width a stranger's run describes
            state = restore(about, model).state_dict()
        size = sum(tensor.nbytes for tensor in state.values())
        if size > 2 * stored + _SLACK or stored > 2 * size + _SLACK:
            what = f"the weights have {stored:,} bytes, and the model that the run describes "
            remedy = "put back config.yaml and the files that training wrote"
            raise DataError(f"{what}{size:,}", where=str(chosen.path), remedy=remedy)
        network = restore(about, model)
    except (ValueError, RuntimeError) as error:  # torch's for a size that overflows
        what = "the file does not describe the network's data"
        remedy = "put back the file that training wrote, or train again with this version"
        raise DataError(what, where=str(chosen.about), remedy=remedy) from error
    weights.load(chosen, network)
    return network


def _check_free(directory: Path, overwrite: bool) -> None:
    """Raise InputError unless an export can be written to the directory."""
    mine = is_vacant(directory) or (directory / FACTS).is_file()
    check_free(directory, overwrite, None if mine else "this is no directory of raygnn export")


def _put(draft: Path, directory: Path) -> None:
    with new_directory(directory) as aside:
        before = aside / directory.name
        if not is_vacant(directory):
            _check_free(directory, overwrite=True)  # another process may have replaced it
            os.rename(directory, before)
        try:
            if not publish(draft, directory):
                what = "the output directory was created by another process in the meantime"
                raise InputError(what, where=str(directory))
        finally:
            if before.exists() and is_vacant(directory):
                os.rename(before, directory)
