"""What it would cost to report every evaluation to Ray Train with `ray.train.report`.

A job with two workers through Ray evaluates after every epoch: first without reports, then with
one right after each evaluation, then with one so long after the report before that Ray Train's
controller has taken that one. Medians of rank 0; both ranks begin together. Also shown: the
metrics in the `Result` of Ray Train.

    python benchmarks/bench_report.py [--evaluations 30]
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
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # Ray is imported before raygnn can make a token
HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from bench_guard import cora, planted  # noqa: E402
from machine import load, setting, table  # noqa: E402

from raygnn.config.load import load_config  # noqa: E402
from raygnn.config.schema import Config  # noqa: E402
from raygnn.driver import launch, train  # noqa: E402
from raygnn.worker import rank  # noqa: E402
from raygnn.worker.callbacks import Evaluation  # noqa: E402

WARMUP = 5  # evaluations that are not counted
APART = 2.5  # seconds; the controller takes one report every 2
SPACED = 10  # evaluations with reports so far apart
FIGURES = "report.json"  # in the run directory


class TimedEvaluation(Evaluation):
    """Keeps the time of evaluations, and of reports after some of them."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.seconds: dict[str, list[float]] = {"alone": [], "at once": [], "apart": []}
        self._number = 0

    def _end_of(self, *args: Any) -> None:
        import ray.train

        self._records.meet()
        began = time.perf_counter()
        super()._end_of(*args)
        evaluated = time.perf_counter()
        self._number += 1
        counted = self._config.epochs - WARMUP - SPACED
        number = self._number - WARMUP
        if number <= 0:
            return
        if number <= counted // 2:
            self.seconds["alone"].append(evaluated - began)
            return
        kind = "at once" if number <= counted else "apart"
        if kind == "apart":
            time.sleep(APART)
        self._records.meet()
        began = time.perf_counter()
        ray.train.report(self.newest)
        self.seconds[kind].append(time.perf_counter() - began)


class Reporting(rank.Rank):
    """A rank that evaluates so, and leaves the figures in the run directory."""

    def run(self) -> dict[str, Any]:
        made: list[TimedEvaluation] = []

        def make(*args: Any, **options: Any) -> TimedEvaluation:
            made.append(TimedEvaluation(*args, **options))
            return made[0]

        with patch.object(rank, "Evaluation", make):
            result = super().run()
        if self.ranks.first:
            (self.job.run_dir / FIGURES).write_text(json.dumps(made[0].seconds))
        return result


def measure(
    make: Callable[[Path, int], Config], evaluations: int
) -> tuple[dict[str, list[float]], Any]:
    """Seconds of each kind, and the metrics in Ray Train's result."""
    results: list[Any] = []
    make_trainer = launch.make_trainer

    def reporting(job: Any, *args: Any, **options: Any) -> Any:
        trainer = make_trainer(replace(job, program="bench_report:Reporting"), *args, **options)
        fit = trainer.fit
        trainer.fit = lambda: results.append(fit())
        return trainer

    epochs = WARMUP + 2 * evaluations + SPACED
    with tempfile.TemporaryDirectory() as directory:
        options = [f"train.epochs={epochs}", "train.eval_every=1", "train.max_steps=null"]
        options += ["cluster.address=local", "cluster.workers=2", "cluster.num_cpus=4"]
        options += ["logging.loggers=[]"]
        config = load_config(make(Path(directory) / "runs", epochs).to_dict(), options)
        with patch.object(launch, "make_trainer", reporting):
            run = train.train(config)
        figures = json.loads((run.path / FIGURES).read_text())
    return figures, results[-1].metrics


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--evaluations", type=int, default=30, help="of each kind")
    args = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join((str(HERE), str(HERE.parent)))  # of the workers
    print("## Reports to Ray Train\n\n" + setting() + "\n")
    rows = []
    for name, make in {"cora-gcn": cora, "planted-sage": planted}.items():
        busy = load()
        seconds, metrics = measure(make, args.evaluations)
        middle = {kind: 1e3 * statistics.median(own) for kind, own in seconds.items()}
        shares = [100 * middle[kind] / middle["alone"] for kind in ("at once", "apart")]
        times = [f"{value:.1f}" for value in middle.values()]
        rows.append([name, *times, *(f"{share:.0f}" for share in shares), str(metrics), busy])
    header = ["job", "evaluation, ms", "report at once, ms", "report apart, ms"]
    header += ["at once, %", "apart, %", "Result.metrics", "machine"]
    print(table(header, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
