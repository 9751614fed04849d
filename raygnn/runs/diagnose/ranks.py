"""Each rank by itself: where it was, whether it lived, what its threads were doing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from raygnn.runs.diagnose import causes
from raygnn.runs.diagnose.reading import Evidence, Traces
from raygnn.runs.diagnose.state import DONE
from raygnn.runs.tracebacks import Frame

_SILENT = 5.0  # seconds without a sign of life, of which there is one each second
_SKEW = 3.0  # seconds that ranks may begin apart; more is their clocks' difference
_INNER = 6  # frames of a stack that tell whether it waits
_WAITS = ("torch/distributed/", "/raygnn/sampling/loader.py:_await_next")
_QUEUES = ("/threading.py", "/queue.py")
_BACKWARD = "_engine_run_backward"  # in which gradients are reduced


@dataclass(frozen=True)
class RankReport:
    """One rank in the last start.

    Attributes:
        state: ``raised``, ``died``, ``crashed``, ``frozen`` (no sign of life while others
            waited, or by the driver's word), ``waiting`` (in a collective), ``busy`` (in code),
            ``finished``, ``running`` or ``unknown``.
        training, prefetch: what these threads were doing.
        waiting: the oldest collective that was under way, and for how long.
        silent: seconds from its last sign of life to the others' last.
        memory_used: share of its node's memory in use at its last sign of life.
        place: where the thread was that the others waited for.
        since: when its phase began, seconds since the epoch; 0 = unknown.
    """

    rank: int
    state: str
    attempt: int | None = None
    host: str | None = None
    phase: str | None = None
    epoch: int | None = None
    step: int | None = None
    training: str | None = None
    prefetch: str | None = None
    waiting: str | None = None
    last_sign: float = 0.0
    silent: float = 0.0
    rss: int = 0
    memory_used: float | None = None
    place: Frame | None = None
    since: float = 0.0


def report(traces: Traces, evidence: Evidence) -> RankReport:
    """What is known of one rank."""
    state = (
        traces.state if traces.state and traces.state.start.attempt == evidence.attempt else None
    )
    box = traces.box or {}
    threads = {role: _thread(box, role) for role in ("training", "prefetch")}
    places = {role: _place(thread) for role, thread in threads.items()}
    waiting = _waiting(box)
    last = _last_sign(traces, evidence)
    silent = max(0.0, _others_last(traces.rank, evidence) - last) if last else 0.0
    found = _state(traces, evidence, silent, threads, waiting)
    life = state.life if state else None
    used = life.used / life.limit if life and life.limit else None
    busy = next((p for t, p in places.items() if p and not _waits(threads[t])), None)
    return RankReport(
        rank=traces.rank,
        state=found,
        attempt=traces.state.start.attempt if traces.state else box.get("attempt"),
        host=state.start.host if state else box.get("host"),
        phase=state.training.phase or None if state else None,
        epoch=state.training.epoch if state else None,
        step=state.training.step if state else None,
        training=_doing(threads["training"], places["training"]) or _raised_at(traces, evidence),
        prefetch=_doing(threads["prefetch"], places["prefetch"]),
        waiting=waiting,
        last_sign=last,
        silent=silent,
        rss=life.rss if life else 0,
        memory_used=used,
        place=busy,
        since=state.training.wall - _skew(traces, evidence) if state else 0.0,
    )


def _state(
    traces: Traces,
    evidence: Evidence,
    silent: float,
    threads: Mapping[str, Mapping[str, Any] | None],
    waiting: str | None,
) -> str:
    if traces.crash:
        return "crashed"
    if traces.failure:
        return "frozen" if traces.failure.get("kind") == causes.FROZEN else "raised"
    if traces.state is None and traces.box is None:
        return "died" if _is_dead(traces.rank, evidence) else "unknown"
    if traces.state and traces.state.start.attempt != evidence.attempt:
        return "unknown"  # it did not begin this time
    if traces.state and traces.state.training.phase == DONE:
        return "finished"
    if _is_dead(traces.rank, evidence):
        return "died"
    if traces.box is None:
        if evidence.status == "running":
            return "running"
        if silent > _SILENT:
            return "frozen"
        return "died" if _lost(traces.rank, evidence) else "unknown"
    busy = threads["training"] is not None and not _waits(threads["training"])
    return "busy" if busy or not waiting else "waiting"


def _is_dead(rank: int, evidence: Evidence) -> bool:
    """Whether Ray says that the worker died, or its node is gone; one that just does not answer
    may be frozen."""
    if lost_with(evidence, rank):
        return True
    worker = (evidence.driver or {}).get("workers", {}).get(str(rank))
    if not isinstance(worker, Mapping) or worker.get("said"):
        return False
    return "Timeout" not in str(worker.get("type"))


def lost_with(evidence: Evidence, rank: int) -> str:
    """The node that the rank was lost with, and what the driver saw of it; "" if it was not."""
    lost = (evidence.driver or {}).get("lost")
    found = lost.get(str(rank)) if isinstance(lost, Mapping) else None
    if not isinstance(found, Mapping):
        return ""
    return f"{str(found.get('host'))[:200]}: {str(found.get('why'))[:200]}"


def _lost(rank: int, evidence: Evidence) -> bool:
    """Whether others lost their connection to a rank that left nothing, without Ray's word."""
    if (evidence.driver or {}).get("workers"):
        return False
    others = [t.failure["what"].lower() for t in evidence.ranks if t.failure and t.rank != rank]
    return any("clos" in what or "reset" in what or "broken pipe" in what for what in others)


def _thread(box: Mapping[str, Any], role: str) -> Mapping[str, Any] | None:
    threads = box.get("threads")
    for thread in threads if isinstance(threads, list) else []:
        if isinstance(thread, Mapping) and thread.get("role") == role and _stack(thread):
            return thread
    return None


def _stack(thread: Mapping[str, Any]) -> list[Frame]:
    """Innermost first."""
    values = thread.get("frames")
    found = [Frame.of(value) for value in values] if isinstance(values, list) else []
    return [frame for frame in found if frame is not None]


def _waits(thread: Mapping[str, Any] | None) -> bool:
    """Whether a thread waits for other ranks, or for another thread of ours."""
    if thread is None:
        return True
    stack = _stack(thread)
    if stack[0].function == _BACKWARD:
        return True
    for frame in stack[:_INNER]:
        if frame.whose == "user":
            return False
        if any(part in f"{frame.file}:{frame.function}" for part in _WAITS):
            return True
        if frame.file.endswith(_QUEUES):
            return _ours(stack)
    return False


def _ours(stack: list[Frame]) -> bool:
    """Whether it is our own queue that a thread waits at, rather than a lock of the user's."""
    return next((f.whose for f in stack if f.whose != "library"), "") == "raygnn"


def _place(thread: Mapping[str, Any] | None) -> Frame | None:
    return None if thread is None else causes.where(_stack(thread)[::-1])


def _doing(thread: Mapping[str, Any] | None, place: Frame | None) -> str | None:
    if thread is None or place is None:
        return None
    inner = _stack(thread)[0]
    into = (
        ""
        if inner == place
        else f" → {inner.file.rpartition('/')[2]}:{inner.line} {inner.function}"
    )
    return f"{place}{into}"


def _raised_at(traces: Traces, evidence: Evidence) -> str | None:
    """Where a rank's failure was raised, in whichever thread."""
    if traces.failure is None:
        return None
    place = causes.kind_of(traces.failure, evidence.own)[1]
    return f"raised at {place}" if place else None


def collectives(box: Mapping[str, Any]) -> list[Any]:
    """A rank's last collectives; those under way are forgotten when the rank has raised, so that
    what an earlier box of it says counts."""
    entries = _waiting_box(box).get("collectives")
    return entries if isinstance(entries, list) else []


def _waiting_box(box: Mapping[str, Any]) -> Mapping[str, Any]:
    before = box.get("before")
    if isinstance(before, Mapping) and isinstance(before.get("time"), (int, float)):
        return before
    return box


def _waiting(box: Mapping[str, Any]) -> str | None:
    pending = [
        e
        for e in collectives(box)
        if isinstance(e, Mapping)
        and e.get("pending")
        and isinstance(e.get("created"), (int, float))
    ]
    if not pending:
        return None
    oldest = min(pending, key=lambda entry: entry["created"])
    waited = max(0.0, float(_waiting_box(box)["time"]) - oldest["created"])
    return f"{oldest.get('op')} {oldest.get('seq')} of group {oldest.get('group')}, {waited:.1f} s"


def _last_sign(traces: Traces, evidence: Evidence) -> float:
    """When the rank was last known to live, by the first rank's clock as far as that is known."""
    times = [float(found["time"]) for found in (traces.box, traces.failure) if found]
    if traces.state and traces.state.start.attempt == evidence.attempt:
        times.append(traces.state.life.wall)
    return max(times, default=0.0) - _skew(traces, evidence) if times else 0.0


def _skew(traces: Traces, evidence: Evidence) -> float:
    """How much a rank's clock is ahead of the first rank's: all begin at about the same time."""
    first = next((t.state for t in evidence.ranks if t.state), None)
    if first is None or traces.state is None:
        return 0.0
    apart = traces.state.start.begun - first.start.begun
    return apart if abs(apart) > _SKEW else 0.0


def _others_last(rank: int, evidence: Evidence) -> float:
    return max((_last_sign(t, evidence) for t in evidence.ranks if t.rank != rank), default=0.0)
