"""Tables of nodes and edges, in files or databases, described by a YAML file.

Nodes and edges are numbered in the order of their rows. The partition keeps the ids of the tables,
and predictions are written with them. Tables are converted to a graph on disk in stages: ids, node
arrays, edges. This process fits vocabularies and transforms. Tasks read ids table by table, node
arrays file by file, and edges in groups of files.
"""

from __future__ import annotations

import itertools
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from raygnn.config.graph import TablesGraph
from raygnn.config.problems import dotted
from raygnn.graph.arrays import Array, element_bytes, index_type
from raygnn.graph.data import EdgeType, GraphData, etype_str
from raygnn.graph.outofcore.disk_graph import (
    Appended,
    DiskArray,
    DiskGraph,
    EdgeRun,
    reversed_runs,
    runs_of,
)
from raygnn.graph.outofcore.workspace import Workspace, temporary_workspace
from raygnn.graph.sources.input_files import check_fits_memory
from raygnn.graph.tables.databases import description_of
from raygnn.graph.tables.description import ROW, Description, EdgeTable, KeyTable, Table
from raygnn.graph.tables.frames import TableArrays, fit_to
from raygnn.graph.tables.ids import Ends, StoredIds
from raygnn.graph.tables.queries import named, queries_of, run_queries
from raygnn.graph.tables.reader import TableReader, resolve, unchanged
from raygnn.graph.texts import Texts
from raygnn.graph.texts import identity as identity  # of encoders
from raygnn.storage.remote import AnyPath

VERSION = 4

_TOGETHER = 1 << 26  # bytes of edge files in a task, at least
_ID = 32  # bytes of edge files per node, at least: each task builds a hash table of all ids


def files(graph: TablesGraph) -> list[AnyPath]:
    """Return the description, its tables in order, and the vocabulary if there is one."""
    file, described = Path(graph.path), description_of(graph)
    paths: list[AnyPath] = [file, *_paths(file, described)]
    queries = queries_of(file, described).values()
    paths += dict.fromkeys(path for query in queries for path in query.files)
    return paths if graph.vocabulary is None else [*paths, graph.vocabulary]


def _paths(file: Path, described: Description) -> Iterator[AnyPath]:
    for table in described.tables.values():
        yield from resolve(file.parent, table.files)


def reading_bytes(graph: TablesGraph) -> int:
    """Estimate the bytes of the arrays; see `raygnn.graph.sources.reading_bytes`."""
    return sum(
        size * (1 + getattr(table, "undirected", False)) for table, _, size in extents(graph)
    )


def read(graph: TablesGraph) -> GraphData:
    """Read the graph with the types, arrays and ids of the description.

    Features are float32 ``[N, F]``, or float16 if the columns are; ``label`` int64 ``[N]`` (classes
    in sorted order, -1 = unknown) or float32 ``[N]`` (numbers, NaN = unknown); categories int64
    ``[N]``; masks bool ``[N]``. Edges can have the same arrays, and ``weight`` float32 ``[E]``;
    ``time`` is int64. Arrays are written to a temporary directory until all are read.
    """
    with temporary_workspace() as work:
        return in_memory(read_tables(graph, work))


def read_tables(graph: TablesGraph, work: Workspace) -> DiskGraph:
    """Read a graph of tables onto the disk; see `read`."""
    file = Path(graph.path)
    described, results = run_queries(file, description_of(graph), work)
    with named(results), unchanged(lambda: _paths(file, described)):
        return _read(graph, described, work)


