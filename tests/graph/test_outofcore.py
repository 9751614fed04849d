"""A partition that is made out of core is the one that is made in memory, file for file."""

from __future__ import annotations

import copy
import gzip
import json
import signal
import subprocess
import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from raygnn.config.graph import GraphConfig, OgbGraph, TablesGraph
from raygnn.errors import DataError, InputError
from raygnn.graph.data import EdgeFrame, GraphData, NodeFrame
from raygnn.graph.outofcore import disk_graph, edge_shuffle, graph_stages, workspace
from raygnn.graph.outofcore.disk_graph import spill
from raygnn.graph.outofcore.divide import make_partition, partition_out_of_core
from raygnn.graph.outofcore.graph_stages import needs, read_graph, size_of
from raygnn.graph.outofcore.workspace import Pool, Workspace, in_turn
from raygnn.graph.partition.layout import read_meta
from raygnn.graph.partition.make import Missing
from raygnn.graph.partition.read import part_facts
from raygnn.graph.partition.stream import assign
from raygnn.graph.sources import digest as sources_digest
from raygnn.graph.sources import load_graph, normalize
from raygnn.graph.sources.ogb import archived
from raygnn.graph.tables.ids import StoredIds
from tests.budget import CHECKOUT
from tests.support.graphs import partition_graph
from tests.support.ogb_builder import EDGES, NODES, write_archives
from tests.support.parted import (
    assert_same,
    graphs,
    in_edges,
    in_one_space,
    original_ids,
    reassemble,
)
from tests.support.tables_builder import changed, write_shop, write_table

