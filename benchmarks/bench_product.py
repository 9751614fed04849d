"""Throughput of `raygnn train` against the engine's bare loop.

Workers on this machine, one thread each, in turn: the bare loop of `engine_rank.py`, and the
command with Ray Train, Lightning, metrics, loggers and checkpoints around the same engine. Both
train the same model on the same batches, on the graph of `bench_engine.py`. Seeds per second are
of steady training: after the loggers have written their first records (at full scale). The command
is stopped after its steps, before the evaluation.

    python benchmarks/bench_product.py [--job sage|edges|links|norm] [--scale small|full]
                                       [--rounds 2] [--workers 2]

Jobs: `sage` is node classification, as in `bench_engine.py`; `edges` adds eight edge features,
`norm` batch normalization over all ranks; `links` is link prediction with the decoder dot and the
default negatives, where the seeds are edges.

Ray's own processes (some 15, idle) have a processor for themselves if there are fewer workers
than processors. Exit code 1 if the product reaches less than 97 % of the bare loop (at full scale).
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
from pathlib import Path
from typing import Any

import yaml
from bench_engine import CHECKOUT, GRAPHS, STEPS, WARMUP, WORK, job, run_engine
from engine_draws import with_edge_data
from machine import load, setting, table

from raygnn.config.load import load_config
from tests.support.graphs import ensure_partition

JOBS: dict[str, dict[str, Any]] = {  # changes of the configuration of `bench_engine.py`
    "sage": {},
    "edges": {"model": {"edge_features": "eight"}},
    "links": {"task": {"kind": "link_prediction"}, "model": {"decoder": "dot"}},
    "norm": {"model": {"norm": "batch"}},
}
LIMIT = 0.97
_DEADLINE = 600  # seconds for one run of the command
_LOG_EVERY = 5


class ThisMachine:
    """Stands in for a virtual host."""

    address, interface = "127.0.0.1", "lo"

    def popen(self, argv: list[str], **options: Any) -> subprocess.Popen[bytes]:
        return subprocess.Popen(argv, **options)


def bare(name: str, scale: str, partition: Path, workers: int) -> float:
    """Seeds per second of the engine alone."""
    here: Any = [ThisMachine() for _ in range(workers)]
    counts = {"steps": STEPS[scale], "warmup": WARMUP[scale]}
    ranks = run_engine(job(scale, **JOBS[name]), partition, here, replicated=True, **counts)
    return float(ranks[0]["seeds_per_second"])


def product(name: str, scale: str, partition: Path, workers: int) -> float:
    """Seeds per second of the steps that follow when all has started."""
    with tempfile.TemporaryDirectory(dir=WORK) as directory:
        config = job(
            scale,
            **JOBS[name],
            storage=directory,
            partition={"path": str(partition)},
            sampling={"topology": "replicated"},
            train={"log_every": _LOG_EVERY, "epochs": 1000, "eval_every": 1000},
            cluster={"workers": workers, "address": "local"},
        )
        del config["graph"]
        file = Path(directory) / "job.yaml"
        file.write_text(yaml.safe_dump(config))
        command = [sys.executable, "-m", "raygnn", "train", str(file)]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        env["NUMBA_CACHE_DIR"] = str(WORK / "numba")
        with open(Path(directory) / "output", "w+b") as output:
            process = subprocess.Popen(
                command, cwd=CHECKOUT, env=env, stdout=output, stderr=subprocess.STDOUT
            )
            try:
                run = Path(directory) / "bench"
                first = WARMUP[scale]
                if scale == "full":  # the small one has three minutes with all others
                    first = max(first, _logging(process, run))
                records = _await(process, run / "metrics.jsonl", first + STEPS[scale])
            except RuntimeError as error:
                output.seek(0)
                text = output.read().decode(errors="replace")[-3000:]
                raise RuntimeError(f"{error}\n{text}") from None
            finally:
                process.terminate()
                try:
                    process.wait(120)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
    timed = [r for r in records if first < r["step"] and "seeds_per_second" in r]
    return statistics.harmonic_mean(r["seeds_per_second"] for r in timed)


def _logging(process: subprocess.Popen[bytes], run: Path) -> int:
    """Return the step at which the default logger has begun to write."""
    deadline = time.monotonic() + _DEADLINE
    while not any((run / "loggers" / "tensorboard").glob("events.*")):
        if time.monotonic() >= deadline or process.poll() is not None:
            raise RuntimeError(f"no records of loggers within {_DEADLINE} s")
        time.sleep(0.5)
    return int(_await(process, run / "metrics.jsonl", 1)[-1]["step"])


def _await(process: subprocess.Popen[bytes], file: Path, step: int) -> list[dict[str, Any]]:
    deadline = time.monotonic() + _DEADLINE
    while time.monotonic() < deadline:
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        records = [json.loads(line) for line in lines if line.endswith("\n")]
        if records and records[-1]["step"] >= step:
            return records
        if process.poll() is not None:
            raise RuntimeError(f"the command ended with {process.returncode}")
        time.sleep(0.5)
    raise RuntimeError(f"no step {step} within {_DEADLINE} s")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--job", choices=JOBS, default="sage", help="(sage)")
    parser.add_argument("--scale", choices=GRAPHS, default=os.environ.get("SCALE", "full"))
    parser.add_argument("--rounds", type=int, default=2, help="of each, in turn (2)")
    parser.add_argument("--workers", type=int, default=2, help="(2)")
    given = parser.parse_args()
    WORK.mkdir(parents=True, exist_ok=True)
    print(setting())
    config, workers = load_config(job(given.scale)), given.workers
    if given.job == "edges":
        place = WORK / f"edge-data-{given.scale}-2"  # the parts of `job`, for any number of workers
        partition = with_edge_data(config, place, 2).directory
    else:
        partition = ensure_partition(config, workers).directory
    rows, found = [], {"bare": [], "product": []}
    for number in range(given.rounds):
        for name, run in (("bare", bare), ("product", product)):
            found[name].append(run(given.job, given.scale, partition, workers))
        rows.append([str(number + 1), load(), *(f"{runs[-1]:,.0f}" for runs in found.values())])
    medians = [statistics.median(runs) for runs in found.values()]
    rows.append(["median", "", *(f"{value:,.0f}" for value in medians)])
    header = ["round", "machine", "bare loop, seeds/s", "raygnn train, seeds/s"]
    print("\n" + table(header, rows))
    ratio = medians[1] / medians[0]
    print(f"\n{given.job}, workers: {workers}; product / bare loop: {ratio:.3f} (wanted {LIMIT:g})")
    return 1 if ratio < LIMIT and given.scale == "full" else 0


if __name__ == "__main__":
    sys.exit(main())