def _read(graph: TablesGraph, described: Description, work: Workspace) -> DiskGraph:
    file = Path(graph.path)
    to = fit_to(graph, described)
    texts = Texts(graph, to, work)
    origin = {"": str(file)} | {t: f"{file}: nodes.{t}" for t in described.nodes}
    names: dict[str, list[Any]] = {}
    transforms: dict[str, Any] = {}
    named_columns: dict[str, list[str]] = {}
    node_arrays, runs = dict[str, dict[str, DiskArray]](), dict[EdgeType, list[EdgeRun]]()
    paths = {t: resolve(file.parent, table.files) for t, table in described.nodes.items()}
    ids = {t: StoredIds(t, work.directory("ids") / str(at)) for at, t in enumerate(described.nodes)}
    tasks = [(ids[t], table, paths[t]) for t, table in described.nodes.items()]
    starts = dict(zip(ids, work.run("ids", StoredIds.read, tasks, [1] * len(tasks)), strict=True))
    tables = described.edge_tables
    edge_paths = {key: resolve(file.parent, table.files) for key, (_, table) in tables.items()}
    for at, (key, (etype, edges)) in enumerate(tables.items()):
        if edges.missing == "add":
            directory = work.directory(f"added-{at}")
            ends = dict.fromkeys(etype[::2])
            new = [StoredIds(t, directory / str(n)) for n, t in enumerate(ends)]
            known = [ids[t] for t in etype[::2]]
            work.run(f"added-{at}", _add_ids, [(edges, edge_paths[key], known, new)], [1])
            ids |= {one.ntype: one for one in new}
    for at, (ntype, table) in enumerate(described.nodes.items()):
        num, files = len(ids[ntype]), paths[ntype]
        columns = TableArrays(table, to.vocabulary.get(ntype))
        transforms |= columns.fit(ntype, files, to, work.directory(f"features-{at}"), num)
        named_columns |= {f"{ntype}/{n}": one.names for n, one in columns.features.items()}
        arrays = _node_arrays(columns, files, starts[ntype], num, f"features-{at}", work)
        encoded, encoders = texts.arrays(ntype, f"nodes.{ntype}", table, files, num)
        arrays, transforms = arrays | encoded, transforms | encoders
        order = [*table.features, *encoded, *table.categories, "time", *arrays]
        node_arrays[ntype] = {name: arrays[name] for name in order if name in arrays}
        names |= {f"{ntype}/{name}": values for name, values in columns.names.items()}
    reverses: dict[EdgeType, EdgeType] = {}
    for at, (key, (etype, edges)) in enumerate(tables.items()):
        vocabulary = to.vocabulary.get(etype_str(etype))
        if edges.reverse is not None:
            reverses[etype] = (etype[2], edges.reverse, etype[0])
            vocabulary = vocabulary or to.vocabulary.get(etype_str(reverses[etype]))
        columns, stage = TableArrays(edges, vocabulary), f"edges-{at}" if at else "edges"
        files = edge_paths[key]
        transforms |= columns.fit(etype_str(etype), files, to, work.directory(stage))
        of_ends = ids[etype[0]], ids[etype[2]]
        by_type, encoders = _edges(etype, dotted(key), columns, files, of_ends, texts, work, stage)
        transforms, runs = transforms | encoders, runs | by_type
        for one in by_type:
            origin[etype_str(one)] = f"{file}: {dotted(key)}"
            names |= {f"{etype_str(one)}/{name}": of for name, of in columns.names.items()}
    others = {
        "name": file.stem,
        "origin": origin,
        "ids": {ntype: stored.values() for ntype, stored in ids.items()},
        "names": names,
        "reverses": reverses,
        "transforms": transforms,
        "columns": named_columns,
        "microseconds": described.microseconds,
    }
    return DiskGraph({t: len(stored) for t, stored in ids.items()}, node_arrays, runs, others)


def extents(graph: TablesGraph) -> Iterator[tuple[Table, int, int]]:
    """Yield each table with the estimated number of its rows and bytes of its arrays."""
    file, described = Path(graph.path), description_of(graph)
    queries, edges = queries_of(file, described), described.edge_tables.values()
    keys = [(f"nodes.{etype[0]}", one) for etype, one in edges if isinstance(one, KeyTable)]
    for key, table in [*described.tables.items(), *keys]:
        if key in queries:
            yield table, *queries[key].extent()
            continue
        ends = [getattr(table, "id", None) or ROW]
        ends = [table.source, table.target] if isinstance(table, EdgeTable) else ends
        arrays, files = TableArrays(table), resolve(file.parent, table.files)
        rows, size = TableReader(files, [*ends, *arrays.columns], table.delimiter).extent()
        made = sum(matrix.widening for matrix in arrays.features.values())
        yield table, rows, size + rows * (made + 4 * sum(t.width for t in table.text.values()))


