"""Entries of a node's cache for a partition: topology, node data and feature tables.

An entry covers a span ``(p, q)``: the parts p … q-1, whose rows follow each other, hence one range
of type-wise ids of every type. Building an entry takes the memory of one part at a time.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numba import njit, uint64
from torch import Tensor

from raygnn.errors import DataError
from raygnn.graph.arrays import Array, IntArray, as_matrix, dtype_name, index_type
from raygnn.graph.data import EdgeSplit, EdgeType, etype_str
from raygnn.graph.partition.edges import TRAIN, Splitter, is_reverse_of_hidden
from raygnn.graph.partition.layout import PartitionMeta
from raygnn.graph.partition.read import (
    read_edge_data,
    read_in_edges,
    read_node_data,
    read_original_nodes,
)
from raygnn.graph.staging.node_cache import CacheEntry, Draft, Stage

_CHUNK = 1 << 22  # bytes
_ROWS = 1 << 16  # nodes whose lists are copied at a time
_ONES = 0xFFFFFFFF  # 32 bits
Span = tuple[int, int]


@dataclass(frozen=True)
class Staged:
    """A partition in a node's cache.

    Its methods raise DataError if a file is damaged, parts differ in an array's dtype or shape, or
    edges lack the masks.
    """

    stage: Stage
    meta: PartitionMeta

    def topology(self, span: Span, edge_arrays: Sequence[str] = ()) -> CacheEntry:
        """Return ``indptr/<etype>`` int64 ``[R+1]``; ``src/<etype>`` ``[E]`` and original ids
        ``keys/<ntype>`` ``[R]``, int32 if they fit, else int64; and the edge arrays that a type
        has, ``edge/<etype>/<name>`` ``[E, …]``, aligned with src (bfloat16 as float32)."""
        names = sorted(set(edge_arrays))
        build = partial(_write_topology, meta=self.meta, span=span, names=names)
        return self._entry("topology", span, build, edge_arrays=names)

    def edge_split(self, span: Span, split: EdgeSplit) -> CacheEntry:
        """Return ``split`` int8 ``[E]`` (see `raygnn.graph.partition.edges`) and ``number`` int64
        ``[E]``, in the user's graph, of the in-edges of type ``split.etype``, as in `topology`."""

        def build(draft: Draft) -> None:
            splitter = Splitter(self.meta, split)
            for part in range(*span):
                edges = splitter.part(part)
                draft.append("split", edges.codes)
                draft.append("number", edges.numbers)

        return self._entry("edgesplit", span, build, split=asdict(split))

    def lists(
        self,
        span: Span,
        edge_arrays: Sequence[str],
        hide: Sequence[EdgeSplit] = (),
        time: str | None = None,
    ) -> CacheEntry:
        """Return the in-edge lists that messages pass along, as `topology` has them, without edges
        for validation and test of the splits ``hide``, and their reverses; ascending by the array
        ``time``, for the edge types that have it."""
        whole = self.topology(span, edge_arrays)
        if not hide and time is None:
            return whole
        for etype in self.meta.etypes if time is not None else ():
            array = whole.arrays.get(f"edge/{etype_str(etype)}/{time}")
            if array is not None and (array.stored.kind not in "iu" or len(array.shape) > 1):
                is_now = f"{time!r} of edge type {etype_str(etype)} is {array.dtype}"
                message = f"array {is_now} {list(array.shape)}, not one integer time per edge"
                remedy = "give each edge one whole number, or name another array"
                raise DataError(message, where="sampling.time.edges", remedy=remedy)
        splits = [(split, self.edge_split(span, split)) for split in hide]
        write = partial(
            _write_lists, meta=self.meta, span=span, whole=whole, splits=splits, time=time
        )
        names, hidden = sorted(set(edge_arrays)), [asdict(split) for split in hide]
        return self._entry("lists", span, write, edge_arrays=names, splits=hidden, by=time)

    def edge_table(
        self,
        lists: CacheEntry,
        span: Span,
        etype: EdgeType,
        names: Sequence[str],
        dtype: torch.dtype,
    ) -> Tensor:
        """Map arrays of the edges of one type, aligned with ``lists`` and concatenated to
        ``[E, F]``; see `table`."""
        keys = [f"edge/{etype_str(etype)}/{name}" for name in names]
        entry, name = self._joined(lists, span, keys, dtype)
        return as_matrix(entry.tensor(name))

    def weights(
        self, lists: CacheEntry, span: Span, etype: EdgeType, weight: str
    ) -> tuple[Array, Array]:
        """Return the weights of edges, ``[E]``, and the alias tables for sampling edges in
        proportion to them, uint64 ``[E]``: see `alias_tables`. ``lists``: see `edge_table`."""
        name = etype_str(etype)
        weights = lists.array(f"edge/{name}/{weight}").reshape(-1)
        if weights.dtype == np.float16:  # numba has none
            weights = weights.astype(np.float32)

        def build(draft: Draft) -> None:
            indptr, src = lists.array(f"indptr/{name}"), lists.array(f"src/{name}")
            draft.append("alias", alias_tables(indptr, weights, src))

        more = {"of": lists.path.name, "etype": list(etype), "weight": weight}
        return weights, self._entry("aliases", span, build, **more).array("alias")

    def node_data(self, span: Span) -> CacheEntry:
        """Return ``data/<ntype>/<name>`` ``[R, …]`` as stored, and ``original/<ntype>`` ``[R]``."""
        return self._entry("nodes", span, partial(_write_node_data, meta=self.meta, span=span))

    def table(
        self, span: Span, ntype: str, names: Sequence[str], dtype: torch.dtype
    ) -> tuple[CacheEntry, str]:
        """Return entry and name of an array ``[R, F]``: node arrays, each flattened to a matrix,
        concatenated. A stored array that is such already is not copied."""
        keys = [f"data/{ntype}/{name}" for name in names]
        return self._joined(self.node_data(span), span, keys, dtype)

    def _joined(
        self, entry: CacheEntry, span: Span, keys: list[str], dtype: torch.dtype
    ) -> tuple[CacheEntry, str]:
        target = dtype_name(dtype)
        if len(keys) == 1 and entry.arrays[keys[0]].dtype == target:
            return entry, keys[0]
        build = partial(_write_table, arrays={k: entry.tensor(k) for k in keys}, dtype=dtype)
        more = {"of": entry.path.name, "keys": keys, "dtype": target}
        return self._entry("table", span, build, **more), "table"

    def _entry(
        self, kind: str, span: Span, build: Callable[[Draft], None], **more: Any
    ) -> CacheEntry:
        manifest = self.meta.manifest
        # two partitions of the same input may differ, so the digest is not enough
        files = json.dumps(manifest.model_dump()["files"] if manifest else None, sort_keys=True)
        made_from = {
            "digest": self.meta.digest,
            "files": hashlib.sha256(files.encode()).hexdigest(),
            **more,
        }
        return self.stage.entry(kind, span, made_from, build)


