"""What a node keeps of a partition: topology, node data and feature tables of a span of parts.

The span ``(p, q)`` means the parts p … q-1. Their rows follow each other, so that the entry holds
one range of type-wise ids of every type. One part at a time is in memory while an entry is made.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raygnn.errors import DataError
from raygnn.graph.arrays import Array, dtype_name
from raygnn.graph.data import EdgeType, etype_str
from raygnn.graph.partition.dgl_json import IntArray
from raygnn.graph.partition.edge_split import Splitter, numbers
from raygnn.graph.partition.edge_target import EdgeSplit
from raygnn.graph.partition.layout import PartitionMeta
from raygnn.graph.partition.manifest import checked
from raygnn.graph.partition.topology import (
    read_edge_data,
    read_in_edges,
    read_node_data,
    read_original,
)
from raygnn.graph.staging.entries import ArrayWriter, Draft, Entry
from raygnn.graph.staging.message_graph import write_messages
from raygnn.graph.staging.node_cache import Stage

_CHUNK = 1 << 22  # bytes
Span = tuple[int, int]


@dataclass(frozen=True)
class Staged:
    """A partition as one node's cache has it."""

    stage: Stage
    meta: PartitionMeta

    def topology(self, span: Span, edge_arrays: Sequence[str] = ()) -> Entry:
        """``indptr/<etype>`` int64 ``[R+1]``, ``src/<etype>`` int32 where ids fit, else int64
        ``[E]``; ``keys/<ntype>`` ``[R]`` original ids, int32 where they fit; and of the edge
        arrays those that the type has, ``edge/<etype>/<name>`` ``[E, …]``, aligned with src
        (bfloat16 as float32).

        Raises:
            DataError: a file is damaged, or parts differ in an array's dtype or shape.
        """
        names = sorted(set(edge_arrays))

        def build(draft: Draft) -> None:
            _write_topology(draft, self.meta, span, names)

        return self._entry("topology", span, build, edge_arrays=names)

    def edge_split(self, span: Span, split: EdgeSplit) -> Entry:
        """Of the in-edges of type ``split.etype``, aligned with `topology`: ``split`` int8 ``[E]``
        (see `raygnn.graph.partition.edge_target`), ``number`` int64 ``[E]``, in the user's graph.

        Raises:
            DataError: a file is damaged, or edges lack the masks.
        """

        def build(draft: Draft) -> None:
            rows = _rows(self.meta.edge_ranges[split.etype], span)
            splitter = Splitter(self.meta, split)
            codes = draft.array("split", "int8", (rows,))
            originals = draft.array("number", "int64", (rows,))
            for part in range(*span):
                codes.append(splitter.part(part)[2])
                originals.append(numbers(self.meta, part, split.etype))

        return self._entry("edgesplit", span, build, split=split.to_dict())

    def messages(
        self, span: Span, edge_arrays: Sequence[str], splits: Sequence[EdgeSplit]
    ) -> Entry:
        """As `topology`, without the edges for validation and test of some splits, and their
        reverses.

        Raises:
            DataError: see `topology` and `edge_split`.
        """
        whole = self.topology(span, edge_arrays)
        codes = [self.edge_split(span, split) for split in splits]

        def build(draft: Draft) -> None:
            hidden = [
                None if split.reverse is None else Splitter(self.meta, split).hidden()
                for split in splits
            ]
            write_messages(draft, self.meta, span, whole, list(zip(splits, codes, hidden)))

        names, listed = sorted(set(edge_arrays)), [split.to_dict() for split in splits]
        return self._entry("messages", span, build, edge_arrays=names, splits=listed)

    def node_data(self, span: Span) -> Entry:
        """``data/<ntype>/<name>`` ``[R, …]`` as stored, ``original/<ntype>`` ``[R]``.

        Raises:
            DataError: a file is damaged, or parts differ in an array's dtype or shape.
        """

        def build(draft: Draft) -> None:
            _write_node_data(draft, self.meta, span)

        return self._entry("nodes", span, build)

    def table(
        self, span: Span, ntype: str, names: Sequence[str], dtype: torch.dtype
    ) -> tuple[Entry, str]:
        """One array ``[R, F]`` of node arrays side by side, each flattened to a matrix.

        Returns:
            The entry and the name of the array in it: the stored one, if it is such already.

        Raises:
            DataError: a name that the type does not have, or an array that is not of numbers.
        """
        nodes = self.node_data(span)
        keys = [f"data/{ntype}/{name}" for name in names]
        for key, name in zip(keys, names):
            facts = nodes.arrays.get(key)
            if facts is None or facts.dtype == "bool":
                what = "has no array" if facts is None else "has no numbers in its array"
                raise DataError(
                    f"node type {ntype!r} {what} {name!r}",
                    where=str(self.meta.config_file),
                    remedy="correct model.features",
                )
        target = str(dtype).removeprefix("torch.")
        if len(keys) == 1 and nodes.arrays[keys[0]].dtype == target:
            return nodes, keys[0]

        def build(draft: Draft) -> None:
            _write_table(draft, [nodes.tensor(key) for key in keys], dtype)

        made = self._entry("table", span, build, ntype=ntype, names=list(names), dtype=target)
        return made, "table"

    def _entry(self, what: str, span: Span, build: Callable[[Draft], None], **more: Any) -> Entry:
        manifest = self.meta.manifest
        # two partitions made from the same input may differ, so the digest is not enough
        files = json.dumps(manifest["files"] if manifest else None, sort_keys=True)
        made_from = {
            "digest": self.meta.digest,
            "files": hashlib.sha256(files.encode()).hexdigest(),
            **more,
        }
        return self.stage.entry(what, span, made_from, build)


