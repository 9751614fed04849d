"""Tables with keys and times, and a training table → partition → training → predictions.

Four tables (customers, products, orders, visits) of generated rows and a training table of
(customer, day, target). Each step is a command of raygnn in a process of its own, with its seconds
and the most memory of all its processes (PSS without files). Beside it PyG's ``NeighborLoader``
with ``input_time`` and GraphSAGE train on the same rows of the same graph with the same fanout,
where it fits into memory; sampling by time needs ``pyg-lib``, which only PyG's own index has. Each
has two processor cores: raygnn's worker prepares batches in a thread, PyG's loader in a process.

    python benchmarks/bench_relational.py [--rows 50000000] [--questions 10000000] [--only stages]
    python benchmarks/bench_relational.py --rows 1000000 --questions 200000 --only peer
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import duckdb
import numpy as np
import pandas as pd
import torch
import yaml
from bench_tables import run
from machine import load, setting, table

BATCH, FANOUT, ROUNDS = 512, (16, 16), 3
WARMUP, BATCHES = 10, 100  # of the peer
STEPS = 200  # of training
SHARES = {"customer": 0.04, "product": 0.004, "orders": 0.8, "visit": 0.156}
SPLITS = {"val": "2025-10-01", "test": "2025-11-01"}

NODES: dict[str, Any] = {
    "customer": {"files": "customer.parquet", "id": "customer", "features": {"feat": "age"}},
    "product": {"files": "product.parquet", "id": "product", "features": {"feat": "price"}},
    "orders": {
        "files": "orders.parquet",
        "keys": {"customer": "customer", "product": "product"},
        "time": "date",
        "features": {"feat": ["amount", "stars"]},
    },
    "visit": {
        "files": "visit.parquet",
        "keys": {"customer": "customer"},
        "time": "date",
        "features": {"feat": "minutes"},
    },
}


def write(place: Path, rows: int, questions: int) -> Path:
    """Write the tables and the job; customers and products are drawn by a power law."""
    num = {name: max(int(share * rows), 100) for name, share in SHARES.items()}
    day = "cast(date '2024-01-01' + cast(floor({} * 700) as integer) as timestamp)"  # for pandas
    some = "cast(floor(power({}, 2) * {}) as integer)"  # the square prefers small numbers

    def uniform(stream: int) -> str:
        return f"(hash(i * 64 + {stream}) / 18446744073709551616.0)"

    def pick(stream: int, name: str) -> str:
        return some.format(uniform(stream), num[name])

    at = day.format(uniform(1))
    columns = {
        "customer": f"'c' || i as customer, {uniform(0)} as age",
        "product": f"i as product, {uniform(0)} * 50 as price",
        "orders": f"'c' || {pick(2, 'customer')} as customer, {pick(3, 'product')} as product, "
        f"{at} as date, {uniform(4)} * 50 as amount, {uniform(5)} as stars",
        "visit": f"'c' || {pick(2, 'customer')} as customer, {at} as date, {uniform(4)} as minutes",
        # orders of the customer decide nothing: only the cost of the path is measured
        "questions": f"'c' || {pick(2, 'customer')} as customer, {at} as day, "
        f"{uniform(6)} < 0.3 as target",
    }
    with duckdb.connect() as database:
        database.execute("set memory_limit = '2GB'; set preserve_insertion_order = false")
        for name, selected in columns.items():
            order = " order by day" if name == "questions" else ""
            database.execute(
                f"copy (select {selected} from range({num.get(name, questions)}) as t(i){order}) "
                f"to '{place / name}.parquet'"
            )
    (place / "tables.yaml").write_text(yaml.safe_dump({"nodes": NODES}, sort_keys=False))
    table_of = {"files": "questions.parquet", "entity": "customer", "time": "day"}
    job = {
        "name": "questions",
        "storage": "runs",
        "graph": {"format": "tables", "path": "tables.yaml"},
        "partition": {"method": "random", "parts": 2},
        "task": {
            "kind": "node_classification",
            "ntype": "customer",
            "table": {**table_of, "target": "target"},
            "split": {"by": "time", **SPLITS},
        },
        "model": {"kind": "sage", "hidden": 64, "time_encoding": 16},
        "sampling": {"fanout": [*FANOUT], "batch_size": BATCH, "time": {"edges": "time"}},
        "train": {"max_steps": STEPS, "eval_every": 100},
        "cluster": {"workers": 2},
        "logging": {"loggers": []},
    }
    file = place / "job.yaml"
    file.write_text(yaml.safe_dump(job, sort_keys=False))
    with duckdb.connect() as database:
        database.execute(
            f"copy (select customer, day from '{place}/questions.parquet' where day >= "
            f"'{SPLITS['test']}' limit {max(questions // 10, 100)}) to '{place}/next.parquet'"
        )
    return file


def stages(place: Path) -> list[list[str]]:
    """Partition, train and predict: the table's rows."""
    rows = []
    for step, command in {
        "build the partition": ("partition", "job.yaml"),
        f"train, {STEPS} steps": ("train", "job.yaml", "--overwrite"),
        "predict": ("predict", "questions", "--rows", "next.parquet", "--out", "scores.parquet"),
    }.items():
        before = load()
        _, facts = run("-m", "raygnn", *command, cwd=place)
        rows.append([step, before, f"{facts['seconds']:.1f}", f"{facts['peak'] / 2**30:.2f}"])
        print(*rows[-1], flush=True)
    return rows