pytestmark = pytest.mark.long


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use many runs, pieces and buckets, with few edges each."""
    monkeypatch.setattr(disk_graph, "RUN", 7)
    monkeypatch.setattr(edge_shuffle, "BUCKET", 5)


def contents(directory: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()
    }


def joined(chunks: Iterable[tuple[Any, Any]]) -> list[np.ndarray]:
    return [np.concatenate(ends) for ends in zip(*([*chunks] or [([], [])]), strict=True)]


@settings(max_examples=20, deadline=None)
@given(data=graphs(), parts=st.integers(1, 4), method=st.sampled_from(["random", "stream"]))
def test_many_small_pieces_are_the_graph(data: GraphData, parts: int, method: str) -> None:
    with TemporaryDirectory() as place:
        root = Path(place)
        (root / "disk").mkdir()
        graph = spill(data, root / "disk")
        assert np.array_equal(joined(in_one_space(data)), joined(graph.in_one_space()))
        expected = assign(data, partial(in_one_space, data), parts, method, 0, root)
        found = assign(graph.data(), graph.in_one_space, parts, method, 0, root)
        assert all(np.array_equal(found[ntype], part) for ntype, part in expected.items())
        meta = partition_graph(data, root / "p", parts, method)
        again, lists = reassemble(meta, *original_ids(meta))
        assert_same(again, data)
        assert lists == in_edges(data)
        assert meta.manifest
        (meta.directory / "raygnn.json").unlink()
        assert meta.manifest.parts == part_facts(read_meta(meta.directory))


@pytest.mark.parametrize("bad", [-1, 3])
def test_edges_that_change_on_disk_are_refused(bad: int, tmp_path: Path) -> None:
    """As those of an archive may, which is mapped in place."""
    nodes = {"a": NodeFrame(3), "b": NodeFrame(9)}
    ends = EdgeFrame(np.array([0, 2]), np.array([8, 1]))
    graph = spill(GraphData("g", nodes, {("a", "r", "b"): ends}), tmp_path)
    assert len(joined(graph.in_one_space())[0]) == 2
    ((run,),) = graph.runs.values()
    run.src.write(np.array([0, bad]))
    with pytest.raises(DataError, match=f"an edge has node {bad}, and there are 3 'a'") as caught:
        list(graph.in_one_space())
    assert caught.value.where == str(run.src.path)


SPEC = {
    "nodes": {
        "user": {
            "files": ["users-*.parquet", "more.csv"],
            "id": "name",
            "features": {"feat": ["age", "income"]},
            "time": "born",
            "label": "class",
            "split": "fold",
        },
        "item": {
            "files": "items-*.parquet",
            "id": "sku",
            "features": {"feat": "vector", "price": "price"},
            "categories": {"brand": "brand"},
            "fill": 0.5,
        },
    },
    "edges": {
        "user:bought:item": {
            "files": "bought-*.csv",
            "source": "name",
            "target": "sku",
            "weight": "amount",
            "time": "at",
            "features": {"feat": ["x", "y"]},
            "reverse": "bought_by",
            "missing": "drop",
        },
        "user:knows:user": {
            "files": "knows-*.parquet",
            "source": "a",
            "target": "b",
            "undirected": True,
            "label": "kind",
            "splits": {"train": 0.5, "val": 0.2},
        },
    },
}


def write_tables(directory: Path, seed: int, *, numbers: bool, kept: bool) -> TablesGraph:
    """A graph in many files: text ids (of users whole numbers with ``numbers``), loops, repeated
    edges and, unless all are ``kept``, edges of items that are not there."""
    random = np.random.default_rng(seed)
    users, items = random.integers(3, 30), random.integers(1, 20)
    names = [str(n) if numbers else f"u{n}" for n in random.permutation(10 * users)[:users]]
    skus = random.permutation(1000)[:items]
    cut = random.integers(0, users)
    columns: dict[str, list[Any]] = {
        "name": names,
        "age": random.random(users).tolist(),
        "income": random.random(users).astype(np.float32).tolist(),
        "born": random.integers(-9, 10**6, users).tolist(),
        "class": random.choice(["no", "yes", "maybe"], users).tolist(),
        "fold": ["train", *random.choice(["train", "val", "test"], users - 1).tolist()],
    }
    stored = {**columns, "name": [int(n) for n in names]} if numbers else columns
    first = {name: values[:cut] for name, values in stored.items()}
    write_table(directory / "users-0.parquet", first)
    rest = {name: values[cut:] for name, values in columns.items()}
    write_table(directory / "more.csv", rest)
    half = random.random((items, 3)).astype(np.float16)
    table = pa.table(
        {
            "sku": pa.array(skus),
            "vector": pa.FixedSizeListArray.from_arrays(pa.array(half.reshape(-1)), 3),
            "price": random.random(items),
            "brand": random.choice(["a", "b"], items),
        }
    )
    pq.write_table(table.slice(0, items // 2), directory / "items-0.parquet")
    pq.write_table(table.slice(items // 2), directory / "items-1.parquet", row_group_size=2)
    for at in range(3):
        count = int(random.integers(1, 40))
        targets = random.choice(skus, count) + (0 if kept else random.integers(0, 2, count) * 5000)
        bought = {
            "name": random.choice(names, count).tolist(),
            "sku": targets.tolist(),
            "amount": random.random(count).tolist(),
            "at": random.integers(0, 99, count).tolist(),
            "x": random.random(count).tolist(),
            "y": random.random(count).tolist(),
        }
        write_table(directory / f"bought-{at}.csv", bought)
        ids = random.choice(stored["name"], (2, count))
        knows = {
            "a": ids[0].tolist(),
            "b": ids[1].tolist(),
            "kind": random.choice(["p", "q"], count),
        }
        write_table(directory / f"knows-{at}.parquet", knows)
    (directory / "shop.yaml").write_text(yaml.safe_dump(SPEC, sort_keys=False))
    return TablesGraph(format="tables", path=directory / "shop.yaml")


def missing(place: Path, parts: int) -> Missing:
    return Missing(place, parts, "random", "d" * 64, {"options": {}, "made_from": {}}, place)


def out_of_core(
    graph: GraphConfig, place: Path, parts: int, pool: Pool = in_turn, *, trains: bool = True
) -> None:
    found, masks = missing(place, parts), {"needs_masks": trains, "trains": trains}
    partition_out_of_core(found, graph, pool, lambda text: None, **masks)


@settings(max_examples=3, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    parts=st.integers(1, 3),
    numbers=st.booleans(),
    kept=st.booleans(),
    normalize=st.sampled_from(["none", "row", "standard"]),
    reverse=st.booleans(),
)
def test_tables_are_read_as_they_are_in_memory(
    seed: int, parts: int, numbers: bool, kept: bool, normalize: Any, reverse: bool
) -> None:
    with TemporaryDirectory() as place:
        root = Path(place)
        graph = write_tables(root, seed, numbers=numbers, kept=kept)
        graph = graph.model_copy(update={"normalize": normalize, "reverse": reverse})
        assert_as_in_memory(graph, root, parts)


def test_edges_alone_are_for_training(tmp_path: Path) -> None:
    """The masks of edges are found on disk."""
    graph, spec = write_tables(tmp_path, 0, numbers=False, kept=True), copy.deepcopy(SPEC)
    del spec["nodes"]["user"]["split"]
    graph.path.write_text(yaml.safe_dump(spec, sort_keys=False))
    assert_as_in_memory(graph, tmp_path, 2)
    spec["edges"]["user:knows:user"]["splits"] = {"train": 1e-9}
    graph.path.write_text(yaml.safe_dump(spec, sort_keys=False))
    with pytest.raises(DataError, match="there are no training edges"):
        out_of_core(graph, tmp_path / "p", 2)


def assert_as_in_memory(graph: GraphConfig, root: Path, parts: int) -> None:
    make_partition(missing(root / "local", parts), load_graph(graph))
    out_of_core(graph, root / "disk", parts)
    local, disk = contents(root / "local"), contents(root / "disk")
    manifests = [json.loads(files.pop("raygnn.json")) for files in (local, disk)]
    assert disk == local
    for manifest in manifests:
        del manifest["seconds"], manifest["checksum"]  # which is of the seconds, too
    assert manifests[0] == manifests[1]
    assert {path.name for path in root.glob(".*")} == set()


# not shrunk, since each example is slow
@settings(max_examples=6, deadline=None, phases=(Phase.reuse, Phase.generate))
@given(
    features=st.sampled_from(["float32", "float16", "float64", "uint8", "int64", ">f4"]),
    packed=st.booleans(),
    fortran=st.booleans(),
    parts=st.integers(1, 3),
    normalize=st.sampled_from(["none", "row", "standard"]),
    undirected=st.sampled_from([None, True]),
)
def test_archives_are_read_as_they_are_in_memory(
    features: str, packed: bool, fortran: bool, parts: int, **keys: Any
) -> None:
    with TemporaryDirectory() as place:
        root = Path(place)
        graph = write_archives(root, features=features, packed=packed, fortran=fortran)
        assert_as_in_memory(graph.model_copy(update=keys), root, parts)


@pytest.mark.parametrize("method", ["row", "standard"])
def test_integers_are_scaled_as_they_are_in_memory(method: str, tmp_path: Path) -> None:
    """Computed in float32, the dtype of a type without nodes as well."""
    feat = np.random.default_rng(0).integers(-(2**40), 2**40, (50, 3))
    nodes = {t: NodeFrame(len(rows), {"feat": rows}) for t, rows in (("a", feat), ("b", feat[:0]))}
    work = Workspace(tmp_path, in_turn, lambda _: None)
    scaled = graph_stages._scaled(spill(GraphData("", nodes, {}), tmp_path), method, work)
    normalize(data := GraphData("", nodes, {}), method)
    for ntype, frame in data.nodes.items():
        found = scaled.data().nodes[ntype].data["feat"]
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found, frame.data["feat"])


def test_tables_may_be_read_from_uris(tmp_path: Path) -> None:
    """Files may be URIs, compressed text among them, in memory and out of core."""
    graph = write_tables(tmp_path, 7, numbers=False, kept=True)
    make_partition(missing(tmp_path / "here", 2), load_graph(graph))
    packed = gzip.compress((tmp_path / "more.csv").read_bytes())
    (tmp_path / "more.csv.gz").write_bytes(packed)
    spec = copy.deepcopy(SPEC)
    for table in (*spec["nodes"].values(), *spec["edges"].values()):
        names = [table["files"]] if isinstance(table["files"], str) else table["files"]
        names = [name.replace("more.csv", "more.csv.gz") for name in names]
        table["files"] = [f"{tmp_path.as_uri()}/{name}" for name in names]
    (tmp_path / "shop.yaml").write_text(yaml.safe_dump(spec, sort_keys=False))
    make_partition(missing(tmp_path / "local", 2), load_graph(graph))
    out_of_core(graph, tmp_path / "disk", 2)
    expected = contents(tmp_path / "here")
    del expected["raygnn.json"]
    for place in ("local", "disk"):
        found = contents(tmp_path / place)
        del found["raygnn.json"]
        assert found == expected
    assert size_of(graph).nodes >= 3
    (tmp_path / "knows-0.parquet").write_bytes(b"")
    with pytest.raises(DataError, match=r"file://.*knows-0.parquet.*empty"):
        sources_digest(graph)
    spec["edges"]["user:knows:user"]["files"] = f"{tmp_path.as_uri()}/none-*.parquet"
    (tmp_path / "shop.yaml").write_text(yaml.safe_dump(spec, sort_keys=False))
    with pytest.raises(DataError, match="no file matches"):
        load_graph(graph)


WRONG: dict[str, dict[str, Any]] = {
    "the same id twice": {"users": {"name": ["anna", "ben", "anna"]}},
    "no id": {"users": {"name": ["anna", None, "carl"]}},
    "no such node": {"bought": {"name": ["anna", "carl", "bob"]}},
    "an end that is no number": {"bought": {"sku": [1002, "x", 1001]}},
    "no end": {"bought": {"sku": [1002, None, 1001]}},
    "no number": {"users": {"age": [34.0, "old", 28.0]}},
    "a weight below 0": {"bought": {"amount": [1.0, -2.0, 0.5]}},
    "a split without a label": {"users": {"fold": ["train", "val", "test"]}},
    "no training nodes": {"users": {"fold": ["val", "val", None]}},
    "no such column": {"items": {"price": None}},
    "no such file": {"raw": {"bought.csv": None}},
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_errors_are_those_in_memory(tmp_path: Path, wrong: dict[str, Any]) -> None:
    graph = write_shop(tmp_path, **wrong)
    with pytest.raises(DataError) as expected:
        load_graph(graph)
    with pytest.raises(DataError) as raised:
        out_of_core(graph, tmp_path / "p", 2)
    assert str(raised.value) == str(expected.value)
    assert not (tmp_path / "p").exists()


WRONG_ARCHIVES: dict[str, dict[str, Any]] = {
    "no such node": {"edge_index": np.eye(2, EDGES, 70, np.int64) * NODES},
    "no feature": {"node_feat": np.where(np.arange(NODES) == 8, np.nan, 1)[:, None]},
    "half a label": {"node_label": np.arange(NODES)[:, None] / 2},
    "no label": {"node_label": np.full((NODES, 1), np.nan)},
    "fewer years": {"node_year": np.zeros(3)},
    "no features": {"node_feat": np.zeros((NODES, 0))},
    "no edges": {"edge_index": np.zeros((2, 0), np.int64), "num_edges_list": np.zeros(1, np.int64),
                 "edge_feat": None, "edge_reltype": None},
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG_ARCHIVES.values(), ids=WRONG_ARCHIVES)
def test_errors_in_archives_are_those_in_memory(tmp_path: Path, wrong: dict[str, Any]) -> None:
    graph = write_archives(tmp_path, **wrong)
    with pytest.raises(DataError) as expected:
        load_graph(graph)
    with pytest.raises(DataError) as raised:
        out_of_core(graph, tmp_path / "p", 2)
    assert str(raised.value) == str(expected.value)


def test_an_archive_that_is_cut_short_is_seen_while_it_is_unpacked(tmp_path: Path) -> None:
    graph = write_archives(tmp_path, node_year=np.arange(NODES))
    file = tmp_path / "ogbn_papers100M" / "raw" / "data.npz"
    content = bytearray(file.read_bytes())
    at = content.index(b"node_feat.npy")
    content[at + 60 : at + 300] = bytes(240)
    file.write_bytes(content)
    with pytest.raises(DataError, match=r"data.npz"):
        out_of_core(graph, tmp_path / "p", 2)
    assert not (tmp_path / "p").exists()


def test_arrays_in_archives_are_mapped_where_they_lie(tmp_path: Path) -> None:
    """Uncompressed arrays need no disk space for a copy; compressed ones do."""
    graph = write_archives(tmp_path / "plain", packed=False, fortran=False, edge_feat=None)
    (tmp_path / "work").mkdir()
    work = Workspace(tmp_path / "work", in_turn, lambda text: None)
    found = read_graph(graph, work, needs_masks=True, trains=True)
    assert found.node_arrays["_N"]["feat"].path.name == "data.npz"
    assert not list(work.directory("unpack").glob("[0-9]*"))
    sizes = [size_of(graph), size_of(write_archives(tmp_path / "packed", edge_feat=None))]
    assert [size.unpacked for size in sizes] == [
        0,
        8 * 2 * EDGES + 4 * 4 * NODES + 8 * NODES + 8 * EDGES,
    ]
    assert needs(sizes[0], 2, 1, "random").disk < needs(sizes[1], 2, 1, "random").disk


LIMITED = """
import resource, sys
from pathlib import Path
from raygnn.config.graph import OgbGraph
from tests.graph.test_outofcore import missing, out_of_core

