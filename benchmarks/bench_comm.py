"""What the communication keys do on a slow line: two virtual hosts joined by 1 Gbit/s, gradients of
50 MB, `raygnn tune` through a real Ray on both.

Needs root, for network namespaces. Exit code 1 if the bytes are not what theory says, if what the
sweep chooses is not within 5 % of its best trial, or not 1.5 times as fast as the configuration
that it began with.

    python benchmarks/bench_comm.py [--rate 1gbit] [--seconds 6]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
CHECKOUT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(CHECKOUT))

from machine import load, setting, table  # noqa: E402

from tests.support.hosts import hosts, missing  # noqa: E402
from tests.support.ray_cluster import ray_cluster  # noqa: E402

LIMIT = 1500.0  # seconds
GAIN, NEAR = 1.5, 0.95
MB = 2**20

JOB = """
name: comm
storage: {directory}/runs
graph: {{format: planted, nodes: 20000, degree: 10, classes: 8, features: 64}}
partition: {{method: random}}
model: {{kind: sage, hidden: 2500, layers: 3}}
sampling: {{fanout: [2, 2, 1], batch_size: 16}}
staging: {{path: /tmp/stage}}
train: {{epochs: 100}}
cluster: {{workers: 2, probe_timeout: 1m}}
"""


def sweep(rate: str, seconds: float) -> dict[str, Any]:
    """The outcome of `raygnn tune` on two hosts."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "comm.yaml").write_text(JOB.format(directory=directory))
        argv = [sys.executable, "-m", "raygnn", "tune", "comm.yaml", "--json"]
        argv += ["--seconds", str(seconds)]
        with hosts(2, rate=rate, share=[directory]) as group, ray_cluster(group) as cluster:
            done = cluster.run(argv, cwd=directory, timeout=LIMIT)
        if done.returncode != 0:
            raise SystemExit(done.stdout + done.stderr)
        found: dict[str, Any] = json.loads(done.stdout)
        return found


def shown(settings: dict[str, Any]) -> str:
    return ", ".join(f"{k.split('.')[-1]} {v}" for k, v in settings.items()) or "as configured"


def judge(found: dict[str, Any]) -> list[tuple[str, str, str, bool]]:
    """What is wanted: of what, measured, wanted, met."""
    trials = found["trials"]
    whole = trials[0]["bytes"]["gradients"]
    sent = {
        key: [t["bytes"]["gradients"] / whole for t in trials if _is(t["settings"], key, value)]
        for key, value in (("comm.compression", "bf16"), ("train.accumulate", 2))
    }
    compression = next(
        (
            t["settings"]["comm.compression"]
            for t in trials
            if "train.accumulate" in t["settings"] and "comm.compression" in t["settings"]
        ),
        None,
    )
    kept = [
        t["bytes"]["gradients"]
        for t in trials
        if t["settings"].get("comm.compression") == compression
        and "train.accumulate" not in t["settings"]
    ]
    halved = [t["bytes"]["gradients"] for t in trials if t["settings"].get("train.accumulate") == 2]
    rates = found["rates"]
    gain = rates["fastest"] / rates["base"]
    near = rates["fastest"] / max(t["rate"] for t in trials)
    bf16 = sent["comm.compression"][0]
    half = halved[0] / kept[0]
    return [
        ("bytes with bf16 / without", f"{bf16:.3f}", "0.5", abs(bf16 - 0.5) < 0.01),
        ("bytes of a batch, 2 accumulated / 1", f"{half:.3f}", "0.5", abs(half - 0.5) < 0.05),
        ("chosen / best trial of the sweep", f"{near:.3f}", f">= {NEAR}", near >= NEAR),
        ("chosen / as configured", f"{gain:.2f}", f">= {GAIN}", gain >= GAIN),
    ]


def _is(settings: dict[str, Any], key: str, value: Any) -> bool:
    return settings.get(key) == value and "train.accumulate" not in set(settings) - {key}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--seconds", type=float, default=6.0)
    options = parser.parse_args()
    if why := missing():
        print(f"not measured: {why}")
        return 0
    print(f"## Communication, two hosts, {options.rate}\n\n{setting()}\n")
    found = sweep(options.rate, options.seconds)
    base = found["trials"][0]["rate"]
    rows = [
        [
            shown(t["settings"]),
            f"{t['rate']:,.0f}",
            f"{t['rate'] / base:.2f}",
            f"{t['seconds'] * 1e3:,.0f}",
            f"{t['parts']['backward'] * 1e3:,.0f}",
            f"{t['parts']['communicate'] * 1e3:,.0f}",
            f"{t['bytes']['gradients'] / MB:.2f}",
        ]
        for t in found["trials"]
    ]
    header = ["settings", "seeds/s", "ratio", "batch, ms", "backward", "exposed", "gradients, MB"]
    print(table(header, rows), "\n")
    print(f"chosen: {shown(found['fastest'])}; without other results: {shown(found['exact'])}\n")
    judged = judge(found)
    verdicts = [[*figures, "met" if ok else "missed"] for *figures, ok in judged]
    print(table(["", "measured", "wanted", ""], verdicts), f"\n\n{load()} at the end")
    return 0 if all(ok for *_, ok in judged) else 1


if __name__ == "__main__":
    sys.exit(main())
