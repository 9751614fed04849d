"""The facts of a partition: the same from our manifest, from the parts, and from the graph."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from raygnn.config.load import load_config
from raygnn.config.schema import Config
from raygnn.errors import DataError
from raygnn.graph.data import EdgeFrame, GraphData, NodeFrame
from raygnn.graph.partition.layout import PartitionMeta, read_meta
from raygnn.preflight.facts import ArrayType
from raygnn.preflight.partition_facts import graph_facts, partition_facts, stored_files
from raygnn.preflight.probe import probe_local
from raygnn.preflight.report import preflight
from tests.support.graphs import partition_graph

ITEMS, USERS = 12, 5


def make_graph() -> GraphData:
    rng = np.random.default_rng(0)
    masks = {f"{split}_mask": np.zeros(ITEMS, bool) for split in ("train", "val", "test")}
    masks["train_mask"][:6] = masks["val_mask"][6:8] = masks["test_mask"][8:] = True
    item = {
        "feat": rng.standard_normal((ITEMS, 3), np.float32),
        "label": np.arange(ITEMS) % 2,
        **masks,
    }
    bought = EdgeFrame(rng.integers(0, USERS, 30), rng.integers(0, ITEMS, 30))
    return GraphData(
        name="shop",
        nodes={
            "item": NodeFrame(ITEMS, item),
            "user": NodeFrame(USERS, {"feat": np.ones((USERS, 4), np.float64)}),
        },
        edges={("user", "bought", "item"): bought},
    )


def make_config(storage: Path, parts: int = 2) -> Config:
    graph = {"format": "planted", "nodes": 1000}
    job = {"name": "a", "storage": str(storage), "graph": graph, "model": {"kind": "gcn"}}
    sampling = {"batch_size": 2}  # fewer than the nodes to train on
    return load_config(
        {**job, "partition": {"parts": parts}, "cluster": {"workers": 1}, "sampling": sampling}
    )


@pytest.fixture(scope="module")
def meta(tmp_path_factory: pytest.TempPathFactory) -> PartitionMeta:
    out = tmp_path_factory.mktemp("parts") / "shop"
    return partition_graph(make_graph(), out)


def test_the_manifest_the_parts_and_the_graph_say_the_same(
    meta: PartitionMeta, tmp_path: Path
) -> None:
    config = make_config(tmp_path)
    ours = partition_facts(config, meta)
    foreign = partition_facts(config, replace(meta, manifest=None))
    graph = graph_facts(config, make_graph(), parts=2)
    assert (ours.alike, foreign.alike, graph.alike) == (True, False, True)
    every = {
        ntype: {name: columns * 2 for name, columns in arrays.items()}
        for ntype, arrays in ours.columns.items()
    }
    assert ours.columns == graph.columns
    assert every == foreign.columns
    assert every["item"]["feat"] == (ArrayType("float32", (3,)),) * 2
    assert every["user"] == {"feat": (ArrayType("float64", (4,)),) * 2}
    assert ours.nodes == foreign.nodes == graph.nodes == {"item": ITEMS, "user": USERS}
    assert ours.splits == foreign.splits == graph.splits == {"train": 6, "val": 2, "test": 4}
    assert ours.files.keys() - foreign.files.keys() == {"raygnn.json"}
    assert ours.bytes == sum(stored_files(meta).sizes.values()) > 0
    assert graph.bytes == ITEMS * (12 + 8 + 3) + USERS * 32 + 30 * 16


def test_splits_are_those_of_the_task(tmp_path: Path) -> None:
    """Splits are of the task's node type only; a missing mask selects no nodes and causes a
    warning."""
    data = make_graph()
    data.nodes["user"].data["label"] = np.arange(USERS) % 2
    data.nodes["user"].data["train_mask"] = np.arange(USERS) < 3
    place = tmp_path / "x"
    meta = partition_graph(data, place)
    plain = make_config(tmp_path)
    for ntype, splits, warned in (
        ("item", {"train": 6, "val": 2, "test": 4}, []),
        ("user", {"train": 3, "val": 0, "test": 0}, ["no validation nodes", "no test nodes"]),
    ):
        task = plain.task.model_copy(update={"ntype": ntype})
        config = plain.model_copy(update={"task": task})
        ours = partition_facts(config, meta)
        assert ours.splits == partition_facts(config, replace(meta, manifest=None)).splits == splits
        assert ours.splits == graph_facts(config, data, parts=2).splits
        seen = probe_local(config, meta)
        found = [f.what for f in preflight(config, ours, seen).findings]
        assert len(found) == len(warned)
        assert all(word in what for word, what in zip(warned, found, strict=True))
    assert partition_facts(plain, meta).splits == {}  # both types have the target


def test_a_real_partition_passes_and_a_shorter_one_does_not(
    meta: PartitionMeta, tmp_path: Path
) -> None:
    config = make_config(tmp_path)
    facts = partition_facts(config, meta)
    report = preflight(config, facts, probe_local(config, meta))
    assert report.ok, report.findings
    # A node then sees a shorter file.
    victim = meta.files[1].node_feats
    content = victim.read_bytes()
    victim.write_bytes(content[:-1])
    seen = probe_local(config, meta)
    victim.write_bytes(content)
    report = preflight(config, facts, seen)
    assert [finding.check for finding in report.findings] == ["partition_visible"]
    assert "node_feat" in report.findings[0].what
    assert not report.ok
    assert f"delete {meta.directory} to build it again" in report.findings[0].remedy


def test_the_facts_of_a_graph_do_not_grow_with_the_parts(tmp_path: Path) -> None:
    """A user may request far too many workers by mistake."""
    config = make_config(tmp_path)
    facts = graph_facts(config, make_graph(), parts=2**20)
    assert len(pickle.dumps(facts)) < 10_000
    report = preflight(config, facts, probe_local(config))
    assert "parts_agree" not in {finding.check for finding in report.findings}


def test_a_graph_passes_before_it_is_partitioned(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    facts = graph_facts(config, make_graph(), parts=2)
    report = preflight(config, facts, probe_local(config))
    assert report.ok, report.findings


def test_a_part_without_nodes_of_a_type_agrees_with_the_others(tmp_path: Path) -> None:
    config = make_config(tmp_path, parts=8)
    place = tmp_path / "x"
    partition_graph(make_graph(), place, 8)
    (place / "raygnn.json").unlink()
    meta = read_meta(place)
    assert any(first == last for first, last in meta.node_ranges["user"])
    facts = partition_facts(config, meta)
    assert {len(columns) for columns in facts.columns["user"].values()} == {8}
    assert preflight(config, facts, probe_local(config, meta)).ok


def test_a_damaged_foreign_part_is_named(tmp_path: Path) -> None:
    place = tmp_path / "x"
    partition_graph(make_graph(), place)
    (place / "raygnn.json").unlink()
    meta = read_meta(place)
    victim = meta.files[0].node_feats
    victim.write_bytes(victim.read_bytes()[:100])
    with pytest.raises(DataError, match=victim.name):
        partition_facts(make_config(tmp_path), meta)
