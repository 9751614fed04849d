"""From a node type's arrays to the model's input: which arrays, as which columns, and back.

Floating-point and plain integer arrays are joined into one table in the compute dtype when they
are staged. int8 arrays with a scale beside them (``NAME`` and ``NAME_scale``, one number per
node) stay int8 in memory and on the wire, and become numbers when a batch is made. Categories
stay whole numbers; the model embeds them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from raygnn.graph.data import EdgeType
from raygnn.graph.shard import Shard
from raygnn.sampling.exchange import Exchange
from raygnn.sampling.features import (
    FEATURES,
    FeatureStore,
    Rows,
    Table,
    degree_column,
    weight_column,
    with_room,
)

SCALE = "_scale"
LEARNED = "learned"


@dataclass(frozen=True)
class Learned:
    """Rows that are learned for each node of a type.

    Attributes:
        dim: width of a row, float32 where it is kept.
        dtype: to compute in.
    """

    dim: int
    dtype: torch.dtype


@dataclass(frozen=True)
class Inputs:
    """The arrays of one node type that a model reads, by how they are kept.

    Attributes:
        plain: joined into one table in the compute dtype.
        scaled: int8 arrays that have a scale.
        categories: whole numbers that stand for categories.
        learned: what the type's learned rows are like, which come after the features; None = it
            has none.
    """

    plain: tuple[str, ...]
    scaled: tuple[str, ...]
    categories: tuple[str, ...]
    learned: Learned | None = None

    @property
    def stored(self) -> bool:
        """Whether the data have anything of it."""
        return bool(self.plain or self.scaled or self.categories)

    @property
    def one_table(self) -> bool:
        """Whether the plain table is the whole input, so that its rows can be added up."""
        return bool(self.plain) and not (self.scaled or self.categories or self.learned)

    def width(self, arrays: Mapping[str, Tensor]) -> int:
        """Numbers in a row of what the model reads, besides categories."""
        stored = sum(row_width(arrays[name]) for name in (*self.plain, *self.scaled))
        return stored + (self.learned.dim if self.learned else 0)


def choose_inputs(
    arrays: Mapping[str, Tensor], features: Sequence[str], categories: Iterable[str]
) -> Inputs:
    """Which of the wanted arrays a node type has, and of what kind they are."""
    there = [name for name in features if name in arrays]
    scaled = [n for n in there if arrays[n].dtype == torch.int8 and n + SCALE in arrays]
    plain = [name for name in there if name not in scaled]
    return Inputs(tuple(plain), tuple(scaled), tuple(n for n in categories if n in arrays))


def row_width(rows: Tensor) -> int:
    """Numbers in one row of an array ``[N, ...]``."""
    return math.prod(rows.shape[1:])


def build_store(
    shard: Shard,
    exchange: Exchange,
    inputs: Mapping[str, Inputs],
    *,
    dtype: torch.dtype,
    degree_etypes: Sequence[EdgeType] = (),
    weighted: bool = False,
    resident: bool = False,
    ring: int = 0,
    beside: bool = False,
    learned: Mapping[str, Tensor] | None = None,
) -> FeatureStore:
    """The store of what the model reads.

    Args:
        inputs: of each node type.
        dtype: of the plain table, and of what int8 rows become.
        degree_etypes: edge types whose in-degrees go into their destination type's table.
        weighted: whether source rows need the weights of a graph convolution (Kipf & Welling,
            2017): ``1 / sqrt(degree + 1)``, and 1 where an edge type joins different node types.
        resident: keep the owned rows in this process's memory, which is read faster than a mapped
            file.
        ring: gathers after which an output buffer is used again.
        beside: see `FeatureStore`.
        learned: node type → float32 ``[nodes of the type, dim]``, this rank's own learned rows
            first, used as it is; None = the store has none of them.
    """
    tables = {t: _table(shard, t, inputs[t], dtype, resident) for t in shard.ntypes}
    for ntype, rows in (learned or {}).items():
        tables[ntype][LEARNED] = rows
    for etype in degree_etypes:
        degree = shard.in_degree(etype).to(torch.int32)
        total = shard.num_nodes(etype[2])
        tables[etype[2]][degree_column(etype)] = with_room(degree, total)
    for etype in shard.etypes if weighted else ():
        source = etype[0]
        weight = torch.ones(shard.owned(source))
        if source == etype[2]:
            weight = (shard.in_degree(etype).float() + 1).rsqrt()
        tables[source][weight_column(etype)] = with_room(weight, shard.num_nodes(source))
    return FeatureStore(shard.bounds, exchange, tables, ring=ring, beside=beside)


def _table(shard: Shard, ntype: str, inputs: Inputs, dtype: torch.dtype, resident: bool) -> Table:
    arrays, total = shard.node_data[ntype], shard.num_nodes(ntype)
    room = total - shard.owned(ntype)
    table = {}
    if inputs.plain:
        rows = shard.table(ntype, inputs.plain, dtype, room, resident=resident)
        table[FEATURES] = _matrix(rows)
    for name in inputs.scaled:
        rows = shard.table(ntype, [name], torch.int8, room, resident=resident)
        table[_key("int8", name)] = _matrix(rows)
        scale = arrays[name + SCALE].flatten().to(dtype)
        table[_key("scale", name)] = with_room(scale, total)
    for name in inputs.categories:
        table[_key("category", name)] = with_room(arrays[name].flatten().to(torch.int64), total)
    return table


def assemble(
    rows: Rows, inputs: Mapping[str, Inputs]
) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """Gathered columns → ``(x, categories)`` as a batch has them.

    Returns:
        node type → ``[n, F]`` in the compute dtype (no entry for a type with categories alone),
        and node type → name → int64 ``[n]``.
    """
    x, categories = {}, {}
    for ntype, chosen in inputs.items():
        columns = rows[ntype]
        parts = [columns[FEATURES]] if chosen.plain else []
        for name in chosen.scaled:
            scale = columns[_key("scale", name)]
            parts.append(columns[_key("int8", name)].to(scale.dtype) * scale.unsqueeze(1))
        if chosen.learned and LEARNED in columns:  # in training they come from elsewhere
            parts.append(columns[LEARNED].to(chosen.learned.dtype))
        if parts:
            x[ntype] = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        if chosen.categories:
            categories[ntype] = {n: columns[_key("category", n)] for n in chosen.categories}
    return x, categories


def _matrix(rows: Tensor) -> Tensor:
    return rows.unsqueeze(1) if rows.dim() == 1 else rows.flatten(1)


def _key(kind: str, name: str) -> str:
    return f"{kind}:{name}"
