"""Lists of the best targets: raygnn's search against FAISS on the same two cores.

Rows of sources and targets lie around common centres, as those of a trained recommender do, and a
score is their dot product. raygnn searches on two ranks of one thread, each with half of both;
FAISS with two threads, exactly (``IndexFlatIP``) and approximately (``IndexHNSWFlat``).

    python -m venv /tmp/faiss && /tmp/faiss/bin/pip install faiss-cpu
    python benchmarks/bench_recommend.py --faiss /tmp/faiss/bin/python [--scale small|full]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

DIM, K, THREADS = 64, 10, 2
SCALES = {"small": (2_000, 20_000), "full": (50_000, 200_000)}  # sources, targets

FAISS = """
import json, resource, sys, time
import faiss, numpy as np
place, k, threads = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
faiss.omp_set_num_threads(threads)
sources, targets = (np.load(f"{place}/{name}.npy") for name in ("sources", "targets"))
found = {}
for name in ("IndexFlatIP", "IndexHNSWFlat"):
    start = time.perf_counter()
    if name == "IndexFlatIP":
        index = faiss.IndexFlatIP(targets.shape[1])
    else:
        index = faiss.IndexHNSWFlat(targets.shape[1], 32, faiss.METRIC_INNER_PRODUCT)
    index.add(targets)
    built = time.perf_counter() - start
    for ef in (64, 256, 1024) if built and name != "IndexFlatIP" else (0,):
        if ef:
            index.hnsw.efSearch = ef
        start = time.perf_counter()
        _, ids = index.search(sources, k)
        seconds = time.perf_counter() - start
        label = f"{name}, efSearch {ef}" if ef else name
        np.save(f"{place}/{label}.npy", ids)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        found[label] = {"build": built, "seconds": seconds, "peak": peak}
print(json.dumps(found))
"""


def generate(place: Path, sources: int, targets: int) -> None:
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(200, DIM))
    for name, num in (("sources", sources), ("targets", targets)):
        rows = centres[rng.integers(0, len(centres), num)] + rng.normal(size=(num, DIM))
        np.save(place / f"{name}.npy", rows.astype(np.float32))


def search(place: Path, rank: int) -> None:
    """Search on one of the ranks, which saves its lists; prints seconds and peak memory."""
    import torch
    import torch.distributed as dist

    from raygnn.models.decoders import Dot
    from raygnn.sampling.exchange import Exchange, World
    from raygnn.sampling.negatives import KnownEdges
    from raygnn.tasks.top import Search

    torch.set_num_threads(1)
    store = dist.FileStore(str(place / "store"), THREADS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=THREADS)
    exchange = Exchange(World(rank, THREADS), dist.group.WORLD)
    spans, rows = {}, {}
    for name in ("sources", "targets"):
        stored = np.load(place / f"{name}.npy", mmap_mode="r")
        first, last = (len(stored) * at // THREADS for at in (rank, rank + 1))
        spans[name] = (first, last)
        rows[name] = torch.from_numpy(np.array(stored[first:last]))
    none = np.empty(0, np.int64)
    ids, keys = np.arange(*spans["targets"]), np.arange(*spans["sources"])
    given = rows["targets"], spans["targets"], KnownEdges(none, none), 1, torch.device("cpu")
    index = Search(exchange, Dot(DIM, 1), ids, *given)
    step, lists = index.step(K, THREADS), []
    rounds = [slice(start, start + step) for start in range(0, len(keys), step)]
    index.lists(keys[:1], rows["sources"][:1], K, ids)  # compiled and connected
    start = time.perf_counter()
    for some in rounds:
        lists.append(index.lists(keys[some], rows["sources"][some], K, ids)[1])
    seconds = time.perf_counter() - start
    np.save(place / f"raygnn-{rank}.npy", np.concatenate(lists))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"seconds": seconds, "peak": peak}), flush=True)
    dist.destroy_process_group()


def run_raygnn(place: Path) -> dict[str, float]:
    (place / "store").unlink(missing_ok=True)
    command = [sys.executable, __file__, "--place", str(place), "--rank"]
    ranks = [
        subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True)
        for rank in range(THREADS)
    ]
    found = [json.loads(rank.communicate(timeout=3600)[0]) for rank in ranks]
    peak = sum(one["peak"] for one in found)
    return {"build": 0.0, "seconds": max(one["seconds"] for one in found), "peak": peak}


def main() -> None:
    from machine import load, setting, table

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scale", choices=SCALES, default=os.environ.get("SCALE", "full"))
    parser.add_argument("--faiss", metavar="PYTHON", help="an interpreter that has faiss-cpu")
    parser.add_argument("--place", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        return search(args.place, args.rank)
    sources, targets = SCALES[args.scale]
    print(f"{setting()}\n\n{sources:,} sources × {targets:,} targets of {DIM} numbers, best {K}\n")
    with tempfile.TemporaryDirectory(prefix="bench-recommend-") as directory:
        place = Path(directory)
        generate(place, sources, targets)
        found = {"raygnn": run_raygnn(place)}
        if args.faiss is not None:
            command = [args.faiss, "-c", FAISS, str(place), str(K), str(THREADS)]
            told = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            found |= json.loads(told.stdout)
            found["raygnn, again"] = run_raygnn(place)
        right = np.concatenate([np.load(place / f"raygnn-{rank}.npy") for rank in range(THREADS)])
        rows = []
        for name, one in found.items():
            ids = right
            if not name.startswith("raygnn"):
                ids = np.load(place / f"{name}.npy")
            same = np.mean([len(np.intersect1d(*pair)) for pair in zip(ids, right)]) / K
            rate, peak = sources / one["seconds"], one["peak"] / 2**30
            seconds = [f"{one['build']:.1f}", f"{one['seconds']:.1f}"]
            rows.append([name, *seconds, f"{rate:,.0f}", f"{same:.4f}", f"{peak:.2f}"])
        header = ["", "build s", "search s", "sources/s", "recall of raygnn's", "peak GiB"]
        print(table(header, rows))
    print(f"\nafterwards: {load()}")
    return None


if __name__ == "__main__":
    main()
