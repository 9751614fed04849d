"""Several hosts on one machine, for what only goes wrong between machines.

Each host is a set of Linux namespaces: a network interface and address of its own, joined to
the others by a bridge, its own hostname, processes, /dev/shm and /tmp. The file system is
common but for these two. Needs root, util-linux and iproute2.

    with hosts(2, share=[directory]) as (first, second):
        server = first.popen(["python", "server.py"])
        second.run(["python", "client.py", first.address], timeout=60)

Nothing has a name outside: no namespace is bound to a file, and interfaces are made inside the
namespaces, the bridge in one of its own. So any number of groups can exist at once with the same
addresses, and all of it goes when the processes that hold the namespaces end. These end when
their standard input closes, as it does even when this process is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

_SETUP = 30.0  # seconds for a namespace to be set up, or for one command of ip or tc
_END = 30.0  # seconds for a killed host to be gone
_CLONE_NEWPID = 0x20000000
_PRIVATE = "/tmp"
_CHECKOUT = Path(__file__).resolve().parents[2]

# The id is read off the outer /proc, so it is the one that is valid outside. As process 1, the
# holder also has to reap the orphans of its host: the kernel does so while CHLD is ignored.
_HOST = """
read -r pid rest < /proc/self/stat
echo "$1" > /proc/sys/kernel/hostname
names=$2
shift 2
mount -t tmpfs -o mode=1777 tmpfs /mnt
for path; do
    mkdir -p "/mnt${path#/tmp}"
    mount --rbind "$path" "/mnt${path#/tmp}"
done
mount --move /mnt /tmp
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
printf '127.0.0.1 localhost\\n%s' "$names" > /tmp/hosts
mount --bind /tmp/hosts /etc/hosts
rm /tmp/hosts
mount -t proc proc /proc
ip link set lo up
echo "ready $pid"
exec env --ignore-signal=CHLD cat
"""
_SWITCH = """
ip link add switch type bridge
ip link set switch up
echo "ready $$"
exec cat
"""


@functools.cache
def missing() -> str | None:
    """Return why this machine can have no virtual hosts, or None."""
    if os.name != "posix" or os.geteuid() != 0:
        return "virtual hosts need root"
    if absent := [name for name in ("unshare", "nsenter", "ip", "tc") if not shutil.which(name)]:
        return f"virtual hosts need {', '.join(absent)} (util-linux, iproute2)"
    try:
        with hosts(1, rate="1gbit"):
            return None
    except RuntimeError as error:
        return f"virtual hosts do not work here: {error}"


def needs_hosts() -> pytest.MarkDecorator:
    """Marks tests (or as ``pytestmark`` a module of them) that need virtual hosts."""
    reason = missing()
    return pytest.mark.skipif(reason is not None, reason=reason or "")


@contextlib.contextmanager
def hosts(
    count: int, *, rate: str | None = None, share: Sequence[str | Path] = ()
) -> Iterator[list[Host]]:
    """Create ``count`` hosts (at most 200) on one network; kill all their processes at the end.

    Args:
        rate: of each host's link in both directions, as tc writes it: ``"1gbit"``.
        share: directories below /tmp that the hosts should see too.

    Raises:
        ValueError: a directory to share does not exist, or is /tmp itself or in /dev/shm.
        RuntimeError: the machine refused, with its words.
    """
    if not 1 <= count <= 200:
        raise ValueError(f"{count} hosts; there can be 1 to 200")
    # the checkout, too, if it is there; elsewhere everything is common
    wanted = dict.fromkeys(map(_shareable, [*share, _CHECKOUT]))
    bind = [path for path in wanted if path.is_relative_to(_PRIVATE)]
    names = "".join(f"10.77.0.{i + 1} host{i}\n" for i in range(count))
    with contextlib.ExitStack() as stack:
        switch = stack.enter_context(_Holder(["--net"], _SWITCH))
        group = []
        for i in range(count):
            arguments = [f"host{i}", names, *map(str, bind)]
            host = Host(i, stack.enter_context(_Holder(_HOST_SPACES, _HOST, *arguments)), switch)
            stack.callback(host.close)
            _connect(host, switch, rate)
            group.append(host)
        yield group


class Host:
    """A virtual host.

    Attributes:
        name: its hostname, which all hosts of the group can resolve.
        address: its IPv4 address.
        interface: its network interface, named differently on each host.
    """

    def __init__(self, number: int, holder: _Holder, switch: _Holder):
        self.name = f"host{number}"
        self.address = f"10.77.0.{number + 1}"
        self.interface = f"lan{number}"
        self.port = f"port{number}"  # the other end of its cable, at the switch
        self.pid = holder.pid
        self._holder = holder
        self._switch = switch
        self._processes: list[subprocess.Popen[Any]] = []

    def popen(
        self, argv: Sequence[str], *, cwd: str | Path | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        """Start a command in the host, in a session of its own.

        What comes back is the command itself (no wrapper), so that its ``pid``, ``kill()`` and
        ``send_signal()`` mean what they say. It need not be waited for: the end of the host is
        its end. Standard input is empty unless ``stdin`` is given.

        Args:
            cwd: as the host sees it; the current directory unless given.
            options: as of subprocess.Popen.
        """
        if self._holder.process.poll() is not None:
            raise RuntimeError(f"{self.name} is closed")
        self._processes = [each for each in self._processes if each.poll() is None]
        enter = ["nsenter", f"--target={self.pid}", "--net", "--uts", "--ipc", "--mount"]
        command = [*enter, f"--wdns={cwd or Path.cwd()}", "--", *map(str, argv)]
        options = {"stdin": subprocess.DEVNULL, "start_new_session": True} | options
        with _children_in(self.pid):
            process = subprocess.Popen(command, **options)
        self._processes.append(process)
        return process

    def run(
        self, argv: Sequence[str], *, timeout: float, check: bool = True, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end and return what it wrote.

        Raises:
            RuntimeError: ``check`` and it failed; with the end of what it wrote.
            subprocess.TimeoutExpired: it took more than ``timeout`` seconds, and was killed
                together with its children.
        """
        pipe = subprocess.PIPE
        options = {"stdout": pipe, "stderr": pipe, "text": True} | options
        with self.popen(argv, **options) as process:
            try:
                out, err = process.communicate(timeout=timeout)
            except BaseException:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                raise
        if check and process.returncode != 0:
            said = ((out or "") + (err or ""))[-4000:]
            raise RuntimeError(f"{self.name}: {argv} ended with {process.returncode}:\n{said}")
        return subprocess.CompletedProcess(argv, process.returncode, out, err)

    def down(self) -> None:
        """Pull its cable: what is sent to it or by it is lost without a word."""
        _inside(self._switch.pid, "ip", "link", "set", self.port, "down")

    def up(self) -> None:
        """Plug the cable in again."""
        _inside(self._switch.pid, "ip", "link", "set", self.port, "up")

    def close(self) -> None:
        """Switch it off: kill all that runs in it. Called by the end of the group, too."""
        self._holder.kill()
        # The holder can end only when our own children in it have been reaped.
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END)
        self._processes.clear()
        self._holder.close()


