"""Reports on each rank, and the comparison of the ranks' collectives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raygnn.runs.diagnose import causes
from raygnn.runs.diagnose.evidence import Evidence, Traces
from raygnn.runs.diagnose.state_file import DONE, State
from raygnn.runs.tracebacks import Frame

_SILENT = 5.0  # seconds without a heartbeat, of which there is one per second
_SKEW = 3.0  # seconds between the beginnings of ranks; more is a difference of their clocks
_INNER = 6  # innermost frames that show whether a thread waits
_WAITS = ("torch/distributed/", "/raygnn/sampling/loader.py:_await_next")
_QUEUES = ("/threading.py", "/queue.py")
_BACKWARD = "_engine_run_backward"  # in which gradients are reduced

_ALIKE = {  # tensors whose sizes must be equal on all ranks
    "all_reduce": "inputs",
    "allreduce": "inputs",
    "broadcast": "inputs",
    "all_gather": "inputs",
    "allgather": "inputs",
    "reduce": "inputs",
    "gather": "inputs",
    "reduce_scatter": "inputs",
    "scatter": "outputs",
}

CollectiveRecord = Mapping[str, Any]  # a collective in a crash dump
CallStack = Sequence[Frame]  # the innermost frame first; empty if unknown


@dataclass(frozen=True)
class RankReport:
    """One rank in the last attempt."""

    rank: int
    # ``raised``, ``died``, ``crashed``, ``frozen`` (no heartbeat while other ranks waited, or
    # recorded by the driver), ``waiting`` (in a collective), ``busy`` (in code), ``finished``,
    # ``running`` or ``unknown``
    state: str
    attempt: int | None = None
    host: str | None = None
    phase: str | None = None
    epoch: int | None = None
    step: int | None = None
    training: str | None = None  # activity of the training thread
    prefetch: str | None = None  # activity of the prefetch thread
    waiting: str | None = None  # oldest pending collective, and for how long
    last_sign: float = 0.0
    silent: float = 0.0  # seconds from its last heartbeat to the last one of any other rank
    rss: int = 0
    memory_used: float | None = None  # share of its node's memory in use at its last heartbeat
    place: Frame | None = None  # frame of the thread for which the other ranks waited
    since: float = 0.0  # when its phase began, seconds since the epoch; 0 = unknown


def report(traces: Traces, evidence: Evidence) -> RankReport:
    state, box = _state_of_last_start(traces, evidence), traces.box or {}
    training, prefetch = _stack(box, "training"), _stack(box, "prefetch")
    waiting = _waiting(box)
    last = _last_sign(traces, evidence)
    others = (_last_sign(t, evidence) for t in evidence.ranks if t.rank != traces.rank)
    silent = max(0.0, max(others, default=0.0) - last) if last else 0.0
    life = state.life if state else None
    return RankReport(
        rank=traces.rank,
        state=_judge_state(traces, evidence, silent, training, waiting),
        attempt=traces.state.start.attempt if traces.state else box.get("attempt"),
        host=state.start.host if state else box.get("host"),
        phase=state.training.phase or None if state else None,
        epoch=state.training.epoch if state else None,
        step=state.training.step if state else None,
        training=_doing(training) or _raised_at(traces, evidence),
        prefetch=_doing(prefetch),
        waiting=waiting,
        last_sign=last,
        silent=silent,
        rss=life.rss if life else 0,
        memory_used=life.used / life.limit if life and life.limit else None,
        place=next((_place(s) for s in (training, prefetch) if s and not _waits(s)), None),
        since=state.training.wall - _skew(traces, evidence) if state else 0.0,
    )


def collectives(box: Mapping[str, Any]) -> list[Any]:
    """Return a rank's last collectives, from its earlier dump if it has raised since, which clears
    pending ones."""
    entries = _waiting_box(box).get("collectives")
    return entries if isinstance(entries, list) else []


def lost_with(evidence: Evidence, rank: int) -> str:
    """Return the rank's lost node, and what the driver observed; "" if it was not lost."""
    ranks = (evidence.driver or {}).get("lost")
    lost = ranks.get(str(rank)) if isinstance(ranks, Mapping) else None
    if not isinstance(lost, Mapping):
        return ""
    return f"{str(lost.get('host'))[:200]}: {str(lost.get('why'))[:200]}"


def dead_worker(evidence: Evidence, rank: int) -> Mapping[str, Any] | None:
    """Return the ``type`` and ``text`` of Ray's error of a worker that recorded none itself."""
    worker = (evidence.driver or {}).get("workers", {}).get(str(rank))
    return worker if isinstance(worker, Mapping) and not worker.get("said") else None


