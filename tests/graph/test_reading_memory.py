"""Memory that input takes: told before it is read, and refused where there is not enough."""

from __future__ import annotations

import gzip
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import yaml

from raygnn.cli import main
from raygnn.config.graph import DglGraph, GraphConfig, PlantedGraph, TablesGraph, TriplesGraph
from raygnn.config.load import load_config
from raygnn.driver.inputs import PartitionInput
from raygnn.errors import DataError
from raygnn.graph import available_memory
from raygnn.graph.data import DEFAULT_ETYPE, DEFAULT_NTYPE, EdgeFrame, GraphData, NodeFrame
from raygnn.graph.outofcore.graph_stages import Size, needs
from raygnn.graph.partition.make import find_partition
from raygnn.graph.sources import input_files, load_graph, reading_bytes
from raygnn.graph.tables.reader import TableReader
from tests.support.builders import write_homogeneous
from tests.support.hostile import assert_refused, outcomes
from tests.support.tables_builder import changed, write_shop

NODES, EDGES, WIDTH = 20_000, 100_000, 8
GIB = 2**30


def job(file: Path, graph: dict[str, Any], **sections: Any) -> str:
    config = {"name": "a", "storage": "runs", "graph": graph, "model": {"kind": "gcn"}, **sections}
    file.write_text(yaml.safe_dump(config))
    return str(file)


def array_bytes(data: GraphData) -> int:
    arrays = [a for frame in data.nodes.values() for a in frame.data.values()]
    for edges in data.edges.values():
        arrays += [edges.src, edges.dst, *edges.data.values()]
    return sum(array.nbytes for array in arrays)


# -- estimates -----------------------------------------------------------------------------------


def drawn() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    train = np.arange(NODES) % 2 == 0
    return {
        "node_features": random.random((NODES, WIDTH)).astype(np.float32),
        "node_labels": random.integers(0, 3, NODES),
        "edges": random.integers(0, NODES, (EDGES, 2)),
        **{f"{name}_masks": train if name == "train" else ~train & False for name in
           ("train", "val", "test")},
    }  # fmt: skip


def write_big_dgl(place: Path) -> GraphConfig:
    arrays = drawn()
    data = {"feat": arrays["node_features"], "label": arrays["node_labels"],
            "train_mask": arrays["train_masks"]}  # fmt: skip
    write_homogeneous(place / "big.dgl", NODES, *np.ascontiguousarray(arrays["edges"].T), data)
    return DglGraph(format="dgl", path=place / "big.dgl")


def write_big_tables(place: Path, kind: str) -> GraphConfig:
    arrays = drawn()
    text = ["x" * 500] * NODES  # of an unused column
    columns = {f"f{i}": arrays["node_features"][:, i] for i in range(WIDTH)}
    nodes = pa.table({"id": np.arange(NODES), "y": arrays["node_labels"], **columns, "text": text})
    edges = pa.table({"a": arrays["edges"][:, 0], "b": arrays["edges"][:, 1]})
    for name, table in (("nodes", nodes), ("edges", edges)):
        if kind == "parquet":
            pq.write_table(table, place / f"{name}.parquet")
        else:
            with gzip.open(place / f"{name}.csv.gz", "wb", 1) as file:
                pyarrow.csv.write_csv(table, file)
    spec = {
        "nodes": {"n": {"files": f"nodes.{kind}", "id": "id", "label": "y",
                        "features": {"feat": list(columns)}, "splits": {"train": 0.5}}},
        "edges": {"n:to:n": {"files": f"edges.{kind}", "source": "a", "target": "b"}},
    }  # fmt: skip
    (place / "big.yaml").write_text(yaml.safe_dump(spec))
    return TablesGraph(format="tables", path=place / "big.yaml")


def write_big_triples(place: Path) -> GraphConfig:
    rows = (f"/m/{a}\tis\t/m/{b}\n" for a, b in drawn()["edges"])
    (place / "train.txt").write_text("".join(rows))
    return TriplesGraph(format="triples", path=place / "train.txt")


