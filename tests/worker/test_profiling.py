"""``--profile``: a trace of every rank that a viewer reads, and a table of operators."""

from __future__ import annotations

import gzip
import json
from typing import Any

import pytest

from raygnn.worker.job import Job
from tests import small_jobs
from tests.small_jobs import JobFactory, train_on_ranks


@pytest.mark.parametrize("steps", [2, 50])  # fewer than the run has, and more
def test_a_profile(steps: int, make_job: JobFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        small_jobs,
        "Job",
        lambda *args, **more: Job(*args, **more, profile=steps),  # as `raygnn train` makes it
    )
    run = train_on_ranks(make_job())
    recorded = min(steps, 8 - 3)
    for rank in (0, 1):
        with gzip.open(run.path / "profile" / f"rank-{rank}.json.gz") as file:
            events: list[dict[str, Any]] = json.load(file)["traceEvents"]
        names = [event["name"] for event in events if event.get("cat") == "user_annotation"]
        assert [names.count(n) for n in ("forward", "backward", "optimizer")] == [recorded] * 3
        assert "aten::" in (run.path / "profile" / f"rank-{rank}.txt").read_text()
    assert run.summary["operators"]["steps"] == recorded
    operators = run.summary["operators"]["top"]
    assert operators == sorted(operators, key=lambda row: -row["self_ms"])
    assert all(row["calls"] > 0 and row["total_ms"] >= 0 for row in operators)
    assert len(list((run.path / "profile").iterdir())) == 4


def test_none_unless_asked_for(make_job: JobFactory) -> None:
    run = train_on_ranks(make_job(train={"max_steps": 1}))
    assert not (run.path / "profile").exists()
    assert run.summary["operators"] is None
