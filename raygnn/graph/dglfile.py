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

import hashlib
import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, Protocol

import numpy as np

from raygnn.errors import DataError
from raygnn.graph.arrays import (
    CODES,
    DTYPES,
    Array,
    csr_rows,
    dtype_name,
    element_bytes,
    storable,
)

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
_WRITE_BYTES = 1 << 20

Sparse = tuple[Array, Array, Array]


class Readable(Protocol):
    """What a file is read through: a path, or something that stands for one."""

    def open(self, mode: Literal["rb"], buffering: int) -> Any: ...

    def stat(self) -> Any: ...


@dataclass
class Relation:
    """The edges of one type: ``formats`` maps ``coo`` to (src, dst, edge ids) and ``csr``/``csc``
    to (indptr, indices, edge ids); empty edge ids stand for 0 … E-1."""

    src_type: int
    dst_type: int
    formats: dict[str, Sparse] = field(default_factory=dict)


@dataclass
class StoredGraph:
    """One graph of a graph file. ``ndata`` and ``edata`` are per node type and per relation."""

    ntypes: list[str]
    etypes: list[str]
    num_nodes: list[int]
    relations: list[Relation]
    ndata: list[dict[str, Array | Tensor]]
    edata: list[dict[str, Array | Tensor]]


@dataclass(frozen=True)
class Written:
    """What was written: bytes and SHA-256 in hex."""

    size: int
    sha256: str


def read_tensors(path: Readable) -> dict[str, Array | Tensor]:
    """The named arrays of a tensor file. Raises DataError for anything but a whole one."""
    with _open(path) as reader:
        reader.magic(_TENSOR_FILE, "tensor file")
        declared = reader.u64()
        arrays = reader.named_arrays()
        # DGL writes the number of entries twice, the first one 0 for an empty dictionary
        if declared not in (0, len(arrays)):
            raise reader.bad(f"says {declared} tensors and holds {len(arrays)}")
        reader.end()
        return arrays


def read_graphs(path: Readable) -> list[StoredGraph]:
    """The graphs of a graph file. Raises DataError for anything but a whole one."""
    with _open(path) as reader:
        reader.magic(_GRAPH_FILE, "graph file")
        if (version := reader.u64()) != _GRAPH_VERSION:
            raise reader.bad(f"is of format version {version}; only {_GRAPH_VERSION} can be read")
        if reader.u64() != _HETERO_KIND:
            raise reader.bad("is of a kind that DGL has not written since 0.5")
        count = reader.u64()
        reader.skip(_HEADER_BYTES - reader.at)
        reader.skip(reader.u64() - reader.at)  # over the labels
        graphs = [reader.graph() for _ in range(reader.fits(count, 8))]
        # The trailer lists where each graph starts; a file without it was cut short.
        if reader.u64() != 8 + 8 * count or reader.u64() != count:
            raise reader.bad("does not end as a graph file does")
        reader.skip(8 * count + 8)
        reader.end()
        return graphs


def write_tensors(path: Path, arrays: Mapping[str, Array | Tensor]) -> Written:
    """Write a tensor file that ``dgl.data.utils.load_tensors`` reads.

    Raises ValueError for an array that DGL cannot store; OSError as writing files does.
    """
    with path.open("wb") as file:
        writer = _Writer(file)
        writer.u64(_TENSOR_FILE, len(arrays))
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
        writer.u64(_GRAPH_FILE, _GRAPH_VERSION, _HETERO_KIND, 1)
        writer.raw(bytes(_HEADER_BYTES - writer.size))
        start = writer.size + 16
        writer.u64(start, 0)  # no labels
        writer.u64(_HETERO_GRAPH)
        writer.meta_graph()
        writer.u64(1, _UNIT_GRAPH, _FORMAT_BITS["coo"] | _NEW_STYLE, _ALL_FORMATS | _NEW_STYLE)
        writer.meta_graph()
        writer.u64(_COO, num_nodes, num_nodes)
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


def _open(path: Readable) -> _Reader:
    try:
        return _Reader(path, path.open("rb", buffering=1 << 16))
    except OSError as error:
        raise DataError(
            f"cannot be opened: {error.strerror}",
            where=str(path),
            remedy="check the path and its permissions, or make the partition again",
        ) from error


