"""The words for what a run left: lines of evidence, each with the file that it comes from."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from raygnn.config.places import size
from raygnn.runs.diagnose.memory import MemoryKill
from raygnn.runs.diagnose.ranks import RankReport, lost_with
from raygnn.runs.diagnose.reading import Evidence, Traces

# what matters in Ray's words, between its worker's particulars and its guesses at reasons
_DETAIL = re.compile(
    r"(?:Worker exit detail: |(?=The actor (?:is dead|died) because))(.+?)"
    r"(?:Some common causes|There are some potential root causes|$)",
    re.S,
)


class Clues:
    """What is known of a run, and its wording.

    Args:
        difference: see `raygnn.runs.diagnose.flights.first_difference`.
    """

    def __init__(
        self, evidence: Evidence, ranks: list[RankReport], difference: dict[str, Any] | None
    ):
        self.evidence = evidence
        self.ranks = {rank.rank: rank for rank in ranks}
        self.traces = {traces.rank: traces for traces in evidence.ranks}
        self.difference = difference

    def said(self) -> list[str]:
        return [f"summary.json: {short(self.evidence.error)}"] if self.evidence.error else []

    def at(self, rank: int) -> str | None:
        """Where a rank was, as far as that is known of one that could say nothing."""
        report = self.ranks[rank]
        place = f"phase {report.phase}" if report.phase else None
        if place and report.step is not None:
            place += f", epoch {report.epoch}, step {report.step}"
        return ", ".join(part for part in (report.host, place) if part) or None

    def driver_text(self, rank: int) -> str:
        workers = (self.evidence.driver or {}).get("workers", {})
        worker = workers.get(str(rank))
        if not isinstance(worker, Mapping) or worker.get("said"):
            return ""
        return f"{worker.get('type')}: {worker.get('text')}"

    def of_driver(self, rank: int) -> list[str]:
        text = self.driver_text(rank)
        if not text:
            return []
        said = _DETAIL.search(text)
        return [f"logs/driver.json: {short(said[1] if said else text)}"]

    def of_lost(self, rank: int) -> list[str]:
        lost = lost_with(self.evidence, rank)
        return [f"logs/driver.json: lost {short(lost)}"] if lost else []

    def of_life(self, rank: RankReport) -> list[str]:
        if not rank.last_sign:
            return []
        at = self.at(rank.rank)
        return [f"logs/rank-{rank.rank}.state: last sign of life {rank.silent:.1f} s before the "
                f"others' last, at {at}"]  # fmt: skip

    def of_waiting(self) -> list[str]:
        return [
            f"logs/rank-{r.rank}.blackbox.json: waited in {r.waiting}"
            for r in self.ranks.values()
            if r.waiting
        ][:4]

    def of_difference(self) -> list[str]:
        found = self.difference
        if found is None:
            return []
        name = f"collective {found['seq']} of group {found['group']}"
        return [f"logs/rank-*.blackbox.json: {name}: {side_by_side(found)}"]

    def of_memory(self, rank: int | None) -> list[str]:
        report = self.ranks.get(rank) if rank is not None else None
        if report is None or report.memory_used is None:
            return []
        return [f"logs/rank-{rank}.state: {report.memory_used:.0%} of the memory of {report.host} "
                f"in use, {report.rss / 2**30:.1f} GiB by this rank", *self.of_plan()]  # fmt: skip

    def of_plan(self) -> list[str]:
        """What the job was to keep in the memory of a node."""
        planned = [f"{each['use']} {size(each['bytes'])}" for each in self.evidence.memory]
        return [f"preflight.json: reckoned for a node: {', '.join(planned)}"] if planned else []

    def memory_remedy(self, rank: int | None, kind: str) -> str:
        """What to change: what most was reckoned for, if that is most of what a rank held; ""
        where the usual remedy fits."""
        report = self.ranks.get(rank) if rank is not None else None
        most = max(self.evidence.memory, key=lambda each: each["bytes"], default=None)
        if kind != "memory" or most is None or report is None or 2 * most["bytes"] < report.rss:
            return ""
        return str(most["remedy"])

    def killed_for_memory(self, text: str) -> tuple[str, list[str]]:
        """What happened to a process that Ray killed, by Ray's words, and what used the memory."""
        if (kill := MemoryKill.of(text)) is None:
            return "was killed because its node ran out of memory", []
        used = [f"logs/driver.json: used most there: {', '.join(kill.users)}"] if kill.users else []
        return f"was killed by Ray for memory: {kill.why}", used

    def oom_kills(self, rank: RankReport) -> int:
        """Processes killed for memory on the rank's host, as others there saw, or the driver."""
        counts = [
            traces.box.get("oom_kills")
            for traces in self.traces.values()
            if traces.box and traces.box.get("host") == rank.host
        ]
        counts.append((self.evidence.driver or {}).get("oom_kills"))
        return max((n for n in counts if isinstance(n, int)), default=0)


def what_of(traces: Traces) -> str:
    return str(traces.failure["what"]) if traces.failure else ""


def file_of(failure: Mapping[str, Any]) -> str:
    """The file that tells of a failure."""
    return f"logs/{failure.get('file') or 'rank-{}.failure.json'.format(failure['rank'])}"


def without_native(what: str) -> str:
    """An error's text without the native frames that torch adds to it."""
    return re.split(r"\n(?:Exception raised from|C\+\+ CapturedTraceback)", what)[0][:2000]


def short(text: str, length: int = 300) -> str:
    line = " ".join(text.split())
    return line if len(line) <= length else line[:length] + "…"


def side_by_side(difference: Mapping[str, Any]) -> str:
    """ "rank 0 all_reduce Float [[4]], rank 1 did not come to it"."""
    parts = []
    for rank in difference["ranks"][:8]:
        what = "did not come to it"
        if rank["op"] is not None:
            sizes, dtypes = rank.get("sizes"), rank.get("dtypes")
            what = f"{rank['op']} {_plain(dtypes)} {_plain(sizes)}".strip()
        parts.append(f"rank {rank['rank']} {what}")
    return ", ".join(parts)


def _plain(values: Any) -> str:
    return " ".join(map(str, values[:4])) if isinstance(values, list) else ""
