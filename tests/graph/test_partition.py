"""Partitions: nothing is lost, DGL agrees, and a partition is there whole or not at all."""

from __future__ import annotations

import errno
import json
import resource
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raygnn.config.graph import DatasetGraph
from raygnn.config.load import load_config
from raygnn.config.schema import Config
from raygnn.errors import ConfigError, DataError, InputError
from raygnn.graph import arrays, sources
from raygnn.graph.data import (
    DEFAULT_ETYPE,
    DEFAULT_NTYPE,
    SPLITS,
    EdgeFrame,
    GraphData,
    NodeFrame,
    etype_str,
)
from raygnn.graph.dgl import dgl
from raygnn.graph.partition import stream, write
from raygnn.graph.partition.layout import read_meta
from raygnn.graph.partition.make import find_partition
from raygnn.graph.partition.manifest import Feature
from raygnn.graph.partition.read import part_facts, table
from tests.support import datasets
from tests.support.graphs import ensure_partition, partition_graph, random_graph, typed_graph
from tests.support.parted import (
    assert_same,
    graphs,
    in_edges,
    load_part,
    original_ids,
    reassemble,
    verify,
)

# --- nothing is lost -----------------------------------------------------------------------------


@settings(max_examples=25)
@given(graphs(), st.integers(1, 5), st.sampled_from(["metis", "stream", "random"]))
def test_the_parts_together_are_the_graph(data: GraphData, parts: int, method: str) -> None:
    with tempfile.TemporaryDirectory() as directory:
        meta = partition_graph(data, Path(directory) / "p", parts, method)
        again, lists = reassemble(meta, *original_ids(meta))
        assert_same(again, data)
        assert lists == in_edges(data)  # in original order, however the graph was divided
        nodes = [sum(row.values()) for row in (part.nodes for part in part_facts(meta))]
        if method == "random":
            assert max(nodes) - min(nodes) <= 1
        verify(meta)


