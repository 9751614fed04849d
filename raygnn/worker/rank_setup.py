"""Parts of a training on one rank."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins import CheckpointIO
from lightning.pytorch.plugins.environments import ClusterEnvironment
from lightning.pytorch.strategies import DDPStrategy

from raygnn import compat
from raygnn.config.schema import Config
from raygnn.runs.metrics_files import RANKS, MetricsWriter
from raygnn.runs.run_directory import EVENTS, METRICS, Events
from raygnn.sampling.exchange import World
from raygnn.sampling.loader import BatchLoader, Maker, SideStream
from raygnn.tasks.losses import own_sources
from raygnn.worker.comm.guard import Guard
from raygnn.worker.comm.process_groups import Ranks
from raygnn.worker.comm.reduction import Reduction
from raygnn.worker.job import Job
from raygnn.worker.records import Records
from raygnn.worker.stragglers import Stragglers


@dataclass(frozen=True)
class Runtime:
    """Environment of a rank, which Ray Train, or a test, provides.

    Attributes:
        strategy: class of Lightning's data-parallel strategy.
        environment: describes the ranks to Lightning.
        send_files: sends this rank's files, checkpoints aside, to the command's run directory, if
            that is another one.
    """

    world: World
    device: torch.device
    strategy: type[DDPStrategy]
    environment: ClusterEnvironment
    send_files: Callable[[], None]


@contextmanager
def cause_of(loader: BatchLoader) -> Iterator[None]:
    """Raise the loader's failure in place of another one, which is its consequence."""
    failure = None
    try:
        yield
    except Exception as error:
        if (failure := loader.failure) in (None, error):
            raise
    if failure is not None:  # with its own cause
        raise failure


def total_steps(config: Config, steps_per_epoch: int) -> int:
    steps = config.train.epochs * steps_per_epoch
    return min(steps, config.train.max_steps or steps)


class RankSetup:
    """The parts of a training on one rank."""

    def __init__(self, job: Job, runtime: Runtime):
        self.job = job
        self.config = config = job.config
        self.start = job.control.snapshot()
        self.runtime = runtime
        torch.set_num_threads(config.cluster.cpus_per_worker)
        self.ranks = Ranks.join(config, runtime.world, runtime.device)
        self.control = self.ranks.control
        self.events = Events(job.run_dir / "logs" / EVENTS)
        self.reduction = Reduction(self.ranks)
        self.guard = Guard(
            self.control,
            config.guard,
            own_steps=bool(config.own_steps),
            callbacks=config.train.callbacks,
        )
        notify = self.events.notify if self.ranks.first else lambda text: None
        self.stragglers = Stragglers(config.fault.straggler, notify, self.start.host_of)

    def records(self, keep: int | None) -> Records:
        """Return the records of training; ``keep``: last step whose earlier records stay."""
        job = self.job
        files = (METRICS, RANKS) if self.ranks.first else ()
        return Records(
            self.control,
            [MetricsWriter(job.run_dir / name, keep, job.patience) for name in files],
            self.stragglers,
            lambda: (self.reduction.bytes, self.ranks.sent_bytes),
            lambda: self.guard.skipped_steps,
            job,
        )

    def loader(self, maker: Maker) -> BatchLoader:
        train, plan, device = self.config.train, maker.plan, self.runtime.device
        gpu = device if device.type == "cuda" else None
        limit = train.epochs * plan.steps_per_epoch
        if train.max_steps:
            limit = min(limit, plan.batches_until(train.max_steps))
        return BatchLoader(
            maker,
            prefetch=self.config.sampling.prefetch,
            limit=limit,
            across=train.patience is None,
            alarm=self.ranks.alarm(),
            pin=gpu,
            side=None if gpu is None else SideStream(gpu),
        )

    def _ddp(self) -> dict[str, Any]:
        comm = self.config.comm
        return {
            "bucket_cap_mb": comm.bucket_cap_mb,
            "find_unused_parameters": comm.find_unused_parameters,
            "gradient_as_bucket_view": True,
        }

    def options(self) -> dict[str, Any]:
        """Return all options of the training that must be equal on all ranks."""
        config = self.config
        sections = {"train": config.train, "guard": config.guard, "task": config.task}
        sections |= {f"task {name}": one for name, one in (config.tasks or {}).items()}
        return {
            **self._ddp(),
            "compression": config.comm.compression,
            "overlap": config.comm.overlap,
            "shard": config.comm.shard,
            "compared": self.ranks.compared,
            "precision": config.precision,
            "batch_size": config.sampling.batch_size,
            **{
                f"{name}.{key}": value
                for name, section in sections.items()
                for key, value in section.model_dump().items()
            },
            **{
                f"{name or 'task'}.{key}": digest
                for name, one in config.by_task.items()
                for key, digest in own_sources(one.task).items()
            },
        }

    def trainer(self, callbacks: list[pl.Callback], saver: CheckpointIO | None) -> pl.Trainer:
        """Return Lightning's trainer; ``saver`` None = no checkpoints."""
        config, on_gpu = self.config, self.runtime.device.type == "cuda"
        logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
        trainer = pl.Trainer(
            accelerator="gpu" if on_gpu else "cpu",
            devices="auto" if on_gpu else 1,
            strategy=self.runtime.strategy(**self._ddp()),
            plugins=[self.runtime.environment, *([saver] if saver else [])],
            precision=config.arithmetic.autocast,
            max_epochs=config.train.epochs,
            max_steps=config.train.max_steps or -1,
            accumulate_grad_batches=config.train.accumulate,
            gradient_clip_val=config.train.clip,
            callbacks=callbacks,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
            num_sanity_val_steps=0,
        )
        compat.lean_steps(trainer)
        return trainer
