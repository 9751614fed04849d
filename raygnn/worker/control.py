"""What the driver, Ray Train's controller and the ranks of a job tell each other.

A `Control` holds it all: requests and their answers, how often the ranks were started and where,
what each of them does, what rank 0 has to say. The driver makes one as an actor of Ray's beside
itself; the others reach it through a `ControlHandle`, which has the same methods. Tests, and ranks
that run without Ray, use a `Control` itself. Nothing of this outlives the job: what must is in
files.
"""

from __future__ import annotations

import contextlib
import json
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from raygnn.errors import TrainingError
from raygnn.util.files import json_text

_PATIENCE = 60.0  # seconds for an answer that a rank cannot do without
_SHORT = 10.0  # seconds for one that it can do without


@dataclass(frozen=True)
class Worker:
    """Where a rank of a start runs: names of the host, and of the node as Ray numbers it."""

    host: str
    node: str


@dataclass(frozen=True)
class RankProgress:
    """Heartbeat of a rank: what its training thread does.

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
    """What the ranks are asked for: to end, and for checkpoints, by the requests' ids; ``last``
    if no step is to follow the next one."""

    stop: bool = False
    saves: frozenset[str] = frozenset()
    last: bool = False


@dataclass(frozen=True)
class Snapshot:
    """All that a `Control` holds at one moment.

    Attributes:
        attempt: number of the newest start, over all commands of the run.
        starts: how many of them are this command's.
        workers: of the newest start, by rank.
        progress: of the newest start, by rank; of those that have said something.
        answers: of requests for a checkpoint: whether it was written.
        sending: whether checkpoints are being uploaded to an object store.
        result: rank 0's, as JSON.
    """

    attempt: int = 0
    starts: int = 0
    workers: tuple[Worker, ...] = ()
    progress: Mapping[int, RankProgress] = field(default_factory=dict)
    orders: Orders = Orders()
    answers: Mapping[str, bool] = field(default_factory=dict)
    sending: bool = False
    steps_per_epoch: int | None = None
    result: str | None = None

    def node_of(self, rank: int) -> str | None:
        return self.workers[rank].node if rank < len(self.workers) else None

    def host_of(self, rank: int) -> str | None:
        return self.workers[rank].host if rank < len(self.workers) else None


class Control:
    """The state; every method returns at once.

    Args:
        attempts: how often the run's ranks were started before this command.
        server: serves files to ranks that do not see the command's, see
            `raygnn.worker.node_files.FileServer`.
    """

    def __init__(self, attempts: int = 0, server: Any = None):
        self._server = server
        self._attempts_before = attempts
        self._starts = 0
        self._workers: tuple[Worker, ...] = ()
        self._progress: dict[int, RankProgress] = {}
        self._stopped = False
        self._saves: set[str] = set()
        self._last = False
        self._answers: dict[str, bool] = {}
        self._facts: dict[str, Any] = {}

    def files(self, method: str, *args: Any) -> Any:
        """What a method of the server of files returns."""
        return getattr(self._server, method)(*args)

    def snapshot(self) -> Snapshot:
        return Snapshot(
            attempt=self._attempts_before + self._starts,
            starts=self._starts,
            workers=self._workers,
            progress=dict(self._progress),
            orders=self._orders(),
            answers=dict(self._answers),
            **self._facts,
        )

    def begin(self, workers: Sequence[Worker]) -> None:
        """The ranks are started, once more; what those of the start before said is over."""
        self._starts += 1
        self._workers = tuple(workers)
        self._progress.clear()
        self._facts.pop("sending", None)

    def is_current(self, attempt: int) -> bool:
        """Whether no later start has taken over."""
        return self._attempts_before + self._starts == attempt

    def stop(self) -> None:
        """Have the ranks end, whatever they wait for."""
        self._stopped = True

    def ask_save(self, request: str, *, last: bool = False) -> None:
        """Have a checkpoint written, of a state that is not older than this.

        Args:
            last: the ranks will be ended after it, so that no step is to follow.
        """
        self._saves.add(request)
        self._last |= last

    def withdraw_save(self, request: str) -> None:
        """Forget a request and its answer; those of others stay."""
        self._saves.discard(request)
        self._answers.pop(request, None)

    def pending_saves(self) -> frozenset[str]:
        return frozenset(self._saves)

    @property
    def ends_after_save(self) -> bool:
        """True if no step is to follow the checkpoint that is asked for."""
        return self._last

    def answer_saves(self, requests: Iterable[str], *, saved: bool) -> None:
        """Answer requests; those that were withdrawn need no answer."""
        answered = self._saves & set(requests)
        self._saves -= answered
        self._answers.update(dict.fromkeys(answered, saved))

    def report(self, progress: RankProgress) -> Orders:
        """What a rank does, in exchange for what is asked of it."""
        if self.is_current(progress.attempt):
            self._progress[progress.rank] = progress
        return self._orders()

    def tell(self, **facts: Any) -> None:
        """Attributes of the `Snapshot` that rank 0 sets: ``sending``, ``steps_per_epoch``,
        ``result``."""
        self._facts |= facts

    def finish(self, result: Mapping[str, Any]) -> None:
        """Leave rank 0's result."""
        self.tell(result=json_text(result))

    def _orders(self) -> Orders:
        return Orders(self._stopped, frozenset(self._saves), self._last)


