"""Tables to a graph on disk: ids, then features and edges a file at a time.

What is kept for each node (labels, splits, categories, the slots of its id) is read in one task
for each table. So are labels and splits of edges, which have 9 bytes in memory for each row.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from raygnn.config.graph import TablesGraph
from raygnn.errors import ConfigError
from raygnn.graph.arrays import element_bytes, index_type
from raygnn.graph.data import EdgeType, etype_str
from raygnn.graph.outofcore.disk_arrays import (
    Appended,
    Collected,
    DiskArray,
    Shapes,
    store_all,
    stored_arrays,
)
from raygnn.graph.outofcore.disk_graph import DiskGraph, EdgeRun, Figures, runs_of
from raygnn.graph.outofcore.id_index import IdsToDisk, StoredIds
from raygnn.graph.outofcore.workspace import Workspace
from raygnn.graph.sources.table_graph import fit_to, vocabulary_of
from raygnn.graph.tables.description import Description, EdgeTable, NodeTable, read_description
from raygnn.graph.tables.frames import (
    EdgeColumns,
    FitTo,
    NodeColumns,
    Targets,
    Vocabulary,
    edge_reader,
    settle,
)
from raygnn.graph.tables.reader import TableReader, resolve
from raygnn.storage.remote import AnyPath


def read_tables(graph: TablesGraph, work: Workspace) -> DiskGraph:
    """The graph with the types, arrays, numbers and ids that `raygnn.graph.sources.table_graph`
    gives it; its stages are ``ids``, ``features`` and ``edges``.

    Raises:
        ConfigError: the description is wrong, or asks for what is done in memory only.
        DataError: a table is; its file, row and column are named.
    """
    file, described = Path(graph.path), read_description(Path(graph.path))
    _check(described, file)
    words, to = vocabulary_of(graph), fit_to(graph, described)
    origin = {"": str(file)} | {t: f"{file}: nodes.{t}" for t in described.nodes}
    names: dict[str, list[Any]] = {}
    transforms: dict[str, Any] = {}
    figures, runs = Figures({}, {}, {}, {}), dict[EdgeType, list[EdgeRun]]()
    paths = {t: resolve(file.parent, table.files) for t, table in described.nodes.items()}
    tasks = [
        (ntype, table, paths[ntype], words.get(ntype, {}), _below(work, "ids", at))
        for at, (ntype, table) in enumerate(described.nodes.items())
    ]
    results = work.run("ids", _read_ids, tasks, [1] * len(tasks))
    ids: dict[str, StoredIds] = {}
    for (ntype, table, files, _, directory), result in zip(tasks, results, strict=True):
        ids[ntype] = StoredIds.from_directory(directory, ntype, text=result["text"])
        arrays, made = _features(
            ntype, table, files, to, result["starts"], result["rows"], directory, work
        )
        transforms |= made
        figures.num_nodes[ntype] = result["rows"]
        figures.node_arrays[ntype] = arrays | stored_arrays(directory, result["arrays"])
        names |= {f"{ntype}/{name}": values for name, values in result["names"].items()}
    reverses: dict[EdgeType, EdgeType] = {}
    for at, (key, edges) in enumerate(described.edges.items()):
        etype = described.edge_type(key)
        vocabulary = words.get(etype_str(etype), {})
        if edges.reverse is not None:
            reverses[etype] = (etype[2], edges.reverse, etype[0])
            vocabulary = vocabulary or words.get(etype_str(reverses[etype]), {})
        stage = f"edges-{at}" if at else "edges"
        edge_files = resolve(file.parent, edges.files)
        by_type, arrays, stand_for, made = _edges(
            etype, edges, edge_files, ids, vocabulary, to, work, stage
        )
        transforms |= made
        for one, of_type in by_type.items():
            runs[one], figures.edge_arrays[one] = of_type, arrays
            figures.num_edges[one] = _total(of_type)
            origin[etype_str(one)] = f"{file}: edges.{key}"
            names |= {f"{etype_str(one)}/{name}": values for name, values in stand_for.items()}
    others = {
        "name": file.stem,
        "origin": origin,
        "ids": {ntype: stored.array() for ntype, stored in ids.items()},
        "names": names,
        "reverses": reverses,
        "transforms": transforms,
        "microseconds": described.microseconds,
    }
    return DiskGraph(figures, runs, others)


def _check(described: Description, file: Path) -> None:
    for key, edges in described.edges.items():
        if edges.missing == "add":
            raise ConfigError(
                "nodes that edges add are numbered in memory only",
                where=f"{file}: edges.{key}.missing",
                remedy="set it to refuse or drop, or partition.engine to local",
            )


def _below(work: Workspace, stage: str, at: int) -> Path:
    directory = work.directory(stage) / str(at)
    directory.mkdir(exist_ok=True)
    return directory


def _read_ids(
    ntype: str, table: NodeTable, files: Sequence[AnyPath], words: Vocabulary, directory: Path
) -> dict[str, Any]:
    """Put the ids of a table of nodes on disk, and all arrays but features."""
    others = table.model_copy(update={"features": {}})
    nodes = NodeColumns(ntype, others, files, words, IdsToDisk(ntype, directory))
    nodes.read()
    frame = nodes.frame()
    return {
        "rows": frame.num,
        "text": str(nodes.ids.values.type) != "int64",
        "starts": nodes.reader.starts,
        "arrays": store_all(directory, frame.data),
        "names": nodes.names,
    }


def _on_disk(work: Workspace, stage: str) -> Callable[[int], Collected]:
    """Return a factory of the files in which `settle` sorts numbers."""
    number = itertools.count()
    return lambda width: Collected(work.directory(stage) / f"numbers-{next(number)}", width)


def _features(
    ntype: str,
    table: NodeTable,
    files: Sequence[AnyPath],
    to: FitTo,
    starts: Sequence[int],
    num: int,
    directory: Path,
    work: Workspace,
) -> tuple[dict[str, DiskArray], dict[str, Any]]:
    """The matrices of a node type, filled by a task for each file; and what `settle` says."""
    features = NodeColumns(ntype, table, files, {}).features
    if not features:
        return {}, {}
    stage = f"features-{directory.name}"
    made = settle(ntype, features, table, files, to, _on_disk(work, stage))
    columns = [column for matrix in features.values() for column in matrix.columns]
    for chunk in TableReader(files, columns, table.delimiter).chunks():
        for matrix in features.values():
            matrix.rows(chunk)  # which settles widths and dtypes
        break
    place = work.directory(stage)
    arrays = {
        name: DiskArray(place / f"matrix-{at}", str(matrix.dtype), (matrix.width,), rows=num)
        for at, (name, matrix) in enumerate(features.items())
    }
    for array in arrays.values():
        with array.path.open("ab") as whole:
            whole.truncate(num * array.row_bytes)
    tasks = [
        (file, start, columns, table.delimiter, list(features.values()), list(arrays.values()))
        for file, start in zip(files, starts, strict=True)
    ]
    ends = [*starts[1:], num]
    rows = [end - start for start, end in zip(starts, ends, strict=True)]
    work.run(stage, _read_features, tasks, rows)
    return arrays, made


def _read_features(
    file: AnyPath,
    start: int,
    columns: Sequence[str],
    delimiter: str | None,
    features: Sequence[Any],
    arrays: Sequence[DiskArray],
) -> int:
    """Write a file's rows of all matrices from row ``start`` on. Returns how many there are."""
    reader = TableReader([file], columns, delimiter)
    with ExitStack() as stack:
        streams = [stack.enter_context(array.path.open("r+b")) for array in arrays]
        for stream, array in zip(streams, arrays, strict=True):
            stream.seek(start * array.row_bytes)
        for chunk in reader.chunks():
            for matrix, stream, array in zip(features, streams, arrays, strict=True):
                stream.write(element_bytes(matrix.rows(chunk).astype(array.stored, copy=False)))
    return reader.num


