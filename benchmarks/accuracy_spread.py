"""Accuracy when a job is spread: more workers with a learning rate to match, fewer bits between
them; and when what is looked for is rare. Cases of `bench_accuracy.py`.

- ``scaling``: the same epochs with 1, 2 and 4 workers and a batch for each of them, so that there
  are 2 and 4 times fewer steps; ``train.lr_scaling`` with a warm-up (Goyal et al. 2017).
- ``compression``: gradients exchanged between two workers in each type and way there is.
- ``norm``: batch normalisation with 1, 2 and 4 workers on METIS parts, each a community, and
  on random ones, with the same global batches.
- ``rare``: one of 50 communities is to be told from the rest, 2 % of the nodes: average precision
  with the plain loss, with balanced weights of the classes, and with the focal loss.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from machine import table

import raygnn
from raygnn.config.graph import PlantedGraph
from raygnn.config.schema import Config
from raygnn.graph.partition.dgl_format import write_graph
from raygnn.graph.sources import load_graph

WORKERS = (1, 2, 4)
SCALINGS = ("linear", "sqrt")
COMPRESSIONS = ("none", "fp16", "bf16")
WARMUP = 0.1  # of the run
SCALED = 1.5  # points between the means of one worker and of more
COMPRESSED = 1.0  # points between the means without compression and with it
NORMED = 1.0  # points between the means of one worker and of more, with batch normalisation

PLANTED: dict[str, Any] = {
    "name": "planted-sage",
    "graph": {
        "format": "planted",
        "nodes": 8000,
        "degree": 8,
        "classes": 8,
        "features": 32,
        "train": 0.2,
        "val": 0.1,
        "noise": 6.0,
    },
    "model": {"kind": "sage", "hidden": 64, "layers": 2, "dropout": 0.2},
    "sampling": {"fanout": [10, 10], "batch_size": 50},
    "train": {"epochs": 15, "lr": 0.005},
    "partition": {"method": "random"},
}
# batches of which four, and no more, make one with all of Cora's 140 training nodes
JOBS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "cora-gcn": (
        Path(__file__).resolve().parents[1] / "jobs" / "cora-gcn.yaml",
        ("sampling.batch_size=35", "train.epochs=60", "train.eval_every=3"),
    ),
    "planted-sage": (PLANTED, ()),
}

LOSSES = (
    ("plain", ()),
    ("class_weights: balanced", ("task.class_weights=balanced",)),
    ("focal", ("task.loss=focal",)),
    ("focal, balanced", ("task.loss=focal", "task.class_weights=balanced")),
)

Train = Callable[[Config], Any]  # → what has a summary


def scores(job: str, storage: str, train: Train, seeds: int, *overrides: str) -> list[float]:
    """The test metric, %, of each seed."""
    source, own = JOBS[job]
    found = []
    for seed in range(seeds):
        given = [*own, f"storage={storage}", "cluster.num_cpus=4", f"train.seed={seed}"]
        config = raygnn.load_config(source, [*given, *overrides])
        name = f"test/{config.task.chosen_metric}"
        found.append(100 * train(config).summary["metrics"][name])
    return found


def _workers(count: int) -> tuple[str, str]:
    return f"cluster.workers={count}", f"partition.parts={count}"


def scaling(job: str, storage: str, train: Train, seeds: int) -> Iterator[tuple[list[str], float]]:
    """Rows, and how far each mean is from that of one worker."""
    warm = f"train.schedule.warmup={WARMUP}"
    alone = statistics.mean(base := scores(job, storage, train, seeds, *_workers(1), warm))
    yield [job, "1", "", _text(base), ""], 0.0
    for how in SCALINGS:
        for count in WORKERS[1:]:
            own = [*_workers(count), warm, f"train.lr_scaling={how}"]
            found = scores(job, storage, train, seeds, *own)
            away = statistics.mean(found) - alone
            yield [job, f"{count}", how, _text(found), f"{away:+.2f}"], away


def compression(
    job: str, storage: str, train: Train, seeds: int
) -> Iterator[tuple[list[str], float]]:
    """Rows, and how far each mean is from that without compression."""
    plain: float | None = None
    for kind in COMPRESSIONS:
        own = [*_workers(2), f"comm.compression={kind}"]
        found = scores(job, storage, train, seeds, *own)
        plain = statistics.mean(found) if plain is None else plain
        away = statistics.mean(found) - plain
        yield [job, kind, _text(found), f"{away:+.2f}"], away


def norm(job: str, storage: str, train: Train, seeds: int) -> Iterator[tuple[list[str], float]]:
    """Rows, and how far each mean is from that of one worker with the same normalisation."""
    noisy = "graph.noise=9"
    for kind in ("none", "batch"):
        alone: float | None = None
        for count, method in ((1, "metis"), (2, "metis"), (4, "metis"), (4, "random")):
            own = [*_workers(count), noisy, f"model.norm={kind}", f"partition.method={method}"]
            own.append(f"sampling.batch_size={200 // count}")
            found = scores(job, storage, train, seeds, *own)
            alone = statistics.mean(found) if alone is None else alone
            away = statistics.mean(found) - alone
            yield [job, kind, f"{count}", method, _text(found), f"{away:+.2f}"], away


def rare(job: str, storage: str, train: Train, seeds: int) -> Iterator[tuple[list[str], float]]:
    """Rows; nothing is wanted of the differences."""
    graph = {**PLANTED["graph"], "nodes": 20_000, "degree": 20, "classes": 50, "noise": 8.0}
    data = load_graph(PlantedGraph(**{**graph, "train": 0.3}))
    nodes = data.nodes["_N"].data
    nodes["label"] = (nodes["label"] == 0).astype(np.int64)
    file = Path(storage) / "rare.dgl"
    write_graph(file, data)
    own = ["sampling.batch_size=250", "train.epochs=10", "task.metric=average_precision"]
    own += [f"graph={{format: dgl, path: {file}}}", *_workers(2)]
    for name, changed in LOSSES:
        found = scores(job, storage, train, seeds, *own, *changed)
        yield [job, name, _text(found), ""], 0.0


def report(case: str, storage: str, train: Train, seeds: int) -> bool:
    """Print the table of a case, a row as soon as it is known; whether all are near enough."""
    function, limit, own, jobs = {
        "scaling": (scaling, SCALED, ["workers", "lr_scaling"], [*JOBS]),
        "compression": (compression, COMPRESSED, ["comm.compression"], [*JOBS]),
        "norm": (norm, NORMED, ["norm", "workers", "parts"], ["planted-sage"]),
        "rare": (rare, 0.0, ["task"], ["planted-sage"]),
    }[case]
    near = True
    for number, job in enumerate(jobs):
        for place, (row, away) in enumerate(function(job, storage, train, seeds)):
            metric = "average precision" if case == "rare" else "accuracy"
            text = table(["job", *own, f"test {metric}, %", "away"], [row]).splitlines()
            print("\n".join(text if number + place == 0 else text[2:]), flush=True)
            near &= abs(away) <= limit
    print(f"\nmeans within {limit} points: {'yes' if near else 'NO'}\n")
    return near


def _text(found: list[float]) -> str:
    each = " ".join(f"{value:.1f}" for value in found)
    return f"{statistics.mean(found):.2f} ({each})"
