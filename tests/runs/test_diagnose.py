"""Diagnosing a run: the judge on made-up evidence, and the reading of what lies on disk."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import raygnn
from raygnn.errors import DataError, InputError
from raygnn.runs.diagnose.causes import FROZEN, REMEDIES, MemoryKill, crashed_at, frames
from raygnn.runs.diagnose.evidence import Evidence, Traces
from raygnn.runs.diagnose.judge import Diagnosis, judge, show
from raygnn.runs.diagnose.rank_reports import first_difference
from raygnn.runs.diagnose.state_file import SIZE, State, read_state
from raygnn.runs.display import Display
from raygnn.runs.run import open_run
from raygnn.runs.run_directory import RunDir

NOW = 1_000_000.0  # when the made-up runs went down
USER = {"file": "/home/me/my_model.py", "line": 7, "function": "forward", "whose": "user"}
SLEEP = {"file": "/usr/lib/python3.11/x.py", "line": 1, "function": "f", "whose": "library"}
BACKWARD = {
    "file": "/v/site-packages/torch/autograd/graph.py",
    "line": 9,
    "function": "_engine_run_backward",
    "whose": "library",
}
TRAIN = {
    "file": "/src/raygnn/worker/rank.py", "line": 3, "function": "run", "whose": "raygnn"
}  # fmt: skip
TRACE = """Traceback (most recent call last):
  File "/src/raygnn/worker/main.py", line 70, in _run
  File "/v/lib/python3.11/site-packages/lightning/pytorch/trainer/trainer.py", line 5, in fit
{ours}  File "/home/me/my_model.py", line 7, in forward
    raise ValueError