_HOST_SPACES = ["--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--kill-child"]


class _Holder:
    """A process that keeps namespaces alive.

    Attributes:
        pid: of the process in the namespaces (for a PID namespace not the one started).
    """

    def __init__(self, spaces: list[str], script: str, *arguments: str):
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            ["unshare", *spaces, "sh", "-euc", script, "sh", *arguments],
            stdin=pipe,
            stdout=pipe,
            stderr=subprocess.STDOUT,
            cwd="/",
            start_new_session=True,  # keep Ctrl-C from the holder
        )
        try:
            self.pid = self._wait()
            self._handle = os.pidfd_open(self.pid)
        except BaseException:
            self.process.kill()
            self._reap()
            raise

    def __enter__(self) -> _Holder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def kill(self) -> None:
        if self._handle >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)

    def close(self) -> None:
        self.kill()
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1
        self._reap()

    def _reap(self) -> None:
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait(_END)

    def _wait(self) -> int:
        """Read the holder's output up to the line that says it is ready."""
        assert self.process.stdout
        said, end = b"", time.monotonic() + _SETUP
        while not said.endswith(b"\n") or b"ready" not in said:
            left = max(0.0, end - time.monotonic())
            if not select.select([self.process.stdout], [], [], left)[0]:
                raise RuntimeError(f"a namespace was not ready in {_SETUP} s: {said.decode()}")
            chunk = os.read(self.process.stdout.fileno(), 1 << 16)
            if not chunk:
                raise RuntimeError(said.decode().strip() or "unshare failed")
            said += chunk
        return int(said.rpartition(b"ready ")[2])


@contextlib.contextmanager
def _children_in(pid: int) -> Iterator[None]:
    """While the block runs, what this thread starts is in the PID namespace of ``pid``.

    Entered here rather than by nsenter, which would have to fork: its parent half would be the
    process we hold, and take the signals that are meant for the command.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    with contextlib.ExitStack() as stack:
        spaces = []
        for process in ("self", pid):
            spaces.append(os.open(f"/proc/{process}/ns/pid", os.O_RDONLY | os.O_CLOEXEC))
            stack.callback(os.close, spaces[-1])
        ours, theirs = spaces
        if libc.setns(theirs, _CLONE_NEWPID) != 0:
            raise RuntimeError(f"setns: {os.strerror(ctypes.get_errno())}")
        stack.callback(libc.setns, ours, _CLONE_NEWPID)
        yield


def _shareable(path: str | Path) -> Path:
    real = Path(path).resolve(strict=False)
    if not real.is_dir():
        raise ValueError(f"no directory to share: {path}")
    if str(real) == _PRIVATE or real.is_relative_to("/dev/shm"):
        raise ValueError(f"{path} is private to each host")
    return real


def _connect(host: Host, switch: _Holder, rate: str | None) -> None:
    """Run a cable from the host to the switch."""
    far = ("peer", "name", host.interface, "netns", str(host.pid))
    _inside(switch.pid, "ip", "link", "add", host.port, "type", "veth", *far)
    _inside(switch.pid, "ip", "link", "set", host.port, "master", "switch", "up")
    _inside(host.pid, "ip", "address", "add", f"{host.address}/24", "dev", host.interface)
    _inside(host.pid, "ip", "link", "set", host.interface, "up")
    if rate:
        shape = ("root", "tbf", "rate", rate, "burst", "512kb", "latency", "50ms")
        for pid, device in ((host.pid, host.interface), (switch.pid, host.port)):
            _inside(pid, "tc", "qdisc", "add", "dev", device, *shape)


def _inside(pid: int, *command: str) -> None:
    """Run a command of iproute2 in the network namespace of ``pid``."""
    argv = ["nsenter", f"--target={pid}", "--net", "--", *command]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=_SETUP)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
