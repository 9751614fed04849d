"""A graph larger than memory: planted tables → a partition, out of core → training, in a limit.

The tables are Parquet with text ids and float16 features (`planted_tables.py`); full scale is 25
million nodes, 400 million directed edges, 64 features. `raygnn partition` in 4, then `raygnn train`
(2 workers with partitioned topology, 50 steps, and exact evaluations of 2 % of the nodes) each run
with their Ray in a memory cgroup of their own (version 1 or 2, where one can be made), else the
resident memory of all their processes is watched. The page cache of files counts against the limit,
too, and is dropped when there is need.

    python benchmarks/bench_large.py [--scale 1/64] [--limit-gib 8] [--method random] [--keep]

With ``--directory`` and ``--keep`` what an earlier call made there is not made again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from fractions import Fraction
from pathlib import Path
from typing import Any

import psutil
import yaml
from machine import load, setting, table
from planted_tables import Planted, write

NODES, EDGES, PARTS, STEPS = 25_000_000, 400_000_000, 4, 50
_GIB = 2**30
_EVERY = 0.5  # seconds between looks
_RAYGNN = [sys.executable, "-m", "raygnn"]


class Limited:
    """A command whose processes have at most so much memory, all together.

    Attributes:
        kind: how that is kept.
        anonymous, disk, spilled: the most bytes that were seen of its processes, in ``place``, and
            of what Ray's object store put on the disk.
        processor: its processes → seconds of processor time, which other load hardly changes.
    """

    def __init__(self, command: list[str], limit: int, place: Path):
        self.anonymous, self.disk, self.spilled, self.limit = 0, 0, 0, limit
        self.processor: dict[psutil.Process, float] = {}
        self._place, self._before = place, size_of(place)
        self._group = _new_group(limit)
        self.kind = "cgroup" if self._group else "none could be made: resident memory is watched"
        self._started = time.perf_counter()
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, preexec_fn=self._enter, env=_environment()
        )

    def _enter(self) -> None:
        if self._group is not None:
            (self._group / "cgroup.procs").write_text(str(os.getpid()))

    def run(self) -> tuple[str, float]:
        """Its output and seconds; raises where it fails."""
        watch = threading.Thread(target=self._watch, daemon=True)
        watch.start()
        output, _ = self._process.communicate()
        seconds = time.perf_counter() - self._started
        watch.join()
        if self._process.returncode:
            raise SystemExit(f"exit status {self._process.returncode}: {output}\n{self.rows()}")
        return output, seconds

    def rows(self) -> list[list[str]]:
        """Of a table: what it took."""
        facts = {
            f"limit ({self.kind})": self.limit,
            "memory that cannot be dropped, all processes": self.anonymous,
            "charged to the group, page cache included": self.charged,
            "at most on disk, beside what was there": self.disk,
            "spilled by Ray": self.spilled,
        }
        return [[n, "" if v is None else f"{v / _GIB:.2f} GiB"] for n, v in facts.items()]

    @property
    def charged(self) -> int | None:
        """The most that the group was charged with, page cache included."""
        if self._group is None:
            return None
        for name in ("memory.max_usage_in_bytes", "memory.peak"):
            if (self._group / name).exists():
                return int((self._group / name).read_text())
        return None

    def _watch(self) -> None:
        whole = psutil.Process(self._process.pid)
        while self._process.poll() is None:
            processes = [whole, *_children(whole)]
            used = _anonymous_of(self._group) if self._group else anonymous(processes)
            self.anonymous = max(self.anonymous, used)
            self.disk = max(self.disk, size_of(self._place) - self._before)
            self.spilled = max(self.spilled, spilled(processes))
            for process in processes:
                with contextlib.suppress(psutil.Error):
                    times = process.cpu_times()
                    self.processor[process] = times.user + times.system
            if self._group is None and self.anonymous > self.limit:
                for process in processes[::-1]:
                    process.kill()
            time.sleep(_EVERY)

    def close(self) -> None:
        """Remove the group, once its last process has gone."""
        for _ in range(20):
            if self._group is None:
                return
            try:
                self._group.rmdir()
                return
            except OSError:
                time.sleep(1)


def _new_group(limit: int) -> Path | None:
    """A new memory group below this process's own; None where that is not possible."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "memory":
            parent, file = Path("/sys/fs/cgroup/memory") / path.lstrip("/"), "memory.limit_in_bytes"
        elif controllers == "":
            parent, file = Path("/sys/fs/cgroup") / path.lstrip("/"), "memory.max"
        else:
            continue
        group = parent / f"raygnn-{os.getpid()}"
        try:
            group.mkdir()
            (group / file).write_text(str(limit))
        except OSError:
            if group.exists():
                group.rmdir()
            continue
        return group
    return None


def _children(process: psutil.Process) -> list[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        return list(process.children(recursive=True))
    return []


def _anonymous_of(group: Path) -> int:
    """Bytes of a group that cannot be dropped: of version 1 ``rss``, of version 2 ``anon``."""
    lines = (line.split() for line in (group / "memory.stat").read_text().splitlines())
    return sum(int(value) for name, value in lines if name in ("rss", "anon", "shmem"))


def anonymous(processes: list[psutil.Process]) -> int:
    """Bytes of memory of processes that cannot be dropped; what they share counts for each."""
    total = 0
    for process in processes:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
                if line.startswith(("RssAnon", "RssShmem")):
                    total += int(line.split()[1]) * 1024
    return total


def spilled(processes: list[psutil.Process]) -> int:
    """Bytes that the object store of a Ray among them has on the disk."""
    option, total = "--session_dir=", 0
    for process in processes:
        with contextlib.suppress(psutil.Error):
            if process.name() == "raylet":
                given = [a for a in process.cmdline() if a.startswith(option)]
                for place in Path(given[0].removeprefix(option)).glob("ray_spilled_objects*"):
                    total += size_of(place)
    return total


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "RAY_AUTH_MODE": "disabled"}