@pytest.mark.parametrize(
    "write",
    [
        write_big_dgl,
        pytest.param(lambda place: write_big_tables(place, "parquet"), id="parquet"),
        pytest.param(lambda place: write_big_tables(place, "csv.gz"), id="csv.gz"),
        write_big_triples,
        pytest.param(
            lambda _: PlantedGraph(format="planted", nodes=NODES, degree=5, features=WIDTH),
            id="planted",
        ),
    ],
)
def test_an_estimate_is_near_what_reading_takes(write: Any, tmp_path: Path) -> None:
    """The estimate is between the size of the arrays and a few times that; an unused column of text
    costs nothing."""
    graph = write(tmp_path)
    arrays = array_bytes(load_graph(graph, needs_masks=False))
    assert arrays <= 1.2 * reading_bytes(graph) <= 6 * arrays


def test_an_estimate_is_near_what_partitioning_takes(tmp_path: Path) -> None:
    """The graph of benchmarks/bench_partition.py. METIS took 82 bytes for each of a twelfth of its
    edges in 2 parts, and 110 for each of a half in 16."""
    graph = {"format": "planted", "nodes": 1_200_000, "degree": 50, "features": 100}
    config = load_config(job(tmp_path / "job.yaml", graph, storage=str(tmp_path)))
    feat = np.broadcast_to(np.float32(0), (1_200_000, 100))
    ends = np.broadcast_to(np.int64(0), 60_000_000)
    nodes = {DEFAULT_NTYPE: NodeFrame(len(feat), {"feat": feat})}
    data = GraphData("planted", nodes, {DEFAULT_ETYPE: EdgeFrame(ends, ends)})
    given = PartitionInput(find_partition(config, 2), data)
    assert 82 * 60e6 < given.facts(config).bytes + given.partitioning_bytes < 1.5 * 110 * 60e6


@pytest.mark.parametrize(
    ("share", "method", "memory", "disk"),
    [
        (64, "stream", 1.59, 0.35),
        (64, "random", 1.50, 0.56),
        (16, "stream", 1.74, 1.74),
        (16, "random", 1.70, 2.23),
        (1, "stream", 4.32, 28.1),
        (1, "random", 4.32, 36.9),
    ],
)
def test_an_estimate_is_near_what_partitioning_out_of_core_takes(
    share: int, method: str, memory: float, disk: float
) -> None:
    """The graphs of benchmarks/bench_large.py, GiB."""
    nodes, edges = 25_000_000 // share, 400_000_000 // share
    expected = needs(Size(nodes, edges, 280 * nodes, 16 * edges), 4, 2, method)
    assert memory <= expected.memory / GIB <= 1.5 * memory
    assert disk <= expected.disk / GIB <= 1.5 * disk


def test_the_estimate_of_metis_is_near_what_it_takes() -> None:
    """The graph of benchmarks/bench_tables.py, partitioned in one process."""
    nodes, edges, arrays, peak = 700_000, 5_000_000, 371_000_000, 1_332_000_000
    assert peak <= Size(nodes, edges, arrays, 0).in_memory <= 1.5 * peak


def test_features_of_float16_are_half_as_large(tmp_path: Path) -> None:
    for width, kind in ((8, pa.float32()), (4, pa.float16())):
        values = pa.array(np.ones(NODES * WIDTH, np.float32)).cast(kind)
        rows = pa.FixedSizeListArray.from_arrays(values, WIDTH)
        pq.write_table(pa.table({"feat": rows}), tmp_path / "n.parquet")
        assert TableReader([tmp_path / "n.parquet"], ["feat"]).extent() == (
            NODES,
            NODES * WIDTH * width,
        )


def test_an_estimate_of_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        reading_bytes(DglGraph(format="dgl", path=tmp_path / "no.dgl"))
    shop = write_shop(tmp_path, spec=changed("nodes user files", "no.csv"))
    with pytest.raises(DataError, match="does not exist"):
        reading_bytes(shop)


# -- refusals ------------------------------------------------------------------------------------


