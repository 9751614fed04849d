"""The graph that messages pass along where edges are predicted: without those for validation and
test."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from raygnn.graph.arrays import Array
from raygnn.graph.data import EdgeType, etype_str
from raygnn.graph.partition.edge_split import hides
from raygnn.graph.partition.edge_target import TRAIN, EdgeSplit
from raygnn.graph.partition.layout import PartitionMeta
from raygnn.graph.staging.entries import Draft, Entry

_ROWS = 1 << 20  # destinations that are worked on at a time


def write_messages(
    draft: Draft,
    meta: PartitionMeta,
    span: tuple[int, int],
    whole: Entry,
    splits: Sequence[tuple[EdgeSplit, Entry, Array | None]],
) -> None:
    """Copy a topology without what must not be seen. Memory: a byte for each edge of one type,
    and what lies in some rows.

    Args:
        whole: the topology.
        splits: each with its entry (see `Staged.edge_split`) and what it hides (see
            `raygnn.graph.partition.edge_split.Splitter.hidden`); None = reverses stay.
    """
    for name in (n for n in whole.arrays if n.startswith("keys/")):
        _copy(draft, name, whole)
    for etype in meta.etypes:
        name = etype_str(etype)
        aligned = [n for n in whole.arrays if n == f"src/{name}" or n.startswith(f"edge/{name}/")]
        indptr = whole.array(f"indptr/{name}")
        keep = np.ones(int(indptr[-1]), bool)
        for split, codes, hidden in splits:
            if etype == split.etype:
                keep &= codes.array("split") <= TRAIN
            if hidden is not None and etype == split.reverse:
                _hide(keep, meta, span, etype, whole, hidden)
        if keep.all():
            for each in (f"indptr/{name}", *aligned):
                _copy(draft, each, whole)
            continue
        left = np.concatenate([np.zeros(1, np.int64), np.cumsum(keep)])
        draft.array(f"indptr/{name}", "int64", indptr.shape).append(left[indptr])
        for each in aligned:
            facts = whole.arrays[each]
            rows = whole.array(each)
            writer = draft.array(each, facts.dtype, (int(left[-1]), *facts.shape[1:]))
            for low in range(0, len(rows), _ROWS):
                writer.append(rows[low : low + _ROWS][keep[low : low + _ROWS]])


def _hide(
    keep: Array,
    meta: PartitionMeta,
    span: tuple[int, int],
    etype: EdgeType,
    whole: Entry,
    hidden: Array,
) -> None:
    """Clear the places of edges whose reverse is hidden."""
    name, ntype = etype_str(etype), etype[2]
    indptr, src = whole.array(f"indptr/{name}"), whole.array(f"src/{name}")
    first = int(meta.node_ranges[ntype][span[0], 0])
    for low in range(0, len(indptr) - 1, _ROWS):
        rows = indptr[low : low + _ROWS + 1]
        dst = np.repeat(np.arange(low, low + len(rows) - 1) + first, np.diff(rows))
        at = slice(int(rows[0]), int(rows[-1]))
        keep[at] &= ~hides((src[at].astype(np.int64), dst), hidden, meta.num_nodes(etype[0]))


def _copy(draft: Draft, name: str, whole: Entry) -> None:
    facts = whole.arrays[name]
    writer = draft.array(name, facts.dtype, facts.shape)
    rows = whole.array(name)
    for low in range(0, len(rows), _ROWS):
        writer.append(rows[low : low + _ROWS])
