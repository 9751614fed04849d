"""Tables to a graph on disk, in stages of tasks: ids, then arrays of nodes, features and edges.

Labels, splits and categories are read in one task for each table, and take 9 bytes of memory for
each row; features in a task for each file, edges in one for some files.
"""

from __future__ import annotations

import itertools
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from raygnn.config.graph import TablesGraph
from raygnn.config.problems import dotted
from raygnn.graph.arrays import Array, element_bytes, index_type
from raygnn.graph.data import EdgeFrame, EdgeType, GraphData, NodeFrame, etype_str
from raygnn.graph.outofcore.disk_arrays import (
    Appended,
    Collected,
    DiskArray,
    Shapes,
    store_all,
    stored_arrays,
)
from raygnn.graph.outofcore.disk_graph import DiskGraph, EdgeRun, Figures, runs_of
from raygnn.graph.tables.description import (
    ROW,
    Description,
    EdgeTable,
    KeyTable,
    NodeTable,
    Table,
    read_description,
)
from raygnn.graph.tables.frames import (
    EdgeColumns,
    FitTo,
    Targets,
    Vocabulary,
    edge_reader,
    features_of,
    fit_to,
    read_nodes,
    settle,
    vocabulary_of,
)
from raygnn.graph.tables.ids import Ends, StoredIds
from raygnn.graph.tables.queries import named, run_queries
from raygnn.graph.tables.reader import TableReader, resolve
from raygnn.storage.remote import AnyPath

_TOGETHER = 1 << 26  # bytes of files of edges that one task reads, at least
_ID = 32  # of these for each node, whose ids every task puts into a hash table


class Stages(Protocol):
    """Directories and tasks: see `raygnn.graph.outofcore.workspace.Workspace`."""

    def directory(self, stage: str) -> Path: ...

    def run(
        self, stage: str, function: Callable[..., Any], tasks: Sequence[Any], sizes: Sequence[int]
    ) -> list[Any]: ...


class LocalStages:
    """Stages in this process, which nothing outlives."""

    def __init__(self, path: Path):
        self._path = path

    def directory(self, stage: str) -> Path:
        """Return the directory of a stage."""
        path = self._path / stage
        path.mkdir(exist_ok=True)
        return path

    def run(
        self, stage: str, function: Callable[..., Any], tasks: Sequence[Any], sizes: Sequence[int]
    ) -> list[Any]:
        """Return the results of all tasks."""
        return [function(*task) for task in tasks]


def read_tables(graph: TablesGraph, work: Stages, *, mapped: bool = True) -> DiskGraph:
    """Read the graph that `raygnn.graph.sources.table_graph` describes onto the disk.

    Args:
        mapped: whether the ids stay on disk, too.

    Raises:
        ConfigError: the description is wrong.
        DataError: a table is; its file, row and column are named.
    """
    file = Path(graph.path)
    described, results = run_queries(file, read_description(file), work)
    with named(results):
        return _read(graph, described, work, mapped)


def _read(graph: TablesGraph, described: Description, work: Stages, mapped: bool) -> DiskGraph:
    file = Path(graph.path)
    words, to = vocabulary_of(graph), fit_to(graph, described)
    origin = {"": str(file)} | {t: f"{file}: nodes.{t}" for t in described.nodes}
    names: dict[str, list[Any]] = {}
    transforms: dict[str, Any] = {}
    figures, runs = Figures({}, {}, {}, {}), dict[EdgeType, list[EdgeRun]]()
    paths = {t: resolve(file.parent, table.files) for t, table in described.nodes.items()}
    ids = {t: StoredIds(t, _below(work, "ids", at)) for at, t in enumerate(described.nodes)}
    tasks = [(ids[t], table, paths[t]) for t, table in described.nodes.items()]
    starts = dict(zip(ids, work.run("ids", _read_ids, tasks, [1] * len(tasks)), strict=True))
    edge_paths = {k: resolve(file.parent, table.files) for k, table in described.edges.items()}
    for at, (key, edges) in enumerate(described.edges.items()):
        if edges.missing == "add":
            ends = dict.fromkeys(described.edge_type(key)[::2])
            new = [StoredIds(t, _below(work, f"added-{at}", n)) for n, t in enumerate(ends)]
            task = (edges, edge_paths[key], [ids[t] for t in described.edge_type(key)[::2]], new)
            work.run(f"added-{at}", _add_ids, [task], [1])
            ids |= {one.ntype: one for one in new}
    for at, (ntype, table) in enumerate(described.nodes.items()):
        num, directory = len(ids[ntype]), _below(work, "nodes", at)
        node_task = (table, paths[ntype], num, words.get(ntype, {}), directory)
        (read,) = work.run(f"nodes-{at}", _read_nodes, [node_task], [num])
        arrays, made = _features(ntype, table, paths[ntype], to, starts[ntype], num, at, work)
        transforms |= made
        figures.num_nodes[ntype] = num
        figures.node_arrays[ntype] = arrays | stored_arrays(directory, read["arrays"])
        names |= {f"{ntype}/{name}": values for name, values in read["names"].items()}
    reverses: dict[EdgeType, EdgeType] = {}
    for at, (key, edges) in enumerate(described.edges.items()):
        etype = described.edge_type(key)
        vocabulary = words.get(etype_str(etype), {})
        if edges.reverse is not None:
            reverses[etype] = (etype[2], edges.reverse, etype[0])
            vocabulary = vocabulary or words.get(etype_str(reverses[etype]), {})
        stage = f"edges-{at}" if at else "edges"
        by_type, arrays, stand_for, made = _edges(
            etype, edges, edge_paths[key], ids, vocabulary, to, work, stage
        )
        transforms |= made
        for one, of_type in by_type.items():
            runs[one], figures.edge_arrays[one] = of_type, arrays
            figures.num_edges[one] = _total(of_type)
            place = dotted(edges.key) if isinstance(edges, KeyTable) else f"edges.{key}"
            origin[etype_str(one)] = f"{file}: {place}"
            names |= {f"{etype_str(one)}/{name}": values for name, values in stand_for.items()}
    others = {
        "name": file.stem,
        "origin": origin,
        "ids": {ntype: stored.array(mapped=mapped) for ntype, stored in ids.items()},
        "names": names,
        "reverses": reverses,
        "transforms": transforms,
        "microseconds": described.microseconds,
    }
    return DiskGraph(figures, runs, others)


