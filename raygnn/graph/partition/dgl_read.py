"""A cursor over DGL's two binary file formats, and what a graph is in them.

See :mod:`raygnn.graph.partition.dgl_file`, which reads and writes whole files.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, Protocol

import numpy as np

from raygnn.errors import DataError
from raygnn.graph.arrays import DTYPES, Array, csr_rows, element_bytes

if TYPE_CHECKING:
    from torch import Tensor

TENSOR_FILE = 0xDD5A9FBE3FA2443F
GRAPH_FILE = 0xDD2E4FF046B4A13F
NDARRAY = 0xDD5E40F096B4A13F
HETERO_GRAPH = 0xDD589FBE35224ABF
UNIT_GRAPH = 0xDD2E60F0F6B4A127
META_GRAPH = 0xDD3C5FFE20046ABF
CSR = 0xDD6CD31205DFF127
COO = 0xDD61FFD305DFF127

GRAPH_VERSION = 2
HETERO_KIND = 2
HEADER_BYTES = 4096
FORMAT_BITS = {"coo": 1, "csr": 2, "csc": 4}
NEW_STYLE = 1 << 32  # marks format codes as bit sets
_MAX_DIMS = 16

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


def open_file(path: Readable) -> Reader:
    """A cursor at the start of a file; raises DataError if it cannot be opened."""
    try:
        return Reader(path, path.open("rb", buffering=1 << 16))
    except OSError as error:
        raise DataError(
            f"cannot be opened: {error.strerror}",
            where=str(path),
            remedy="check the path and its permissions, or make the partition again",
        ) from error


class Reader:
    """A cursor over a file that never reads, allocates or counts beyond its end."""

    def __init__(self, path: Readable, file: BinaryIO):
        self.path = path
        self.file = file
        self.size = path.stat().st_size
        self.at = 0

    def __enter__(self) -> Reader:
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
        name, shape, dtype = self.array_head()
        elements = math.prod(shape)
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

    def skip_array(self) -> None:
        _, shape, dtype = self.array_head()
        self.skip(math.prod(shape) * dtype.itemsize)

    def array_head(self) -> tuple[str, tuple[int, ...], np.dtype[Any]]:
        """Name of the dtype, shape, and the dtype in memory of the array whose elements follow."""
        self.magic(NDARRAY, "array")
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
        return name, shape, dtype

    def named_arrays(self, only: str | None = None) -> dict[str, Array | Tensor]:
        """Those of the name ``only`` alone, the others skipped, unless that is None."""
        found: dict[str, Array | Tensor] = {}
        for _ in range(self.fits(self.u64(), 8)):
            name = self.string()
            if only in (None, name):
                found[name] = self.array()
            else:
                self.skip_array()
        return found

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
        self.magic(META_GRAPH, "meta graph")
        return self.sparse(CSR, 1)

    def graph(self) -> StoredGraph:
        self.magic(HETERO_GRAPH, "graph")
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

    def graphs(self, count: int) -> Iterator[StoredGraph]:
        """All graphs; after the last one, that the file ends there."""
        for _ in range(count):
            yield self.graph()
        # The trailer lists where each graph starts; a file without it was cut short.
        if self.u64() != 8 + 8 * count or self.u64() != count:
            raise self.bad("does not end as a graph file does")
        self.skip(8 * count + 8)
        self.end()

    def relation(self, relation: Relation) -> Relation:
        self.magic(UNIT_GRAPH, "graph of one edge type")
        saved = self.u64()
        self.skip(8)  # the formats that may be made from it
        if not saved & NEW_STYLE:  # DGL before 0.8 saved one: 1 = COO, 2 = CSR, 3 = CSC
            saved = 1 << (saved - 1) if 1 <= saved <= 3 else 0
        for name, bit in FORMAT_BITS.items():
            if saved & bit:
                self.meta_graph()
                relation.formats[name] = (
                    self.sparse(COO, 2) if name == "coo" else self.sparse(CSR, 1)
                )
        if not relation.formats:
            raise self.bad("holds a graph in no known sparse format")
        return relation
