"""Whole trainings whose batches are made as on a GPU, by Triton's interpreter on the CPU."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from triton.runtime.interpreter import GridExecutor

from raygnn.config.load import load_config
from raygnn.errors import ConfigError
from raygnn.runs.run import Run
from raygnn.sampling.batch import Adjacency, AwaitedRows, Batch, Block
from raygnn.sampling.device import device_features, device_kernels
from raygnn.sampling.device.device_features import DeviceFeatures
from raygnn.sampling.device.device_sampler import DeviceSampler
from raygnn.sampling.exchange import Exchange
from raygnn.sampling.features import FeatureStore
from raygnn.sampling.host_memory import Host
from raygnn.sampling.loader import BatchLoader, BatchMaker, SideStream
from raygnn.sampling.sampler import NeighborSampler
from raygnn.worker import rank_setup
from raygnn.worker.comm.process_groups import Ranks
from raygnn.worker.planes import device_path
from raygnn.worker.planes.device_path import Room
from tests.support.elsewhere import Cudart, elsewhere
from tests.support.small_jobs import DEVICE, job, losses, train_on_ranks

pytestmark = pytest.mark.long

CPU_ALONE = {"sample_on": "cpu", "features_on": "cpu"}
LEARNED = {"dim": 4, "ntypes": ["_N"]}
GAT = {"model": {"kind": "gat", "hidden": 8}, "cluster": {"workers": 2}}


@pytest.fixture
def as_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat the CPU as a GPU with a lot of memory, including its streams."""
    monkeypatch.setattr("raygnn.config.rules._resources", lambda config: [])  # without GPUs
    if DEVICE.type == "cuda":
        return
    monkeypatch.setattr(device_path, "_free", lambda device: 1 << 40)

    def loader(maker: BatchMaker, **options: Any) -> BatchLoader:
        options["side"] = SideStream(torch.device("cpu"), torch.cpu)
        return BatchLoader(maker, **options)

    monkeypatch.setattr(rank_setup, "BatchLoader", loader)
    monkeypatch.setattr(GridExecutor, "__call__", alone)


ONE_AT_A_TIME, CALL = threading.Lock(), GridExecutor.__call__  # no interpreter for two threads


def alone(*args: Any, **options: Any) -> Any:
    with ONE_AT_A_TIME:
        return CALL(*args, **options)


def run_of(storage: Path, name: str, sampling: dict[str, Any], **sections: Any) -> Run:
    sections = {**GAT, **sections}
    sections["train"] = {"max_steps": 4, **sections.get("train", {})}
    config = job(storage, name=name, **sections)
    config["graph"]["nodes"] = 1000
    config["sampling"] |= {"batch_size": 32, **sampling}
    config["cluster"] = {**config["cluster"], "gpus_per_worker": 0}
    return train_on_ranks(load_config(config))


def trained(storage: Path, name: str, sampling: dict[str, Any], **sections: Any) -> list[float]:
    return list(losses(run_of(storage, name, sampling, **sections)))


def used(monkeypatch: pytest.MonkeyPatch, sampler: type, store: type | None) -> None:
    """Fail for a batch that anything else built."""
    make = BatchMaker.__call__

    def checked(self: BatchMaker, epoch: int, step: int) -> Any:
        assert type(self.sampler) is sampler
        assert store is None or type(self.store) is store
        return make(self, epoch, step)

    monkeypatch.setattr(BatchMaker, "__call__", checked)