@settings(max_examples=12)
@given(graphs(), st.integers(1, 4))
def test_the_manifest_counts_what_the_parts_hold(data: GraphData, parts: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        meta = partition_graph(data, Path(directory) / "p", parts)
        (meta.directory / "raygnn.json").unlink()
        assert meta.manifest
        assert meta.manifest.parts == part_facts(read_meta(meta.directory))
        frames = {**data.nodes, **{etype_str(etype): edges for etype, edges in data.edges.items()}}
        assert meta.manifest.features == {
            f"{kind}/{name}": Feature(dtype=arrays.dtype_name(array), shape=list(array.shape[1:]))
            for kind, frame in frames.items()
            for name, array in frame.data.items()
        }
        for ntype, frame in data.nodes.items():
            counts = [part.splits.get(ntype, {}) for part in meta.manifest.parts]
            for split in SPLITS:
                mask = frame.data.get(f"{split}_mask")
                assert all((split in count) == (mask is not None) for count in counts)
                marked = 0 if mask is None else mask.sum()
                assert sum(count.get(split, 0) for count in counts) == marked
        rows = table(meta)
        assert rows[-1]["part"] == "total"
        assert len(rows) == parts + 1
        assert rows[-1]["nodes"] == data.num_nodes
        assert rows[-1]["edges"] == data.num_edges
        assert rows[-1]["seconds"] > 0


def test_cora_in_two_parts(data_dir: Path, tmp_path: Path) -> None:
    cora = sources.load_graph(DatasetGraph(**datasets.cora(data_dir, tmp_path)))
    meta = partition_graph(cora, tmp_path / "p", 2, "metis")
    again, _ = reassemble(meta, *original_ids(meta))
    assert_same(again, cora)
    first, second, total = table(meta)
    assert total["cut"] < 0.08 * total["edges"]  # half of them, divided at random
    assert abs(first["nodes"] - second["nodes"]) < 0.1 * total["nodes"]
    assert abs(first["training_nodes"] - second["training_nodes"]) <= 14
    assert total["training_nodes"] == 140
    assert 0 < first["halo"] < second["nodes"]


@pytest.mark.parametrize("method", ["metis", "stream"])
def test_training_nodes_and_types_are_shared_out(method: str, tmp_path: Path) -> None:
    nodes, width = 2000, 20  # a ring of cliques; all training nodes on one side of it
    src = np.arange(nodes).repeat(width)
    dst = (src + np.tile(np.arange(1, width + 1), nodes)) % nodes
    data = GraphData(
        "ring",
        {DEFAULT_NTYPE: NodeFrame(nodes, {"train_mask": np.arange(nodes) < nodes // 4})},
        {DEFAULT_ETYPE: EdgeFrame(src, dst)},
    )
    *rows, total = table(partition_graph(data, tmp_path / "ring", 2, method))
    assert all(200 <= row["training_nodes"] <= 300 for row in rows)
    assert total["cut"] < 0.2 * total["edges"]
    meta = partition_graph(typed_graph(400, 160), tmp_path / "typed", 4, method)
    for ntype, share in (("item", 100), ("user", 40)):
        assert all(abs(np.diff(row)[0] - share) <= share / 2 for row in meta.node_ranges[ntype])


def test_equal_input_gives_equal_files(tmp_path: Path) -> None:
    def files(data: GraphData, name: str, method: str, seed: int = 0) -> Any:
        meta = partition_graph(data, tmp_path / name, 3, method, seed=seed)
        assert meta.manifest
        return meta.manifest.files

    plain = random_graph()
    plain.nodes[DEFAULT_NTYPE].data.clear()
    assert files(plain, "a", "metis") == files(plain, "b", "metis")
    assert files(typed_graph(), "s", "stream") == files(typed_graph(), "t", "stream")
    assert files(typed_graph(), "c", "random") == files(typed_graph(), "d", "random")
    assert files(typed_graph(), "e", "random", 1) != files(typed_graph(), "f", "random", 2)


# --- DGL agrees ----------------------------------------------------------------------------------


@pytest.mark.dgl
def test_dgl_loads_and_verifies_what_we_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DGL_DIST_DEBUG", "1")
    for data in (random_graph(), typed_graph()):
        for parts in (1, 3):
            meta = partition_graph(data, tmp_path / f"{data.name}{parts}", parts)
            for number in range(parts):
                graph, nodes, edges, book, name, ntypes, etypes = dgl().distributed.load_partition(
                    str(meta.config_file), number
                )
                part = load_part(meta, number)
                assert (name, ntypes, etypes) == (data.name, meta.ntypes, meta.etypes)
                assert edges == {}
                for key, tensor in nodes.items():
                    ntype, _, column = key.partition("/")
                    assert torch.equal(tensor, part.node_data[ntype][column].to(tensor.dtype))
                _, node_ids = book.map_to_per_ntype(graph.ndata[dgl().NID])
                kinds, edge_ids = book.map_to_per_etype(graph.edata[dgl().EID])
                own = graph.edata["inner_edge"].bool()
                assert own.tolist() == sorted(own.tolist(), reverse=True)
                for ids in (graph.edata[dgl().EID][own], graph.edata[dgl().EID][~own]):
                    assert (ids.diff() > 0).all()
                for kind, etype in enumerate(etypes):
                    chosen = own & (kinds == kind)
                    src, dst = (node_ids[end[chosen]] for end in graph.edges())
                    csc = part.csc[etype]
                    first, last = meta.node_ranges[etype[2]][number]
                    rows = torch.arange(first, last).repeat_interleave(csc.indptr.diff())
                    assert torch.equal(edge_ids[chosen], csc.eid)
                    assert torch.equal(src, csc.src)
                    assert torch.equal(dst, rows)


def to_dgl(data: GraphData) -> Any:
    ends = {e: (torch.from_numpy(f.src), torch.from_numpy(f.dst)) for e, f in data.edges.items()}
    graph = dgl().heterograph(ends, {ntype: frame.num for ntype, frame in data.nodes.items()})
    for ntype, frame in data.nodes.items():
        for name, values in frame.data.items():
            graph.nodes[ntype].data[name] = torch.as_tensor(values)
    for etype, edges in data.edges.items():
        for name, values in edges.data.items():
            graph.edges[etype].data[name] = torch.as_tensor(values)
    return graph


def dgl_partition(
    data: GraphData,
    out: Path,
    parts: int,
    monkeypatch: pytest.MonkeyPatch,
    assignment: dict[str, Any] | None = None,
    formats: Any = None,
) -> tuple[Path, dict[str, Any], dict[Any, Any]]:
    """Partition by DGL, with our assignment if passed; return the JSON and the original node and
    edge ids."""
    module = dgl().distributed.partition
    if assignment is not None:
        flat = torch.from_numpy(np.concatenate([assignment[t] for t in sorted(assignment)]))
        monkeypatch.setattr(module, "metis_partition_assignment", lambda *a, **k: flat)
    nids, eids = module.partition_graph(
        to_dgl(data),
        data.name,
        parts,
        str(out),
        part_method="metis" if assignment else "random",
        return_mapping=True,
        graph_formats=formats,
    )
    if not isinstance(nids, dict):
        nids, eids = {DEFAULT_NTYPE: nids}, {DEFAULT_ETYPE: eids}
    return (
        out / f"{data.name}.json",
        {ntype: ids.numpy() for ntype, ids in nids.items()},
        {etype: ids.numpy() for etype, ids in eids.items()},
    )


def in_original_ids(config: Path, part: int, nids: dict[str, Any], eids: dict[Any, Any]) -> Any:
    """Return all contents of a part's files, owned and halo, as sets in original ids."""
    graph, node_data, edge_data, book, _, ntypes, etypes = dgl().distributed.load_partition(
        str(config), part
    )
    kinds, ids = book.map_to_per_ntype(graph.ndata[dgl().NID])
    nodes = [(ntypes[k], int(nids[ntypes[k]][i])) for k, i in zip(kinds, ids, strict=True)]
    kinds, ids = book.map_to_per_etype(graph.edata[dgl().EID])
    edges = [(etypes[k], int(eids[etypes[k]][i])) for k, i in zip(kinds, ids, strict=True)]
    src, dst = graph.edges()
    ends = [(nodes[s], nodes[d]) for s, d in zip(src, dst, strict=True)]
    if len(ntypes) > 1:
        assert [ntypes[k] for k in graph.ndata[dgl().NTYPE]] == [ntype for ntype, _ in nodes]
        assert [etypes[k] for k in graph.edata[dgl().ETYPE]] == [etype for etype, _ in edges]
    inner = graph.ndata["inner_node"].tolist()
    own = [node for node, is_inner in zip(nodes, inner, strict=True) if is_inner]
    rows = {key: len(values) for key, values in (node_data | edge_data).items()}
    labels = {
        key: {
            i: value.tolist()
            for (_, i), value in zip(
                [node for node in own if node[0] == key.partition("/")[0]], values, strict=True
            )
        }
        for key, values in node_data.items()
    }
    return (
        sorted(zip(nodes, inner, graph.ndata["part_id"].tolist(), strict=True)),
        sorted(zip(edges, ends, graph.edata["inner_edge"].tolist(), strict=True)),
        labels,
        rows,
        {
            name: values.dtype
            for frame in (graph.ndata, graph.edata)
            for name, values in frame.items()
        },
    )


def test_the_manifest_records_the_method(tmp_path: Path) -> None:
    stages: list[str] = []
    meta = ensure_partition(job(tmp_path, method="stream"), 2, stages.append)
    assert stages[:3] == ["load", "stream", "stream, pass 1 of at most 9"]
    assert meta.manifest is not None
    assert meta.manifest.method == meta.manifest.source.made_from["method"] == "stream"
    assert "stream" in meta.manifest.seconds
    assert meta.digest != ensure_partition(job(tmp_path), 2).digest


@pytest.mark.dgl
@pytest.mark.parametrize("make_graph", [random_graph, typed_graph])
def test_the_same_assignment_gives_what_dgl_would_write(
    make_graph: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = make_graph()
    for edges in data.edges.values():
        edges.data["w"] = np.arange(edges.num, dtype=np.float32)
    data.nodes = dict(sorted(data.nodes.items()))  # as DGL orders types
    data.edges = dict(sorted(data.edges.items()))
    assignment = stream.assign(data, list, 3, "random", 0, tmp_path)
    config, *theirs = dgl_partition(data, tmp_path / "dgl", 3, monkeypatch, assignment)
    meta = partition_graph(data, tmp_path / "ours", 3)
    ours = original_ids(meta)
    mine, other = (json.loads(path.read_text()) for path in (meta.config_file, config))
    assert mine | {"part_method": ""} == other | {"part_method": ""}
    for part in range(3):
        expected = in_original_ids(config, part, *theirs)
        assert in_original_ids(meta.config_file, part, *ours) == expected


@pytest.mark.dgl
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("formats", [None, "csc", "csr", ["coo", "csr", "csc"]])
def test_partitions_of_dgl_are_read(
    formats: Any, parts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for data in (random_graph(60), typed_graph(40, 20)):
        for edges in data.edges.values():
            edges.data["w"] = np.arange(edges.num)
        out = tmp_path / data.name
        config, nids, eids = dgl_partition(data, out, parts, monkeypatch, formats=formats)
        meta = read_meta(out)
        assert meta.manifest is None
        assert meta.config_file == config
        again, lists = reassemble(meta, nids, eids)
        assert_same(again, data)
        assert meta.files[0].orig_nids is None
        assert {e: [sorted(ids) for ids in lists[e]] for e in lists} == in_edges(data)


# --- whole or not at all -------------------------------------------------------------------------

KILLED = """
import os, signal, sys
from pathlib import Path
from raygnn.graph.partition import write as store
from tests.support.graphs import partitioned, random_graph
write, calls = store.write_tensors, []
def write_and_die(*args):
    calls.append(args)
    if len(calls) == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return write(*args)
store.write_tensors = write_and_die
partitioned(random_graph(), Path(sys.argv[1]), 2)
"""


def test_a_killed_run_leaves_nothing_that_looks_whole(tmp_path: Path) -> None:
    checkout = Path(__file__).resolve().parents[2]
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], cwd=checkout)
    assert killed.returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".random-2-random.tmp-")
    assert (left / "part0").is_dir()
    alive = tmp_path / left.name.replace(left.name.split("-")[3], "1")  # another, living process
    alive.mkdir()
    elsewhere = tmp_path / (left.name[:-16] + "f" * 16)  # the same number on another host
    elsewhere.mkdir()
    with pytest.raises(DataError):
        read_meta(tmp_path)
    meta = partition_graph(random_graph(), tmp_path / "random-2-random")
    verify(meta)
    assert {path.name for path in tmp_path.iterdir()} == {
        "random-2-random",
        alive.name,
        elsewhere.name,
    }


def test_of_two_that_make_the_same_one_both_get_it(tmp_path: Path) -> None:
    out, inner = tmp_path / "p", []

    def other_is_faster(stage: str) -> None:
        if stage == "write":
            inner.append(partition_graph(random_graph(), out))

    meta = partition_graph(random_graph(), out, progress=other_is_faster)
    assert len(inner) == 1
    assert meta.manifest == inner[0].manifest
    assert [path.name for path in tmp_path.iterdir()] == ["p"]
    assert partition_graph(random_graph(), out).manifest == meta.manifest
    with pytest.raises(DataError, match="another partition"):
        partition_graph(random_graph(), out, digest="e")


def test_a_full_disk_is_reported_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, hard))
    try:
        with pytest.raises(DataError, match="cannot be written: File too large") as error:
            partition_graph(random_graph(), tmp_path / "p")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert str(tmp_path / "p") in str(error.value)

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(write, "write_graph", full)
    with pytest.raises(DataError, match="No space left on device") as error:
        partition_graph(random_graph(), tmp_path / "p")
    assert error.value.remedy
    assert "space" in error.value.remedy
    assert list(tmp_path.iterdir()) == []


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(DataError) as error:
            partition_graph(random_graph(), place)
        assert str(tmp_path / "file") in str(error.value)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("years of work")
    with pytest.raises(DataError, match="holds no partition"):
        partition_graph(random_graph(), tmp_path / "full")
    (tmp_path / "empty").mkdir()
    assert partition_graph(random_graph(), tmp_path / "empty").num_parts == 2


def test_an_interrupt_leaves_nothing(tmp_path: Path) -> None:
    def interrupt(stage: str) -> None:
        if stage == "write":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        partition_graph(random_graph(), tmp_path / "p", method="metis", progress=interrupt)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("dtype", "said"), [("uint32", "uint32"), ("complex64", "complex64"), (">f4", ">f4")]
)
def test_arrays_that_dgl_cannot_hold(dtype: str, said: str, tmp_path: Path) -> None:
    data = random_graph()
    data.nodes[DEFAULT_NTYPE].data["odd"] = np.zeros(200, dtype=dtype)
    data.origin[f"{DEFAULT_NTYPE}/odd"] = "odd.npy"
    with pytest.raises(DataError, match=said) as error:
        partition_graph(data, tmp_path / "p")
    assert error.value.where == "odd.npy"
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(DataError, match="colon"):
        partition_graph(
            GraphData(
                "g",
                {"a:b": NodeFrame(1)},
                {("a:b", "r", "a:b"): EdgeFrame(np.zeros(1, int), np.zeros(1, int))},
            ),
            tmp_path / "p",
        )


