"""Private names of Ray, Lightning and torch: what happens without them."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.nn.parallel import DistributedDataParallel

from raygnn import compat
from raygnn.compat import fallbacks, torch_names
from tests.support.commands import Command
from tests.support.postgres import free_port
from tests.support.small_jobs import JobFactory, job, losses, selected, train_on_ranks


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    """Clear the cache of looked-up names before and after each test."""
    fallbacks._unusable.cache_clear()
    yield
    fallbacks._unusable.cache_clear()


def norm_by(*names: str) -> Callable[[float], float]:
    @compat.private(*names, otherwise=lambda x: -x, loses="the sign")
    def keep(x: float) -> float:
        return x

    fallbacks._COMFORTS.pop()
    return keep


@pytest.mark.parametrize(
    ("name", "used"),
    [
        ("math:sqrt", True),
        ("json:dumps(obj, indent)", True),
        ("json:dumps(obj, width)", True),  # it accepts any, by **kw
        ("shutil:which(cmd, mode, path)", True),
        ("shutil:which(cmd, place)", False),  # another parameter
        ("shutil:which(mode)", False),  # a required argument is not passed
        ("shutil:nowhere", False),
        ("no_such_package.inner:name", False),
        ("torch<999", True),
        ("torch<2.3", False),
    ],
)
def test_a_name_that_is_missing_or_takes_other_arguments_is_not_used(name: str, used: bool) -> None:
    assert norm_by(name)(2.0) == (2.0 if used else -2.0)


def test_a_store_listens_on_its_own_address_alone() -> None:
    """With every torch that is supported, also those whose default store accepts no socket."""
    port = free_port()
    store = torch_names._store("127.0.0.2", port, is_master=True, wait_for_workers=False)
    other = torch.distributed.TCPStore("127.0.0.2", port, is_master=False, wait_for_workers=False)
    other.set("key", "value")
    assert store.get("key") == b"value"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), 10)


def test_public_names_only(monkeypatch: pytest.MonkeyPatch) -> None:
    keep = norm_by("math:sqrt")
    assert compat.missing_comforts() == []
    monkeypatch.setenv(compat.PLAIN, "1")
    assert keep(2.0) == -2.0
    lost = compat.missing_comforts()
    assert len(lost) > 15
    assert {why for why, _ in lost} == {"RAYGNN_PLAIN is set"}


def test_a_changed_signature_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DistributedDataParallel, "_check_reducer_finalized", lambda self, more: 1)
    ((why, loses),) = compat.missing_comforts()
    assert why.endswith("_check_reducer_finalized takes other arguments than (self)")
    assert "without a gradient" in loses
    compat.check_reduced(None)  # would fail


def test_public_names_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    index, start = torch.tensor([0, 2, 1, 1]), torch.tensor([0, 1, 3])
    bag, rows, grad = torch.tensor([0, 1, 1, 2]), torch.randn(3, 4), torch.randn(3, 4)

    def results() -> list[torch.Tensor]:
        return [compat.weight_gradient_of_bags(grad, rows, index, start, bag)]

    private = results()
    monkeypatch.setenv(compat.PLAIN, "1")
    for ours, public in zip(private, results(), strict=True):
        torch.testing.assert_close(public, ours)


def test_ranks_train_the_same_with_public_names(
    make_job: JobFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for name in ("private", "public"):
        if name == "public":
            monkeypatch.setenv(compat.PLAIN, "1")
        sections: dict[str, Any] = {"train": {"epochs": 2, "clip": 0.5}, "model": {"norm": "batch"}}
        run = train_on_ranks(make_job(name=name, **sections))
        found.append((losses(run), selected(run)))
    (ours, weights), (public, others) = found
    torch.testing.assert_close(torch.as_tensor(public), torch.as_tensor(ours))
    for name in weights:
        torch.testing.assert_close(others[name], weights[name], rtol=1e-4, atol=1e-5)


@pytest.mark.system
@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, [1, 2]])
def test_a_command_with_public_names(workers: Any, tmp_path: Path) -> None:
    """The command trains, and ends without a process or directory left."""
    settings = job(tmp_path, train={"epochs": 2}, cluster={"workers": workers, "num_cpus": 2})
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(settings))
    command = Command(["train", "job.yaml"], tmp_path, **{compat.PLAIN: "1"})
    code, out, err = command.finish(300)
    assert code == 0, out + err
    assert "status         done" in out
    assert command.left_behind() == []


_ACTORS = """
import ray

from raygnn import compat
from raygnn.compat import fallbacks, torch_names

ray.init(num_cpus=1, include_dashboard=False, logging_level="ERROR", log_to_driver=False)


@ray.remote(num_cpus=0)
class Child:
    def lives(self):
        return True


@ray.remote(num_cpus=0)
class Parent:
    def __init__(self):
        self.child = Child.remote()

    def lives(self):
        return ray.get(self.child.lives.remote(), timeout=60)

    def kill(self):
        names = [each["ActorClassName"] for each in compat.list_actors()]
        compat.kill_actors("Child")
        return names


kills, stays = Parent.remote(), Parent.remote()
assert ray.get([kills.lives.remote(), stays.lives.remote()], timeout=60) == [True, True]
assert ray.get(kills.kill.remote(), timeout=60) == ["Child"]
try:
    ray.get(kills.lives.remote(), timeout=60)
    raise AssertionError("the child lives")
except ray.exceptions.RayTaskError:
    print(ray.get(stays.lives.remote(), timeout=60), len(compat.list_actors()))
"""


@pytest.mark.system
@pytest.mark.comfort
def test_an_actor_kills_only_what_it_started() -> None:
    """As trials of a search do, whose actors are of one job."""
    argv = [sys.executable, "-c", _ACTORS]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300)
    assert (done.stdout, done.returncode) == ("True 4\n", 0), done.stderr