class ControlHandle:
    """A way to the actor that holds a job's `Control`; it can be pickled.

    Its methods are those of the `Control`. Only `snapshot` and `finish` wait for an answer for
    long; the others do not wait, or do without: an actor that is slow holds up no rank. When it is
    gone the driver is, too, and Ray ends the job.
    """

    def __init__(self, actor: Any):
        self._actor = actor
        self._orders = Orders()  # as of the last answer
        self._answered: frozenset[str] = frozenset()  # requests that may still be in there
        self._reply: Any = None  # that is awaited
        self._newest = Snapshot()

    @classmethod
    def create(cls, attempts: int, server: Any = None) -> ControlHandle:
        """Make the actor, beside this process, on which it depends."""
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
        """See `Control`.

        Raises:
            TrainingError: it failed, or no answer comes.
        """
        return self._call("files", method, *args, timeout=_PATIENCE)

    def snapshot(self) -> Snapshot:
        """The state, waited for.

        Raises:
            TrainingError: no answer comes.
        """
        snapshot: Snapshot = self._call("snapshot", timeout=_PATIENCE)
        return snapshot

    def newest(self) -> Snapshot:
        """The newest state that has arrived here; asks for the next one, and waits for nothing.

        Raises:
            ray.exceptions.RayActorError: the actor has died.
        """
        self._newest = self._poll("snapshot", default=self._newest)
        return self._newest

    def begin(self, workers: Sequence[Worker]) -> None:
        self._call("begin", list(workers), timeout=_PATIENCE)

    def is_current(self, attempt: int) -> bool:
        """See `Control`; an actor that does not answer denies nothing."""
        try:
            return bool(self._call("is_current", attempt, timeout=_SHORT))
        except TrainingError:
            return True

    def stop(self) -> None:
        with contextlib.suppress(TrainingError):
            self._call("stop", timeout=_SHORT)

    def ask_save(self, request: str, *, last: bool = False) -> None:
        self._post("ask_save", request, last=last)

    def withdraw_save(self, request: str) -> None:
        self._post("withdraw_save", request)

    def pending_saves(self) -> frozenset[str]:
        """As of the last `report`."""
        return self._orders.saves - self._answered

    @property
    def ends_after_save(self) -> bool:
        """As of the last `report`."""
        return self._orders.last

    def answer_saves(self, requests: Iterable[str], *, saved: bool) -> None:
        answered = frozenset(requests)
        if answered:
            self._answered = (self._answered & self._orders.saves) | answered
            self._post("answer_saves", answered, saved=saved)

    def report(self, progress: RankProgress) -> Orders:
        """See `Control`; returns what was asked for when the last answer came."""
        with contextlib.suppress(Exception):  # the actor is gone, and so is the driver
            self._orders = self._poll("report", progress, default=self._orders)
        return self._orders

    def tell(self, **facts: Any) -> None:
        self._post("tell", **facts)

    def finish(self, result: Mapping[str, Any]) -> None:
        """See `Control`.

        Raises:
            TrainingError: the driver did not get it.
        """
        self._call("tell", timeout=_PATIENCE, result=json_text(result))

    def _post(self, method: str, *args: Any, **options: Any) -> None:
        with contextlib.suppress(Exception):  # see `report`
            getattr(self._actor, method).remote(*args, **options)

    def _call(self, method: str, *args: Any, timeout: float, **options: Any) -> Any:
        import ray
        from ray.exceptions import RayError

        try:
            return ray.get(getattr(self._actor, method).remote(*args, **options), timeout=timeout)
        except RayError as error:
            raise TrainingError(
                f"the command that started this job does not answer: {type(error).__name__}",
                remedy="look after the process of raygnn train, and go on with --resume",
            ) from error

    def _poll(self, method: str, *args: Any, default: Any) -> Any:
        """The answer to the call before, if it has come by now, and the next call."""
        import ray

        answer, reply = default, self._reply
        if reply is not None:
            if not ray.wait([reply], timeout=0)[0]:
                return default
            self._reply = None
            answer = ray.get(reply)
        self._reply = getattr(self._actor, method).remote(*args)
        return answer


class SaveRequest:
    """Request for a checkpoint that is answered; its id keeps it apart from other requests."""

    def __init__(self, control: Control | ControlHandle, *, last: bool = False):
        self._control = control
        self._id = uuid.uuid4().hex
        control.ask_save(self._id, last=last)

    def answer(self, snapshot: Snapshot) -> bool | None:
        """Whether it was written, as of then; None = there is no answer yet."""
        return snapshot.answers.get(self._id)

    def withdraw(self) -> None:
        self._control.withdraw_save(self._id)


def read_result(snapshot: Snapshot) -> dict[str, Any] | None:
    """What rank 0 left, if it did."""
    return None if snapshot.result is None else dict(json.loads(snapshot.result))
