"""Reports on each rank, and the comparison of the ranks' collectives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raygnn.runs.diagnose.causes import FROZEN, Frame, kind_of, where
from raygnn.runs.diagnose.evidence import Evidence, Traces
from raygnn.runs.diagnose.state_file import DONE, State

_SILENT = 5.0  # seconds without a heartbeat; a rank sends one per second
_SKEW = 3.0  # seconds between the beginnings of ranks; more is a difference of their clocks
_INNER = 6  # innermost frames that show whether a thread waits
_WAITS = ("torch/distributed/", "/raygnn/sampling/loader.py:_await_next")
_QUEUES = ("/threading.py", "/queue.py")
_BACKWARD = "_engine_run_backward"  # in which gradients are reduced

# collectives whose inputs, or outputs, must have equal sizes on all ranks
_INPUTS = "all_reduce allreduce broadcast all_gather allgather reduce gather reduce_scatter"
_ALIKE = {**dict.fromkeys(_INPUTS.split(), "inputs"), "scatter": "outputs"}

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


def reports(evidence: Evidence) -> list[RankReport]:
    """Return the report on each rank."""
    signs = [_last_sign(traces, evidence) for traces in evidence.ranks]
    latest = max(signs, default=0.0)
    return [
        _report(traces, evidence, last, latest - last if last else 0.0)
        for traces, last in zip(evidence.ranks, signs)
    ]


def _report(traces: Traces, evidence: Evidence, last: float, silent: float) -> RankReport:
    found, box = _state_of_last_start(traces, evidence), traces.box or {}
    state = found or State()
    training, prefetch = _stack(box, "training"), _stack(box, "prefetch")
    waiting = _waiting(box)
    return RankReport(
        rank=traces.rank,
        state=_judge_state(traces, evidence, silent, training, waiting),
        attempt=traces.state.attempt if traces.state else box.get("attempt"),
        host=state.host if found else box.get("host"),
        phase=state.phase or None,
        epoch=state.epoch,
        step=state.step,
        training=_doing(training) or _raised_at(traces, evidence),
        prefetch=_doing(prefetch),
        waiting=waiting,
        last_sign=last,
        silent=silent,
        rss=state.rss,
        memory_used=state.used / state.limit if state.limit else None,
        place=next((where(s[::-1]) for s in (training, prefetch) if s and not _waits(s)), None),
        since=state.since - _skew(traces, evidence) if found else 0.0,
    )


def collectives(box: Mapping[str, Any]) -> list[CollectiveRecord]:
    """Return a rank's last collectives, from its earlier dump if it has raised since, which clears
    pending ones."""
    return (box.get("before") or box).get("collectives") or []


def lost_with(evidence: Evidence, rank: int) -> str:
    """Return the rank's lost node, and what the driver observed; "" if it was not lost."""
    lost = evidence.driver.get("lost", {}).get(str(rank))
    return f"{lost['host']}: {lost['why']}" if lost else ""


def dead_worker(evidence: Evidence, rank: int) -> Mapping[str, Any] | None:
    """Return the ``type`` and ``text`` of Ray's error of a worker that recorded none itself."""
    worker: Mapping[str, Any] = evidence.driver.get("workers", {}).get(str(rank), {})
    return worker if worker and not worker.get("said") else None


def _judge_state(
    traces: Traces, evidence: Evidence, silent: float, training: CallStack, waiting: str | None
) -> str:
    if traces.crash:
        return "crashed"
    if traces.failure:
        return "frozen" if traces.failure.get("kind") == FROZEN else "raised"
    worker = dead_worker(evidence, traces.rank)  # after a timeout, it may be frozen
    dead = bool(lost_with(evidence, traces.rank)) or (worker and "Timeout" not in worker["type"])
    if traces.state is None and traces.box is None:
        return "died" if dead else "unknown"
    if traces.state and not _state_of_last_start(traces, evidence):
        return "unknown"  # it did not begin in this attempt
    if traces.state and traces.state.phase == DONE:
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
    return state if state and state.attempt == evidence.attempt else None


def _is_missed(rank: int, evidence: Evidence) -> bool:
    """Return True if, without a report of Ray, other ranks lost their connection to the rank."""
    if evidence.driver.get("workers"):
        return False
    others = [t.failure["what"].lower() for t in evidence.ranks if t.failure and t.rank != rank]
    return any("clos" in what or "reset" in what or "broken pipe" in what for what in others)


def _stack(box: Mapping[str, Any], role: str) -> CallStack:
    threads = [thread for thread in box.get("threads") or [] if thread["role"] == role]
    return [Frame(**frame) for frame in threads[0]["frames"]] if threads else []


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


