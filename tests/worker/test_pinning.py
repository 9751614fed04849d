"""Page-locked batches: which tensors, in which thread, for which device.

Memory is pinned by CUDA alone; without it `Tensor.pin_memory` is stood in for by a copy.
"""

from __future__ import annotations

import contextlib
import json
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from raygnn.config.load import load_config
from raygnn.worker import rank_setup
from raygnn.worker.comm.guard import Guard
from raygnn.worker.rank import Rank
from tests.support.small_jobs import job, losses, train_on_ranks
from tests.worker.test_graph_tasks import dataset
from tests.worker.test_graph_tasks import make as graph_job

GPU = torch.device("cuda", 1)


@pytest.mark.parametrize(("device", "expected"), [(GPU, GPU), (torch.device("cpu"), None)])
def test_where_it_is_done(
    device: torch.device, expected: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(rank_setup, "SideStream", lambda device: device)
    rank: Any = SimpleNamespace(
        config=load_config(job(tmp_path)),
        runtime=SimpleNamespace(device=device),
        ranks=SimpleNamespace(alarm=lambda: None),
    )
    maker: Any = SimpleNamespace(plan=SimpleNamespace(steps_per_epoch=1, batches_until=int))
    loader = Rank.loader(rank, maker)
    assert (loader.pin, loader.side) == (expected, expected)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return [t for inner in value.values() for t in _tensors(inner)]
    if isinstance(value, (list, tuple)):
        return [t for inner in value for t in _tensors(inner)]
    return _tensors(vars(value)) if hasattr(value, "__dict__") else []


@pytest.mark.parametrize(
    "sections",
    [
        {"model": {"kind": "gcn"}},
        {"model": {"kind": "gat", "input_dropout": 0.1}, "sampling": {"prefetch": 0}},
        pytest.param(
            {"graph": {**dataset(num=40), "val": 0.0, "test": 0.0}, "sampling": {"batch_size": 8}},
            marks=pytest.mark.dgl,
        ),
    ],
    ids=["nodes", "not ahead", "graphs"],
)
def test_every_tensor_of_a_batch_is_pinned_where_it_is_made(
    sections: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pinned: set[int] = set()
    devices: list[Any] = []
    threads: set[str] = set()

    def pin(tensor: Tensor) -> Tensor:
        threads.add(threading.current_thread().name)
        copy = tensor.clone()
        pinned.add(id(copy))
        alive.append(copy)
        return copy

    alive: list[Tensor] = []

    @contextlib.contextmanager
    def device(index: Any) -> Any:
        devices.append(index)
        yield

    begin, loader = Guard.on_train_batch_start, Rank.loader

    def noting(self: Guard, trainer: Any, module: Any, batch: Any, number: int) -> None:
        values = {name: value for name, value in vars(batch).items() if name != "seeds"}
        bare = [t for t in _tensors(values) if id(t) not in pinned]
        said = {"bare": len(bare), "all": len(pinned), "threads": sorted(threads)}
        (tmp_path / "said").write_text(json.dumps({**said, "devices": len(set(devices))}))
        begin(self, trainer, module, batch, number)

    plain = _losses(tmp_path, "plain", sections)
    monkeypatch.setattr(Tensor, "pin_memory", pin)
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(Rank, "loader", lambda self, maker: replace(loader(self, maker), pin=GPU))
    monkeypatch.setattr(Guard, "on_train_batch_start", noting)
    assert _losses(tmp_path, "pinned", sections) == plain
    said = json.loads((tmp_path / "said").read_text())
    ahead = sections.get("sampling", {}).get("prefetch", 2) > 0
    assert said["bare"] == 0 < said["all"]
    assert said["threads"] == ["raygnn-prefetch" if ahead else "MainThread"]
    assert said["devices"] == 1


def _losses(storage: Path, name: str, sections: dict[str, Any]) -> list[float]:
    more = {"name": name, "train": {"max_steps": 2}, "cluster": {"workers": 1}, **sections}
    of_graphs = "graph" in sections
    config = graph_job(storage, **more) if of_graphs else load_config(job(storage, **more))
    return list(losses(train_on_ranks(config)))
