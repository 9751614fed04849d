"""Steps that go round Lightning's dispatch are those of Lightning's own loop, to the bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from raygnn import compat
from tests.support.small_jobs import JobFactory, losses, selected, train_on_ranks

OWN = "tests.support.own_steps"

JOBS: dict[str, dict[str, Any]] = {
    "a schedule": {"train": {"optimizer": "sgd", "clip": 0.01, "schedule": {"kind": "cosine"}}},
    "a window of one batch at the end": {"train": {"accumulate": 3}, "model": {"norm": "batch"}},
    "mixed precision": {"precision": "bf16-mixed"},
    "a plateau": {"train": {"schedule": {"kind": "plateau", "patience": 1}, "lr": 0.5}},
    "hooks of the task": {"task": {"kind": f"{OWN}:Hooked", "like": "node_classification"}},
    "an epoch that ends early": {
        "task": {"kind": f"{OWN}:Hooked", "like": "node_classification", "args": {"skip": 2}}
    },
    "a step of the task's own": {"task": {"kind": f"{OWN}:Steps", "like": "node_classification"}},
    "clipping of the task's own": {
        "task": {"kind": f"{OWN}:Clips", "like": "node_classification"},
        "precision": "bf16-mixed",
    },
    "clipping that the task asks for": {
        "task": {"kind": f"{OWN}:Clips", "like": "node_classification"},
        "train": {"clip": 0.1},
    },
    "a step without gradients": {
        "task": {"kind": f"{OWN}:StepsWithout", "like": "node_classification"}
    },
    "sharded": {"comm": {"shard": "optimizer"}, "train": {"accumulate": 2}},
}


def lightnings_own(trainer: Any) -> None:
    """Stand in for `compat.lean_steps` and keep Lightning's own loop, without its broadcast of
    SIGTERM."""
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None


@pytest.mark.parametrize("name", JOBS)
def test_hooks_meet_what_they_meet_in_lightnings_own_loop(
    name: str, make_job: JobFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order and arguments of hooks, the loops' counts, logged values, losses and weights are
    equal."""
    found = []
    for kind in ("lean", "own"):
        if kind == "own":
            monkeypatch.setattr(compat, "lean_steps", lightnings_own)
        (tmp_path / kind).mkdir()
        sections = dict(JOBS[name])
        callbacks = {f"{OWN}:Witness": {"place": str(tmp_path / kind)}}
        sections["train"] = {"epochs": 2, **sections.get("train", {}), "callbacks": callbacks}
        run = train_on_ranks(make_job(name=kind, **sections))
        met = [json.loads((tmp_path / kind / f"rank-{rank}").read_text()) for rank in (0, 1)]
        found.append((met, losses(run).tolist(), selected(run)))
    (lean, lean_losses, lean_weights), (own, own_losses, own_weights) = found
    for rank in (0, 1):
        assert len(lean[rank]) > 20
        for one, other in zip(lean[rank], own[rank], strict=True):
            assert one == other
    assert lean_losses == own_losses
    assert all(torch.equal(lean_weights[name], own_weights[name]) for name in own_weights)