def _write_topology(draft: Draft, meta: PartitionMeta, span: Span, names: list[str]) -> None:
    original = _original(meta, span)
    for ntype in {etype[2] for etype in meta.etypes}:
        _write_ids(draft, f"keys/{ntype}", original[ntype])
    del original
    indptr, src, ends = {}, {}, dict.fromkeys(meta.etypes, 0)
    for etype in meta.etypes:
        name, rows = etype_str(etype), _rows(meta.node_ranges[etype[2]], span)
        indptr[etype] = draft.array(f"indptr/{name}", "int64", (rows + 1,))
        indptr[etype].append(np.zeros(1, np.int64))
        ids = "int32" if meta.num_nodes(etype[0]) < 2**31 else "int64"
        src[etype] = draft.array(f"src/{name}", ids, (_rows(meta.edge_ranges[etype], span),))
    columns: dict[str, _Column] = {}
    for part in range(*span):
        data: dict[EdgeType, dict[str, Tensor]] = {}
        if names:
            with checked(meta, meta.files[part].edge_feats) as file:
                data = read_edge_data(meta, part, file)
        with checked(meta, meta.files[part].graph) as file:
            lists = read_in_edges(meta, part, file)
        for etype, edges in lists.items():
            indptr[etype].append(edges.indptr[1:] + ends[etype])
            ends[etype] += len(edges.src)
            src[etype].append(edges.src)
            for name in set(names) & data.get(etype, {}).keys():
                values = data[etype][name]
                if values.dtype == torch.bfloat16:  # numpy has none
                    values = values.float()
                if edges.order is not None:
                    values = values[torch.from_numpy(edges.order)]
                key = f"edge/{etype_str(etype)}/{name}"
                _column(columns, key, meta, _rows(meta.edge_ranges[etype], span)).append(
                    draft, values
                )
        del lists, edges  # before the next part is read
    for column in columns.values():
        column.close(draft)


def _write_node_data(draft: Draft, meta: PartitionMeta, span: Span) -> None:
    for ntype, pieces in _original(meta, span).items():
        _write_ids(draft, f"original/{ntype}", pieces)
    columns: dict[str, _Column] = {}
    for part in range(*span):
        with checked(meta, meta.files[part].node_feats) as file:
            data = read_node_data(meta, part, file)
        for ntype, arrays in data.items():
            rows = _rows(meta.node_ranges[ntype], span)
            for name, values in arrays.items() if rows or not meta.num_nodes(ntype) else ():
                _column(columns, f"data/{ntype}/{name}", meta, rows).append(draft, values)
    # parts without nodes of a type need not have its arrays, but every rank must know of them
    for ntype in meta.ntypes:
        sizes = np.diff(meta.node_ranges[ntype], axis=1)[:, 0]
        if sizes.any() and not sizes[slice(*span)].any():
            part = int(np.argmax(sizes > 0))
            with checked(meta, meta.files[part].node_feats) as file:
                arrays = read_node_data(meta, part, file)[ntype]
            for name, values in arrays.items():
                _column(columns, f"data/{ntype}/{name}", meta, 0).append(draft, values[:0])
    for column in columns.values():
        column.close(draft)


