"""Out-of-core partitioning on Ray: the decision for it, the check that it fits, and its tasks."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from raygnn.config.places import size
from raygnn.config.schema import Config
from raygnn.driver.ray_cluster import RayCluster
from raygnn.errors import DataError, PreflightError, RaygnnError
from raygnn.graph.available_memory import check_available, memory
from raygnn.graph.outofcore.graph_stages import Needs, needs, size_of
from raygnn.graph.partition.layout import PartitionMeta
from raygnn.graph.partition.make import Missing, find_partition
from raygnn.graph.texts import needs_model
from raygnn.preflight import machine
from raygnn.runs.display import Display

_POLL = 2.0  # seconds between checks that Ray still runs
_RETRIES = 3  # of a task whose process or node has died
_DEATHS = (
    *("ActorDiedError", "ActorUnavailableError", "WorkerCrashedError", "OutOfMemoryError"),
    *("NodeDiedError", "LocalRayletDiedError"),
)
SHARE = 0.7  # of the available memory, for partitioning in memory with engine: auto


def is_out_of_core(config: Config) -> bool:
    """Return True to build the partition out of core: as configured, or with ``auto`` if tables or
    archives do not fit into a share of this machine's memory, or if a model encodes text."""
    if (engine := config.partition.engine) != "auto":
        return engine == "ray"
    if needs_model(config.graph):
        return True
    if "memory_fits" in config.cluster.allow or (size := size_of(config.graph)) is None:
        return False
    return size.in_memory > SHARE * memory()[1]


def make_out_of_core(
    config: Config,
    missing: Missing,
    cluster: RayCluster,
    show: Display,
    *,
    only_check: bool = False,
) -> PartitionMeta | None:
    """Build the partition on Ray, as a stage; by ``stream`` in place of METIS, which needs the
    complete graph in memory. With ``only_check`` only check that it would fit, and return None if
    it does not exist. Raises InputError if the graph is invalid or cannot be written,
    PreflightError if memory or disk are too small, or Ray does not start."""
    if missing.method == "metis":
        partition = config.partition.model_copy(update={"method": "stream"})
        config = config.model_copy(update={"partition": partition})
        found = find_partition(config, missing.parts)
        if isinstance(found, PartitionMeta):
            return found
        show.note("METIS needs the complete graph in memory, so partition.method is stream here")
        missing = found
    tasks = config.cluster.num_cpus or machine.cpus() if cluster.local else 1
    assert config.graph is not None
    if (graph_size := size_of(config.graph)) is not None:
        expected = needs(graph_size, missing.parts, tasks, missing.method)
        _check(config, missing, expected)
        show.note(
            f"partitioning out of core: about {size(expected.memory)} of memory on each node, "
            f"{size(expected.disk)} of disk at {missing.draft.parent}"
        )
    if config.store is not None and not cluster.local:
        raise PreflightError(
            "the nodes of a cluster partition a graph out of core in a directory that all of them "
            "see, and storage is an object store",
            where=str(missing.place),
            remedy="build the partition on one machine, which uploads it: raygnn partition CONFIG "
            "--set cluster.address=local",
        )
    if only_check:
        return None
    with show.stage("Ray"):
        cluster.wait()
    # imported late: it loads torch, which reports of bad input need not wait for
    from raygnn.graph.outofcore.divide import partition_out_of_core

    with show.stage("partition") as notify:
        try:
            made = partition_out_of_core(
                missing, config.graph, RayTasks(cluster), notify, config.needs_masks, config.trains
            )
        except BaseException:
            if (stages := missing.stages).exists():
                show.note(
                    f"completed stages are kept in {stages}, and the next attempt resumes from "
                    "them; delete that directory if there will be none, or if the input changes"
                )
            raise
        return missing.upload(made, notify)


def _check(config: Config, missing: Missing, expected: Needs) -> None:
    check_available(config, "partitioning the graph out of core", expected.memory)
    place = next(path for path in missing.draft.absolute().parents if path.exists())
    stages = (path for path in missing.stages.rglob("*") if path.is_file())
    free = shutil.disk_usage(place).free + sum(path.stat().st_size for path in stages)
    if free < expected.disk and "disk_space" not in config.cluster.allow:
        raise PreflightError(
            f"partitioning the graph out of core takes about {size(expected.disk)} of disk, and "
            f"{size(free)} are free there [disk_space]",
            where=str(place),
            remedy="free space, or set storage or partition.path to a larger disk; "
            "cluster.allow: [disk_space] tries it anyway",
        )