def peer(place: Path) -> float:
    """Return PyG's seeds per second in training, with its loader in a second process."""
    from torch_geometric.data import HeteroData
    from torch_geometric.loader import NeighborLoader
    from torch_geometric.nn import GraphSAGE, to_hetero

    frames = {name: pd.read_parquet(place / f"{name}.parquet") for name in NODES}
    data = HeteroData()
    number = pd.Index(frames["customer"].customer)
    for name, described in NODES.items():
        feat = described["features"]["feat"]
        columns = [feat] if isinstance(feat, str) else feat
        data[name].x = torch.from_numpy(frames[name][columns].to_numpy("float32"))
        known = frames[name].date.astype("int64") if "time" in described else 0
        data[name].time = torch.as_tensor(np.broadcast_to(known, len(frames[name])).copy())
        for key in described.get("keys", {}):
            ends = frames[name][key]
            end = number.get_indexer(ends) if key == "customer" else ends.to_numpy()
            ends = torch.stack([torch.arange(len(end)), torch.from_numpy(end).long()])
            data[name, key, key].edge_index = ends
            data[key, f"rev_{key}", name].edge_index = ends.flip(0)
    asked = pd.read_parquet(place / "questions.parquet")
    asked = asked[asked.day < pd.Timestamp(SPLITS["val"])]
    seeds = torch.from_numpy(number.get_indexer(asked.customer))
    loader = NeighborLoader(
        data,
        num_neighbors=[*FANOUT],
        batch_size=BATCH,
        input_nodes=("customer", seeds),
        input_time=torch.from_numpy(asked.day.astype("int64").to_numpy()),
        time_attr="time",
        shuffle=True,
        num_workers=1,
        persistent_workers=True,
    )
    target = torch.from_numpy(asked.target.to_numpy().astype("int64"))
    model = to_hetero(GraphSAGE((-1, -1), 64, len(FANOUT), 2), data.metadata(), aggr="sum")
    optimizer, start = None, 0.0
    for step, batch in enumerate(loader):
        if step == WARMUP:
            start = time.perf_counter()
        if step == WARMUP + BATCHES:
            break
        customers = batch["customer"]
        out = model(batch.x_dict, batch.edge_index_dict)["customer"][: customers.batch_size]
        optimizer = optimizer or torch.optim.Adam(model.parameters())
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(out, target[customers.input_id]).backward()
        optimizer.step()
    return BATCHES * BATCH / (time.perf_counter() - start)


def compare(place: Path) -> list[list[str]]:
    """Train in turn with PyG and with raygnn, one worker: the table's rows."""
    found: dict[str, list[float]] = {"raygnn": [], "PyG": []}
    one = ("cluster.workers=1", "partition.parts=1", "partition.path=null")
    sets = [word for each in one for word in ("--set", each)]
    for _ in range(ROUNDS):
        run("-m", "raygnn", "train", "job.yaml", "--overwrite", *sets, cwd=place)
        summary = json.loads((place / "runs" / "questions" / "summary.json").read_text())
        found["raygnn"].append(summary["seeds_per_second"])
        out, _ = run(__file__, "--peer", "--keep", str(place), cwd=place)
        found["PyG"].append(float(out.splitlines()[-1]))
    medians = {name: statistics.median(rates) for name, rates in found.items()}
    return [
        [name, f"{rate:,.0f}", f"{rate / medians['PyG']:.2f}", load()]
        for name, rate in medians.items()
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=50_000_000, help="of the four tables together")
    parser.add_argument("--questions", type=int, default=10_000_000)
    parser.add_argument("--only", choices=("stages", "peer"))
    parser.add_argument("--keep", type=Path, metavar="DIRECTORY", help="where files are to stay")
    parser.add_argument("--peer", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peer:
        torch.set_num_threads(1)
        print(peer(args.keep))
        return 0
    print(setting() + "\n")
    with contextlib.ExitStack() as stack:
        place = args.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        place.mkdir(parents=True, exist_ok=True)
        start = time.perf_counter()
        write(place, args.rows, args.questions)
        size = sum(file.stat().st_size for file in place.glob("*.parquet"))
        print(f"{size / 1e6:,.0f} MB of Parquet, written in {time.perf_counter() - start:.0f} s\n")
        if args.only != "peer":
            print(table(["", "machine", "s", "peak, GiB"], stages(place)))
        if args.only != "stages":
            print("\n" + table(["training", "seeds/s", "× PyG", "machine"], compare(place)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