def test_a_planted_graph_of_a_billion_edges(tmp_path: Path) -> None:
    """Refused by its figures by every command that would make it."""
    graph = {"format": "planted", "nodes": 20_000_000, "degree": 50}
    config = job(tmp_path / "job.yaml", graph)
    for outcome in outcomes([[verb, config] for verb in ("check", "partition")], tmp_path):
        assert_refused(outcome, "takes about 57.1 GiB", "[memory_fits]", "graph.nodes")
        assert outcome.code == 3
        assert outcome.peak < 10**9


def test_arrays_do_not_outgrow_the_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A file may hold more than its size suggests, such as one compressed in several members."""
    graph = write_shop(tmp_path)
    monkeypatch.setattr(input_files, "memory", lambda: (GIB, 100))
    with pytest.raises(DataError, match="the graph's arrays would take") as caught:
        load_graph(graph)
    assert caught.value.where == str(graph.path)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_arrow_runs_out_of_memory(
    kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Arrow's own error does not mean a damaged file."""
    graph = write_shop(tmp_path, kind)

    def fail(*_: Any, **__: Any) -> Any:
        raise pa.ArrowMemoryError("malloc of size 8589934592 failed")

    name = "raygnn.graph.tables.reader.scanner"
    if kind == "parquet":
        name = "raygnn.graph.tables.reader.pq.ParquetFile.iter_batches"
    monkeypatch.setattr(name, fail)
    with pytest.raises(DataError, match="not enough memory to read it: malloc of size") as caught:
        load_graph(graph)
    assert caught.value.where == str(tmp_path / f"users.{kind}")


@pytest.mark.parametrize("suffix", ["csv", "csv.gz"])
def test_a_process_that_ends_while_a_file_is_read(suffix: str, tmp_path: Path) -> None:
    file = tmp_path / f"users.{suffix}"
    content = b"name,age\n" + b"1,2\n" * 10_000_000
    file.write_bytes(gzip.compress(content, 1) if suffix == "csv.gz" else content)
    script = f"""
from pathlib import Path
from raygnn.graph.tables.reader import TableReader
next(TableReader([Path({str(file)!r})], ["age"]).chunks())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_the_limits_of_a_process_bound_what_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    _, before = available_memory.memory()
    assert before is not None
    soft = {resource.RLIMIT_AS: resource.RLIM_INFINITY, resource.RLIMIT_DATA: 64 * GIB}
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (soft[kind], -1))
    soft[resource.RLIMIT_AS] = 0
    assert available_memory.memory()[1] == 0
    soft[resource.RLIMIT_AS] = resource.RLIM_INFINITY
    soft[resource.RLIMIT_DATA] = 1
    assert available_memory.memory()[1] == 0


def test_memory_that_runs_out_later_is_no_bug(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any) -> Any:
        raise MemoryError("Unable to allocate 8.0 GiB")

    monkeypatch.setattr("raygnn.graph.outofcore.divide.assign", fail)
    graph = {"format": "planted", "nodes": 1000}
    assert main(["partition", job(tmp_path / "job.yaml", graph, storage=str(tmp_path))]) == 4
    said = capsys.readouterr().err
    assert "ran out of memory: Unable to allocate 8.0 GiB" in said
    assert "bug" not in said


# -- numbers that float32 does not hold ----------------------------------------------------------


@pytest.mark.filterwarnings("error")
def test_numbers_that_float32_does_not_hold_are_named(tmp_path: Path) -> None:
    """The message has file, row, column and value, and NumPy does not warn."""
    random = drawn()
    random["node_features"] = random["node_features"].astype(np.float64)
    random["node_features"][7, 3] = -1e300
    data = {"feat": random["node_features"], "train_mask": random["train_masks"]}
    write_homogeneous(tmp_path / "a.dgl", NODES, *np.ascontiguousarray(random["edges"].T), data)
    with pytest.raises(DataError, match=r"column 3 is -1e\+300") as caught:
        load_graph(DglGraph(format="dgl", path=tmp_path / "a.dgl"))
    assert str(caught.value.where).endswith("_N/feat, row 7")
