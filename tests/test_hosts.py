"""Virtual hosts: apart where hosts are apart, joined by the network alone, and gone at the end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.hosts import Host, hosts, needs_hosts

pytestmark = needs_hosts()

CHECKOUT = Path(__file__).resolve().parents[1]
LIMIT = 30.0

_SERVE = """
import socket, sys
with socket.create_server((sys.argv[1], 0)) as server:
    print(server.getsockname()[1], flush=True)
    while True:
        connection, peer = server.accept()
        with connection:
            connection.sendall(peer[0].encode())
"""
_ASK = """
import socket, sys
try:
    with socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=2) as connection:
        print(connection.makefile().read())
except OSError as error:
    print(type(error).__name__)
"""
_SUM = """
import sys, torch, torch.distributed as dist
from datetime import timedelta
rank, size, address = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
method = f"tcp://{address}:29500"
limit = timedelta(seconds=20)
dist.init_process_group("gloo", init_method=method, rank=rank, world_size=size, timeout=limit)
values = torch.full((1000,), float(rank + 1))
dist.all_reduce(values)
print(values.unique().tolist())
dist.destroy_process_group()
"""


def _python(host: Host, code: str, *arguments: str) -> str:
    return host.run([sys.executable, "-c", code, *arguments], timeout=LIMIT).stdout.strip()


@contextlib.contextmanager
def _server(host: Host, address: str) -> Iterator[str]:
    """Start a server in the host; yield its port."""
    command = [sys.executable, "-c", _SERVE, address]
    with host.popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process.stdout.readline().strip()
        finally:
            process.kill()


def _commands(host: Host) -> set[str]:
    """Return the names of all processes in the host, including the shell that lists them."""
    return set(host.run(["sh", "-c", "cat /proc/[0-9]*/comm"], timeout=LIMIT).stdout.split())


def _until(true: Callable[[], bool]) -> bool:
    end = time.monotonic() + LIMIT
    while not true() and time.monotonic() < end:
        time.sleep(0.02)
    return true()


def _outside() -> tuple[set[str], str, str]:
    """Return what a group could leave behind besides processes: links, namespaces and mounts."""
    links = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True)
    names = {line.split(": ")[1] for line in links.stdout.splitlines()}
    named = subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True)
    return names, named.stdout, Path("/proc/self/mountinfo").read_text()


def _spaces(pid: int) -> set[str]:
    return {os.readlink(f"/proc/{pid}/ns/{kind}") for kind in ("net", "mnt", "pid", "uts")}


def _inhabited(spaces: set[str]) -> bool:
    """Return True if a process on this machine is in one of these namespaces."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if _spaces(int(process.name)) & spaces:
                return True
    return False


def test_they_reach_each_other_by_address_and_by_name():
    with hosts(2) as (first, second), _server(first, first.address) as port:
        assert _python(second, _ASK, first.address, port) == second.address
        assert _python(second, _ASK, first.name, port) == second.address
        assert first.run(["hostname"], timeout=LIMIT).stdout.strip() == first.name != second.name
        assert first.interface != second.interface


def test_a_loopback_is_not_shared():
    with hosts(2) as (first, second), _server(first, "127.0.0.1") as port:
        assert _python(first, _ASK, "127.0.0.1", port) == "127.0.0.1"
        assert _python(second, _ASK, "127.0.0.1", port) == "ConnectionRefusedError"
        assert _python(second, _ASK, first.address, port) == "ConnectionRefusedError"


@pytest.mark.parametrize("directory", ["/dev/shm", "/tmp"])
def test_memory_and_working_files_are_private(directory: str):
    name = f"{directory}/raygnn-hosts-{os.getpid()}"
    with hosts(2) as (first, second):
        first.run(["touch", name], timeout=LIMIT)
        there = set(second.run(["ls", directory], timeout=LIMIT).stdout.split())
        shared = {CHECKOUT.parts[2]} if CHECKOUT.is_relative_to("/tmp") else set()
        assert there == (shared if directory == "/tmp" else set())
        found = set(first.run(["ls", directory], timeout=LIMIT).stdout.split())
        assert found - there == {Path(name).name}
        assert not Path(name).exists()


def test_shared_directories_are_common(tmp_path: Path):
    (tmp_path / "in").write_text("here")
    with hosts(2, share=[tmp_path]) as (first, second):
        assert first.run(["cat", "in"], cwd=tmp_path, timeout=LIMIT).stdout == "here"
        second.run(["touch", str(tmp_path / "out")], timeout=LIMIT)
    assert (tmp_path / "out").exists()


@pytest.mark.parametrize("path", ["/tmp", "/dev/shm", "/no/such/directory"])
def test_paths_that_cannot_be_shared_are_refused(path: str):
    with pytest.raises(ValueError, match=path), hosts(1, share=[path]):
        pass


