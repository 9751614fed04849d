"""One rank of a run: data plane → model → Lightning → exact test.

All ranks run the same sequence and the same collectives.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch

from raygnn.checkpoint import store, weights
from raygnn.checkpoint.learned_rows import RowState
from raygnn.checkpoint.lifecycle import Checkpoints
from raygnn.checkpoint.remote_checkpoints import Courier, RemoteCheckpoints, as_storage
from raygnn.config.rules import fixed
from raygnn.errors import ConfigError, DataError, TrainingError
from raygnn.tasks.calibration import calibrations
from raygnn.tasks.lightning_modules import EXITS, exit_error
from raygnn.util.files import retry, storage_errors
from raygnn.worker import blackbox
from raygnn.worker.callbacks import Averaging, Evaluation, user_hooks
from raygnn.worker.comm.reduction import shard_optimizer
from raygnn.worker.job import Job
from raygnn.worker.planes import open_plane, vocabulary
from raygnn.worker.planes.plane import Kept
from raygnn.worker.rank_setup import RankSetup, Runtime, cause_of, total_steps
from raygnn.worker.records import Closing, Records
from raygnn.worker.transfer import Transfer

T = TypeVar("T")

_LAST_WORDS = 5.0  # seconds that a failed rank waits for a checkpoint under way

log = logging.getLogger("raygnn")


class Rank(RankSetup):
    """One rank of a run; resumes from the run's newest checkpoint, if there is one."""

    def __init__(self, job: Job, runtime: Runtime):
        super().__init__(job, runtime)
        self.directory = job.run_dir / "checkpoints"
        # the run's remote checkpoints; None = they are in the directory
        self.place = RemoteCheckpoints.from_config(job.config)
        self.storage_timeout = job.config.fault.storage_timeout.seconds

    def run(self) -> dict[str, Any]:
        """Train, then test; return the summary's figures, which are equal on all ranks."""
        config, job = self.config, self.job
        plane = self.plane = open_plane(job, self.ranks)
        task = self.task = plane.task()
        maker = plane.batches(task)
        loader = self.loader(maker)
        steps_per_epoch = maker.plan.updates_per_epoch
        task.total_steps = total_steps(config, steps_per_epoch)
        averaging = None if config.train.ema is None else Averaging(config.train.ema)
        if self.ranks.first:
            job.control.update(steps_per_epoch=steps_per_epoch)
        state, step = self._checkpoint(maker.identity)
        rows = RowState.from_checkpoint(
            task.embeddings, self.control, self.storage_timeout, state, self.place
        )
        transfer = Transfer.from_job(job, task, self.ranks, begins=state is None)
        records = self.records(step)
        evaluation = Evaluation(
            self._evaluate, records, loader, config.train, metric=config.metric, averaging=averaging
        )
        checkpoints = self._checkpoints(maker.identity, task.total_steps, rows, records)
        # the partition's storage may be away when training ends
        facts = {"data": plane.identity, **vocabulary.training_facts(job, plane.sizes)}
        positives = plane.positives()
        has_val = plane.count("val") > 0
        self._check_schedule(has_val)
        if step is None:
            self._announce(transfer)
        callbacks = [self.reduction, records, *user_hooks(config.train), self.guard]
        callbacks += [one for one in (averaging, transfer) if one]
        callbacks += [evaluation] if has_val else []
        trainer = self.trainer([*callbacks, checkpoints, Closing()], checkpoints.plugin)
        try:
            self._fit(trainer, loader, maker.identity, state, checkpoints)
        except BaseException:
            records.write_pending(wait=False)
            checkpoints.give_up(_LAST_WORDS)
            raise
        self._check_trained(trainer.global_step)
        if has_val:
            evaluation.finish(trainer, task)
        if averaging is not None:
            averaging.put(task)
        if config.train.select == "best":
            evaluation.restore_best(task)
        digest = self._save_weights({**facts, "class_weights": task.class_weights}, rows)
        kept: Kept = {}
        metrics = {
            f"{split}/{name}": value
            for split in ("test", "val")
            if plane.count(split)
            for name, value in self._evaluate(split, kept if split == "val" else None).items()
        }
        # metrics of the validation split are another epoch's, if the best weights were loaded
        tested = {name: value for name, value in metrics.items() if name.startswith("test/")}
        records.write(trainer.global_step, max(0, trainer.current_epoch - 1), tested)
        records.close(job.patience)
        self.events.flush()
        result: dict[str, Any] = {
            "metrics": metrics,
            "selected": config.train.select,
            "weights": digest,
            "positive": positives,
            **calibrations(kept, config, self.control),
            "best_metrics": evaluation.best_metrics,
            "last_metrics": evaluation.newest,
            "steps": trainer.global_step,
            "epochs": trainer.current_epoch,
            "workers": self.ranks.world.size,
            "best_epoch": evaluation.best_epoch if evaluation.best is not None else None,
        }
        if records.first_step is not None:  # else figures of an earlier start stay
            result |= records.speed() | self._communication()
            result["ranks"] = self.stragglers.summary()
        if transfer is not None:
            result["init"] = transfer.found
        checkpoints.finish_uploads(self.storage_timeout)
        skipped = {"steps": self.guard.skipped_steps}
        return {**result, "skipped": skipped, "checkpoints": checkpoints.counts}

    def _fit(
        self,
        trainer: pl.Trainer,
        loader: Any,
        data: str,
        state: Path | None,
        checkpoints: Checkpoints,
    ) -> None:
        """Train from the checkpoint ``state``; None = from the start. ``loader``: a `BatchLoader`;
        ``data``: identity of the data, which must be equal on all ranks."""
        log.info("training from %s", state or "the start")
        with closing(loader):
            self.guard.check_model(self.task, {**self.options(), "data": data})
            shard_optimizer(self.ranks, self.task)
            with cause_of(loader):
                trainer.fit(self.task, train_dataloaders=loader, ckpt_path=state and str(state))
                checkpoints.finish()
        self.task.to(self.runtime.device)  # Lightning leaves it on the CPU
        blackbox.note(blackbox.TEST)

    def _check_trained(self, steps: int) -> None:
        """Raise TrainingError if all steps were skipped. Collective."""
        if (skipped := self.guard.skipped_steps) and skipped >= steps:
            raise TrainingError(
                f"the gradient was finite in none of {skipped} steps, so the model was not trained",
                remedy="look for values that are not finite in the data, the model and the loss; "
                "lower train.lr",
            )

    def _announce(self, transfer: Transfer | None) -> None:
        """Report suspicious data and initial weights when training begins. Collective."""
        config, plane, texts = self.config, self.plane, []
        if any(one.split_time or one.task.of_edges for one in config.by_task.values()):
            empty = [split for split in ("val", "test") if not plane.count(split)]
            # preflight reports empty masks
            texts = [f"no {config.task.seeds} are in the split {split!r}" for split in empty]
        texts += [f"warn: {text}" for text in plane.warnings()]
        texts += transfer.notes() if transfer else []
        for text in texts if self.ranks.first else ():
            self.events.notify(text)

    def _save_weights(self, facts: dict[str, Any], rows: RowState | None) -> str | None:
        """Write the selected weights. Returns their digest on rank 0, else None. Collective."""
        files = None
        if rows is not None:
            with storage_errors(self.directory):
                files = rows.write(weights.rows_draft(self.directory))
        if not self.ranks.first:
            return None
        digest = self._retry(lambda: weights.save(self.directory, self.task.model, facts, files))
        if self.place is not None:
            self._retry(partial(self.place.put_weights, self.directory))
        return digest

    def _communication(self) -> dict[str, Any]:
        ranks, reduction, embeddings = self.ranks, self.reduction, self.task.embeddings
        rows, hits = self.plane.traffic

        def over_ranks(**own: int) -> dict[str, Any]:
            return dict(zip(own, self.control.sum(torch.tensor(list(own.values()))).tolist()))

        remote = over_ranks(rows=rows, cache_hits=hits, bytes=ranks.fetched_bytes)
        rows, learned = remote["rows"], None
        if embeddings is not None:
            counts = {"rows": embeddings.read, "remote": embeddings.remote}
            learned = over_ranks(**counts, bytes=ranks.step.sent_bytes)
        return {
            "remote": {**remote, "hit_rate": remote["cache_hits"] / rows if rows else None},
            # embedding rows and their gradients; None if there are none
            "embeddings": learned,
            # None if DDP does not exchange them
            "gradients": {"bytes": reduction.whole or None},
        }

    def _retry(self, act: Callable[[], T]) -> T:
        """Call a function that the run needs, again while the storage is full or away."""
        with storage_errors(self.job.run_dir):
            return retry(act, self.job.patience)

    def _checkpoint(self, data: str) -> tuple[Path, int] | tuple[None, None]:
        """Return the state to resume from, and its step, as rank 0 finds them. Collective."""
        directory = self.directory
        step = -1
        if self.ranks.first:
            self._retry(lambda: store.sweep(directory))
            newest, rejected = self._retry(lambda: self._find(data))
            for reason in rejected:
                log.warning("passed over the checkpoint %s", reason)
            if newest is None and rejected:
                raise store.unusable(directory, rejected)
            if newest is not None:
                store.check_contents(newest.state)
                step = newest.step
        step = self.control.max(step)
        if step < 0:
            return None, None
        state = store.state_at(directory, step)
        if self.place is not None:
            self._retry(partial(self._fetch, state.parent))
        return state, step

    def _find(self, data: str) -> tuple[store.Checkpoint | None, list[str]]:
        """See `store.find`; remote checkpoints are downloaded first."""
        if self.place is None:
            return store.find(self.directory, self.config, data)
        with as_storage():
            judge = partial(store.judge, config=self.config, data=data)
            newest, rejected = self.place.fetch_newest(self.directory, judge)
            if newest is not None:
                self.place.pass_over(rejected)
        return newest, [f"{name}: {why}" for name, why in rejected.items()]

    def _fetch(self, checkpoint: Path) -> None:
        assert self.place is not None
        with as_storage():
            fetched = self.place.fetch(checkpoint.name, checkpoint.parent)
        try:
            store.read(fetched)
        except DataError as error:  # the copy here is as damaged as the store's checkpoint
            error.where = f"{self.place}/{checkpoint.name}"
            raise

    def _check_schedule(self, has_val: bool) -> None:
        if self.config.train.schedule.kind == "plateau" and not has_val:
            message = "plateau follows the validation metric, but the validation split is empty"
            remedy = "choose another kind, or give the data a validation split"
            raise ConfigError(message, where="train.schedule.kind", remedy=remedy)

    def _evaluate(self, split: str, keep: Kept | None = None) -> dict[str, float]:
        blackbox.note(blackbox.TEST if split == "test" else "evaluate")
        self.ranks.share_buffers(self.task)
        try:
            return self.plane.evaluate(self.task, split, keep)
        except EXITS as error:
            raise exit_error(error) from error

    def _checkpoints(
        self, data: str, last: int, rows: RowState | None, records: Records
    ) -> Checkpoints:
        fault, control = self.config.fault, self.job.control
        is_current = partial(control.is_current, self.start.attempt)
        courier = None
        if self.place is not None:
            courier = Courier(
                self.place,
                fault.keep,
                self.events,
                lambda busy: control.update(sending=busy),
                is_current,
                self.runtime.send_files,
            )
        return Checkpoints(
            self.directory,
            self.control,
            control,
            every=fault.checkpoint_every,
            last=last,
            keep=fault.keep,
            about={
                "config": fixed(self.config.to_dict()),
                "data": data,
                "global_batch": self.job.global_batch,
                "batch_size": self.config.sampling.batch_size,
                "workers": self.ranks.world.size,
            },
            events=self.events,
            patience=self.storage_timeout,
            rows=rows,
            courier=courier,
            is_current=is_current,
            pause=partial(records.pause, "checkpoint"),
        )
