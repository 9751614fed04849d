"""Several ranks on one host: rows of a neighbour read where they lie and one cache for all of them,
beside ranks that share nothing.

The engine of `bench_engine.py`, replicated, so that only feature rows travel; half of the rows of
other hosts cached. To share nothing each rank has a mount namespace of its own, as in a container.

    python benchmarks/bench_host.py [--scale small|full] [--rounds 3] [--resident never]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bench_engine import CHECKOUT, STEPS, WARMUP, WORK, job, run_engine
from machine import load, setting, table

from raygnn.config.load import load_config
from tests.support.graphs import ensure_partition
from tests.support.hosts import Host, hosts, missing


@dataclass(frozen=True)
class Apart:
    """A host on which every process is started as if in a container of its own."""

    host: Host

    @property
    def address(self) -> str:
        return self.host.address

    @property
    def interface(self) -> str:
        return self.host.interface

    def popen(self, argv: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        return self.host.popen(["unshare", "--mount", *argv], **options)


def measure(scale: str, ranks: int, several: bool, sharing: bool, **options: Any) -> dict[str, Any]:
    """Figures of all ranks together, on one host or on two."""
    config = job(scale, partition={"parts": 4}, **options)
    partition = ensure_partition(load_config(config), 4).directory
    with hosts(2, share=[CHECKOUT]) as group:
        places = sorted(group * 2, key=group.index)[:ranks] if several else group[:1] * ranks
        chosen: Any = places if sharing else [Apart(host) for host in places]
        counts = {"steps": STEPS[scale], "warmup": WARMUP[scale]}
        figures = run_engine(config, partition, chosen, replicated=True, **counts)
    kinds = "proportional", "shared"
    return {
        "seeds/s": figures[0]["seeds_per_second"],
        "CPU": statistics.mean(f["cpu_ms_per_step"] for f in figures),
        "sent, MB a step": sum(f["sent_bytes"] for f in figures) / 1e6,
        **{kind: sum(f["memory"][kind] for f in figures) for kind in kinds},
        "ready": max(f["ready_seconds"] for f in figures),
        "loss": figures[0]["loss"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--scale", choices=STEPS, default=os.environ.get("SCALE", "full"))
    parser.add_argument("--rounds", type=int, default=3, help="of each, in turn")
    parser.add_argument("--resident", default="auto", help="staging.resident")
    given = parser.parse_args()
    if reason := missing():
        print(f"not run: {reason}")
        return 0
    WORK.mkdir(parents=True, exist_ok=True)
    print(setting())
    options = {
        "sampling": {"cache": 0.5},
        "staging": {"resident": given.resident},
        "train": {"seed": 1},
    }
    cases = [
        (ranks, several, sharing)
        for ranks, several in ((2, False), (4, True))
        for sharing in (False, True)
    ]
    found: dict[tuple[int, bool, bool], list[dict[str, Any]]] = {case: [] for case in cases}
    for number in range(given.rounds):
        for case in cases:
            found[case].append(measure(given.scale, *case, **options))
            print(f"round {number + 1}: {case}: {found[case][-1]}; {load()}", flush=True)
    rows = []
    for (ranks, several, sharing), runs in found.items():
        name = f"{ranks} ranks on {'two hosts' if several else 'one host'}"
        middle = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        apart = found[ranks, several, False]
        faster = statistics.median(a["seeds/s"] for a in apart)
        less = statistics.median(a["CPU"] for a in apart)
        rows.append(
            [
                f"{name}, {'sharing' if sharing else 'each for itself'}",
                f"{middle['seeds/s']:,.0f}",
                f"{middle['seeds/s'] / faster:.2f}",
                f"{middle['CPU']:.1f}",
                f"{less / middle['CPU']:.2f}",
                f"{middle['sent, MB a step']:.2f}",
                f"{middle['proportional']:.2f}",
                f"{middle['shared']:.2f}",
                f"{middle['ready']:.1f}",
                f"{middle['loss']:.6f}",
            ]
        )
    header = [
        "",
        "seeds/s",
        "ratio",
        "CPU of a worker, ms a step",
        "ratio",
        "sent by all, MB a step",
        "PSS of all, GB",
        "of it shared",
    ]
    print("\n" + table([*header, "ready, s", "loss"], rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
