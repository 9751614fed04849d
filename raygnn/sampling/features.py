"""Node rows, on this host, cached there or on the rank that owns them, as input of the model.

A table has a slot for every node of its type; unused slots take no memory. First come the rows of
the host's ranks, read in place, then cached rows, both in memory once for all ranks of the host,
then space for rows that a batch fetches. So one look-up gives one slot per node, a gather or an
aggregation is one operation on one table, and rows from other hosts are received where they are
read. All node types and columns share one exchange of counts, one of ids and one of rows.

Only constant rows are shared this way. Embedding tables and computed rows stay with the rank that
owns them, which sends them to other ranks even on the same host: these could otherwise read a row
of another step, or a half-written one.

Floating-point and plain integer arrays are joined into one table in the compute dtype when they
are staged. int8 arrays with a scale (``NAME`` and ``NAME_scale``, one number per node) stay int8 in
memory and in transmission, and are scaled when a batch is built. Categories stay integers; the
model embeds them.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from raygnn.errors import DataError
from raygnn.graph.arrays import as_matrix
from raygnn.graph.data import EdgeType, etype_str
from raygnn.graph.staging.mapped import map_table, use_large_pages
from raygnn.graph.staging.shard import Shard, TableLayout
from raygnn.sampling import kernels
from raygnn.sampling.exchange import Exchange, Ids, as_ids, row_bytes
from raygnn.sampling.host_memory import Host
from raygnn.sampling.sampler import Draws, Frontier

FEATURES = "features"

FeatureTable = dict[str, Tensor]  # column → [nodes of the type, …], this rank's rows first
FeatureRows = dict[str, dict[str, Tensor]]  # node type → column → rows

_FILL_AT_ONCE = 1 << 18  # rows of a cache fetched at a time


def degree_column(etype: EdgeType) -> str:
    """Return the column name of the in-degrees of ``etype`` in its destination's table."""
    return f"degree:{etype_str(etype)}"


def weight_column(etype: EdgeType) -> str:
    """Return the column name of the weight of each source row of ``etype`` in `combine`."""
    return f"weight:{etype_str(etype)}"


