"""What a node says about itself: in this process, and from the nodes of a real Ray cluster."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raygnn.config.load import load_config
from raygnn.config.schema import Config
from raygnn.errors import InputError
from raygnn.graph.layout import PartFiles
from raygnn.preflight import node as node_module
from raygnn.preflight import probe
from raygnn.preflight.facts import NodeFacts, Resources
from raygnn.preflight.node import PACKAGES
from raygnn.preflight.partition import fingerprint, partition_files, partition_jsons


def make_config(storage: Path, **cluster: object) -> Config:
    graph = {"format": "planted", "nodes": 1000}
    job = {"name": "a", "storage": str(storage), "graph": graph, "model": {"kind": "gcn"}}
    return load_config({**job, "cluster": cluster})


def make_meta(directory: Path, manifest: bool = True) -> Any:
    """The files of a partition, whose content does not matter here."""
    (directory / "part0").mkdir(parents=True)
    names = ("graph.dgl", "node_feat.dgl", "edge_feat.dgl")
    for size, name in enumerate(names):
        (directory / "part0" / name).write_bytes(b"x" * size)
    (directory / "cora.json").write_text("{}")
    if manifest:
        (directory / "raygnn.json").write_text("{} ")
    part = PartFiles(*(directory / "part0" / name for name in names), None, None)
    return SimpleNamespace(
        directory=directory,
        config_file=directory / "cora.json",
        files=[part],
        manifest={"files": {}} if manifest else None,
    )


def test_this_machine(tmp_path: Path) -> None:
    meta = make_meta(tmp_path / "parts")
    found = probe.probe_local(make_config(tmp_path / "runs"), meta)
    (node,), resources = found.nodes, found.resources
    assert node.node == socket.gethostname()
    assert node.problem is None
    assert node.python == ".".join(map(str, sys.version_info[:3]))
    assert all(node.versions[name] for name in ("raygnn", *PACKAGES))
    assert 1 <= node.cpus <= (os.cpu_count() or 1)
    assert node.memory
    assert node.memory_available
    assert 2**28 < node.memory_available <= node.memory < 2**45
    assert node.disk_free
    assert node.storage == "ok"
    assert (
        node.partition_files
        == partition_files(meta)
        == {
            **{"cora.json": 2, "raygnn.json": 3},
            **{"part0/graph.dgl": 0, "part0/node_feat.dgl": 1, "part0/edge_feat.dgl": 2},
        }
    )
    jsons = partition_jsons(meta)
    assert node.partition_fingerprint == fingerprint(meta.directory, jsons)
    assert (resources.cpus, resources.gpus) == (node.cpus, len(node.gpus))
    assert not (tmp_path / "runs").exists(), "a look must not write"


def test_the_cpus_ray_is_told_of(tmp_path: Path) -> None:
    config = make_config(tmp_path, num_cpus=7)
    found = probe.probe_local(config)
    (node,), resources = found.nodes, found.resources
    assert resources.cpus == resources.free_cpus == 7
    assert resources == probe.probe_resources(config, local=True)
    assert (node.partition_files, node.partition_fingerprint) == ({}, None)


def test_a_partition_that_others_wrote_has_no_manifest(tmp_path: Path) -> None:
    meta = make_meta(tmp_path, manifest=False)
    assert partition_jsons(meta) == ("cora.json",)


def test_the_fingerprint_is_of_the_content(tmp_path: Path) -> None:
    make_meta(tmp_path)
    names = ("cora.json", "raygnn.json")
    before = fingerprint(tmp_path, names)
    (tmp_path / "raygnn.json").write_text("{}!")
    assert fingerprint(tmp_path, names) != before
    (tmp_path / "raygnn.json").unlink()
    assert fingerprint(tmp_path, names) is None


def test_a_storage_is_known_by_its_token(tmp_path: Path) -> None:
    storage, elsewhere = tmp_path / "a" / "runs", tmp_path / "b"
    elsewhere.mkdir()
    with probe._token(storage) as token:
        assert node_module._storage(storage, token) == "ok"
        assert node_module._storage(elsewhere, token) == "other"
        assert node_module._storage(tmp_path / "c", token) == "missing"
    assert sorted(tmp_path.iterdir()) == [elsewhere], "what was made for the token is gone"


def test_a_storage_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(InputError, match="cannot be written"),
        probe._token(tmp_path / "file" / "x"),
    ):
        pass


def test_nodes_of_one_name_are_told_apart() -> None:
    nodes = [
        {"NodeID": "1" * 56, "NodeManagerHostname": "x", "NodeManagerAddress": "10.0.0.1"},
        {"NodeID": "2" * 56, "NodeManagerHostname": "x", "NodeManagerAddress": "10.0.0.2"},
        {"NodeID": "3" * 56, "NodeManagerHostname": "y", "NodeManagerAddress": "10.0.0.3"},
        {"NodeID": "4" * 56, "NodeManagerHostname": "y", "NodeManagerAddress": "10.0.0.3"},
        {"NodeID": "5" * 56, "NodeManagerHostname": "z", "NodeManagerAddress": "10.0.0.5"},
    ]
    assert list(probe._names(nodes).values()) == [
        *("x 10.0.0.1", "x 10.0.0.2"),
        *(f"y 10.0.0.3 {'3' * 15}", f"y 10.0.0.3 {'4' * 15}", "z"),
    ]


def test_a_node_is_looked_at_without_torch_dgl_or_ray(tmp_path: Path) -> None:
    code = f"""
import sys
from raygnn.preflight import checks
from pathlib import Path
from raygnn.preflight.node import Question, node_facts
facts = node_facts(Question({str(tmp_path)!r}, None, None))
assert facts.versions["torch"]
assert not {{"torch", "dgl", "ray", "lightning", "numpy"}} & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two Ray nodes on this machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        import ray
        from ray.cluster_utils import Cluster

        cluster = Cluster(
            initialize_head=True,
            head_node_args={"num_cpus": 2, "object_store_memory": 80_000_000},
        )
        cluster.second = cluster.add_node(num_cpus=3, object_store_memory=80_000_000)
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        yield cluster
        ray.shutdown()
        cluster.shutdown()


def look(tmp_path: Path, deadline: float) -> tuple[tuple[NodeFacts, ...], Resources]:
    meta = make_meta(tmp_path / "parts")
    found = probe.probe_cluster(make_config(tmp_path / "runs", probe_timeout=deadline), meta)
    return found.nodes, found.resources


@pytest.mark.slow
def test_every_node_of_a_cluster_answers(cluster: Any, tmp_path: Path) -> None:
    nodes, resources = look(tmp_path, deadline=60)
    assert [node.problem for node in nodes] == [None, None]
    assert len({node.node for node in nodes}) == 2
    assert {node.storage for node in nodes} == {"ok"}
    assert all(len(node.partition_files) == 5 for node in nodes)
    assert sorted(node.cpus for node in resources.nodes) == [2, 3]
    assert resources.free_cpus == 5
    assert resources == probe.probe_resources(make_config(tmp_path), local=False)
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_a_node_that_hangs_is_a_fact(cluster: Any, tmp_path: Path) -> None:
    raylet = cluster.second.all_processes["raylet"][0].process.pid
    os.kill(raylet, signal.SIGSTOP)
    try:
        start = time.monotonic()
        nodes, _ = look(tmp_path, deadline=4)
        assert time.monotonic() - start < 30, "the deadline holds"
    finally:
        os.kill(raylet, signal.SIGCONT)
    assert sorted(str(node.problem) for node in nodes) == ["None", "no answer within 4 s"]
