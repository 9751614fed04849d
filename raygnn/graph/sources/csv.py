"""A directory that ``dgl.data.CSVDataset`` reads: ``meta.yaml``, and CSV files of one graph.

The graph is the one that DGL makes of it: nodes in the order of their ids, edges in that of their
rows, an array for each column. Ids are kept, and predictions are written by them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc

from raygnn.config.graph import CsvGraph
from raygnn.graph.data import MASKS, EdgeFrame, EdgeType, GraphData, NodeFrame, etype_str
from raygnn.graph.sources.convert import Array, to_labels, to_mask
from raygnn.graph.sources.files import check_file
from raygnn.graph.tables import csv_text
from raygnn.graph.tables.columns import shown
from raygnn.graph.tables.csv_meta import EdgeFile, NodeFile, read_meta
from raygnn.graph.tables.growing import Growing
from raygnn.graph.tables.ids import Ids
from raygnn.graph.tables.inferred import Inferred
from raygnn.graph.tables.reader import Chunk, Reader, resolve

VERSION = 1
DEFAULT_NORMALIZE = "none"
META = "meta.yaml"


def files(graph: CsvGraph) -> list[Path]:
    """``meta.yaml``, and the files in its order.

    Raises:
        ConfigError, DataError: it is wrong, or there is no such file.
    """
    file = Path(graph.path) / META
    meta = read_meta(file)
    tables: list[NodeFile | EdgeFile] = [*meta.node_data, *meta.edge_data]
    return [file, *(_file(file, each) for each in tables)]


def reading_bytes(graph: CsvGraph) -> int:
    """See :func:`raygnn.graph.sources.reading_bytes`."""
    file = Path(graph.path) / META
    meta = read_meta(file)
    tables: list[NodeFile | EdgeFile] = [*meta.node_data, *meta.edge_data]
    return sum(_Table(file, each, (), meta.separator).reader.reading_bytes() for each in tables)


def read(graph: CsvGraph) -> GraphData:
    """The graph, with an array for each column: bool, int64 or float32, ``[N]`` or, of vectors
    such as ``"0.1, 0.2"``, ``[N, W]``; ``feat`` is always ``[N, F]``.

    ``label`` of nodes is int64 ``[N]`` (-1 = unknown), or float32 (NaN = unknown) where it has
    fractions; masks become bool ``[N]``.

    Raises:
        ConfigError: ``meta.yaml`` is wrong; its keys and lines are named.
        DataError: a table is; its file, row and column are named.
    """
    file = Path(graph.path) / META
    meta = read_meta(file)
    origin = {"": str(file)}
    nodes: dict[str, NodeFrame] = {}
    ids: dict[str, Ids] = {}
    for node in meta.node_data:
        table = _Table(file, node, (node.node_id_field,), meta.separator)
        found = ids[node.ntype] = Ids(node.ntype)
        for chunk in table.chunks():
            found.add(chunk, node.node_id_field)
        found.close(table.reader, node.node_id_field)
        order = found.sort()
        data = {name: rows[order] for name, rows in table.arrays(nodes=True).items()}
        nodes[node.ntype] = NodeFrame(len(found), data)
        origin |= {f"{node.ntype}/{name}": str(_file(file, node)) for name in data}
    edges: dict[EdgeType, EdgeFrame] = {}
    for edge in meta.edge_data:
        etype = edge.edge_type
        edges[etype] = _edges(file, edge, meta.separator, ids)
        each = str(_file(file, edge))
        origin |= {
            f"{etype_str(etype)}/{name}": each for name in ("src", "dst", *edges[etype].data)
        }
    values = {ntype: known.values for ntype, known in ids.items()}
    return GraphData(meta.dataset_name, nodes, edges, origin, values)


class _Table:
    """One CSV file, of whose columns all are read: some as ids, the others as arrays."""

    def __init__(self, meta: Path, table: NodeFile | EdgeFile, ids: Sequence[str], separator: str):
        file = _file(meta, table)
        check_file(file)
        names = csv_text.header(file, separator)
        self._graphs = table.graph_id_field if table.graph_id_field in names else None
        apart = {*ids, self._graphs}
        # pandas calls a column without a name so, and DGL leaves it out
        named = [name for name in names if name and "Unnamed" not in name]
        self._columns = {
            name: Inferred(name, nulls=name == "label") for name in named if name not in apart
        }
        self.reader = Reader([file], [*ids, *named], separator)
        self._first: Any = None

    def chunks(self) -> Iterator[Chunk]:
        """The file's chunks; its arrays are there after the last."""
        for chunk in self.reader.chunks():
            self._check_graph(chunk)
            for column in self._columns.values():
                column.add(chunk)
            yield chunk

    def arrays(self, *, nodes: bool) -> dict[str, Array]:
        file, found = str(self.reader.files[0]), {}
        for name, column in self._columns.items():
            rows = column.take()
            if name in MASKS:
                rows = to_mask(rows, f"{file}, column {name!r}")
            elif name == "label" and nodes and not _has_fractions(rows):
                rows = to_labels(rows, f"{file}, column 'label'")
            elif name == "feat" and rows.ndim == 1:
                rows = rows.reshape(-1, 1)
            found[name] = rows
        return found

    def _check_graph(self, chunk: Chunk) -> None:
        """That all rows are of one graph."""
        if self._graphs is None:
            return
        known = chunk.columns[self._graphs]
        first = known[0] if self._first is None else self._first
        self._first = first
        other = pc.fill_null(pc.not_equal(known, first), True)
        if pc.any(other).as_py():
            row = int(np.argmax(other.to_numpy(zero_copy_only=False)))
            what = f"the row is of graph {shown(known[row])}, those before of {shown(first)}"
            remedy = (
                "one graph is read: read it with dgl.data.CSVDataset, save graphs and labels "
                "with dgl.save_graphs, and use format: graphs"
            )
            raise chunk.error(row, self._graphs, what, remedy)


def _has_fractions(rows: Array) -> bool:
    """Whether labels are numbers to be predicted, not classes."""
    return rows.dtype.kind == "f" and bool((rows != np.trunc(rows))[~np.isnan(rows)].any())


def _edges(meta: Path, edge: EdgeFile, separator: str, ids: dict[str, Ids]) -> EdgeFrame:
    ends = [(edge.src_id_field, ids[edge.etype[0]]), (edge.dst_id_field, ids[edge.etype[2]])]
    table = _Table(meta, edge, [column for column, _ in ends], separator)
    found = [Growing(np.int64), Growing(np.int64)]
    for chunk in table.chunks():
        for growing, (column, known) in zip(found, ends, strict=True):
            growing.append(known.numbers(chunk, column, "refuse")[0])
    return EdgeFrame(found[0].take(), found[1].take(), table.arrays(nodes=False))


def _file(meta: Path, table: NodeFile | EdgeFile) -> Path:
    return resolve(meta.parent, table.file_name)[0]
