"""The training function that Ray Train calls on every worker.

It imports a rank's modules when it runs, since the driver and the controller import this one, too.
"""

from __future__ import annotations

import gc
import logging
import os
import pkgutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from raygnn import compat
from raygnn.checkpoint import store
from raygnn.config.schema import Config
from raygnn.errors import TrainingError
from raygnn.runs.diagnose.causes import own_modules
from raygnn.worker import blackbox, failures
from raygnn.worker.job import Job
from raygnn.worker.node_files import forwarded

if TYPE_CHECKING:
    from raygnn.storage.remote import AnyPath

_POLL, _POLL_REMOTE = 0.1, 1.0  # seconds between polls for the partition
_WATCH = 1.0  # seconds between heartbeats

log = logging.getLogger("raygnn")


def train_loop(job: Job) -> None:
    """Run this worker's rank.

    A rank that fails raises, whatever the cause, since the other ranks wait for it in a collective
    and only Ray Train can end them. If a restart would meet the failure again, its ranks find it
    recorded and return at once. Raises TrainingError, whatever went wrong on this rank, with its
    traceback as ``trace``.
    """
    import ray.train

    context = ray.train.get_context()
    rank, size = context.get_world_rank(), context.get_world_size()
    with forwarded(job, rank) as send_files:
        if job.lost is not None:  # the directory is another run's
            return
        earlier = failures.recorded(job.run_dir)
        start = job.control.snapshot()
        with failures.log_to(job.run_dir / "logs" / f"rank-{rank}.log"):
            if any(failure.final for failure in earlier):
                log.info("not started again: %s", earlier[0].what)
            elif not start.orders.stop:
                with recorded(job, rank, size, start.attempt, earlier):
                    _run(job, rank, size, send_files)


@contextmanager
def recorded(
    job: Job, rank: int, size: int, attempt: int, earlier: list[failures.Failure]
) -> Iterator[None]:
    """Record the phases of the block, and its failure: see `raygnn.worker.blackbox`.

    Args:
        attempt: number of this start of the run.
        earlier: failures of the previous start.

    Raises:
        TrainingError: in place of any exception, after the other ranks had time to write their
            crash dumps: Ray Train ends them as soon as it gets the error.
    """
    recorder = blackbox.start(
        job.run_dir / "logs",
        rank=rank,
        world=size,
        attempt=attempt,
        command=job.started,
        timeout=job.config.comm.timeout.seconds,
        own=own_modules(job.config.to_dict()),
    )
    watch = threading.Thread(target=_watch, args=(job, recorder), name="raygnn-watch", daemon=True)
    watch.start()
    try:
        yield
    except BaseException as error:  # SystemExit, too, which would end the rank silently
        reached = store.newest(job.run_dir / "checkpoints")
        failure = failures.describe(error, rank, reached, earlier, attempt)
        log.error("failed\n%s", failure.trace)
        failures.record(job.run_dir, failure)
        recorder.write(failure.what, final=True)
        recorder.await_others()
        raise failure.as_error() from None
    recorder.close()


def _watch(job: Job, recorder: blackbox.Recorder) -> None:
    """Send heartbeats to the driver, and end this process when the driver requests it, whatever
    collective the rank waits in, or when the run directory is gone.

    No other thread does this, so no failure of the recorder may end it.
    """
    warned = False
    patience, last_seen = job.config.fault.storage_timeout.seconds, time.monotonic()
    while not job.control.report(recorder.progress()).stop:
        lost, now = job.lost, time.monotonic()
        last_seen = now if lost is None else last_seen
        if lost == "replaced" or now - last_seen >= patience:
            os._exit(1)
        try:
            recorder.watch()
        except Exception:
            if not warned:
                log.warning("the crash recorder fails", exc_info=True)
            warned = True
        time.sleep(_WATCH)
    with suppress(Exception):
        recorder.write("the driver terminated it")
    os._exit(1)


def _run(job: Job, rank: int, size: int, send_files: Callable[[], None]) -> None:
    start = time.perf_counter()
    blackbox.note("imports")
    gc.disable()  # imports make no garbage
    compat.import_torchmetrics()
    import ray
    import ray.train.lightning
    import ray.train.torch

    from raygnn.sampling.exchange import World
    from raygnn.worker.rank_setup import Runtime

    gc.enable()
    log.info("imports took %.1f s", time.perf_counter() - start)
    blackbox.note("partition")
    _await_partition(job.partition, job.config)
    if isinstance(job.lists, ray.ObjectRef):  # one copy in the memory of each node
        job = replace(job, lists=ray.get(job.lists))
    runtime = Runtime(
        world=World(rank, size),
        device=ray.train.torch.get_device(),
        strategy=ray.train.lightning.RayDDPStrategy,
        environment=ray.train.lightning.RayLightningEnvironment(),
        send_files=send_files,
    )
    blackbox.note("setup")
    result = pkgutil.resolve_name(job.program)(job, runtime).run()
    if rank == 0:
        job.control.finish(result)


def _await_partition(directory: AnyPath, config: Config) -> None:
    """Wait until the driver has published the partition. Download a collection of graphs if this
    node does not see the driver's."""
    from raygnn.graph.partition.make import is_partition
    from raygnn.storage.remote import RemotePath
    from raygnn.storage.replica import download_directory

    if config.store is not None and directory.parent == config.local_storage / "partitions":
        kept = RemotePath.of(config.store, "storage") / "partitions" / directory.name
        _await_partition(kept, config)
        return download_directory(kept, Path(str(directory)))
    timeout = config.comm.timeout.seconds
    deadline = time.monotonic() + timeout
    while not is_partition(directory):
        if time.monotonic() > deadline:
            raise TrainingError(
                f"no partition was published within {timeout:g} s", where=str(directory)
            )
        time.sleep(_POLL_REMOTE if isinstance(directory, RemotePath) else _POLL)
