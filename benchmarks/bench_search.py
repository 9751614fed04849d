"""`raygnn tune` with and without early stopping, beside the same search by hand, on Cora.

`jobs/cora-search.yaml`: one run with its defaults, then in turn the search without early stopping,
with ASHA, and `peers/tune_lightning.py`, Ray Tune and Lightning without early stopping: as many
trials, as many at a time, each with one core and a validation after each epoch. Seconds are those
of whole commands, with the start of Ray.

    python benchmarks/bench_search.py --data DIR [--trials 20] [--epochs 200] [--rounds 3]
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
from collections import defaultdict
from pathlib import Path
from typing import Any

import yaml
from machine import load, setting, table

CHECKOUT = Path(__file__).resolve().parents[1]
CONCURRENT = 2
LIMIT = 3600.0  # seconds of one search


Figures = tuple[float, float, float]  # seconds, epochs of all trials, best validation accuracy


def output(*argv: str) -> tuple[float, str]:
    """Run a command to its end; returns its seconds and its output."""
    env = {**os.environ, "RAY_AUTH_MODE": "disabled", "OMP_NUM_THREADS": "1"}
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, *argv], env=env, timeout=LIMIT, capture_output=True, text=True
    )
    took = time.perf_counter() - start
    if done.returncode:
        raise RuntimeError(f"{argv}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    print(f"{load()}: {argv[-1]} {took:.1f} s", file=sys.stderr, flush=True)
    return took, done.stdout


def searched(job: dict[str, Any], scheduler: str) -> Figures:
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "job.yaml"
        search = {**job["search"], "scheduler": scheduler}
        file.write_text(yaml.safe_dump({**job, "search": search, "storage": place}))
        took, _ = output("-m", "raygnn", "tune", str(file))
        found = json.loads((Path(place) / job["name"] / "search.json").read_text())
    trials = {trial["id"]: trial for trial in found["trials"]}
    epochs = sum(trial["epochs"] for trial in trials.values())
    return took, epochs, trials[found["best"]]["value"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="directory with PyG's Cora")
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    data, trials, epochs = str(args.data.resolve()), args.trials, args.epochs

    job = yaml.safe_load((CHECKOUT / "jobs" / "cora-search.yaml").read_text())
    job["graph"]["args"]["root"] = data
    job["train"]["epochs"] = epochs
    job["cluster"] = {"address": "local", "num_cpus": CONCURRENT, "workers": 1}
    job["search"] |= {"trials": trials, "concurrent": CONCURRENT}
    print(setting())
    print(f"- {trials} trials of {epochs} epochs, {CONCURRENT} at a time, {args.rounds} rounds")
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "job.yaml"
        file.write_text(yaml.safe_dump({**job, "storage": place}))
        metrics = json.loads(output("-m", "raygnn", "train", str(file), "--json")[1])["metrics"]
    print(f"- validation accuracy with the defaults: {metrics['val/accuracy']:.3f}\n")

    found = defaultdict[str, list[Figures]](list)
    peer = str(Path(__file__).with_name("peers") / "tune_lightning.py")
    for _ in range(args.rounds):
        found["raygnn tune"].append(searched(job, "none"))
        found["raygnn tune, ASHA"].append(searched(job, "asha"))
        took, text = output(peer, data, str(trials), str(epochs), str(CONCURRENT))
        best = float(text.split()[-1])
        found["Ray Tune and Lightning"].append((took, trials * epochs, best))
    rows = []
    for name, figures in found.items():
        took, trained, best = (statistics.median(column) for column in zip(*figures, strict=True))
        rows.append(
            [name, f"{took:.1f}", f"{3600 * trials / took:.0f}", f"{trained:.0f}", f"{best:.3f}"]
        )
    print(table(["", "seconds", "trials/hour", "epochs", "best validation accuracy"], rows))


if __name__ == "__main__":
    main()
