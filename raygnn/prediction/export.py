"""``raygnn export``: a trained model as `torch.export` programs, for serving without raygnn."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raygnn import __version__
from raygnn.checkpoint import weights
from raygnn.config.model import MODEL_FAMILIES, NO_LAYERS, read_model
from raygnn.config.places import unwritable
from raygnn.errors import DataError, InputError
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

FACTS = "export.json"  # in the directory
_OTHER = "choose another --out"
_SLACK = 2**20  # bytes of a file of weights besides them


@dataclass(frozen=True)
class Exported:
    """Exported model in a directory, as described in its ``export.json``.

    Attributes:
        path: of the directory.
        programs: name of a file for ``torch.export.load`` → ``inputs`` (dtype, shape and range of
            each argument) and ``outputs`` (width, or that of each node type).
        goals: name of each task, "" for a single one → its target; empty for graphs.
        words: names of classes, categories and relations, in the order of their numbers.
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

    Before any is kept, each is compared with the model for other sizes than it was traced with.

    Args:
        run: its path, or its name within ``storage``.
        out: the directory, written in one step.
        overwrite: replace an existing export.

    Returns:
        The export; see `raygnn.models.program.programs`.

    Raises:
        InputError: ``out`` cannot be written, the run has no weights yet, or its model is a class
            from outside raygnn.
        DataError: the weights are damaged.
        CapabilityError: this torch cannot export the model, or its programs compute differently.
    """
    directory = _free(Path(out).expanduser().absolute(), overwrite)
    found = run if isinstance(run, Run) else open_run(run, storage=storage)
    # this section alone: neither data nor a cluster is needed
    try:
        model = read_model(**found.config["model"])
    except (KeyError, TypeError, ValueError) as error:
        what, remedy = "its section model is damaged", "put back the config.yaml of the training"
        raise DataError(what, where=found.shown, remedy=remedy) from error
    if model.kind not in (*MODEL_FAMILIES, NO_LAYERS):
        raise InputError(
            f"{model.kind} is a class from outside raygnn, which can not be exported here",
            where=found.shown,
            remedy="export it with torch.export, where it is defined, with the weights of "
            f"checkpoints/{weights.FILE}",
        )
    checkpoints = found.checkpoints(weights.FILE, weights.ABOUT, weights.ROWS)
    chosen = weights.find(checkpoints)

    import torch

    from raygnn.models.program import describe_inputs, programs, write
    from raygnn.models.registry import restore

    try:
        about, stored = read_json(chosen.about), chosen.path.stat().st_size
        with torch.device("meta"):  # takes no memory, whatever width a stranger's run describes
            state = restore(about, model).state_dict()
        size = sum(tensor.nbytes for tensor in state.values())
        if size > 2 * stored + _SLACK or stored > 2 * size + _SLACK:
            raise DataError(
                f"the weights have {stored:,} bytes, and the model that the run describes {size:,}",
                where=str(chosen.path),
                remedy="put back config.yaml and the files that training wrote",
            )
        network = restore(about, model)
    except (ValueError, RuntimeError) as error:  # of torch: a size that overflows
        raise DataError(
            "it is not recorded what data the network is for",
            where=str(chosen.about),
            remedy="put back the file that training wrote, or train again with this version",
        ) from error
    weights.load(chosen, network)
    made = {}
    with storage_errors(directory, InputError, _OTHER), new_directory(directory) as draft:
        for name, program in programs(network).items():
            outputs = write(program, draft / f"{name}.pt2")
            made[f"{name}.pt2"] = {"inputs": describe_inputs(program), "outputs": outputs}
        exported = Exported(
            directory,
            programs=made,
            goals=dict(chosen.goals or {}),
            words=chosen.words or {},
            transforms=chosen.transforms or {},
            columns=chosen.columns or {},
            weights=chosen.sha256,
            raygnn=__version__,
            torch=torch.__version__,
        )
        facts = exported.to_dict()
        del facts["path"]
        write_json(draft / FACTS, facts)
        _put(draft, directory)
    return exported


def _free(directory: Path, overwrite: bool) -> Path:
    what, remedy = None, _OTHER
    with storage_errors(directory, InputError, _OTHER):  # such as a name that is too long
        if not directory.parent.is_dir():
            what, remedy = f"there is no directory {directory.parent}", f"make it, or {_OTHER}"
        elif not is_vacant(directory) and not (directory / FACTS).is_file():
            what = "this exists, and raygnn export has not written it"
        elif not is_vacant(directory) and not overwrite:
            what, remedy = "this export exists", f"{_OTHER}, or pass --overwrite"
        elif (why := unwritable(directory.parent)) is not None:
            what = f"it cannot be written: {why}"
    if what is not None:
        raise InputError(what, where=str(directory), remedy=remedy)
    return directory


def _put(draft: Path, directory: Path) -> None:
    with new_directory(directory) as aside:
        before = aside / directory.name
        if not is_vacant(directory):
            _free(directory, overwrite=True)  # it may have been replaced meanwhile
            os.rename(directory, before)
        try:
            if not publish(draft, directory):
                what = "the output directory was created by another process in the meantime"
                raise InputError(what, where=str(directory))
        finally:
            if before.exists() and is_vacant(directory):
                os.rename(before, directory)
