"""Scaling and failure policies for Ray Train: the number of workers of each attempt, and restarts.

Ray's policies start the requested number of workers, or as many as fitted some time ago, and then
wait silently for nodes that do not come. Ours counts the free resources at each attempt and fails
the run if they are too few for too long. With ``cluster.workers: [min, max]`` a run also continues
with fewer workers, and with more once they fit again.

The policies run in the process of Ray Train's controller: on an embedded Ray, the driver.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from raygnn import compat
from raygnn.checkpoint import store
from raygnn.compat import (
    DefaultFailurePolicy,
    FailureDecision,
    FixedScalingPolicy,
    NoopDecision,
    ResizeDecision,
    ScalingDecision,
)
from raygnn.errors import TrainingError
from raygnn.preflight.findings import some
from raygnn.runs.run_directory import SCALING, Events
from raygnn.worker import ray_nodes
from raygnn.worker.control import Control, ControlHandle, Snapshot

log = logging.getLogger("raygnn")

_POLL = 1.0  # seconds between counts of free resources while nothing runs
_SETTLE = 3.0  # seconds for which fewer workers than the maximum fit before they are started
_GROW_POLL = 15.0  # seconds between such counts while ranks run
_NAMED = 4  # lost ranks that a message names
_AGAIN = 300.0  # seconds until the next attempt to grow, after one without a checkpoint
_SAVING = 30.0  # seconds for the ranks to write the checkpoint from which more of them resume


class Failures(DefaultFailurePolicy):
    """Fails the run without a restart if a rank marks its failure as deterministic. The mark is in
    the exception, since a full disk may prevent the rank's record. ``stopped``: returns True once
    the command has stopped the job; None = never."""

    def __init__(self, failure_config: Any, stopped: Callable[[], bool] | None = None):
        super().__init__(failure_config)
        self._stopped = stopped

    def make_decision(self, training_failed_error: Any) -> FailureDecision:
        if self._stopped is not None and self._stopped():
            return FailureDecision.RAISE
        failures = getattr(training_failed_error, "worker_failures", {})
        if any(getattr(failure, "final", False) for failure in failures.values()):
            return FailureDecision.RAISE
        return super().make_decision(training_failed_error)


class Scaling(FixedScalingPolicy):
    """Starts as many workers as fit, from ``fewest`` to ``scaling_config.num_workers``.
    ``patience``: seconds to wait until the fewest fit."""

    def __init__(
        self,
        scaling_config: Any,
        fewest: int,
        run_dir: Path,
        control: Control | ControlHandle,
        patience: float,
    ):
        super().__init__(scaling_config)
        self._fewest, self._most = fewest, int(scaling_config.num_workers)
        self._run_dir = run_dir
        self._control = control
        self._patience = patience
        self._starts_before = control.snapshot().starts  # of an earlier controller's ranks
        self._starts_seen = self._starts_before  # at the last decision
        self._waiting: float | None = None  # since when the fewest do not fit
        self._settling: float | None = None  # since when the fewest fit, but not the most
        self._next_count = 0.0
        self._more = 0  # workers that fitted at the last count while the ranks ran
        self._request: str | None = None
        self._requested = 0.0  # when

    def make_decision_for_non_running_worker_group(self) -> ScalingDecision:
        """Start as many workers as fit, or wait. Raises TrainingError if the fewest do not fit for
        longer than the patience, or the driver stops the job."""
        full: Any = super().make_decision_for_non_running_worker_group()
        self._more = 0
        self._withdraw()
        snapshot = self._control.snapshot()
        if snapshot.starts == self._starts_before and self._fewest == self._most:
            return full  # the first attempt: Ray waits, and the driver reports for what
        fit, now = self._count(snapshot), time.monotonic()
        if fit >= self._fewest and self._settling is None:
            self._settling = now
        settled = self._settling is not None and now - self._settling >= _SETTLE
        if fit >= self._most or (fit >= self._fewest and settled):
            if fit < self._most:
                self._report(f"{some(fit, 'worker')} of {self._most}{self._lost(snapshot)}")
            self._waiting = self._settling = None
            self._next_count = now + _GROW_POLL
            self._starts_seen = snapshot.starts
            return replace(full, num_workers=fit)
        if fit < self._fewest:
            self._settling = None
            if self._waiting is None:
                self._waiting = now
                self._report(
                    f"waiting up to {self._patience:.0f} s for resources for "
                    f"{self._fewest} workers: there are resources for {fit}{self._lost(snapshot)}"
                )
            if now - self._waiting >= self._patience:
                raise self._too_few(fit, snapshot)
        if snapshot.orders.stop:
            raise TrainingError("the command ended the run while it waited for resources")
        time.sleep(_POLL)  # Ray would ask again at once
        return NoopDecision()

    def make_decision_for_running_worker_group(
        self, worker_group_state: Any, worker_group_status: Any
    ) -> ScalingDecision:
        """Restart with more workers, after a checkpoint, once they have fitted at two counts."""
        nothing = super().make_decision_for_running_worker_group(
            worker_group_state, worker_group_status
        )
        size, now = len(worker_group_state.workers), time.monotonic()
        if size >= self._most or (self._request is None and now < self._next_count):
            return nothing
        self._next_count = now + _GROW_POLL
        snapshot = self._control.snapshot()
        fit, before = self._count(snapshot), self._more
        self._more = fit
        if min(fit, before) <= size:
            self._withdraw()
            return nothing
        if not self._saved(now, snapshot):
            return nothing
        self._starts_seen = snapshot.starts
        return ResizeDecision(
            num_workers=fit, resources_per_worker=compat.resources_of(self.scaling_config)
        )

    def _count(self, snapshot: Snapshot) -> int:
        """Return how many workers fit once running ranks, if any, have released their resources."""
        needs = compat.resources_of(self.scaling_config)
        wanted = {name: n for name, n in needs.items() if n}
        running = snapshot.workers if snapshot.starts > self._starts_seen else ()
        try:
            return min(ray_nodes.room(wanted, running), self._most)
        except Exception:  # Ray does not answer, which need not end ranks that run
            log.warning("free resources cannot be counted", exc_info=True)
            return 0

    def _saved(self, now: float, snapshot: Snapshot) -> bool:
        """Request a checkpoint, and return True once it is written. If that takes too long, the
        ranks continue unchanged, since a restart would lose steps."""
        if self._request is None:
            self._request, self._requested = self._control.ask_save(), now
            self._report(f"there are resources for {self._more} workers: saving a checkpoint first")
            return False
        saved = snapshot.answers.get(self._request)
        if saved is None and now - self._requested < _SAVING:
            return False
        self._withdraw()
        if saved:
            newest = store.newest(self._run_dir / "checkpoints")
            self._report(f"restarting with {self._more} workers from {newest}")
            return True
        self._report("no checkpoint was written in time, so the ranks continue unchanged")
        self._next_count = now + _AGAIN
        return False

    def _withdraw(self) -> None:
        if self._request is not None:
            self._control.withdraw_save(self._request)
            self._request = None

    def _lost(self, snapshot: Snapshot) -> str:
        lost = ray_nodes.lost(snapshot.workers) if snapshot.workers else []
        return "".join(f"; {rank}" for rank in lost[:_NAMED])

    def _report(self, what: str) -> None:
        events = Events(self._run_dir / "logs" / SCALING)
        events.notify(what)
        events.close()

    def _too_few(self, fit: int, snapshot: Snapshot) -> TrainingError:
        lost = ray_nodes.lost(snapshot.workers)
        return TrainingError(
            f"there are resources for {some(fit, 'worker')} of {self._fewest}, after "
            f"{self._patience:.0f} s{self._lost(snapshot)}",
            where=f"rank {lost[0].rank} on {lost[0].host}" if lost else None,
            remedy="bring the node back or add another, and train with --resume; with "
            "cluster.workers: [min, max] a run continues with the workers that are left",
            rank=lost[0].rank if lost else None,
        )