def _edges(
    etype: EdgeType,
    table: EdgeTable,
    files: Sequence[AnyPath],
    ids: Mapping[str, StoredIds],
    words: Vocabulary,
    to: FitTo,
    work: Workspace,
    stage: str,
) -> tuple[
    dict[EdgeType, list[EdgeRun]], dict[str, DiskArray], dict[str, list[Any]], dict[str, Any]
]:
    """The edges of a table, and the reversed ones if it asks for them; their arrays (see
    `Figures`), for each array what its codes stand for, and what `settle` says."""
    columns, ends = EdgeColumns(table), (ids[etype[0]], ids[etype[2]])
    keep = _on_disk(work, stage)
    made = settle(etype_str(etype), columns.features, table, files, to, keep)
    for chunk in edge_reader(table, files).chunks():
        columns.rows(chunk, (ends[0].index(), ends[1].index()))  # which settles widths and dtypes
        break
    sizes = [file.stat().st_size for file in files]
    tasks = [(f, table, columns, ends, _below(work, stage, at)) for at, f in enumerate(files)]
    counts = work.run(stage, _read_edges, tasks, sizes)
    targets, named = _edge_targets(table, files, counts, words, work, stage)
    kinds: Shapes = {n: [str(np.dtype(dtype)), []] for n, dtype in columns.dtypes.items()}
    kinds |= {n: [str(m.dtype), [m.width]] for n, m in columns.features.items()}
    parts, first = [], 0
    for (*_, directory), count in zip(tasks, counts, strict=True):
        src, dst = (
            DiskArray(directory / name, index_type(len(one)).__name__)
            for name, one in zip(("src", "dst"), ends, strict=True)
        )
        data = {n: DiskArray(directory / n, kind, tuple(row)) for n, (kind, row) in kinds.items()}
        data |= {
            n: replace(array, offset=first * array.row_bytes, rows=count["kept"])
            for n, array in targets.items()
        }
        parts.append((src, dst, data))
        first += count["kept"]
    forward: list[EdgeRun] = []
    back: list[EdgeRun] = []
    for src, dst, data in parts:
        forward += runs_of(src, dst, data, _total(forward))
    for src, dst, data in parts:
        if table.undirected:
            forward += runs_of(dst, src, data, _total(forward), no_loops=True)
        elif table.reverse is not None:
            back += runs_of(dst, src, data, _total(back))
    arrays = {n: DiskArray(Path(), kind, tuple(row)) for n, (kind, row) in kinds.items()}
    runs = {etype: forward}
    if table.reverse is not None:
        runs[etype[2], table.reverse, etype[0]] = back
    return runs, arrays | targets, named, made


