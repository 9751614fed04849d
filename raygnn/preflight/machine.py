"""Look at the machine that this runs on: processor, limits, network, environment, GPUs.

Every function answers on any Linux, with None (or nothing) for what cannot be found out: a
machine that is odd is a fact, not an error.
"""

from __future__ import annotations

import hashlib
import os
import re
import resource
import shutil
import socket
import threading
from collections import defaultdict
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
_DRIVER_FILES = Path("/proc/driver/nvidia/gpus")
_UNNAMED = "GPU"


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
    fields = _fields(_PROC / "cpuinfo")  # of the first processor
    if model := fields.get("model name"):
        return model
    implementer, part = fields.get("CPU implementer"), fields.get("CPU part")
    if implementer and part:
        return _ARM.get((implementer, part), f"Arm implementer {implementer} part {part}")
    return fields.get("Processor") or fields.get("Hardware") or fields.get("cpu") or None


def cpu_flags() -> tuple[str, ...]:
    """What the processor has of ``avx2``, ``avx512f``, ``avx512_bf16``, ``amx_bf16``; sorted."""
    return tuple(sorted(_FLAGS.intersection(_fields(_PROC / "cpuinfo").get("flags", "").split())))


def free_space(path: Path) -> int | None:
    """Bytes free for this user on the file system that ``path`` lies on, or will lie on."""
    try:
        return shutil.disk_usage(nearest_existing(path)).free
    except OSError:
        return None


def open_files() -> int | None:
    """How many files a process may have open; None = no limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft


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


def network(address: str | None) -> NodeNetwork:
    """How this machine is connected. Takes up to 2 s where names are resolved badly.

    Args:
        address: IPv4, under which Ray knows it.
    """
    interfaces = _interfaces()
    return NodeNetwork(
        address=address,
        interface=next((i.name for i in interfaces if address in i.addresses), None),
        interfaces=interfaces,
        resolves_to=_resolve(socket.gethostname()),
        rdma=tuple(sorted(path.name for path in (_SYS / "class/infiniband").glob("*"))),
    )


def _interfaces() -> tuple[Interface, ...]:
    """In the kernel's order."""
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
    """IPv4 addresses of a host name, sorted; none when it has none, or not in time."""
    addresses: list[str] = []

    def look() -> None:
        try:
            answers = socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)
        except (OSError, UnicodeError):  # unknown, or too long for a name
            return
        addresses.extend(sorted({str(answer[4][0]) for answer in answers}))

    # It cannot be told to give up, and a daemon does not keep the process from ending.
    thread = threading.Thread(target=look, name="resolve", daemon=True)
    thread.start()
    thread.join(_RESOLVE)
    return tuple(addresses)


def _fields(file: Path) -> dict[str, str]:
    """What one of the kernel's files says first under each name."""
    fields: dict[str, str] = {}
    for line in lines(file):
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    return fields


def gpus() -> tuple[Gpu, ...]:
    """The NVIDIA GPUs that the process may use, in the order of ``CUDA_VISIBLE_DEVICES``.

    NVML comes with the driver and needs neither torch nor a CUDA context, which would take memory
    on every GPU. A machine without it is looked at through the driver's files.

    That variable is read as torch reads it: GPU indices or (beginnings of) ``GPU-`` UUIDs or
    whole ``MIG-`` UUIDs, up to the first that is none; one that is named twice hides all. Indices
    count in the order of the PCI bus, which is CUDA's where all GPUs are of one model. A GPU that
    is cut into MIG slices counts as one unless the variable names slices.

    Never raises: what NVML does not tell is None. ``processes`` are those that compute; in a
    container NVML may not tell them.
    """
    try:
        import pynvml
    except ImportError:
        return _from_files()
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # no driver, or not the one that its library belongs to
        return _from_files()
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
    """Handles of the GPUs that the process may use; None for one that does not answer."""
    handles: list[Any] = []
    for index in range(_ask(nvml, "nvmlDeviceGetCount") or 0):
        try:
            handles.append(nvml.nvmlDeviceGetHandleByIndex(index))
        except nvml.NVMLError_NoPermission:
            continue  # NVML counts those of others too; for CUDA they are not there
        except nvml.NVMLError:
            handles.append(None)
    return handles


def _gpu(nvml: Any, handle: Any, uuid: str | None, driver: str | None) -> Gpu:
    memory = _ask(nvml, "nvmlDeviceGetMemoryInfo", handle)
    # What a MIG slice does not tell, the GPU that it is cut from does.
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
    """The answer to a query of NVML; None when it has none."""
    if None in arguments:
        return None
    try:
        return getattr(nvml, query)(*arguments)
    except Exception:
        # NVMLError and what its wrapper raises besides, all "not here": a function that this
        # version lacks, a structure that the driver does not know, a name that is no UTF-8.
        return None


def _text(answer: str | bytes | None) -> str | None:
    """Older versions answer in bytes."""
    return answer.decode(errors="replace") if isinstance(answer, bytes) else answer


def _from_files() -> tuple[Gpu, ...]:
    known = []
    for file in sorted(_DRIVER_FILES.glob("*/information")):  # named after the PCI bus
        fields = _fields(file)
        uuid = fields.get("GPU UUID", "")
        # Question marks stand for what the driver has not read off the GPU yet.
        known.append(
            Gpu(fields.get("Model") or _UNNAMED, uuid if uuid and "?" not in uuid else None)
        )
    chosen = _visible([gpu.uuid for gpu in known])
    return tuple(known[one] if isinstance(one, int) else Gpu(_UNNAMED, one) for one in chosen)


def _visible(uuids: list[str | None]) -> list[int | str]:
    """What ``CUDA_VISIBLE_DEVICES`` leaves of the GPUs: their indices, or UUIDs of MIG slices."""
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
    """The GPU or MIG slice that one entry names; None when it is invalid."""
    if _kind(word) == "MIG-":
        return word
    if _kind(word) == "GPU-":
        fits = [i for i, uuid in enumerate(uuids) if uuid and uuid.startswith(word)]
        return fits[0] if len(fits) == 1 else None
    number = re.match(r"\+?([0-9]{1,9})", word)  # as C reads it: "1st" is 1
    index = int(number[1]) if number else len(uuids)
    return index if index < len(uuids) else None
