"""One rank of a run: shard → stores and seeds → model → Lightning → exact test.

All ranks go through the same sequence and the same collectives. Whoever started them has made
the default process group, which gradients use; the data plane and the control messages each have
a gloo group of their own, so that no two threads share one.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.environments import ClusterEnvironment
from lightning.pytorch.strategies import DDPStrategy
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from raygnn.graph.dgl import dgl
from raygnn.models.registry import FAMILIES, build_model
from raygnn.runs.metrics import MetricsWriter
from raygnn.sampling.alarm import Alarm
from raygnn.sampling.exchange import Exchange, World
from raygnn.sampling.features import FeatureStore
from raygnn.sampling.loader import BatchLoader, BatchMaker
from raygnn.sampling.seeds import owned_nodes
from raygnn.tasks.inference import Inference
from raygnn.tasks.metrics import classification_metrics
from raygnn.tasks.node import NodeClassification
from raygnn.training import checkpoint
from raygnn.training.callbacks import Checkpoints, Evaluation, Records
from raygnn.training.data import DataPlane, load_data
from raygnn.training.job import Job
from raygnn.training.precision import PRECISIONS

log = logging.getLogger("raygnn")

_HOOKS = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}


@dataclass(frozen=True)
class Runtime:
    """Where a rank runs: what Ray Train, or a test, decides.

    Attributes:
        strategy: Lightning's data parallelism, as a class.
        environment: tells Lightning about the ranks.
    """

    world: World
    device: torch.device
    strategy: type[DDPStrategy]
    environment: ClusterEnvironment


class Rank:
    """One rank of a run; continues from the run's newest checkpoint, if there is one."""

    def __init__(self, job: Job, runtime: Runtime):
        self.job = job
        self.config = job.config
        self.runtime = runtime
        self.world = runtime.world
        self.device = runtime.device
        self.precision = PRECISIONS[job.config.precision]
        torch.set_num_threads(self.config.cluster.cpus_per_worker)
        self.data, self.control = self._exchange(), self._exchange()

    def run(self) -> dict[str, Any]:
        """Train, then test; returns the summary's figures (the same on all ranks)."""
        config, job = self.config, self.job
        plane = load_data(job, self.data, self.control)
        module = self._module(plane)
        batches = plane.batches(module.model)
        loader = self._loader(batches)
        inference = Inference(
            plane.shard,
            self.control,
            plane.store(self.control),
            plane.inputs,
            num_layers=config.model.layers,
            batch_size=config.sampling.eval_batch_size,
            device=self.device,
        )
        evaluate = partial(self._evaluate, plane, inference, module)
        state = self._checkpoint()
        writer = self._writer(state)
        records = Records(
            self.control, writer, log_every=config.train.log_every, started=job.started
        )
        evaluation = self._evaluation(evaluate, records, loader)
        has_val = plane.count("val") > 0
        callbacks = [records, evaluation] if has_val else [records]
        trainer = self._trainer([*callbacks, self._checkpoints(records)])
        log.info("training from %s", state or "the start")
        try:
            trainer.fit(module, train_dataloaders=loader, ckpt_path=state and str(state))
        finally:
            loader.close()
        if has_val:
            evaluation.finish(trainer, module)

        if config.train.select == "best":
            evaluation.restore_best(module)
        if self._first:
            checkpoint.save_weights(job.run_dir / "checkpoints", module.model)
        metrics = {
            f"{split}/{name}": value
            for split in ("test", "val")
            if plane.count(split)
            for name, value in evaluate(split).items()
        }
        # those of the validation split are another epoch's, if the best weights were put back
        tested = {name: value for name, value in metrics.items() if name.startswith("test/")}
        records.write(trainer.global_step, max(0, trainer.current_epoch - 1), tested)
        return self._result(trainer, records, evaluation, batches.store, metrics)

    @property
    def _first(self) -> bool:
        return self.world.rank == 0

    def _checkpoint(self) -> Path | None:
        """The state to go on from: rank 0 chooses, so that all ranks take the same."""
        directory = self.job.run_dir / "checkpoints"
        step = -1
        if self._first:
            checkpoint.sweep(directory)
            if found := checkpoint.latest(directory):
                checkpoint.check_contents(found)
                step = checkpoint.step_of(found)
        step = self.control.max(step)
        return checkpoint.state_at(directory, step) if step >= 0 else None

    def _writer(self, state: Path | None) -> MetricsWriter | None:
        if not self._first:
            return None
        keep = checkpoint.step_of(state) if state else None
        return MetricsWriter(self.job.run_dir / "metrics.jsonl", keep)

    def _exchange(self) -> Exchange:
        if self.world.size == 1:
            return Exchange(self.world)
        return Exchange(self.world, self._group("gloo"))

    def _group(self, backend: str) -> dist.ProcessGroup:
        """A process group of all ranks; with ``comm.debug`` one that compares each collective's
        kind, dtype and shape over the ranks before it runs."""
        timeout = timedelta(seconds=self.config.comm.timeout.seconds)
        level = dist.get_debug_level()
        if self.config.comm.debug:
            # Not by the variable: the default group would be one of these, too, and DDP's logger
            # dies of a segmentation fault on it (seen with torch 2.13).
            dist.set_debug_level(dist.DebugLevel.DETAIL)
        try:
            return dist.new_group(backend=backend, timeout=timeout)
        finally:
            dist.set_debug_level(level)

    def _loader(self, batches: BatchMaker) -> BatchLoader:
        train, plan = self.config.train, batches.plan
        limit = train.epochs * plan.steps_per_epoch
        if train.max_steps:
            limit = min(limit, plan.batches_until(train.max_steps))
        return BatchLoader(
            batches,
            prefetch=self.config.sampling.prefetch,
            limit=limit,
            across=train.patience is None,
            alarm=Alarm(self.world, self._store()),
        )

    def _store(self) -> dist.Store | None:
        if self.world.size == 1:
            return None
        return dist.PrefixStore("raygnn/alarm", dist.distributed_c10d._get_default_store())

    def _module(self, plane: DataPlane) -> NodeClassification:
        config = self.config
        schema = plane.schema()
        if config.model.kind not in FAMILIES:
            dgl()  # so that "import dgl" in the user's module finds one that works
        torch.manual_seed(config.train.seed)
        model = build_model(config.model, schema).to(self.precision.dtype)
        return NodeClassification(model, config.train, self.world.size)

    def _evaluate(
        self,
        plane: DataPlane,
        inference: Inference,
        module: NodeClassification,
        split: str,
    ) -> dict[str, float]:
        self._average_buffers(module)
        shard, ntype, labels = plane.shard, self.job.ntype, plane.labels
        owned = owned_nodes(shard, ntype, split, labels)
        outputs = inference.outputs(module.model, ntype, owned + shard.first(ntype))
        wanted = labels[torch.from_numpy(owned)]
        return classification_metrics(outputs, wanted, self.config.task.metric, self.control)

    def _average_buffers(self, module: NodeClassification) -> None:
        """Give all ranks the same running statistics (batch normalisation): their mean."""
        for buffer in module.buffers():
            if self.world.size > 1 and buffer.is_floating_point():
                mean = self.control.sum(buffer.double().cpu()) / self.world.size
                buffer.copy_(mean.to(buffer))

    def _evaluation(self, evaluate: Any, records: Records, loader: BatchLoader) -> Evaluation:
        train = self.config.train
        return Evaluation(
            evaluate,
            records,
            loader,
            metric=self.config.task.metric,
            every=train.eval_every,
            patience=train.patience,
            epochs=train.epochs,
            max_steps=train.max_steps,
        )

    def _checkpoints(self, records: Records) -> Checkpoints:
        fault = self.config.fault
        return Checkpoints(
            self.job.run_dir / "checkpoints",
            self.control,
            records,
            every=fault.checkpoint_every,
            keep=fault.keep,
            check_every=min(10, self.config.train.log_every),
        )

    def _trainer(self, callbacks: list[pl.Callback]) -> pl.Trainer:
        config, comm = self.config, self.config.comm
        strategy = self.runtime.strategy(
            bucket_cap_mb=comm.bucket_cap_mb,
            find_unused_parameters=comm.find_unused_parameters,
            static_graph=comm.static_graph,
            gradient_as_bucket_view=True,
            **self._reduction(),
        )
        logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
        return pl.Trainer(
            accelerator="gpu" if self.device.type == "cuda" else "cpu",
            devices="auto" if self.device.type == "cuda" else 1,
            strategy=strategy,
            plugins=[self.runtime.environment],
            precision=self.precision.autocast,
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

    def _reduction(self) -> dict[str, Any]:
        """How gradients are reduced: DDP's own way, compressed, or over a group that compares."""
        hook = _HOOKS.get(self.config.comm.compression)
        if not self.config.comm.debug or self.world.size == 1:
            return {"ddp_comm_hook": hook}
        group = self._group(dist.get_backend())
        return {"ddp_comm_hook": hook or default_hooks.allreduce_hook, "ddp_comm_state": group}

    def _result(
        self,
        trainer: pl.Trainer,
        records: Records,
        evaluation: Evaluation,
        store: FeatureStore,
        metrics: dict[str, float],
    ) -> dict[str, Any]:
        busy = records.totals["compute"] + records.totals["wait"]
        traffic = torch.tensor([store.remote, store.hits, self.data.sent_bytes])
        remote, hits, sent = self.control.sum(traffic).tolist()
        # a run that goes on from its last step makes none
        first = {} if records.first_step is None else {"first_step": records.first_step}
        return {
            "metrics": metrics,
            "steps": trainer.global_step,
            "epochs": trainer.current_epoch,
            "best_epoch": evaluation.best_epoch if evaluation.best is not None else None,
            "seeds_per_second": records.seeds / busy if busy else 0.0,
            "seconds": {**records.totals, **first},
            "remote": {
                "rows": remote,
                "cache_hits": hits,
                "hit_rate": hits / remote if remote else None,
                "bytes": sent,
            },
        }