class _Reader:
    """A cursor over a file that never reads, allocates or counts beyond its end."""

    def __init__(self, path: Readable, file: BinaryIO):
        self.path = path
        self.file = file
        self.size = path.stat().st_size
        self.at = 0

    def __enter__(self) -> _Reader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.file.close()

    def bad(self, what: str) -> DataError:
        return DataError(
            f"{what} (at byte {self.at} of {self.size})",
            where=str(self.path),
            remedy="the file is damaged or was not written by DGL: copy or write it again",
        )

    def fits(self, count: int, each: int) -> int:
        """``count``, once it is sure that so many items of ``each`` bytes can still follow."""
        if not 0 <= count * each <= self.size - self.at:
            raise self.bad("is cut short or garbled")
        return count

    def skip(self, count: int) -> None:
        self.at += self.fits(count, 1)
        self.file.seek(self.at)

    def raw(self, count: int) -> bytes:
        self.fits(count, 1)
        self.at += count
        return self.file.read(count)

    def u64(self) -> int:
        return int.from_bytes(self.raw(8), "little")

    def magic(self, expected: int, what: str) -> None:
        if self.size - self.at < 8 or self.u64() != expected:
            raise self.bad(f"holds no DGL {what} here")

    def end(self) -> None:
        if self.at != self.size:
            raise self.bad("goes on after its end")

    def string(self) -> str:
        return self.raw(self.u64()).decode("utf-8", "replace")

    def strings(self) -> list[str]:
        return [self.string() for _ in range(self.fits(self.u64(), 8))]

    def array(self) -> Array | Tensor:
        self.magic(_NDARRAY, "array")
        _, _, _, ndim, code, bits, lanes = struct.unpack("<QiiiBBH", self.raw(24))
        name = DTYPES.get((code, bits))
        if name is None or lanes != 1 or not 0 <= ndim <= _MAX_DIMS:
            raise self.bad(f"holds an array of unknown type (code {code}, {bits} bits)")
        dtype = np.dtype(np.int16 if name == "bfloat16" else name)
        shape = struct.unpack(f"<{ndim}q", self.raw(8 * ndim))
        # numpy and torch refuse shapes whose strides overflow, even without elements
        if min(shape, default=1) < 0 or math.prod(max(n, 1) for n in shape) >= 2**60:
            raise self.bad(f"holds an array of impossible shape {shape}")
        elements = math.prod(shape)
        if self.u64() != elements * dtype.itemsize:
            raise self.bad(f"holds an array whose size does not fit its shape {shape}")
        self.fits(elements, dtype.itemsize)
        array: Array = np.empty(shape, dtype)
        if elements:
            into = element_bytes(array)
            if self.file.readinto(into) != len(into):  # type: ignore[attr-defined]
                raise self.bad("is cut short")
            self.at += len(into)
        if name != "bfloat16":
            return array
        import torch

        return torch.from_numpy(array).view(torch.bfloat16)

    def named_arrays(self) -> dict[str, Array | Tensor]:
        return {self.string(): self.array() for _ in range(self.fits(self.u64(), 8))}

    def frames(self, count: int, what: str) -> list[dict[str, Array | Tensor]]:
        if self.u64() != count:
            raise self.bad(f"does not hold data for each {what} type")
        return [self.named_arrays() for _ in range(count)]

    def sparse(self, magic: int, flags: int) -> Sparse:
        self.magic(magic, "sparse matrix")
        self.skip(16)  # rows and columns
        arrays = self.indices(), self.indices(), self.indices()
        self.skip(flags)
        return arrays

    def indices(self) -> Array:
        array = self.array()
        if (
            not isinstance(array, np.ndarray)
            or array.ndim != 1
            or array.dtype not in (np.int32, np.int64)
        ):
            raise self.bad("holds a sparse matrix whose indices are no integers")
        return array

    def meta_graph(self) -> Sparse:
        self.magic(_META_GRAPH, "meta graph")
        return self.sparse(_CSR, 1)

    def graph(self) -> StoredGraph:
        self.magic(_HETERO_GRAPH, "graph")
        indptr, dst_types, order = self.meta_graph()
        count = len(dst_types)
        each = np.arange(count)
        src_types = csr_rows(indptr, count, self.bad)
        if len(order) and not np.array_equal(np.sort(order), each):
            raise self.bad("holds a meta graph whose edges are not each there once")
        if self.u64() != count:
            raise self.bad("does not hold one matrix for each edge type")
        place = np.argsort(order) if len(order) else each
        relations = [
            self.relation(Relation(int(src_types[at]), int(dst_types[at]))) for at in place
        ]
        num_nodes = [self.u64() for _ in range(self.fits(self.u64(), 8))]
        ndata = self.frames(len(num_nodes), "node")
        edata = self.frames(len(relations), "edge")
        ntypes, etypes = self.strings(), self.strings()
        if len(ntypes) != len(num_nodes) or len(etypes) != len(relations):
            raise self.bad("does not name each type")
        return StoredGraph(ntypes, etypes, num_nodes, relations, ndata, edata)

    def relation(self, relation: Relation) -> Relation:
        self.magic(_UNIT_GRAPH, "graph of one edge type")
        saved = self.u64()
        self.skip(8)  # the formats that may be made from it
        if not saved & _NEW_STYLE:  # DGL before 0.8 saved one: 1 = COO, 2 = CSR, 3 = CSC
            saved = 1 << (saved - 1) if 1 <= saved <= 3 else 0
        for name, bit in _FORMAT_BITS.items():
            if saved & bit:
                self.meta_graph()
                relation.formats[name] = (
                    self.sparse(_COO, 2) if name == "coo" else self.sparse(_CSR, 1)
                )
        if not relation.formats:
            raise self.bad("holds a graph in no known sparse format")
        return relation


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

    def array(self, array: Array | Tensor) -> None:
        if not storable(array):
            raise ValueError(f"DGL's files cannot hold {dtype_name(array)}")
        code, bits = CODES[dtype_name(array)]
        self.raw(struct.pack("<QQiiiBBH", _NDARRAY, 0, 1, 0, array.ndim, code, bits, 1))
        self.raw(struct.pack(f"<{array.ndim}qq", *array.shape, array.nbytes))
        if array.nbytes:
            self.raw(element_bytes(array))

    def named_arrays(self, arrays: Mapping[str, Array | Tensor]) -> None:
        self.u64(len(arrays))
        for name, array in arrays.items():
            self.string(name)
            self.array(array)

    def meta_graph(self) -> None:
        """The meta graph of a homogeneous graph: one edge, from the only node type to itself."""
        self.u64(_META_GRAPH, _CSR, 1, 1)
        for values in ([0, 1], [0], [0]):
            self.array(np.array(values, dtype=np.int64))
        self.raw(bytes(1))

    def done(self) -> Written:
        self.file.flush()
        os.fsync(self.file.fileno())
        return Written(self.size, self.hash.hexdigest())
