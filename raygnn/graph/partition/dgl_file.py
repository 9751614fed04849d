"""DGL's two binary file formats, read and written without DGL.

Tensor files (``dgl.data.utils.save_tensors``) hold named arrays, graph files
(``dgl.save_graphs``) hold graphs with node and edge data. DGL's own reader trusts what it reads:
a file cut short can crash the process, or come back as uninitialised memory without any error.
This one checks every length against the file and raises DataError with the file's name.
What is written here is byte for byte what DGL writes, except that padding is zero.
Arrays are numpy's, so that a file can be refused without the seconds that torch takes to import;
only bfloat16, which numpy lacks, comes as torch tensors.

The formats are those of DGL 0.5 to 2.4 (``src/graph/serialize`` and ``src/runtime/ndarray.cc``
in its sources), little-endian throughout.
"""

from __future__ import annotations

import contextlib
import hashlib
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np

from raygnn.graph.arrays import CODES, Array, Rows, dtype_name, element_bytes, storable
from raygnn.graph.partition.dgl_read import (
    COO,
    CSR,
    FORMAT_BITS,
    GRAPH_FILE,
    GRAPH_VERSION,
    HEADER_BYTES,
    HETERO_GRAPH,
    HETERO_KIND,
    META_GRAPH,
    NDARRAY,
    NEW_STYLE,
    TENSOR_FILE,
    UNIT_GRAPH,
    Readable,
    Relation,
    StoredGraph,
    open_file,
)
from raygnn.util.files import sync_file

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "GraphFile",
    "Readable",
    "Relation",
    "StoredGraph",
    "Written",
    "open_graphs",
    "read_graphs",
    "read_tensor",
    "read_tensors",
    "write_graph",
    "write_tensors",
]

_ALL_FORMATS = 7
_WRITE_BYTES = 1 << 20


@dataclass(frozen=True)
class GraphFile:
    """A graph file that is open: how many graphs it holds, the arrays saved as labels (as they
    are, of any length), and the graphs, to be read once while it is open."""

    count: int
    labels: dict[str, Array | Tensor]
    graphs: Iterator[StoredGraph]


@dataclass(frozen=True)
class Written:
    """What was written: bytes and SHA-256 in hex."""

    size: int
    sha256: str


def read_tensors(path: Readable) -> dict[str, Array | Tensor]:
    """The named arrays of a tensor file. Raises DataError for anything but a whole one."""
    with open_file(path) as reader:
        reader.magic(TENSOR_FILE, "tensor file")
        declared = reader.u64()
        arrays = reader.named_arrays()
        # DGL writes the number of entries twice, the first one 0 for an empty dictionary
        if declared not in (0, len(arrays)):
            raise reader.bad(f"says {declared} tensors and holds {len(arrays)}")
        reader.end()
        return arrays


def read_tensor(path: Readable, name: str) -> Array | Tensor | None:
    """One of the arrays of a tensor file, the others skipped; None if it is not there."""
    with open_file(path) as reader:
        reader.magic(TENSOR_FILE, "tensor file")
        reader.skip(8)
        return reader.named_arrays(name).get(name)


def read_graphs(path: Readable) -> list[StoredGraph]:
    """The graphs of a graph file. Raises DataError for anything but a whole one."""
    with open_graphs(path) as file:
        return list(file.graphs)


@contextlib.contextmanager
def open_graphs(path: Readable) -> Iterator[GraphFile]:
    """A graph file, to be read graph by graph; raises DataError as :func:`read_graphs` does."""
    with open_file(path) as reader:
        reader.magic(GRAPH_FILE, "graph file")
        if (version := reader.u64()) != GRAPH_VERSION:
            raise reader.bad(f"is of format version {version}; only {GRAPH_VERSION} can be read")
        if reader.u64() != HETERO_KIND:
            raise reader.bad("is of a kind that DGL has not written since 0.5")
        count = reader.u64()
        reader.skip(HEADER_BYTES - reader.at)
        start = reader.u64()
        labels = reader.named_arrays()
        if reader.at != start:
            raise reader.bad(f"has labels that do not end at byte {start}, as it says")
        yield GraphFile(reader.fits(count, 8), labels, reader.graphs(count))


