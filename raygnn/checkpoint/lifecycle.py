"""States of a checkpoint from the step at which it is due until it is complete.

All ranks change state together, and one checkpoint is written at a time::

    idle ── due ──▶ rows ── written on all ranks ──▶ state ── written, or failed ──▶ idle
      ╰──── due while another is being written: wait shortly for its end, then skip this one

- A checkpoint is due at the configured interval, in steps or in seconds by rank 0's clock; when a
  request is pending; and after the last step.
- ``rows``: each rank writes its rows of embedding tables in a background thread, and rank 0 holds a
  copy of the state. Without embedding tables this state is skipped.
- ``state``: rank 0 writes the copy in a background thread, passes the files to the upload, and
  answers the requests. Training continues meanwhile.

A failed write is reported, and the next checkpoint is written when it is due, so that storage that
is full or unavailable for a while does not end the run. The last checkpoint is never skipped: rank
0 tries again, and all ranks wait, as long as the storage accepts data.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, Protocol

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from raygnn import compat
from raygnn.checkpoint import store
from raygnn.checkpoint.hashed_files import Write
from raygnn.checkpoint.learned_rows import RowState
from raygnn.checkpoint.remote_checkpoints import Courier
from raygnn.checkpoint.store import RowFiles
from raygnn.config.values import Duration
from raygnn.runs.run_directory import Events
from raygnn.sampling.exchange import Exchange
from raygnn.util.files import storage_trouble

_POLL = 0.5  # seconds between polls of the clock and of the requests
_MOST_STEPS = 1000  # between two polls
_GRACE = 10.0  # seconds to wait, once, for a checkpoint that is still being written
_APART = 0.05  # seconds between polls of its end

log = logging.getLogger("raygnn")


class SaveRequests(Protocol):
    """Requests for a checkpoint, by id."""

    @property
    def ends_after_save(self) -> bool: ...
    def pending_saves(self) -> frozenset[str]: ...
    def answer_saves(self, requests: Iterable[str], *, saved: bool) -> None: ...
    def update(self, **facts: Any) -> None: ...


class _StateTaker(TorchCheckpointIO):
    """Lightning's checkpoint plugin: on rank 0 it passes the state on instead of writing it."""

    def __init__(self, take: Callable[[Mapping[str, Any]], None]):
        self._take = take

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        self._take(checkpoint)


@dataclass
class _Pending:
    """Checkpoint that is being written, or the newest one, on rank 0.

    Attributes:
        last: no other checkpoint follows, since this one is after the last step.
        requests: ids of the requests that it answers.
        ends: a request is for the last checkpoint, so no step is to follow.
        state: copy of Lightning's state that waits for the ranks' rows.
        write: writes the state.
    """

    step: int = 0
    last: bool = False
    requests: frozenset[str] = frozenset()
    ends: bool = False
    state: Mapping[str, Any] | None = None
    write: Write[None] | None = None

    @property
    def busy(self) -> bool:
        return self.state is not None or (self.write is not None and self.write.busy)


