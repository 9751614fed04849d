"""Ray tasks for out-of-core partitioning."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from raygnn.driver.ray_cluster import RayCluster
from raygnn.errors import DataError, PreflightError, RaygnnError

_LOOK = 2.0  # seconds between checks that Ray still runs
_RETRIES = 3  # of a task whose process or node has died


class RayTasks:
    """Runs tasks on all nodes of a cluster; see `raygnn.graph.outofcore.workspace.Pool`."""

    def __init__(self, cluster: RayCluster):
        self._cluster = cluster

    def __call__(
        self, function: Callable[..., Any], tasks: Sequence[tuple[Any, ...]]
    ) -> Iterator[tuple[int, Any]]:
        """Yield ``(number of the task, its result)`` as tasks finish.

        Raises:
            RaygnnError: error of the first failed task, by number, among those that had begun.
            DataError: a task's process died again and again.
            PreflightError: Ray did not start, or ended.
        """
        self._cluster.wait()
        import ray

        run = ray.remote(function).options(
            num_cpus=1, max_retries=_RETRIES, scheduling_strategy="SPREAD"
        )
        most = max(int(ray.cluster_resources().get("CPU", 1)), 1)
        waiting = list(enumerate(tasks))[::-1]
        running: dict[Any, int] = {}
        failed: dict[int, BaseException] = {}
        try:
            while (waiting and not failed) or running:
                while waiting and not failed and len(running) < most:
                    number, task = waiting.pop()
                    running[run.remote(*task)] = number
                done, _ = ray.wait(list(running), timeout=_LOOK)
                if (death := self._cluster.death()) is not None:
                    raise PreflightError(death, remedy="start again: what is done is kept")
                for reference in done:
                    number = running.pop(reference)
                    try:
                        result = ray.get(reference)
                    except Exception as error:
                        failed[number] = error
                        continue
                    yield number, result
                if failed and all(number > min(failed) for number in running.values()):
                    raise _ours(failed[min(failed)])
        finally:
            for reference in running:
                ray.cancel(reference, force=True)


def _ours(error: BaseException) -> BaseException:
    """Return a task's error as it was raised there."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, (RaygnnError, OSError, MemoryError)):
        return cause
    if isinstance(error, Exception) and type(error).__name__ in _DEATHS:
        return DataError(
            f"a process that partitions the graph was ended: {' '.join(str(error).split())[:300]}",
            remedy="look for a lack of memory on its node; lower cluster.num_cpus or give the "
            "nodes more; a new attempt resumes from what is done",
        )
    return error


_DEATHS = ("WorkerCrashedError", "OutOfMemoryError", "NodeDiedError", "LocalRayletDiedError")
