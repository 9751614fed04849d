"""Live protocol between the driver, Ray Train's controller and the ranks of a job.

A `Control` holds the state: orders and requests with their answers, the starts of the ranks and
their nodes, the ranks' heartbeats, and rank 0's result. The driver creates it as a Ray actor on its
own node; the other processes use a `ControlHandle`, which has the same methods. Tests, and ranks
that run without Ray, use a `Control` itself. Nothing here outlives the job.
"""

from __future__ import annotations

import contextlib
import json
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from raygnn.errors import TrainingError
from raygnn.util.files import json_text

_PATIENCE = 60.0  # seconds to wait for an answer that is needed
_SHORT = 10.0  # seconds to wait for an answer that is not needed


@dataclass(frozen=True)
class Worker:
    """Host name and Ray's node id of a rank."""

    host: str
    node: str


@dataclass(frozen=True)
class RankProgress:
    """Heartbeat of a rank, with the phase of its training thread.

    Attributes:
        attempt: number of the start that the rank belongs to.
        since: when the phase began, seconds since the epoch; 0 = unknown.
        beat: grows from one heartbeat to the next.
    """

    attempt: int
    rank: int
    host: str
    pid: int
    phase: str = ""
    epoch: int | None = None
    step: int | None = None
    since: float = 0.0
    beat: int = field(default_factory=time.monotonic_ns)


@dataclass(frozen=True)
class Orders:
    """Orders to the ranks: to exit, and to write checkpoints, by the requests' ids; ``last`` if no
    step is to follow the next checkpoint."""

    stop: bool = False
    saves: frozenset[str] = frozenset()
    last: bool = False


@dataclass(frozen=True)
class Snapshot:
    """State of a `Control`.

    Attributes:
        attempt: number of the newest start, over all commands of the run.
        starts: number of starts of this command.
        workers: workers of the newest start, by rank.
        progress: newest heartbeat of each rank of the newest start, if there was one.
        answers: id of a request for a checkpoint → whether it was written.
        saved_last: the checkpoint after the last step is written.
        sending: checkpoints are being uploaded to an object store.
        result: rank 0's, as JSON.
    """

    attempt: int = 0
    starts: int = 0
    workers: tuple[Worker, ...] = ()
    progress: Mapping[int, RankProgress] = field(default_factory=dict)
    orders: Orders = Orders()
    answers: Mapping[str, bool] = field(default_factory=dict)
    saved_last: bool = False
    sending: bool = False
    steps_per_epoch: int | None = None
    result: str | None = None

    def node_of(self, rank: int) -> str | None:
        return self.workers[rank].node if rank < len(self.workers) else None

    def host_of(self, rank: int) -> str | None:
        return self.workers[rank].host if rank < len(self.workers) else None


class Control:
    """State of a job; every method returns at once. ``attempts``: number of starts of the run's
    ranks before this command; ``server``: serves files to ranks that do not see the command's, see
    `raygnn.worker.node_files.FileServer`."""

    def __init__(self, attempts: int = 0, server: Any = None):
        self._server = server
        self._state = Snapshot(attempt=attempts)

    def files(self, method: str, *args: Any) -> Any:
        """Call a method of the file server."""
        return getattr(self._server, method)(*args)

    def snapshot(self) -> Snapshot:
        return self._state

    def begin(self, workers: Sequence[Worker]) -> None:
        """Record a start of the ranks; reports of the previous start are dropped."""
        self.update(
            attempt=self._state.attempt + 1,
            starts=self._state.starts + 1,
            workers=tuple(workers),
            progress={},
            sending=False,
        )

    def is_current(self, attempt: int) -> bool:
        """Return whether no later start has taken over."""
        return self._state.attempt == attempt

    def stop(self) -> None:
        """Order the ranks to exit, whatever they wait for."""
        self._order(stop=True)

    def ask_save(self, request: str = "", *, last: bool = False) -> str:
        """Request a checkpoint of a state that is not older than the request; return the id of the
        request, which `Snapshot.answers` has once the checkpoint is written or has failed.

        Args:
            request: its id; "" = a new one.
            last: the ranks will be terminated after it, so that no step is to follow.
        """
        orders, request = self._state.orders, request or uuid.uuid4().hex
        self._order(saves=orders.saves | {request}, last=orders.last or last)
        return request

    def withdraw_save(self, request: str) -> None:
        """Forget a request and its answer; other requests stay."""
        self._order(saves=self._state.orders.saves - {request})
        self.update(answers={r: a for r, a in self._state.answers.items() if r != request})

    def pending_saves(self) -> frozenset[str]:
        return self._state.orders.saves

    @property
    def ends_after_save(self) -> bool:
        """True if no step is to follow the requested checkpoint."""
        return self._state.orders.last

    def answer_saves(self, requests: Iterable[str], *, saved: bool) -> None:
        """Answer requests, unless they were withdrawn."""
        saves = self._state.orders.saves
        answered = saves & set(requests)
        self._order(saves=saves - answered)
        self.update(answers={**self._state.answers, **dict.fromkeys(answered, saved)})

    def report(self, progress: RankProgress) -> Orders:
        """Record a rank's heartbeat; return the orders."""
        if self.is_current(progress.attempt):
            self.update(progress={**self._state.progress, progress.rank: progress})
        return self._state.orders

    def update(self, **facts: Any) -> None:
        """Set attributes of the `Snapshot`; rank 0 sets some of them."""
        self._state = replace(self._state, **facts)

    def finish(self, result: Mapping[str, Any]) -> None:
        """Record rank 0's result."""
        self.update(result=json_text(result))

    def _order(self, **orders: Any) -> None:
        self.update(orders=replace(self._state.orders, **orders))