# --- found again ---------------------------------------------------------------------------------


def job(storage: Path, *, nodes: int = 300, **partition: Any) -> Config:
    return load_config(
        {
            "name": "a",
            "storage": str(storage),
            "graph": {"format": "planted", "nodes": nodes} if nodes else None,
            "partition": partition,
            "model": {"kind": "gcn"},
        }
    )


def test_a_partition_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stages: list[str] = []
    meta = ensure_partition(job(tmp_path), 2, stages.append)
    assert stages[:2] == ["load", "metis"]
    assert stages[-1].startswith("write, 2 of 2, ")
    assert meta.directory.parent == tmp_path / "partitions"
    assert meta.digest.startswith(meta.directory.name)
    assert len(meta.directory.name) == 16
    assert meta.manifest
    assert {"load", *meta.manifest.seconds} == {stage.partition(",")[0] for stage in stages}
    verify(meta)
    monkeypatch.setattr(sources, "load_graph", lambda graph: pytest.fail("read the graph again"))
    again = ensure_partition(job(tmp_path, parts=2), 7, stages.append)
    assert again.digest == meta.digest
    assert stages[-1].startswith("write, 2 of 2, ")
    monkeypatch.undo()
    for other in (
        ensure_partition(job(tmp_path), 3),
        ensure_partition(job(tmp_path, method="random"), 2),
        ensure_partition(job(tmp_path, nodes=301), 2),
    ):
        assert other.digest != meta.digest
    assert len(list((tmp_path / "partitions").iterdir())) == 4