place, after = Path(sys.argv[1]), int(sys.argv[2])
for number, name in enumerate(("small", "large")):
    if number:  # what compiling and loading takes is there by now
        held = int(Path("/proc/self/status").read_text().split("VmData:")[1].split()[0]) * 1024
        resource.setrlimit(resource.RLIMIT_DATA, (held + after, -1))
    graph = OgbGraph(format="ogb", path=place / name, name="ogbn-papers100M")
    out_of_core(graph, place / name / "p", 2)
"""


def test_features_are_not_in_memory(tmp_path: Path) -> None:
    """No copy of them is in memory either, at any offset in the archive."""
    columns = 1 << 20  # of 30 nodes: 126 MB
    for name, width in (("small", 2), ("large", columns)):
        features = np.zeros((NODES, width), np.float32)
        write_archives(tmp_path / name, packed=False, fortran=False, node_feat=features)
    graph = OgbGraph(format="ogb", path=tmp_path / "large", name="ogbn-papers100M")
    member = archived(graph)
    assert member is not None
    assert member.nodes["feat"].place % 4 != 0
    command = [sys.executable, "-c", LIMITED, str(tmp_path), str(60 << 20)]
    ran = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


def test_nodes_that_edges_add(tmp_path: Path) -> None:
    """Their numbers are those in memory, and their features are from ``fill``."""
    spec = changed("edges user:bought:item missing", "add")
    spec["nodes"]["user"]["fill"] = spec["nodes"]["item"]["fill"] = 0.5
    spec["nodes"]["item"]["categories"] = {"brand": {"column": "brand", "unknown": "bucket"}}
    graph = write_shop(tmp_path, spec=spec, bought={"name": ["zoe", "carl", "eve"]})
    assert load_graph(graph).ids["user"].to_pylist() == ["anna", "ben", "carl", "zoe", "eve"]
    assert_as_in_memory(graph, tmp_path, 2)


ENDED = """
import os, signal, sys
from pathlib import Path
from raygnn.config.graph import GraphConfig, OgbGraph, TablesGraph
from raygnn.graph.outofcore import disk_graph, edge_shuffle
from tests.graph.test_outofcore import missing, out_of_core

