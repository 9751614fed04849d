"""Reader and writer of DGL's two binary file formats, without DGL.

Tensor files (``dgl.data.utils.save_tensors``) hold named arrays, graph files (``dgl.save_graphs``)
hold graphs with node and edge data. DGL's reader does not validate files: a truncated one can crash
the process or return uninitialised memory. This reader checks every length against the file and
raises DataError with the file's name. The writer's output is byte for byte DGL's, except that
padding is zero. Arrays are numpy's, so that a file can be refused without importing torch; only
bfloat16, which numpy lacks, is read as torch tensors. Large arrays are mapped.

The formats are those of DGL 0.5 to 2.4 (``src/graph/serialize`` and ``src/runtime/ndarray.cc`` in
its sources), little-endian throughout.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from raygnn.errors import DataError
from raygnn.graph.arrays import (
    CODES,
    DTYPES,
    AnyArray,
    Array,
    OnDemand,
    csr_rows,
    dtype_name,
    element_bytes,
    storable,
    stored_dtype,
)
from raygnn.graph.data import GraphData
from raygnn.graph.partition.manifest import FileFacts, compare
from raygnn.storage.remote import AnyPath
from raygnn.util.files import sync_file

if TYPE_CHECKING:
    from torch import Tensor

_TENSOR_FILE = 0xDD5A9FBE3FA2443F
_GRAPH_FILE = 0xDD2E4FF046B4A13F
_NDARRAY = 0xDD5E40F096B4A13F
_HETERO_GRAPH = 0xDD589FBE35224ABF
_UNIT_GRAPH = 0xDD2E60F0F6B4A127
_META_GRAPH = 0xDD3C5FFE20046ABF
_CSR = 0xDD6CD31205DFF127
_COO = 0xDD61FFD305DFF127

_GRAPH_VERSION = 2
_HETERO_KIND = 2
_HEADER_BYTES = 4096
_FORMAT_BITS = {"coo": 1, "csr": 2, "csc": 4}
_ALL_FORMATS = 7
_NEW_STYLE = 1 << 32  # marks format codes as bit sets
_MAX_DIMS = 16
_CHUNK = 1 << 20  # bytes hashed at a time, while they are in the processor's cache
_MAPPED = 1 << 24  # bytes from which on arrays of local files are mapped instead of copied

Sparse = tuple[Array, Array, Array]


@dataclass
class Relation:
    """Edges of one type: sources, destinations and ids, int32 or int64 ``[E]``; empty ids mean
    0 … E-1."""

    src_type: int
    dst_type: int
    src: Array
    dst: Array
    ids: Array


@dataclass
class StoredGraph:
    """One graph of a graph file. ``ndata`` and ``edata`` are per node type and per relation."""

    ntypes: list[str]
    etypes: list[str]
    num_nodes: list[int]
    relations: list[Relation]
    ndata: list[dict[str, Array | Tensor]]
    edata: list[dict[str, Array | Tensor]]


def read_tensors(
    path: AnyPath, expected: FileFacts | None = None, only: str | None = None
) -> dict[str, Array | Tensor]:
    """Read the named arrays of a tensor file, or ``only`` one of them; ``expected`` size and hash
    are checked meanwhile."""
    with _open(path, expected) as reader:
        reader.magic(_TENSOR_FILE, "tensor file")
        reader.skip(8)  # the number of arrays, which is repeated below
        arrays = reader.named_arrays(only)
        reader.end()
        return arrays


def read_graphs(path: AnyPath, expected: FileFacts | None = None) -> list[StoredGraph]:
    """Read the graphs of a graph file. Arguments and errors as of :func:`read_tensors`."""
    with open_graphs(path, expected) as (_, _, graphs):
        return list(graphs)


@contextlib.contextmanager
def open_graphs(
    path: AnyPath, expected: FileFacts | None = None
) -> Iterator[tuple[int, dict[str, Array | Tensor], Iterator[StoredGraph]]]:
    """Open a graph file: yields the number of graphs, label arrays, and the graphs, to iterate
    once; see :func:`read_graphs`."""
    with _open(path, expected) as reader:
        reader.magic(_GRAPH_FILE, "graph file")
        if (version := reader.u64()) != _GRAPH_VERSION:
            raise reader.bad(f"is of format version {version}; only {_GRAPH_VERSION} can be read")
        if reader.u64() != _HETERO_KIND:
            raise reader.bad("is of a kind that DGL has not written since 0.5")
        count = reader.u64()
        reader.skip(_HEADER_BYTES - reader.at)
        start = reader.u64()
        labels = reader.named_arrays()
        if reader.at != start:
            raise reader.bad(f"has labels that do not end at byte {start}, as it says")
        yield reader.fits(count, 8), labels, reader.graphs(count)


def write_tensors(path: Path, arrays: Mapping[str, AnyArray]) -> FileFacts:
    """Write a tensor file, durably, for ``dgl.data.utils.load_tensors``. Raises ValueError for a
    dtype that DGL cannot store, and OSError."""
    with path.open("wb") as file:
        writer = _DglWriter(file)
        writer.u64(_TENSOR_FILE, len(arrays))
        writer.named_arrays(arrays)
        return writer.done()


def write_graph(path: Path, graph: GraphData) -> FileFacts:
    """Write a graph, in COO, durably, for ``dgl.load_graphs``; errors as of `write_tensors`."""
    places = {ntype: place for place, ntype in enumerate(graph.nodes)}
    with path.open("wb") as file:
        writer = _DglWriter(file)
        writer.u64(_GRAPH_FILE, _GRAPH_VERSION, _HETERO_KIND, 1)
        writer.raw(bytes(_HEADER_BYTES - writer.size))
        start = writer.size + 16
        writer.u64(start, 0)  # no labels
        writer.u64(_HETERO_GRAPH)
        writer.meta_graph(len(places), [(places[src], places[dst]) for src, _, dst in graph.edges])
        writer.u64(len(graph.edges))
        for (src, _, dst), relation in graph.edges.items():
            writer.u64(_UNIT_GRAPH, _FORMAT_BITS["coo"] | _NEW_STYLE, _ALL_FORMATS | _NEW_STYLE)
            writer.meta_graph(*((1, [(0, 0)]) if src == dst else (2, [(0, 1)])))
            writer.u64(_COO, graph.nodes[dst].num, graph.nodes[src].num)
            for array in (relation.src, relation.dst, np.empty(0, dtype=np.int64)):
                writer.array(array)
            writer.raw(bytes(2))  # neither rows nor columns are declared sorted
        writer.u64(len(places), *(frame.num for frame in graph.nodes.values()))
        for frames in (graph.nodes.values(), graph.edges.values()):
            writer.u64(len(frames))
            for frame in frames:
                writer.named_arrays(frame.data)
        for names in (list(graph.nodes), [name for _, name, _ in graph.edges]):
            writer.u64(len(names))
            for name in names:
                writer.string(name)
        writer.u64(16, 1, start, 16)
        return writer.done()


@contextlib.contextmanager
def _open(path: AnyPath, expected: FileFacts | None = None) -> Iterator[_DglReader]:
    try:
        reader = _DglReader(path, path.open("rb", buffering=1 << 16), expected)
    except OSError as error:
        message = f"cannot be opened: {error.strerror}"
        remedy = "check the path and its permissions, or partition the graph again"
        raise DataError(message, where=str(path), remedy=remedy) from error
    with reader.file:
        yield reader


class _DglReader:
    """Cursor over a file that never reads, allocates or counts beyond its end."""

    def __init__(self, path: AnyPath, file: BinaryIO, expected: FileFacts | None):
        self.path = path
        self.file = file
        self.size = path.stat().st_size
        self.at = 0
        self._expected = expected
        self._hash = hashlib.sha256()
        if expected is not None:
            compare(path, expected, self.size)

    def bad(self, what: str) -> DataError:
        message = f"{what} (at byte {self.at} of {self.size})"
        remedy = "the file is damaged or was not written by DGL: copy or write it again"
        return DataError(message, where=str(self.path), remedy=remedy)

    def fits(self, count: int, width: int) -> int:
        """Return ``count`` if as many items of ``width`` bytes fit in the rest of the file."""
        if not 0 <= count * width <= self.size - self.at:
            raise self.bad("is cut short or garbled")
        return count

    def skip(self, count: int) -> None:
        end = self.at + self.fits(count, 1)
        while self._expected is not None and self.at < end:  # the hash covers all bytes
            self.raw(min(_CHUNK, end - self.at))
        self.at = end
        self.file.seek(end)

    def raw(self, count: int) -> bytes:
        data = bytearray(self.fits(count, 1))
        self.fill(memoryview(data))
        return bytes(data)

    def fill(self, buffer: memoryview) -> None:
        for start in range(0, len(buffer), _CHUNK):
            chunk = buffer[start : start + _CHUNK]
            try:
                count = self.file.readinto(chunk)  # type: ignore[attr-defined]
            except OSError as error:
                raise self.bad(f"cannot be read: {error.strerror or error}") from error
            if self._expected is not None:
                self._hash.update(chunk[:count])
            self.at += count
            if count != len(chunk):
                raise self.bad("is cut short")

    def u64(self) -> int:
        return int.from_bytes(self.raw(8), "little")

    def magic(self, expected: int, what: str) -> None:
        if self.size - self.at < 8 or self.u64() != expected:
            raise self.bad(f"holds no DGL {what} here")

    def end(self) -> None:
        if self.at != self.size:
            raise self.bad("goes on after its end")
        if self._expected is not None:
            compare(self.path, self._expected, self.at, self._hash.hexdigest())

    def string(self) -> str:
        return self.raw(self.u64()).decode("utf-8", "replace")

    def array(self) -> Array | Tensor:
        name, shape, dtype = self.array_head()
        array = self.mapped(shape, dtype)
        if array is None:
            array = np.empty(shape, dtype)
            if array.size:
                self.fill(element_bytes(array))
        if name != "bfloat16":
            return array
        import torch

        return torch.from_numpy(array).view(torch.bfloat16)

    def mapped(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array | None:
        """Map the array that follows, copy-on-write; None if it is small or cannot be mapped."""
        size = math.prod(shape) * dtype.itemsize
        if size < _MAPPED or not isinstance(self.path, Path):
            return None
        try:
            array = np.asarray(np.memmap(self.path, dtype, "c", self.at, shape))
        except (OSError, ValueError):
            return None
        self.skip(size)
        return array

    def array_head(self) -> tuple[str, tuple[int, ...], np.dtype[Any]]:
        """Read dtype name, shape and dtype in memory of the array whose elements follow."""
        self.magic(_NDARRAY, "array")
        _, _, _, ndim, code, bits, lanes = struct.unpack("<QiiiBBH", self.raw(24))
        name = DTYPES.get((code, bits))
        if name is None or lanes != 1 or not 0 <= ndim <= _MAX_DIMS:
            raise self.bad(f"holds an array of unknown type (code {code}, {bits} bits)")
        dtype = stored_dtype(name)
        shape = struct.unpack(f"<{ndim}q", self.raw(8 * ndim))
        # numpy and torch refuse shapes whose strides overflow, even without elements
        if min(shape, default=1) < 0 or math.prod(max(n, 1) for n in shape) >= 2**60:
            raise self.bad(f"holds an array of impossible shape {shape}")
        elements = math.prod(shape)
        if self.u64() != elements * dtype.itemsize:
            raise self.bad(f"holds an array whose size does not match its shape {shape}")
        self.fits(elements, dtype.itemsize)
        return name, shape, dtype

    def named_arrays(self, only: str | None = None) -> dict[str, Array | Tensor]:
        """Read arrays; with ``only``, skip all but this one."""
        arrays: dict[str, Array | Tensor] = {}
        for _ in range(self.fits(self.u64(), 8)):
            name = self.string()
            if only in (None, name):
                arrays[name] = self.array()
            else:
                _, shape, dtype = self.array_head()
                self.skip(math.prod(shape) * dtype.itemsize)
        return arrays

    def frames(self, count: int, unit: str) -> list[dict[str, Array | Tensor]]:
        if self.u64() != count:
            raise self.bad(f"does not hold data for each {unit} type")
        return [self.named_arrays() for _ in range(count)]

    def sparse(self, magic: int, flags: int) -> Sparse:
        self.magic(magic, "sparse matrix")
        self.skip(16)  # rows and columns
        arrays = self.indices(), self.indices(), self.indices()
        self.skip(flags)
        return arrays

    def indices(self) -> Array:
        array: Any = self.array()
        if array.ndim != 1 or dtype_name(array) not in ("int32", "int64"):
            raise self.bad("holds a sparse matrix whose indices are no integers")
        return np.asarray(array)

    def meta_graph(self) -> Sparse:
        self.magic(_META_GRAPH, "meta graph")
        return self.sparse(_CSR, 1)

    def graph(self) -> StoredGraph:
        self.magic(_HETERO_GRAPH, "graph")
        indptr, dst_types, order = self.meta_graph()
        count = len(dst_types)
        src_types = csr_rows(indptr, count, self.bad)
        if len(order) and not np.array_equal(np.sort(order), np.arange(count)):
            raise self.bad("has a meta graph whose edge ids are not a permutation of 0, 1, …")
        if self.u64() != count:
            raise self.bad("does not hold one matrix for each edge type")
        place = np.argsort(order) if len(order) else range(count)
        relations = [self.relation(int(src_types[at]), int(dst_types[at])) for at in place]
        num_nodes = [self.u64() for _ in range(self.fits(self.u64(), 8))]
        ndata = self.frames(len(num_nodes), "node")
        edata = self.frames(len(relations), "edge")
        ntypes, etypes = (
            [self.string() for _ in range(self.fits(self.u64(), 8))] for _ in range(2)
        )
        if len(ntypes) != len(num_nodes) or len(etypes) != len(relations):
            raise self.bad("does not name each type")
        return StoredGraph(ntypes, etypes, num_nodes, relations, ndata, edata)

    def graphs(self, count: int) -> Iterator[StoredGraph]:
        """Yield all graphs, then check that the file ends there."""
        for _ in range(count):
            yield self.graph()
        # The trailer lists where each graph starts; a file without it was cut short.
        if self.u64() != 8 + 8 * count or self.u64() != count:
            raise self.bad("does not end as a graph file does")
        self.skip(8 * count + 8)
        self.end()

    def relation(self, src_type: int, dst_type: int) -> Relation:
        self.magic(_UNIT_GRAPH, "graph of one edge type")
        saved = self.u64()
        self.skip(8)  # formats that DGL may create from it
        if not saved & _NEW_STYLE:  # DGL before 0.8 saved one: 1 = COO, 2 = CSR, 3 = CSC
            saved = 1 << (saved - 1) if 1 <= saved <= 3 else 0
        formats: dict[str, Sparse] = {}
        for name, bit in _FORMAT_BITS.items():
            if saved & bit:
                self.meta_graph()
                magic, flags = (_COO, 2) if name == "coo" else (_CSR, 1)
                formats[name] = self.sparse(magic, flags)
        if not formats:
            raise self.bad("holds a graph in no known sparse format")
        name, (first, second, ids) = next(iter(formats.items()))
        if name != "coo":
            first = csr_rows(first, len(second), self.bad)
        src, dst = (second, first) if name == "csc" else (first, second)
        if len(src) != len(dst) or len(ids) not in (0, len(src)):
            sizes = f"{len(src)} sources, {len(dst)} destinations and {len(ids)} edge ids"
            raise self.bad(f"holds {sizes}")
        return Relation(src_type, dst_type, src, dst, ids)


class _DglWriter:
    """Writer that hashes while it writes, so that nothing is read back for the checksum."""

    def __init__(self, file: BinaryIO):
        self.file = file
        self.size = 0
        self._hash = hashlib.sha256()

    def raw(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        for start in range(0, len(view), _CHUNK):
            chunk = view[start : start + _CHUNK]
            self._hash.update(chunk)
            self.file.write(chunk)
        self.size += len(view)

    def u64(self, *values: int) -> None:
        self.raw(struct.pack(f"<{len(values)}Q", *values))

    def string(self, text: str) -> None:
        data = text.encode()
        self.u64(len(data))
        self.raw(data)

    def array(self, array: AnyArray) -> None:
        if not storable(array):
            raise ValueError(f"DGL's files cannot hold {dtype_name(array)}")
        code, bits = CODES[dtype_name(array)]
        self.raw(struct.pack("<QQiiiBBH", _NDARRAY, 0, 1, 0, array.ndim, code, bits, 1))
        self.raw(struct.pack(f"<{array.ndim}qq", *array.shape, array.nbytes))
        end = self.size + array.nbytes
        for piece in array.pieces() if isinstance(array, OnDemand) else [array]:
            if piece.nbytes:
                self.raw(element_bytes(piece))
        assert self.size == end

    def named_arrays(self, arrays: Mapping[str, AnyArray]) -> None:
        self.u64(len(arrays))
        for name, array in arrays.items():
            self.string(name)
            self.array(array)

    def meta_graph(self, num: int, ends: list[tuple[int, int]]) -> None:
        """Write the graph of ``num`` node types, in which an edge is an edge type."""
        sources, targets = np.array(ends, dtype=np.int64).reshape(-1, 2).T
        order = np.argsort(sources, kind="stable")
        rows = np.searchsorted(sources[order], np.arange(num + 1))
        self.u64(_META_GRAPH, _CSR, num, num)
        for values in (rows, targets[order], order):
            self.array(values)
        self.raw(bytes(1))

    def done(self) -> FileFacts:
        sync_file(self.file)
        return FileFacts(bytes=self.size, sha256=self._hash.hexdigest())
