"""Writing checkpoints while training goes on: a copy of the state is taken between two steps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from raygnn import compat
from raygnn.checkpoint import store as checkpoint
from raygnn.checkpoint.hashed_files import Write
from raygnn.checkpoint.remote_checkpoints import Courier
from raygnn.checkpoint.store import RowFiles, state_at
from raygnn.runs.run_directory import Events
from raygnn.util.files import storage_trouble

log = logging.getLogger("raygnn")


class SaveRequests(Protocol):
    """Where others ask for a checkpoint, by ids of theirs."""

    @property
    def ends_after_save(self) -> bool: ...
    def pending_saves(self) -> frozenset[str]: ...
    def answer_saves(self, requests: Iterable[str], *, saved: bool) -> None: ...


class Saver(TorchCheckpointIO):
    """Lightning's door to the storage: it calls `save_checkpoint` on rank 0, in the thread that
    trains, which only copies the state; a thread of its own writes it. There is one at a time.

    What cannot be written is told, and the next one is tried when it is due: a disk that is full
    or away for a while is no reason to lose a run. After the last step there is no next one, so
    that one is tried again for as long as the run can wait.

    Args:
        directory: of the run's checkpoints.
        requests: for checkpoints, which it answers.
        keep: how many are kept.
        about: for the manifests, see `raygnn.checkpoint.store.CheckpointManifest`.
        courier: uploads them, where storage is an object store.
        is_current: see `checkpoint.write`.
        patience: seconds to try the last one again.

    Attributes:
        saved, failed, skipped: checkpoints of this start that were written, that could not be, and
            that were left out because one before was still being written.
    """

    def __init__(
        self,
        directory: Path,
        requests: SaveRequests,
        *,
        keep: int,
        about: Mapping[str, Any],
        events: Events,
        patience: float,
        courier: Courier | None = None,
        is_current: Callable[[], bool] = lambda: True,
    ):
        self._directory = directory
        self._requests = requests
        self._keep = keep
        self._about = about
        self._events = events
        self._patience = patience
        self._courier = courier
        self._is_current = is_current
        self._serving: frozenset[str] = frozenset()  # requests that the one under way answers
        self._step = 0  # of the newest one
        self._last = False  # whether no other comes after it
        self._state: Mapping[str, Any] | None = None  # that waits for the ranks' learned rows
        self._write: Write[None] | None = None
        self._failing = ""  # why, since the last one that was written
        self.saved = self.failed = self.skipped = 0

    @property
    def asked(self) -> frozenset[str]:
        """Requests that what is being written does not answer."""
        return self._requests.pending_saves() - self._serving

    @property
    def ends_training(self) -> bool:
        """True if no step is to follow the checkpoint that is asked for."""
        return self._requests.ends_after_save

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is under way."""
        return self._state is not None or (self._write is not None and self._write.busy)

    @property
    def silence(self) -> float:
        """Seconds for which the storage has taken nothing."""
        return 0.0 if self._write is None else self._write.silence

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        """Begin to write one; none may be under way.

        Args:
            storage_options: ``rows``: whether learned rows belong to it, for which it waits until
                `complete`; ``last``: whether it is that after the last step.
        """
        assert not self.busy
        options = storage_options or {}
        self._serving = self.asked  # for a state that is not older than the request
        self._step, self._last = int(checkpoint["global_step"]), options.get("last", False)
        self._state = apply_to_collection(checkpoint, Tensor, _copy)
        if not options.get("rows"):
            self.complete(None)

    def complete(self, rows: RowFiles | None) -> None:
        """Write the state, now that the learned rows that belong to it are written."""
        state, self._state = self._state, None
        assert state is not None
        self._write = Write(lambda moved: self._put(state, rows, moved), "raygnn-checkpoint")

    def fail(self, error: OSError) -> None:
        """The learned rows could not be written, so there will be no checkpoint of this step."""
        self._state = None
        self._end(error)

    def skip(self, step: int, stalled: float | None, last: bool) -> None:
        """Leave one out, since one is still being written.

        Args:
            stalled: seconds for which the storage has taken nothing, if that is a failure.
            last: see `save_checkpoint`.
        """
        self._last = last
        if stalled is not None:
            self._tell_failure(step, TimeoutError(f"it has taken nothing for {stalled:g} s"))
            self._requests.answer_saves(self.asked, saved=False)
            return
        self.skipped += 1
        self._events.tell(
            f"the checkpoint of step {step:,} is left out, and others may be: that of step "
            f"{self._step:,} is still being written"
        )

    def finish(self, seconds: float) -> None:
        """There is no next one: wait for the one under way, and tell if it does not end."""
        if self._write is not None:
            self._write.wait(seconds)
        if self.busy:
            self._last = True
            what = "it was still being written at the end"
            self._tell_failure(self._step, TimeoutError(what))

    def answer_rest(self) -> None:
        """Answer whoever has asked for a checkpoint since the last one began: no step came after
        it."""
        newest = state_at(self._directory, self._step).parent
        self._requests.answer_saves(self.asked, saved=not self.busy and newest.exists())

    def finish_sending(self, seconds: float) -> None:
        """Wait until checkpoints are uploaded, and report if that takes longer."""
        if self._courier is not None:
            self._courier.finish(seconds)

    def _put(
        self, state: Mapping[str, Any], rows: RowFiles | None, moved: Callable[[], None]
    ) -> None:
        try:
            checkpoint.write(
                self._directory,
                state,
                self._step,
                self._keep,
                self._about,
                self._is_current,
                rows,
                self._patience if self._last else 0.0,
                moved,
            )
        except Exception as error:
            log.warning("no checkpoint of step %d", self._step, exc_info=True)
            self._end(error)
            return
        if self._courier is not None:  # before the answer, which may be waited for to the end
            self._courier.send(state_at(self._directory, self._step).parent)
        self._end(None)

    def _end(self, error: Exception | None) -> None:
        """Tell how it ended, and answer the requests."""
        if error is None:
            self.saved += 1
            if self._failing:
                self._failing = ""
                self._events.tell(f"checkpoints are written again, from step {self._step:,} on")
        else:
            self._tell_failure(self._step, error)
        self._requests.answer_saves(self._serving, saved=error is None)
        self._serving = frozenset()

    def _tell_failure(self, step: int, error: Exception) -> None:
        self.failed += 1
        reached = checkpoint.newest(self._directory) or "the beginning"
        if isinstance(error, TimeoutError):
            what = error.strerror or str(error)
            remedy = "see what holds up that storage, or change storage"
        elif isinstance(error, OSError):
            what, remedy = storage_trouble(error)
        else:
            what, remedy = f"{type(error).__name__}: {error}", "see the log of rank 0"
        if what == self._failing and not self._last:
            return
        self._failing = what
        goes_on = f"training goes on, and a failure now would take it back to {reached}"
        if self._last:
            goes_on = f"it was the last one, so --resume would go on from {reached}"
        self._events.tell(
            f"the checkpoint of step {step:,} was not written: {self._directory}: {what} "
            f"({remedy}); {goes_on}"
        )


class Position(pl.Callback):
    """Corrects the count of epochs that Lightning saves; see `compat.save_epoch`."""

    def on_save_checkpoint(
        self, trainer: pl.Trainer, module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        compat.save_epoch(checkpoint, trainer.current_epoch)


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True, memory_format=torch.preserve_format)
