"""What advice rests on: the usual window of a run, rank by rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from raygnn.runs.metrics_files import COMPUTE, LOADER, STEP

_LEAST = 2  # windows besides the first, which has the start in it


@dataclass(frozen=True)
class Evidence:
    """Medians over the windows of the last start, the first window left out.

    Attributes:
        config: resolved, as JSON types.
        seconds: part → of a batch, of each rank.
        gradients: bytes of all gradients that a rank hands to one exchange; None if unknown.
        buckets: bytes of each of DDP's buckets.
        use: ``cpu`` and ``gpu`` → busy share of each window, mean over the ranks.
        gpu_memory: largest share of a GPU's memory that was used; None if unknown.
        slow: rank → share of the windows in which it was slow; its host.
    """

    config: Mapping[str, Any]
    seconds: Mapping[str, Sequence[float]]
    gradients: int | None
    buckets: Sequence[int]
    use: Mapping[str, Sequence[float]]
    gpu_memory: float | None
    slow: Sequence[Mapping[str, Any]]

    @classmethod
    def of(
        cls,
        config: Mapping[str, Any],
        summary: Mapping[str, Any],
        ranks: Sequence[Mapping[str, Any]],
    ) -> Evidence | None:
        """None where too few windows were recorded to judge anything."""
        usable = [record for record in ranks if isinstance(record.get("seconds"), Mapping)]
        times = [record.get("time") or 0.0 for record in usable]  # since the command began
        usable = usable[
            max((i for i in range(1, len(times)) if times[i] < times[i - 1]), default=0) :
        ]
        world = len(usable[-1]["seconds"].get("forward", ())) if usable else 0
        usable = [r for r in usable[1:] if len(r["seconds"].get("forward", ())) == world]
        if not world or len(usable) < _LEAST:
            return None
        parts = (*STEP, *LOADER)
        nothing = [0.0] * world
        windows = {name: [r["seconds"].get(name, nothing) for r in usable] for name in parts}
        seconds = {name: [median(column) for column in zip(*windows[name])] for name in parts}
        use = {
            kind: [
                mean for r in usable if (mean := _mean((r.get("use") or {}).get(kind))) is not None
            ]
            for kind in ("cpu", "gpu")
        }
        reduced = summary.get("gradients") or {}
        return cls(
            config=config,
            seconds=seconds,
            gradients=reduced.get("bytes"),
            buckets=reduced.get("buckets") or [],
            use=use,
            gpu_memory=_largest(
                share for r in usable for share in (r.get("memory") or {}).get("gpu_share") or ()
            ),
            slow=summary.get("ranks") or [],
        )

    @property
    def world(self) -> int:
        return len(self.seconds["forward"])

    @property
    def step(self) -> float:
        """Seconds of a batch."""
        return max(1e-9, sum(self.mean(name) for name in STEP))

    @property
    def compute(self) -> float:
        return sum(self.mean(name) for name in COMPUTE)

    def mean(self, part: str) -> float:
        """Seconds of a batch, mean over the ranks."""
        values = self.seconds[part]
        return sum(values) / len(values)

    def share(self, part: str) -> float:
        return self.mean(part) / self.step

    def get(self, key: str, default: Any = None) -> Any:
        """A key of the configuration, such as ``comm.compression``."""
        value: Any = self.config
        for name in key.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        return default if value is None else value


def _mean(values: Any) -> float | None:
    known = [value for value in values or () if isinstance(value, (int, float))]
    return sum(known) / len(known) if known else None


def _largest(values: Iterable[Any]) -> float | None:
    return max((value for value in values if isinstance(value, (int, float))), default=None)
