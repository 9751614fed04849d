"""Health of a job's ranks: frozen ones are killed, and preempted nodes trigger a checkpoint.

A process that was stopped, that hangs in the kernel or in storage, or whose machine swaps, sends no
heartbeat, while Ray considers it alive. The other ranks only notice when ``comm.timeout`` ends
their wait, and even then it keeps its resources.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

from raygnn import compat
from raygnn.checkpoint import store
from raygnn.config.schema import Config
from raygnn.driver.launch import Launch
from raygnn.driver.ray_cluster import RayCluster
from raygnn.errors import error_text
from raygnn.preflight.findings import some
from raygnn.runs.diagnose.causes import FROZEN, REMEDIES
from raygnn.runs.diagnose.state_file import DONE, FAILURE, STATE, file_of
from raygnn.runs.display import Display
from raygnn.runs.run_directory import RunDir
from raygnn.worker import failures as faults
from raygnn.worker.control import RankProgress, Snapshot
from raygnn.worker.ray_nodes import start_on

_EVERY = 1.0  # seconds between polls; ranks send heartbeats about as often
_FRESH = 3.0  # seconds after which ranks of several hosts that are all silent are cut off
_LONGEST_POLL = 3.0  # seconds that one poll can add to a silence
_HURRIED = 10.0  # seconds of silence that are enough when another rank's wait has failed
_ANSWER = 60.0  # seconds for another node to answer; Ray may take as long to notice its loss
_NOTICES = 2.0  # seconds between checks for preempted nodes
_LAST_CALL = 15.0  # seconds before a node's end at which another checkpoint is requested


class Silence:
    """Time since the last heartbeat of each rank, by this process's clock alone.

    It is summed over polls, each of which needs an answer of the control actor:

    - if all awaited ranks are silent, on several hosts, it does not count: then something that
      they share has failed;
    - one poll adds a few seconds at most, since this process may have been stopped itself.
    """

    def __init__(self) -> None:
        self._beats: dict[int, int] = {}
        self._silent: dict[int, float] = {}
        self._polled: float | None = None
        self._moved = 0.0

    def poll(
        self, now: float, beats: Mapping[int, int], awaited: Mapping[int, str]
    ) -> dict[int, float]:
        """Return the seconds of silence of each awaited rank.

        Args:
            now: seconds of a monotonic clock.
            beats: number that changes with each heartbeat, by rank.
            awaited: host of each rank that neither failed nor finished.
        """
        elapsed = 0.0 if self._polled is None else min(now - self._polled, _LONGEST_POLL)
        self._polled = now
        moved = {rank for rank, beat in beats.items() if self._beats.get(rank) != beat}
        self._beats.update(beats)
        if moved:
            self._moved = now
        elif now - self._moved > _FRESH and len(set(awaited.values())) > 1:
            elapsed = 0.0
        self._silent = {
            rank: 0.0 if rank in moved else self._silent.get(rank, 0.0) + elapsed
            for rank in awaited
        }
        return dict(self._silent)


class Heartbeat:
    """Monitor of the ranks' heartbeats; call `poll` often. ``limit``: seconds of silence after
    which a rank is frozen."""

    def __init__(self, run_dir: Path, limit: float, show: Display, job: Launch):
        self._run_dir = run_dir
        self._limit = limit
        self._show = show
        self._job = job
        self._attempt = 0
        self._seen: Snapshot | None = None
        self._silence = Silence()
        self._frozen: set[int] = set()  # ranks of this attempt
        self._kills: list[Generator[None]] = []
        self._next = 0.0

    def poll(self) -> None:
        """Kill frozen ranks, unless the storage cannot be read."""
        now, snapshot = time.monotonic(), self._job.snapshot
        if now < self._next or snapshot is self._seen or snapshot.starts < 1:
            return
        self._next, self._seen = now + _EVERY, snapshot
        with contextlib.suppress(OSError):
            self._check(now, snapshot)

    def _check(self, now: float, snapshot: Snapshot) -> None:
        if snapshot.attempt != self._attempt:
            self._begin(snapshot.attempt)
        failures = [f for f in faults.recorded(self._run_dir) if f.attempt == self._attempt]
        over = self._frozen | {failure.rank for failure in failures}
        beats = {rank: progress.beat for rank, progress in snapshot.progress.items()}
        awaited = {
            rank: progress.host
            for rank, progress in snapshot.progress.items()
            if progress.phase != DONE and rank not in over
        }
        silent = self._silence.poll(now, beats, awaited)
        hurried = any(failure.is_consequence for failure in failures)
        limit = min(self._limit, _HURRIED) if hurried else self._limit
        for rank, seconds in silent.items():
            if seconds >= limit:
                reached = store.newest(self._run_dir / "checkpoints")
                self._kills.append(self._kill(snapshot.progress[rank], seconds, reached))
                self._frozen.add(rank)
        self._kills = [kill for kill in self._kills if next(kill, kill) is None]

    def _begin(self, attempt: int) -> None:
        for failure in faults.recorded(self._run_dir):
            if failure.kind == FROZEN and failure.attempt != attempt:
                file_of(self._run_dir / "logs", failure.rank, FAILURE).unlink(missing_ok=True)
        self._attempt, self._silence, self._frozen = attempt, Silence(), set()

    def _kill(self, rank: RankProgress, silent: float, reached: str) -> Generator[None]:
        """Verify that a rank is frozen, report it and kill its process; yields while another node's
        answer is awaited. Only a process that still exists is frozen; Ray reports one that has
        ended."""
        phase = f"phase {rank.phase}" if rank.phase else "no phase yet"
        if rank.step is not None:
            phase += f", epoch {rank.epoch}, step {rank.step}"
        if rank.since:
            phase += time.strftime(", since %H:%M:%S", time.localtime(rank.since))
        what = f"rank {rank.rank} sent no heartbeat for {silent:.0f} s"
        where = f"{rank.host}, pid {rank.pid}, {phase}"
        failed = f"{what} ({where}), and cannot be terminated"
        try:
            if not (yield from self._signal(rank, 0)) or self._has_moved(rank):
                return
            what += ": it is frozen"
            faults.record(
                self._run_dir,
                faults.Failure(
                    rank=rank.rank,
                    time=time.time(),
                    what=what,
                    trace="",
                    remedy=REMEDIES["frozen"],
                    where=where,
                    reached=reached,
                    kind=FROZEN,
                    attempt=rank.attempt,
                ),
            )
            faults.log_failure(self._run_dir, rank.rank, f"{what} ({where})")
            self._show.note(f"{what} ({where}); its process is terminated, and the run restarts")
            failed = f"rank {rank.rank} could not be terminated"
            yield from self._signal(rank, signal.SIGKILL)
        except Exception as error:
            why = str(error) if isinstance(error, TimeoutError) else error_text(error)
            self._show.note(f"{failed}: {why.splitlines()[0]}")

    def _signal(self, rank: RankProgress, number: int) -> Generator[None, None, bool]:
        """Send a rank a signal, from its node if this process cannot; returns True if its process
        exists. Raises TimeoutError if the node does not answer, or what prevented the signal from
        being sent."""
        import ray

        file = file_of(self._run_dir / "logs", rank.rank, STATE)
        with contextlib.suppress(PermissionError):  # Ray may run as another user
            if rank.host == socket.gethostname() and send(file, rank.pid, number):
                return True
        # it has ended, or is on another node or in another container
        node = self._job.snapshot.node_of(rank.rank)
        if node is None:
            return False
        task, deadline = start_on(node, send, file, rank.pid, number), time.monotonic() + _ANSWER
        while (answer := _answer(task)) is None:
            if time.monotonic() >= deadline:
                with contextlib.suppress(Exception):  # it may have ended
                    ray.cancel(task, force=True)
                raise TimeoutError(f"its node has not answered for {_ANSWER:g} s")
            yield
        return answer

    def _has_moved(self, rank: RankProgress) -> bool:
        newest = self._job.snapshot.progress.get(rank.rank)
        return newest is None or newest.beat != rank.beat


def send(state_file: Path, pid: int, number: int) -> bool:
    """Send a signal to a rank on this host, 0 to check only that it exists; returns True if the
    process exists and is the rank's. Raises PermissionError if this user may not signal it.

    A pid does not identify a process: it may have been reused, or belong to another container. The
    process is the rank's if it holds the rank's state file open, which the rank does from its start
    to its end, and any other process only while it reads it.
    """
    with contextlib.suppress(ProcessLookupError):
        if _holds(pid, state_file):
            os.kill(pid, number)
            return True
    return False


def _holds(pid: int, file: Path) -> bool:
    with contextlib.suppress(OSError):  # the process has ended, or is another user's
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                # names are compared first, since a stat of another file may hang; paths are not,
                # since another container may have mounted the directory elsewhere
                if descriptor.readlink().name == file.name and descriptor.samefile(file):
                    return True
    return False


def _answer(task: Any) -> bool | None:
    """Return the result of `send` in a Ray task, False for a dead node; None until it is known.
    Raises the task's error if the signal could not be sent."""
    import ray
    from ray.exceptions import NodeDiedError, TaskUnschedulableError, WorkerCrashedError

    if not ray.wait([task], timeout=0)[0]:
        return None
    try:
        return bool(ray.get(task, timeout=0))
    except (NodeDiedError, TaskUnschedulableError, WorkerCrashedError):
        return False