def _write_topology(draft: Draft, meta: PartitionMeta, span: Span, names: list[str]) -> None:
    original = _original(meta, span)
    for ntype in dict.fromkeys(etype[2] for etype in meta.etypes):
        draft.append(f"keys/{ntype}", original[ntype])
    del original
    for name in map(etype_str, meta.etypes):
        draft.append(f"indptr/{name}", np.zeros(1, np.int64))
    ends, rows = dict.fromkeys(meta.etypes, 0), dict[str, int]()
    for part in range(*span):
        data: dict[EdgeType, dict[str, Tensor]] = read_edge_data(meta, part) if names else {}
        lists = read_in_edges(meta, part)
        for etype, edges in lists.items():
            kind, ids = etype_str(etype), index_type(meta.num_nodes(etype[0]))
            draft.append(f"indptr/{kind}", edges.indptr[1:] + ends[etype])
            ends[etype] += len(edges.src)
            draft.append(f"src/{kind}", edges.src.astype(ids, copy=False))
            for name in (n for n in names if n in data.get(etype, {})):
                values = data[etype][name]
                if values.dtype == torch.bfloat16:  # numpy has none
                    values = values.float()
                if edges.order is not None:
                    values = values[torch.from_numpy(edges.order.astype(np.int64))]
                rows[f"edge/{kind}/{name}"] = _rows(meta.edge_ranges[etype], span)
                _append(draft, meta, f"edge/{kind}/{name}", values)
        del lists, edges  # before the next part is read
    _check_rows(draft, meta, rows)


