"""A node that is about to go: its notice is answered with a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raygnn.checkpoint import save_requests
from raygnn.driver.ray import preemption
from raygnn.driver.ray.preemption import Preemption
from raygnn.runs.display import NullDisplay
from raygnn.worker import ray_nodes


class Notes(NullDisplay):
    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def note(self, text: str) -> None:
        self.said.append(text)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run whose third rank is on another node than the others, after a start elsewhere."""
    (tmp_path / "logs").mkdir()
    for rank, node in enumerate(("a", "a", "b")):
        lines = [{"node": n, "host": n, "world": 3, "rank": rank} for n in ("x", node)]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (tmp_path / "logs" / f"comm-rank-{rank}.jsonl").write_text(text)
    return tmp_path


def watch(
    run_dir: Path, going: dict[str, float | None], monkeypatch: pytest.MonkeyPatch, **cluster: Any
) -> tuple[Preemption, Notes]:
    monkeypatch.setattr(preemption, "_EVERY", 0.0)
    monkeypatch.setattr(ray_nodes, "draining", lambda: dict(going))
    show = Notes()
    there: Any = SimpleNamespace(**{"local": False, "answers": lambda: True, **cluster})
    return Preemption(run_dir, there, show), show


def asked(run_dir: Path) -> bool:
    names = save_requests.pending(run_dir)
    save_requests.answer(run_dir, names, saved=True)
    return bool(names)


def test_a_notice_is_answered_twice(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    going: dict[str, float | None] = {}
    looks, show = watch(run_dir, going, monkeypatch)
    looks.look()
    assert not asked(run_dir)
    going["other"] = 10.0  # where no rank of ours is
    going["x"] = 10.0  # nor in this start
    looks.look()
    assert not asked(run_dir)
    for left, wanted in ((90.0, True), (88.0, False), (20.0, False), (14.0, True), (12.0, False)):
        going["a"] = left
        looks.look()
        assert asked(run_dir) is wanted, left
    assert show.said == ["the node of rank 0, 1 is to go in 90 s: saving a checkpoint"]
    going["b"] = None
    looks.look()
    assert asked(run_dir)
    assert show.said[1:] == ["the node of rank 2 is to go soon: saving a checkpoint"]


def test_our_own_ray_is_not_preempted(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks, show = watch(run_dir, {"a": 5.0}, monkeypatch, local=True)
    looks.look()
    assert not asked(run_dir)
    assert show.said == []


def test_a_ray_that_does_not_answer_is_not_asked(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call would return after a minute, when Ray has ended this process."""
    looks, _ = watch(run_dir, {"a": 5.0}, monkeypatch, answers=lambda: False)
    looks.look()
    assert not asked(run_dir)


@pytest.mark.usefixtures("shared_ray")
def test_what_ray_tells() -> None:
    assert ray_nodes.draining() == {}
