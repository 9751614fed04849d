"""Writing checkpoints while training goes on: a copy of the state is taken between two steps."""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from raygnn.runs.events import Events
from raygnn.training import checkpoint
from raygnn.training.mirror import Courier
from raygnn.training.row_files import RowFiles

log = logging.getLogger("raygnn")


class Saver(TorchCheckpointIO):
    """Lightning's door to the storage: it calls `save_checkpoint` on rank 0, in the thread that
    trains, which only copies the state; a thread of its own writes one after the other.

    What cannot be written is told, and the next one is tried when it is due: a disk that is full
    or away for a while is no reason to lose a run.

    Args:
        directory: of the run's checkpoints.
        request: a file by which others ask for a checkpoint; it goes when one has been written,
            or could not be.
        keep: how many are kept.
        about: for the manifests, see `checkpoint.Checkpoint`.
        courier: what brings them to a second place.
        is_current: see `checkpoint.write`.
        patience: seconds to wait for one that is still being written when the next one is due.

    Attributes:
        saved, failed: checkpoints of this start that were written, and that were not.
    """

    def __init__(
        self,
        directory: Path,
        request: Path,
        *,
        keep: int,
        about: Mapping[str, Any],
        events: Events,
        patience: float,
        courier: Courier | None = None,
        is_current: Callable[[], bool] = lambda: True,
    ):
        self._directory = directory
        self._request = request
        self._keep = keep
        self._about = about
        self._events = events
        self._patience = patience
        self._courier = courier
        self._is_current = is_current
        self._answering = False  # what is being written answers a request
        self._step = 0  # of what is being written
        self._thread: threading.Thread | None = None
        self._failing = ""  # why, since the last one that was written
        self.saved = self.failed = 0

    @property
    def asked(self) -> bool:
        """Whether somebody wants a checkpoint that is not being written already."""
        try:
            return not self._answering and self._request.is_file()
        except OSError:  # storage that is away for a while
            return False

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        step = int(checkpoint["global_step"])
        asked = self.asked  # for a state that is not older than the request
        if not self.wait(self._patience):
            self.fail(step, f"the last one takes more than {self._patience:g} s")
            if storage_options:
                shutil.rmtree(storage_options["rows"][0], ignore_errors=True)
            return
        state = apply_to_collection(checkpoint, Tensor, _copy)
        rows = storage_options and storage_options["rows"]
        self._answering = asked
        self._thread = threading.Thread(
            target=self._write, args=(state, step, rows), name="raygnn-checkpoint", daemon=True
        )
        self._thread.start()

    def fail(self, step: int, reason: str) -> None:
        """There will be none of this step: tell so, also whoever asked for it."""
        asked = self.asked
        self._tell_failure(step, reason)
        self._answer(asked)

    def wait(self, seconds: float) -> bool:
        """Wait until nothing is being written; whether it is so."""
        if self._thread is not None:
            self._thread.join(seconds)
            if self._thread.is_alive():
                return False
            self._thread = None
        return True

    def finish(self, seconds: float) -> None:
        """Wait for what is being written, and tell if that takes longer."""
        if not self.wait(seconds):
            self._tell_failure(self._step, f"it takes more than {seconds:g} s")

    def finish_sending(self, seconds: float) -> None:
        """Wait for what is being sent to the mirror, and tell if that takes longer."""
        if self._courier is not None:
            self._courier.finish(seconds)

    def _write(
        self, state: Mapping[str, Any], step: int, rows: tuple[Path, RowFiles] | None
    ) -> None:
        self._step = step
        try:
            checkpoint.write(
                self._directory, state, step, self._keep, self._about, self._is_current, rows
            )
            self.saved += 1
            if self._failing:
                self._failing = ""
                self._events.tell(f"checkpoints are written again, from step {step:,} on")
            if self._courier is not None:
                self._courier.send(checkpoint.state_at(self._directory, step).parent)
        except Exception as error:
            log.warning("no checkpoint of step %d", step, exc_info=True)
            reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
            self._tell_failure(step, reason)
        self._answer(self._answering)

    def _answer(self, asked: bool) -> None:
        if not asked:
            return
        try:
            self._request.unlink(missing_ok=True)
        except OSError:
            log.warning("%s cannot be removed", self._request, exc_info=True)
        self._answering = False

    def _tell_failure(self, step: int, reason: str) -> None:
        self.failed += 1
        if reason == self._failing:
            return
        self._failing = reason
        reached = checkpoint.newest(self._directory) or "the beginning"
        self._events.tell(
            f"the checkpoint of step {step:,} was not written: {reason}; training goes on, "
            f"and a failure now would take it back to {reached}",
            step=step,
        )


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True, memory_format=torch.preserve_format)