@pytest.mark.parametrize(
    ("sampling", "workers", "precision", "makers"),
    [
        ({"fanout": [5, -1], "replace": False}, 2, "bf16", (DeviceSampler, DeviceFeatures)),
        ({"features_on": "pinned", "replace": True}, 2, "fp32", (DeviceSampler, DeviceFeatures)),
        ({"features_on": "cpu"}, 1, "fp32", (DeviceSampler, FeatureStore)),
        ({"sample_on": "cpu"}, 2, "fp32", (NeighborSampler, DeviceFeatures)),
    ],
)
def test_a_training_is_the_same(
    sampling: dict[str, Any],
    workers: int,
    precision: str,
    makers: tuple[type, type],
    as_a_gpu: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    sections = {"cluster": {"workers": workers}, "precision": precision}
    with monkeypatch.context() as patch:
        patch.setattr(device_path, "_free", lambda device: None)
        plain = trained(tmp_path, "plain", sampling, **sections)
    used(monkeypatch, *makers)
    room = device_path.Room("gpu", "gpu", 0.3, True)
    monkeypatch.setattr(device_path.Room, "from_sizes", lambda *sizes: room)
    assert trained(tmp_path, "device", sampling, **sections) == plain


def apart(monkeypatch: pytest.MonkeyPatch, *others: int) -> None:
    """Put each rank on its own host, except for ``others``, which share one."""

    def of(cls: type[Host], exchange: Exchange) -> Host:
        rank = exchange.world.rank
        return cls(exchange, others if rank in others else (rank,), max(1, len(others)))

    monkeypatch.setattr(Host, "discover", classmethod(of))


@pytest.mark.parametrize(
    ("sampling", "workers", "together", "sections"),
    [
        ({"cache": 0.1}, 2, (), {"precision": "bf16"}),
        ({"features_on": "pinned", "cache": 0.2}, 3, (0, 2), {"comm": {"debug": True}}),
        (
            {"features_on": "gpu", "sample_on": "cpu", "cache": 0.3, "prefetch": 0},
            3,
            (),
            {"model": {"kind": "gat", "hidden": 8, "norm": "batch"}},
        ),
        ({"cache": 0}, 2, (), {"model": {"kind": "gcn", "hidden": 8, "embedding": LEARNED}}),
    ],
)
def test_a_training_on_several_hosts_is_the_same(
    sampling: dict[str, Any],
    workers: int,
    together: tuple[int, ...],
    sections: dict[str, Any],
    as_a_gpu: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Rows of other hosts arrive right before the step that reads them."""
    apart(monkeypatch, *together)
    sections = {**sections, "cluster": {"workers": workers}}
    with monkeypatch.context() as patch:
        patch.setattr(device_path, "_free", lambda device: None)
        plain = run_of(tmp_path, "plain", {**sampling, **CPU_ALONE}, **sections)
    sampler = NeighborSampler if "sample_on" in sampling else DeviceSampler
    used(monkeypatch, sampler, DeviceFeatures)
    device = run_of(tmp_path, "device", sampling, **sections)
    assert list(losses(device)) == list(losses(plain))
    remote, expected = device.summary["remote"], plain.summary["remote"]
    assert remote["rows"] == expected["rows"] > 0
    assert remote["cache_hits"] == expected["cache_hits"] < remote["rows"]
    # and those of the comparison before the first batch
    assert expected["bytes"] <= remote["bytes"] < 1.2 * expected["bytes"]


def test_rows_come_in_one_order_with_gradients(
    as_a_gpu: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Only the training thread uses the rows' group, and the order is the same on all ranks,
    however far ahead each prepares batches."""
    apart(monkeypatch)
    make = BatchMaker.__call__
    calls: dict[str, Any] = {n: getattr(dist, n) for n in ("all_reduce", "all_to_all_single")}

    def late(self: BatchMaker, epoch: int, step: int) -> Any:
        batch = make(self, epoch, step)
        if step == 2 * dist.get_rank() + 1:  # the other ranks are ahead by then
            time.sleep(0.5)
        return batch

    def noted(name: str) -> Any:
        def call(*args: Any, group: Any = None, **options: Any) -> Any:
            if group in (None, dist.group.WORLD):
                with (tmp_path / f"order-{dist.get_rank()}").open("a") as file:
                    file.write(f"{name} in {threading.current_thread().name}\n")
            return calls[name](*args, group=group, **options)

        return call

    monkeypatch.setattr(BatchMaker, "__call__", late)
    for name in calls:
        monkeypatch.setattr(dist, name, noted(name))
    trained(
        tmp_path, "test", {"prefetch": 3, "cache": 0}, comm={"overlap": False, "bucket_cap_mb": 100}
    )
    orders = [(tmp_path / f"order-{rank}").read_text().splitlines() for rank in range(2)]
    assert orders[0] == orders[1]
    step = ["all_to_all_single in MainThread", "all_reduce in MainThread"]
    # the first belongs to the comparison before the first batch
    assert [line for line in orders[0] if "MainThread" not in line] == []
    steps = orders[0][orders[0].index(step[0], orders[0].index(step[0]) + 1) :]
    assert steps == step * 4


def test_a_rank_that_fails_ends_those_that_wait_for_its_rows(
    as_a_gpu: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The other ranks hold the batch that the failing rank could not prepare."""
    apart(monkeypatch)
    make = BatchMaker.__call__

    def fails(self: BatchMaker, epoch: int, step: int) -> Any:
        batch = make(self, epoch, step)
        if step == 2 and dist.get_rank() == 1:
            raise ValueError("spoilt rows")
        return batch

    monkeypatch.setattr(BatchMaker, "__call__", fails)
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match="spoilt rows"):
        trained(tmp_path, "test", {"cache": 0})
    assert time.monotonic() - begin < 30


@pytest.mark.parametrize("spoilt", ["__init__", "_read", "finish"])
def test_several_hosts_stay_with_the_cpu_together(
    spoilt: str, as_a_gpu: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """All ranks fall back if one fails before the others wait for its rows."""
    apart(monkeypatch)
    call = getattr(DeviceFeatures, spoilt)

    def fails(self: DeviceFeatures, *args: Any) -> Any:
        made = call(self, *args)
        if dist.get_rank() == 1:
            raise RuntimeError("no such instruction")
        return made

    monkeypatch.setattr(DeviceFeatures, spoilt, fails)
    used(monkeypatch, DeviceSampler, FeatureStore)
    trained(tmp_path, "test", {"sample_on": "gpu"})


def test_gpus_that_gloo_connects_fetch_rows_beside_training(
    as_a_gpu: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The GPU's own reads of rows, correct but slower, are used only on request."""
    apart(monkeypatch)
    monkeypatch.setattr(Ranks, "device_rows", SimpleNamespace(device=torch.device("meta")))
    monkeypatch.setattr(DeviceFeatures, "__init__", lambda *_: os._exit(1))
    used(monkeypatch, DeviceSampler, FeatureStore)
    trained(tmp_path, "test", {})


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of a training that uses no GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("raygnn.config.rules._resources", lambda config: [])
        patch.setattr(device_path, "_free", lambda device: None)
        return trained(tmp_path_factory.mktemp("plain"), "plain", {"features_on": "cpu"})


@pytest.mark.parametrize(
    ("features_on", "most", "copies", "store"),
    [
        ("pinned", None, True, DeviceFeatures),  # locked in place
        ("pinned", 1, False, DeviceFeatures),  # copied, as configured
        ("auto", 0, True, DeviceFeatures),
        ("auto", 0, False, FeatureStore),
    ],
)
def test_a_training_with_locked_pages_is_the_same(
    features_on: str,
    most: int | None,
    copies: bool,
    store: type,
    plain: list[float],
    as_a_gpu: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """CUDA may lock no pages, and the host may then have no memory for copies."""
    monkeypatch.setattr(device_features, "runtime", lambda device: Cudart(most))
    room = Room("gpu", "pinned", 0.3, copies)
    monkeypatch.setattr(Room, "from_sizes", lambda *sizes: room)
    used(monkeypatch, DeviceSampler, store)
    assert trained(tmp_path, "device", {"features_on": features_on}) == plain


@pytest.mark.parametrize(
    ("spoilt", "kept"),
    [("draw_rows", (NeighborSampler, DeviceFeatures)), ("gather", (DeviceSampler, FeatureStore))],
)
def test_failing_or_wrong_kernels_fall_back_to_the_cpu(
    spoilt: str,
    kept: tuple[type, type],
    as_a_gpu: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """All ranks fall back if one of them notices it; it is an error if the config requires the
    GPU."""
    call = getattr(device_kernels, spoilt)
    room = device_path.Room("gpu", "pinned", 0.3, True)
    monkeypatch.setattr(device_path.Room, "from_sizes", lambda *sizes: room)

    def other(table: Tensor, index: Tensor, *given: Any) -> Tensor:
        if spoilt == "draw_rows" and torch.distributed.get_rank() == 0:
            raise RuntimeError("no such instruction")
        return call(table, index, *given) + int(spoilt == "gather")

    key = {"draw_rows": "sample_on", "gather": "features_on"}[spoilt]
    message = {"draw_rows": "no such instruction", "gather": "reads other rows of _N/features"}
    with monkeypatch.context() as patch:
        patch.setattr(device_kernels, spoilt, other)
        used(patch, *kept)
        trained(tmp_path, "auto", {})
    monkeypatch.setattr(device_kernels, spoilt, other)
    wanted = {"sample_on": "gpu", "features_on": "pinned"}[key]
    with pytest.raises(RuntimeError, match=rf"(?s)sampling\.{key}.*{message[spoilt]}"):
        trained(tmp_path, "wanted", {key: wanted})


def test_placement_by_free_memory() -> None:
    """Free bytes of the GPU and of the host, its ranks, the structure, the rows."""
    assert Room.from_sizes(100, 0, 1, 10, 30) == Room("gpu", "gpu", 1.0, False)
    assert Room.from_sizes(100, 80, 1, 20, 40) == Room("gpu", "pinned", 0.75, False)
    assert Room.from_sizes(100, 80, 8, 20, 40) == Room(
        "gpu", "pinned", 0.75, False
    )  # once for all ranks
    assert Room.from_sizes(100, 160, 1, 20, 40).copies
    assert Room.from_sizes(100, 240, 2, 20, 40).copies
    assert not Room.from_sizes(100, 239, 2, 20, 40).copies
    assert Room.from_sizes(100, 79, 1, 20, 40) == Room("gpu", "cpu", 0.75, False)
    assert Room.from_sizes(100, 52, 1, 26, 40) == Room("pinned", "gpu", 1.0, False)
    assert Room.from_sizes(100, 104, 2, 26, 40).structure == "pinned"  # once for each rank
    assert Room.from_sizes(100, 103, 2, 26, 40).structure == "cpu"
    assert Room.from_sizes(100, 51, 1, 26, 40) == Room("cpu", "gpu", 1.0, False)
    assert Room.from_sizes(0, 84, 2, 1, 40) == Room("pinned", "pinned", 0.0, False)
    assert Room.from_sizes(0, 83, 2, 1, 40) == Room("pinned", "cpu", 0.0, False)
    assert Room.from_sizes(0, 0, 1, 0, 0) == Room("gpu", "gpu", 0.0, True)


@pytest.mark.parametrize(
    ("sampling", "sections", "message"),
    [
        ({"sample_on": "gpu"}, {"cluster": {"gpus_per_worker": 0}}, "sample_on is gpu, but"),
        ({"features_on": "pinned"}, {"cluster": {"gpus_per_worker": 0}}, "is pinned, but"),
        ({"edge_weight": "w"}, {}, "sampling.edge_weight is set"),
        ({"time": {"edges": "t", "seeds": "t"}}, {}, "sampling.time is set"),
        ({"topology": "partitioned"}, {}, "sampling.topology is partitioned"),
        ({"fanout": [5, 1025]}, {}, "a fanout is above 1,024"),
        ({}, {"model": {"edge_features": ["w"]}}, "the model reads edges"),
        ({}, {"task": {"kind": "link_prediction"}}, r"task\.exclude"),
    ],
)
def test_sampling_that_a_gpu_does_not_support(
    sampling: dict[str, Any], sections: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with_gpu = {**sections, "cluster": {"gpus_per_worker": 1, **sections.get("cluster", {})}}
    config = job(tmp_path, **with_gpu)
    config["sampling"] |= {"sample_on": "gpu", **sampling}
    with pytest.raises(ConfigError, match=message):
        load_config(config)
    config["sampling"] |= {"sample_on": "auto", "features_on": "auto"}
    load_config(config)


def test_rows_that_are_locked_are_in_shared_memory(
    as_a_gpu: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Locked rows are shared even if `staging.resident` keeps rows for a CPU out of memory."""

    class Checked(Cudart):
        def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
            mapped = [
                line.split()
                for line in Path("/proc/self/maps").read_text().splitlines()
                if "memfd:raygnn" in line
            ]
            spans = [[int(end, 16) for end in line[0].split("-")] for line in mapped]
            assert any(low <= address and address + size <= high for low, high in spans)
            return super().cudaHostRegister(address, size, flags)

    monkeypatch.setattr(device_features, "runtime", lambda device: Checked())
    used(monkeypatch, DeviceSampler, DeviceFeatures)
    trained(tmp_path, "test", {"features_on": "pinned"}, staging={"resident": "never"})


class Streams:
    """Stand-in for `torch.cuda` that records calls and their threads."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.step = 0

    def note(self, call: str) -> None:
        self.calls.append((threading.current_thread().name, call))

    def set_device(self, device: torch.device) -> None:
        self.note(f"set {device}")

    def Stream(self, device: torch.device) -> Any:
        return SimpleNamespace(record_event=lambda: (self.note("record"), "event")[1])

    def stream(self, stream: Any) -> Any:
        streams = self

        class Within:
            def __enter__(self) -> None:
                streams.note("enter")

            def __exit__(self, *error: object) -> None:
                streams.note("leave")

        return Within()

    def current_stream(self, device: torch.device) -> Any:
        def record(event: Any) -> None:
            self.step, step = self.step + 1, self.step
            event.synchronize = lambda: self.note(f"wait for step {step}")

        wait = lambda event: self.note(f"wait for the {event}")  # noqa: E731
        return SimpleNamespace(wait_event=wait, record_event=record)

    def Event(self, *, blocking: bool) -> Any:
        assert blocking  # its wait leaves the core to the prefetch thread
        return SimpleNamespace()


def test_the_training_stream_waits_and_no_thread_does() -> None:
    """A batch is built and copied on the side stream; its memory is kept for the training
    stream."""
    streams, gpu = Streams(), torch.device("cuda", 0)

    class Made:
        epoch, step = 0, 0

        def to(self, device: torch.device) -> Made:
            streams.note(f"copy to {device}")
            return self

        def used_on(self, stream: Any) -> None:
            streams.note("keep")

    def make(epoch: int, step: int) -> Any:
        streams.note("make")
        return Made()

    maker: Any = type("Maker", (), {"__call__": staticmethod(make)})()
    maker.plan = SimpleNamespace(steps_per_epoch=1, state={})
    maker.exchange = SimpleNamespace(seconds=0.0)
    loader = BatchLoader(maker, prefetch=1, limit=1, side=SideStream(gpu, streams))
    assert len(list(loader)) == 1
    side = ["set cuda:0", "enter", "make", "copy to cuda:0", "record", "leave"]
    assert [c for t, c in streams.calls if t == "raygnn-prefetch"] == side
    assert [c for t, c in streams.calls if t == "MainThread"] == ["wait for the event", "keep"]


def test_the_host_is_three_steps_ahead_at_most() -> None:
    """More batches ahead would fill the GPU's memory."""
    streams = Streams()
    side = SideStream(torch.device("cuda", 0), streams)
    batch: Any = SimpleNamespace(used_on=lambda stream: streams.note("keep"))
    for _ in range(4):
        side.hand_over(batch, "event")
    given = ["wait for the event", "keep"]
    waits = ["wait for step 0", *given, "wait for step 1"]
    assert [call for _, call in streams.calls] == [*given * 3, *waits]


def test_memory_is_kept_until_both_streams_are_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is recorded on the stream for all tensors on the GPU, and for no others."""
    kept: list[int] = []
    monkeypatch.setattr(Tensor, "record_stream", lambda t, stream: kept.append(len(t)))
    sizes = iter(range(2, 100))

    def there() -> Tensor:
        return elsewhere(torch.ones(next(sizes)))

    adjacency = Adjacency(there(), there(), categories={"kind": there()})
    block = Block({("_N", "_E", "_N"): adjacency}, {"_N": 4}, {"_N": 4}, {"_N": there()})
    seeds = {"seeds": torch.ones(1), "y": there(), "weight": torch.ones(1), "total": 1, "window": 1}
    batch = Batch(
        **seeds,  # type: ignore[arg-type]
        epoch=0,
        step=0,
        blocks=[block],
        x={"_N": there()},
        combined={},
        degree={},
        categories={"_N": {"kind": there()}},
        awaited=AwaitedRows(
            {"_N": {"features": there()}},
            *({"_N": there()} for _ in range(3)),
            receive=np.ones((2, 1), np.int64),
            send=np.ones((2, 1), np.int64),
        ),
    )
    stream: Any = None
    batch.used_on(stream)
    assert sorted(kept) == list(range(2, next(sizes)))