def in_memory(graph: DiskGraph) -> GraphData:
    """Read all arrays into memory; reverse edges share the arrays of their edges."""
    data = graph.data()
    back = {reverse: etype for etype, reverse in data.reverses.items()}
    frames = [frame for etype, frame in data.edges.items() if etype not in back]
    arrays = [array for frame in data.nodes.values() for array in frame.data.values()]
    arrays += [array for frame in frames for array in (frame.src, frame.dst, *frame.data.values())]
    check_fits_memory(sum(a.nbytes for a in arrays), "the graph's arrays", data.where(""))
    for ntype, stored in graph.node_arrays.items():  # read, as mapped pages would count twice
        data.nodes[ntype].data = {name: one.read(0, len(one)) for name, one in stored.items()}
    for etype, frame in data.edges.items():
        if etype in back:
            one = data.edges[back[etype]]
            frame.src, frame.dst, frame.data = one.dst, one.src, dict(one.data)
            continue
        frame.src, frame.dst = np.empty((2, frame.num), np.int64)
        frame.data = {name: np.empty_like(array, subok=False) for name, array in frame.data.items()}
        for run in graph.runs[etype]:
            at = slice(run.first, run.first + run.num)
            frame.src[at], frame.dst[at] = run.ends()
            for name, rows in frame.data.items():
                rows[at] = run.rows(name)
    data.ids = {ntype: values.combine_chunks() for ntype, values in data.ids.items()}
    return data


def _add_ids(
    table: EdgeTable, files: Sequence[AnyPath], known: Sequence[StoredIds], new: Sequence[StoredIds]
) -> None:
    """Store the ids of each type, with those that a table of edges adds."""
    with closing(_ends(table, known, new[0].file)) as ends:
        for chunk in TableReader(files, ends.columns, table.delimiter).chunks():
            ends.add(chunk)
        for one in new:
            values = ends.learn(one.ntype)
            one.write(values.type, values.chunks)


def _ends(table: EdgeTable, stored: Sequence[StoredIds], file: Path) -> Ends:
    """Return `Ends` of a table, which spill to an empty directory beside a file."""
    spill, of_type = file.with_suffix(".spill"), {one.ntype: one.ids() for one in stored}
    shutil.rmtree(spill, ignore_errors=True)
    columns, ids = (table.source, table.target), [of_type[one.ntype] for one in stored]
    return Ends(columns, ids, table.missing, spill, nulls=isinstance(table, KeyTable))


def _node_arrays(
    columns: TableArrays,
    files: Sequence[AnyPath],
    starts: Sequence[int],
    num: int,
    stage: str,
    work: Workspace,
) -> dict[str, DiskArray]:
    """Read node arrays in one task per file, and fill in the nodes that edges added."""
    arrays = _files(columns, work.directory(stage), num)
    for array in arrays.values():
        with array.path.open("ab") as whole:
            whole.truncate(num * array.row_bytes)
    tasks = [(file, start, columns, arrays) for file, start in zip(files, starts, strict=True)]
    sizes = [end - start for start, end in itertools.pairwise([*starts, num])]
    read = sum(work.run(stage, _read_nodes, tasks, sizes))
    for name, value in columns.added.items() if read < num else ():
        arrays[name].map(writable=True)[read:] = value
    return arrays


def _files(columns: TableArrays, place: Path, rows: int | None = None) -> dict[str, DiskArray]:
    """Return the files of a table's arrays in a directory."""
    kinds = enumerate(columns.kinds.items())
    return {name: DiskArray(place / f"array-{at}", *kind, rows=rows) for at, (name, kind) in kinds}


def _read_nodes(
    file: AnyPath, start: int, columns: TableArrays, arrays: Mapping[str, DiskArray]
) -> int:
    """Write a file's rows to all arrays, from row ``start`` on. Returns their number."""
    reader = TableReader([file], columns.columns, columns.table.delimiter)
    with ExitStack() as stack:
        streams = {n: stack.enter_context(array.path.open("r+b")) for n, array in arrays.items()}
        for name, stream in streams.items():
            stream.seek(start * arrays[name].row_bytes)
        for chunk in reader.chunks():
            for name, rows in columns.rows(chunk, start + chunk.first).items():
                streams[name].write(element_bytes(rows))
    return reader.num


