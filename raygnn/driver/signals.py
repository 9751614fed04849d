"""Signals to a rank's process, on this host or on another one."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Any


def send(state_file: Path, pid: int, number: int) -> bool:
    """Send a signal to a rank on this host; 0 only asks whether it is there.

    A number alone does not say whose a process is: it may have been given anew, or belong to
    another container. It is the rank's if it holds the rank's state file open, which the rank
    does from its start to its end, and nobody else but for the moment of a look.

    Returns:
        Whether the process is there, and the rank's.

    Raises:
        PermissionError: it is, but may not be sent signals by this user.
    """
    handle = None
    try:
        handle = os.pidfd_open(pid)  # stays with this process, whoever gets its number later
    except ProcessLookupError:
        return False
    except OSError:
        pass  # a kernel before 5.3, or a container that does not let it through
    try:
        if not _holds(pid, state_file):
            return False
        if handle is None:
            os.kill(pid, number)
        else:
            signal.pidfd_send_signal(handle, number)
        return True
    except ProcessLookupError:
        return False
    finally:
        if handle is not None:
            os.close(handle)


def _holds(pid: int, file: Path) -> bool:
    """Whether a process has the file open."""
    descriptors = f"/proc/{pid}/fd"
    try:
        for name in os.listdir(descriptors):
            path = os.path.join(descriptors, name)
            try:
                # another container may have mounted it elsewhere, so that the name alone counts
                # here; whatever else the process has open is left alone: it may hang
                same = os.path.basename(os.readlink(path)) == file.name
                if same and os.path.samestat(os.stat(path), os.stat(file)):
                    return True
            except FileNotFoundError:
                continue
    except OSError:  # it has gone, or is another user's
        return False
    return False


class Sent:
    """A signal to a rank on another node of Ray, by a task there.

    Args:
        node: id of the node.
    """

    def __init__(self, node: str, state_file: Path, pid: int, number: int):
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        there = NodeAffinitySchedulingStrategy(node, soft=False)
        options: dict[str, Any] = {"num_cpus": 0, "max_retries": 0, "scheduling_strategy": there}
        self._task = ray.remote(send).options(**options).remote(state_file, pid, number)

    def answer(self) -> bool | None:
        """What `send` returned there, False for a node that has gone; None before that is known.

        Raises:
            Exception: whatever kept the signal from being sent.
        """
        import ray
        from ray.exceptions import NodeDiedError, TaskUnschedulableError, WorkerCrashedError

        if not ray.wait([self._task], timeout=0)[0]:
            return None
        try:
            return bool(ray.get(self._task, timeout=0))
        except (NodeDiedError, TaskUnschedulableError, WorkerCrashedError):
            return False

    def give_up(self) -> None:
        """Nobody waits for the answer any more."""
        import ray

        with contextlib.suppress(Exception):  # it has an end of its own
            ray.cancel(self._task, force=True)
