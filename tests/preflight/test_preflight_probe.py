"""Facts about a node, collected in this process and on the nodes of a real Ray cluster."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raygnn.config.execution import StagingConfig
from raygnn.config.load import load_config
from raygnn.config.schema import Config
from raygnn.errors import InputError
from raygnn.graph import dgl
from raygnn.graph.partition.layout import PartFiles
from raygnn.graph.staging.node_cache import Stage
from raygnn.preflight import probe
from raygnn.preflight.facts import NodeFacts, Resources
from raygnn.preflight.partition_facts import stored_files
from raygnn.preflight.probe import PACKAGES, Question, node_facts


def make_config(storage: Path, **cluster: object) -> Config:
    graph = {"format": "planted", "nodes": 1000}
    job = {"name": "a", "storage": str(storage), "graph": graph, "model": {"kind": "gcn"}}
    return load_config({**job, "cluster": cluster})


def make_meta(directory: Path, manifest: bool = True) -> Any:
    """Write the files of a partition, whose content does not matter here."""
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
        manifest=SimpleNamespace(files={}) if manifest else None,
    )


def test_this_machine(tmp_path: Path) -> None:
    meta = make_meta(tmp_path / "parts")
    found = probe.probe_local(make_config(tmp_path / "runs"), meta)
    (node,), resources = found.nodes, found.resources
    assert node.node == socket.gethostname()
    assert node.problem is None
    assert node.python == ".".join(map(str, sys.version_info[:3]))
    expected = {"raygnn", *PACKAGES} - (set() if dgl.installed() else {"dgl"})
    assert all(node.versions[name] for name in expected)
    assert 1 <= node.cpus <= (os.cpu_count() or 1)
    assert node.memory
    assert node.memory_available
    assert 2**28 < node.memory_available <= node.memory < 2**45
    assert node.disk_free
    assert node.storage == "ok"
    assert (
        node.partition_files
        == stored_files(meta).sizes
        == {
            **{"cora.json": 2, "raygnn.json": 3},
            **{"part0/graph.dgl": 0, "part0/node_feat.dgl": 1, "part0/edge_feat.dgl": 2},
        }
    )
    assert node.partition_fingerprint == stored_files(meta).fingerprint
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
    assert stored_files(meta).jsons == ("cora.json",)


def test_the_fingerprint_is_of_the_content(tmp_path: Path) -> None:
    files = stored_files(make_meta(tmp_path))
    before = files.fingerprint
    (tmp_path / "raygnn.json").write_text("{}!")
    assert files.fingerprint != before
    (tmp_path / "raygnn.json").unlink()
    assert files.fingerprint is None


def test_a_storage_is_known_by_its_token(tmp_path: Path) -> None:
    for storage in (tmp_path / "a", tmp_path / "a" / "b" / "runs"):
        (tmp_path / "a").mkdir(exist_ok=True)
        with probe._token(storage) as token:
            assert probe._storage(storage, token) == "ok"
            file = Path(token)
            seen = file.rename(tmp_path / file.name)  # as on a node with another directory there
            assert probe._storage(storage, token) == "other"
            seen.rename(file)
            (tmp_path / "a").rename(tmp_path / "gone")
            assert probe._storage(storage, token) == "missing"
            (tmp_path / "gone").rename(tmp_path / "a")
    assert [*tmp_path.rglob("*")] == [tmp_path / "a"], "nothing was made but the token"


def test_looks_at_one_storage_at_a_time_leave_nothing(tmp_path: Path) -> None:
    """No check creates a directory that another one finds and therefore keeps."""
    storage = tmp_path / "two" / "x"
    with probe._token(storage), probe._token(storage):
        pass
    with ExitStack() as first:
        first.enter_context(probe._token(storage))
        with probe._token(storage):
            first.close()
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("place", ["file/x", "a" * 300, "/proc/x/y"])
def test_a_storage_that_cannot_be_written(place: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(InputError, match="cannot be created or written: ") as caught,
        probe._token(tmp_path / place),
    ):
        pass
    assert "No such file" not in caught.value.what
    assert probe._storage(tmp_path / place, None) == "readonly"


@pytest.mark.parametrize(
    ("place", "why"),
    [
        *(("file", "file is not a directory"), ("file/x", "file is not a directory")),
        *(("a" * 300, "File name too long"), ("/proc/x", "nothing can be created in /proc")),
    ],
)
def test_a_place_for_copies_that_cannot_be_used(place: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    facts = node_facts(Question(None, None, str(tmp_path / place)))
    assert facts.cache is not None
    assert why in facts.cache
    good = node_facts(Question(None, None, str(tmp_path / "not" / "yet")))
    disk = shutil.disk_usage(tmp_path)  # others write to it, too
    assert good.cache is None
    assert good.cache_free == pytest.approx(disk.free, abs=disk.total // 20)
    assert [*tmp_path.iterdir()] == [tmp_path / "file"]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
def test_a_staging_directory_of_another_user(tmp_path: Path) -> None:
    os.chown(tmp_path, 12345, -1)
    assert probe._unusable(tmp_path) == "it belongs to another user (id 12345)"


def test_copies_are_kept_where_temporary_files_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Path] = []
    monkeypatch.setattr(probe, "_unusable", asked.append)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    node_facts(Question(None, None, None))
    assert [place.parent for place in asked] == [tmp_path]
    assert asked[0] == Stage.from_config(StagingConfig()).root


def test_nodes_with_equal_names_are_distinguished() -> None:
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
from raygnn.preflight import report
from pathlib import Path
from raygnn.preflight.probe import Question, node_facts
facts = node_facts(Question(Path({str(tmp_path)!r}), None, None))
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
            initialize_head=True, head_node_args={"num_cpus": 2, "object_store_memory": 80_000_000}
        )
        cluster.second = cluster.add_node(num_cpus=3, object_store_memory=80_000_000)
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        yield cluster
        ray.shutdown()
        cluster.shutdown()


def look(tmp_path: Path, deadline: float) -> tuple[tuple[NodeFacts, ...], Resources]:
    meta = make_meta(tmp_path / "parts")
    with probe.Probes() as probes:
        found = probes.about(make_config(tmp_path / "runs", probe_timeout=deadline), meta)
        assert (
            probes.about(make_config(tmp_path / "runs", probe_timeout=deadline)).links
            == found.links
        )
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


@pytest.mark.alone
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
