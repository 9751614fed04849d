"""What is told of ranks that have not made their first step."""

from __future__ import annotations

import json
from pathlib import Path

from raygnn.driver.startup_progress import Coming, told
from raygnn.runs.diagnose.state_file import STATE, Place, Start, State, file_of

COMMAND = 1000.0


def write(logs: Path, rank: int, phase: str, command: float = COMMAND) -> None:
    logs.mkdir(exist_ok=True)
    (logs / "comm-rank-0.jsonl").write_text(json.dumps({"world": 3, "attempt": 1}) + "\n")
    start = Start(1, rank, 3, 1, command, command, "host")
    file_of(logs, rank, STATE).write_bytes(State(start, Place(phase)).pack())


def test_the_least_far_are_told(tmp_path: Path) -> None:
    heard: list[str] = []
    before = ["starting Ray"]
    logs = tmp_path / "logs"
    write(logs, 0, "setup")
    write(logs, 1, "staging")
    write(logs, 2, "imports", command=500.0)  # of an earlier command
    Coming(tmp_path, COMMAND, heard.append, lambda: before[0]).look()
    assert heard == ["staging parts, 1 of 2 workers"]


def test_before_there_are_ranks_it_is_told_what_ray_does(tmp_path: Path) -> None:
    heard: list[str] = []
    before = ["starting Ray"]
    coming = Coming(tmp_path, COMMAND, heard.append, lambda: before[0])
    coming.look()
    assert heard == ["starting Ray"]
    write(tmp_path / "logs", 0, "imports")
    file_of(tmp_path / "logs", 0, STATE).write_bytes(b"torn")
    before[0] = ""
    coming._next = 0.0
    coming.look()
    assert heard == ["starting Ray"]


def test_a_phase_of_a_step_is_the_first_batch() -> None:
    assert told(["forward", "batch"]) == "preparing the first batch, 2 of 2 workers"
    assert told(["", "batch"]) == "starting, 1 of 2 workers"
    assert told([]) == ""