class ControlHandle:
    """Handle of the actor that holds a job's `Control`, with its methods; it can be pickled.

    Only `files`, `snapshot`, `begin` and `finish` wait long for an answer, so that a slow actor
    blocks no rank. If the actor is gone, so is the driver, and Ray ends the job.
    """

    def __init__(self, actor: Any):
        self._actor = actor
        self._orders = Orders()  # of the newest answer
        self._answered: frozenset[str] = frozenset()  # requests that may still be among the orders
        self._reply: Any = None  # reference to the awaited answer
        self._newest = Snapshot()

    @classmethod
    def create(cls, attempts: int, server: Any = None) -> ControlHandle:
        """Create the actor, on the node of this process, which owns it."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        actor = ray.remote(Control).options(
            num_cpus=0, max_restarts=0, scheduling_strategy=here, max_task_retries=0
        )
        return cls(actor.remote(attempts, server))

    def __reduce__(self) -> Any:
        return ControlHandle, (self._actor,)

    def files(self, method: str, *args: Any) -> Any:
        """See `Control`. Raises TrainingError if the call failed, or no answer came."""
        return self._call("files", method, *args, timeout=_PATIENCE)

    def snapshot(self) -> Snapshot:
        """Wait for the state. Raises TrainingError if no answer came."""
        snapshot: Snapshot = self._call("snapshot", timeout=_PATIENCE)
        return snapshot

    def newest(self) -> Snapshot:
        """Return the newest state that has arrived, and request the next one without waiting.
        Raises ray.exceptions.RayActorError if the actor has died."""
        self._newest = self._poll("snapshot", default=self._newest)
        return self._newest

    def begin(self, workers: Sequence[Worker]) -> None:
        self._call("begin", list(workers), timeout=_PATIENCE)

    def is_current(self, attempt: int) -> bool:
        """See `Control`; True if the actor does not answer."""
        try:
            return bool(self._call("is_current", attempt, timeout=_SHORT))
        except Exception:  # see `report`
            return True

    def stop(self) -> None:
        with contextlib.suppress(Exception):  # see `report`
            self._call("stop", timeout=_SHORT)

    def ask_save(self, *, last: bool = False) -> str:
        request = uuid.uuid4().hex
        self._post("ask_save", request, last=last)
        return request

    def withdraw_save(self, request: str) -> None:
        self._post("withdraw_save", request)

    def pending_saves(self) -> frozenset[str]:
        """See `Control`; as of the last `report`."""
        return self._orders.saves - self._answered

    @property
    def ends_after_save(self) -> bool:
        """See `Control`; as of the last `report`."""
        return self._orders.last

    def answer_saves(self, requests: Iterable[str], *, saved: bool) -> None:
        answered = frozenset(requests)
        if answered:
            self._answered = (self._answered & self._orders.saves) | answered
            self._post("answer_saves", answered, saved=saved)

    def report(self, progress: RankProgress) -> Orders:
        """See `Control`; return the orders of the newest answer."""
        with contextlib.suppress(Exception):  # the actor is gone, and so is the driver
            self._orders = self._poll("report", progress, default=self._orders)
        return self._orders

    def update(self, **facts: Any) -> None:
        self._post("update", **facts)

    def finish(self, result: Mapping[str, Any]) -> None:
        """See `Control`. Raises TrainingError if the driver did not receive it."""
        self._call("update", timeout=_PATIENCE, result=json_text(result))

    def _post(self, method: str, *args: Any, **options: Any) -> None:
        with contextlib.suppress(Exception):  # see `report`
            getattr(self._actor, method).remote(*args, **options)

    def _call(self, method: str, *args: Any, timeout: float, **options: Any) -> Any:
        import ray
        from ray.exceptions import OutOfMemoryError, RayError

        try:
            return ray.get(getattr(self._actor, method).remote(*args, **options), timeout=timeout)
        except OutOfMemoryError:  # its text names the process that Ray killed, and the reason
            raise
        except RayError as error:
            message = f"the command that started this job does not answer: {type(error).__name__}"
            remedy = "check the process of raygnn train, and continue with --resume"
            raise TrainingError(message, remedy=remedy) from error

    def _poll(self, method: str, *args: Any, default: Any) -> Any:
        """Return the answer to the previous call, if it has come, and call again."""
        import ray

        answer, reply = default, self._reply
        if reply is not None:
            if not ray.wait([reply], timeout=0)[0]:
                return default
            self._reply = None
            answer = ray.get(reply)
        self._reply = getattr(self._actor, method).remote(*args)
        return answer


def read_result(snapshot: Snapshot) -> dict[str, Any] | None:
    """Return rank 0's result, if there is one."""
    return None if snapshot.result is None else dict(json.loads(snapshot.result))
