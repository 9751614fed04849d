"""Shards of workers: together they are the partitioned graph, each read from its node's cache."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raygnn.errors import DataError
from raygnn.graph.data import DEFAULT_ETYPE, EdgeType, GraphData, etype_str
from raygnn.graph.partition.dgl_format import read_graphs, read_tensors, write_tensors
from raygnn.graph.partition.layout import PartitionMeta, read_meta
from raygnn.graph.staging.node_cache import Stage
from raygnn.graph.staging.parts import Staged
from raygnn.graph.staging.shard import Shard, describe_shard, load_shard
from tests.support.builders import write_homogeneous
from tests.support.graphs import TYPED, partitioned, random_graph, typed_graph
from tests.support.parted import assert_same_data, graphs, in_edges, load_all, original_ids


def shards(meta: PartitionMeta, stage: Path, workers: int, replicated: bool) -> list[Shard]:
    names = sorted({name for part in load_all(meta) for f in part.edge_data.values() for name in f})
    return [
        load_shard(
            meta, r, workers, replicated=replicated, stage=Stage(stage), edge_arrays=[*names, "no"]
        )
        for r in range(workers)
    ]


def assert_whole(found: list[Shard], data: GraphData, meta: PartitionMeta) -> None:
    """Check that the workers' rows are the graph's, each node's once, with edges in their order."""
    nids, eids = original_ids(meta)
    lists = in_edges(data)
    for ntype, frame in data.nodes.items():
        original = np.concatenate([shard.original[ntype] for shard in found])
        assert np.array_equal(original, nids[ntype])
        rows: dict[str, Any] = {
            name: torch.cat([shard.node_data[ntype][name] for shard in found])
            for name in frame.data
        }
        expected = {
            name: torch.as_tensor(values)[torch.from_numpy(original)]
            for name, values in frame.data.items()
        }
        assert_same_data(rows, expected)
    for etype in data.edges:
        for shard in found:
            assert_rows(shard, etype, data, lists[etype], nids, eids)


def assert_rows(
    shard: Shard,
    etype: EdgeType,
    data: GraphData,
    lists: list[list[int]],
    nids: dict[str, Any],
    eids: dict[EdgeType, Any],
) -> None:
    rows, ntype, edges = shard.topology[etype], etype[2], data.edges[etype]
    assert rows.src.dtype == rows.keys.dtype == np.int32
    assert not rows.src.flags.writeable
    assert np.array_equal(rows.keys, nids[ntype][rows.first : rows.first + rows.num])
    names = [n for n, a in edges.data.items()]
    assert rows.data.keys() == set(names)
    for i, node in enumerate(rows.keys):
        span = slice(rows.indptr[i], rows.indptr[i + 1])
        wanted = lists[node]
        assert nids[etype[0]][rows.src[span]].tolist() == edges.src[wanted].tolist()
        positions = np.arange(span.start, span.stop) + shard.edge_first(etype)
        assert eids[etype][positions].tolist() == wanted  # parts number edges row by row
        for name in names:
            held = torch.as_tensor(rows.data[name][span].copy())
            assert torch.equal(held, torch.as_tensor(edges.data[name])[wanted].to(held.dtype))
    low, owned = shard.first(ntype) - rows.first, shard.owned(ntype)
    degrees = [len(lists[node]) for node in rows.keys[low : low + owned]]
    assert shard.in_degree(etype).tolist() == degrees
    sources = [s for node in rows.keys[low : low + owned] for s in edges.src[lists[node]]]
    assert nids[etype[0]][shard.own_sources(etype)].tolist() == sources
    assert rows.num_edges == sum(len(lists[node]) for node in rows.keys)


@settings(max_examples=25)
@given(data=graphs(), parts=st.integers(1, 4), workers=st.integers(1, 6), replicated=st.booleans())
def test_workers_hold_the_graph_between_them(
    data: GraphData, parts: int, workers: int, replicated: bool
) -> None:
    with tempfile.TemporaryDirectory() as place:
        meta = partitioned(data, Path(place), parts)
        found = shards(meta, Path(place) / "stage", workers, replicated)
        assert_whole(found, data, meta)
        for shard in found:
            assert describe_shard(shard)
            for etype, rows in shard.topology.items():
                whole = rows.num == shard.num_nodes(etype[2])
                assert whole if replicated else rows.num == shard.owned(etype[2])