@dataclass(eq=False)
class BufferRing:
    """Output buffers that are reused after ``depth`` gathers.

    A gather into fresh memory spends most of its time in page faults. A tensor is overwritten by
    the ``depth``-th gather after it, so ``depth`` must exceed the number of live batches. With
    depth 0 every gather allocates; ``pinned``: page-locked memory, which torch does not reuse
    before a GPU has copied from it.
    """

    depth: int
    pinned: bool = False
    _buffers: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    _turn: dict[str, int] = field(default_factory=dict)

    def gather(self, name: str, table: Tensor, index: Tensor) -> Tensor:
        """Return ``table[index]``. ``name`` distinguishes buffers of different shapes."""
        shape = (len(index), *table.shape[1:])
        return torch.index_select(table, 0, index, out=self.take(name, shape, table.dtype))

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return the next buffer called ``name`` to write rows to."""
        if not self.depth:
            return torch.empty(shape, dtype=dtype, pin_memory=self.pinned)
        turn, rows = self._turn.get(name, 0), shape[0]
        self._turn[name] = (turn + 1) % self.depth
        buffer = self._buffers.get((name, turn))
        if buffer is None or len(buffer) < rows:
            buffer = torch.empty((rows + rows // 4, *shape[1:]), dtype=dtype)
            self._buffers[name, turn] = buffer
        return buffer[:rows]


@dataclass(eq=False)
class FeatureStore:
    """Tables of all node types, distributed over the ranks by ownership.

    Attributes:
        bounds: node type → int64 ``[W+1]``; rank r holds the ids ``bounds[r] … bounds[r+1]-1``.
        exchange: the data plane's collectives, shared with the sampler.
        tables: node type → table; the same columns on every rank; without the types that have none.
        layouts: node type → layout of its table; default: this rank's rows first.
        ring: gathers after which an output buffer is reused; 0 = never.
        beside: place the results of `combine` for a node and its neighbours side by side: see
            `_beside`. Not for batches that move to a GPU, which copies columns slowly.
        ntypes: all node types, including types without columns.
        whole: all ranks' rows are on this host, so that none are fetched; the same on all ranks.
        remote, hits: distinct rows of other hosts that batches needed so far, and how many of
            them were cached.
    """

    bounds: Mapping[str, np.ndarray]
    exchange: Exchange
    tables: Mapping[str, FeatureTable]
    layouts: Mapping[str, TableLayout] = field(default_factory=dict)
    ring: int = 0
    beside: bool = False
    remote: int = field(default=0, init=False)
    hits: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        bounds, rank = self.bounds, self.exchange.world.rank
        self.ntypes = list(self.tables)
        self.tables = {t: table for t, table in self.tables.items() if table}
        self._ring = BufferRing(self.ring)
        self._answers = BufferRing(1)
        if not self.layouts:
            self.layouts = {t: TableLayout.local_only(b, rank) for t, b in bounds.items()}
        # slot of a local row minus its id
        self._shift = {t: int(a.starts[rank] - bounds[t][rank]) for t, a in self.layouts.items()}
        self.whole = all((self.layouts[t].starts >= 0).all() for t in self.tables)
        # fetched rows are stored after the permanent ones
        self._base = {t: layout.permanent for t, layout in self.layouts.items()}
        nothing = kernels.hash_slots(np.empty(0, np.int64), 0)
        self._cache = dict.fromkeys(bounds, nothing)

    def to_pinned(self) -> None:
        """Gather into page-locked memory, from which a GPU copies directly."""
        self._ring = BufferRing(0, pinned=True)

    def row_bytes(self, ntype: str) -> int:
        """Return the bytes of one row, over all columns."""
        return sum(map(row_bytes, self.tables.get(ntype, {}).values()))

    def permanent(self, ntype: str) -> int:
        """Return the number of slots with rows of this host's ranks and cached rows."""
        return self.layouts[ntype].permanent

    def here(self, ntype: str) -> FeatureTable:
        """Return the columns of a node type, ``[permanent, …]``, without slots of fetched rows; at
        least one slot, which may be unused."""
        permanent = max(1, self.permanent(ntype))
        return {name: column[:permanent] for name, column in self.tables.get(ntype, {}).items()}

    def shifts(self, ntype: str) -> np.ndarray:
        """Return slot minus id of the rows of each rank on this host, int64 ``[W]``."""
        return self.layouts[ntype].starts - self.bounds[ntype][:-1]

    def fill_cache(self, chosen: Mapping[str, Ids], host: Host) -> None:
        """Fetch the rows for which the layouts reserve cache slots, each rank of the host its
        share; once per store. Collective.

        Args:
            chosen: node type → distinct int64 ids of other hosts, ascending, the same on all
                ranks of the host; none for a type not named.
        """
        nobody = np.empty(0, np.int64)
        mine = dict.fromkeys(self.ntypes, (0, nobody))  # first cache slot, ids
        wanted = {t: as_ids(ids) for t, ids in chosen.items()}
        for ntype, ids in wanted.items():
            low, high = (len(ids) * (host.place + i) // len(host.ranks) for i in (0, 1))
            mine[ntype] = low, ids[low:high]
        most = max((len(ids) for _, ids in mine.values()), default=0)
        for number in range(-(-self.exchange.max(most) // _FILL_AT_ONCE)):
            at = number * _FILL_AT_ONCE
            self._base = {t: self.layouts[t].cached + low + at for t, (low, _) in mine.items()}
            self._slots({t: ids[at : at + _FILL_AT_ONCE] for t, (_, ids) in mine.items()})
        self._base = {t: layout.permanent for t, layout in self.layouts.items()}
        self.remote = 0  # counts rows of batches only
        for ntype, ids in wanted.items():
            keys, slots = nobody, nobody
            if host.leads:
                keys, slots = kernels.hash_slots(ids, self.layouts[ntype].cached)
            self._cache[ntype] = host.publish(keys), host.publish(slots)
        host.wait()

    def gather(self, ids: Mapping[str, Ids]) -> FeatureRows:
        """Return rows of every column for ``ids`` (node type → int64 ``[n]``, on any device).

        Collective: every rank calls this or `combine` the same number of times.
        """
        return self._rows(self._slots({t: as_ids(nodes) for t, nodes in ids.items()}))

    def combine(
        self, nodes: Mapping[str, Ids], draws: Draws, how: str
    ) -> tuple[FeatureRows, dict[EdgeType, Tensor]]:
        """Return rows of ``nodes``, and their neighbours' features aggregated from the table.

        Neither the neighbours' rows nor messages are materialised. Collective.

        Args:
            nodes: node type → distinct ids ``[D]``, on any device.
            draws: edge type → the sampled neighbours of its destination type's ``nodes``.
            how: "mean", "sum", "max", or "weighted": the sum of rows times their
                ``weight_column``.

        Returns:
            ``(rows, {edge type: [D, F]})``; 0 for a node without neighbours.
        """
        nodes = {t: as_ids(ids) for t, ids in nodes.items()}
        ids = {
            t: np.concatenate([targets, *(d.ids for e, d in draws.items() if e[0] == t)])
            for t, targets in nodes.items()
        }
        slots = self._slots(ids)
        used = {t: len(targets) for t, targets in nodes.items()}
        beside = self._beside(nodes, draws)
        combined = {}
        for etype, draw in draws.items():
            ntype = etype[0]
            at, used[ntype] = used[ntype], used[ntype] + len(draw.ids)
            table = self.tables[ntype]
            weight = table[weight_column(etype)] if how == "weighted" else None
            combined[etype] = _add_up(
                table[FEATURES],
                slots[ntype][at : used[ntype]],
                draw.indptr,
                how,
                weight,
                beside[etype[2]][1] if etype[2] in beside else None,
            )
        targets = {t: rows[: len(nodes[t])] for t, rows in slots.items()}
        return self._rows(targets, {t: halves[0] for t, halves in beside.items()}), combined

    def _beside(self, nodes: Mapping[str, Ids], draws: Draws) -> dict[str, tuple[Tensor, Tensor]]:
        """Return buffers for nodes' features and, beside them, their neighbours' aggregate, so that
        one matrix product reads both without a copy.

        Only for node types with one incoming edge type, in fp32: in bf16 zeros are appended, which
        copies anyway.
        """
        halves = {}
        for ntype, ids in nodes.items() if self.beside else ():
            into = [e for e in draws if e[2] == ntype]
            if len(into) != 1 or FEATURES not in self.tables.get(ntype, {}):
                continue
            own, other = self.tables[ntype][FEATURES], self.tables[into[0][0]][FEATURES]
            if own.dtype != torch.float32:
                continue
            shape = len(ids), own.shape[1] + other.shape[1]
            both = self._ring.take(f"{ntype}/beside", shape, own.dtype)
            halves[ntype] = both[:, : own.shape[1]], both[:, own.shape[1] :]
        return halves

    def _rows(
        self, slots: Mapping[str, Tensor], out: Mapping[str, Tensor] | None = None
    ) -> FeatureRows:
        rows: FeatureRows = {t: {} for t in self.ntypes}
        for ntype, table in self.tables.items():
            for name, column in table.items():
                if name == FEATURES and out and ntype in out:
                    gathered = torch.index_select(column, 0, slots[ntype], out=out[ntype])
                else:
                    gathered = self._ring.gather(f"{ntype}/{name}", column, slots[ntype])
                rows[ntype][name] = gathered
        return rows

    def _slots(self, ids: Frontier) -> dict[str, Tensor]:
        slots, missing, counts = self.locate(ids)
        self._fetch(missing, counts)
        return slots

    def locate(self, ids: Frontier) -> tuple[dict[str, Tensor], Frontier, np.ndarray]:
        """Return the slots of rows, and the rows to fetch first.

        Returns:
            ``(slots, missing, counts)``: node type → int64 ``[n]``; node type → the distinct ids to
            fetch, by owner, the j-th with the slot ``permanent + j``; and the number that each rank
            owns, int64 ``[W, T]``.
        """
        slots, missing = {}, {}
        counts = np.zeros((self.exchange.world.size, len(self.tables)), np.int64)
        for number, t in enumerate(self.tables):
            starts = self.layouts[t].starts
            located = kernels.locate(ids[t], self.bounds[t], starts, *self._cache[t], self._base[t])
            slots[t], missing[t] = torch.from_numpy(located[0]), located[1]
            counts[:, number] = located[2]
            self.remote += int(located[3])
            self.hits += int(located[4])
        return slots, missing, counts

    def request(
        self, missing: Frontier, counts: np.ndarray
    ) -> tuple[np.ndarray, dict[str, Tensor]]:
        """Request rows from their owners; see `locate`. Collective.

        Returns:
            Number of rows that each rank requests here, int64 ``[W, T]``, and their slots by rank.
        """
        asked = self.exchange.counts(counts)
        ids = [torch.from_numpy(nodes) for nodes in missing.values()]
        came = self.exchange.columns(ids, counts, asked)
        return asked, {t: nodes + self._shift[t] for t, nodes in zip(missing, came)}

    def _fetch(self, missing: Frontier, counts: np.ndarray) -> None:
        if self.whole:
            return
        asked, index = self.request(missing, counts)
        numbers, answers, rooms = [], [], []
        for number, (ntype, table) in enumerate(self.tables.items()):
            base = self._base[ntype]
            for name, column in table.items():
                numbers.append(number)
                answers.append(self._answers.gather(f"{ntype}/{name}", column, index[ntype]))
                rooms.append(column[base : base + len(missing[ntype])])
        self.exchange.columns(answers, asked[:, numbers], counts[:, numbers], rooms)


def _add_up(
    table: Tensor,
    slots: Tensor,
    indptr: np.ndarray,
    how: str,
    weight: Tensor | None,
    out: Tensor | None,
) -> Tensor:
    """Aggregate rows of each list, into ``out`` if given."""
    if not len(slots):
        shape = len(indptr) - 1, table.shape[1]
        return table.new_zeros(shape) if out is None else out.zero_()
    given = None if weight is None else weight.index_select(0, slots).to(table.dtype)
    added = F.embedding_bag(
        slots,
        table,
        torch.from_numpy(indptr),
        mode="max" if how == "max" else "sum",
        per_sample_weights=given,
        include_last_offset=True,
    )
    if how == "mean":  # faster than embedding_bag's own mean
        count = torch.from_numpy(np.maximum(np.diff(indptr), 1).astype(np.float64))
        if table.dtype != torch.bfloat16:
            wide = torch.float64 if table.dtype == torch.float64 else torch.float32
            scale = count.reciprocal_().to(wide).unsqueeze(1)
            return torch.mul(added, scale, out=added if out is None else out)
        bits = added.view(torch.int16).numpy().view(np.uint16)
        kernels.scale_rows(bits, count.reciprocal_().float().numpy())
    return added if out is None else out.copy_(added)


SCALE = "_scale"
LEARNED = "learned"


@dataclass(frozen=True)
class Learned:
    """Embedding table of a node type.

    Attributes:
        dim: width of a row, stored in float32.
        dtype: compute dtype.
    """

    dim: int
    dtype: torch.dtype


@dataclass(frozen=True)
class Inputs:
    """Arrays of one node type that a model reads, by storage.

    Attributes:
        plain: joined into one table in the compute dtype.
        scaled: int8 arrays with a scale.
        categories: integers that stand for categories.
        learned: the type's node embeddings, placed after the features; None = none.
        ages: the ``categories`` that are times; the model reads the time since each.
    """

    plain: tuple[str, ...]
    scaled: tuple[str, ...]
    categories: tuple[str, ...]
    learned: Learned | None = None
    ages: tuple[str, ...] = ()

    @property
    def stored(self) -> bool:
        """True if the dataset has any of the arrays."""
        return bool(self.plain or self.scaled or self.categories)

    @property
    def one_table(self) -> bool:
        """True if the plain table is the complete input, so that its rows can be aggregated."""
        return bool(self.plain) and not (self.scaled or self.categories or self.learned)

    def width(self, arrays: Mapping[str, Tensor]) -> int:
        """Return the width of a row of input features, without categories."""
        stored = sum(row_width(arrays[name]) for name in (*self.plain, *self.scaled))
        return stored + (self.learned.dim if self.learned else 0)


def choose_inputs(
    arrays: Mapping[str, Tensor],
    features: Sequence[str],
    categories: Iterable[str],
    ages: Iterable[str] = (),
) -> Inputs:
    """Select the wanted arrays that a node type has."""
    present = [name for name in features if name in arrays]
    scaled = [n for n in present if arrays[n].dtype == torch.int8 and n + SCALE in arrays]
    plain = [name for name in present if name not in scaled]
    since = tuple(n for n in ages if n in arrays)
    chosen = (*(n for n in categories if n in arrays), *since)
    return Inputs(tuple(plain), tuple(scaled), chosen, ages=since)


def choose_edge_inputs(
    arrays: Mapping[EdgeType, Container[str]], features: Sequence[str], categories: Iterable[str]
) -> dict[EdgeType, Inputs]:
    """Select the wanted arrays of edge types; types without any are omitted.

    Raises:
        DataError: no edge type has an array of some name.
    """
    chosen = {
        etype: Inputs(
            tuple(name for name in features if name in named),
            (),
            tuple(name for name in categories if name in named),
        )
        for etype, named in arrays.items()
    }
    present = {name for i in chosen.values() for name in (*i.plain, *i.categories)}
    if missing := [name for name in (*features, *categories) if name not in present]:
        remedy = "set model.edge_features and model.edge_categories to existing arrays"
        raise DataError(f"no edge type has an array {missing[0]!r}", remedy=remedy)
    return {etype: inputs for etype, inputs in chosen.items() if inputs.stored}


def row_width(rows: Tensor) -> int:
    """Return the number of elements in one row of an array ``[N, ...]``."""
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
    host: Host | None = None,
    cached: Mapping[str, np.ndarray] | None = None,
) -> FeatureStore:
    """Build the store of the model's input. Collective.

    Args:
        inputs: node type → its arrays.
        dtype: of the plain table, and of int8 rows after scaling.
        degree_etypes: edge types whose in-degrees are added to their destination type's table.
        weighted: add the weights of a graph convolution (Kipf & Welling, 2017) to source rows:
            ``1 / sqrt(degree + 1)``, and 1 for an edge type between different node types.
        resident: copy the host's rows into memory, which is read faster than a mapped file; the
            same on all its ranks.
        ring, beside: see `FeatureStore`.
        learned: node type → embedding table, float32 ``[nodes of the type, dim]``, this rank's
            rows first, used in place; None = none.
        host: ranks whose rows are read in place; None = this one alone.
        cached: node type → ids of other hosts to cache: see `FeatureStore.fill_cache`.
    """
    learned, host = learned or {}, host or Host.alone(exchange)
    cached = {t: as_ids(ids) for t, ids in (cached or {}).items() if t not in learned}
    # embedding tables change, so other ranks' rows of a type with one are never read in place
    layouts = {
        t: TableLayout.local_only(shard.bounds[t], shard.rank)
        if t in learned
        else shard.layout(t, host.ranks, len(cached.get(t, ())))
        for t in shard.ntypes
    }
    hosts = {t: Host.alone(exchange) if t in learned else host for t in shard.ntypes}
    build = _TableBuilder(shard, layouts, hosts, resident)
    for ntype in shard.ntypes:
        build.inputs(ntype, inputs[ntype], dtype)
        if ntype in learned:
            build.tables[ntype][LEARNED] = learned[ntype]
    for etype in degree_etypes:
        degree = shard.in_degree(etype).to(torch.int32)
        build.copied(etype[2], degree_column(etype), degree)
    for etype in shard.etypes if weighted else ():
        source = etype[0]
        weight = torch.ones(shard.owned(source))
        if source == etype[2]:
            weight = (shard.in_degree(etype).float() + 1).rsqrt()
        build.copied(source, weight_column(etype), weight)
    store = FeatureStore(
        shard.bounds, exchange, build.tables, layouts=layouts, ring=ring, beside=beside
    )
    store.fill_cache(cached, host)
    if resident and host.leads:
        for ntype, ids in cached.items():
            first = layouts[ntype].cached
            for column in build.tables[ntype].values():
                use_large_pages(column[first : first + len(ids)])
    return store


@dataclass(frozen=True)
class _TableBuilder:
    """Builds tables column by column, the same ones on every rank. Collective."""

    shard: Shard
    layouts: Mapping[str, TableLayout]
    hosts: Mapping[str, Host]
    resident: bool
    tables: dict[str, FeatureTable] = field(default_factory=dict)

    def inputs(self, ntype: str, inputs: Inputs, dtype: torch.dtype) -> None:
        """Add the columns of a node type's inputs."""
        arrays = self.shard.node_data[ntype]
        self.tables[ntype] = {}
        if inputs.plain:
            self._stored(ntype, FEATURES, inputs.plain, dtype)
        for name in inputs.scaled:
            self._stored(ntype, f"int8:{name}", [name], torch.int8)
            self.copied(ntype, f"scale:{name}", arrays[name + SCALE].flatten().to(dtype))
        for name in inputs.categories:
            self.copied(ntype, f"category:{name}", arrays[name].flatten().to(torch.int64))

    def copied(self, ntype: str, column: str, rows: Tensor, *, large: bool = False) -> None:
        """Add a column; each rank copies its rows into the host's shared memory."""
        layout = self.layouts[ntype]
        with self.hosts[ntype].memory(layout.permanent * row_bytes(rows)) as handle:
            shape = rows.dtype, rows.shape[1:], layout.total
            table = map_table(*shape, shared=layout.permanent, handle=handle, large=large)
        start = int(layout.starts[self.shard.rank])
        own = table[start : start + len(rows)].copy_(rows)
        if large and handle is not None:
            use_large_pages(own)
        self.tables[ntype][column] = table

    def _stored(self, ntype: str, column: str, names: Sequence[str], dtype: torch.dtype) -> None:
        rows = self.shard.rows(ntype, names, dtype)  # staged now, before other ranks open them
        if self.resident:
            self.copied(ntype, column, as_matrix(rows), large=True)
            return
        layout = self.layouts[ntype]
        with self.hosts[ntype].memory(layout.permanent * row_bytes(rows)) as handle:
            table = self.shard.table(ntype, names, dtype, layout, handle)
        self.tables[ntype][column] = as_matrix(table)


def assemble(
    rows: FeatureRows, inputs: Mapping[str, Inputs], until: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """Return a batch's ``(x, categories)`` from gathered columns.

    Args:
        until: `Block.until`; a later time, which the seed cannot know, counts as the seed's.

    Returns:
        node type → ``[n, F]`` in the compute dtype (no entry for a type with categories alone),
        and node type → name → int64 ``[n]``.
    """
    x, categories = {}, {}
    for ntype, chosen in inputs.items():
        columns = rows[ntype]
        parts = [columns[FEATURES]] if chosen.plain else []
        for name in chosen.scaled:
            scale = columns[f"scale:{name}"]
            parts.append(columns[f"int8:{name}"].to(scale.dtype) * scale.unsqueeze(1))
        if chosen.learned and LEARNED in columns:  # in training `Embeddings` adds them
            parts.append(columns[LEARNED].to(chosen.learned.dtype))
        if parts:
            x[ntype] = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        if chosen.categories:
            categories[ntype] = {n: columns[f"category:{n}"] for n in chosen.categories}
        for name in chosen.ages:
            times = categories[ntype][name]
            since = until[ntype].to(times.device) - times
            categories[ntype][name] = since.clamp_(min=0)
    return x, categories
