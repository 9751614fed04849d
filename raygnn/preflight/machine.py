"""Look at the machine that this runs on: processor, memory, limits, network, environment.

Every function answers on any Linux, with None (or nothing) for what cannot be found out: a
machine that is odd is a fact, not an error.
"""

from __future__ import annotations

import array
import fcntl
import hashlib
import os
import re
import resource
import shutil
import socket
import struct
import threading
from collections import defaultdict
from pathlib import Path

from raygnn.config.places import is_secret
from raygnn.graph.available_memory import first_number, lines, number, words
from raygnn.preflight.facts import Interface, Network

_PROC, _SYS = Path("/proc"), Path("/sys")
_PACKAGE = Path(__file__).resolve().parents[1]

_FLAGS = frozenset({"avx2", "avx512f", "avx512_bf16", "amx_bf16"})
_ARM = {
    ("0x41", "0xd0c"): "Arm Neoverse-N1",
    ("0x41", "0xd40"): "Arm Neoverse-V1",
    ("0x41", "0xd49"): "Arm Neoverse-N2",
    ("0x41", "0xd4f"): "Arm Neoverse-V2",
}

# Of communication and threads. Those of CUDA are named in full: many more begin like them.
_VARIABLES = re.compile(
    r"(NCCL|GLOO|OMP|MKL|KMP|TORCH_DISTRIBUTED|TORCH_NCCL|TORCH_FR|UCX|FI)_.*"
    r"|CUDA_LAUNCH_BLOCKING|CUDA_VISIBLE_DEVICES"
)

_RESOLVE = 2.0  # seconds for a name to be resolved
# From linux/sockios.h and linux/if.h.
_SIOCGIFCONF, _SIOCGIFFLAGS, _SIOCGIFMTU = 0x8912, 0x8913, 0x8921
_IFF_UP, _IFF_LOOPBACK, _IFF_RUNNING = 0x1, 0x8, 0x40
_UNKNOWN = 0xFFFFFFFF  # what some drivers write for a speed of -1
_IFREQ = 40  # bytes of struct ifreq: the name takes 16, then comes the answer


