"""Ray Data's join and hash shuffle against Ray tasks over files, on edges with text ids.

Both number the ends of edges by a table of ids, and bring the edges to their parts:

- Ray Data: `Dataset.join` on each end (which needs polars), and `repartition` by a key to Parquet.
- Ray tasks: as `raygnn partition` with `partition.engine: ray` (ids joined by DuckDB; edges
  scattered to a file for each run, gathered by bucket), all stages, up to the partition's files.

Each in a process of its own with a Ray of its own. Memory is that of all processes that cannot be
dropped, object store included.

    python benchmarks/bench_shuffle.py [--nodes 400000] [--edges 12800000] [--store-gb 3]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from bench_large import anonymous, job
from machine import setting, table
from planted_tables import Planted, write

PARTS = 8


def by_ray_data(root: Path, store: int) -> dict[str, Any]:
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # read when it is imported
    import ray
    import ray.data

    ray.init(object_store_memory=store, include_dashboard=False, log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    nodes, links = (
        [str(path) for path in sorted((root / "tables").glob(f"{kind}-*.parquet"))]
        for kind in ("nodes", "edges")
    )
    ids = ray.data.read_parquet(nodes).select_columns(["id"])
    counted = ids.to_pandas()["id"].reset_index().rename(columns={"index": "number"})
    seconds = {}
    started = time.perf_counter()
    edges = ray.data.read_parquet(links)
    for end in ("source", "target"):
        right = ray.data.from_pandas(counted.rename(columns={"id": end, "number": f"{end}_n"}))
        edges = edges.join(right, "inner", PARTS, on=(end,)).drop_columns([end])
    edges.write_parquet(str(root / "numbered"))
    seconds["join"] = time.perf_counter() - started
    started = time.perf_counter()
    numbered = ray.data.read_parquet(str(root / "numbered"))
    parted = numbered.map_batches(_with_part, batch_format="pyarrow")
    parted.repartition(PARTS, keys=["part"]).write_parquet(str(root / "parts"))
    seconds["shuffle"] = time.perf_counter() - started
    rows = ray.data.read_parquet(str(root / "parts")).count()
    return {"seconds": seconds, "rows": rows, "spilled": _spilled()}


def _with_part(batch: Any) -> Any:
    import pyarrow.compute as pc

    target = batch["target_n"].to_numpy()
    return batch.append_column("part", [pc.cast(target % PARTS, "int32")])


def _spilled() -> int:
    from ray._private.internal_api import memory_summary

    for line in memory_summary(stats_only=True).splitlines():
        if line.startswith("Spilled"):
            return int(line.split()[1]) * 2**20
    return 0


def by_tasks(root: Path, store: int) -> dict[str, Any]:
    import raygnn

    config = job(root, root / "tables" / "planted.yaml", "random")
    config["partition"]["parts"] = PARTS
    meta = raygnn.partition(config, display=False)
    seconds = json.loads((Path(str(meta.directory)) / "raygnn.json").read_text())["seconds"]
    join = seconds["ids"] + seconds["edges"]
    shuffle = seconds["scatter"] + seconds["gather"]
    return {"seconds": {"join": join, "shuffle": shuffle}, "spilled": 0}


WAYS: dict[str, Callable[[Path, int], dict[str, Any]]] = {
    "Ray Data": by_ray_data,
    "Ray tasks": by_tasks,
}


def measured(name: str, root: Path, store: int) -> dict[str, Any]:
    """What a way says, and the most memory that its processes had."""
    command = [sys.executable, __file__, "--way", name, "--root", str(root)]
    command += ["--store-gb", str(store / 1e9)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    peak = 0

    def watch() -> None:
        nonlocal peak
        whole = psutil.Process(process.pid)
        while process.poll() is None:
            with suppress(psutil.Error):  # it has ended
                peak = max(peak, anonymous([whole, *whole.children(recursive=True)]))
            time.sleep(0.5)

    threading.Thread(target=watch, daemon=True).start()
    output, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"{name}: exit status {process.returncode}")
    return {**json.loads(output.splitlines()[-1]), "peak": peak}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=400_000)
    parser.add_argument("--edges", type=int, default=12_800_000, help="directed; two for a row")
    parser.add_argument("--store-gb", type=float, default=3.0, help="Ray Data's object store")
    parser.add_argument("--way", help=argparse.SUPPRESS)
    parser.add_argument("--root", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    store = int(given.store_gb * 1e9)
    if given.way:
        print(json.dumps(WAYS[given.way](given.root, store)))
        return
    print(setting(), flush=True)
    with tempfile.TemporaryDirectory(prefix="shuffle-") as place:
        root = Path(place)
        graph = Planted(given.nodes, given.edges, features=1)
        write(root / "tables", graph, 2)
        rows = []
        for name in WAYS:
            facts = measured(name, root, store)
            # Ray tasks bring an edge to its part in both directions, Ray Data once
            moved = {"join": graph.edges // 2, "shuffle": graph.edges // 2}
            if name == "Ray tasks":
                moved["shuffle"] = graph.edges
            cells = [
                f"{facts['seconds'][stage]:.1f} s, {moved[stage] / facts['seconds'][stage]:,.0f}/s"
                for stage in moved
            ]
            memory = [f"{facts[key] / 2**30:.2f} GiB" for key in ("peak", "spilled")]
            rows.append([name, *cells, *memory])
    print(f"\n{graph.edges // 2:,} rows of edges, {graph.nodes:,} ids\n")
    print(table(["", "join, rows", "shuffle, edges", "memory", "spilled"], rows))


if __name__ == "__main__":
    main()