disk_graph.RUN, edge_shuffle.BUCKET = 7, 5
root, last = Path(sys.argv[1]), int(sys.argv[2])

def until_killed(function, tasks):
    global last
    for number, task in enumerate(tasks):
        result = function(*task)
        last -= 1
        if last < 0:  # done, and nobody knows
            os.kill(os.getpid(), signal.SIGKILL)
        yield number, result

graph = TablesGraph(format="tables", path=root / "shop.yaml")
out_of_core(graph, root / "p", 2, until_killed)
"""


@pytest.mark.system
@pytest.mark.slow
def test_a_try_that_was_killed_is_gone_on_with(tmp_path: Path) -> None:
    graph = write_tables(tmp_path, 5, numbers=False, kept=False)
    ran: list[str] = []

    def noted(function: Any, tasks: Any) -> Any:
        for number, result in in_turn(function, tasks):
            ran.append(function.__name__)
            yield number, result

    out_of_core(graph, tmp_path / "whole", 2, noted)
    expected, total = contents(tmp_path / "whole"), len(ran)
    done = 0
    for last in (1, total // 3, total // 3):
        command = [sys.executable, "-c", ENDED, str(tmp_path), str(last)]
        assert subprocess.run(command, cwd=CHECKOUT).returncode == -signal.SIGKILL
        done += last
        assert not (tmp_path / "p").exists()
        (stages,) = tmp_path.glob(".p.stages-*")
        assert len(list(stages.glob("*/done-*.json"))) == done
    ran.clear()
    out_of_core(graph, tmp_path / "p", 2, noted)
    assert len(ran) == total - done
    resumed = contents(tmp_path / "p")
    del expected["raygnn.json"], resumed["raygnn.json"]  # with its seconds
    assert resumed == expected
    assert not list(tmp_path.glob(".p.stages-*"))


def test_stages_of_before_a_start_of_the_machine_are_made_anew(tmp_path: Path) -> None:
    def run() -> list[int]:
        ran: list[int] = []
        work = Workspace(tmp_path, in_turn, lambda text: None)
        work.run("stage", lambda value: ran.append(value), [(1,), (2,)], [1, 1])
        return ran

    assert run() == [1, 2]
    assert run() == []
    (tmp_path / "boot").write_text("another")
    assert run() == [1, 2]


def test_stages_in_another_format_are_built_again(tmp_path: Path) -> None:
    """Stages of an interrupted attempt are not read by a version that writes them differently."""
    Workspace(tmp_path, in_turn, lambda text: None).run("stage", lambda value: {}, [(1,)], [1])
    (tmp_path / "boot").write_text(workspace._boot())  # as before formats had numbers
    work = Workspace(tmp_path, in_turn, lambda text: None)
    assert work.run("stage", lambda value: [value], [(1,)], [1]) == [[1]]
    again = Workspace(tmp_path, in_turn, lambda text: None)
    assert again.run("stage", lambda value: [0], [(1,)], [1]) == [[1]]


def test_two_processes_do_not_share_stages(tmp_path: Path) -> None:
    graph = write_shop(tmp_path)

    def meanwhile(function: Any, tasks: Any) -> Any:
        with pytest.raises(InputError, match="makes this partition"):
            out_of_core(graph, tmp_path / "p", 2)
        return in_turn(function, tasks)

    out_of_core(graph, tmp_path / "p", 2, meanwhile)


def test_text_of_a_slice_is_stored(tmp_path: Path) -> None:
    array = pa.array(["a", "bc", "", "def"], pa.large_string())
    ids = StoredIds("n", tmp_path / "ids")
    ids.write(array.type, [array.slice(1, 2), array.slice(3), array[:1]])
    assert ids.values().to_pylist() == ["bc", "", "def", "a"]
    ids.write(pa.int64(), [pa.array([3, 1])])  # again, of another type
    assert ids.values().to_pylist() == [3, 1]