def _judge_state(
    traces: Traces, evidence: Evidence, silent: float, training: CallStack, waiting: str | None
) -> str:
    if traces.crash:
        return "crashed"
    if traces.failure:
        return "frozen" if traces.failure.get("kind") == causes.FROZEN else "raised"
    dead = _is_dead(traces.rank, evidence)
    if traces.state is None and traces.box is None:
        return "died" if dead else "unknown"
    if traces.state and not _state_of_last_start(traces, evidence):
        return "unknown"  # it did not begin in this attempt
    if traces.state and traces.state.training.phase == DONE:
        return "finished"
    if dead:
        return "died"
    if traces.box is None:
        if evidence.status == "running":
            return "running"
        if silent > _SILENT:
            return "frozen"
        return "died" if _is_missed(traces.rank, evidence) else "unknown"
    return "busy" if not waiting or not _waits(training) else "waiting"


def _state_of_last_start(traces: Traces, evidence: Evidence) -> State | None:
    state = traces.state
    return state if state and state.start.attempt == evidence.attempt else None


def _is_dead(rank: int, evidence: Evidence) -> bool:
    """Return True if Ray reports the worker or its node as dead; without an answer it may be
    frozen."""
    if lost_with(evidence, rank):
        return True
    worker = dead_worker(evidence, rank)
    return worker is not None and "Timeout" not in str(worker.get("type"))


def _is_missed(rank: int, evidence: Evidence) -> bool:
    """Return True if, without a report of Ray, other ranks lost their connection to the rank."""
    if (evidence.driver or {}).get("workers"):
        return False
    others = [t.failure["what"].lower() for t in evidence.ranks if t.failure and t.rank != rank]
    return any("clos" in what or "reset" in what or "broken pipe" in what for what in others)


def _stack(box: Mapping[str, Any], role: str) -> CallStack:
    threads = box.get("threads")
    for thread in threads if isinstance(threads, list) else []:
        if isinstance(thread, Mapping) and thread.get("role") == role:
            values = thread.get("frames")
            frames = map(Frame.from_dump, values if isinstance(values, list) else [])
            if stack := [frame for frame in frames if frame is not None]:
                return stack
    return []


def _waits(stack: CallStack) -> bool:
    """Return True if a thread waits for other ranks, or for another thread of raygnn."""
    if not stack or stack[0].function == _BACKWARD:
        return True
    for frame in stack[:_INNER]:
        if frame.whose == "user":
            return False
        if any(part in f"{frame.file}:{frame.function}" for part in _WAITS):
            return True
        if frame.file.endswith(_QUEUES):  # our own, rather than a lock of the user's
            return next((f.whose for f in stack if f.whose != "library"), "") == "raygnn"
    return False


def _place(stack: CallStack) -> Frame | None:
    return causes.where(stack[::-1])


def _doing(stack: CallStack) -> str | None:
    place = _place(stack)
    if place is None or stack[0] == place:
        return str(place) if place else None
    inner = stack[0]
    return f"{place} → {inner.file.rpartition('/')[2]}:{inner.line} {inner.function}"


def _raised_at(traces: Traces, evidence: Evidence) -> str | None:
    if traces.failure is None:
        return None
    place = causes.kind_of(traces.failure, evidence.own)[1]
    return f"raised at {place}" if place else None


def _waiting_box(box: Mapping[str, Any]) -> Mapping[str, Any]:
    before = box.get("before")
    if isinstance(before, Mapping) and isinstance(before.get("time"), (int, float)):
        return before
    return box


def _waiting(box: Mapping[str, Any]) -> str | None:
    pending = [
        entry
        for entry in collectives(box)
        if isinstance(entry, Mapping)
        and entry.get("pending")
        and isinstance(entry.get("created"), (int, float))
    ]
    if not pending:
        return None
    oldest = min(pending, key=lambda entry: entry["created"])
    waited = max(0.0, float(_waiting_box(box)["time"]) - oldest["created"])
    return f"{oldest.get('op')} {oldest.get('seq')} of group {oldest.get('group')}, {waited:.1f} s"


def _last_sign(traces: Traces, evidence: Evidence) -> float:
    """Return the time of the rank's last heartbeat or record, by the first rank's clock."""
    times = [float(record["time"]) for record in (traces.box, traces.failure) if record]
    if state := _state_of_last_start(traces, evidence):
        times.append(state.life.wall)
    return max(times, default=0.0) - _skew(traces, evidence) if times else 0.0


