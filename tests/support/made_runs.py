"""Run directories as a training leaves them, made up."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

from raygnn.runs.run_directory import RunDir
from raygnn.util.files import json_text

STEP = {
    "wait": 2e-3,
    "transfer": 0.0,
    "forward": 1.1e-2,
    "backward": 1.9e-2,
    "communicate": 4e-3,
    "peers": 2e-3,
    "optimizer": 3e-3,
    "rest": 5e-4,
}
LOADER = {"sample": 9e-3, "features": 6e-3, "exchange": 3e-3}


def make_run(
    storage: Path,
    name: str = "made",
    *,
    ranks: int = 2,
    records: int = 60,
    slow: int | None = None,
    summary: dict[str, Any] | None = None,
    nodes: int = 1,
) -> Path:
    """Write a run with the files of a training; ``slow`` is a rank that the other ranks wait
    for."""
    random.seed(0)
    with RunDir(str(storage), name) as run:
        run.begin({"name": name, "model": {"kind": "sage"}, "train": {"epochs": 20, "lr": 0.003}})
        write_records(run.path, ranks=ranks, records=records, slow=slow)
        run.write("preflight.json", preflight(nodes))
        parts = [_part(number) for number in range(ranks)]
        (run.path / "partition.json").write_text(json_text({"directory": "/p", "parts": parts}))
        hosts = [f"host{rank * nodes // ranks}" for rank in range(ranks)]
        run.update_summary(
            status="done",
            metrics={"test/accuracy": 0.8125, "val/accuracy": 0.8301, "test/loss": 0.61},
            steps=10 * records,
            epochs=records // 3,
            seeds_per_second=15200.0,
            seconds={"first_step": 14.2, "total": 95.0},
            workers=ranks,
            starts=2,
            versions={"raygnn": "0.1.0", "torch": "2.13.0"},
            ranks=[
                {
                    "rank": rank,
                    "host": hosts[rank],
                    "busy": 0.03,
                    "wait": 0.002,
                    "slow": 0.9 if rank == slow else 0.0,
                }
                for rank in range(ranks)
            ],
        )
        if summary is not None:
            run.update_summary(**summary)
        write_events(run.path)
        return run.path


def write_records(path: Path, *, ranks: int, records: int, slow: int | None = None) -> None:
    with open(path / "metrics.jsonl", "w") as metrics, open(path / "ranks.jsonl", "w") as each:
        for index in range(records):
            at = {"step": 10 * index + 1, "time": 14.0 + index}
            seconds = _seconds(ranks, slow)
            record = {
                **at,
                "epoch": index // 3,
                "train/loss": 2.2 * math.exp(-index / 20) + 0.4 + random.random() / 20,
                "train/lr": 0.003 * (1 - index / records),
                "seeds_per_second": 15000 + 800 * random.random(),
                **{f"seconds/{part}": sum(v) / ranks for part, v in seconds.items()},
            }
            metrics.write(json.dumps(record) + "\n")
            if index % 3 == 2:
                accuracy = 0.83 - 0.5 * math.exp(-index / 15)
                more = {"val/accuracy": accuracy, "val/f1": accuracy - 0.03, "val/loss": 0.7}
                metrics.write(json.dumps({**at, "epoch": index // 3, **more}) + "\n")
            each.write(json.dumps({**at, "seconds": seconds, **_used(ranks)}) + "\n")


def write_events(path: Path) -> None:
    texts = [
        "rank 1 on host1 slows down the other ranks: it is busy for 0.061 s a batch, "
        "they for 0.036 s",
        "attempt 2 of at most 4, from step-000000000200 if that is complete",
        "step-000000000300 is not in s3://bucket/runs: timed out",
    ]
    with open(path / "logs" / "events.jsonl", "w") as file:
        for index, text in enumerate(texts):
            file.write(json.dumps({"time": 1.8e9 + 31 * index, "text": text}) + "\n")


def preflight(nodes: int) -> dict[str, Any]:
    return {
        "ok": True,
        "verdict": "ready: 1 warning",
        "findings": [
            {
                "check": "cache_space",
                "severity": "warn",
                "what": "staging.path has 942 MiB free",
                "remedy": "free space there",
                "nodes": ["host0", "host1"],
                "values": {},
            }
        ],
        "table": [
            {
                "node": f"host{node}",
                "address": f"10.77.0.{node + 1}",
                "processor": "Intel Xeon @ 2.80GHz",
                "CPUs": "8",
                "GPUs": "0",
                "memory": "24.0 GiB",
                "disk": "",
            }
            for node in range(nodes)
        ],
        "communication": {"backend": "gloo", "why": "the workers have no GPUs"},
    }


def _seconds(ranks: int, slow: int | None) -> dict[str, list[float]]:
    jitter = [0.9 + 0.2 * random.random() for _ in range(ranks)]
    found = {part: [value * j for j in jitter] for part, value in (STEP | LOADER).items()}
    if slow is not None:
        found["backward"][slow] *= 2
        found["peers"] = [0.0 if rank == slow else 0.02 for rank in range(ranks)]
    return found


def _used(ranks: int) -> dict[str, Any]:
    return {
        "bytes": {"gradients": [1.2e7] * ranks, "exchange": [3e6] * ranks},
        "use": {"cpu": [0.8 + 0.1 * random.random() for _ in range(ranks)], "gpu": [None] * ranks},
        "memory": {"rss": [6e8 + 1e7 * rank for rank in range(ranks)]},
        "network": {"sent": [4e7] * ranks, "received": [4e7] * ranks},
    }


def _part(number: int) -> dict[str, Any]:
    nodes = 50_000 + 1000 * (number % 3)
    return {
        "nodes": nodes,
        "edges": 1_200_000 + 150_000 * (number % 2),
        "halo": 30_000,
        "cut": 200_000,
        "training_nodes": 4000 + 900 * (number % 2),
        "bytes": 40_000_000,
    }
