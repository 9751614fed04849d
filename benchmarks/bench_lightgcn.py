"""Recommendations: LightGCN by `raygnn train` against the loop of PyG's example, on two cores.

Gowalla with all of LightGCN's training edges (`jobs/gowalla-lightgcn.yaml`), or generated visits at
the small scale. raygnn trains on sampled neighbours with two workers of one thread; PyG's
``LightGCN`` passes messages over the full graph for each batch of 8192 edges, with two threads and
the example's BPR and learning rate, 64 numbers and 3 layers. Both lists of places are scored here,
as in the paper: the mean over users with test places, training places skipped. raygnn's own
``test/recall@20`` and ``test/ndcg@20`` must equal them.

    python benchmarks/bench_lightgcn.py [--scale small|full] [--epochs 6] [--steps N]
                                        [--data ../shared/data/gowalla]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import torch
from machine import load, setting, table
from torch_geometric.nn import LightGCN

CHECKOUT = Path(__file__).resolve().parents[1]
K, DIM, LAYERS, BATCH, LR = 20, 64, 3, 8192, 0.001
Pairs = tuple[np.ndarray, np.ndarray]


def generate(directory: Path, users: int = 3000, places: int = 1500, visits: int = 25) -> None:
    """Write ``train.txt`` and ``test.txt`` of users who mostly visit the places of their town."""
    rng = np.random.default_rng(0)
    lines: dict[str, list[str]] = {"train": [], "test": []}
    for user in range(users):
        town = np.flatnonzero(np.arange(places) % 30 == user % 30)
        share = 1 / (1 + np.arange(len(town)))
        near = rng.choice(town, visits - 5, replace=False, p=share / share.sum())
        seen = rng.permutation(np.union1d(near, rng.integers(0, places, 5)))
        for name, some in (("test", seen[:5]), ("train", seen[5:])):
            lines[name].append(" ".join(map(str, [user, *some])))
    for name, text in lines.items():
        (directory / f"{name}.txt").write_text("\n".join(text) + "\n")


def read(directory: Path, *names: str) -> Pairs:
    """Return users and places of some files."""
    rows = [
        np.fromstring(line, np.int64, sep=" ")
        for name in names
        if (directory / f"{name}.txt").exists()
        for line in (directory / f"{name}.txt").read_text().splitlines()
    ]
    users = np.concatenate([np.full(len(row) - 1, row[0]) for row in rows])
    return users, np.concatenate([row[1:] for row in rows])


def evaluate(users: np.ndarray, places: np.ndarray, known: Pairs, true: Pairs) -> dict[str, float]:
    """Return the metrics of scores that are inner products of rows, user by user."""
    gains = 1 / np.log2(np.arange(K) + 2)
    skipped, wanted = (
        np.split(pairs[1][order], np.searchsorted(pairs[0][order], np.arange(1, len(users))))
        for pairs in (known, true)
        for order in [np.argsort(pairs[0], kind="stable")]
    )
    recall, ndcg = [], []
    for user in range(len(users)):
        if not len(wanted[user]):
            continue
        scores = places @ users[user]
        scores[skipped[user]] = -np.inf
        best = np.argpartition(-scores, K)[:K]
        hits = np.isin(best[np.argsort(-scores[best])], wanted[user])
        recall.append(hits.sum() / len(wanted[user]))
        ndcg.append((hits * gains).sum() / gains[: len(wanted[user])].sum())
    return {f"recall@{K}": float(np.mean(recall)), f"ndcg@{K}": float(np.mean(ndcg))}


def row(seconds: float, found: dict[str, float]) -> list[str]:
    return [f"{seconds:.1f}", *(f"{value:.4f}" for value in found.values()), load()]


def command(*words: object) -> None:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_AUTH_MODE": "disabled"}
    subprocess.run([sys.executable, "-m", "raygnn", *map(str, words)], env=env, check=True)


def raygnn(texts: Path, directory: Path, epochs: int, known: Pairs, true: Pairs) -> list[str]:
    """Return seconds of an epoch and metrics; print those that raygnn computes."""
    example = [sys.executable, str(CHECKOUT / "examples/gowalla.py"), str(texts), str(directory)]
    subprocess.run(example, check=True)
    values = {
        "storage": directory,
        "graph.path": directory / "all.yaml",
        "cluster.address": "local",
        "train.epochs": epochs,
    }
    settings = [word for key, value in values.items() for word in ("--set", f"{key}={value}")]
    command("train", CHECKOUT / "jobs/gowalla-lightgcn.yaml", *settings)
    run = directory / "gowalla-lightgcn"
    rows = []
    for ntype in ("user", "place"):
        file = directory / f"{ntype}.parquet"
        command("embed", run, "--ntype", ntype, "--out", file, "--set", "cluster.address=local")
        frame = pq.read_table(file).to_pandas()
        each = np.stack(frame["embedding"].to_numpy())
        given = np.empty_like(each)
        given[frame["node"].to_numpy().astype(np.int64)] = each
        rows.append(given / np.linalg.norm(given, axis=1, keepdims=True))  # decoder: cosine
    found = evaluate(rows[0], rows[1], known, true)
    summary = json.loads((run / "summary.json").read_text())
    own = {name: summary["metrics"][f"test/{name}"] for name in found}
    print(f"raygnn's own metrics: {own}; counted here: {found}")
    assert all(abs(own[name] - value) < 1e-4 for name, value in found.items())
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    first, *_, last = (record for record in records if "train/loss" in record)
    step = (last["time"] - first["time"]) / (last["step"] - first["step"])
    return row(step * summary["steps"] / epochs, found)


def pyg(epochs: int, most: int | None, known: Pairs, true: Pairs) -> list[str]:
    torch.set_num_threads(2)
    torch.manual_seed(0)
    users, places = (int(max(known[i].max(), true[i].max())) + 1 for i in (0, 1))
    pairs = torch.from_numpy(np.stack([known[0], known[1] + users]))
    edges = torch.cat([pairs, pairs.flip(0)], dim=1)
    model = LightGCN(users + places, DIM, LAYERS)
    optimizer = torch.optim.Adam(model.parameters(), lr=LR)
    batches = -(-pairs.shape[1] // BATCH)
    chosen = (some for _ in range(epochs) for some in torch.randperm(pairs.shape[1]).split(BATCH))
    times = [time.perf_counter()]
    for some in islice(chosen, most):
        positive = pairs[:, some]
        others = torch.randint(users, users + places, (len(some),))
        both = torch.cat([positive, torch.stack([positive[0], others])], dim=1)
        above, below = model(edges, both).chunk(2)
        loss = model.recommendation_loss(above, below, node_id=both.unique())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        times.append(time.perf_counter())
    seconds = (times[-1] - times[1]) / (len(times) - 2) * batches  # the first step is slow
    if most is not None:
        return [f"{seconds:.1f}", "", "", load()]
    with torch.no_grad():
        rows = model.get_embedding(edges).numpy()
    return row(seconds, evaluate(rows[:users], rows[users:], known, true))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--scale", choices=("small", "full"), default=os.environ.get("SCALE"))
    parser.add_argument("--epochs", type=int, default=6, help="of both (6)")
    parser.add_argument("--steps", type=int, help="at most, of PyG's loop; it then has no metrics")
    parser.add_argument("--data", type=Path, default=CHECKOUT.parent / "shared/data/gowalla")
    given = parser.parse_args()
    print(setting() + f"\n- torch_geometric {version('torch_geometric')}")
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        texts = given.data
        if given.scale == "small":
            generate(texts := directory)
        known, true = read(texts, "train", "valid"), read(texts, "test")
        rows = [
            ["raygnn train", *raygnn(texts, directory, given.epochs, known, true)],
            ["PyG's loop", *pyg(given.epochs, given.steps, known, true)],
        ]
    header = [f"{given.epochs} epochs", "s/epoch", f"recall@{K}", f"ndcg@{K}", "machine"]
    print("\n" + table(header, rows))
    print(f"\nPyG / raygnn, seconds of an epoch: {float(rows[1][1]) / float(rows[0][1]):.2f}")


if __name__ == "__main__":
    main()
