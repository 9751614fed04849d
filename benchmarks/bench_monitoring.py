"""What records, the clock of a step's parts, phases for the black box and the guard cost together:
the processor time of their hooks, as a share of the steps' time.

Two ranks on this machine, one thread each, without Ray, with `train.log_every` and `guard.every` as
they are by default. Processor time, since a wait for the other rank at a record or a comparison is
one that the exchange of gradients would have had. What the guard adds by fetching the gradients
into the cache, and saves the optimizer, is in it in full: `bench_guard.py` takes it apart.

    python benchmarks/bench_monitoring.py [--steps 300] [--rounds 3]

Exit code 1 if all of it takes more than 2 % of the steps.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ.setdefault("OMP_NUM_THREADS", "1")
CHECKOUT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(CHECKOUT))

from bench_guard import JOBS  # noqa: E402
from machine import load, setting, table  # noqa: E402

from raygnn.config.load import load_config  # noqa: E402
from raygnn.tasks.clock import LastGradient, StepClock  # noqa: E402
from raygnn.worker.comm.guard import Guard  # noqa: E402
from raygnn.worker.comm.reduction import Reduction  # noqa: E402
from raygnn.worker.records import Closing, Records  # noqa: E402
from tests.support.small_jobs import train_on_ranks  # noqa: E402

LIMIT = 2.0  # % of the steps
KINDS = {
    "records": (Records, Closing, StepClock, LastGradient, Reduction),
    "guard": (Guard,),
}
HOOKS = (
    "on_train_batch_start",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "lap",
)


class Meter:
    """Processor seconds of each kind of hook on one rank, without what one calls of another."""

    def __init__(self) -> None:
        self.spent = dict.fromkeys(KINDS, 0.0)
        self.deep = False

    def timed(self, kind: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def hook(*args: Any, **kwargs: Any) -> Any:
            if self.deep:
                return method(*args, **kwargs)
            self.deep, begin = True, time.thread_time()
            try:
                return method(*args, **kwargs)
            finally:
                self.spent[kind] += time.thread_time() - begin
                self.deep = False

        return hook


@contextmanager
def metered(figures: Path) -> Iterator[None]:
    """Ranks that are forked in the block leave their figures in a directory."""
    meter = Meter()
    end, start = Records.on_train_end, Records.on_train_start
    began = [0.0]

    def on_train_start(self: Records, *args: Any) -> None:
        start(self, *args)
        meter.spent.update(dict.fromkeys(KINDS, 0.0))
        began[0] = time.perf_counter()

    def on_train_end(self: Records, trainer: Any, *args: Any) -> None:
        seconds = time.perf_counter() - began[0]
        facts = {**meter.spent, "seconds": seconds, "steps": trainer.global_step}
        (figures / f"{trainer.global_rank}.json").write_text(json.dumps(facts))
        end(self, trainer, *args)

    with ExitStack() as stack:
        for kind, owners in KINDS.items():
            for owner in owners:
                for name in HOOKS:
                    if name in vars(owner):
                        method = meter.timed(kind, getattr(owner, name))
                        stack.enter_context(patch.object(owner, name, method))
        stack.enter_context(patch.object(Records, "on_train_start", on_train_start))
        stack.enter_context(patch.object(Records, "on_train_end", on_train_end))
        yield


def measure(name: str, steps: int) -> list[dict[str, float]]:
    """The figures of each rank."""
    with tempfile.TemporaryDirectory() as directory:
        figures = Path(directory)
        config = load_config(JOBS[name](figures / "runs", steps).to_dict(), ["train.log_every=10"])
        with metered(figures):
            train_on_ranks(config)
        return [json.loads(path.read_text()) for path in sorted(figures.glob("*.json"))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    print("## Monitoring\n\n" + setting() + "\n")
    rows, met = [], True
    for name in JOBS:
        busy = load()
        ranks = [own for _ in range(args.rounds) for own in measure(name, args.steps)]
        shares = {
            kind: 100 * statistics.median(own[kind] / own["seconds"] for own in ranks)
            for kind in KINDS
        }
        whole = 100 * statistics.median(
            sum(own[k] for k in KINDS) / own["seconds"] for own in ranks
        )
        step = 1e3 * statistics.median(own["seconds"] / own["steps"] for own in ranks)
        met &= whole <= LIMIT
        rows.append([name, f"{step:.2f}", *(f"{share:.2f}" for share in shares.values())])
        rows[-1] += [f"{whole:.2f}" + ("" if whole <= LIMIT else " MISSED"), busy]
    header = ["job", "step, ms", *(f"{kind}, %" for kind in KINDS), "all, %", "machine"]
    print(table(header, rows))
    print(f"\nlimit {LIMIT} % of the steps: {'met' if met else 'MISSED'}")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