def shuffled(meta: PartitionMeta, edges_too: bool) -> PartitionMeta:
    """The same partition as another tool would leave it: no manifest, edges in any order, and
    with ``edges_too`` numbered in any order, too."""
    rng = np.random.default_rng(0)
    (meta.directory / "raygnn.json").unlink()
    for part, files in enumerate(meta.files):
        (graph,) = read_graphs(files.graph)  # type: ignore[arg-type]
        src, dst = graph.relations[0].src, graph.relations[0].dst
        order = rng.permutation(len(src))
        edata: dict[str, Any] = {name: a[order] for name, a in graph.edata[0].items()}
        if edges_too:
            assert len(meta.etypes) == 1
            first, last = meta.edge_ranges[meta.etypes[0]][part]
            new = first + rng.permutation(last - first)
            own = (edata["_ID"] >= first) & (edata["_ID"] < last)
            edata["_ID"][own] = new[edata["_ID"][own] - first]
            frames = read_tensors(files.edge_feats)
            for name, values in frames.items():
                moved = torch.as_tensor(values).clone()
                moved[torch.from_numpy(new - first)] = torch.as_tensor(values)
                frames[name] = moved
            write_tensors(Path(str(files.edge_feats)), frames)
        ends, file = (src[order], dst[order]), Path(str(files.graph))
        write_homogeneous(file, graph.num_nodes[0], *ends, graph.ndata[0], edata)
    return read_meta(meta.directory)


def test_edges_in_any_order(tmp_path: Path) -> None:
    data = typed_graph(40, 15)
    meta = shuffled(partitioned(data, tmp_path, 3), edges_too=False)
    for replicated in (True, False):
        assert_whole(shards(meta, tmp_path / "stage", 2, replicated), data, meta)


def test_edges_numbered_in_any_order(tmp_path: Path) -> None:
    data = random_graph(60, 4)
    edges = data.edges[DEFAULT_ETYPE]
    edges.data["w"] = np.arange(edges.num, dtype=np.float32)
    before = partitioned(data, tmp_path, 2)
    ours = [read_tensors(files.orig_eids)[etype_str(DEFAULT_ETYPE)] for files in before.files]  # type: ignore[arg-type]
    meta = shuffled(before, edges_too=True)
    assert not np.array_equal(
        read_tensors(meta.files[0].edge_feats)[f"{etype_str(DEFAULT_ETYPE)}/w"], ours[0]
    )
    nids, _ = original_ids(meta)
    for shard in shards(meta, tmp_path / "stage", 3, True):
        rows = shard.topology[DEFAULT_ETYPE]
        for i, node in enumerate(rows.keys):
            span = slice(rows.indptr[i], rows.indptr[i + 1])
            named = rows.data["w"][span].astype(int)  # the weight of an edge is its original id
            assert (edges.dst[named] == node).all()
            assert np.array_equal(edges.src[named], nids["_N"][rows.src[span]])
        assert np.array_equal(np.sort(rows.data["w"]), np.arange(edges.num))


def test_tables(tmp_path: Path) -> None:
    data = typed_graph(50, 12)
    frame = data.nodes["item"].data
    frame["price"] = np.arange(50, dtype=np.int16)
    frame["image"] = torch.randn(50, 2, 3).bfloat16()
    meta = partitioned(data, tmp_path, 2)
    for workers in (1, 2, 3):
        for rank in range(workers):
            shard = load_shard(
                meta, rank, workers, replicated=True, stage=Stage(tmp_path / "stage")
            )
            everyone = [
                load_shard(meta, r, workers, replicated=True, stage=Stage(tmp_path / "stage"))
                for r in range(workers)
            ]
            for dtype, ranks in product(
                (torch.float32, torch.bfloat16, torch.float64, torch.float16),
                ([rank], range(workers)),
            ):
                names, layout = ["feat", "price", "image"], shard.layout("item", ranks, 3)
                table = shard.table("item", names, dtype, layout)
                assert table.dtype == dtype
                assert table.shape == (layout.total, 6 + 1 + 6)
                assert np.flatnonzero(layout.starts >= 0).tolist() == list(ranks)
                for other, start in zip(everyone, layout.starts):
                    held = other.node_data["item"]
                    wanted = [held["feat"].to(dtype), held["price"].to(dtype).unsqueeze(1)]
                    wanted.append(held["image"].to(dtype).flatten(1))
                    here = table[start : start + other.owned("item")]
                    assert start < 0 or torch.equal(here, torch.cat(wanted, 1))
                assert not table[layout.cached : layout.cached + 3].any()
                assert not table[layout.permanent :].any()
                table.fill_(9)  # stays in this process, and in this table
            again = shard.rows("item", ["image"], torch.bfloat16)
            assert torch.equal(again.view(-1, 2, 3), shard.node_data["item"]["image"])
            one = shard.rows("user", ["feat"], torch.float32)
            assert torch.equal(one, shard.node_data["user"]["feat"])
    kinds = sorted(path.name.split("-")[0] for path in (tmp_path / "stage").iterdir())
    assert set(kinds) == {"nodes", "table", "topology"}  # no lock, nothing temporary


def test_tables_are_written_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raygnn.graph.staging.parts._CHUNK", 100)
    meta = partitioned(random_graph(200, 2), tmp_path, 1)
    shard = load_shard(meta, 0, 1, replicated=True, stage=Stage(tmp_path / "stage"))
    held = shard.node_data["_N"]
    table = shard.rows("_N", ["feat", "label"], torch.float64)
    wanted = torch.cat([held["feat"].double(), held["label"].double().unsqueeze(1)], 1)
    assert torch.equal(table, wanted)


