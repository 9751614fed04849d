"""Knowledge graphs: files of ``head<TAB>relation<TAB>tail``, as FB15k-237 and others come.

All triples are edges of one type, with their relation as an int64 array. An edge type per relation
would be slow, because sampling, partitioning and exchanges have a cost per edge type; and models of
links (DistMult, RotatE, R-GCN with bases, CompGCN) look a relation up by its number.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow.compute as pc

from raygnn.config.graph import TriplesGraph
from raygnn.errors import DataError
from raygnn.graph.data import SPLITS, EdgeFrame, EdgeType, GraphData, NodeFrame, etype_str
from raygnn.graph.tables.ids import Ends, Ids
from raygnn.graph.tables.reader import TableReader, resolve

VERSION = 1
NTYPE = "entity"
ETYPE: EdgeType = (NTYPE, "triple", NTYPE)
MAX_RELATIONS = 1 << 20

_COLUMNS = ("head", "relation", "tail")
_NAMES = {"train": ("train",), "val": ("valid", "val", "dev"), "test": ("test",)}
_KINDS = (".txt", ".tsv", ".csv", ".parquet", ".txt.gz", ".tsv.gz", ".csv.gz")


def files(graph: TriplesGraph) -> list[Path]:
    """Return the existing files of train, val and test."""
    return list(_files(Path(graph.path)).values())


def reading_bytes(graph: TriplesGraph) -> int:
    """See :func:`raygnn.graph.sources.reading_bytes`."""
    return sum(_reader(file).extent()[1] for file in _files(Path(graph.path)).values())


def read(graph: TriplesGraph) -> GraphData:
    """Read nodes ``entity`` and edges ``entity:triple:entity`` in the order of the files.

    Edges have ``relation`` int64 ``[E]`` and ``train_mask``, ``val_mask``, ``test_mask`` bool
    ``[E]``. Entities are numbered as they appear, heads before tails; relations in sorted order,
    like categories in tables. Their names are kept in ``ids`` and ``names``.

    Files that end in .txt or .tsv have lines of three columns; .csv and .parquet have columns
    ``head``, ``relation`` and ``tail``.
    """
    place = Path(graph.path)
    entities, relations = Ids(NTYPE), Ids("relation")
    counts = dict.fromkeys(SPLITS, 0)
    with (
        TemporaryDirectory(prefix="raygnn-") as spill,
        closing(Ends(_COLUMNS, [entities, relations, entities], "add", Path(spill))) as ends,
    ):
        for split, file in _files(place).items():
            reader = _reader(file)
            for chunk in reader.chunks():
                ends.add(chunk)
            counts[split] = reader.num
        ends.learn(NTYPE)
        ends.learn("relation")
        if len(relations) > MAX_RELATIONS:
            message = f"there are more than {MAX_RELATIONS:,} relations"
            remedy = "see that the columns are in order"
            raise DataError(message, where=str(file), remedy=remedy)
        found = list(ends.numbers(reader))
    heads, kinds, tails = (
        np.concatenate([some[at] for some in found], dtype=np.int64) for at in range(3)
    )
    last = np.cumsum(list(counts.values()))
    at = np.arange(last[-1])
    order = pc.array_sort_indices(relations.values)
    numbers = np.empty(len(relations), np.int64)
    numbers[order] = np.arange(len(relations))
    data = {"relation": numbers[kinds]} | {
        f"{split}_mask": (at >= end - num) & (at < end)
        for (split, num), end in zip(counts.items(), last, strict=True)
    }
    edges = EdgeFrame(heads, tails, data)
    return GraphData(
        place.name.split(".")[0] or "triples",
        {NTYPE: NodeFrame(len(entities))},
        {ETYPE: edges},
        {"": str(place)},
        {NTYPE: entities.values.combine_chunks()},
        {f"{etype_str(ETYPE)}/relation": relations.values.take(order).to_pylist()},
    )


def _reader(file: Path) -> TableReader:
    lines = file.name.removesuffix(".gz").endswith((".txt", ".tsv"))
    return TableReader([file], _COLUMNS, header=_COLUMNS if lines else None)


def _files(place: Path) -> dict[str, Path]:
    if not place.is_dir():
        resolve(place.parent, [place.name])  # that it is a table
        return {"train": place}
    files: dict[str, Path] = {}
    for split, names in _NAMES.items():
        candidates = [place / f"{name}{kind}" for name in names for kind in _KINDS]
        present = [file for file in candidates if file.exists()]
        if len(present) > 1:
            message = f"{present[0].name} and {present[1].name} are both for {split}"
            raise DataError(message, where=str(place), remedy="keep one of them in the directory")
        if present:
            files[split] = present[0]
    if "train" not in files:
        message = "there is no file to train on"
        remedy = f"call it train.txt, or with one of {', '.join(_KINDS[1:])}"
        raise DataError(message, where=str(place), remedy=remedy)
    return files