def _write_node_data(draft: Draft, meta: PartitionMeta, span: Span) -> None:
    for ntype, ids in _original(meta, span).items():
        draft.append(f"original/{ntype}", ids)
    rows = dict[str, int]()
    for part in range(*span):
        for ntype, arrays in read_node_data(meta, part).items():
            count = _rows(meta.node_ranges[ntype], span)
            for name, values in arrays.items() if count or not meta.num_nodes(ntype) else ():
                rows[f"data/{ntype}/{name}"] = count
                _append(draft, meta, f"data/{ntype}/{name}", values)
    # parts without nodes of a type may lack its arrays, but every rank must know their dtypes
    for ntype in meta.ntypes:
        sizes = np.diff(meta.node_ranges[ntype], axis=1)[:, 0]
        if sizes.any() and not sizes[slice(*span)].any():
            for name, values in read_node_data(meta, int(np.argmax(sizes > 0)))[ntype].items():
                draft.append(f"data/{ntype}/{name}", values[:0])
    _check_rows(draft, meta, rows)


def _append(draft: Draft, meta: PartitionMeta, key: str, values: Tensor) -> None:
    """Append the rows of one part to an array."""
    try:
        draft.append(key, values)
    except ValueError as error:
        raise _differs(meta, key, str(error)) from None


def _check_rows(draft: Draft, meta: PartitionMeta, rows: Mapping[str, int]) -> None:
    """Raise DataError if some parts lack an array. ``rows``: their number in each array."""
    for key, count in rows.items():
        if draft.rows(key) != count:
            raise _differs(meta, key, "some lack it")


def _differs(meta: PartitionMeta, key: str, how: str) -> DataError:
    message = f"{key.partition('/')[2]} differs between the parts: {how}"
    remedy = "partition the graph again, with one dtype and shape for each array"
    return DataError(message, where=str(meta.config_file), remedy=remedy)


def _write_lists(
    draft: Draft,
    meta: PartitionMeta,
    span: Span,
    whole: CacheEntry,
    splits: Sequence[tuple[EdgeSplit, CacheEntry]],
    time: str | None,
) -> None:
    """Copy a topology without hidden edges, each list sorted by time; edges of equal times keep
    their order. Memory: 8 bytes for each hidden edge of splits that hide reverses, and the edges
    into `_ROWS` nodes."""
    for name in (name for name in whole.arrays if name.startswith("keys/")):
        draft.append(name, whole.array(name))
    for etype in meta.etypes:
        name, end = etype_str(etype), 0
        indptr, src = whole.array(f"indptr/{name}"), whole.array(f"src/{name}")
        aligned = [f"src/{name}", *whole.below(f"edge/{name}/").values()]
        columns = {key: whole.array(key) for key in aligned}
        times = None if time is None else columns.get(f"edge/{name}/{time}")
        codes = [entry.array("split") for split, entry in splits if split.etype == etype]
        backward = [Splitter(meta, split).hidden() for split, _ in splits if split.reverse == etype]
        first = int(meta.node_ranges[etype[2]][span[0], 0])
        draft.append(f"indptr/{name}", np.zeros(1, np.int64))
        for key, column in columns.items():
            draft.append(key, column[:0])
        for low in range(0, len(indptr) - 1, _ROWS):
            starts = indptr[low : low + _ROWS + 1]
            at = slice(int(starts[0]), int(starts[-1]))
            row = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
            keep = np.ones(len(row), bool)
            for each in codes:
                keep &= each[at] <= TRAIN
            for edges in backward:
                ends = src[at].astype(np.int64), row + low + first
                keep &= ~is_reverse_of_hidden(*ends, edges, meta.num_nodes(etype[0]))
            chosen = np.flatnonzero(keep)
            if times is not None:
                chosen = chosen[np.lexsort((times[at][chosen], row[chosen]))]
            counts = np.bincount(row[chosen], minlength=len(starts) - 1)
            draft.append(f"indptr/{name}", end + np.cumsum(counts))
            end += len(chosen)
            for key, column in columns.items():
                draft.append(key, column[at][chosen])