def test_parts_that_differ(tmp_path: Path) -> None:
    meta = partitioned(typed_graph(40, 12), tmp_path, 2)
    (meta.directory / "raygnn.json").unlink()
    file = Path(str(meta.files[1].node_feats))
    good = read_tensors(file)
    for change, said in (
        ({"item/feat": torch.as_tensor(good["item/feat"]).double()}, "float64"),
        ({"item/feat": torch.as_tensor(good["item/feat"])[:, :3]}, "3"),
        ({"item/feat": None}, "some lack it"),
    ):
        write_tensors(file, {k: v for k, v in {**good, **change}.items() if v is not None})
        bare = read_meta(meta.directory)
        stage = Stage(tmp_path / "stage")
        with pytest.raises(DataError, match=r"item/feat differs between the parts") as error:
            load_shard(bare, 0, 1, replicated=True, stage=stage)
        assert said in error.value.what
        assert error.value.where == str(meta.config_file)
        load_shard(bare, 0, 2, replicated=True, stage=stage)  # it does not look at that part


def test_a_part_without_nodes_of_a_type_may_lack_its_arrays(tmp_path: Path) -> None:
    data = typed_graph(20, 1)  # one user, in one of the parts
    meta = partitioned(data, tmp_path, 2)
    (meta.directory / "raygnn.json").unlink()
    ranges = meta.node_ranges["user"]
    empty = int(np.flatnonzero(ranges[:, 0] == ranges[:, 1])[0])
    file = Path(str(meta.files[empty].node_feats))
    write_tensors(file, {k: v for k, v in read_tensors(file).items() if k != "user/feat"})
    bare, stage = read_meta(meta.directory), Stage(tmp_path / "stage")
    for workers in (1, 2):  # one of two workers has only that part, and still knows the arrays
        shards = [
            load_shard(bare, rank, workers, replicated=True, stage=stage) for rank in range(workers)
        ]
        rows = [shard.node_data["user"]["feat"] for shard in shards]
        assert all(feat.shape[1:] == (3,) for feat in rows)
        assert sum(map(len, rows)) == 1


def test_another_partition_of_the_same_digest(tmp_path: Path) -> None:
    """METIS need not divide alike twice, so what was staged may be of an earlier division."""
    data = typed_graph(30, 12)
    stage = tmp_path / "stage"
    for number in range(2):
        meta = partitioned(data, tmp_path / str(number), 2, "random" if number else "metis")
        assert meta.digest == "0" * 64
        assert_whole(shards(meta, stage, 2, True), data, meta)


def test_large_graphs_get_wide_ids(tmp_path: Path) -> None:
    meta = partitioned(typed_graph(30, 12), tmp_path, 2)
    far = meta.node_ranges["item"].copy()
    far[-1, 1] = 2**31
    wide = replace(meta, node_ranges={**meta.node_ranges, "item": far})
    assert wide.num_nodes("item") == 2**31
    entry = Staged(Stage(tmp_path / "stage"), wide).topology((0, 1))
    for etype in TYPED:
        wanted = "int64" if etype[0] == "item" else "int32"
        assert entry.arrays[f"src/{etype_str(etype)}"].dtype == wanted


MEMORY = """
import sys
from pathlib import Path
import torch
from raygnn.graph.partition.layout import read_meta
from raygnn.graph.staging.shard import load_shard
from raygnn.graph.staging.node_cache import Stage

def private():
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    names = ("Private_Dirty", "Anonymous")
    return sum(int(line.split()[1]) for line in lines if line.startswith(names)) // 2

meta, stage = read_meta(sys.argv[1]), Stage(Path(sys.argv[2]))
torch.ones(10).sum(), torch.ones(3, 3).mean()
before = private()
shard = load_shard(meta, 0, 2, replicated=True, stage=stage)
table = shard.table("_N", ["feat"], torch.bfloat16, shard.layout("_N", [0], 10_000))
table = table[: shard.owned("_N")]
rows = shard.topology[("_N", "_E", "_N")]
total = rows.src.max() + rows.indptr.max() + rows.keys.max() + shard.original["_N"].max()
for each in (table, *shard.node_data["_N"].values()):
    total += each.view(torch.uint8).sum()
held = rows.nbytes + table.nbytes + sum(a.nbytes for a in shard.node_data["_N"].values())
print(private() - before, held // 1024)
"""


def test_nothing_of_the_graph_is_private_memory(tmp_path: Path) -> None:
    meta = partitioned(random_graph(100_000, 20, features=64), tmp_path, 2)
    stage = Stage(tmp_path / "stage")
    shard = load_shard(meta, 0, 2, replicated=True, stage=stage)
    shard.rows("_N", ["feat"], torch.bfloat16)
    os.sync()  # tests write without fsync, and pages that are not written count as private
    command = [sys.executable, "-c", MEMORY, str(meta.directory), str(stage.root)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    private, held = map(int, done.stdout.split())
    assert held > 25_000  # KiB
    assert private < held // 8