def _skew(traces: Traces, evidence: Evidence) -> float:
    """Return the seconds by which a rank's clock is ahead of the first rank's, given that all ranks
    begin at about the same time."""
    first = next((t.state for t in evidence.ranks if t.state), None)
    if first is None or traces.state is None:
        return 0.0
    apart = traces.state.start.begun - first.start.begun
    return apart if abs(apart) > _SKEW else 0.0


def first_difference(flights: Mapping[int, Sequence[CollectiveRecord]]) -> dict[str, Any] | None:
    """Find the first collective that differs, by process group and sequence number; ``flights``:
    rank → its last collectives, from its crash dump.

    Returns None if the known ones agree, else ``kind`` (``op``, ``dtype``, ``size``, or
    ``missing``: a rank did not reach it), ``group``, ``seq``, ``odd`` (the rank that differs, or
    did not reach it; None if unclear) and ``ranks``: for each its ``rank``, ``op`` (None for a rank
    that did not reach it), ``dtypes``, ``sizes``, ``at`` and ``pending``.
    """
    by_group: dict[str, dict[int, dict[int, CollectiveRecord]]] = {}
    for rank, entries in flights.items():
        for entry in entries:
            if isinstance(entry, Mapping) and isinstance(entry.get("seq"), int):
                by_rank = by_group.setdefault(str(entry.get("group")), {})
                by_rank.setdefault(rank, {})[entry["seq"]] = entry
    groups = (_in_group(group, ranks) for group, ranks in sorted(by_group.items()))
    differences = [difference for difference in groups if difference]
    # a rank may miss a collective because it entered another one in its place
    differences.sort(key=lambda d: (d["kind"] == "missing", d.pop("created")))
    return differences[0] if differences else None


def _in_group(group: str, ranks: dict[int, dict[int, CollectiveRecord]]) -> dict[str, Any] | None:
    if len(ranks) < 2:
        return None
    first = max(min(entries) for entries in ranks.values())  # that all ranks still have
    # only those that a rank has: a damaged number may be any
    for seq in sorted({seq for entries in ranks.values() for seq in entries if first <= seq}):
        calls = {rank: entries.get(seq) for rank, entries in sorted(ranks.items())}
        came = {rank: entry for rank, entry in calls.items() if entry is not None}
        absent = [rank for rank in calls if rank not in came]
        kinds = ("op", "dtype", "size")
        kind = next((k for k in kinds if len({_facet(e, k) for e in came.values()}) > 1), None)
        if kind is None and not (absent and any(e.get("pending") for e in came.values())):
            continue
        return {
            "kind": kind or "missing",
            "group": group,
            "seq": seq,
            "odd": _odd(came, kind) if kind else absent[0],
            "ranks": [_shown(rank, entry) for rank, entry in calls.items()],
            "created": min(_time(e.get("created")) for e in came.values()),
        }
    return None


def _time(value: Any) -> float:
    """Seconds of the epoch; 0 for what is no number, or none that a clock shows."""
    return float(value) if isinstance(value, (int, float)) and abs(value) < 2**63 else 0.0


def _facet(entry: CollectiveRecord, kind: str) -> str:
    op = str(entry.get("op"))
    side = _ALIKE.get(op.rpartition(":")[2])
    if kind == "op" or side is None:
        return op
    tensors = entry.get(side)
    name = "dtypes" if kind == "dtype" else "sizes"
    return op + str(tensors.get(name) if isinstance(tensors, Mapping) else None)


def _odd(came: Mapping[int, CollectiveRecord], kind: str) -> int | None:
    """Return the rank that differs from the majority; of two, the one in the user's code."""
    facets = {rank: _facet(entry, kind) for rank, entry in came.items()}
    counts = Counter(facets.values())
    fewest = min(counts.values())
    rare = [rank for rank, facet in facets.items() if counts[facet] == fewest]
    if len(rare) < len(came):
        return rare[0]
    users = [rank for rank in rare if called_by_user(came[rank])]
    return users[0] if len(users) == 1 else None


def called_by_user(entry: CollectiveRecord) -> bool:
    """Return True if the user's code called a collective."""
    place = Frame.from_dump(entry.get("at"))
    return place is not None and place.whose == "user"


def _shown(rank: int, entry: CollectiveRecord | None) -> dict[str, Any]:
    if entry is None:
        return {"rank": rank, "op": None}
    place, tensors = Frame.from_dump(entry.get("at")), entry.get("inputs")
    tensors = tensors if isinstance(tensors, Mapping) else {}
    return {
        "rank": rank,
        "op": entry.get("op"),
        "dtypes": tensors.get("dtypes"),
        "sizes": tensors.get("sizes"),
        "at": str(place) if place else None,
        "pending": bool(entry.get("pending")),
    }