def _edges(
    etype: EdgeType,
    key: str,
    columns: TableArrays,
    files: Sequence[AnyPath],
    ends: tuple[StoredIds, StoredIds],
    texts: Texts,
    work: Workspace,
    stage: str,
) -> tuple[dict[EdgeType, list[EdgeRun]], dict[str, Any]]:
    """Read the edges of a table. Returns their runs by edge type, with reverse edges if configured,
    and the encoders of texts."""
    table, place = columns.table, work.directory(stage)
    assert isinstance(table, EdgeTable)
    least = sys.maxsize if table.source == ROW else max(_TOGETHER, _ID * sum(map(len, ends)))
    groups = list(_groups(files, least))  # one group if rows are numbered, over all files
    sizes = [sum(file.stat().st_size for file in group) for group in groups]
    before = itertools.accumulate(map(len, groups[:-1]), initial=0)  # files before each group
    starts = [columns.starts[at] if columns.starts else 0 for at in before]
    tasks = [
        (group, start, columns, ends, place / str(at))
        for at, (group, start) in enumerate(zip(groups, starts, strict=True))
    ]
    counts = work.run(stage, _read_edges, tasks, sizes)
    kept = [DiskArray(directory / "kept", "bool") for *_, directory in tasks]
    num = sum(count["rows"] for count in counts)
    encoded, encoders = texts.arrays(etype_str(etype), key, table, files, num, kept)
    parts, forward = [], list[EdgeRun]()
    for (*_, directory), count in zip(tasks, counts, strict=True):
        src, dst = (
            DiskArray(directory / name, index_type(len(one)).__name__)
            for name, one in zip(("src", "dst"), ends, strict=True)
        )
        data = _files(columns, directory) | {
            n: replace(array, offset=_total(forward) * array.row_bytes, rows=count["kept"])
            for n, array in encoded.items()
        }
        parts.append((src, dst, data))
        forward += runs_of(src, dst, data, _total(forward))
    runs = {etype: forward}
    if table.reverse is not None:
        runs[etype[2], table.reverse, etype[0]] = reversed_runs(forward)
    for src, dst, data in parts if table.undirected else ():
        forward += runs_of(dst, src, data, _total(forward), no_loops=True)
    return runs, encoders


def _groups(files: Sequence[AnyPath], least: int) -> Iterator[list[AnyPath]]:
    """Yield groups of consecutive files with at least ``least`` bytes; the last may have fewer."""
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
    first_row: int,
    columns: TableArrays,
    stored: tuple[StoredIds, StoredIds],
    directory: Path,
) -> dict[str, int]:
    """Store the edges of some files. Returns the number of rows, and of rows kept."""
    table = columns.table
    assert isinstance(table, EdgeTable)
    directory.mkdir(exist_ok=True)
    ends, count = _ends(table, stored, directory / "ends"), 0
    reader = TableReader(files, [*ends.columns, *columns.columns], table.delimiter)
    arrays = _files(columns, directory)
    with ExitStack() as stack:
        stack.callback(ends.close)
        paths = [directory / name for name in ("src", "dst", "kept")]
        paths += [array.path for array in arrays.values()]
        src, dst, kept, *others = [stack.enter_context(Appended(path)) for path in paths]
        for chunk in reader.chunks():
            ends.add(chunk)
            made = columns.rows(chunk, first_row + chunk.first)
            for array, rows in zip(others, made.values(), strict=True):
                array.add(rows)
        for found in ends.numbers(reader):
            keep = (found[0] >= 0) & (found[1] >= 0)
            count += int(keep.sum())
            kept.add(keep)
            for array, numbers, one in zip((src, dst), found, ends.ids, strict=True):
                array.add(numbers[keep].astype(index_type(len(one)), copy=False))
    for written in arrays.values() if count < reader.num else ():
        _compact(written, DiskArray(directory / "kept", "bool").map())
    return {"rows": reader.num, "kept": count}


def _compact(array: DiskArray, keep: Array) -> None:
    """Remove rows from a file, all but those to keep."""
    stored, draft = array.map(), array.path.with_name(f"{array.path.name}.draft")
    with Appended(draft) as out:
        for start in range(0, len(keep), _TOGETHER >> 4):
            at = slice(start, start + (_TOGETHER >> 4))
            out.add(stored[at][keep[at]])
    draft.replace(array.path)
