"""Steps as they are on a GPU: the host waits for it in none, and numbers are added in one order.

Batches go through forward and backward pass as tensors of torch's device "meta", which have no
values, so that whatever asks for one fails; and through operations that are watched for those that
add up several numbers in no certain order on a GPU.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from raygnn import compat
from raygnn.config.load import load_config
from raygnn.config.schema import Config
from raygnn.models.registry import build_model
from raygnn.sampling.batch import Share
from raygnn.tasks.lightning_modules import LossWindow, TaskModule
from raygnn.worker.comm import guard as guard_module
from tests.models.test_networks import (
    FAMILIES,
    HETEROGENEOUS,
    HOMOGENEOUS,
    names,
    random_blocks,
    random_inputs,
    read_model,
)
from tests.support.small_jobs import job, train_on_ranks
from tests.worker import test_edge_tasks, test_graph_tasks, test_multitask, test_relations

META = torch.device("meta")
LINKS = test_edge_tasks.LINKS


@pytest.mark.parametrize("schema", [HOMOGENEOUS, HETEROGENEOUS], ids=["plain", "typed"])
@pytest.mark.parametrize("family", FAMILIES, **names)
def test_families(family: dict[str, Any], schema: Any) -> None:
    """Forward, backward, and whether the step is to be made."""
    config = read_model(**{"hidden": 4, "layers": 2, "dropout": 0.3, "norm": "none", **family})
    model = build_model(config, schema).to(META)
    blocks = random_blocks(schema, 2)
    x, degree = random_inputs(schema, blocks)
    x = {name: value.to(META).float() for name, value in x.items()}
    degree = {name: value.to(META) for name, value in degree.items()}
    model([block.to(META) for block in blocks], x, degree).square().sum().backward()
    assert guard_module.not_finite([p.grad for p in model.parameters()]).device == META


class InOrder(TorchDispatchMode):
    """Refuses operations that add numbers to one place in the order in which a GPU produces
    them."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func._schema.name.removeprefix("aten::").rstrip("_")
        if name in ("index_add", "scatter_add", "index_put") and args[0].is_floating_point():
            index = args[1] if name == "index_put" else [args[2]]
            places = torch.stack(torch.broadcast_tensors(*(i for i in index if i is not None)))
            if name != "scatter_add":
                places = places.flatten(1)
                assert places.unique(dim=1).shape == places.shape, func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("schema", [HOMOGENEOUS, HETEROGENEOUS], ids=["plain", "typed"])
@pytest.mark.parametrize("family", [f for f in FAMILIES if f.get("aggregator") != "max"], **names)
def test_families_add_in_one_order(family: dict[str, Any], schema: Any) -> None:
    """Maxima do not: on a GPU torch has a single implementation of their gradient."""
    config = read_model(**{"hidden": 4, "layers": 2, "norm": "none", **family})
    model = build_model(config, schema).double()
    blocks = random_blocks(schema, 2)
    with InOrder():
        model(blocks, *random_inputs(schema, blocks)).square().sum().backward()


def nodes(path: Path, **sections: Any) -> Config:
    return load_config(job(path, **{"model": {"kind": "sage"}, **sections}))


def edges(path: Path, **sections: Any) -> Config:
    return test_edge_tasks.config_of(path, "edges", model={"hidden": 8}, **sections)


def links(path: Path, **task: Any) -> Config:
    decoder = task.pop("decoder")
    model = {"hidden": 8, "decoder": decoder}
    return test_edge_tasks.config_of(path, "links", task={**LINKS, **task}, model=model)


def graphs(path: Path, **sections: Any) -> Config:
    return test_graph_tasks.make(path, **sections)


def relations(path: Path) -> Config:
    return test_relations.config(path, model={"bases": 4})


CLASSES = {"kind": "edge_classification", "etype": "likes", "reverse": "liked_by"}
JOBS: dict[str, Callable[[Path], Config]] = {
    "classes": nodes,
    "focal loss": lambda path: nodes(path, task={"loss": "focal", "class_weights": "balanced"}),
    "numbers": lambda path: edges(path, task=test_multitask.PRICE),
    "edges": lambda path: edges(path, task=CLASSES),
    "softmax": lambda path: links(path, negatives={"number": 40}, decoder="distmult"),
    "bce": lambda path: links(
        path, negatives={"kind": "degree", "ends": "target"}, loss="bce", decoder="mlp"
    ),
    "margin": lambda path: links(
        path, negatives={"kind": "in_batch"}, loss="margin", decoder="complex"
    ),
    "self adversarial": lambda path: links(path, loss="self_adversarial", decoder="rotate"),
    "several tasks": test_multitask.several,
    "graphs": graphs,
    "padded graphs": lambda path: graphs(path, sampling={"batch_size": 7}),
    "relations": relations,
}


NEED_DGL = ("graphs", "padded graphs", "relations")  # which makes their graphs


@pytest.mark.long
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.dgl if n in NEED_DGL else ()) for n in JOBS]
)
def test_tasks(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Neither the training step of a job's batches nor its backward pass waits for the GPU."""
    config = JOBS[name](tmp_path).to_dict()
    config["cluster"]["workers"], config["train"]["max_steps"] = 1, 1
    move = TaskModule.transfer_batch_to_device

    def moved(self: TaskModule, batch: Share, device: torch.device, number: int) -> Share:
        twin = compat.with_model(self, copy.deepcopy(self.model).to(META))
        twin.window = LossWindow(getattr(self, "weights", None))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "autocast", lambda *_, **options: nullcontext())  # knows no "meta"
            loss = twin.training_step(batch.to(META), 0)
            loss.backward()
        with InOrder():
            other = compat.with_model(self, copy.deepcopy(self.model))
            other.window = twin.window
            other.training_step(batch, 0).backward()
        assert loss.device == META
        (tmp_path / "seen").touch()
        return move(self, batch, device, number)

    monkeypatch.setattr(TaskModule, "transfer_batch_to_device", moved)
    train_on_ranks(load_config(config))
    assert (tmp_path / "seen").exists()