class _Column:
    """One array, whose file is begun when the first rows say what it is like."""

    def __init__(self, key: str, meta: PartitionMeta, rows: int):
        self._key, self._meta, self._rows = key, meta, rows
        self._like: Tensor | None = None
        self._writer: ArrayWriter | None = None
        self._done = 0

    def append(self, draft: Draft, values: Tensor) -> None:
        if self._writer is None:
            self._like = values[:0]
        assert self._like is not None
        if not len(values):
            return  # a part without nodes of the type need not have the right kind
        if self._writer is None:
            self._writer = self._begin(draft, values)
        kinds = {(each.dtype, each.shape[1:]) for each in (self._like, values)}
        if len(kinds) > 1:
            raise self._differs(str(sorted(map(str, kinds))))
        self._writer.append(values)
        self._done += len(values)

    def close(self, draft: Draft) -> None:
        if self._done != self._rows:
            raise self._differs("some lack it")
        if self._writer is None:
            assert self._like is not None
            self._begin(draft, self._like)

    def _begin(self, draft: Draft, like: Tensor) -> ArrayWriter:
        return draft.array(self._key, dtype_name(like), (self._rows, *like.shape[1:]))

    def _differs(self, how: str) -> DataError:
        return DataError(
            f"{self._key.partition('/')[2]} differs between the parts: {how}",
            where=str(self._meta.config_file),
            remedy="partition the graph again, with one dtype and shape for each array",
        )


def _column(columns: dict[str, _Column], key: str, meta: PartitionMeta, rows: int) -> _Column:
    return columns.setdefault(key, _Column(key, meta, rows))


def _write_table(draft: Draft, arrays: list[Tensor], dtype: torch.dtype) -> None:
    matrices = [each.flatten(1) if each.dim() > 1 else each.unsqueeze(1) for each in arrays]
    rows, width = len(matrices[0]), sum(each.shape[1] for each in matrices)
    writer = draft.array("table", str(dtype).removeprefix("torch."), (rows, width))
    step = max(1, _CHUNK // max(1, width * dtype.itemsize))
    buffer = torch.empty((min(step, rows), width), dtype=dtype)
    for low in range(0, rows, step):
        chunk = buffer[: min(step, rows - low)]
        left = 0
        for matrix in matrices:
            piece = matrix[low : low + step]
            chunk[:, left : left + piece.shape[1]] = piece
            left += piece.shape[1]
        if chunk.is_floating_point() and not torch.isfinite(chunk.sum(dtype=torch.float64)):
            _check_range(matrices, low, low + len(chunk), dtype)
        writer.append(chunk)


def _check_range(matrices: list[Tensor], low: int, high: int, dtype: torch.dtype) -> None:
    """Refuse numbers that are none any more in the dtype that the model computes in."""
    for matrix in matrices:
        piece = matrix[low:high]
        lost = torch.isfinite(piece) & ~torch.isfinite(piece.to(dtype))
        if lost.any():
            raise DataError(
                f"features up to {piece[lost].abs().max():g} do not fit "
                f"{str(dtype).removeprefix('torch.')}",
                remedy="scale them (graph.normalize), or choose another precision",
            )


def _original(meta: PartitionMeta, span: Span) -> dict[str, list[Array]]:
    """Node type → original ids, part by part, int32 where they fit; ids stand in for those that
    the writer did not keep."""
    found: dict[str, list[Array]] = {ntype: [] for ntype in meta.ntypes}
    for part in range(*span):
        path = meta.files[part].orig_nids
        if path is None:
            ids: dict[str, Array] = {
                t: np.arange(*ranges[part]) for t, ranges in meta.node_ranges.items()
            }
        else:
            with checked(meta, path) as file:
                ids = {t: each.numpy() for t, each in read_original(meta, part, file).items()}
        for ntype, each in ids.items():
            fits = not len(each) or (each.min() >= -(2**31) and each.max() < 2**31)
            found[ntype].append(each.astype(np.int32 if fits else np.int64))
    return found


def _write_ids(draft: Draft, name: str, pieces: list[Array]) -> None:
    dtype = np.result_type(*pieces)
    writer = draft.array(name, dtype.name, (sum(map(len, pieces)),))
    for piece in pieces:
        writer.append(piece)


def _rows(ranges: IntArray, span: Span) -> int:
    return int(ranges[span[1] - 1, 1] - ranges[span[0], 0])
