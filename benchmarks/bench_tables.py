"""Tables with ids of text → partition → training → predictions by these ids, on a typed graph.

The shop of `shop.py`: users in one Parquet file, items in two, edges in CSV; 5 million edges, of
which 2 million are the reverse of others. Each step is a process of its own. What is compared:

- reading, beside pandas and polars where they are installed, which only read the same files;
- the data: bytes of all arrays of the graph in memory (ends, features, labels, masks, weights,
  times, ids), those that two edge types share counted once;
- the peak of reading and partitioning: the most resident memory of the process, less what it held
  when all was imported and nothing read;
- the peak of training and predicting: the most memory of all processes together, Ray's, driver's
  and workers', what they share counted once and mapped files left out, whose pages the system
  takes back where memory is short (PSS without files), less that of the same job on tables with
  a thousandth of the edges.

Training is measured twice: as it is by default, where workers copy the feature rows that they own
and the others into memory if there is plenty, and with neither.

Exit code 1 if a step but the former takes more than 3 × the data at full scale, a prediction is
missing or one has an id that is none of the table's.

    python benchmarks/bench_tables.py [--scale full|small] [--keep DIRECTORY]
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import shop
import yaml
from machine import load, setting, table

EDGES = {"full": 5_000_000, "small": 50_000}
LIMIT = 3.0  # times the data
_TIMEOUT = 1200.0  # seconds, of one process
SPARING = "train, nothing kept"
# what is chosen by default where memory is short
NOTHING_KEPT = ("--set", "staging.resident=never", "--set", "sampling.cache=0")
_LOOK = 0.2  # seconds between looks at the memory
PARTS = 2

Facts = dict[str, Any]


def job(directory: Path, batch: int) -> Path:
    """Write the tables' job into their directory."""
    file = directory / "job.yaml"
    content = {
        "name": "shop",
        "storage": str(directory / "runs"),
        "graph": {"format": "tables", "path": "shop.yaml"},
        "partition": {"parts": PARTS},
        "task": {"ntype": "user"},
        "model": {"kind": "sage", "hidden": 32, "layers": 2},
        "sampling": {"fanout": [10, 5], "batch_size": batch},
        "train": {"epochs": 1, "lr": 0.01},
        "cluster": {"workers": PARTS},
        "logging": {"loggers": []},
    }
    file.write_text(yaml.safe_dump(content, sort_keys=False))
    return file


def read(config: Any) -> Facts:
    """The graph in memory, and how large its arrays are."""
    from raygnn.graph.sources import load_graph

    data = load_graph(config.graph)
    arrays: dict[int, int] = {}
    for frame in (*data.nodes.values(), *data.edges.values()):
        arrays |= {id(array): array.nbytes for array in frame.data.values()}
    for edges in data.edges.values():
        arrays |= {id(array): array.nbytes for array in (edges.src, edges.dst)}
    ids = sum(each.nbytes for each in data.ids.values())
    return {
        "data": sum(arrays.values()) + ids,
        "nodes": data.num_nodes,
        "edges": data.num_edges,
    }


def partition(config: Any) -> Facts:
    """Reading included."""
    from tests.support.graphs import ensure_partition

    ensure_partition(config, PARTS)
    return {}


def files(config: Any, kind: str) -> list[Path]:
    return sorted(Path(config.graph.path).parent.glob(f"*.{kind}"))


def with_pandas(config: Any) -> Facts:
    """The same files as frames; ends are not looked up, and nothing is checked."""
    import pandas as pd

    held = [pd.read_parquet(file) for file in files(config, "parquet")]
    held += [pd.read_csv(file) for file in files(config, "csv")]
    return {"rows": sum(map(len, held))}


def with_polars(config: Any) -> Facts:
    """Likewise."""
    import polars as pl

    held = [pl.read_parquet(file) for file in files(config, "parquet")]
    held += [pl.read_csv(file) for file in files(config, "csv")]
    return {"rows": sum(map(len, held))}


PEERS = {"pandas": with_pandas, "polars": with_polars}
STEPS = {"read": read, **{k: v for k, v in PEERS.items() if find_spec(k)}, "partition": partition}


def child(step: str, file: str) -> None:
    """One step, with its peak; its facts are the last line printed."""
    import raygnn
    from raygnn.graph.dgl import dgl

    # before the baseline
    for module in ("partition.make", "partition.stream", "tables.table_stages"):
        importlib.import_module(f"raygnn.graph.{module}")
    if step in PEERS:
        importlib.import_module(step)
    config = raygnn.load_config(file)
    dgl()
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # the peak from here on
    before, start = _memory("VmRSS"), (time.perf_counter(), time.process_time())
    facts = STEPS[step](config)
    spent = {"seconds": time.perf_counter() - start[0], "cpu": time.process_time() - start[1]}
    print(json.dumps({**facts, "before": before, "peak": _memory("VmHWM"), **spent}))


