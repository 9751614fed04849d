"""Diagnosis of a run from its files (``raygnn diagnose``): its cause of failure, and the
confidence in it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from raygnn.config.places import size
from raygnn.runs.diagnose import causes
from raygnn.runs.diagnose.causes import Cause, MemoryKill, crashed_at, in_collective
from raygnn.runs.diagnose.evidence import Evidence, Traces, read
from raygnn.runs.diagnose.rank_reports import (
    RankReport,
    called_by_user,
    collectives,
    dead_worker,
    first_difference,
    lost_with,
    reports,
)
from raygnn.runs.display import Display
from raygnn.runs.run import open_remains

_FULL = 0.92  # share of memory in use above which the kernel likely killed a process
_SIGNAL = re.compile(r"Fatal Python error: (.+)")
_SHORT = {"batch", "forward", "backward", "optimizer"}  # phases of one step
_STILL = 60.0  # seconds in one phase before the run is reported as standing still
_STALE = 60.0  # seconds without a heartbeat after which nothing runs any more
_BLAMES = re.compile(r"rank (\d{1,9}) could not prepare its batch: (.*)", re.S)
# the detail in Ray's text, between the worker's particulars and guesses at reasons
_DETAIL = re.compile(
    r"(?:Worker exit detail: |(?=The actor (?:is dead|died) because))(.+?)"
    r"(?:Some common causes|There are some potential root causes|$)",
    re.S,
)
_NATIVE = re.compile(r"\n(?:Exception raised from|C\+\+ CapturedTraceback)")  # torch's own frames
_COLUMNS = ("rank", "host", "state", "phase", "epoch", "step", "training thread", "prefetch thread")
_RANKS = 64  # shown ranks; ranks that only waited come last


@dataclass(frozen=True)
class Diagnosis:
    """Diagnosis of a run: its cause, and the activity of its ranks."""

    run: str
    status: str
    attempt: int
    cause: Cause
    ranks: list[RankReport]
    first_difference: dict[str, Any] | None
    notes: list[str]

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return asdict(self)


def diagnose(run: str | Path, storage: str = "runs") -> Diagnosis:
    """Find what ended a run, and on which rank.

    Works on a run that still trains, or was copied here, and skips damaged files, including its
    config.yaml.

    Args:
        run: its path or URI, or its name within ``storage``.

    Raises:
        InputError: the run does not exist, and has left no files.
    """
    found = open_remains(run, storage)
    return judge(replace(read(found.files), run=found.shown))


def judge(evidence: Evidence) -> Diagnosis:
    """Return the cause that the evidence shows, and the report on each rank."""
    difference = first_difference({t.rank: collectives(t.box) for t in evidence.ranks if t.box})
    ranks = reports(evidence)
    cause = _Judge(evidence, ranks, difference).cause()
    # terminated ranks stop at different collectives
    ended = difference is not None and difference["kind"] == "missing"
    if cause.kind in ("none", "running") or (cause.kind == "interrupted" and ended):
        difference = None
    return Diagnosis(
        run=evidence.run,
        status=evidence.status,
        attempt=evidence.attempt,
        cause=replace(cause, remedy=cause.remedy or causes.REMEDIES[cause.kind]),
        ranks=ranks,
        first_difference=difference,
        notes=list(evidence.notes),
    )


class _Judge:
    """Sequence of checks; the first cause that one finds is the run's."""

    def __init__(
        self, evidence: Evidence, ranks: list[RankReport], difference: dict[str, Any] | None
    ):
        self.evidence = evidence
        self.driver = evidence.driver
        self.ranks = {rank.rank: rank for rank in ranks}
        self.traces = {traces.rank: traces for traces in evidence.ranks}
        self.difference = difference
        # rank that did not reach a collective, or reached another one
        self.late: int | None = difference["odd"] if difference else None

    def cause(self) -> Cause:
        for question in (
            *(self._by_status, self._ray_died, self._crashed, self._raised, self._died),
            *(self._short_of_memory, self._blamed, self._frozen, self._different, self._stuck),
            *(self._slow, self._unstarted),
        ):
            if (cause := question()) is not None:
                return cause
        what = self.evidence.error or "the run failed, and its files do not show why"
        return Cause("unknown", what, confidence="low", evidence=self._of_error())

    def _by_status(self) -> Cause | None:
        status = self.evidence.status
        lines = [f"summary.json: status {status}"]
        if status == "done":
            return Cause("none", "the run is done", evidence=lines)
        if status == "interrupted":
            what = "the run was interrupted (Ctrl-C or SIGTERM)"
            return Cause("interrupted", what, evidence=[*lines, *self._of_interrupted()])
        if status not in ("running", "killed"):
            return None
        if any(t.failure or t.crash for t in self.evidence.ranks) and status == "killed":
            return None  # the command failed, and could not record that any more
        last = max((rank.last_sign for rank in self.ranks.values()), default=0.0)
        silent = self.evidence.now - last
        if status == "killed":
            lines.append(".lock: the process that held it has ended")
        elif not last or silent < _STALE:
            return self._running([*lines, ".lock: held"])
        else:
            lines.append(f"logs/rank-*.state: the last heartbeat is {silent:,.0f} s old")
        what = "the training command ended without a report: it was killed, or its machine failed"
        confidence = "high" if status == "killed" else "medium"
        return Cause("command_gone", what, confidence=confidence, evidence=lines)

    def _running(self, lines: list[str]) -> Cause:
        """Return whether the run makes progress, or stands still."""
        ranks = [rank for rank in self.ranks.values() if rank.since and rank.phase]
        ages = {rank.rank: max(0.0, self.evidence.now - rank.since) for rank in ranks}
        lines += [f"logs/rank-{r.rank}.state: {r.phase} for {ages[r.rank]:,.0f} s" for r in ranks]
        still = min(ages.values(), default=0.0)
        if still < _STILL or not {rank.phase for rank in ranks} <= _SHORT:
            return Cause("running", "the run is in progress", evidence=lines)
        doing = ", ".join(f"rank {rank.rank} in {rank.phase}" for rank in ranks)
        what = f"the run makes no progress: {doing}, for {still:,.0f} s"
        remedy = (
            "if that is too long, stop the run (Ctrl-C) and diagnose it again: ranks that are "
            "stopped record their stacks; a wait for other ranks ends after comm.timeout"
        )
        return Cause("running", what, confidence="medium", evidence=lines, remedy=remedy)

    def _ray_died(self) -> Cause | None:
        what = self.driver["error"] if self.driver.get("ray_died") else None
        return what and Cause("ray_died", what, evidence=[f"logs/driver.json: {what}"])

    def _crashed(self) -> Cause | None:
        """Find a native crash, except one by which NCCL ends a process after a timeout."""
        for rank, traces in self.traces.items():
            waited = traces.box and "has waited" in traces.box["reason"]
            if not traces.crash or waited:
                continue
            match = _SIGNAL.search(traces.crash)
            stack = crashed_at(traces.crash, self.evidence.own)
            place = causes.where(stack[::-1])
            if not stack and (cause := self._ended_in_collective(rank, traces.crash)):
                return cause
            what = f"rank {rank} crashed in native code: {match[1] if match else 'a fatal signal'}"
            found = [match[0] if match else "Fatal Python error", *stack[:3]]
            lines = [f"logs/rank-{rank}.crash: {each}" for each in found]
            where = str(place) if place else self._at(rank)
            return Cause("crash", what, rank, where, evidence=[*lines, *self._of_worker(rank)])
        return None

    def _ended_in_collective(self, rank: int, crash: str) -> Cause | None:
        """Find an abort outside Python while a thread was in a collective."""
        stack = in_collective(crash, self.evidence.own)
        if not stack or "Aborted" not in crash:
            return None
        place = causes.where(stack[::-1])
        whose = rank if place is not None and place.whose == "user" else self._called_by_user()
        what = (
            f"the communication library ended rank {rank} (SIGABRT) in {stack[0].function}, as "
            "gloo does if ranks are in different collectives"
        )
        lines = [f"logs/rank-{rank}.crash: {frame}" for frame in (stack[0], place)]
        lines += [*self._of_worker(rank), *self._of_collectives()]
        return Cause("ranks_differ", what, whose, str(place), "medium", lines)

    def _called_by_user(self) -> int | None:
        """Return the only rank whose pending collective was called by the user's code."""
        pending = {
            rank
            for rank, traces in self.traces.items()
            for call in collectives(traces.box or {})
            if call["pending"] and called_by_user(call)
        }
        return pending.pop() if len(pending) == 1 else None

    def _raised(self) -> Cause | None:
        """Find the first failure that is not a consequence of another rank's."""
        own = self.evidence.own
        failures = [
            (float(traces.failure["time"]), rank, traces.failure)
            for rank, traces in self.traces.items()
            if traces.failure is not None
            and not causes.is_consequence(traces.failure, own)
            and MemoryKill.from_text(traces.failure["trace"]) is None  # see `_short_of_memory`
        ]
        if not failures:
            return None
        failures.sort(key=lambda item: item[:2])
        _, rank, failure = failures[0]
        kind, place = causes.kind_of(failure, own)
        at = failure.get("where")
        if place is not None and (place.whose == "user" or not at):
            at = str(place)
        whose: int | None = rank
        if kind == "ranks_differ":
            blamed = failure.get("blamed")
            whose = blamed if blamed is not None else self._odd_rank()
            at = failure.get("where") if failure.get("kind") == "GuardError" else at
        others = ", ".join(str(other) for _, other, _ in failures[1:])
        also = f"; so did rank {others}" if others else ""
        file = failure.get("file") or f"rank-{failure['rank']}.failure.json"
        lines = [
            f"logs/{file}: {_short(failure['what'])}{also}",
            *(self._of_waiting() if kind == "frozen" else []),
            *self._of_difference(),
            *self._of_memory(rank if kind in ("memory", "frozen") else None),
        ]
        what = _NATIVE.split(failure["what"])[0][:2000]
        remedy = failure.get("remedy") or self._memory_remedy(rank, kind)
        return Cause(kind, what, whose, at, evidence=lines, remedy=remedy)

    def _odd_rank(self) -> int | None:
        if self.late is not None:
            return self.late
        own = self.evidence.own
        failures = {rank: t.failure for rank, t in self.traces.items() if t.failure}
        places = {rank: causes.kind_of(failure, own)[1] for rank, failure in failures.items()}
        users = [rank for rank, place in places.items() if place and place.whose == "user"]
        return users[0] if len(users) == 1 else None

    def _died(self) -> Cause | None:
        lost_nodes = {rank: lost_with(self.evidence, rank) for rank in self.ranks}
        dead = [r for r in self.ranks.values() if r.state == "died" or lost_nodes[r.rank]]
        if not dead:
            return None
        # a lost node comes first, since other ranks may have ended because of it
        rank = min(
            dead, key=lambda r: (not lost_nodes[r.rank], r.last_sign or self.evidence.now, r.rank)
        )
        lost, text = lost_nodes[rank.rank], self._worker_text(rank.rank)
        kind = "node_lost" if lost else causes.kind_of_death(text)
        evidence = [f"logs/driver.json: lost {_short(lost)}"] if lost else []
        evidence += [*self._of_worker(rank.rank), *self._of_life(rank)]
        confidence = "high" if text or lost else "medium"
        what = "ended without a report: SIGKILL, or os._exit"
        if kind == "node_lost":
            host, _, why = lost.partition(": ") if lost else (rank.host or "", "", "")
            what = f"was lost with its node {host}".rstrip() + (f": {why}" if why else "")
        elif kind == "memory":
            what, users = _killed_for_memory(MemoryKill.from_text(text))
            evidence += users
        elif (kills := self._oom_kills(rank)) > 0:
            kind, what = "memory", "was killed by the kernel because memory ran out"
            evidence.append(f"{kills} process(es) killed for memory on {rank.host} during the run")
        elif rank.memory_used is not None and rank.memory_used > _FULL:
            kind, confidence = "memory", "medium"
            what = "was killed, most likely because memory ran out"
        if kind == "memory":
            evidence += self._of_memory(rank.rank)
        what, remedy = f"rank {rank.rank} {what}", self._memory_remedy(rank.rank, kind)
        return Cause(kind, what, rank.rank, self._at(rank.rank), confidence, evidence, remedy)

    def _short_of_memory(self) -> Cause | None:
        """Find a process that Ray killed for memory, by the error of Ray Train or of a rank that
        called the process; a rank is identified by its pid."""
        failures = [traces.failure for traces in self.traces.values() if traces.failure]
        texts = [self.evidence.ray_text, *(failure["trace"] for failure in failures)]
        kill = next(filter(None, map(MemoryKill.from_text, texts)), None)
        if kill is None:
            return None
        what, users = _killed_for_memory(kill)
        rank = {t.state.pid: t.rank for t in self.evidence.ranks if t.state}.get(kill.pid)
        who = f"{kill.process or 'a process'} (pid {kill.pid})" if rank is None else f"rank {rank}"
        lines = [*self._of_error(), *users, *(self._of_memory(rank) or self._of_plan())]
        remedy = self._memory_remedy(rank, "memory")
        return Cause("memory", f"{who} {what}", rank, kill.host, "high", lines, remedy)

    def _blamed(self) -> Cause | None:
        """Find a rank that could not prepare its batch and did not record why, by the records of
        the ranks that it alarmed."""
        for rank, traces in self.traces.items():
            match = _BLAMES.match(_what(traces))
            if match and not causes.is_consequence({"what": match[2], "trace": ""}):
                lines = [f"logs/rank-{rank}.failure.json: {_short(match[0])}"]
                return Cause("data", match[0], int(match[1]), None, "medium", lines)
        return None

    def _frozen(self) -> Cause | None:
        frozen = [rank for rank in self.ranks.values() if rank.state == "frozen"]
        if not frozen:
            return None
        rank = min(frozen, key=lambda r: r.last_sign)
        what = (
            f"rank {rank.rank} sent no heartbeat for {rank.silent:.0f} s while other ranks waited"
        )
        lines = [*self._of_life(rank), *self._of_collectives()]
        confidence = "high" if self._others_wait() else "medium"
        return Cause("frozen", what, rank.rank, self._at(rank.rank), confidence, lines)

    def _different(self) -> Cause | None:
        difference = self.difference
        if difference is None or difference["kind"] == "missing":
            return None
        odd, calls = difference["odd"], _side_by_side(difference)
        what = f"the ranks' collectives differ in their {difference['kind']}: {calls}"
        at = next((r.get("at") for r in difference["ranks"] if r["rank"] == odd), None)
        lines = [*self._of_difference(), *self._of_waiting()]
        return Cause("ranks_differ", what, odd, at, "medium" if odd is None else "high", lines)

    def _stuck(self) -> Cause | None:
        """Find a rank for which the other ranks waited while it ran the user's code."""
        busy = [rank for rank in self.ranks.values() if rank.state == "busy"]
        if not busy or not self._others_wait():
            return None
        rank = next((r for r in busy if r.rank == self.late), busy[0])
        place = rank.place
        kind = "stuck" if place is not None and place.whose == "user" else "timeout"
        sure = kind == "stuck" and (self.late == rank.rank or len(busy) == 1)
        doing = f"in {place.function}" if place else "in unknown code"
        what = f"rank {rank.rank} was {doing} while the other ranks waited for it"
        lines = [f"logs/rank-{rank.rank}.blackbox.json: {rank.training or rank.prefetch}"]
        lines += self._of_collectives()
        where = str(place) if place else None
        return Cause(kind, what, rank.rank, where, "high" if sure else "medium", lines)

    def _slow(self) -> Cause | None:
        failed = [traces for traces in self.traces.values() if traces.failure]
        if not failed:
            return None
        first = _what(min(failed, key=lambda traces: (traces.failure or {})["time"]))
        timed_out = "time" in first.lower()
        happened = "communication timed out" if timed_out else "the connection between ranks broke"
        lines = [f"logs/rank-{t.rank}.failure.json: {_short(_what(t))}" for t in failed]
        lines += self._of_collectives()
        kind, what = "timeout" if timed_out else "unknown", f"{happened}: {_short(first)}"
        confidence = "medium" if timed_out and self.late is not None else "low"
        return Cause(kind, what, self.late, None, confidence, lines)

    def _unstarted(self) -> Cause | None:
        if any(t.state or t.box for t in self.evidence.ranks) or not self.evidence.error:
            return None
        what, _, remedy = self.evidence.error.partition("\n  → ")
        return Cause("setup", what, None, None, "medium", self._of_error(), remedy)

    def _others_wait(self) -> bool:
        return any(rank.state in ("waiting", "raised") for rank in self.ranks.values())

    def _at(self, rank: int) -> str | None:
        known = self.ranks[rank]
        place = f"phase {known.phase}" if known.phase else None
        if place and known.step is not None:
            place += f", epoch {known.epoch}, step {known.step}"
        return ", ".join(part for part in (known.host, place) if part) or None

    def _worker_text(self, rank: int) -> str:
        worker = dead_worker(self.evidence, rank)
        return f"{worker['type']}: {worker.get('text')}" if worker is not None else ""

    def _oom_kills(self, rank: RankReport) -> int:
        """Count processes killed for memory on the rank's host, seen by other ranks or the
        driver."""
        boxes = [traces.box for traces in self.traces.values() if traces.box]
        counts = [box.get("oom_kills", 0) for box in boxes if box.get("host") == rank.host]
        return max([*counts, self.driver.get("oom_kills", 0)])

    def _memory_remedy(self, rank: int | None, kind: str) -> str:
        """Return the remedy for the largest estimated use, if that is most of what the rank held;
        else ""."""
        held = self.ranks.get(rank) if rank is not None else None
        most = max(self.evidence.memory, key=lambda item: item["bytes"], default=None)
        if kind != "memory" or most is None or held is None or 2 * most["bytes"] < held.rss:
            return ""
        return str(most["remedy"])

    # lines of evidence, each with the file that it comes from

    def _of_interrupted(self) -> list[str]:
        """Describe where the ranks were, except those that only failed after another rank."""
        own, lines = self.evidence.own, []
        for rank in self.ranks.values():
            failure = self.traces[rank.rank].failure
            if rank.training and not (failure and causes.is_consequence(failure, own)):
                verb = "" if rank.training.startswith("raised at ") else "was at "
                lines.append(f"rank {rank.rank} {verb}{rank.training}")
        return lines

    def _of_error(self) -> list[str]:
        return [f"summary.json: {_short(self.evidence.error)}"] if self.evidence.error else []

    def _of_worker(self, rank: int) -> list[str]:
        text = self._worker_text(rank)
        detail = _DETAIL.search(text)
        return [f"logs/driver.json: {_short(detail[1] if detail else text)}"] if text else []

    def _of_life(self, rank: RankReport) -> list[str]:
        if not rank.last_sign:
            return []
        before = f"last heartbeat {rank.silent:.1f} s before the other ranks' last"
        return [f"logs/rank-{rank.rank}.state: {before}, at {self._at(rank.rank)}"]

    def _of_collectives(self) -> list[str]:
        return [*self._of_waiting(), *self._of_difference()]

    def _of_waiting(self) -> list[str]:
        waiting = [rank for rank in self.ranks.values() if rank.waiting]
        return [f"logs/rank-{r.rank}.blackbox.json: waited in {r.waiting}" for r in waiting[:4]]

    def _of_difference(self) -> list[str]:
        if (difference := self.difference) is None:
            return []
        name = f"collective {difference['seq']} of group {difference['group']}"
        return [f"logs/rank-*.blackbox.json: {name}: {_side_by_side(difference)}"]

    def _of_memory(self, rank: int | None) -> list[str]:
        known = self.ranks.get(rank) if rank is not None else None
        if known is None or known.memory_used is None:
            return []
        used = f"{known.memory_used:.0%} of the memory of {known.host} in use"
        own = f"{known.rss / 2**30:.1f} GiB by this rank"
        return [f"logs/rank-{rank}.state: {used}, {own}", *self._of_plan()]

    def _of_plan(self) -> list[str]:
        planned = [f"{item['use']} {size(item['bytes'])}" for item in self.evidence.memory]
        return [f"preflight.json: estimate for a node: {', '.join(planned)}"] if planned else []