def in_memory(graph: DiskGraph) -> GraphData:
    """Read all arrays; types with the edges of others reversed share theirs."""
    figures, edges = graph.figures, dict[EdgeType, EdgeFrame]()
    nodes = {
        ntype: NodeFrame(num, {n: a.read(0, num) for n, a in figures.node_arrays[ntype].items()})
        for ntype, num in figures.num_nodes.items()
    }
    forward = {back: etype for etype, back in graph.others["reverses"].items()}
    for etype, runs in graph.runs.items():
        if etype in forward:
            one = edges[forward[etype]]
            edges[etype] = EdgeFrame(one.dst, one.src, dict(one.data))
            continue
        ends = np.empty((2, _total(runs)), np.int64)
        data = {
            name: np.empty((_total(runs), *array.row_shape), array.stored)
            for name, array in figures.edge_arrays[etype].items()
        }
        for run in runs:
            at = slice(run.first, run.first + run.num)
            ends[0, at], ends[1, at] = run.ends()
            for name, rows in data.items():
                rows[at] = run.rows(name)
        edges[etype] = EdgeFrame(ends[0], ends[1], data)
    return GraphData(nodes=nodes, edges=edges, **graph.others)


def _below(work: Stages, stage: str, at: int) -> Path:
    directory = work.directory(stage) / str(at)
    directory.mkdir(exist_ok=True)
    return directory


def _read_ids(stored: StoredIds, table: NodeTable, files: Sequence[AnyPath]) -> list[int]:
    """Store the ids of a table of nodes. Returns the number of the first row of each file."""
    column = table.id or ROW
    reader = TableReader(files, [column], table.delimiter)
    stored.read(reader, column)
    return reader.starts


def _add_ids(
    table: EdgeTable, files: Sequence[AnyPath], known: Sequence[StoredIds], new: Sequence[StoredIds]
) -> None:
    """Store ids with those that edges add, by type."""
    columns = table.source, table.target
    of_type = {one.ntype: one.ids() for one in known}
    ids = [of_type[one.ntype] for one in known]
    spill, nulls = _spill(new[0].directory), isinstance(table, KeyTable)
    with Ends(columns, ids, table.missing, spill, nulls=nulls) as ends:
        for chunk in TableReader(files, columns, table.delimiter).chunks():
            ends.add(chunk)
        for one in new:
            ends.learn(one.ntype)
            one.write(iter([of_type[one.ntype].values]))


def _spill(directory: Path) -> Path:
    """Return an empty directory for what DuckDB spills."""
    path = directory / "spill"
    shutil.rmtree(path, ignore_errors=True)
    return path


def _read_nodes(
    table: NodeTable, files: Sequence[AnyPath], num: int, words: Vocabulary, directory: Path
) -> dict[str, Any]:
    """Store all arrays of a table of nodes but features."""
    arrays, names = read_nodes(table, files, num, words)
    return {"arrays": store_all(directory, arrays), "names": names}