def _total(runs: Sequence[EdgeRun]) -> int:
    return runs[-1].first + runs[-1].num if runs else 0


def _read_edges(
    file: AnyPath,
    table: EdgeTable,
    columns: EdgeColumns,
    stored: tuple[StoredIds, StoredIds],
    directory: Path,
) -> dict[str, int]:
    """Put the edges of a file on disk, but labels and splits. Returns how many rows it has, and
    how many are kept; which, is in ``kept`` if not all are."""
    ids = stored[0].index(), stored[1].index()
    kinds = [index_type(len(one)) for one in ids]
    reader, kept = edge_reader(table, [file]), 0
    with ExitStack() as stack:
        names = ("src", "dst", *columns.dtypes, *columns.features, "kept")
        files = {name: stack.enter_context(Appended(directory / name)) for name in names}
        for chunk in reader.chunks():
            keep, rows = columns.rows(chunk, ids)
            rows |= {"src": rows["src"].astype(kinds[0]), "dst": rows["dst"].astype(kinds[1])}
            kept += len(rows["src"])
            for name, array in (rows | {"kept": keep}).items():
                files[name].add(array)
    return {"rows": reader.num, "kept": kept}


def _edge_targets(
    table: EdgeTable,
    files: Sequence[AnyPath],
    counts: Sequence[Mapping[str, int]],
    words: Vocabulary,
    work: Workspace,
    stage: str,
) -> tuple[dict[str, DiskArray], dict[str, list[Any]]]:
    """Labels and masks of the edges that are kept, and what codes stand for."""
    targets = Targets(table, "edge")
    if not targets.columns and table.splits is None:
        return {}, {}
    kept = [DiskArray(work.directory(stage) / str(at) / "kept", "bool") for at in range(len(files))]
    stage = f"targets-of-{stage}"
    rows = sum(count["rows"] for count in counts)
    task = (table, files, kept, rows, words, work.directory(stage))
    (result,) = work.run(stage, _read_targets, [task], [rows])
    return stored_arrays(work.directory(stage), result["arrays"]), result["names"]


def _read_targets(
    table: EdgeTable,
    files: Sequence[AnyPath],
    kept: Sequence[DiskArray],
    num: int,
    vocabulary: Vocabulary,
    directory: Path,
) -> dict[str, Any]:
    targets = Targets(table, "edge", vocabulary)
    reader = TableReader(files, targets.columns, table.delimiter)
    for chunk in reader.chunks() if targets.columns else ():
        targets.add(chunk)
    keep = np.concatenate([array.map() for array in kept])
    arrays = {name: rows[keep] for name, rows in targets.take(num, reader).items()}
    return {"arrays": store_all(directory, arrays), "names": targets.names}
