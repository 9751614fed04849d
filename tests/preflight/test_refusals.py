"""Faults planted on real nodes and in real files: each is refused, named, and nothing starts."""

from __future__ import annotations

import itertools
import json
import sys
import time
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from raygnn.config.load import load_config
from raygnn.graph.dgl import dgl
from tests.support.graphs import ensure_partition
from tests.support.hosts import Host, hosts, needs_hosts
from tests.support.ray_cluster import Cluster, ray_cluster
from tests.support.small_jobs import job

pytestmark = [pytest.mark.system, needs_hosts()]

LIMIT = 120.0
PRIVATE = "/tmp/private"  # on each host another directory

_NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that both hosts see."""
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def cluster(shared: Path) -> Iterator[Cluster]:
    with hosts(2, share=[shared]) as group, ray_cluster(group) as cluster:
        yield cluster


def config(shared: Path, **cluster: Any) -> dict[str, Any]:
    """Return a job whose runs are in a separate directory."""
    storage = shared / f"runs-{next(_NUMBERS)}"
    found = job(storage, cluster={"address": "auto", "workers": 2, **cluster})
    found["cluster"].pop("num_cpus")
    return found


def ours(shared: Path) -> Path:
    """A partition that raygnn wrote."""
    wanted = {**config(shared), "partition": {"path": str(shared / "parts")}}
    return Path(str(ensure_partition(load_config(wanted), 2).directory))


def foreign(shared: Path, name: str) -> Path:
    """The same partition as another tool would write it: no manifest, one file for each part's
    features."""
    place = shared / name
    wanted = {**config(shared), "partition": {"path": str(place)}}
    ensure_partition(load_config(wanted), 2)
    (place / "raygnn.json").unlink()
    return place


def shell(host: Host, script: str, *arguments: object) -> None:
    host.run(["sh", "-euc", script, "sh", *map(str, arguments)], cwd="/", timeout=LIMIT)


def command(cluster: Cluster, shared: Path, verb: str, job: dict[str, Any], *options: str) -> Any:
    file = shared / "job.yaml"
    file.write_text(yaml.safe_dump(job))
    argv = [sys.executable, "-m", "raygnn", verb, str(file), *options]
    start = time.monotonic()
    done = cluster.run(argv, timeout=LIMIT, cwd=shared)
    print(f"{verb}: {time.monotonic() - start:.1f} s")
    return done


def refused(cluster: Cluster, shared: Path, job: dict[str, Any], *words: str) -> None:
    """Check that ``raygnn train`` exits with 3, prints all the words and has started nothing."""
    done = command(cluster, shared, "train", job)
    said = " ".join((done.stdout + done.stderr).split())
    assert done.returncode == 3, said
    assert all(word in said for word in words), said
    assert not list(Path(job["storage"]).glob("*/metrics.jsonl")), "nothing may start"
    assert not list(Path(job["storage"]).rglob("part0")), "nor be made"


@contextmanager
def undone(host: Host, do: str, undo: str, *arguments: object) -> Iterator[None]:
    """Run a shell command on a host, and its inverse afterwards."""
    shell(host, do, *arguments)
    try:
        yield
    finally:
        shell(host, undo, *arguments)


def copied(cluster: Cluster, parts: Path) -> dict[str, Any]:
    """The partition at the same path on each host, as separate copies."""
    for host in cluster.hosts:
        shell(host, 'rm -rf "$2"; mkdir -p "$2"; cp -r "$1" "$2/parts"', parts, PRIVATE)
    return {"partition": {"path": f"{PRIVATE}/parts"}}


def test_two_hosts_that_are_alike_are_ready(cluster: Cluster, shared: Path) -> None:
    done = command(cluster, shared, "check", config(shared), "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert [node["network"]["interface"] for node in report["nodes"]] == ["lan0", "lan1"]
    assert len(report["links"]) == 2
    assert all(link["problem"] is None for link in report["links"])
    assert len(report["communication"]["nodes"]) == 2
    assert not [f for f in report["findings"] if f["severity"] == "error"]


@pytest.mark.dgl
def test_a_part_of_another_dtype_or_shape(cluster: Cluster, shared: Path) -> None:
    tensors = dgl().data.utils
    for name, kind in (("halves", "dtype"), ("wider", "shape")):
        place = foreign(shared, name)
        for part, dtype in ((0, torch.bfloat16), (1, torch.float16)):
            file = place / f"part{part}" / "node_feat.dgl"
            arrays = tensors.load_tensors(str(file))
            feat = arrays["_N/feat"].to(dtype if kind == "dtype" else torch.float32)
            if kind == "shape" and part == 1:
                feat = torch.cat([feat, feat[:, :1]], 1)
            tensors.save_tensors(str(file), {**arrays, "_N/feat": feat})
        wrong = {"partition": {"path": str(place)}, "graph": None}
        words = ["bfloat16[16] in part 0", "float16[16] in part 1"]
        if kind == "shape":
            words = ["float32[16] in part 0", "float32[17] in part 1"]
        refused(
            cluster, shared, {**config(shared), **wrong}, "'feat'", *words, "build the partition"
        )


def test_a_part_that_one_node_lacks(cluster: Cluster, shared: Path) -> None:
    wanted = {**config(shared), **copied(cluster, ours(shared))}
    second = cluster.hosts[1]
    part = f"{PRIVATE}/parts/part1/node_feat.dgl"
    with undone(second, 'mv "$1" "$1.gone"', 'mv "$1.gone" "$1"', part):
        refused(cluster, shared, wanted, "part1/node_feat.dgl", "missing", "(on host1)", "copy all")


def test_a_storage_that_is_not_shared(cluster: Cluster, shared: Path) -> None:
    for host in cluster.hosts:
        shell(host, 'mkdir -p "$1"', f"{PRIVATE}/runs")
    wanted = {**config(shared), "storage": f"{PRIVATE}/runs"}
    wanted["partition"] = {"path": str(ours(shared))}
    words = (f"{PRIVATE}/runs is another directory there", "(on host1)", "every node mounts")
    refused(cluster, shared, wanted, *words)


def test_little_shared_memory(cluster: Cluster, shared: Path) -> None:
    fill = "mount -o remount,size=300m /dev/shm; fallocate -l 270m /dev/shm/filled"
    with undone(cluster.hosts[1], fill, "rm /dev/shm/filled; mount -o remount,size=50% /dev/shm"):
        refused(cluster, shared, config(shared), "/dev/shm has", "(on host1)", "--shm-size")


def test_a_name_that_leads_to_the_node_itself(cluster: Cluster, shared: Path) -> None:
    do = "cp /etc/hosts /tmp/hosts; echo 127.0.0.1 localhost host1 > /etc/hosts"
    with undone(cluster.hosts[1], do, "cat /tmp/hosts > /etc/hosts"):
        done = command(cluster, shared, "check", config(shared), "--json")
        assert done.returncode == 0, done.stdout + done.stderr
        planned = json.loads(done.stdout)["communication"]["nodes"]
        told = [{v["name"]: v["value"] for v in found} for found in planned.values()]
        assert [found.get("GLOO_SOCKET_IFNAME") for found in told] == [None, "lan1"]


def test_too_little_memory(cluster: Cluster, shared: Path) -> None:
    """The partition is mapped and may exceed the memory; weights and their optimizer state may
    not."""
    wanted = config(shared)
    wanted["model"]["hidden"] = 4096
    do = (
        'sed "s/^MemTotal:.*/MemTotal: 64 kB/; s/^MemAvailable:.*/MemAvailable: 60 kB/" '
        "/proc/meminfo > /tmp/meminfo; mount --bind /tmp/meminfo /proc/meminfo"
    )
    with undone(cluster.hosts[1], do, "umount /proc/meminfo"):
        refused(cluster, shared, wanted, "64 KiB of memory", "(on host1)", "lower model.hidden")


def test_a_node_that_hangs(cluster: Cluster, shared: Path) -> None:
    with cluster.frozen(1):
        wanted = config(shared, probe_timeout="5s")
        refused(cluster, shared, wanted, "no answer within 5 s", "(on host1)", "from the cluster")


def test_nodes_of_other_versions_and_variables(shared: Path) -> None:
    """The second host has an environment with another torch, and variables of its own."""
    place = shared / "venv"
    venv.create(place, with_pip=False, symlinks=True)
    (packages,) = place.glob("lib/python*/site-packages")
    others = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "others.pth").write_text("\n".join(others))
    (packages / "torch-2.12.0.dist-info").mkdir()
    (packages / "torch-2.12.0.dist-info" / "METADATA").write_text("Name: torch\nVersion: 2.12.0\n")
    with (
        hosts(2, share=[shared]) as group,
        ray_cluster(
            group,
            env={"OMP_NUM_THREADS": "1"},
            node_env={1: {"OMP_NUM_THREADS": "64", "NCCL_ALGO": "Tree"}},
            python={1: place / "bin" / "python"},
        ) as cluster,
    ):
        words = [f"differ in torch: {version('torch')} on host0, 2.12.0 on host1", "same torch"]
        words += ["OMP_NUM_THREADS: 1 on host0, 64 on host1", "comm.env.OMP_NUM_THREADS"]
        words += ["NCCL_ALGO: not set on host0, Tree on host1"]
        refused(cluster, shared, config(shared), *words)