def test_a_path_with_another_partition_is_refused(tmp_path: Path) -> None:
    place = tmp_path / "mine"
    meta = ensure_partition(job(tmp_path, path=place, parts=2), 9)
    assert meta.directory == place
    assert meta.num_parts == 2
    assert ensure_partition(job(tmp_path, path=place), 9).digest == meta.digest  # auto takes 2
    assert ensure_partition(job(tmp_path, path=place, nodes=0), 9).digest == meta.digest
    for config, said in (
        (job(tmp_path, path=place, parts=3), "partition.parts is 2 there and 3 here"),
        (job(tmp_path, path=place, method="random"), "'metis' there and 'random' here"),
        (job(tmp_path, path=place, nodes=400), "graph.nodes is 300 there and 400 here"),
    ):
        with pytest.raises(ConfigError, match=said) as error:
            ensure_partition(config, 2)
        assert error.value.where == "partition.path"
        assert str(place) in error.value.what


@pytest.mark.parametrize("name", ["a" * 300, "file/parts", "refused"])
def test_a_path_where_none_can_be_made(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error comes before the graph is read, and no file is left."""
    (tmp_path / "file").touch()
    opened = tempfile.TemporaryFile

    def refuse(*args: Any, dir: Path, **options: Any) -> Any:
        if name == "refused":
            raise PermissionError(errno.EACCES, "Permission denied")
        return opened(*args, dir=dir, **options)

    config = job(tmp_path, path=tmp_path / "x", parts=2)
    place = config.partition.model_copy(update={"path": tmp_path / name})
    config = config.model_copy(update={"partition": place})
    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    with pytest.raises(InputError) as caught:
        find_partition(config, 2)
    assert str(tmp_path / name) in str(caught.value)
    assert caught.value.remedy
    assert [*tmp_path.iterdir()] == [tmp_path / "file"]


@pytest.mark.dgl
def test_foreign_partitions_are_taken_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "theirs"
    config, *_ = dgl_partition(random_graph(), out, 2, monkeypatch)
    for path in (out, config):
        for nodes in (0, 300):
            meta = ensure_partition(job(tmp_path, path=path, nodes=nodes), 5)
            assert meta.num_parts == 2
            assert meta.manifest is None
    with pytest.raises(ConfigError, match="has 2 parts") as error:
        ensure_partition(job(tmp_path, path=out, parts=4), 4)
    assert error.value.where == "partition.parts"
    rows = table(meta)
    assert rows[-1]["nodes"] == 200
    assert rows[-1]["training_nodes"] > 0
    verify(meta)
    assert not (tmp_path / "partitions").exists()


@pytest.mark.dgl
def test_another_digest_for_another_foreign_partition(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests = set()
    for seed in range(2):
        dgl_partition(random_graph(seed=seed), tmp_path / str(seed), 2, monkeypatch)
        digests |= {read_meta(tmp_path / str(seed)).digest for _ in range(2)}
    assert len(digests) == 2
    read_meta(tmp_path / "0").files[1].graph.touch()
    assert read_meta(tmp_path / "0").digest not in digests