def _memory(field: str) -> int:
    """Resident memory of this process, bytes: now (``VmRSS``), or its peak (``VmHWM``)."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


class Watch(threading.Thread):
    """The most memory of all processes that have ``mark`` in their environment, whoever started
    them; what they share counted once.

    Attributes:
        peak: bytes.
    """

    def __init__(self, mark: str):
        super().__init__(daemon=True)
        self.peak = 0
        self._mark = mark.encode()
        self._over = threading.Event()

    def run(self) -> None:
        while not self._over.wait(_LOOK):
            self.peak = max(self.peak, sum(map(self._held, Path("/proc").glob("[0-9]*"))))

    def _held(self, process: Path) -> int:
        try:
            if self._mark not in (process / "environ").read_bytes():
                return 0
            text = (process / "smaps_rollup").read_text()
        except OSError:  # it has ended
            return 0
        held = re.findall(r"^Pss_(?:Anon|Shmem):\s+(\d+) kB", text, re.MULTILINE)
        return sum(map(int, held)) * 1024

    def end(self) -> int:
        self._over.set()
        self.join()
        return self.peak


def run(*command: str, cwd: Path) -> tuple[str, Facts]:
    """The output of a command, how long it took, and the memory of all its processes; raises
    RuntimeError if it fails."""
    start = time.perf_counter()
    mark = f"RAYGNN_BENCH_MARK={uuid.uuid4().hex}"
    watch = Watch(mark)
    watch.start()
    env = {**os.environ, "OMP_NUM_THREADS": "1", **dict([mark.split("=")])}
    try:
        done = subprocess.run(
            [sys.executable, *command],
            cwd=cwd,
            env=env,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT,
        )
    finally:
        peak = watch.end()
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr[-3000:]}")
    return done.stdout, {"seconds": time.perf_counter() - start, "peak": peak}


def measure(directory: Path, edges: int) -> Facts:
    """All steps, in ``directory``; what was measured and found."""
    likes = shop.write(directory, edges)
    file = str(job(directory, max(edges // 5000, 20)))
    found: Facts = {"rows": [], "disk": sum(each.stat().st_size for each in directory.iterdir())}
    for step in STEPS:
        out, _ = run(__file__, "--child", step, "--job", file, cwd=directory)
        facts = json.loads(out.splitlines()[-1])
        found |= {key: facts[key] for key in ("data", "nodes", "edges") if key in facts}
        found[step] = facts
    for step, command in {
        "train": ("train", file, "--overwrite"),
        SPARING: ("train", file, "--overwrite", *NOTHING_KEPT),
        "predict": ("predict", "runs/shop", "--out", "users.out.parquet"),
    }.items():
        found[step] = run("-m", "raygnn", *command, cwd=directory)[1]
    rows = pq.read_table(directory / "users.out.parquet")
    ids, words = rows["node"].to_pylist(), rows["prediction"].to_pylist()
    found["names"] = sorted(ids) == sorted(likes)
    summary = json.loads((directory / "runs" / "shop" / "summary.json").read_text())
    found["accuracy"] = summary["metrics"]["test/accuracy"]
    right = [likes[name] == word for name, word in zip(ids, words, strict=True)]
    found["right"] = sum(right) / len(right)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--scale", choices=EDGES, default=os.environ.get("SCALE", "full"))
    parser.add_argument("--keep", type=Path, metavar="DIRECTORY", help="where files are to stay")
    parser.add_argument("--child", choices=STEPS, help=argparse.SUPPRESS)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child, options.job)
        return 0
    print(setting())
    with contextlib.ExitStack() as stack:
        place = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        place.mkdir(parents=True, exist_ok=True)
        (tiny := place / "tiny").mkdir(exist_ok=True)
        base = measure(tiny, 5_000)
        found = measure(place, EDGES[options.scale])
    for step in ("train", SPARING, "predict"):
        found[step]["before"] = base[step]["peak"]
    data = found["data"]
    print(f"- graph: {found['nodes']:,} nodes, {found['edges']:,} edges of 3 types", end="; ")
    print(f"{found['disk'] / 1e6:.0f} MB of tables, {data / 1e6:.0f} MB of arrays\n")
    rows, worst = [], 0.0
    for step in (*STEPS, "train", SPARING, "predict"):
        facts = found[step]
        more = facts["peak"] - facts["before"]
        # by default workers copy the rows that they own where memory is plentiful
        worst = max(worst, more / data if step not in ("train", *PEERS) else 0.0)
        cells = [f"{more / 1e6:.0f}", f"{more / data:.2f}", f"{facts['peak'] / 1e6:.0f}"]
        cpu = f"{facts['cpu']:.1f}" if "cpu" in facts else ""
        rows.append([step, load(), f"{facts['seconds']:.1f}", cpu, *cells])
    header = ["", "machine", "s", "processor, s", "peak, MB", "× the data", "all in all, MB"]
    print(table(header, rows))
    print(f"\ntest accuracy {found['accuracy']:.4f}; right of all users: {found['right']:.4f}")
    met = worst <= LIMIT and found["names"]
    print(f"ids as in the table: {found['names']}; most memory: {worst:.2f} × the data", end=" ")
    print(f"(limit {LIMIT:g})")
    if options.scale != "full":
        return 0
    print("limits met" if met else "LIMITS MISSED")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
