"""Facts about a machine: this one, odd ones, and virtual hosts."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raygnn.graph import available_memory
from raygnn.graph.available_memory import memory
from raygnn.preflight import machine
from tests.support.hosts import Host, hosts, needs_hosts

# -- processor, memory, limits, environment ------------------------------------------------------


class Files:
    """Writable stand-ins for /proc and /sys."""

    def __init__(self, root: Path):
        self.root = root

    def __setitem__(self, name: str, content: str | bytes) -> None:
        file = self.root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content.encode() if isinstance(content, str) else content)


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Files:
    monkeypatch.setattr(machine, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(machine, "_SYS", tmp_path / "sys")
    monkeypatch.setattr(available_memory, "_CGROUP", tmp_path / "sys/fs/cgroup")
    monkeypatch.setattr(available_memory, "_PROC", tmp_path / "proc")
    return Files(tmp_path)


def test_this_machine() -> None:
    assert 1 <= machine.cpus() <= (os.cpu_count() or 1)
    assert machine.cpu_model()
    cpuinfo = Path("/proc/cpuinfo").read_text().split()
    assert machine.cpu_flags() == tuple(sorted(machine._FLAGS.intersection(cpuinfo)))
    total, available = memory()
    assert total
    assert available
    assert 2**28 < available <= total < 2**45
    free = machine.free_space(Path("/"))
    assert free
    assert machine.free_space(Path("/no/such/directory")) == pytest.approx(free, rel=0.1)
    known = machine.network("127.0.0.1")
    assert (known.address, known.interface) == ("127.0.0.1", "lo")
    assert [each.name for each in known.interfaces] == [name for _, name in socket.if_nameindex()]
    assert machine.network(None).interface is None


@pytest.mark.parametrize(
    ("quota", "expected"),
    [
        *(("max 100000", 64), ("150000 100000", 2), ("1000 100000", 1), ("9900000 100000", 64)),
        *(("", 64), ("5 0", 64), ("0 5", 64), ("many few", 64), ("-1 100000", 64), ("7", 64)),
    ],
)
def test_quota_of_a_container(
    files: Files, monkeypatch: pytest.MonkeyPatch, quota: str, expected: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(64))
    files["sys/fs/cgroup/cpu.max"] = quota
    assert machine.cpus() == expected


@pytest.fixture
def machine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    size = SimpleNamespace(total=1000 * 1024, available=800 * 1024)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: size)


@pytest.mark.usefixtures("machine_has")
def test_memory_of_a_container(files: Files) -> None:
    assert memory() == (1000 * 1024, 800 * 1024)
    files["sys/fs/cgroup/memory.max"] = "max\n"
    files["sys/fs/cgroup/memory.current"] = "300000\n"
    assert memory() == (1000 * 1024, 800 * 1024)
    files["sys/fs/cgroup/memory.max"] = "500000\n"
    assert memory() == (500000, 200000)
    files["sys/fs/cgroup/memory.stat"] = "anon 1\nodd\ninactive_file 50000\nactive_file 9\n"
    assert memory() == (500000, 250009), "the page cache is given back"
    files["sys/fs/cgroup/memory.current"] = "700000\n"
    assert memory() == (500000, 0)


@pytest.mark.usefixtures("machine_has")
@pytest.mark.parametrize(
    ("entry", "place", "names", "counted"),
    [
        ("0::", "", ("memory.max", "memory.current"), ""),
        ("4:cpu,memory:", "memory/", ("memory.limit_in_bytes", "memory.usage_in_bytes"), "total_"),
    ],
)
def test_memory_of_a_control_group(
    files: Files, entry: str, place: str, names: tuple[str, str], counted: str
) -> None:
    """The limit is the smallest of the group's and those around it."""
    files["proc/self/cgroup"] = f"9:name=systemd:/\n{entry}/outer/own\n"
    root = f"sys/fs/cgroup/{place}"
    for group, limit, used in (("", 9, 8), ("outer/", 6, 2), ("outer/own/", 5, 3)):
        for name, count in zip(names, (limit, used), strict=True):
            files[f"{root}{group}{name}"] = f"{count * 100_000}\n"
    assert memory() == (500_000, 100_000)
    files[f"{root}outer/own/memory.stat"] = f"rss 7\n{counted}inactive_file 200000\n"
    assert memory() == (500_000, 100_000), "that is not of the ones around it"
    files[f"{root}memory.stat"] = f"{counted}active_file 500000\n"
    assert memory() == (500_000, 400_000)


