"""How many workers each start of the ranks gets, and whether there is another: policies of Ray
Train's.

Ray's own policies start what was asked for, or as many as Ray has had room for some time ago, and
then wait in silence for nodes that do not come. This one counts what there is at that moment, and
ends the run when there is not enough for too long. Where ``cluster.workers`` is ``[min, max]`` it
also lets the run go on with fewer workers, and with more when there is room again.

Runs in the process of Ray Train's controller: on a Ray of our own the driver's.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from raygnn import compat
from raygnn.checkpoint import store
from raygnn.compat import (
    DefaultFailurePolicy,
    FailureDecision,
    FixedScalingPolicy,
    NoopDecision,
    ResizeDecision,
    ScalingDecision,
    WorkerGroupCallback,
)
from raygnn.errors import TrainingError
from raygnn.preflight.findings import some
from raygnn.runs.run_directory import SCALING, Events
from raygnn.worker import ray_nodes
from raygnn.worker.control import Control, ControlHandle, SaveRequest

log = logging.getLogger("raygnn")

_POLL = 1.0  # seconds between looks for room while nothing runs
_SETTLE = 3.0  # seconds that less than the most has to last before it is taken for what there is
_LOOK = 15.0  # seconds between looks for more room while ranks run
_NAMED = 4  # ranks that are named of those that were lost
_AGAIN = 300.0  # seconds until the next try, after one for which no checkpoint came
_SAVING = 30.0  # seconds for the ranks to write the checkpoint that more of them go on from


class Group(WorkerGroupCallback):
    """Knows the placement group that the ranks hold, which the policy is not told of."""

    held: ClassVar[Any] = None

    def after_worker_group_start(self, worker_group: Any) -> None:
        Group.held = compat.held_group(worker_group)


class Failures(DefaultFailurePolicy):
    """Starts no ranks again where a rank says that a new start would meet its failure, too: also
    where it could record that nowhere, on a disk that is full.

    Args:
        stopped: whether nobody wants another start; None = nobody says so.
    """

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
    """Between ``fewest`` and ``scaling_config.num_workers``, as many workers as fit.

    Args:
        patience: seconds to wait for room for the fewest.
    """

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
        self._waiting: float | None = None  # since when there is no room for the fewest
        self._settling: float | None = None  # since when there is less than for the most
        self._next_look = 0.0
        self._more = 0  # room that the last look found while the ranks ran
        self._request: SaveRequest | None = None  # for a checkpoint
        self._asked = 0.0  # when it was made

    def make_decision_for_non_running_worker_group(self) -> ScalingDecision:
        """Start as many as fit, or wait.

        Raises:
            TrainingError: there has been no room for long enough, or the driver wants the end.
        """
        whole: Any = super().make_decision_for_non_running_worker_group()
        self._more = 0
        self._withdraw()
        if Group.held is None and self._fewest == self._most:
            return whole  # the first start, which Ray waits for, and the driver looks at
        room, now = self._room(), time.monotonic()
        if room >= self._most or (room >= self._fewest and self._settled(now)):
            if room < self._most:
                self._tell(f"{some(room, 'worker')} of {self._most}{self._why()}")
            self._waiting = self._settling = None
            self._next_look = now + _LOOK
            return replace(whole, num_workers=room)
        if room < self._fewest:
            self._settling = None
            if self._waiting is None:
                self._waiting = now
                self._tell(
                    f"waiting up to {self._patience:.0f} s for room for {self._fewest} workers: "
                    f"there is room for {room}{self._why()}"
                )
            if now - self._waiting >= self._patience:
                raise self._no_room(room)
        if self._control.snapshot().orders.stop:
            raise TrainingError("the command ended the run while it waited for room")
        time.sleep(_POLL)  # Ray would ask again at once
        return NoopDecision()

    def make_decision_for_running_worker_group(
        self, worker_group_state: Any, worker_group_status: Any
    ) -> ScalingDecision:
        """Start anew with more, after a checkpoint, when two looks have found room for them."""
        nothing = super().make_decision_for_running_worker_group(
            worker_group_state, worker_group_status
        )
        size, now = len(worker_group_state.workers), time.monotonic()
        if size >= self._most or (self._request is None and now < self._next_look):
            return nothing
        self._next_look = now + _LOOK
        room, before = self._room(), self._more
        self._more = room
        if min(room, before) <= size:
            self._withdraw()
            return nothing
        if not self._saved(now):
            return nothing
        return ResizeDecision(
            num_workers=room,
            resources_per_worker=compat.resources_of(self.scaling_config),
        )

    def _room(self) -> int:
        needs = compat.resources_of(self.scaling_config)
        wanted = {name: n for name, n in needs.items() if n}
        try:
            return min(ray_nodes.room(wanted, Group.held), self._most)
        except Exception:  # Ray does not answer; ranks that run need not end of that
            log.warning("the room for workers cannot be told", exc_info=True)
            return 0

    def _settled(self, now: float) -> bool:
        self._settling = now if self._settling is None else self._settling
        return now - self._settling >= _SETTLE

    def _saved(self, now: float) -> bool:
        """Whether the ranks have written the checkpoint that they are asked for here. If they do
        not in time, they go on as many as they are: more are not worth what would be lost."""
        if self._request is None:
            self._request, self._asked = SaveRequest(self._control), now
            self._tell(f"there is room for {self._more} workers: first a checkpoint")
            return False
        saved = self._request.answer(self._control.snapshot())
        if saved is None and now - self._asked < _SAVING:
            return False
        self._withdraw()
        if saved:
            newest = store.newest(self._run_dir / "checkpoints")
            self._tell(f"a start of all with {self._more} workers, from {newest}")
            return True
        self._tell("no checkpoint came, so all go on as they are")
        self._next_look = now + _AGAIN
        return False

    def _withdraw(self) -> None:
        if self._request is not None:
            self._request.withdraw()
            self._request = None

    def _why(self) -> str:
        """The ranks that were lost, after a semicolon each."""
        if Group.held is None:  # there was no start yet
            return ""
        return "".join(f"; {rank}" for rank in self._lost()[:_NAMED])

    def _lost(self) -> list[ray_nodes.Lost]:
        return ray_nodes.lost(self._control.snapshot().workers)

    def _tell(self, what: str) -> None:
        """Leave word for the driver, which shows it."""
        events = Events(self._run_dir / "logs" / SCALING)
        events.tell(what)
        events.close()

    def _no_room(self, room: int) -> TrainingError:
        lost = self._lost()
        told = "".join(f"; {rank}" for rank in lost[:_NAMED])
        return TrainingError(
            f"there is room for {some(room, 'worker')} of {self._fewest}, after "
            f"{self._patience:.0f} s{told}",
            where=f"rank {lost[0].rank} on {lost[0].host}" if lost else None,
            remedy="bring the node back or add another, and train with --resume; with "
            "cluster.workers [min, max] a run goes on with the workers that are left",
            rank=lost[0].rank if lost else None,
        )
