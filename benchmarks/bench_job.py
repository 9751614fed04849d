"""The whole job, from the command to the metric of the test nodes, against what its users would
take instead, in turn, on one machine.

The graph, model and partition of `bench_engine.py`; some epochs with an evaluation after each, two
threads in all: `raygnn train` with two workers and its defaults (the validation nodes exactly after
each epoch, the test nodes exactly with the best weights), DistDGL on two virtual hosts evaluated as
its example does (all nodes exactly, each time), and DGL's DataLoader in one process as in its
example (the validation nodes sampled after each epoch, all nodes exactly at the end).

    python benchmarks/bench_job.py [--scale small|full] [--rounds 3] [--epochs 3]

Exit code 1 if the faster of them takes less than three times as long as raygnn (at full scale).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import yaml
from bench_engine import CHECKOUT, GRAPHS, WORK, job
from machine import load, setting, table
from peers.dgl_loader import run_dgl_loader
from peers.distdgl import run_distdgl
from peers.model import Job

from raygnn.config.load import load_config
from tests.support.graphs import ensure_partition
from tests.support.hosts import hosts, missing

WANTED = 3.0
_DEADLINE = 1800.0  # seconds for one job


def raygnn(partition: Path, scale: str, epochs: int) -> Job:
    with tempfile.TemporaryDirectory(dir=WORK) as directory:
        config = job(
            scale,
            storage=directory,
            partition={"path": str(partition)},
            train={"epochs": epochs},
            cluster={"workers": 2, "address": "local"},
        )
        del config["graph"]
        file = Path(directory) / "job.yaml"
        file.write_text(yaml.safe_dump(config))
        env = {**os.environ, "OMP_NUM_THREADS": "1", "NUMBA_CACHE_DIR": str(WORK / "numba")}
        started = time.time()
        done = subprocess.run(
            [sys.executable, "-m", "raygnn", "train", str(file)],
            cwd=CHECKOUT,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_DEADLINE,
        )
        finished = time.time()
        total = finished - started
        if done.returncode:
            raise RuntimeError(f"raygnn ended with {done.returncode}:\n{done.stdout[-3000:]}")
        metrics = (Path(directory) / "bench" / "metrics.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in metrics]
        print(f"raygnn: {phases(records, total)}")
        steps, evaluations = spans(records)
        return Job(steps, evaluations, records[-1]["test/accuracy"], finished)


def spans(records: list[dict[str, float]]) -> tuple[list[float], list[float]]:
    """Return the seconds of the epochs, from the first step's end on, and of their evaluations."""
    epochs, evaluations = [], []
    begun = last = records[0]["time"]
    for record in records:
        if "val/loss" in record and "test/loss" not in record:
            epochs.append(last - begun)
            evaluations.append(record["time"] - last)
            begun = record["time"]
        last = record["time"]
    return epochs, evaluations


def phases(records: list[dict[str, float]], total: float) -> str:
    """Return the seconds before the first step's end, for the test, and after it."""
    first, validated, tested = (records[at]["time"] for at in (0, -2, -1))
    test, closing = tested - validated, total - tested
    return f"to the first step {first:.1f} s, test {test:.1f} s, closing {closing:.1f} s"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--scale", choices=GRAPHS, default=os.environ.get("SCALE", "full"))
    parser.add_argument("--rounds", type=int, help="of each, in turn (3; small: 1)")
    parser.add_argument("--epochs", type=int, default=3, help="(3)")
    given = parser.parse_args()
    rounds = given.rounds or (3 if given.scale == "full" else 1)
    if reason := missing():
        print(f"not run: {reason}")
        return 0
    WORK.mkdir(parents=True, exist_ok=True)
    print(setting())
    partition = ensure_partition(load_config(job(given.scale)), 2).directory

    def distdgl() -> Job:
        with hosts(2, share=[CHECKOUT]) as group:
            return run_distdgl(partition, group, 0, _DEADLINE, given.epochs)

    jobs: dict[str, Callable[[], Job]] = {
        "raygnn": lambda: raygnn(partition, given.scale, given.epochs),
        "DistDGL": distdgl,
        "DGL, one process": lambda: run_dgl_loader(
            partition, 0, seconds=_DEADLINE, epochs=given.epochs
        ),
    }
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    for number in range(rounds):
        for name, run in jobs.items():
            started = time.time()
            result = run()
            seconds[name].append(result.finished - started)
            steps, evaluations = (
                " ".join(f"{s:.1f}" for s in each) or "-"
                for each in (result.epoch_seconds, result.evaluation_seconds)
            )
            print(
                f"round {number + 1}: {name}: {seconds[name][-1]:.1f} s, test {result.test:.4f}; "
                f"epochs {steps}; evaluations {evaluations}; {load()}",
                flush=True,
            )
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    rows = [[name, f"{s:.1f}", f"{s / medians['raygnn']:.2f}"] for name, s in medians.items()]
    print("\n" + table(["", "s, median", "× raygnn"], rows))
    ratio = min(medians["DistDGL"], medians["DGL, one process"]) / medians["raygnn"]
    print(f"\nthe faster of them / raygnn: {ratio:.2f} (wanted {WANTED:g})")
    return int(given.scale == "full" and ratio < WANTED)


if __name__ == "__main__":
    sys.exit(main())