class Preemption:
    """Requests a checkpoint when a node with ranks is to be preempted, and another right before.

    Ray is notified by its autoscaler, by an operator that forwards a cloud's notice, or by ``ray
    drain-node``; Ray Train restarts at the deadline, from the newest checkpoint. Nodes of an
    embedded Ray are not preempted.
    """

    def __init__(self, cluster: RayCluster, show: Display, job: Launch):
        self._cluster = cluster
        self._show = show
        self._job = job
        self._next = 0.0
        self._asked: set[tuple[str, bool]] = set()

    def poll(self) -> None:
        """Check now, if it is time."""
        if self._cluster.local or time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _NOTICES
        if not self._cluster.answers():
            return
        with contextlib.suppress(Exception):  # other monitors report that Ray has failed
            going = compat.draining_nodes()
            self._asked = {(node, soon) for node, soon in self._asked if node in going}
            self._ask(going)

    def _ask(self, going: Mapping[str, float | None]) -> None:
        ranks: dict[str, list[int]] = {}
        for rank, worker in enumerate(self._job.snapshot.workers):
            ranks.setdefault(worker.node, []).append(rank)
        for node in going.keys() & ranks.keys():
            left = going[node]
            soon = left is not None and left <= _LAST_CALL
            if (node, soon) in self._asked:
                continue
            self._job.control.ask_save()
            first = (node, not soon) not in self._asked
            self._asked.add((node, soon))
            if first:
                when = f"in {left:.0f} s" if left is not None else "soon"
                who = ", ".join(map(str, ranks[node]))
                self._show.note(
                    f"the node of rank {who} will be preempted {when}: saving a checkpoint"
                )


class FailureNotices:
    """Reports failures of ranks as they happen, and restarts. ``starts``: number of attempts so
    far."""

    def __init__(self, show: Display, run: RunDir, config: Config, starts: int):
        self._show = show
        self._run = run
        self._config = config
        self._starts = starts
        self._since = 0.0  # time up to which failures were reported

    def poll(self, snapshot: Snapshot) -> None:
        recorded = faults.recorded(self._run.path)
        news = [f for f in recorded if f.time > self._since and not f.is_consequence]
        news = [f for f in news if f.kind != FROZEN]  # reported when it was found
        if news:
            self._show.note(f"rank {news[0].rank} failed: {news[0].what}")
            self._since = max(failure.time for failure in news)
        if snapshot.starts > self._starts:
            self._starts = snapshot.starts
            if any(failure.final for failure in recorded):  # the new ranks exit at once
                return
            limit = f" of at most {self._config.fault.max_failures + 1}"
            if self._config.cluster.elastic:  # an attempt with more workers follows no failure
                limit = f", with {some(len(snapshot.workers), 'worker')}"
            newest = store.newest(self._run.checkpoints) or "the beginning"
            self._show.note(f"attempt {snapshot.starts}{limit}, from {newest} if that is complete")