def _on_disk(work: Stages, stage: str) -> Callable[[int], Collected]:
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
    at: int,
    work: Stages,
) -> tuple[dict[str, DiskArray], dict[str, Any]]:
    """Read the matrices of a node type in a task for each file; nodes that edges added have the
    table's ``fill``. Returns the matrices, and what `settle` does."""
    features = features_of(table)
    if not features:
        return {}, {}
    stage = f"features-{at}"
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
    sizes = [end - start for start, end in itertools.pairwise([*starts, num])]
    read = sum(work.run(stage, _read_features, tasks, sizes))
    for array in arrays.values() if table.fill is not None and read < num else ():
        array.map(writable=True)[read:] = table.fill
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
    work: Stages,
    stage: str,
) -> tuple[
    dict[EdgeType, list[EdgeRun]], dict[str, DiskArray], dict[str, list[Any]], dict[str, Any]
]:
    """Read the edges of a table, and the reversed ones if it asks for them. Returns also their
    arrays (see `Figures`), for each array what its codes stand for, and what `settle` does."""
    columns, ends = EdgeColumns(table), (ids[etype[0]], ids[etype[2]])
    keep = _on_disk(work, stage)
    made = settle(etype_str(etype), columns.features, table, files, to, keep)
    for chunk in edge_reader(table, files, targets=False).chunks():
        columns.rows(chunk)  # which settles widths and dtypes
        break
    least = sys.maxsize if table.source == ROW else max(_TOGETHER, _ID * sum(map(len, ends)))
    groups = list(_groups(files, least))  # rows are numbered over all files
    sizes = [sum(file.stat().st_size for file in group) for group in groups]
    tasks = [
        (group, table, columns, ends, _below(work, stage, at)) for at, group in enumerate(groups)
    ]
    counts = work.run(stage, _read_edges, tasks, sizes)
    kept = [DiskArray(directory / "kept", "bool") for *_, directory in tasks]
    targets, named = _edge_targets(table, files, kept, counts, words, work, stage)
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


def _groups(files: Sequence[AnyPath], least: int) -> Iterator[list[AnyPath]]:
    """Yield files that follow one another, of so many bytes together, or the last."""
    group: list[AnyPath] = []
    for file in files:
        group.append(file)
        if sum(one.stat().st_size for one in group) >= least:
            yield group
            group = []
    if group:
        yield group


def _total(runs: Sequence[EdgeRun]) -> int:
    return runs[-1].first + runs[-1].num if runs else 0


def _read_edges(
    files: Sequence[AnyPath],
    table: EdgeTable,
    columns: EdgeColumns,
    stored: tuple[StoredIds, StoredIds],
    directory: Path,
) -> dict[str, int]:
    """Store the edges of some files, but labels and splits. Returns how many rows they have, and
    how many are kept, which is in ``kept``."""
    of_type = {one.ntype: one.ids() for one in stored}
    ids = [of_type[one.ntype] for one in stored]
    reader, count = edge_reader(table, files, targets=False), 0
    arrays = [*columns.dtypes, *columns.features]
    with ExitStack() as stack:
        ends = stack.enter_context(
            Ends(
                (table.source, table.target),
                ids,
                table.missing,
                _spill(directory),
                nulls=isinstance(table, KeyTable),
            )
        )
        out = {
            name: stack.enter_context(Appended(directory / name))
            for name in (*arrays, "src", "dst", "kept")
        }
        for chunk in reader.chunks():
            ends.add(chunk)
            for name, rows in columns.rows(chunk).items():
                out[name].add(rows)
        for found in ends.numbers(reader):
            keep = (found[0] >= 0) & (found[1] >= 0)
            count += int(keep.sum())
            out["kept"].add(keep)
            for name, numbers, one in zip(("src", "dst"), found, ids, strict=True):
                out[name].add(numbers[keep].astype(index_type(len(one)), copy=False))
    for name in arrays if count < reader.num else ():
        _compact(directory / name, reader.num, DiskArray(directory / "kept", "bool").map())
    return {"rows": reader.num, "kept": count}


def _compact(path: Path, rows: int, keep: Array) -> None:
    """Rewrite a file with the rows to keep."""
    stored = DiskArray(path, "uint8", (path.stat().st_size // rows,)).map()
    draft = path.with_name(f"{path.name}.draft")
    with Appended(draft) as out:
        for start in range(0, rows, _TOGETHER >> 4):
            at = slice(start, start + (_TOGETHER >> 4))
            out.add(stored[at][keep[at]])
    draft.replace(path)


def _edge_targets(
    table: Table,
    files: Sequence[AnyPath],
    kept: Sequence[DiskArray],
    counts: Sequence[Mapping[str, int]],
    words: Vocabulary,
    work: Stages,
    stage: str,
) -> tuple[dict[str, DiskArray], dict[str, list[Any]]]:
    """Read labels and masks of the edges that are kept, and what codes stand for."""
    targets = Targets(table, "edge")
    if not targets.columns and table.splits is None:
        return {}, {}
    stage = f"targets-of-{stage}"
    rows = sum(count["rows"] for count in counts)
    task = (table, files, kept, rows, words, work.directory(stage))
    (result,) = work.run(stage, _read_targets, [task], [rows])
    return stored_arrays(work.directory(stage), result["arrays"]), result["names"]


def _read_targets(
    table: Table,
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
