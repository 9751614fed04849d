"""DGL's own distributed API over partitions that we wrote, with ids that are on no CPU."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from raygnn.config.graph import PlantedGraph
from raygnn.graph.data import DEFAULT_ETYPE, DEFAULT_NTYPE
from raygnn.graph.dgl import dgl
from raygnn.graph.sources import load_graph
from tests.support.graphs import partition_graph
from tests.support.hosts import hosts, needs_hosts
from tests.support.pages import blocks
from tests.support.unreadable import unreadable

pytestmark = pytest.mark.dgl

CHECKOUT = Path(__file__).resolve().parents[2]
CLIENT = Path(__file__).parents[1] / "support" / "dgl_client.py"
LIMIT = 90  # seconds for a process
SHARED = Path("/dev/shm")


def write(directory: Path, parts: int, *, typed: bool = False) -> list[str]:
    """Write a partition of a generated graph; return the script's arguments."""
    graph = PlantedGraph(
        format="planted", nodes=400, degree=6, classes=3, features=4, train=0.5, typed=typed
    )
    data = load_graph(graph)
    data.name = f"bridge{os.getpid()}"  # shared memory is called so, too
    if not typed:
        frame, edges = data.nodes[DEFAULT_NTYPE], data.edges[DEFAULT_ETYPE]
        frame.data["raygnn_id"] = np.arange(frame.num)
        ends = np.stack([edges.src, edges.dst], 1)
        np.savez(directory / "source.npz", edges=ends, feat=frame.data["feat"])
    meta = partition_graph(data, directory / "parts", parts=parts, method="random", digest="d")
    return [data.name, str(meta.config_file), str(directory / "source.npz")]


def environment(server: int | None, arguments: list[str], clients: int = 1) -> dict[str, str]:
    """Return the environment variables that DGL's launcher sets."""
    role = {"DGL_ROLE": "client"}
    if server is not None:
        role = {"DGL_ROLE": "server", "DGL_SERVER_ID": str(server)}
    return {
        **os.environ,
        **role,
        "PYTHONPATH": str(CHECKOUT),
        "DGL_DIST_MODE": "distributed",
        "DGL_IP_CONFIG": "ip_config.txt",
        "DGL_NUM_SERVER": "1",
        "DGL_NUM_CLIENT": str(clients),
        "DGL_NUM_SAMPLER": "0",
        "DGL_CONF_PATH": arguments[1],
        "DGL_GRAPH_FORMAT": "csc,coo",
    }


def is_of(name: str, graph: str) -> bool:
    """Return True if a file is shared memory of DGL's servers for this graph."""
    return graph in name or name.endswith("-kvdata-")


@pytest.mark.system
@pytest.mark.parametrize("typed", [False, True], ids=["one type", "typed"])
def test_standalone(typed: bool, tmp_path: Path) -> None:
    arguments = write(tmp_path, 1, typed=typed)
    env = {**os.environ, "PYTHONPATH": str(CHECKOUT)}
    done = subprocess.run(
        [sys.executable, CLIENT, *arguments],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stderr
    assert "checked standalone" in done.stdout


@pytest.mark.system
def test_the_script_of_the_page(tmp_path: Path) -> None:
    (script,) = blocks("py bridge", CHECKOUT / "docs" / "coming-from.md")
    (tmp_path / "script.py").write_text(script)
    graph = PlantedGraph(format="planted", nodes=400, degree=6, classes=4, features=8, train=0.5)
    data = load_graph(graph)
    data.name = "shop"
    partition_graph(data, tmp_path / "parts", 1)
    env = {**os.environ, "PYTHONPATH": str(CHECKOUT)}
    command = [sys.executable, "script.py"]
    out = subprocess.check_output(command, cwd=tmp_path, env=env, text=True, timeout=LIMIT)
    assert "loss" in out
    assert "standalone" in out


@pytest.mark.system
@pytest.mark.parametrize(
    ("typed", "samplers"),
    [(False, 0), (True, 0), pytest.param(False, 1, marks=pytest.mark.slow)],
    ids=["one type", "typed", "a sampler process"],
)
def test_a_server_and_a_client(typed: bool, samplers: int, tmp_path: Path) -> None:
    """Both end by themselves, without shared memory or sockets left."""
    arguments = write(tmp_path, 1, typed=typed)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (tmp_path / "ip_config.txt").write_text(f"127.0.0.1 {port}\n")
    command = [sys.executable, str(CLIENT), *arguments]
    processes = []
    try:
        for server in (0, None):
            env = environment(server, arguments, 1 + samplers)
            env["DGL_NUM_SAMPLER"] = str(samplers)
            with (tmp_path / f"{server}.log").open("w") as log:
                processes.append(
                    subprocess.Popen(command, cwd=tmp_path, env=env, stdout=log, stderr=log)
                )
        codes = [process.wait(LIMIT) for process in reversed(processes)]
    finally:
        for process in processes:
            process.kill()
            process.wait()
        left = [each for each in SHARED.iterdir() if is_of(each.name, arguments[0])]
        for file in left:
            file.unlink()
    logs = "\n".join(file.read_text() for file in sorted(tmp_path.glob("*.log")))
    assert codes == [0, 0], logs
    assert "checked distributed" in logs
    assert not left
    socket.create_server(("127.0.0.1", port)).close()


@pytest.mark.slow
@needs_hosts()
def test_two_hosts(tmp_path: Path) -> None:
    """Each of two hosts has a part, and their clients read each other's."""
    arguments = write(tmp_path, 2)
    command = [sys.executable, str(CLIENT), *arguments]
    with hosts(2, share=[tmp_path, CHECKOUT]) as group:
        lines = [f"{host.address} 30050\n" for host in group]
        (tmp_path / "ip_config.txt").write_text("".join(lines))
        processes = []
        for server, host in enumerate(group):
            for role in (server, None):
                env = environment(role, arguments, 2)
                processes.append(host.popen(command, cwd=tmp_path, env=env))
        assert [process.wait(LIMIT) for process in processes] == [0] * 4


def test_the_stand_in_refuses_what_cuda_refuses() -> None:
    there, here = unreadable(torch.arange(3)), torch.arange(3)
    for use in (there.numpy, lambda: np.asarray(there), lambda: there + here, lambda: here[there]):
        with pytest.raises((TypeError, RuntimeError)):
            use()
    assert type(there.cpu()) is torch.Tensor
    assert type(there.to("cpu")) is torch.Tensor
    assert torch.equal((there + 1).cpu(), here + 1)
    assert torch.equal(there[here == 1].cpu(), here[1:2])


def ranges() -> dict[str, np.ndarray]:
    return {"a": np.array([[0, 5], [9, 12]]), "b": np.array([[5, 9], [12, 20]])}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_look_ups_of_cuda_ids_answer_on_cuda() -> None:
    edges = {("a", "r", "b"): np.array([[0, 5], [5, 9]])}
    book = dgl().distributed.graph_partition_book.RangePartitionBook(
        0, 2, ranges(), edges, {"a": 0, "b": 1}, {("a", "r", "b"): 0}
    )
    ids = torch.tensor([0, 4, 5, 7])
    for name in ("nid2partid", "map_to_homo_nid"):
        found = getattr(book, name)(ids.cuda(), "a")
        assert found.is_cuda
        assert torch.equal(found.cpu(), getattr(book, name)(ids, "a"))