def write_tensors(path: Path, arrays: Mapping[str, Array | Tensor | Rows]) -> Written:
    """Write a tensor file that ``dgl.data.utils.load_tensors`` reads.

    Raises ValueError for an array that DGL cannot store; OSError as writing files does.
    """
    with path.open("wb") as file:
        writer = _Writer(file)
        writer.u64(TENSOR_FILE, len(arrays))
        writer.named_arrays(arrays)
        return writer.done()


def write_graph(
    path: Path,
    num_nodes: int,
    src: Array | Tensor,
    dst: Array | Tensor,
    ndata: Mapping[str, Array | Tensor],
    edata: Mapping[str, Array | Tensor],
) -> Written:
    """Write one homogeneous graph, in COO, as a graph file that ``dgl.load_graphs`` reads.

    Args:
        src, dst: int64 ``[E]``, ids in ``0 … num_nodes-1``.
        ndata, edata: name → array with ``num_nodes`` or ``E`` rows.
    """
    nothing = np.empty(0, dtype=np.int64)
    with path.open("wb") as file:
        writer = _Writer(file)
        writer.u64(GRAPH_FILE, GRAPH_VERSION, HETERO_KIND, 1)
        writer.raw(bytes(HEADER_BYTES - writer.size))
        start = writer.size + 16
        writer.u64(start, 0)  # no labels
        writer.u64(HETERO_GRAPH)
        writer.meta_graph()
        writer.u64(1, UNIT_GRAPH, FORMAT_BITS["coo"] | NEW_STYLE, _ALL_FORMATS | NEW_STYLE)
        writer.meta_graph()
        writer.u64(COO, num_nodes, num_nodes)
        for array in (src, dst, nothing):
            writer.array(array)
        writer.raw(bytes(2))  # neither rows nor columns are declared sorted
        writer.u64(1, num_nodes)
        writer.u64(1)
        writer.named_arrays(ndata)
        writer.u64(1)
        writer.named_arrays(edata)
        writer.u64(1)
        writer.string("_N")
        writer.u64(1)
        writer.string("_E")
        writer.u64(16, 1, start, 16)
        return writer.done()


class _Writer:
    """Writes and hashes at once, so that nothing is read back for its checksum; ends durable."""

    def __init__(self, file: BinaryIO):
        self.file = file
        self.size = 0
        self.hash = hashlib.sha256()

    def raw(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        for start in range(0, len(view), _WRITE_BYTES):  # hashed while the cache has it
            chunk = view[start : start + _WRITE_BYTES]
            self.hash.update(chunk)
            self.file.write(chunk)
        self.size += len(view)

    def u64(self, *values: int) -> None:
        self.raw(struct.pack(f"<{len(values)}Q", *values))

    def string(self, text: str) -> None:
        data = text.encode()
        self.u64(len(data))
        self.raw(data)

    def array(self, array: Array | Tensor | Rows) -> None:
        if not storable(array):
            raise ValueError(f"DGL's files cannot hold {dtype_name(array)}")
        code, bits = CODES[dtype_name(array)]
        self.raw(struct.pack("<QQiiiBBH", NDARRAY, 0, 1, 0, array.ndim, code, bits, 1))
        self.raw(struct.pack(f"<{array.ndim}qq", *array.shape, array.nbytes))
        for piece in array.pieces() if isinstance(array, Rows) else [array]:
            if piece.nbytes:
                self.raw(element_bytes(piece))

    def named_arrays(self, arrays: Mapping[str, Array | Tensor | Rows]) -> None:
        self.u64(len(arrays))
        for name, array in arrays.items():
            self.string(name)
            self.array(array)

    def meta_graph(self) -> None:
        """The meta graph of a homogeneous graph: one edge, from the only node type to itself."""
        self.u64(META_GRAPH, CSR, 1, 1)
        for values in ([0, 1], [0], [0]):
            self.array(np.array(values, dtype=np.int64))
        self.raw(bytes(1))

    def done(self) -> Written:
        sync_file(self.file)
        return Written(self.size, self.hash.hexdigest())