def test_processes_of_a_host_see_only_each_other():
    with hosts(1) as (host,):
        pids = host.run(["sh", "-c", "echo $$ /proc/[0-9]*"], timeout=LIMIT).stdout.split()
        assert pids[1:] == ["/proc/1", f"/proc/{pids[0]}"]


def test_a_disconnected_host_is_unreachable_until_it_is_back():
    with hosts(2) as (first, second), _server(first, first.address) as port:
        second.down()
        assert _python(second, _ASK, first.address, port) in ("TimeoutError", "OSError")
        second.up()
        # the kernel sees the cable, and asks again for an address it did not get, when it likes
        assert _until(lambda: _python(second, _ASK, first.address, port) == second.address)


def test_a_link_can_be_given_a_rate():
    with hosts(2, rate="100mbit") as (first, second):
        for host in (first, second):
            shown = host.run(["tc", "qdisc", "show", "dev", host.interface], timeout=LIMIT).stdout
            assert "tbf" in shown
            assert "rate 100Mbit" in shown
        with _server(first, first.address) as port:
            assert _python(second, _ASK, first.address, port) == second.address


def test_signals_reach_the_command_itself():
    trap = "trap 'echo asked; exit 7' TERM; echo ready; while :; do sleep 0.05; done"
    with hosts(1) as (host,):
        process = host.popen(["sh", "-c", trap], stdout=subprocess.PIPE, text=True)
        assert process.stdout.readline() == "ready\n"
        process.terminate()
        assert process.communicate(timeout=LIMIT)[0] == "asked\n"
        assert process.returncode == 7


def test_a_command_that_fails_or_takes_too_long():
    with hosts(1) as (host,):
        with pytest.raises(RuntimeError, match="ended with 3:\nwhy"):
            host.run(["sh", "-c", "echo why; exit 3"], timeout=LIMIT)
        with pytest.raises(subprocess.TimeoutExpired):
            host.run(["sh", "-c", "sleep 100 & wait"], timeout=0.2)
        assert _until(lambda: _commands(host) == {"cat", "sh"})  # not even as zombies


def test_gloo_over_two_hosts():
    with hosts(2) as group:
        processes = [
            host.popen(
                [sys.executable, "-c", _SUM, str(rank), "2", group[0].address],
                env={**os.environ, "GLOO_SOCKET_IFNAME": host.interface},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank, host in enumerate(group)
        ]
        said = [process.communicate(timeout=60)[0] for process in processes]
        assert [text.splitlines()[-1] for text in said] == ["[3.0]", "[3.0]"], said


@pytest.mark.parametrize("end", ["normal", "exception", "child killed", "host off", "interrupt"])
def test_nothing_is_left(end: str):
    before = _outside()
    expected = contextlib.nullcontext()
    if end in ("exception", "interrupt"):
        expected = pytest.raises(KeyboardInterrupt if end == "interrupt" else ZeroDivisionError)
    threads = threading.active_count()
    files = len(os.listdir("/proc/self/fd"))
    with expected, hosts(2, rate="100mbit") as group:
        spaces = set().union(*(_spaces(host.pid) for host in group)) - _spaces(os.getpid())
        # one with orphans, and one that ignores signals
        group[0].popen(["sh", "-c", "sleep 1000 & sleep 1000 & exit"])
        stubborn = group[1].popen(["sh", "-c", "trap '' TERM INT HUP; sleep 1000; sleep 1000"])
        assert len(spaces) == 8
        assert _inhabited(spaces)
        if end == "exception":
            raise ZeroDivisionError
        if end == "interrupt":
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(LIMIT)
        if end == "child killed":
            stubborn.kill()
        if end == "host off":
            group[1].close()
            assert stubborn.returncode == -signal.SIGKILL
            with pytest.raises(RuntimeError, match="host1 is closed"):
                group[1].popen(["true"])
            group[0].run(["true"], timeout=LIMIT)
    assert stubborn.returncode == -signal.SIGKILL
    assert not _inhabited(spaces)
    assert _outside() == before
    assert threading.active_count() == threads
    assert len(os.listdir("/proc/self/fd")) == files


def test_nothing_is_left_of_a_group_whose_owner_is_killed():
    before = _outside()
    code = (
        "import time\nfrom tests.support.hosts import hosts\n"
        "with hosts(2) as group:\n"
        "    group[0].popen(['sleep', '1000'])\n"
        "    print(*(host.pid for host in group), flush=True)\n"
        "    time.sleep(1000)\n"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=CHECKOUT) as owner:
        pids = [int(pid) for pid in owner.stdout.readline().split()]
        spaces = set().union(*map(_spaces, pids)) - _spaces(os.getpid())
        assert len(spaces) == 8
        owner.kill()
    assert _until(lambda: not _inhabited(spaces))
    assert _outside() == before


def test_groups_do_not_meet():
    with hosts(1) as (mine,), hosts(1) as (yours,), _server(mine, mine.address) as port:
        assert mine.address == yours.address
        assert _python(yours, _ASK, mine.address, port) == "ConnectionRefusedError"
