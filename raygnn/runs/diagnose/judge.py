"""From what a run left to what happened: pure, and honest about how sure it is."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any

from raygnn.runs.diagnose import causes
from raygnn.runs.diagnose.causes import Cause
from raygnn.runs.diagnose.flights import called_by_user, first_difference
from raygnn.runs.diagnose.memory import MemoryKill
from raygnn.runs.diagnose.ranks import RankReport, collectives, lost_with, report
from raygnn.runs.diagnose.reading import Evidence
from raygnn.runs.diagnose.words import Clues, file_of, short, side_by_side, what_of, without_native
from raygnn.runs.tracebacks import crashed_at, in_collective

_FULL = 0.92  # of the memory in use: a silent death there is likely the kernel's doing
_SIGNAL = re.compile(r"Fatal Python error: (.+)")
_SHORT = {"batch", "forward", "backward", "optimizer"}  # phases of one step
_STILL = 60.0  # seconds in one phase that are worth a word
_STALE = 60.0  # seconds without a sign of life after which nothing runs any more


@dataclass(frozen=True)
class Diagnosis:
    """A run, what ended it, and what its ranks were doing."""

    run: str
    status: str
    attempt: int
    cause: Cause
    ranks: list[RankReport]
    first_difference: dict[str, Any] | None
    earlier: list[dict[str, Any]]
    notes: list[str]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return asdict(self)


def judge(evidence: Evidence) -> Diagnosis:
    """Say what happened."""
    flights = {t.rank: collectives(t.box) for t in evidence.ranks if t.box}
    difference = first_difference(flights)
    ranks = [report(traces, evidence) for traces in evidence.ranks]
    cause = _Judge(evidence, ranks, difference).cause()
    if not cause.remedy:
        cause = Cause(**{**asdict(cause), "remedy": causes.REMEDIES[cause.kind]})
    return Diagnosis(
        run=evidence.run,
        status=evidence.status,
        attempt=evidence.attempt,
        cause=cause,
        ranks=ranks,
        first_difference=None if cause.kind in ("none", "running") else difference,
        earlier=[dict(item) for item in evidence.earlier],
        notes=list(evidence.notes),
    )


class _Judge(Clues):
    """Asks one question after the other; the first that is answered is the cause."""

    def cause(self) -> Cause:
        for question in (
            self._by_status,
            self._ray_died,
            self._crashed,
            self._raised,
            self._died,
            self._short_of_memory,
            self._blamed,
            self._frozen,
            self._different,
            self._stuck,
            self._slow,
            self._unstarted,
        ):
            if (cause := question()) is not None:
                return cause
        return Cause(
            "unknown",
            self.evidence.error or "the run failed, and what it left does not say why",
            confidence="low",
            evidence=self.said(),
        )

    def _by_status(self) -> Cause | None:
        status = self.evidence.status
        said = [f"summary.json: status {status}"]
        if status == "done":
            return Cause("none", "nothing to diagnose: the run is done", evidence=said)
        if status == "interrupted":
            said += [
                f"rank {r.rank} was at {r.training}" for r in self.ranks.values() if r.training
            ]
            return Cause(
                "interrupted", "the run was interrupted (Ctrl-C or SIGTERM)", evidence=said
            )
        if status in ("running", "killed"):
            if any(t.failure or t.crash for t in self.evidence.ranks) and status == "killed":
                return None  # the command could not write down any more that it had failed
            last = max((r.last_sign for r in self.ranks.values()), default=0.0)
            silent = self.evidence.now - last
            if status == "running" and (not last or silent < _STALE):
                return self._running([*said, ".lock: held"])
            if status == "running":
                said.append(f"logs/rank-*.state: the last sign of life is {silent:,.0f} s old")
            else:
                said.append(".lock: its holder is gone")
            return Cause(
                "command_gone",
                "the command that trained ended without a word: killed, or its machine went down",
                confidence="high" if status == "killed" else "medium",
                evidence=said,
            )
        return None

    def _ray_died(self) -> Cause | None:
        driver = self.evidence.driver or {}
        if not driver.get("ray_died"):
            return None
        return Cause("ray_died", driver["error"], evidence=[f"logs/driver.json: {driver['error']}"])

    def _running(self, said: list[str]) -> Cause:
        """The run goes on, or stands still."""
        known = [rank for rank in self.ranks.values() if rank.since and rank.phase]
        ages = {rank.rank: max(0.0, self.evidence.now - rank.since) for rank in known}
        said += [f"logs/rank-{r.rank}.state: {r.phase} for {ages[r.rank]:,.0f} s" for r in known]
        still = min(ages.values(), default=0.0)
        if still < _STILL or not {rank.phase for rank in known} <= _SHORT:
            return Cause("running", "the run goes on", evidence=said)
        doing = ", ".join(f"rank {rank.rank} in {rank.phase}" for rank in known)
        return Cause(
            "running",
            f"the run stands still: {doing}, for {still:,.0f} s",
            confidence="medium",
            evidence=said,
            remedy="if that is too long for it, end it (Ctrl-C) and ask again: ranks that are "
            "ended leave their stacks; a wait for other ranks ends after comm.timeout",
        )

    def _crashed(self) -> Cause | None:
        """A native crash, unless it is how a collective's timeout ends the process (NCCL)."""
        for rank, traces in self.traces.items():
            waited = traces.box and "has waited" in traces.box["reason"]
            if not traces.crash or waited:
                continue
            match = _SIGNAL.search(traces.crash)
            stack = crashed_at(traces.crash, self.evidence.own)
            place = causes.where(stack[::-1])
            if not stack and (cause := self._ended_in_collective(rank, traces.crash)):
                return cause
            return Cause(
                "crash",
                f"rank {rank} crashed in native code: {match[1] if match else 'a fatal signal'}",
                rank=rank,
                where=str(place) if place else self.at(rank),
                evidence=[
                    f"logs/rank-{rank}.crash: {match[0] if match else 'Fatal Python error'}",
                    *(f"logs/rank-{rank}.crash: {frame}" for frame in stack[:3]),
                    *self.of_driver(rank),
                ],
            )
        return None

    def _ended_in_collective(self, rank: int, crash: str) -> Cause | None:
        """A process that no Python thread brought down, while one of them was in a collective."""
        stack = in_collective(crash, self.evidence.own)
        if not stack or "Aborted" not in crash:
            return None
        place = causes.where(stack[::-1])
        whose = rank if place is not None and place.whose == "user" else self._called_by_user()
        return Cause(
            "ranks_differ",
            f"the communication library ended rank {rank} (SIGABRT) in {stack[0].function}, as "
            "gloo does where ranks meet in different collectives",
            whose,
            str(place) if place else None,
            "medium",
            [
                *(f"logs/rank-{rank}.crash: {frame}" for frame in (stack[0], place)),
                *self.of_driver(rank),
                *self.of_waiting(),
                *self.of_difference(),
            ],
        )

    def _called_by_user(self) -> int | None:
        """The one rank whose collective under way was called by the user's code."""
        found = {
            rank
            for rank, traces in self.traces.items()
            for entry in collectives(traces.box or {})
            if isinstance(entry, dict) and entry.get("pending") and called_by_user(entry)
        }
        return found.pop() if len(found) == 1 else None

    def _raised(self) -> Cause | None:
        """The first failure that is not just the end of another rank."""
        own = self.evidence.own
        found = []
        for rank, traces in self.traces.items():
            if (failure := traces.failure) is None or causes.is_consequence(failure, own):
                continue
            found.append((float(failure["time"]), rank, failure, *causes.kind_of(failure, own)))
        if not found:
            return None
        found.sort(key=lambda item: item[:2])
        _, rank, failure, kind, place = found[0]
        blamed = failure.get("blamed")
        at = failure.get("where")
        if place is not None and (place.whose == "user" or not at):
            at = str(place)
        whose: int | None = rank
        if kind == "ranks_differ":
            whose = blamed if isinstance(blamed, int) else self._odd()
            at = failure.get("where") if failure.get("kind") == "GuardError" else at
        others = [other[1] for other in found[1:]]
        also = f"; so did rank {', '.join(map(str, others))}" if others else ""
        return Cause(
            kind,
            without_native(failure["what"]),
            rank=whose,
            where=str(at) if at else None,
            evidence=[
                f"{file_of(failure)}: {short(failure['what'])}{also}",
                *(self.of_waiting() if kind == "frozen" else []),
                *self.of_difference(),
                *self.of_memory(rank if kind in ("memory", "frozen") else None),
            ],
            remedy=str(failure.get("remedy") or self.memory_remedy(rank, kind)),
        )

    def _odd(self) -> int | None:
        """Which rank differs, where the error names none."""
        if self.difference and self.difference["odd"] is not None:
            return int(self.difference["odd"])
        users = [
            other
            for other, traces in self.traces.items()
            if traces.failure
            and (at := causes.kind_of(traces.failure, self.evidence.own)[1])
            and at.whose == "user"
        ]
        return users[0] if len(users) == 1 else None

    def _died(self) -> Cause | None:
        """A rank that ended without a word."""
        lost = {rank.rank for rank in self.ranks.values() if lost_with(self.evidence, rank.rank)}
        dead = [r for r in self.ranks.values() if r.state == "died" or r.rank in lost]
        if not dead:
            return None
        # one whose node is gone, if there is one: that is why others may have ended, too
        rank = min(
            dead, key=lambda r: (r.rank not in lost, r.last_sign or self.evidence.now, r.rank)
        )
        text = self.driver_text(rank.rank)
        kind = "node_lost" if rank.rank in lost else causes.kind_of_death(text)
        evidence = [*self.of_lost(rank.rank), *self.of_driver(rank.rank), *self.of_life(rank)]
        confidence = "high" if text or rank.rank in lost else "medium"
        what = "ended without a word: SIGKILL, or os._exit"
        if kind == "node_lost":
            found = lost_with(self.evidence, rank.rank)
            host, _, why = found.partition(": ") if found else (rank.host or "", "", "")
            what = f"was lost with its node {host}".rstrip() + (f": {why}" if why else "")
        elif kind == "memory":
            what, users = self.killed_for_memory(text)
            evidence += users
        elif (kills := self.oom_kills(rank)) > 0:
            kind, what = "memory", "was killed by the kernel for want of memory"
            evidence.append(f"{kills} process(es) killed for memory on {rank.host} during the run")
        elif rank.memory_used is not None and rank.memory_used > _FULL:
            kind, confidence = "memory", "medium"
            what = "was killed, most likely for want of memory"
        if kind == "memory":
            evidence += self.of_memory(rank.rank)
        what, remedy = f"rank {rank.rank} {what}", self.memory_remedy(rank.rank, kind)
        return Cause(kind, what, rank.rank, self.at(rank.rank), confidence, evidence, remedy)

    def _short_of_memory(self) -> Cause | None:
        """A process of the run that Ray killed for memory, known by its number if it is a rank."""
        if (kill := MemoryKill.of(self.evidence.ray_text)) is None:
            return None
        what, users = self.killed_for_memory(self.evidence.ray_text)
        rank = {t.state.start.pid: t.rank for t in self.evidence.ranks if t.state}.get(kill.pid)
        who = f"{kill.process or 'a process'} (pid {kill.pid})" if rank is None else f"rank {rank}"
        used = [*self.said(), *users, *(self.of_memory(rank) or self.of_plan())]
        remedy = self.memory_remedy(rank, "memory")
        return Cause("memory", f"{who} {what}", rank, kill.host, "high", used, remedy)

    def _blamed(self) -> Cause | None:
        """A rank that another one names, but whose own record, if any, is of a consequence."""
        for rank, traces in self.traces.items():
            match = re.match(
                r"rank (\d{1,9}) could not prepare its batch: (.*)", what_of(traces), re.S
            )
            if match and not causes.is_consequence({"what": match[2], "trace": ""}):
                return Cause(
                    "data",
                    f"rank {match[1]} could not prepare its batch: {match[2]}",
                    int(match[1]),
                    confidence="medium",
                    evidence=[f"logs/rank-{rank}.failure.json: {short(what_of(traces))}"],
                )
        return None

    def _frozen(self) -> Cause | None:
        frozen = [rank for rank in self.ranks.values() if rank.state == "frozen"]
        if not frozen:
            return None
        rank = min(frozen, key=lambda r: r.last_sign)
        waiting = [r.rank for r in self.ranks.values() if r.state in ("waiting", "raised")]
        return Cause(
            "frozen",
            f"rank {rank.rank} gave no sign of life for {rank.silent:.0f} s while others waited",
            rank.rank,
            self.at(rank.rank),
            "high" if waiting else "medium",
            [*self.of_life(rank), *self.of_waiting(), *self.of_difference()],
        )

    def _different(self) -> Cause | None:
        found = self.difference
        if found is None or found["kind"] == "missing":
            return None
        at = next((r.get("at") for r in found["ranks"] if r["rank"] == found["odd"]), None)
        return Cause(
            "ranks_differ",
            f"the ranks' collectives differ in their {found['kind']}: {side_by_side(found)}",
            found["odd"],
            at,
            "high" if found["odd"] is not None else "medium",
            [*self.of_difference(), *self.of_waiting()],
        )

    def _stuck(self) -> Cause | None:
        """A rank that the others waited for, and that was in somebody's code meanwhile."""
        waiting = [r for r in self.ranks.values() if r.state in ("waiting", "raised")]
        busy = [r for r in self.ranks.values() if r.state == "busy"]
        if not busy or not waiting:
            return None
        late = self.difference["odd"] if self.difference else None
        rank = next((r for r in busy if r.rank == late), busy[0])
        place = rank.place
        sure = late == rank.rank or len(busy) == 1
        kind = "stuck" if place is not None and place.whose == "user" else "timeout"
        doing = f"in {place.function}" if place else "in code that is not known"
        return Cause(
            kind,
            f"rank {rank.rank} was {doing} while the others waited for it",
            rank.rank,
            str(place) if place else None,
            "high" if sure and kind == "stuck" else "medium",
            [
                f"logs/rank-{rank.rank}.blackbox.json: {rank.training or rank.prefetch}",
                *self.of_waiting(),
                *self.of_difference(),
            ],
        )

    def _slow(self) -> Cause | None:
        said = [r for r, t in self.traces.items() if what_of(t)]
        if not said:
            return None
        first = min(said, key=lambda r: self.traces[r].failure["time"])  # type: ignore[index]
        what = what_of(self.traces[first])
        late = self.difference["odd"] if self.difference else None
        timed_out = "time" in what.lower()
        return Cause(
            "timeout" if timed_out else "unknown",
            ("communication timed out: " if timed_out else "the connection between ranks broke: ")
            + short(what),
            late,
            confidence="medium" if timed_out and late is not None else "low",
            evidence=[
                *(f"logs/rank-{r}.failure.json: {short(what_of(self.traces[r]))}" for r in said),
                *self.of_waiting(),
                *self.of_difference(),
            ],
        )

    def _unstarted(self) -> Cause | None:
        if any(t.state or t.box for t in self.evidence.ranks) or not self.evidence.error:
            return None
        what, _, remedy = self.evidence.error.partition("\n  → ")
        return Cause("setup", what, None, None, "medium", self.said(), remedy)
