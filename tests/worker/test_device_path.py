"""Whole trainings whose batches are made as on a GPU, by Triton's interpreter on the CPU."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from raygnn.config.load import load_config
from raygnn.errors import ConfigError
from raygnn.sampling.batch import Adjacency, Batch, Block
from raygnn.sampling.device import device_kernels
from raygnn.sampling.device.device_features import DeviceFeatures
from raygnn.sampling.device.device_sampler import DeviceSampler
from raygnn.sampling.exchange import Exchange, World
from raygnn.sampling.features import FeatureStore
from raygnn.sampling.loader import BatchLoader, BatchMaker, SideStream
from raygnn.sampling.sampler import NeighborSampler
from raygnn.worker.planes import device_path
from raygnn.worker.planes.device_path import Room
from raygnn.worker.rank import Rank
from tests.elsewhere import elsewhere
from tests.small_jobs import job, losses, train_on_ranks

GAT = {"model": {"kind": "gat", "hidden": 8}, "cluster": {"workers": 2}}


@pytest.fixture
def as_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU is taken for a GPU with a lot of memory, and so are its streams."""
    monkeypatch.setattr(device_path, "_free", lambda device: 1 << 40)
    monkeypatch.setattr("raygnn.config.rules._resources", lambda config: [])  # without GPUs
    monkeypatch.setattr(Rank, "_side", lambda self: SideStream(torch.device("cpu"), torch.cpu))


def trained(storage: Path, name: str, sampling: dict[str, Any], **sections: Any) -> Any:
    sections = {**GAT, **sections}
    sections["train"] = {"max_steps": 4, **sections.get("train", {})}
    config = job(storage, name=name, **sections)
    config["sampling"] = {**config.get("sampling", {}), **sampling}
    config["cluster"] = {**config["cluster"], "gpus_per_worker": 0}
    return list(losses(train_on_ranks(load_config(config))))


def used(monkeypatch: pytest.MonkeyPatch, sampler: type, store: type | None) -> None:
    """A batch made of anything else fails."""
    make = BatchMaker.__call__

    def checked(self: BatchMaker, epoch: int, step: int) -> Any:
        assert type(self.sampler) is sampler
        assert store is None or type(self.store) is store
        return make(self, epoch, step)

    monkeypatch.setattr(BatchMaker, "__call__", checked)


@pytest.mark.parametrize(
    ("sampling", "workers", "precision", "makers"),
    [
        ({}, 1, "fp32", (DeviceSampler, DeviceFeatures)),
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
    room = device_path.Room("gpu", "gpu", 0.3)
    monkeypatch.setattr(device_path.Room, "of", lambda *sizes: room)
    assert trained(tmp_path, "device", sampling, **sections) == plain


@pytest.mark.parametrize(
    ("spoilt", "kept"),
    [
        ("draw_rows", (NeighborSampler, DeviceFeatures)),
        ("gather", (DeviceSampler, FeatureStore)),
    ],
)
def test_what_fails_or_differs_stays_with_the_cpu(
    spoilt: str,
    kept: tuple[type, type],
    as_a_gpu: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """On all ranks, where only one of them sees it; and is an error where the GPU is wanted."""
    call = getattr(device_kernels, spoilt)
    room = device_path.Room("gpu", "pinned", 0.3)
    monkeypatch.setattr(device_path.Room, "of", lambda *sizes: room)

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


def test_room() -> None:
    assert Room.of(100, 0, 10, 30) == Room("gpu", "gpu", 1.0)
    assert Room.of(100, 80, 20, 40) == Room("gpu", "pinned", 0.75)
    assert Room.of(100, 79, 20, 40) == Room("gpu", "cpu", 0.75)
    assert Room.of(100, 52, 26, 40) == Room("pinned", "gpu", 1.0)
    assert Room.of(100, 51, 26, 40) == Room("cpu", "gpu", 1.0)
    assert Room.of(0, 82, 1, 40) == Room("pinned", "pinned", 0.0)
    assert Room.of(0, 80, 1, 40) == Room("pinned", "cpu", 0.0)
    assert Room.of(0, 0, 0, 0) == Room("gpu", "gpu", 0.0)


@pytest.mark.parametrize(
    ("sampling", "sections", "message"),
    [
        ({"sample_on": "gpu"}, {"cluster": {"gpus_per_worker": 0}}, "sample_on is gpu, but"),
        ({"features_on": "pinned"}, {"cluster": {"gpus_per_worker": 0}}, "is pinned, but"),
        ({"method": "labor"}, {}, "sampling.method is labor"),
        ({"edge_weight": "w"}, {}, "sampling.edge_weight is set"),
        ({"time": {"edges": "t", "seeds": "t"}}, {}, "sampling.time is set"),
        ({"topology": "partitioned"}, {}, "sampling.topology is partitioned"),
        ({"fanout": [5, 1025]}, {}, "a fanout is above 1,024"),
        ({}, {"model": {"edge_features": ["w"]}}, "the model reads edges"),
        ({}, {"task": {"kind": "link_prediction"}}, r"task\.exclude"),
    ],
)
def test_what_a_gpu_does_not_draw(
    sampling: dict[str, Any], sections: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with_gpu = {**sections, "cluster": {"gpus_per_worker": 1, **sections.get("cluster", {})}}
    config = job(tmp_path, **with_gpu)
    config["sampling"] |= {"sample_on": "gpu", **sampling}
    with pytest.raises(ConfigError, match=message):
        load_config(config)
    config["sampling"] |= {"sample_on": "auto", "features_on": "auto"}
    load_config(config)


class Streams:
    """Stands in for `torch.cuda`, and notes what is asked of it, by which thread."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.step = 0

    def note(self, call: str) -> None:
        self.calls.append((threading.current_thread().name, call))

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
        def event() -> Any:
            self.step, step = self.step + 1, self.step
            return SimpleNamespace(synchronize=lambda: self.note(f"wait for step {step}"))

        wait = lambda event: self.note(f"wait for the {event}")  # noqa: E731
        return SimpleNamespace(wait_event=wait, record_event=event)


def test_the_training_stream_waits_and_no_thread_does() -> None:
    """A batch is made and copied on the side stream; its memory is kept for the other one."""
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

    facts = {"__call__": staticmethod(make), "exchange": Exchange(World(0, 1))}
    maker: Any = type("Maker", (), facts)()
    maker.plan = SimpleNamespace(steps_per_epoch=1, state={})
    loader = BatchLoader(maker, prefetch=1, limit=1, side=SideStream(gpu, streams))
    assert len(list(loader)) == 1
    side = ["enter", "make", "copy to cuda:0", "record", "leave"]
    assert [c for t, c in streams.calls if t == "raygnn-prefetch"] == side
    assert [c for t, c in streams.calls if t == "MainThread"] == ["wait for the event", "keep"]


def test_the_host_is_three_steps_ahead_at_most() -> None:
    """So that what it hands over does not fill the GPU's memory."""
    streams = Streams()
    side = SideStream(torch.device("cuda", 0), streams)
    batch: Any = SimpleNamespace(used_on=lambda stream: streams.note("keep"))
    for _ in range(4):
        side.hand_over(batch, "event")
    given = ["wait for the event", "keep"]
    waits = ["wait for step 0", *given, "wait for step 1"]
    assert [call for _, call in streams.calls] == [*given * 3, *waits]


def test_memory_is_kept_until_both_streams_are_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of all tensors on the GPU, and of no other."""
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
    )
    stream: Any = None
    batch.used_on(stream)
    assert sorted(kept) == list(range(2, next(sizes)))