def job(root: Path, tables: Path, method: str) -> dict[str, Any]:
    return {
        "name": "large",
        "storage": str(root / "runs"),
        "graph": {"format": "tables", "path": str(tables)},
        "partition": {"parts": PARTS, "method": method, "engine": "ray"},
        "staging": {"path": str(root / "staging")},
        "model": {"kind": "sage", "dropout": 0.0},
        "sampling": {"topology": "partitioned"},
        "train": {"max_steps": STEPS, "log_every": 1},
        "precision": "bf16",  # rows of features are as wide as in the tables
        "cluster": {"workers": 2, "address": "local"},
    }


def size_of(directory: Path) -> int:
    """Bytes of all files below a directory, some of which may go meanwhile."""
    total = 0
    for place, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.stat(os.path.join(place, name)).st_size
    return total


def partition(job: Path, root: Path, limit: int) -> None:
    limited = Limited([*_RAYGNN, "partition", str(job), "--json"], limit, root)
    try:
        output, seconds = limited.run()
        place = Path(json.loads(output)["directory"])
        manifest = json.loads((place / "raygnn.json").read_text())
        stages = manifest["seconds"] | {"all of raygnn partition": seconds}
        parts = manifest["parts"]
        edges = [sum(part["edges"].values()) for part in parts]
        show("raygnn partition", stages, limited, {"partition": size_of(place)})
        cut = sum(part["cut"] for part in parts) / sum(edges)
        print(f"\ncut {cut:.3f}, edges of the largest part {max(edges) * PARTS / sum(edges):.3f}")
    finally:
        limited.close()


def train(job: Path, root: Path, limit: int) -> None:
    limited = Limited([*_RAYGNN, "train", str(job), "--overwrite"], limit, root)
    try:
        _, seconds = limited.run()
        run = root / "runs" / "large"
        stages = stages_of(run) | {"all of raygnn train": seconds}
        show("raygnn train", stages, limited, {"each node's own copy": size_of(root / "staging")})
        summary = json.loads((run / "summary.json").read_text())
        print(f"\n{summary['steps']} steps; {summary['metrics']}")
    finally:
        limited.close()


def stages_of(run: Path) -> dict[str, float]:
    """Seconds of the stages of a training, from the log of rank 0 and the records, whose times are
    those since the command began."""
    log = (run / "logs" / "rank-0.log").read_text()
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [r["time"] for r in records if "train/loss" in r]
    val, test = ([r["time"] for r in records if f"{s}/loss" in r][-1] for s in ("val", "test"))
    mapped, ready = (float(re.findall(rf"{w} in ([\d.]+)", log)[-1]) for w in ("mapped", "ready"))
    return {
        "until the first step is done": steps[0],
        "of it each rank's parts copied to the node": mapped,
        "of it feature rows made ready": ready,
        f"the other {len(steps) - 1} steps": steps[-1] - steps[0],
        "validation, 2 % of the nodes": val - steps[-1],
        "test, 2 %, and validation again": test - val,
    }


def show(title: str, stages: dict[str, float], limited: Limited, sizes: dict[str, int]) -> None:
    stages |= {"processor time, all processes": sum(limited.processor.values())}
    print("\n" + table([title, "seconds"], [[n, f"{s:.1f}"] for n, s in stages.items()]))
    rows = [*limited.rows(), *([n, f"{size / _GIB:.2f} GiB"] for n, size in sizes.items())]
    print("\n" + table(["memory and disk", ""], rows), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--scale", type=Fraction, default=Fraction(1, 64))
    parser.add_argument("--limit-gib", type=float, default=8.0)
    parser.add_argument("--method", default="random")
    parser.add_argument("--directory", type=Path, help="of tables, partition and run; with --keep")
    parser.add_argument("--keep", action="store_true", help="leave them there")
    given = parser.parse_args()
    root = given.directory or Path(tempfile.mkdtemp(prefix="large-"))
    root.mkdir(parents=True, exist_ok=True)
    print(setting(), flush=True)
    graph = Planted(int(NODES * given.scale), int(EDGES * given.scale))
    started = time.perf_counter()
    try:
        tables = write(root / "tables", graph, os.cpu_count() or 1)
        seconds = time.perf_counter() - started
        print(f"\n{graph.nodes:,} nodes, {graph.edges:,} edges, {given.method}; {load()}")
        print(f"tables: {seconds:.1f} s, not limited, {size_of(root / 'tables') / _GIB:.2f} GiB")
        config = root / "job.yaml"
        config.write_text(yaml.safe_dump(job(root, tables, given.method)))
        for work in (partition, train):
            work(config, root, int(given.limit_gib * _GIB))
            print(f"\n{load()}", flush=True)
    finally:
        if not given.keep:
            shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    main()
