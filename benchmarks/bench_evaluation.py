"""What an evaluation costs beside an epoch of training, on the job of `bench_engine.py`.

Workers on this machine, one thread each, with the engine's bare loop (`engine_rank.py`): 8 % of the
nodes are trained on, 2 % are validated, exactly. The first evaluation adds up the features of what
the nodes' neighbours read; the next ones, of the same nodes, have that. Seconds are those of the
slower rank, of the steps and of the evaluation alike.

    python benchmarks/bench_evaluation.py [--scale small|full] [--workers 2] [--evaluations 4]
                                          [--topology replicated|partitioned]

Exit code 1 if an evaluation after the first takes more than 0.3 of an epoch (at full scale).
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from typing import Any

from bench_engine import GRAPHS, STEPS, WARMUP, WORK, job, run_engine
from bench_product import ThisMachine
from machine import load, setting, table

from raygnn.config.load import load_config
from tests.support.graphs import ensure_partition

LIMIT = 0.3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--scale", choices=GRAPHS, default=os.environ.get("SCALE", "full"))
    parser.add_argument("--workers", type=int, default=2, help="(2)")
    parser.add_argument("--evaluations", type=int, default=4, help="(4)")
    parser.add_argument("--topology", choices=("replicated", "partitioned"), default="replicated")
    given = parser.parse_args()
    WORK.mkdir(parents=True, exist_ok=True)
    print(setting())
    partition = ensure_partition(load_config(job(given.scale)), 2).directory
    here: Any = [ThisMachine() for _ in range(given.workers)]
    ranks = run_engine(
        job(given.scale),
        partition,
        here,
        replicated=given.topology == "replicated",
        steps=STEPS[given.scale],
        warmup=WARMUP[given.scale],
        evaluations=given.evaluations,
    )
    epoch = max(rank["epoch_seconds"] for rank in ranks)
    seconds = [
        max(rank["evaluations"][number]["seconds"] for rank in ranks)
        for number in range(given.evaluations)
    ]
    names = [
        "an epoch",
        "first evaluation",
        *(f"evaluation {n}" for n in range(2, len(seconds) + 1)),
    ]
    values = [epoch, *seconds]
    print(
        table(
            ["", "s", "epochs"],
            [[n, f"{v:.2f}", f"{v / epoch:.2f}"] for n, v in zip(names, values)],
        )
    )
    metrics = {
        name: value for name, value in ranks[0]["evaluations"][0].items() if name != "seconds"
    }
    print(
        f"{metrics}; private memory {max(r['memory']['private'] for r in ranks):.2f} GB; {load()}"
    )
    ratio = statistics.median(seconds[1:] or seconds) / epoch
    print(f"\nevaluation / epoch: {ratio:.2f} (wanted {LIMIT:g})")
    return int(given.scale == "full" and ratio > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
