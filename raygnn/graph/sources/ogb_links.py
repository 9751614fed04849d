"""The edges of ogb's link datasets, which come as files of ``torch.save``, one for each split."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from raygnn.errors import DataError
from raygnn.graph.data import DEFAULT_NTYPE, MASKS, EdgeFrame, EdgeType, NodeFrame
from raygnn.graph.sources import triples
from raygnn.graph.sources.convert import Array
from raygnn.graph.sources.torchfile import SavedDict, load
from raygnn.graph.tables import plain

_MAX_RELATIONS = 1 << 20
_EXTRA = ("weight", "year")  # of each edge, in datasets that have them
_REMEDY = "the dataset is damaged: get it again"

Arrays = dict[str, Array]


def link_edges(
    nodes: dict[str, NodeFrame], relations: Mapping[EdgeType, Path], split: Path
) -> tuple[dict[str, NodeFrame], dict[EdgeType, EdgeFrame]]:
    """All edges, those of train first, with masks bool ``[E]`` and what is given for each.

    Triples of nodes of one type are one edge type, as of the format ``triples``; of several,
    their relations are edge types.

    Args:
        nodes: by type.
        relations: edge type → the directory with its raw files.
        split: the directory with ``train.pt``, ``valid.pt`` and ``test.pt``.

    Raises:
        DataError: naming the file, the array and its row.
    """
    saved = [load(split / f"{name}.pt") for name in ("train", "valid", "test")]
    if DEFAULT_NTYPE not in nodes:
        numbers = {_relation_of(where): etype for etype, where in relations.items()}
        if len(numbers) != len(relations):
            what = "edge_reltype.csv.gz gives two types of edges one number"
            where = str(next(iter(relations.values())).parent)
            raise DataError(what, where=where, remedy=_REMEDY)
        parts = [_typed(each, numbers, nodes) for each in saved]
        return nodes, {etype: _frame([part[etype] for part in parts]) for etype in relations}
    num = nodes[DEFAULT_NTYPE].num
    frame = _frame([_plain(each, num) for each in saved])
    if "relation" in frame.data:
        return {triples.NTYPE: nodes[DEFAULT_NTYPE]}, {triples.ETYPE: frame}
    (etype,) = relations
    return nodes, {etype: frame}


def _plain(saved: SavedDict, num: int) -> Arrays:
    """Edges between nodes of one type, from any of the three ways in which they are written."""
    if "edge" in saved:
        pairs = saved.integers("edge", num)
        if pairs.ndim != 2 or pairs.shape[1] != 2:
            what = f"its shape is {pairs.shape}, not that of pairs"
            raise DataError(what, where=f"{saved.path}: 'edge'", remedy=_REMEDY)
        found = {"src": pairs[:, 0], "dst": pairs[:, 1]}
    elif "source_node" in saved:
        found = {
            "src": saved.integers("source_node", num),
            "dst": saved.integers("target_node", num),
        }
    else:
        found = {
            "src": saved.integers("head", num),
            "dst": saved.integers("tail", num),
            "relation": saved.integers("relation", _MAX_RELATIONS),
        }
    for name in _EXTRA:
        if name in saved:
            found[name] = saved.numbers(name).reshape(-1)
    return _even(saved, found)


def _typed(
    saved: SavedDict, numbers: Mapping[int, EdgeType], nodes: Mapping[str, NodeFrame]
) -> dict[EdgeType, Arrays]:
    relation = saved.integers("relation", max(numbers) + 1)
    ends = {"src": saved.integers("head"), "dst": saved.integers("tail")}
    _even(saved, {**ends, "relation": relation})
    unknown = ~np.isin(relation, list(numbers))
    if unknown.any():
        row = int(np.argmax(unknown))
        where = f"{saved.path}: 'relation', row {row + 1}"
        raise DataError(f"{relation[row]} is no relation", where=where, remedy=_REMEDY)
    order = np.argsort(relation, kind="stable")
    starts = np.searchsorted(relation[order], list(numbers))
    found = {}
    for (number, etype), start in zip(numbers.items(), starts, strict=True):
        rows = order[start : start + int(np.count_nonzero(relation == number))]
        found[etype] = {end: ids[rows] for end, ids in ends.items()}
        for end, array, ntype in (("src", "head", etype[0]), ("dst", "tail", etype[2])):
            ids = found[etype][end]
            bad = (ids < 0) | (ids >= nodes[ntype].num)
            if bad.any():
                row = int(rows[np.argmax(bad)])
                what = f"{ids[np.argmax(bad)]} is no {ntype}: there are {nodes[ntype].num}"
                where = f"{saved.path}: {array!r}, row {row + 1}"
                raise DataError(what, where=where, remedy=_REMEDY)
    return found


def _relation_of(where: Path) -> int:
    """The number that a type of edges has in the files of the split."""
    file = where / "edge_reltype.csv.gz"
    found = plain.first_value(file)
    if not found.isascii() or not found.isdecimal() or int(found) >= _MAX_RELATIONS:
        place = f"{file}, row 1 (line 1), column '1'"
        raise DataError(f"the value is {found!r}, not a number", where=place, remedy=_REMEDY)
    return int(found)


def _even(saved: SavedDict, found: Arrays) -> Arrays:
    rows = {name: array.shape for name, array in found.items()}
    if any(shape != rows["src"] or len(shape) != 1 for shape in rows.values()):
        shapes = ", ".join(f"{name} {shape}" for name, shape in rows.items())
        what = f"the arrays of its edges differ in shape: {shapes}"
        raise DataError(what, where=str(saved.path), remedy=_REMEDY)
    return found


def _frame(parts: list[Arrays]) -> EdgeFrame:
    names = [name for name in parts[0] if all(name in part for part in parts)]
    joined = {name: np.concatenate([part[name] for part in parts]) for name in names}
    split = np.repeat(np.arange(len(parts)), [len(part["src"]) for part in parts])
    masks = {mask: split == at for at, mask in enumerate(MASKS)}
    source, target = joined.pop("src"), joined.pop("dst")
    return EdgeFrame(source, target, joined | masks)
