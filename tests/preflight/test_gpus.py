"""Facts about GPUs from NVML, on a machine that need not have a GPU."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from raygnn.preflight import machine
from raygnn.preflight.facts import Gpu

UUIDS = ("GPU-aa01", "GPU-aa02", "GPU-bb03")
SLICE = "MIG-5e4a"


class Machine(ModuleType):
    """A stand-in for pynvml on a machine with three GPUs, the second of them cut into slices.

    ``broken``: queries that fail, and how. ``open``: how often it was initialised but not shut.
    """

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.open = 0
        self.broken: dict[str, Callable[[], Exception]] = {}
        self.NVMLError = type("NVMLError", (Exception,), {})
        self.NVMLError_NoPermission = type("NVMLError_NoPermission", (self.NVMLError,), {})
        self.queries: dict[str, Callable[..., Any]] = {
            "nvmlInit": lambda: self.count(1),
            "nvmlShutdown": lambda: self.count(-1),
            "nvmlDeviceGetCount": lambda: len(UUIDS),
            "nvmlDeviceGetHandleByIndex": lambda index: UUIDS[index],
            "nvmlDeviceGetHandleByUUID": self.by_uuid,
            "nvmlDeviceGetDeviceHandleFromMigDeviceHandle": self.whole,
            "nvmlDeviceGetUUID": lambda handle: handle,
            "nvmlDeviceGetName": lambda handle: f"NVIDIA {handle}",
            "nvmlDeviceGetMemoryInfo": lambda _: SimpleNamespace(total=80),
            "nvmlDeviceGetCudaComputeCapability": lambda handle: (9, UUIDS.index(handle)),
            "nvmlDeviceGetEccMode": lambda handle: [UUIDS.index(handle) and 1, 0],
            "nvmlDeviceGetComputeRunningProcesses": lambda _: [
                SimpleNamespace(pid=pid) for pid in (12, 7, 12)
            ],
            "nvmlSystemGetDriverVersion": lambda: "550.54.15",
        }

    def __getattr__(self, name: str) -> Any:
        if name not in self.__dict__.get("queries", {}):
            raise AttributeError(name)
        return lambda *arguments: self.answer(name, *arguments)

    def answer(self, name: str, *arguments: Any) -> Any:
        assert self.open or name == "nvmlInit", f"{name} before nvmlInit or after nvmlShutdown"
        if name in self.broken:
            raise self.broken[name]()
        return self.queries[name](*arguments)

    def count(self, step: int) -> None:
        self.open += step

    def by_uuid(self, uuid: str) -> str:
        if uuid not in (*UUIDS, SLICE):
            raise self.NVMLError("Not Found")
        return uuid

    def whole(self, handle: str) -> str:
        if handle != SLICE:
            raise self.NVMLError("Invalid Argument")
        return UUIDS[1]


@pytest.fixture
def pynvml(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    made = Machine()
    monkeypatch.setitem(sys.modules, "pynvml", made)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    yield made
    assert made.open == 0, "shut down, whatever happened"


def gpu(index: int) -> Gpu:
    return Gpu(
        model=f"NVIDIA {UUIDS[index]}",
        uuid=UUIDS[index],
        memory=80,
        driver="550.54.15",
        capability=(9, index),
        ecc=index > 0,
        processes=(7, 12),
    )


def test_the_make_believe_nvml_is_like_the_real_one() -> None:
    import pynvml

    assert all(callable(getattr(pynvml, name)) for name in Machine().queries)
    assert issubclass(pynvml.NVMLError_NoPermission, pynvml.NVMLError)


def test_gpus(pynvml: Machine) -> None:
    assert machine.gpus() == (gpu(0), gpu(1), gpu(2))


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        *(("", []), ("-1", []), ("none", []), ("NoDevFiles", []), ("all", []), (",0", [])),
        *(("0", [0]), ("2,0", [2, 0]), (" 1 , 2 ", [1, 2]), ("+1,2nd", [1, 2]), ("0,", [0])),
        *(("0,-1,2", [0]), ("1,3,2", [1]), ("0,1,0", []), ("9" * 5000, [])),
        *(("GPU-bb03,GPU-aa01", [2, 0]), ("GPU-b,GPU-aa02", [2, 1]), ("GPU-aa", [])),
        *(("GPU-bb03,GPU-ff,GPU-aa01", [2]), ("GPU-b,GPU-bb", []), ("GPU-", [])),
        *(("GPU-bb03,0", [2]), ("0,GPU-bb03", [0]), ("bb03", []), ("MIG-ffff", [])),
    ],
)
def test_visible_gpus(
    pynvml: Machine, monkeypatch: pytest.MonkeyPatch, visible: str, expected: list[int]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert machine.gpus() == tuple(map(gpu, expected))


def test_a_slice(pynvml: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", f"{SLICE},MIG-ffff,{SLICE}x")
    (one,) = machine.gpus()
    assert (one.model, one.uuid, one.memory) == (f"NVIDIA {SLICE}", SLICE, 80)
    assert (one.capability, one.ecc) == ((9, 1), True), "of the GPU that it is cut from"


@pytest.mark.parametrize(
    ("query", "lost"),
    [
        ("nvmlDeviceGetUUID", {"uuid": None}),
        ("nvmlDeviceGetName", {"model": "GPU"}),
        ("nvmlDeviceGetMemoryInfo", {"memory": None}),
        ("nvmlDeviceGetCudaComputeCapability", {"capability": None}),
        ("nvmlDeviceGetEccMode", {"ecc": None}),
        ("nvmlDeviceGetComputeRunningProcesses", {"processes": ()}),
        ("nvmlSystemGetDriverVersion", {"driver": None}),
        ("nvmlShutdown", {}),
    ],
)
@pytest.mark.parametrize("how", ["NVMLError", "mismatch", "missing"])
def test_a_query_that_fails(pynvml: Machine, query: str, lost: dict[str, Any], how: str) -> None:
    if how == "missing":
        del pynvml.queries[query]
    else:  # for an unknown structure, the wrapper raises an error that is no NVMLError
        pynvml.broken[query] = pynvml.NVMLError if how == "NVMLError" else RuntimeError
    assert machine.gpus() == tuple(replace(gpu(i), **lost) for i in range(3))
    if query == "nvmlShutdown":
        pynvml.open = 0


def test_gpus_that_are_lost_or_of_others(pynvml: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def handle(index: int) -> str:
        if index == 1:
            raise wrong("no")
        return UUIDS[index]

    pynvml.queries["nvmlDeviceGetHandleByIndex"] = handle
    wrong = pynvml.NVMLError
    assert machine.gpus() == (gpu(0), Gpu("GPU", driver="550.54.15"), gpu(2))
    wrong = pynvml.NVMLError_NoPermission
    assert machine.gpus() == (gpu(0), gpu(2))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert machine.gpus() == (gpu(2),), "CUDA does not count it either"


def test_without_the_drivers_library(pynvml: Machine) -> None:
    pynvml.broken["nvmlInit"] = pynvml.NVMLError
    assert machine.gpus() == ()


def test_without_a_driver() -> None:
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        assert machine.gpus() == ()
    else:
        pynvml.nvmlShutdown()
        assert all(gpu.uuid and gpu.memory and gpu.driver for gpu in machine.gpus())