class RayTasks:
    """Runs tasks on all nodes of a cluster; see `raygnn.graph.outofcore.workspace.Pool`."""

    def __init__(self, cluster: RayCluster):
        self._cluster = cluster

    def __call__(
        self,
        function: Callable[..., Any],
        tasks: Sequence[tuple[Any, ...]],
        gpus: float | None = None,
    ) -> Iterator[tuple[int, Any]]:
        """Yield ``(number of the task, its result)`` as tasks finish. With ``gpus``, tasks run in
        actors with this number of GPUs each. Raises the error of the failed task with the lowest
        number; DataError if its process died repeatedly; PreflightError without Ray, or if no actor
        starts for too long."""
        self._cluster.wait()
        import ray

        total = ray.cluster_resources()
        most = int(total.get("GPU", 0) / gpus if gpus else total.get("CPU", 1))
        waiting = list(enumerate(tasks))[::-1]
        running: dict[Any, tuple[Any, int | None]] = {}  # actor, if any, and task, unless it starts
        failed: dict[int, BaseException] = {}
        actors: list[Any] = []
        options = {"num_cpus": 1, "scheduling_strategy": "SPREAD"}
        if gpus is None:
            run = ray.remote(function).options(**options, max_retries=_RETRIES)
            free: list[Any] = [None] * max(most, 1)
        else:
            make = ray.remote(_Actor).options(
                **options, num_gpus=gpus, max_restarts=-1, max_task_retries=_RETRIES
            )
            actors = [make.remote(function) for _ in range(min(max(most, 1), len(tasks)))]
            running = {actor.ready.remote(): (actor, None) for actor in actors}
            free = []
        begun, started = time.monotonic(), not actors
        try:
            while (waiting and not failed) or any(at is not None for _, at in running.values()):
                while waiting and not failed and free:
                    actor, (number, task) = free.pop(), waiting.pop()
                    start = run if actor is None else actor.run
                    running[start.remote(*task)] = actor, number
                if actors and (failed or not waiting):
                    # an actor that starts again, after its node was lost, may need their place
                    free += [running.pop(r)[0] for r, (_, at) in [*running.items()] if at is None]
                    while free:
                        ray.kill(free.pop())
                done, _ = ray.wait(list(running), timeout=_POLL)
                self._check_ray()
                for reference in done:
                    actor, at = running.pop(reference)
                    try:
                        result = ray.get(reference)
                    except Exception as error:
                        failed[-1 if at is None else at] = error
                        continue
                    free.append(actor)
                    started = True
                    if at is not None:
                        yield at, result
                if failed and all(at is None or at > min(failed) for _, at in running.values()):
                    raise _ours(failed[min(failed)])
                if not started and time.monotonic() - begun > self._cluster.patience:
                    raise self._no_room(gpus)
        finally:
            for actor in actors:
                ray.kill(actor)
            for reference in () if actors else running:
                ray.cancel(reference, force=True)

    def _no_room(self, gpus: float | None) -> PreflightError:
        needed = f"CPU and {gpus:g} GPUs" if gpus else "CPU"
        wait = f"{self._cluster.patience:.0f} s"
        return PreflightError(
            f"no node of Ray had a {needed} free within {wait}, to encode text",
            remedy="wait for other jobs to end, raise cluster.wait, or lower num_gpus",
        )

    def _check_ray(self) -> None:
        if (death := self._cluster.death()) is not None:
            raise PreflightError(death, remedy="start again: completed stages are kept")


class _Actor:
    """Process that runs tasks one after the other, and keeps what they load, such as a model."""

    def __init__(self, function: Callable[..., Any]):
        self._function = function

    def ready(self) -> None:
        """Return once the actor runs."""

    def run(self, *task: Any) -> Any:
        return self._function(*task)


def _ours(error: BaseException) -> BaseException:
    cause = getattr(error, "cause", None)
    if isinstance(cause, (RaygnnError, OSError, MemoryError)):
        return cause
    if isinstance(error, Exception) and type(error).__name__ in _DEATHS:
        return DataError(
            f"a process that partitions the graph died: {' '.join(str(error).split())[:300]}",
            remedy="check whether its node ran out of memory; lower cluster.num_cpus or use nodes "
            "with more memory; a new attempt resumes from the completed stages",
        )
    return error