def _doing(stack: CallStack) -> str | None:
    if not stack:
        return None
    place, inner = where(stack[::-1]), stack[0]
    file = inner.file.rpartition("/")[2]
    return str(place) if inner == place else f"{place} → {file}:{inner.line} {inner.function}"


def _raised_at(traces: Traces, evidence: Evidence) -> str | None:
    place = kind_of(traces.failure, evidence.own)[1] if traces.failure else None
    return f"raised at {place}" if place else None


def _waiting(box: Mapping[str, Any]) -> str | None:
    pending = [entry for entry in collectives(box) if entry["pending"]]
    if not pending:
        return None
    oldest = min(pending, key=lambda entry: entry["created"])
    waited = max(0.0, (box.get("before") or box)["time"] - oldest["created"])
    return f"{oldest['op']} {oldest['seq']} of group {oldest['group']}, {waited:.1f} s"


def _last_sign(traces: Traces, evidence: Evidence) -> float:
    """Return the time of the rank's last heartbeat or record, by the first rank's clock; 0 if there
    is none."""
    times = [float(record["time"]) for record in (traces.box, traces.failure) if record]
    if state := _state_of_last_start(traces, evidence):
        times.append(state.beat)
    return max(times) - _skew(traces, evidence) if times else 0.0


def _skew(traces: Traces, evidence: Evidence) -> float:
    """Return the seconds by which a rank's clock is ahead of the first rank's, given that all ranks
    begin at about the same time."""
    first = next((t.state for t in evidence.ranks if t.state), None)
    if first is None or traces.state is None:
        return 0.0
    apart = traces.state.begun - first.begun
    return apart if abs(apart) > _SKEW else 0.0


def first_difference(flights: Mapping[int, Sequence[CollectiveRecord]]) -> dict[str, Any] | None:
    """Find the first collective that differs, by process group and sequence number; ``flights``:
    rank → its last collectives, from its crash dump.

    Returns None if the known ones agree, else ``kind`` (``op``, ``dtype``, ``size``, or
    ``missing``: a rank did not reach it), ``group``, ``seq``, ``odd`` (the rank that differs, or
    did not reach it; None if unclear) and ``ranks``: for each its ``rank``, ``op`` (None for a rank
    that did not reach it), ``dtypes``, ``sizes``, ``at`` and ``pending``.
    """
    groups: dict[str, dict[int, dict[int, CollectiveRecord]]] = {}
    for rank, entries in flights.items():
        for entry in entries:
            if entry["seq"] is not None:
                groups.setdefault(entry["group"], {}).setdefault(rank, {})[entry["seq"]] = entry
    found = (_in_group(group, ranks) for group, ranks in sorted(groups.items()))
    differences = [difference for difference in found if difference]
    # a rank may miss a collective because it entered another one in its place
    differences.sort(key=lambda d: (d["kind"] == "missing", d.pop("created")))
    return differences[0] if differences else None


def _in_group(group: str, ranks: dict[int, dict[int, CollectiveRecord]]) -> dict[str, Any] | None:
    if len(ranks) < 2:
        return None
    first = max(min(entries) for entries in ranks.values())  # that all ranks still have
    for seq in sorted({seq for entries in ranks.values() for seq in entries if first <= seq}):
        calls = {rank: entries.get(seq) for rank, entries in sorted(ranks.items())}
        came = {rank: entry for rank, entry in calls.items() if entry is not None}
        absent = [rank for rank in calls if rank not in came]
        kinds = ("op", "dtype", "size")
        kind = next((k for k in kinds if len({_facet(e, k) for e in came.values()}) > 1), None)
        if kind is None and not (absent and any(e["pending"] for e in came.values())):
            continue
        return {
            "kind": kind or "missing",
            "group": group,
            "seq": seq,
            "odd": _odd(came, kind) if kind else absent[0],
            "ranks": [_shown(rank, entry) for rank, entry in calls.items()],
            "created": min(entry["created"] for entry in came.values()),
        }
    return None


def _facet(entry: CollectiveRecord, kind: str) -> str:
    op = str(entry["op"])
    side = None if kind == "op" else _ALIKE.get(op.rpartition(":")[2])
    return op if side is None else op + str(entry[side][f"{kind}s"])


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
    return (entry.get("at") or {}).get("whose") == "user"


def _shown(rank: int, entry: CollectiveRecord | None) -> dict[str, Any]:
    if entry is None:
        return {"rank": rank, "op": None}
    at = str(Frame(**place)) if (place := entry.get("at")) else None
    call = {"rank": rank, "op": entry["op"], "at": at, "pending": entry["pending"]}
    return {**entry["inputs"], **call}
