"""Look at the NVIDIA GPUs of the machine that this runs on, without CUDA.

NVML comes with the driver and needs neither torch nor a CUDA context, which would take memory
on every GPU. A machine without it is looked at through the driver's files.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from raygnn.preflight.facts import Gpu

_DRIVER_FILES = Path("/proc/driver/nvidia/gpus")
_UNNAMED = "GPU"


def gpus() -> tuple[Gpu, ...]:
    """The NVIDIA GPUs that the process may use, in the order of ``CUDA_VISIBLE_DEVICES``.

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
    newest = _ask(nvml, "nvmlSystemGetCudaDriverVersion_v2")
    cuda = None if newest is None else f"{newest // 1000}.{newest % 1000 // 10}"
    found = []
    for one in _visible(uuids):
        if isinstance(one, int):
            handle, uuid = handles[one], uuids[one]
        else:
            handle, uuid = _ask(nvml, "nvmlDeviceGetHandleByUUID", one), one
            if handle is None:
                break  # no such slice
        found.append(_gpu(nvml, handle, uuid, driver, cuda))
    return tuple(found)


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


def _gpu(nvml: Any, handle: Any, uuid: str | None, driver: str | None, cuda: str | None) -> Gpu:
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
        memory_free=None if memory is None else int(memory.free),
        driver=driver,
        cuda=cuda,
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
    found = []
    for file in sorted(_DRIVER_FILES.glob("*/information")):  # named after the PCI bus
        try:
            lines = file.read_text(errors="replace").splitlines()
        except OSError:
            lines = []
        pairs = [line.partition(":") for line in lines]
        fields = {name.strip(): value.strip() for name, _, value in pairs}
        uuid = fields.get("GPU UUID", "")
        # Question marks stand for what the driver has not read off the GPU yet.
        found.append(
            Gpu(fields.get("Model") or _UNNAMED, uuid if uuid and "?" not in uuid else None)
        )
    chosen = _visible([gpu.uuid for gpu in found])
    return tuple(found[one] if isinstance(one, int) else Gpu(_UNNAMED, one) for one in chosen)


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