def _write_table(draft: Draft, arrays: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    matrices = {key: as_matrix(array) for key, array in arrays.items()}
    widths = [matrix.shape[1] for matrix in matrices.values()]
    rows, width = len(next(iter(matrices.values()))), sum(widths)
    draft.append("table", torch.empty((0, width), dtype=dtype))
    step = max(1, _CHUNK // max(1, width * dtype.itemsize))
    for low in range(0, rows, step):
        pieces = {key: matrix[low : low + step] for key, matrix in matrices.items()}
        chunk = torch.cat([piece.to(dtype) for piece in pieces.values()], 1)
        if chunk.is_floating_point() and not torch.isfinite(chunk.sum(dtype=torch.float64)):
            _check_range(pieces, dtype)
        draft.append("table", chunk)


def _check_range(pieces: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    for key, piece in pieces.items():
        _, kind, name = key.split("/")
        finite, where = torch.isfinite(piece), f"array {name!r} of {kind}"
        if not finite.all():
            message = f"features must be finite, and one is {piece[~finite][0]:g}"
            raise DataError(message, where=where, remedy="replace it, or drop its node or edge")
        lost = ~torch.isfinite(piece.to(dtype))
        if lost.any():
            most = piece[lost].abs().max()
            message = f"features up to {most:g} do not fit {dtype_name(dtype)}"
            remedy = "scale them (graph.normalize), or choose another precision"
            raise DataError(message, where=where, remedy=remedy)


def _original(meta: PartitionMeta, span: Span) -> dict[str, Array]:
    """Read node type → original ids, int32 if they fit."""
    original: dict[str, list[Array]] = {ntype: [] for ntype in meta.ntypes}
    for part in range(*span):
        for ntype, ids in read_original_nodes(meta, part).items():
            fits = not len(ids) or (ids.min() >= -(2**31) and ids.max() < 2**31)
            original[ntype].append(ids.astype(np.int32 if fits else np.int64))
    return {ntype: np.concatenate(pieces) for ntype, pieces in original.items()}


def _rows(ranges: IntArray, span: Span) -> int:
    return int(ranges[span[1] - 1, 1] - ranges[span[0], 0])


@njit(inline="always")
def position_bits(src, degree):  # type: ignore[no-untyped-def]
    """Return the mask of the positions in a list's `alias_tables`; 0 if these hold no sources."""
    mask = uint64(degree)
    for shift in (1, 2, 4, 8):
        mask |= mask >> uint64(shift)
    return mask if src.itemsize == 4 and degree < 1 << 16 else uint64(0)


@njit(inline="always")
def _alias_entry(share, other, source, mask):  # type: ignore[no-untyped-def]
    bits = min(uint64(share * 2.0**32) + (mask >> uint64(1)), uint64(_ONES)) & ~mask
    return ((bits | (uint64(other) & mask)) << uint64(32)) | uint64(source if mask else other)


@njit(cache=True, nogil=True, boundscheck=False)
def alias_tables(indptr, weight, src):  # type: ignore[no-untyped-def]
    """Build alias tables, to sample entries of lists in proportion to their weights in constant
    time (Walker, 1977; built as in Vose, "A linear algorithm for generating random numbers with a
    given distribution", 1991).

    Most samples read one cache line, as an entry holds its source if ids have 32 bits and its list
    fewer than 65,536 entries: `position_bits`. The probability to keep an entry is rounded to
    2⁻³² if not, else to that times the power of 2 above the list's length, at most 2⁻¹⁶.

    Args:
        weight: ``[E]``, at least 0; src: ``[E]``, global ids.

    Returns:
        uint64 ``[E]``. Upper 32 bits: probability to keep the entry itself, of 2³², and in the
        lowest bits of that, by `position_bits`, the position of the alternative in the list;
        lower 32: the source. Without sources the lower 32 bits are the position.
    """
    out = np.empty(weight.shape[0], np.uint64)
    longest = np.int64(0)
    for i in range(indptr.shape[0] - 1):
        longest = max(longest, np.int64(indptr[i + 1] - indptr[i]))
    share, stack = np.empty(longest, np.float64), np.empty(longest, np.int64)
    for i in range(indptr.shape[0] - 1):
        start, degree = indptr[i], indptr[i + 1] - indptr[i]
        mask, total = position_bits(src, degree), 0.0
        for j in range(degree):
            total += weight[start + j]
        if not total > 0:  # a position beyond the list, which is never sampled
            for j in range(start, start + degree):
                out[j] = _alias_entry(0.0, degree, src[j], mask)
            continue
        # the stack holds entries with too little below small, those with too much from large on
        small, large = 0, degree
        for j in range(degree):
            out[start + j] = _alias_entry(1.0, j, src[start + j], mask)
            share[j] = weight[start + j] / total * degree
            if share[j] < 1.0:
                stack[small] = j
                small += 1
            else:
                large -= 1
                stack[large] = j
        while small > 0 and large < degree:
            small -= 1
            less, more = stack[small], stack[large]
            out[start + less] = _alias_entry(share[less], more, src[start + less], mask)
            share[more] -= 1.0 - share[less]
            if share[more] < 1.0:
                large += 1
                stack[small] = more
                small += 1
    return out
