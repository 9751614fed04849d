"""Ranks that are slower than the other ranks, as rank 0 reports them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from raygnn.runs.metrics_files import COMPUTE

_WINDOWS = 3  # in a row, until a report
_STARVES = 0.2  # share of a batch's time that a rank waits for its loader
_LEAST = 5e-3  # seconds of a batch; less is noise
_LATE = 5.0  # seconds that a rank's first batch may come after the other ranks'


@dataclass
class _Streak:
    """Condition of one rank that is reported once, after it has lasted."""

    since: int = 0
    windows: int = 0
    reported: bool = False

    def is_news(self, holds: bool, step: int) -> bool:
        if not holds:
            self.windows = 0
            return False
        if not self.windows:
            self.since = step
        self.windows += 1
        news = self.windows >= _WINDOWS and not self.reported
        self.reported |= news
        return news


@dataclass
class _RankTimes:
    """Times of one rank over all windows. ``busy``, ``waited``: seconds of a batch, summed over
    windows; ``slow_windows``: number of windows in which it was slow."""

    busy: float = 0.0
    waited: float = 0.0
    slow_windows: int = 0
    slow: _Streak = field(default_factory=_Streak)
    starved: _Streak = field(default_factory=_Streak)


@dataclass
class Stragglers:
    """Watches the times of all ranks, window after window.

    All ranks take the same time for a step, since they wait for each other. A slow one is busy for
    longer on its own before it waits.

    Args:
        factor: a rank is slow if it is busy for more than ``factor`` times the median of the other
            ranks; None = no reports.
        notify: reports a sentence to the user.
        host: rank → its host, if known.
    """

    factor: float | None
    notify: Callable[[str], None]
    host: Callable[[int], str | None] = lambda rank: None
    _windows: int = 0
    _ranks: list[_RankTimes] = field(default_factory=list)
    _starved_told: bool = False

    def add(
        self, step: int, seconds: Mapping[str, Sequence[float]], batches: int = 1
    ) -> dict[str, float]:
        """Add a window that ended with this optimizer step.

        Args:
            seconds: part of a step (`raygnn.runs.metrics_files.STEP`) → seconds per batch, by rank.
            batches: number in the window.

        Returns:
            Values for the record of the window.
        """
        waits = seconds["wait"]
        if not self._ranks:  # the first batch includes the start of the loaders
            self._ranks = [_RankTimes() for _ in waits]
            self._see_late([batches * wait for wait in waits])
            waits = [0.0] * len(waits)
        parts = [seconds[name] for name in COMPUTE]
        busy = [wait + sum(own) for wait, *own in zip(waits, *parts)]
        totals = [b + sum(s) for b, *s in zip(busy, seconds["communicate"], seconds["peers"])]
        self._windows += 1
        for rank, times in enumerate(self._ranks):
            times.busy += busy[rank]
            times.waited += waits[rank]
            self._see_slow(rank, step, busy)
        self._see_starved(step, [w / (t or 1.0) for w, t in zip(waits, totals)], waits)
        slowest = max(range(len(busy)), key=busy.__getitem__)
        return {
            "ranks/slowest": slowest,
            "ranks/slowest_seconds": busy[slowest],
            "ranks/median_seconds": median(busy),
        }

    def summary(self) -> list[dict[str, Any]]:
        """Return each rank's mean ``busy`` and ``wait`` (seconds per batch), ``host``, and share of
        windows in which it was ``slow``: 0 if there are few windows, or if the other ranks took as
        long in all."""
        count = max(1, self._windows)
        return [
            {
                "rank": rank,
                "host": self.host(rank),
                "busy": times.busy / count,
                "wait": times.waited / count,
                "slow": times.slow_windows / count if self._was_slow(rank) else 0.0,
            }
            for rank, times in enumerate(self._ranks)
        ]

    def _was_slow(self, rank: int) -> bool:
        busy = [times.busy for times in self._ranks]
        more = busy[rank] - median(_others(busy, rank))
        # half of the least excess that makes a window slow
        return self._windows >= _WINDOWS and more > _LEAST / 2 * self._ranks[rank].slow_windows

    def _see_late(self, waits: Sequence[float]) -> None:
        latest = max(range(len(waits)), key=waits.__getitem__)
        late = waits[latest] - median(_others(waits, latest))
        if self.factor is not None and late > _LATE:
            name = self._name(latest)
            self.notify(f"{name} was ready for its first batch {late:.1f} s after the other ranks")

    def _see_slow(self, rank: int, step: int, busy: Sequence[float]) -> None:
        usual, times = median(_others(busy, rank)), self._ranks[rank]
        more = busy[rank] - usual
        slow = self.factor is not None and more > _LEAST and busy[rank] > self.factor * usual
        times.slow_windows += slow
        if times.slow.is_news(slow, step):
            self.notify(
                f"{self._name(rank)} slows down the other ranks: it is busy for "
                f"{busy[rank]:.3f} s a batch, they for {usual:.3f} s (median), since "
                f"step {times.slow.since:,}"
            )

    def _see_starved(self, step: int, shares: Sequence[float], waits: Sequence[float]) -> None:
        news = []
        for rank, share in enumerate(shares):
            starves = self.factor is not None and share > _STARVES and waits[rank] > _LEAST
            if self._ranks[rank].starved.is_news(starves, step):
                news.append(rank)
        if not news or self._starved_told:
            return
        self._starved_told = True  # the remedy is the same for all ranks
        worst = max(news, key=shares.__getitem__)
        who = f"{self._name(worst)} waits"
        if len(news) > 1:
            who = f"{len(news)} ranks, {self._name(worst)} most, wait"
        since = self._ranks[worst].starved.since
        self.notify(
            f"{who} for the next batch {shares[worst]:.0%} of the time, since step {since:,}: a "
            "higher sampling.prefetch or smaller fanouts may help"
        )

    def _name(self, rank: int) -> str:
        host = self.host(rank)
        return f"rank {rank} on {host}" if host else f"rank {rank}"


def _others(values: Sequence[float], rank: int) -> list[float]:
    return [value for other, value in enumerate(values) if other != rank]