ARM = "processor: 0\nFeatures: fp asimd bf16\nCPU implementer: 0x41\nCPU part: {}\nHardware: board"


@pytest.mark.parametrize(
    ("cpuinfo", "model"),
    [
        ("processor: 0\nmodel name\t: Xeon: 4\nflags: fpu\n\nmodel name: other", "Xeon: 4"),
        (ARM.format("0xfff"), "0xfff"),
        ("model name:\n: x\n\n::", None),
        ("", None),
    ],
)
def test_models_of_processors(files: Files, cpuinfo: str, model: str | None) -> None:
    files["proc/cpuinfo"] = cpuinfo
    assert machine.cpu_model() == model
    assert machine.cpu_flags() == ()


def test_flags(files: Files) -> None:
    files["proc/cpuinfo"] = "flags: sse amx_bf16 avx512f avx2 avx512_bf16 avx512_vnni\n\nflags: x"
    assert machine.cpu_flags() == ("amx_bf16", "avx2", "avx512_bf16", "avx512f")


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(st.binary(max_size=40) | st.sampled_from([b"9" * 5000, b"-1", b"1 2"]), min_size=3))
def test_nonsense_in_proc_and_sys(files: Files, lines: list[bytes]) -> None:
    content = b"\n".join(lines)
    files["proc/cpuinfo"] = b"model name: " + content
    for name in ("cpu.max", "memory.max", "memory.current", "memory.stat"):
        files[f"sys/fs/cgroup/{name}"] = content
    files["proc/self/cgroup"] = content
    assert machine.cpus() >= 1
    assert all(size >= 0 for size in memory())
    machine.cpu_model()
    assert machine.cpu_flags() == ()


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in machine.environment():
        monkeypatch.delenv(name)
    told = {
        "CUDA_LAUNCH_BLOCKING": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "FI_PROVIDER": "efa",
        "NCCL_IB_PKEY": "3",  # a number, no secret
        "NCCL_SOCKET_IFNAME": "eth0",
        "OMP_NUM_THREADS": "4",
        "TORCH_FR_BUFFER_SIZE": "10",
        "UCX_TLS": "tcp\ufffd",
    }
    kept = ("CUDA_HOME", "CUDA_VISIBLE_DEVICES_2", "NCCLX", "MY_NCCL_DEBUG", "TORCH_HOME", "FIX")
    secret = ("NCCL_TOKEN", "UCX_auth_key", "FI_PASSWORD", "MKL_MY_SECRETS", "OMP_PWD", "GLOO_KEYS")
    for name, value in {**told, **dict.fromkeys(kept + secret, "x")}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("UCX_TLS", os.fsdecode(b"tcp\xff"))
    assert machine.environment() == told
    assert list(machine.environment()) == sorted(told)