ValueError: {what}
"""
PREPARES = '  File "/src/raygnn/sampling/loader.py", line 97, in _run\n'
# messages of Ray 2.60 with a low threshold of its memory monitor
MONITOR = (
    "1 worker(s) were killed due to the node running low on memory. Memory on the node (IP: "
    "10.0.0.7, ID: 26dd0d12cfb10a53257a20083e7eb63d) was 22.71GB used / 23.54GB limit (0.964)\n"
    "OOM kill reason: Memory usage 24384000000B exceeded threshold of 24012600000B (95.0% of "
    "25276502016B limit)\nObject store memory usage: [- objects spillable: 1\n- bytes spillable: "
    "4985\n(global lru) bytes evicted: 0]\nRay killed 1 worker(s) based on the killing policy\n"
    "Considered workers: [\nSelected to kill: (Task: job ID=01000000, lease ID=0100000032e6068b, "
    "task name={task}, required resources={{}}, pid={pid}, actual memory used=3.05GB, worker "
    "ID=41f7447ef3cb94)\n]\nTop 10 memory users: PID\tMEM(GB)\tCOMMAND\n"
    "26219\t14.57\tpython other.py\n11\t3.05\tray::RayTrainWorker\nRefer to the documentation"
)
RESET = "RuntimeError: [gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer"
TIMEOUT = "RuntimeError: [gloo/transport] Timed out waiting 8000ms for recv operation to complete"


def state(rank: int, *, ago: float = 0.0, phase: str = "forward", **more: Any) -> State:
    attempt = more.get("attempt", 1)
    start = attempt, rank, 2, 10 + rank, NOW - 100, NOW - 90, f"node{rank}"
    memory = 2**30, more.get("used", 2**32), 2**33
    return State(*start, phase, 1, 6, NOW - ago, NOW - ago, *memory)


def box(rank: int, *frames: dict[str, Any], **more: Any) -> dict[str, Any]:
    thread = {"name": "T", "role": "training", "frames": list(frames)}
    found = {"rank": rank, "attempt": 1, "time": NOW, "reason": "rank 1 recorded a failure"}
    return {**found, "host": f"node{rank}", "threads": [thread] if frames else [],
            "collectives": [], "oom_kills": 0, **more}  # fmt: skip


def failure(rank: int, what: str, *, ours: str = "", ago: float = 0.0, **more: Any) -> Any:
    trace = TRACE.format(ours=ours, what=what)
    return {"rank": rank, "time": NOW - ago, "what": what, "trace": trace, "kind": "", **more}


def entry(seq: int, op: str = "gloo:all_reduce", size: int = 4, **more: Any) -> dict[str, Any]:
    tensors = {"sizes": [[size]], "dtypes": [more.pop("dtype", "Float")]}
    return {"group": "0", "seq": seq, "op": op, "inputs": tensors, "outputs": tensors,
            "created": NOW - 20 + seq, "pending": False, **more}  # fmt: skip


def died(text: str) -> dict[str, Any]:
    worker = {"type": "WorkerHealthCheckFailedError", "text": text, "said": False}
    return {"error": "a worker died", "workers": {"1": worker}, "oom_kills": 0}


def monitored(task: str, pid: int) -> dict[str, Any]:
    text = MONITOR.format(task=task, pid=pid)
    ray = {"type": "OutOfMemoryError", "text": text}
    return {"error": "x", "ray": ray, "workers": {}, "oom_kills": 0}


RAYS_WORDS = (
    "A worker health check failed. The actor is dead because its worker process has died. Worker "
    "exit detail: Worker unexpectedly exits with a connection error code 2. End of file. Some "
    "common causes include: (1) the process was killed by the OOM killer due to high memory usage"
)


def run(*ranks: Traces, status: str = "failed", **more: Any) -> Evidence:
    return Evidence(run="/runs/a", status=status, ranks=ranks, now=NOW + 3600, **more)


def left(rank: int, what: str, **more: Any) -> Traces:
    """Build the files of a rank that raised an error."""
    return Traces(rank, state(rank), box(rank), failure(rank, what, **more))


CALLED = MONITOR.format(task="Control.update", pid=7)
ALIVE = Traces(0, state(0), box(0, BACKWARD, TRAIN, collectives=[entry(5, pending=True)]))
RESET_0 = left(0, RESET)
TIMED_OUT_0 = Traces(
    0, state(0), box(0, collectives=[entry(5, pending=True)]), failure(0, TIMEOUT)
)  # fmt: skip
FROZEN_1 = {
    **failure(1, "rank 1 sent no heartbeat for 8 s", kind=FROZEN),
    "trace": "",
    "where": "node1, pid 11, phase forward",
}
ALARM = "rank 1 could not prepare its batch:"
LOST = {
    "error": "",
    "workers": {"0": {"type": "TrainingError", "text": "", "said": True}},
    "lost": {"1": {"host": "node1", "why": "it takes no connection"}},
}


def raised(what: str, **more: Any) -> Evidence:
    return run(ALIVE, left(1, what, **more))


def crashed(text: str) -> Evidence:
    return run(RESET_0, Traces(1, state(1), crash=f"7\nFatal Python error: {text}"))


SILENT = Traces(1, state(1, ago=0.5))
# evidence, then the cause's kind, its rank and its location
CASES: dict[str, tuple[Evidence, str, int | None, str]] = {
    "model": (raised("ValueError: no"), "model", 1, "my_model.py:7 in forward"),
    "data": (raised("KeyError: 3", ours=PREPARES), "data", 1, "my_model.py:7"),
    "consequence first": (
        run(left(0, RESET, ago=1.0), left(1, "ValueError: no")), "model", 1, "my_model.py"
    ),
    "guard": (
        raised("ranks differ: dtype of weight", kind="GuardError", blamed=0, where="step 0"),
        "ranks_differ", 0, "step 0",
    ),
    "guard, gradient": (
        raised("the gradient is not finite", kind="GuardError"), "not_finite", 1, ""
    ),
    "debug": (raised("RuntimeError: Detected mismatch between collectives"), "ranks_differ", 1, ""),
    "unused": (
        raised("RuntimeError: Expected to have finished reduction in the prior iteration"),
        "unused_parameter", 1, "",
    ),
    # the user's own check: its location is more helpful
    "the user says nan": (raised("RuntimeError: loss is nan", ours=""), "model", 1, ""),
    "memory": (raised("MemoryError: "), "memory", 1, ""),
    "cuda": (raised("OutOfMemoryError: CUDA out of memory. Tried to"), "memory", 1, ""),
    "storage": (raised("OSError: [Errno 28] No space left on device"), "storage", 1, ""),
    "storage, by torch": (raised("RuntimeError: [x] . unexpected pos 1 vs 2"), "storage", 1, ""),
    "input": (raised("the model does not take width", exit_code=2), "input", 1, ""),
    "killed": (run(RESET_0, SILENT, driver=died(RAYS_WORDS)), "died", 1, "node1, phase forward"),
    "killed, no word": (run(RESET_0, SILENT), "died", 1, "step 6"),
    "killed, memory full": (
        run(RESET_0, Traces(1, state(1, used=int(2**33 * 0.97))), driver=died(RAYS_WORDS)),
        "memory", 1, "",
    ),
    "killed by the kernel": (
        run(
            Traces(0, state(0), box(0, oom_kills=1, host="node1"), failure(0, RESET)),
            SILENT,
            driver=died(RAYS_WORDS),
        ),
        "memory", 1, "",
    ),
    "killed by Ray": (
        run(RESET_0, SILENT, driver=died("Task was killed due to the node running low on memory")),
        "memory", 1, "",
    ),
    "killed by Ray's monitor": (
        run(RESET_0, SILENT, driver=died(MONITOR.format(task="RayTrainWorker.poll", pid=11))),
        "memory", 1, "node1, phase forward",
    ),
    "killed by Ray's monitor, as Ray Train says": (
        run(ALIVE, SILENT, driver=monitored("RayTrainWorker.poll", 11)), "memory", 1, "10.0.0.7"
    ),
    "killed by Ray's monitor before any rank": (
        run(driver=monitored("TrainController.__init__", 26595), error="Ray Train failed: x"),
        "memory", None, "10.0.0.7",
    ),
    "a process that a rank called, killed by Ray's monitor": (
        run(Traces(0, state(0), box(0), failure(0, "it does not answer") | {"trace": CALLED})),
        "memory", None, "10.0.0.7",
    ),
    "node": (
        run(RESET_0, SILENT, driver=died("The actor died because its node has died.")),
        "node_lost", 1, "",
    ),
    "node, as the driver saw": (
        run(TIMED_OUT_0, Traces(1, state(1, ago=15.0)), driver=LOST), "node_lost", 1, "node1, phase"
    ),
    "node, and its rank met the end of the network, too": (
        run(TIMED_OUT_0, left(1, TIMEOUT), driver=LOST), "node_lost", 1, ""
    ),
    "node, after its rank's own failure": (
        replace(raised("ValueError: no"), driver=LOST), "model", 1, "my_model.py:7"
    ),
    "a process of Ray's, with which its ranks were killed": (
        run(RESET_0, SILENT, driver={**died(RAYS_WORDS), "error": "Ray's GCS …", "ray_died": True}),
        "ray_died", None, "",
    ),
    "crash": (
        crashed(
            'Segmentation fault\n\nCurrent thread 0x1 (most recent call first):\n'
            '  File "/v/site-packages/x/y.py", line 2 in g\n'
            '  File "/home/me/my_model.py", line 7 in forward\n\nThread 0x2:\n'
            '  File "/a.py", line 1 in b\n'
        ),
        "crash", 1, "my_model.py:7 in forward",
    ),
    "ended in a collective": (
        crashed(
            'Aborted\n\nThread 0x2 (most recent call first):\n'
            '  File "/a/threading.py", line 1 in wait\n\nThread 0x1 (most recent call first):\n'
            '  File "/v/site-packages/torch/distributed/c10d.py", line 2 in all_reduce\n'
            '  File "/home/me/my_model.py", line 7 in forward\n'
        ),
        "ranks_differ", 1, "my_model.py:7 in forward",
    ),
    "frozen": (run(TIMED_OUT_0, Traces(1, state(1, ago=8.0))), "frozen", 1, "phase forward"),
    "frozen, by the driver's word": (
        run(
            RESET_0,
            Traces(1, state(1, ago=8.0), failure=FROZEN_1),
            driver=died(RAYS_WORDS),  # which the driver ended
        ),
        "frozen", 1, "node1, pid 11, phase forward",
    ),
    "frozen, by Ray's word": (
        run(
            TIMED_OUT_0,
            Traces(1, state(1, ago=8.0)),
            driver={"error": "", "workers": {"1": {"type": "WorkerHealthCheckTimeoutError"}}},
        ),
        "frozen", 1, "",
    ),
    "stuck": (
        run(TIMED_OUT_0, Traces(1, state(1), box(1, SLEEP, USER, TRAIN, collectives=[entry(4)]))),
        "stuck", 1, "my_model.py:7",
    ),
    "slow in our code": (
        run(TIMED_OUT_0, Traces(1, state(1), box(1, SLEEP, TRAIN, collectives=[entry(4)]))),
        "timeout", 1, "rank.py",
    ),
    "another collective": (
        run(
            TIMED_OUT_0,
            Traces(
                1, state(1), box(1, BACKWARD, collectives=[entry(5, size=3, pending=True, at=USER)])
            ),
        ),
        "ranks_differ", 1, "my_model.py:7",
    ),
    "network": (
        run(TIMED_OUT_0, replace(TIMED_OUT_0, rank=1, failure=failure(1, TIMEOUT))),
        "timeout", None, "",
    ),
    "alarm alone": (
        run(left(0, f"{ALARM} KeyError"), Traces(1)), "data", 1, ""
    ),
    "alarm, and the culprit met the end of the others": (
        run(left(0, f"{ALARM} KeyError"), left(1, RESET)), "data", 1, ""
    ),
    "alarm for a collective": (  # the reason for its failure is unknown
        run(
            left(0, f"{ALARM} {TIMEOUT}"),
            Traces(1, state(1, ago=1.0), box(1), failure(1, TIMEOUT, ago=1.0)),
        ),
        "timeout", None, "",
    ),
    "the user's socket": (
        raised("OSError: socket: Connection reset by peer", ours=PREPARES, kind="OSError"),
        "data", 1, "my_model.py:7",
    ),
    "the user's socket, RuntimeError": (
        raised("RuntimeError: connection closed", kind="RuntimeError"), "model", 1, "my_model.py:7"
    ),
    "nothing began": (run(error="Ray Train failed: no"), "setup", None, ""),
    "nothing known": (run(Traces(0, state(0))), "unknown", None, ""),
    "done": (run(status="done"), "none", None, ""),
    "interrupted": (run(ALIVE, status="interrupted"), "interrupted", None, ""),
    "running": (replace(run(ALIVE, status="running"), now=NOW + 2), "running", None, ""),
    "copied while running": (run(ALIVE, status="running"), "command_gone", None, ""),
    "killed command": (run(ALIVE, status="killed"), "command_gone", None, ""),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_causes(name: str) -> None:
    evidence, kind, rank, where = CASES[name]
    found = judge(evidence)
    assert (found.cause.kind, found.cause.rank) == (kind, rank)
    assert where in (found.cause.where or "")
    assert found.cause.evidence or kind == "unknown"
    assert found.cause.remedy or kind == "none"
    assert found.cause.confidence in ("high", "medium", "low")
    json.dumps(found.to_dict(), allow_nan=False)
    assert f"{kind}: " in shown(found)


def shown(diagnosis: Diagnosis) -> str:
    console = Console(width=400, record=True, quiet=False, file=open("/dev/null", "w"))  # noqa: SIM115
    show(diagnosis, Display(console))
    return console.export_text()


def test_every_kind_is_recognised_somewhere() -> None:
    """The exception is "error", which has a test below."""
    assert {case[1] for case in CASES.values()} == set(REMEDIES) - {"error"}


def test_the_confidence_of_causes() -> None:
    confidence = {name: judge(case[0]).cause.confidence for name, case in CASES.items()}
    assert confidence["killed"] == confidence["model"] == confidence["stuck"] == "high"
    assert confidence["killed, no word"] == confidence["killed, memory full"] == "medium"
    assert confidence["nothing known"] == confidence["network"] == "low"


def test_a_kill_for_memory_in_the_one_line_of_ray_2_55() -> None:
    text = MONITOR.replace("24012600000B (95.0% of 25276502016B limit)", "0.950000.")
    text = text.replace("\nConsidered workers: [\nSelected to kill: (", ": [(").replace("\n", ", ")
    kill: Any = MemoryKill.from_text(text.replace(" used /", " /").format(task="Own.run", pid=7))
    assert kill.why.endswith("more than the 95.0% that Ray allows; it held 3.05GB itself")
    users = "14.57 GB by python other.py (pid 26219)", "3.05 GB by ray::RayTrainWorker (pid 11)"
    assert (kill.process, kill.pid, kill.users) == ("Own", 7, users)


def test_a_kill_for_memory_is_reported_with_figures_and_a_remedy() -> None:
    """The evidence has process, host, its memory and the node's, the job's data there, and the
    key."""
    evidence = CASES["killed by Ray's monitor"][0]
    found = judge(evidence).cause
    assert found.what == (
        "rank 1 was killed by Ray for memory: its node 10.0.0.7 had 22.71GB of 23.54GB of memory "
        "in use, more than the 95.0% that Ray allows; it held 3.05GB itself"
    )
    said = "\n".join(found.evidence)
    assert "14.57 GB by python other.py (pid 26219), 3.05 GB by ray::RayTrainWorker" in said
    assert "rank-1.state: 50% of the memory of node1 in use, 1.0 GiB by this rank" in said
    assert found.remedy == REMEDIES["memory"]
    for key in ("sampling.batch_size", "sampling.fanout", "sampling.cache", "cluster.workers"):
        assert key in found.remedy
    for held, remedy in ((2**30, "lower sampling.cache"), (2**20, REMEDIES["memory"])):
        plan = ({"use": "the cache", "bytes": held, "remedy": "lower sampling.cache"},)
        for name in CASES:
            if name.startswith(("killed by Ray's", "killed by the kernel", "memory")):
                found = judge(replace(CASES[name][0], memory=plan)).cause
                assert any("estimate for a node: the cache 1" in line for line in found.evidence)
                if found.rank is not None:
                    assert found.remedy == remedy, name
    controller = judge(CASES["killed by Ray's monitor before any rank"][0]).cause
    assert controller.what.startswith("TrainController (pid 26595) was killed by Ray for memory")


def test_failures_before_any_rank_keep_their_remedy() -> None:
    found = judge(run(error="Ray did not start\n  → free port 6379")).cause
    assert (found.kind, found.what, found.remedy) == (
        "setup", "Ray did not start", "free port 6379"
    )  # fmt: skip


def test_ranks_are_told() -> None:
    found = judge(CASES["stuck"][0])
    first, second = found.ranks
    assert (first.state, second.state) == ("raised", "busy")
    assert (second.phase, second.epoch, second.step, second.host) == ("forward", 1, 6, "node1")
    assert second.training == "/home/me/my_model.py:7 in forward → x.py:1 f"
    waiting = judge(CASES["model"][0]).ranks[0]
    assert waiting.state == "waiting"
    assert waiting.waiting == "gloo:all_reduce 5 of group 0, 15.0 s"


def test_the_collective_in_progress_before_an_error_counts() -> None:
    before = {"time": NOW - 2, "reason": "", "collectives": [entry(5, pending=True)]}
    late = Traces(0, state(0), box(0, before=before), failure(0, TIMEOUT))
    stuck = Traces(1, state(1), box(1, SLEEP, USER, TRAIN, collectives=[entry(4)]))
    found = judge(run(late, stuck))
    assert found.ranks[0].waiting == "gloo:all_reduce 5 of group 0, 13.0 s"
    assert found.first_difference is not None
    assert (found.first_difference["kind"], found.first_difference["odd"]) == ("missing", 1)
    both = replace(stuck, box={**stuck.box, "collectives": [entry(4), entry(5, size=9)]})  # type: ignore[dict-item]
    found = judge(run(late, both))
    assert found.first_difference is not None
    assert found.first_difference["kind"] == "size"


def test_clock_skew_is_not_taken_for_a_frozen_rank() -> None:
    behind = replace(state(1), begun=state(1).begun - 600)
    for ago, kind in ((0.0, "timeout"), (8.0, "frozen")):
        late = replace(behind, beat=NOW - 600 - ago)
        assert judge(run(TIMED_OUT_0, Traces(1, late))).cause.kind == kind


def test_where_collectives_part() -> None:
    same = [entry(1), entry(2), entry(3)]
    assert first_difference({0: same, 1: same}) is None
    assert first_difference({0: same}) is None
    # a rank that is late, but that no rank waits for
    assert first_difference({0: same, 1: same[:2]}) is None

    for kind, other in (
        ("op", entry(3, "gloo:broadcast")),
        ("dtype", entry(3, dtype="Double")),
        ("size", entry(3, size=5)),
    ):
        found = first_difference({0: same, 1: [*same[:2], other], 2: same})
        assert found is not None
        assert (found["kind"], found["seq"], found["odd"]) == (kind, 3, 1)
        assert [rank["op"] for rank in found["ranks"]][1] == other["op"]

    # of an all-to-all, sizes may differ
    uneven = [entry(1, "gloo:all_to_all", size=n) for n in (3, 4)]
    assert first_difference({0: uneven[:1], 1: uneven[1:]}) is None

    waits = [*same, entry(4, pending=True)]
    found = first_difference({0: waits, 1: same, 2: waits})
    assert found is not None
    assert (found["kind"], found["seq"], found["odd"]) == ("missing", 4, 1)

    # entries overwritten in a ring buffer are no difference
    assert first_difference({0: same, 1: same[2:]}) is None
    assert first_difference({0: [entry(1, pending=True), *same[1:]], 1: same[2:]}) is None
    # another group's earlier difference does not hide behind a later one
    for first, second in (("a", "b"), ("b", "a")):
        late = entry(9, "gloo:broadcast", group=first), entry(9, group=first)
        early = entry(2, "gloo:broadcast", group=second), entry(2, group=second)
        found = first_difference({0: [late[0], early[0]], 1: [late[1], early[1]]})
        assert found is not None
        assert found["seq"] == 2


def test_the_first_cause_of_a_chain_counts() -> None:
    because = "\nThe above exception was the direct cause of the following exception:\n\n"
    during = "\nDuring handling of the above exception, another exception occurred:\n\n"
    one, two = ('  File "/a.py", line 1, in a\n', '  File "/b.py", line 2, in b\n')
    assert [str(f) for f in frames(one + because + two)] == ["/a.py:1 in a"]
    assert [str(f) for f in frames(one + during + two)] == ["/b.py:2 in b"]
    assert crashed_at("nothing") == []


INSTALLED = '  File "/v/site-packages/mine/net.py", line 1, in f\n'
OURS = '  File "/x/raygnn/tasks/lightning_modules.py", line 9, in shaped\n'


@pytest.mark.parametrize(
    ("trace", "key", "own", "kind", "where"),
    [
        (OURS, None, (), "error", "lightning_modules.py:9 in shaped"),  # not the user's
        # a user's class counts as the user's in any directory
        (INSTALLED, None, (), "error", "net.py:1 in f"),
        (INSTALLED, None, ("/mine/net.py",), "model", "net.py:1"),
        # the key is preferred to our frame, and the user's frame to the key
        (OURS, "model.kind", (), "error", "model.kind"),
        ('  File "/u/net.py", line 2, in f\n' + OURS, "model.kind", (), "model", "/u/net.py:2"),
    ],
)
def test_errors_are_attributed_to_their_source(
    trace: str, key: str | None, own: tuple[str, ...], kind: str, where: str
) -> None:
    bad = {
        **failure(1, "the model returned [3]", kind="TrainingError"),
        "trace": trace,
        "where": key,
    }
    cause = judge(run(ALIVE, Traces(1, state(1), None, bad), own=own)).cause
    assert cause.kind == kind
    assert where in str(cause.where)


# ── what lies on disk ────────────────────────────────────────────────────────────────────────


@pytest.fixture
def failed(tmp_path: Path) -> Path:
    """A run on disk whose second attempt failed on rank 1, after the first failed on rank 0."""
    with RunDir(str(tmp_path), "a") as directory:
        directory.begin({"name": "a", "model": {"kind": "mine.net:Net"}})
        directory.update_summary(status="failed", error="no")
    logs = tmp_path / "a" / "logs"
    for rank in (0, 1):
        (logs / f"rank-{rank}.state").write_bytes(state(rank, attempt=2).pack())
    (logs / "rank-0.blackbox.json").write_text(json.dumps(box(0, TRAIN, attempt=2)))
    (logs / "rank-1.blackbox.json").write_text(json.dumps(box(1, attempt=2)))
    (logs / "rank-0.failure.json").write_text(json.dumps(failure(0, "OSError: old", attempt=1)))
    (logs / "rank-1.failure.json").write_text(json.dumps(failure(1, "ValueError: no", attempt=2)))
    (logs / "rank-0.crash").write_text(
        "start 1 pid 4\nFatal Python error: Aborted\nstart 2 pid 5\n"
    )
    return tmp_path / "a"


def test_the_last_start_is_judged(failed: Path) -> None:
    found = raygnn.diagnose(failed)
    assert (found.cause.kind, found.cause.rank, found.attempt) == ("model", 1, 2)
    assert found.status == "failed"
    assert found.notes == []
    assert raygnn.diagnose("a", str(failed.parent)).cause == found.cause


@pytest.mark.parametrize("content", ["", "{", "[]", '{"rank": 1}', "\x00\xff", '{"rank": "1"}'])
def test_damaged_files_are_skipped(failed: Path, content: str) -> None:
    logs = failed / "logs"
    names = ["rank-0.blackbox.json", "rank-1.blackbox.json", "rank-0.state", "driver.json"]
    for name in names:
        (logs / name).write_text(content)
    found = raygnn.diagnose(failed)
    assert (found.cause.kind, found.cause.rank) == ("model", 1)
    assert all(any(name in note for note in found.notes) for name in names)
    assert "was skipped" in shown(found)
    for path in (*logs.iterdir(), failed / "summary.json"):
        path.write_text(content)
    found = raygnn.diagnose(failed)
    assert found.cause.kind in ("unknown", "command_gone")
    for path in logs.iterdir():
        path.unlink()
    raygnn.diagnose(failed)


def test_every_cut_of_every_file_is_survived(failed: Path) -> None:
    for path in [*(failed / "logs").iterdir(), failed / "summary.json"]:
        whole = path.read_bytes()
        for length in range(0, len(whole), max(1, len(whole) // 40)):
            path.write_bytes(whole[:length])
            assert raygnn.diagnose(failed).cause.kind
        path.write_bytes(whole)


def test_the_state_file_names_the_cause_on_a_full_disk(failed: Path) -> None:
    logs = failed / "logs"
    (logs / "rank-1.failure.json").write_text("")
    words = replace(state(1, attempt=2), words="OSError: [Errno 28] No space left on device")
    (logs / "rank-1.state").write_bytes(words.pack())
    found = raygnn.diagnose(failed)
    assert (found.cause.kind, found.cause.rank) == ("storage", 1)
    assert found.cause.evidence[0].startswith("logs/rank-1.state: OSError")


def test_a_rank_that_did_not_begin_again(failed: Path) -> None:
    (failed / "logs" / "rank-0.state").write_bytes(state(0, attempt=1).pack())
    (failed / "logs" / "rank-0.blackbox.json").unlink()
    first = raygnn.diagnose(failed).ranks[0]
    assert (first.state, first.attempt, first.phase) == ("unknown", 1, None)


def test_a_state_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    one = replace(state(3), epoch=None, step=0, words="of cold")
    (tmp_path / "s").write_bytes(one.pack())
    assert read_state(tmp_path / "s") == one
    assert len(state(3, phase="naïve " * 20, used=5).pack()) == SIZE
    with pytest.raises(DataError, match="state"):
        read_state(Path("/proc/self/cmdline"))
    assert read_state(Path("/nowhere/rank-0.state")) is None


def sparse(path: Path) -> None:
    with open(path, "r+b" if path.exists() else "wb") as file:
        file.truncate(2**40)


def fifo(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def device(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("put", [sparse, fifo, device])
def test_only_so_much_of_regular_files_is_read(failed: Path, put: Callable[[Path], None]) -> None:
    logs = failed / "logs"
    for path in [*logs.iterdir(), logs / "driver.json", failed / "summary.json", failed / ".lock"]:
        if not path.name.startswith("rank-1."):
            put(path)
    found = raygnn.diagnose(failed)
    assert (found.cause.kind, found.cause.rank, found.status) == ("model", 1, "unknown")
    names = ["summary.json", "driver.json", "rank-0.blackbox.json", "rank-0.failure.json"]
    assert all(any(name in note for note in found.notes) for name in names)
    put(failed / "config.yaml")
    assert raygnn.diagnose(failed).cause.rank == 1
    (failed / "summary.json").unlink()  # so that the lock is checked
    assert raygnn.diagnose(failed).status == "killed"


@pytest.mark.parametrize("run", ["x" * 5000, "~nouser-of-this-name/x", "a/" * 3000, "a\0b"])
def test_names_that_no_file_can_have(tmp_path: Path, run: str) -> None:
    with pytest.raises(InputError):
        raygnn.diagnose(run, str(tmp_path))
    with pytest.raises(InputError) as told:
        open_run(run, str(tmp_path))
    assert len(str(told.value)) < 1000


@pytest.mark.parametrize("config", [None, "", "{", "name: a\n", "a: !!int ''", "[" * 9000])
def test_a_run_without_its_config_is_diagnosed(failed: Path, config: str | None) -> None:
    (failed / "config.yaml").unlink()
    if config is not None:
        (failed / "config.yaml").write_text(config)
    for kept in ("summary.json and logs", "logs", "summary.json"):
        if kept == "logs":
            (failed / "summary.json").rename(failed / "kept")
        elif kept == "summary.json":
            (failed / "kept").rename(failed / "summary.json")
            (failed / "logs").rename(failed / "kept")
        found = raygnn.diagnose("a", str(failed.parent))
        assert (found.cause.rank == 1) == ("logs" in kept)
        assert [note for note in found.notes if "config.yaml is missing or damaged" in note]
    with pytest.raises(InputError):
        open_run(failed)
    with pytest.raises(InputError, match="not a run directory"):
        RunDir(str(failed.parent), "a", mode="overwrite")
    (failed / "summary.json").unlink()
    with pytest.raises(InputError, match="not a run directory"):
        raygnn.diagnose(failed)


@pytest.mark.parametrize("width", [20, 40, 50])
def test_narrow_terminals_get_lines_instead_of_tables(width: int) -> None:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    show(judge(CASES["another collective"][0]), Display(console))
    text = console.export_text()
    for line in ("rank: 1", "  host: node0", "  step: 6", "  epoch: 1", "  sizes: [3]"):
        assert line in text.splitlines()
    assert "/home/me/my_model.py:7" in text


def test_an_interrupted_run_is_no_failure() -> None:
    """An error of a rank that met the end of another rank is not reported."""
    ours = {**TRAIN, "file": "/v/lib/python3.11/site-packages/raygnn/worker/rank.py"}
    pending = {"collectives": [entry(5), entry(6, pending=True)]}
    found = judge(
        run(
            Traces(0, state(0), box(0, ours, collectives=[entry(5)])),
            Traces(1, state(1), box(1, TRAIN, **pending), failure(1, RESET)),
            status="interrupted",
        )
    )
    assert found.cause.kind == "interrupted"
    assert found.cause.evidence[1:] == ["rank 0 was at raygnn/worker/rank.py:3 in run"]
    assert found.first_difference is None
    assert "ranks in attempt" not in shown(found)


@pytest.mark.parametrize("seconds", [5, 600])
def test_a_run_that_stands_still(seconds: int) -> None:
    """Its heartbeats continue."""
    ranks = []
    for rank, phase in enumerate(("backward", "forward")):
        ranks.append(Traces(rank, replace(state(rank, phase=phase), since=NOW - seconds)))
    found = judge(replace(run(*ranks, status="running"), now=NOW + 1)).cause
    assert found.kind == "running"
    still = "makes no progress: rank 0 in backward, rank 1 in forward, for 601 s" in found.what
    assert still == (seconds > 60)
    assert f"logs/rank-1.state: forward for {seconds + 1} s" in found.evidence