def _killed_for_memory(kill: MemoryKill | None) -> tuple[str, list[str]]:
    """Return a description of the kill, and lines of evidence."""
    if kill is None:
        return "was killed because its node ran out of memory", []
    used = [f"logs/driver.json: used most there: {', '.join(kill.users)}"] if kill.users else []
    return f"was killed by Ray for memory: {kill.why}", used


def _what(traces: Traces) -> str:
    return str(traces.failure["what"]) if traces.failure else ""


def _short(text: str, length: int = 300) -> str:
    line = " ".join(text.split())
    return line if len(line) <= length else line[:length] + "…"


def _side_by_side(difference: Mapping[str, Any]) -> str:
    """Return ``rank 0 all_reduce Float [4], rank 1 did not reach it``."""
    parts = []
    for rank in difference["ranks"][:8]:
        what = ["did not reach it"]
        if rank["op"] is not None:
            what = [rank["op"], *(rank["dtypes"] or [])[:4], *(rank["sizes"] or [])[:4]]
        parts.append(" ".join(map(str, [f"rank {rank['rank']}", *what])))
    return ", ".join(parts)


def show(diagnosis: Diagnosis, display: Display) -> None:
    """Print the cause, its evidence, each rank, and the first collective that differs."""
    cause = diagnosis.cause
    rows = {
        "run": f"{diagnosis.run} ({diagnosis.status})",
        "cause": f"{cause.kind}: {cause.what}",
        "rank": "" if cause.rank is None else str(cause.rank),
        "where": cause.where,
        "confidence": "" if cause.kind in ("none", "running") else cause.confidence,
        "remedy": cause.remedy,
    }
    display.header({name: value for name, value in rows.items() if value})
    for line in cause.evidence:
        display.note(f"evidence: {line}")
    if diagnosis.ranks and cause.kind not in ("none", "interrupted"):
        title = f"ranks in attempt {diagnosis.attempt}"
        shown = sorted(diagnosis.ranks, key=lambda r: (r.state in ("waiting", "running"), r.rank))
        if len(shown) > _RANKS:
            title += f", {_RANKS} of {len(shown)}"
        display.table(title, _COLUMNS, [_row(rank) for rank in shown[:_RANKS]])
    if (found := diagnosis.first_difference) is not None:
        calls = [
            (
                call["rank"],
                call["op"] or "did not reach it",
                *(" ".join(map(str, call.get(key) or ())) for key in ("dtypes", "sizes")),
                call.get("at"),
            )
            for call in found["ranks"][:_RANKS]
        ]
        name = f"{found['seq']} of group {found['group']}, {found['kind']}"
        columns = ("rank", "collective", "dtypes", "sizes", "called at")
        display.table(f"the first collective that differs: {name}", columns, calls)
    for note in diagnosis.notes:
        display.note(f"note: {note}")


def _row(rank: RankReport) -> tuple[object, ...]:
    state = f"{rank.state} ({rank.waiting})" if rank.waiting else rank.state
    at = (rank.phase, rank.epoch, rank.step)
    return (rank.rank, rank.host, state, *at, rank.training, rank.prefetch)