@dataclass(eq=False)
class Checkpoints(pl.Callback):
    """Writes the checkpoints of a run.

    Attributes:
        directory: directory of the run's checkpoints.
        requests: requests for checkpoints, and their answers.
        every: interval in steps (int) or seconds (`Duration`).
        last: the optimizer step after which training ends.
        keep: number of checkpoints to keep.
        about: facts for the manifests, see `raygnn.checkpoint.store.CheckpointManifest`.
        patience: seconds for which the storage may accept nothing, and for which the write of the
            last checkpoint is repeated.
        rows: state of the embedding tables; None = there are none.
        courier: uploads checkpoints, where storage is an object store.
        is_current: see `raygnn.checkpoint.store.write`.
        pause: context in which training waits.
        plugin: plugin for the trainer.
        counts: numbers of checkpoints of this attempt that were ``saved``, that have ``failed``,
            and that were ``skipped`` because an earlier one was still being written.
    """

    directory: Path
    exchange: Exchange
    requests: SaveRequests
    _: KW_ONLY
    every: int | Duration
    last: int
    keep: int
    about: Mapping[str, Any]
    events: Events
    patience: float
    rows: RowState | None = None
    courier: Courier | None = None
    is_current: Callable[[], bool] = lambda: True
    pause: Callable[[], AbstractContextManager[None]] = nullcontext

    def __post_init__(self) -> None:
        self._first = self.exchange.world.rank == 0
        self._pending = _Pending()
        self._stalled = False  # a rank's storage accepted nothing at the last `_meet`
        self._skipping = False  # the newest checkpoint that was due has been skipped
        self._failing = ""  # why the newest checkpoint was not written
        self._step = self._next_poll = -1
        self.plugin = _StateTaker(self._take)
        self.counts = dict.fromkeys(("saved", "failed", "skipped"), 0)

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._step = self._polled_step = trainer.global_step
        self._saved_at = self._polled_at = time.monotonic()
        self._next_poll = self._step + 1

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        step = trainer.global_step
        if step == self._step:  # batches accumulate
            return
        self._step = step
        if self._is_due(step):
            with self.pause():
                if self._save(trainer) and self._meet(self._pending.ends)[1]:
                    self._hold()

    def on_save_checkpoint(
        self, trainer: pl.Trainer, module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        compat.save_epoch(checkpoint, trainer.current_epoch)

    def _is_due(self, step: int) -> bool:
        if step == self.last or (isinstance(self.every, int) and step % self.every == 0):
            return True
        return step >= self._next_poll and self._poll(step)

    def _poll(self, step: int) -> bool:
        """Return True if a checkpoint is due by rank 0's clock or by a request, and schedule the
        next poll about half a second later. Collective."""
        now, due, steps = time.monotonic(), False, 0
        if self._first:
            late = isinstance(self.every, Duration) and now - self._saved_at >= self.every.seconds
            # a request is for a checkpoint that begins after it
            may_ask = self._stalled or not self._pending.busy
            due = late or (may_ask and bool(self._unserved))
            each = (now - self._polled_at) / max(1, step - self._polled_step)
            steps = max(1, min(_MOST_STEPS, int(_POLL / max(each, 1e-9))))
        _, any_due, all_steps = self._meet(due, steps)
        self._polled_at, self._polled_step = now, step
        self._next_poll = step + all_steps
        return bool(any_due)

    def _save(self, trainer: pl.Trainer) -> bool:
        step = trainer.global_step
        last = step == self.last
        begins = self._wait(None if last else 0.0 if self._skipping else _GRACE)
        if begins:
            self._begin(trainer, step, last)
        elif self._first and (self._stalled or not self._skipping):
            self._skip(step, last)
        self._skipping = not begins
        self._saved_at = time.monotonic()
        return begins

    def _begin(self, trainer: pl.Trainer, step: int, last: bool) -> None:
        copy, rows = True, self.rows
        if rows is not None:
            copy = not self.exchange.max(not rows.has_room())
            draft = store.draft_of(self.directory, step)
            rows.begin(draft, copy=copy, again=self.patience if last else 0.0)
        # read the requests before the state, which must not be older
        ends = self._first and self.requests.ends_after_save
        self._pending = _Pending(step, last, self._unserved if self._first else frozenset(), ends)
        trainer.save_checkpoint(store.state_at(self.directory, step))
        # rows that are not copied must not change before they are written
        if rows is not None and not copy and not self._wait(None):
            rows.abandon()

    def _take(self, state: Mapping[str, Any]) -> None:
        """Copy Lightning's state between two steps (rank 0)."""
        self._pending.state = apply_to_collection(state, Tensor, _copy)
        if self.rows is None:
            self._write(None)

    def _meet(self, *flags: int) -> list[int]:
        """Return the number of ranks that are writing, and the sum of each of ``flags``. Rows that
        all ranks have written go to rank 0, which writes the state. Collective."""
        pending, rows = self._pending, self.rows
        silence = max([one.silence for one in (pending.write, rows) if one], default=0.0)
        mine = [rows is not None and rows.busy, pending.busy, silence >= self.patience, *flags]
        total = self.exchange.sum(torch.tensor(mine, dtype=torch.int64)).tolist()
        writing, saving, stalled, *flags_sum = total
        self._stalled = stalled > 0
        if rows is not None and rows.pending and not writing:
            try:
                files = rows.collect()
                if self._first:
                    self._write(files)
            except OSError as error:
                saving = 0
                if self._first:
                    pending.state = None
                    self._end(pending, error)
        return [writing + saving, *flags_sum]

    def _wait(self, grace: float | None) -> bool:
        """Wait until no rank is writing, and return True; return False after ``grace`` seconds by
        rank 0's clock (None = no limit), or once the storage accepts nothing. Collective: many
        short exchanges, so that `comm.timeout` applies to none of them."""
        end = math.inf if grace is None else time.monotonic() + grace
        while True:
            busy, over = self._meet(self._first and time.monotonic() >= end)
            if not busy:
                return True
            if self._stalled or over:
                return False
            time.sleep(_APART)

    def _hold(self) -> None:
        """Block training after the last checkpoint until the driver ends this process, at most for
        the storage's patience. Collective."""
        self._wait(None)
        end, over = time.monotonic() + self.patience, 0
        while not over:
            time.sleep(_APART)
            _, over = self._meet(self._first and time.monotonic() >= end)

    def _write(self, rows: RowFiles | None) -> None:
        pending = self._pending
        state, pending.state = pending.state, None
        assert state is not None
        patience = self.patience if pending.last else 0.0
        how = self.directory, state, pending.step, self.keep, self.about, self.is_current

        def put(moved: Callable[[], None]) -> None:
            try:
                store.write(*how, rows, patience, moved)
            except Exception as error:
                log.warning("no checkpoint of step %d", pending.step, exc_info=True)
                self._end(pending, error)
                return
            if self.courier is not None:  # before the answer: then the driver may end the ranks
                self.courier.send(store.state_at(self.directory, pending.step).parent)
            self._end(pending, None)

        pending.write = Write(put, "raygnn-checkpoint")

    def _end(self, pending: _Pending, error: Exception | None) -> None:
        if error is not None:
            self._report_failure(pending.step, error)
        else:
            self.counts["saved"] += 1
            if self._failing:
                self._failing = ""
                self.events.notify(f"checkpoints are written again, from step {pending.step:,} on")
        self.requests.answer_saves(pending.requests, saved=error is None)
        # later requests are answered only after the last evaluation, which may take long
        self.requests.update(saved_last=error is None and pending.step == self.last)
        pending.requests = frozenset()

    def _skip(self, step: int, last: bool) -> None:
        """Skip a checkpoint (rank 0), since one is still being written; it has failed if the
        storage accepts nothing."""
        self._pending.last |= last
        if self._stalled:
            error = TimeoutError(f"it has accepted nothing for {self.patience:g} s")
            self._report_failure(step, error)
            self.requests.answer_saves(self._unserved, saved=False)
            return
        self.counts["skipped"] += 1
        self.events.notify(
            f"the checkpoint of step {step:,} is skipped, since the checkpoint of step "
            f"{self._pending.step:,} is still being written; later ones may be skipped, too"
        )

    def finish(self) -> None:
        """Wait for the write in progress as long as the storage accepts data, and answer the
        remaining requests, which no checkpoint will serve. Collective."""
        with self.pause():
            self._wait(None)
        if self._first:
            self.give_up(0.0)
            newest = store.state_at(self.directory, self._pending.step).parent
            saved = not self._pending.busy and newest.exists()
            self.requests.answer_saves(self._unserved, saved=saved)

    def give_up(self, seconds: float) -> None:
        """Wait up to ``seconds`` for this rank's write, and report a write that has not ended."""
        pending = self._pending
        if pending.write is not None:
            pending.write.wait(seconds)
        if pending.busy:
            pending.last = True
            what = "it was still being written at the end"
            self._report_failure(pending.step, TimeoutError(what))

    def finish_uploads(self, seconds: float) -> None:
        """Wait up to ``seconds`` for uploads, and report uploads that have not ended."""
        if self.courier is not None:
            self.courier.finish(seconds)

    @property
    def _unserved(self) -> frozenset[str]:
        return self.requests.pending_saves() - self._pending.requests

    def _report_failure(self, step: int, error: Exception) -> None:
        self.counts["failed"] += 1
        reached = store.newest(self.directory) or "the beginning"
        if isinstance(error, TimeoutError):
            what = error.strerror or str(error)
            remedy = "find what blocks that storage, or change storage"
        elif isinstance(error, OSError):
            what, remedy = storage_trouble(error)
        else:
            what, remedy = f"{type(error).__name__}: {error}", "see the log of rank 0"
        last = self._pending.last
        if what == self._failing and not last:
            return
        self._failing = what
        goes_on = f"training continues, and a failure now would take it back to {reached}"
        if last:
            goes_on = f"it was the last one, so --resume would start from {reached}"
        self.events.notify(
            f"the checkpoint of step {step:,} was not written: {self.directory}: {what} "
            f"({remedy}); {goes_on}"
        )


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True, memory_format=torch.preserve_format)