def test_code_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = machine.code_digest()
    assert first == machine.code_digest()
    assert len(first) == len(hashlib.sha256().hexdigest())
    seen = [first]
    monkeypatch.setattr(machine, "_PACKAGE", tmp_path)
    changes = [("a.py", "1"), ("a.py", "2"), ("b/a.py", "2"), ("b/b.py", ""), ("c.py", "x")]
    for name, content in changes:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
        seen.append(machine.code_digest())
    (tmp_path / "c.py").rename(tmp_path / "d.py")
    seen.append(machine.code_digest())
    (tmp_path / "d.py").write_text("1")
    (tmp_path / "e.py").write_text("x")
    seen.append(machine.code_digest())
    (tmp_path / "e.py").unlink()
    for content in ("1e.pyx", "1e.py\0x"):  # the same bytes, but for where files begin
        (tmp_path / "d.py").write_text(content)
        seen.append(machine.code_digest())
    assert len(set(seen)) == len(seen), "every change tells"
    (tmp_path / "b/notes.txt").write_text("x")
    (tmp_path / ".ipynb_checkpoints").mkdir()
    (tmp_path / ".ipynb_checkpoints/a.py").write_text("x")
    (tmp_path / "gone.py").symlink_to("nowhere")
    assert machine.code_digest() == seen[-1]


# -- network -------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_names_that_do_not_resolve(monkeypatch: pytest.MonkeyPatch) -> None:
    hang = threading.Event()
    monkeypatch.setattr(machine, "_RESOLVE", 0.05)

    def slow(*_: object) -> list[Any]:
        hang.wait(10)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.1", 0))]

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    assert machine._resolve("slow") == ()
    hang.set()
    monkeypatch.undo()
    assert machine._resolve("x" * 300) == ()
    assert machine._resolve("localhost") == ("127.0.0.1",)


def test_devices(files: Files) -> None:
    files["sys/class/infiniband/mlx5_1/node_guid"] = ""
    files["sys/class/infiniband/mlx5_0/node_guid"] = ""
    assert machine.network(None).rdma == ("mlx5_0", "mlx5_1")
    (loopback,) = (i for i in machine.network(None).interfaces if i.name == "lo")
    assert (loopback.loopback, loopback.up) == (True, True)


LOOK = """
import dataclasses, json, sys
from raygnn.graph import available_memory
from raygnn.graph.available_memory import memory
from raygnn.preflight import machine
print(json.dumps(dataclasses.asdict(machine.network(sys.argv[1]))))
"""


def look(host: Host, address: str) -> Any:
    done = host.run([sys.executable, "-c", LOOK, address], timeout=60)
    return SimpleNamespace(**json.loads(done.stdout))


@needs_hosts()
def test_hosts_on_a_network() -> None:
    with hosts(2) as (first, second):
        for host in (first, second):
            seen = look(host, host.address)
            assert (seen.address, seen.interface) == (host.address, host.interface)
            assert seen.resolves_to == [host.address]
            assert {each["name"] for each in seen.interfaces} == {"lo", host.interface}
        assert look(first, second.address).interface is None

        def shell(script: str) -> None:
            first.run(["sh", "-euc", script], timeout=20)

        # As on many a Debian; and two addresses, one with a label of its own.
        shell("sed s/10.77.0.1/127.0.1.1/ /etc/hosts > /tmp/h; cat /tmp/h > /etc/hosts")
        shell("ip address add 10.78.0.5/24 dev lan0")
        shell("ip address add 10.79.0.5/24 dev lan0 label lan0:1; mount -t sysfs sysfs /sys")
        seen = look(first, "10.79.0.5")
        assert (seen.interface, seen.resolves_to) == ("lan0", ["127.0.1.1"])
        names = {each["name"]: each for each in seen.interfaces}
        assert names["lan0"] == {
            "name": "lan0",
            "addresses": ["10.77.0.1", "10.78.0.5", "10.79.0.5"],
            **{"up": True, "loopback": False},
        }
        assert names["lo"]["loopback"]
        assert names["lo"]["up"]

        shell("for i in $(seq 200); do ip address add 10.80.0.$i/32 dev lan0; done")
        assert look(first, "10.80.0.200").interface == "lan0", "more than the first question holds"
        first.down()
        shell("until grep -q 0 /sys/class/net/lan0/carrier; do sleep 0.05; done")
        (lan,) = (each for each in look(first, "").interfaces if each["name"] == "lan0")
        assert not lan["up"], "the cable is out"
