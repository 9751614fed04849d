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

# Of communication and threads. Those of CUDA are named in full: others share their prefix.
_VARIABLES = re.compile(
    r"(NCCL|GLOO|OMP|MKL|KMP|TORCH_DISTRIBUTED|TORCH_NCCL|TORCH_FR|UCX|FI)_.*"
    r"|CUDA_LAUNCH_BLOCKING|CUDA_VISIBLE_DEVICES"
)

_RESOLVE = 2.0  # seconds for a name to be resolved
_UNNAMED = "GPU"


def cpus() -> int:
    """Return the CPUs available to the process, within its affinity and the container's quota."""
    affinity = getattr(os, "sched_getaffinity", None)
    count = len(affinity(0)) if affinity else os.cpu_count() or 1
    quota = [number(word) for word in words(_SYS / "fs/cgroup/cpu.max")]
    if len(quota) == 2 and quota[0] and quota[1]:  # "max" is no number
        count = min(count, -(-quota[0] // quota[1]))
    return count


def cpu_model() -> str | None:
    """Return the processor's model, e.g. ``"AMD EPYC 7763 64-Core Processor"``; of most Arm servers
    the kernel's number of it."""
    fields = _fields(_PROC / "cpuinfo")  # of the first processor
    return fields.get("model name") or fields.get("CPU part")


def cpu_flags() -> tuple[str, ...]:
    """Return which of ``avx2``, ``avx512f``, ``avx512_bf16``, ``amx_bf16`` it has, sorted."""
    return tuple(sorted(_FLAGS.intersection(_fields(_PROC / "cpuinfo").get("flags", "").split())))


def free_space(path: Path) -> int | None:
    """Return the bytes free for this user on the file system of ``path``."""
    try:
        return shutil.disk_usage(nearest_existing(path)).free
    except OSError:
        return None


def environment() -> dict[str, str]:
    """Return the variables of communication and threads that are set, without secrets."""
    return {
        name: os.fsencode(value).decode(errors="replace")  # fit to be written anywhere
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
    """Return this machine's network; takes up to 2 s if its name does not resolve. ``address`` is
    Ray's IPv4 address of it."""
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
        # "eth0:1" is a label of a further address of eth0.
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

    def look() -> None:
        try:
            answers = socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)
        except (OSError, UnicodeError):  # unknown, or too long for a name
            return
        addresses.extend(sorted({str(answer[4][0]) for answer in answers}))

    # getaddrinfo has no timeout, and a daemon thread does not keep the process from ending
    thread = threading.Thread(target=look, name="resolve", daemon=True)
    thread.start()
    thread.join(_RESOLVE)
    return tuple(addresses)


def _fields(file: Path) -> dict[str, str]:
    fields: dict[str, str] = {}
    for line in lines(file):
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    return fields


def gpus() -> tuple[Gpu, ...]:
    """Return the NVIDIA GPUs that the process may use, in the order of ``CUDA_VISIBLE_DEVICES``.

    They are read from NVML, without a CUDA context, which would allocate memory on every GPU.
    Unknown facts are None; in a container, NVML may hide processes.

    ``CUDA_VISIBLE_DEVICES`` is parsed as torch does: GPU indices, (prefixes of) ``GPU-`` UUIDs or
    complete ``MIG-`` UUIDs, up to the first invalid one; one that is named twice hides all. Indices
    are in PCI bus order, which is CUDA's if all GPUs are of one model. A GPU that is cut into MIG
    slices counts as one unless the variable names slices.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # no driver, or not the one that its library belongs to
        return ()
    try:
        return _from_nvml(pynvml)
    finally:
        _ask(pynvml, "nvmlShutdown")


def _from_nvml(nvml: Any) -> tuple[Gpu, ...]:
    handles = _handles(nvml)
    uuids = [_text(_ask(nvml, "nvmlDeviceGetUUID", handle)) for handle in handles]
    driver = _text(_ask(nvml, "nvmlSystemGetDriverVersion"))
    visible = []
    for one in _visible(uuids):
        if isinstance(one, int):
            handle, uuid = handles[one], uuids[one]
        else:
            handle, uuid = _ask(nvml, "nvmlDeviceGetHandleByUUID", one), one
            if handle is None:
                break  # no such slice
        visible.append(_gpu(nvml, handle, uuid, driver))
    return tuple(visible)


def _handles(nvml: Any) -> list[Any]:
    handles: list[Any] = []
    for index in range(_ask(nvml, "nvmlDeviceGetCount") or 0):
        try:
            handles.append(nvml.nvmlDeviceGetHandleByIndex(index))
        except nvml.NVMLError_NoPermission:
            continue  # CUDA does not count it
        except nvml.NVMLError:
            handles.append(None)
    return handles


def _gpu(nvml: Any, handle: Any, uuid: str | None, driver: str | None) -> Gpu:
    memory = _ask(nvml, "nvmlDeviceGetMemoryInfo", handle)
    # some facts are those of the GPU that a MIG slice is cut from
    whole = _ask(nvml, "nvmlDeviceGetDeviceHandleFromMigDeviceHandle", handle) or handle
    capability = _ask(nvml, "nvmlDeviceGetCudaComputeCapability", whole)
    ecc = _ask(nvml, "nvmlDeviceGetEccMode", whole)
    processes = _ask(nvml, "nvmlDeviceGetComputeRunningProcesses", handle) or ()
    return Gpu(
        model=_text(_ask(nvml, "nvmlDeviceGetName", handle)) or _UNNAMED,
        uuid=uuid,
        memory=None if memory is None else int(memory.total),
        driver=driver,
        capability=None if capability is None else (capability[0], capability[1]),
        ecc=None if ecc is None else bool(ecc[0]),  # [1]: after the next restart
        processes=tuple(sorted({process.pid for process in processes})),
    )


def _ask(nvml: Any, query: str, *arguments: Any) -> Any:
    if None in arguments:
        return None
    try:
        return getattr(nvml, query)(*arguments)
    except Exception:
        return None  # also a missing function, an unknown structure or a name that is not UTF-8


def _text(answer: str | bytes | None) -> str | None:
    return answer.decode(errors="replace") if isinstance(answer, bytes) else answer


def _visible(uuids: list[str | None]) -> list[int | str]:
    """Return the indices of the GPUs, or the UUIDs of MIG slices, in ``CUDA_VISIBLE_DEVICES``."""
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return list(range(len(uuids)))
    chosen: list[int | str] = []
    words = [word.strip() for word in value.split(",")]
    for word in words:
        one = _entry(word, uuids) if _kind(word) == _kind(words[0]) else None
        if one is None:
            break
        if one in chosen:
            return []
        chosen.append(one)
    return chosen


def _kind(word: str) -> str:
    return word[:4] if word.startswith(("GPU-", "MIG-")) else "index"


def _entry(word: str, uuids: list[str | None]) -> int | str | None:
    """Return the GPU's index or the MIG slice that an entry names; None if it is invalid."""
    if _kind(word) == "MIG-":
        return word
    if _kind(word) == "GPU-":
        fits = [i for i, uuid in enumerate(uuids) if uuid and uuid.startswith(word)]
        return fits[0] if len(fits) == 1 else None
    number = re.match(r"\+?([0-9]{1,9})", word)  # as C reads it: "1st" is 1
    index = int(number[1]) if number else len(uuids)
    return index if index < len(uuids) else None
