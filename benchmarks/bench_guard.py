"""What the guard costs: the time it adds to steps, as a share of them.

Two ranks on this machine, one thread each, without Ray, at the guard's default settings
(`guard.every: 100`, so one step in a hundred compares). Medians are taken, and a step lasts from
its batch's arrival to the end of its optimizer step: neither waiting for a batch nor evaluation
is counted. Most of the guard's time goes into fetching the gradients into the cache, which the
optimizer, right after it, would do without it. So the last of its hooks is left out in every
second step, and what it adds is how much longer the rest of the step takes with it than without;
the other hooks' own time is added to that. Where ranks compare, the wait for the slower one is
shown and not counted, since the reduction of gradients would have waited for it.

    python benchmarks/bench_guard.py [--steps 300] [--rounds 3]

Exit code 1 if the guard takes more than 0.5 % of the steps of a job.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ.setdefault("OMP_NUM_THREADS", "1")
CHECKOUT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(CHECKOUT))

import lightning.pytorch as pl  # noqa: E402
from machine import load, setting, table  # noqa: E402

from raygnn.config.load import load_config  # noqa: E402
from raygnn.config.schema import Config  # noqa: E402
from raygnn.worker import rank  # noqa: E402
from raygnn.worker.comm import fingerprint  # noqa: E402
from raygnn.worker.comm.guard import Guard  # noqa: E402
from tests.support.small_jobs import job, train_on_ranks  # noqa: E402

LIMIT = 0.5  # % of a step
WARMUP = 20  # steps that are not counted
HOOKS = ("on_train_batch_start", "on_before_backward", "on_after_backward")


class TimedGuard(Guard):
    """A guard that keeps the time, and leaves it in a file when training ends."""

    figures: Path  # a directory; set before ranks are forked

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self._begin = 0.0
        self._own: list[float] = []  # per batch, seconds in hooks
        self._waits: list[float] = []  # of which in collectives
        self._steps: list[float] = []
        self._update = 0.0
        self._updates: list[float] = []  # per batch, seconds from the gradients to its end
        for name in HOOKS:
            setattr(self, name, self._timed(getattr(self, name), name == HOOKS[0]))

    def _timed(self, hook: Callable[..., None], first: bool) -> Callable[..., None]:
        def timed(*args: Any) -> None:
            begin = time.perf_counter()
            if first:
                self._begin = begin
                self._own.append(0.0)
                self._waits.append(0.0)
            hook(*args)
            self._own[-1] += time.perf_counter() - begin

        return timed

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        super().on_train_start(trainer, module)
        reduce = fingerprint._max

        def timed(*args: Any) -> Any:
            begin = time.perf_counter()
            found = reduce(*args)
            self._waits[-1] += time.perf_counter() - begin
            return found

        fingerprint._max = timed  # in this rank's process alone

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self._update = time.perf_counter()
        if len(self._steps) % 2:
            super().on_before_optimizer_step(trainer, module, optimizer)
        else:
            self._losses.clear()

    def on_train_batch_end(self, *_: Any) -> None:
        end = time.perf_counter()
        self._steps.append(end - self._begin)
        self._updates.append(end - self._update)

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        rest = range(WARMUP, len(self._steps))
        every = self._config.every
        compared = [number for number in rest if number % every == 0]
        work = [own - wait for own, wait in zip(self._own, self._waits)]
        with_it = statistics.median(self._updates[n] for n in rest if n % 2)
        without = statistics.median(self._updates[n] for n in rest if not n % 2)
        last = with_it - without
        usual = statistics.median(work[number] for number in rest if number % every) + last
        comparing = statistics.median(work[number] for number in compared) + last
        step = statistics.median(self._steps[number] for number in rest)
        figures = {
            "step": step,
            "usual": usual,
            "gradients": last,
            "comparing": comparing,
            "waiting": statistics.median(self._waits[number] for number in compared),
            "share": (usual * (every - 1) + comparing) / every / step,
        }
        (self.figures / f"{trainer.global_rank}.json").write_text(json.dumps(figures))


def cora(storage: Path, steps: int) -> Config:
    changes = [
        f"storage={storage}",
        f"staging.path={storage / 'stage'}",
        f"train.epochs={steps}",  # each is one step
        f"train.eval_every={steps}",
        "train.log_every=100",
    ]
    return load_config(CHECKOUT / "jobs" / "cora-gcn.yaml", changes)


def planted(storage: Path, steps: int, **model: Any) -> Config:
    sections: dict[str, Any] = {
        "graph": {"nodes": 50_000, "degree": 20, "features": 100, "classes": 16},
        "model": {"hidden": 128, **model},
        "sampling": {"fanout": [10, 5], "batch_size": 512},
        "train": {"epochs": steps, "max_steps": steps, "eval_every": steps, "log_every": 100},
    }
    return load_config(job(storage, **sections))


JOBS: dict[str, Callable[[Path, int], Config]] = {
    "cora-gcn": cora,
    "planted-sage": planted,
    "planted-sage, norm: batch": partial(planted, norm="batch"),  # whose statistics are copied
}


def measure(make: Callable[[Path, int], Config], steps: int) -> list[dict[str, float]]:
    """The figures of each rank."""
    with tempfile.TemporaryDirectory() as directory:
        TimedGuard.figures = Path(directory)
        with patch.object(rank, "Guard", TimedGuard):
            train_on_ranks(make(Path(directory) / "runs", steps + WARMUP))
        return [json.loads(path.read_text()) for path in sorted(Path(directory).glob("*.json"))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=300, help="counted, in each round")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    print(setting() + "\n")
    rows, met = [], True
    for name, make in JOBS.items():
        busy = load()
        ranks = [own for _ in range(args.rounds) for own in measure(make, args.steps)]
        middle = {key: statistics.median(own[key] for own in ranks) for key in ranks[0]}
        share = 100 * middle["share"]
        met &= share <= LIMIT
        times = [
            f"{1e6 * middle[key]:.0f}" for key in ("usual", "gradients", "comparing", "waiting")
        ]
        shown = f"{share:.2f}" + ("" if share <= LIMIT else " MISSED")
        rows.append([name, f"{1e3 * middle['step']:.2f}", *times, shown, busy])
    header = ["job", "step, ms", "guard, µs", "of it for gradients, µs"]
    header += ["comparing, µs", "waiting, µs", "share, %", "machine"]
    print(table(header, rows))
    print(f"\nlimit {LIMIT} % of a step: {'met' if met else 'MISSED'}")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
