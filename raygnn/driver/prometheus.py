"""Metrics of a run for Prometheus, exported through Ray's metrics.

Ray prefixes each name with ``ray_``. All are gauges: a count that every command which resumes a run
reports anew is no counter.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from raygnn.runs.metrics_files import RANKS, Record, newest, number, values

MOST_RANKS = 256  # with series of their own
_EVERY = 2.0  # seconds between polls of the ranks; Prometheus scrapes less often
_MOST_NAMES = 32  # of metrics, and of series per rank

# name → description, and tags besides the run's name
GAUGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "raygnn_step": ("Optimizer steps completed.", ()),
    "raygnn_epoch": ("Epoch, from 0.", ()),
    "raygnn_loss": ("Training loss, mean over the last window.", ()),
    "raygnn_learning_rate": ("Learning rate.", ()),
    "raygnn_seeds_per_second": ("Seeds of all ranks per second.", ()),
    "raygnn_metric": ("What was measured last on validation and test.", ("name",)),
    "raygnn_ranks": ("Ranks that train.", ()),
    "raygnn_starts": ("How often this command has started the ranks.", ()),
    "raygnn_skipped_steps": ("Steps left out, since their gradient was not finite.", ()),
    "raygnn_seconds": ("Seconds of a batch, by part.", ("rank", "part")),
    "raygnn_bytes": ("Bytes that a rank sends for a batch, by kind.", ("rank", "kind")),
    "raygnn_use": ("Share of a rank's CPUs or GPU that is used, 0 to 1.", ("rank", "device")),
    "raygnn_memory_bytes": ("Memory of a rank, by device.", ("rank", "device")),
    "raygnn_network_bytes_per_second": (
        "Bytes per second of the host of a rank.",
        ("rank", "direction"),
    ),
}

_PLAIN = {
    "step": "raygnn_step",
    "epoch": "raygnn_epoch",
    "train/loss": "raygnn_loss",
    "train/lr": "raygnn_learning_rate",
    "seeds_per_second": "raygnn_seeds_per_second",
    "guard/skipped_steps": "raygnn_skipped_steps",
}
_GROUPS = {
    "seconds": "raygnn_seconds",
    "bytes": "raygnn_bytes",
    "use": "raygnn_use",
    "memory": "raygnn_memory_bytes",
    "network": "raygnn_network_bytes_per_second",
}


class Prometheus:
    """Sets the gauges of a run in a process that is connected to Ray; never raises."""

    def __init__(self, run: Path, name: str):
        self._name = name
        self._file = run / RANKS
        self._next = 0.0
        self._length = -1  # bytes of it when it was read last
        self._gauges: dict[str, Any] = {}
        self._series: set[tuple[str, ...]] = set()
        self._last: set[tuple[str, tuple[tuple[str, str], ...]]] = set()  # that belong to ranks
        self._size = 0
        self._works = True

    def forward(self, records: Sequence[Record], starts: int) -> None:
        """Export new records of ``metrics.jsonl``, and from time to time those of the ranks."""
        for record in records:
            self.export_record(record)
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + _EVERY
            self.export_ranks(starts)

    def export_record(self, record: Record) -> None:
        """Export a record of ``metrics.jsonl``."""
        for key, gauge in _PLAIN.items():
            self._set(gauge, number(record.get(key)))
        for key, value in record.items():
            if key.startswith(("val/", "test/")):
                self._set("raygnn_metric", number(value), name=key)

    def export_ranks(self, starts: int) -> None:
        """Export the newest record of ``ranks.jsonl``."""
        self._set("raygnn_starts", starts)
        try:
            length = self._file.stat().st_size
        except OSError:
            return
        record = newest(self._file) if length != self._length else None
        self._length = length
        if record is None:
            return
        size = 0
        shown: set[tuple[str, tuple[tuple[str, str], ...]]] = set()
        for group, gauge in _GROUPS.items():
            label = GAUGES[gauge][1][1]
            for name, ranks in values(record, group).items():
                size = max(size, len(ranks))
                for rank, value in enumerate(ranks[:MOST_RANKS]):
                    tags = {"rank": str(rank), label: name}
                    self._set(gauge, value, **tags)
                    shown.add((gauge, tuple(tags.items())))
        gone = self._last - shown if size < self._size else set()
        for gauge, labels in gone:  # series cannot be removed
            self._set(gauge, 0.0, **dict(labels))
        self._last, self._size = shown, size
        self._set("raygnn_ranks", size)

    def _set(self, gauge: str, value: float, **tags: str) -> None:
        if not self._works or not math.isfinite(value):
            return
        names = (gauge, *(text for key, text in tags.items() if key != "rank"))
        if names not in self._series:
            if sum(known[0] == gauge for known in self._series) >= _MOST_NAMES:
                return
            self._series.add(names)
        try:
            self._gauge(gauge).set(value, tags={"run": self._name, **tags})
        except Exception:  # whatever this version of Ray raises
            self._works = False

    def _gauge(self, name: str) -> Any:
        if name not in self._gauges:
            from ray.util.metrics import Gauge

            description, tags = GAUGES[name]
            self._gauges[name] = Gauge(name, description=description, tag_keys=("run", *tags))
        return self._gauges[name]
