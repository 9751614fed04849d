"""Facts of this machine: processor, limits, network, environment, GPUs.

Every function works on any Linux and returns None (or nothing) for unknown facts.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import socket
import threading
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from raygnn.config.comm_plan import Interface, NodeNetwork
from raygnn.config.places import is_secret, nearest_existing
from raygnn.graph.available_memory import lines, number, words
from raygnn.preflight.facts import Gpu

_PROC, _SYS = Path("/proc"), Path("/sys")
_PACKAGE = Path(__file__).resolve().parents[1]

_FLAGS = frozenset({"avx2", "avx512f", "avx512_bf16", "amx_bf16"})

# Variables of communication and threads. CUDA's are named in full, because unrelated variables
# share their prefix.
_VARIABLES = re.compile(
    r"(NCCL|GLOO|OMP|MKL|KMP|TORCH_DISTRIBUTED|TORCH_NCCL|TORCH_FR|UCX|FI)_.*"
    r"|CUDA_LAUNCH_BLOCKING|CUDA_VISIBLE_DEVICES"
)

_RESOLVE = 2.0  # seconds for a name to be resolved


def cpus() -> int:
    """Return the CPUs available to the process, within its affinity and the container's quota."""
    count = len(os.sched_getaffinity(0))
    quota = [number(word) for word in words(_SYS / "fs/cgroup/cpu.max")]
    if len(quota) == 2 and quota[0] and quota[1]:  # "max" is no number
        count = min(count, -(-quota[0] // quota[1]))
    return count


def cpu_model() -> str | None:
    """Return the processor's model, e.g. ``"AMD EPYC 7763 64-Core Processor"``; on most Arm servers
    the number of its model."""
    fields = _cpuinfo()
    return fields.get("model name") or fields.get("CPU part")


def cpu_flags() -> tuple[str, ...]:
    """Return the processor's instruction sets among `_FLAGS`, sorted."""
    return tuple(sorted(_FLAGS.intersection(_cpuinfo().get("flags", "").split())))


def free_space(path: Path) -> int | None:
    """Return the bytes free for this user on the file system of ``path``."""
    try:
        return shutil.disk_usage(nearest_existing(path)).free
    except OSError:
        return None


def environment() -> dict[str, str]:
    """Return the environment variables of communication and threads, without secrets."""
    return {
        name: os.fsencode(value).decode(errors="replace")  # valid UTF-8
        for name, value in sorted(os.environ.items())
        if _VARIABLES.fullmatch(name) and not is_secret(name, value)
    }


def code_digest() -> str:
    """Return SHA-256 over path and content of the package's ``*.py`` files, without hidden files
    (an editor's copies) and unreadable ones."""
    names = sorted(file.relative_to(_PACKAGE).as_posix() for file in _PACKAGE.rglob("*.py"))
    digest = hashlib.sha256()
    for name in names:
        if not name.startswith(".") and "/." not in name:
            with suppress(OSError):
                content = (_PACKAGE / name).read_bytes()
                digest.update(os.fsencode(f"{name}\0{len(content)}\0") + content)
    return digest.hexdigest()


def network(address: str | None) -> NodeNetwork:
    """Return this machine's network; takes up to 2 s if its host name does not resolve.
    ``address``: the IPv4 address that Ray uses for it."""
    interfaces = _interfaces()
    return NodeNetwork(
        address=address,
        interface=next((i.name for i in interfaces if address in i.addresses), None),
        interfaces=interfaces,
        resolves_to=_resolve(socket.gethostname()),
        rdma=tuple(sorted(path.name for path in (_SYS / "class/infiniband").glob("*"))),
    )


def _interfaces() -> tuple[Interface, ...]:
    addresses: dict[str, list[str]] = defaultdict(list)
    for label, entries in psutil.net_if_addrs().items():
        # "eth0:1" labels another address of eth0
        ipv4 = [entry.address for entry in entries if entry.family == socket.AF_INET]
        addresses[label.partition(":")[0]] += ipv4
    states = psutil.net_if_stats()
    return tuple(
        Interface(
            name=name,
            addresses=tuple(addresses[name]),
            up=states[name].isup,
            loopback="loopback" in states[name].flags.split(","),
        )
        for _, name in socket.if_nameindex()
        if name in states
    )


def _resolve(name: str) -> tuple[str, ...]:
    """Return the IPv4 addresses of a host name, sorted; none after 2 s."""
    addresses: list[str] = []

    def resolve() -> None:
        with suppress(OSError, UnicodeError):  # unknown, or too long for a name
            answers = socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)
            addresses.extend(sorted({str(answer[4][0]) for answer in answers}))

    # getaddrinfo has no timeout, and a daemon thread does not keep the process from ending
    thread = threading.Thread(target=resolve, name="resolve", daemon=True)
    thread.start()
    thread.join(_RESOLVE)
    return tuple(addresses)


def _cpuinfo() -> dict[str, str]:
    """Return the first value of each ``name: value`` in ``/proc/cpuinfo``."""
    fields: dict[str, str] = {}
    for line in lines(_PROC / "cpuinfo"):
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    return fields


def gpus() -> tuple[Gpu, ...]:
    """Return the NVIDIA GPUs that the process may use, in the order of ``CUDA_VISIBLE_DEVICES``.

    They are read from NVML, without a CUDA context, which would allocate memory on every GPU.
    Unknown facts are None; in a container, NVML may hide processes.

    ``CUDA_VISIBLE_DEVICES`` is parsed as torch does: GPU indices, (prefixes of) ``GPU-`` UUIDs or
    complete ``MIG-`` UUIDs, up to the first invalid entry; a duplicate entry hides all GPUs.
    Indices are in PCI bus order, which is CUDA's if all GPUs are of one model. A GPU that is
    divided into MIG slices counts as one unless the variable names slices.
    """
    import pynvml as nvml

    try:
        nvml.nvmlInit()
    except nvml.NVMLError:  # no driver, or another driver than the library's
        return ()
    try:
        return tuple(_gpu(nvml, handle) for handle in _visible(nvml))
    finally:
        _query(nvml, "nvmlShutdown")


def _visible(nvml: Any) -> list[Any]:
    """Return NVML's handles of the GPUs or MIG slices in ``CUDA_VISIBLE_DEVICES``; None for a GPU
    that NVML cannot open."""
    handles: list[Any] = []
    for index in range(_query(nvml, "nvmlDeviceGetCount") or 0):
        try:
            handles.append(nvml.nvmlDeviceGetHandleByIndex(index))
        except nvml.NVMLError_NoPermission:
            continue  # CUDA does not count it
        except nvml.NVMLError:
            handles.append(None)
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return handles
    uuids = [_query(nvml, "nvmlDeviceGetUUID", handle) or "" for handle in handles]
    entries = [entry.strip() for entry in value.split(",")]
    is_uuid, is_slice = (entries[0].startswith(kind) for kind in ("GPU-", "MIG-"))
    chosen: dict[int | str, Any] = {}
    for entry in entries:
        if (entry.startswith("GPU-"), entry.startswith("MIG-")) != (is_uuid, is_slice):
            break
        if is_slice:
            key: int | str = entry
            handle = _query(nvml, "nvmlDeviceGetHandleByUUID", entry)
            if handle is None:
                break  # no such slice
        else:
            number = re.match(r"\+?([0-9]{1,9})", entry)  # as C reads it: "1st" is 1
            index = int(number[1]) if number else -1
            fits = [
                i for i, u in enumerate(uuids) if (u.startswith(entry) if is_uuid else i == index)
            ]
            if len(fits) != 1:
                break
            key, handle = fits[0], handles[fits[0]]
        if key in chosen:
            return []
        chosen[key] = handle
    return list(chosen.values())


def _gpu(nvml: Any, handle: Any) -> Gpu:
    memory = _query(nvml, "nvmlDeviceGetMemoryInfo", handle)
    # NVML reports some facts only for the GPU that a MIG slice belongs to
    gpu = _query(nvml, "nvmlDeviceGetDeviceHandleFromMigDeviceHandle", handle) or handle
    capability = _query(nvml, "nvmlDeviceGetCudaComputeCapability", gpu)
    ecc = _query(nvml, "nvmlDeviceGetEccMode", gpu)
    processes = _query(nvml, "nvmlDeviceGetComputeRunningProcesses", handle) or ()
    return Gpu(
        model=_query(nvml, "nvmlDeviceGetName", handle) or "GPU",
        uuid=_query(nvml, "nvmlDeviceGetUUID", handle),
        memory=None if memory is None else int(memory.total),
        driver=_query(nvml, "nvmlSystemGetDriverVersion"),
        capability=None if capability is None else (capability[0], capability[1]),
        ecc=None if ecc is None else bool(ecc[0]),  # [1]: after the next restart
        processes=tuple(sorted({process.pid for process in processes})),
    )


def _query(nvml: Any, function: str, *arguments: Any) -> Any:
    """Call a function of NVML; None if an argument is None or the call fails, as it does for a
    missing function, an unknown structure or a name that is not UTF-8."""
    if None in arguments:
        return None
    try:
        return getattr(nvml, function)(*arguments)
    except Exception:
        return None