def cpus() -> int:
    """CPUs of the process: the machine's, less affinity, less the container's quota."""
    affinity = getattr(os, "sched_getaffinity", None)
    count = len(affinity(0)) if affinity else os.cpu_count() or 1
    quota = [number(word) for word in words(_SYS / "fs/cgroup/cpu.max")]
    if len(quota) == 2 and quota[0] and quota[1]:  # "max" is no number
        count = min(count, -(-quota[0] // quota[1]))
    return count


def cpu_model() -> str | None:
    """The processor's model, e.g. ``"AMD EPYC 7763 64-Core Processor"``.

    Where the kernel gives only numbers, as on most Arm servers, it is made up of those.
    """
    fields = _first_cpu()
    if model := fields.get("model name"):
        return model
    implementer, part = fields.get("CPU implementer"), fields.get("CPU part")
    if implementer and part:
        return _ARM.get((implementer, part), f"Arm implementer {implementer} part {part}")
    return fields.get("Processor") or fields.get("Hardware") or fields.get("cpu") or None


def cpu_flags() -> tuple[str, ...]:
    """What the processor has of ``avx2``, ``avx512f``, ``avx512_bf16``, ``amx_bf16``; sorted."""
    return tuple(sorted(_FLAGS.intersection(_first_cpu().get("flags", "").split())))


def space(path: str | Path) -> tuple[int | None, int | None]:
    """Bytes free for this user and in all, of the file system that ``path`` lies on."""
    try:
        usage = shutil.disk_usage(path)
    except OSError:
        return None, None
    return usage.free, usage.total


def limits() -> dict[str, int]:
    """Soft limits: ``nofile``, open files, and ``memlock``, bytes of locked memory; -1 = none."""
    kinds = {"nofile": resource.RLIMIT_NOFILE, "memlock": resource.RLIMIT_MEMLOCK}
    soft = {name: resource.getrlimit(kind)[0] for name, kind in kinds.items()}
    return {name: -1 if at == resource.RLIM_INFINITY else at for name, at in soft.items()}


def environment() -> dict[str, str]:
    """The variables of communication and threads that are set; none that may be a secret."""
    return {
        name: os.fsencode(value).decode(errors="replace")  # fit to be written anywhere
        for name, value in sorted(os.environ.items())
        if _VARIABLES.fullmatch(name) and not is_secret(name, value)
    }


def code_digest() -> str:
    """SHA-256 over path and content of the package's ``*.py``, the same on nodes of one code.

    Hidden files (an editor's or a notebook's copies) do not count, nor what cannot be read.
    """
    files = {
        file.relative_to(_PACKAGE).as_posix(): file
        for file in _PACKAGE.rglob("*.py")
        if not any(part.startswith(".") for part in file.relative_to(_PACKAGE).parts)
    }
    digest = hashlib.sha256()
    for name in sorted(files):
        try:
            content = files[name].read_bytes()
        except OSError:
            continue
        digest.update(os.fsencode(f"{name}\0{len(content)}\0") + content)
    return digest.hexdigest()


def network(address: str | None) -> Network:
    """How this machine is connected. Takes up to 2 s where names are resolved badly.

    Args:
        address: IPv4, under which Ray knows it.
    """
    return Network(
        address=address,
        interface=interface_of(address) if address else None,
        interfaces=_interfaces(),
        resolves_to=_resolve(socket.gethostname()),
        rdma=_names(_SYS / "class/infiniband"),
    )


def interface_of(address: str) -> str | None:
    """The network interface that has this IPv4 address; None when none has it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        holders = [name for name, having in _addresses(sock).items() if address in having]
    return holders[0] if holders else None


def _interfaces() -> tuple[Interface, ...]:
    """In the kernel's order.

    Asked of the kernel rather than read below /sys, which in a container can be that of another
    network namespace; only the speed is there alone.
    """
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        addresses = _addresses(sock)
        for index, name in socket.if_nameindex():
            flags, mtu = (
                _ioctl(sock, _SIOCGIFFLAGS, name, "H"),
                _ioctl(sock, _SIOCGIFMTU, name, "i"),
            )
            if flags is None:
                continue  # gone since it was listed
            files = _SYS / "class/net" / name
            same = first_number(files / "ifindex") == index
            speed = first_number(files / "speed") if same else None
            found.append(
                Interface(
                    name=name,
                    addresses=tuple(addresses.get(name, ())),
                    up=bool(flags & _IFF_UP and flags & _IFF_RUNNING),  # and the cable is in
                    loopback=bool(flags & _IFF_LOOPBACK),
                    mbits=speed if speed and speed < _UNKNOWN else None,
                    mtu=mtu,
                )
            )
    return tuple(found)


def _ioctl(sock: socket.socket, request: int, name: str, kind: str) -> int | None:
    """What the kernel says about an interface, a number of this struct format."""
    try:
        answer = fcntl.ioctl(sock, request, struct.pack(f"16s{_IFREQ - 16}x", os.fsencode(name)))
    except OSError:
        return None
    return int(struct.unpack_from(kind, answer, 16)[0])


def _addresses(sock: socket.socket) -> dict[str, list[str]]:
    """Interface → its IPv4 addresses, the first and all further ones."""
    room, used = 0, 0
    answer = array.array("B")
    while used + _IFREQ > room:  # the kernel leaves out what does not fit, and does not say so
        room = max(64 * _IFREQ, 2 * room)
        answer = array.array("B", bytes(room))
        request = struct.pack("iP", room, answer.buffer_info()[0])
        try:
            used = struct.unpack("iP", fcntl.ioctl(sock, _SIOCGIFCONF, request))[0]
        except OSError:
            return {}
    found: dict[str, list[str]] = defaultdict(list)
    for at in range(0, used, _IFREQ):
        entry = answer[at : at + _IFREQ].tobytes()
        # "eth0:1" is a label of a further address of eth0.
        name = os.fsdecode(entry[:16].partition(b"\0")[0]).partition(":")[0]
        found[name].append(socket.inet_ntoa(entry[20:24]))
    return found


def _resolve(name: str) -> tuple[str, ...]:
    """IPv4 addresses of a host name, sorted; none when it has none, or not in time."""
    found: list[str] = []

    def look() -> None:
        try:
            answers = socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)
        except (OSError, UnicodeError):  # unknown, or too long for a name
            return
        found.extend(sorted({str(answer[4][0]) for answer in answers}))

    # It cannot be told to give up, and a daemon does not keep the process from ending.
    thread = threading.Thread(target=look, name="resolve", daemon=True)
    thread.start()
    thread.join(_RESOLVE)
    return tuple(found)


def _first_cpu() -> dict[str, str]:
    """What /proc/cpuinfo says first under each name, which is about the first processor."""
    fields: dict[str, str] = {}
    for line in lines(_PROC / "cpuinfo"):
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    return fields


def _names(directory: Path) -> tuple[str, ...]:
    try:
        return tuple(sorted(os.listdir(directory)))
    except OSError:
        return ()
