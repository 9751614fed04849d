"""Exact outputs of all nodes: layer by layer, against minibatches, DGL and PyG.

One process with one thread, on the graph of `bench_engine` (1.2 million nodes, 60 million directed
edges, 100 features), GraphSAGE with 2 layers, hidden 256. A minibatch of 1,000 nodes with full
neighbourhoods reaches most of such a graph, so only a few are run, and all are extrapolated from
their rate; their outputs are compared. DGL runs layer by layer in minibatches of 4,096 nodes, as in
its example. DGL and PyG run on the whole graph, too, with all of it in memory; PyG runs only so,
since its loaders need pyg-lib.

    python benchmarks/bench_inference.py [--scale small|full] [--batches 4] [--rounds 3]

Exit code 1 if layer-wise inference is less than 3 times as fast as DGL's (at full scale).
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_engine import GRAPHS, WORK, job
from machine import load, setting, table
from torch import nn

from raygnn.config.load import load_config
from raygnn.sampling.exchange import World
from raygnn.worker.comm.process_groups import Ranks
from raygnn.worker.job import Job, TaskTarget
from raygnn.worker.planes.node_plane import NodePlane
from tests.support.graphs import ensure_partition

WANTED = 3.0
BATCH = 1000
LAYERED_DGL = "DGL, minibatches of each layer"


class Opaque(nn.Module):
    """A network that does not show its layers, as a user's own class does not."""

    def __init__(self, network: nn.Module):
        super().__init__()
        self.network = network

    def forward(self, *args: Any) -> Any:
        return self.network(*args)


def peak() -> float:
    """GB that this process has had at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


def other_libraries(partition: Path) -> dict[str, Callable[[], object]]:
    """Return inference of the same network by name, on one graph in memory."""
    from peers.dgl_loader import inference, load
    from peers.model import SAGE
    from torch_geometric.nn import SAGEConv

    graph, feat, *_ = load(partition)
    model = SAGE(feat.shape[1])
    indptr, src, _ = graph.adj_tensors("csc")
    shape = (len(feat), len(feat))
    adjacency = torch.sparse_csr_tensor(indptr, src, torch.ones(len(src)), shape)
    convolutions = [SAGEConv(a, b) for a, b in pairwise(model.widths)]

    def whole() -> torch.Tensor:
        first, second = model.layers
        return second(graph, first(graph, feat).relu())

    def pyg() -> torch.Tensor:
        first, second = convolutions
        return second(first(feat, adjacency).relu(), adjacency)

    return {
        LAYERED_DGL: lambda: inference(model, graph, feat),
        "DGL, whole graph": whole,
        "PyG, whole graph": pyg,
    }


def seconds(function: Callable[[], object]) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--scale", choices=GRAPHS, default=os.environ.get("SCALE", "full"))
    parser.add_argument("--batches", type=int, default=4, help="minibatches that are run")
    parser.add_argument("--rounds", type=int, default=3, help="of each but minibatches, in turn")
    given = parser.parse_args()
    torch.set_num_threads(1)
    WORK.mkdir(parents=True, exist_ok=True)
    print(setting())
    sampling = {"eval_batch_size": BATCH}
    config = load_config(job(given.scale, sampling=sampling))
    partition = ensure_partition(config, 2).directory
    whole = Job(
        config=config,
        partition=partition,
        run_dir=WORK,
        goals={"": TaskTarget("_N")},
        replicated=True,
        started=time.time(),
        global_batch=BATCH,
    )
    plane = NodePlane.open(whole, Ranks.join(config, World(0, 1), torch.device("cpu")))
    model = plane.task().model
    nodes = np.arange(plane.shard.owned("_N"))
    inference = plane.inference  # as evaluation has it
    before = peak()
    exact = inference.outputs(model, "_N", nodes)  # compiles, and maps the files
    memory = peak() - before
    ways: dict[str, Callable[[], object]] = {
        "layer by layer": lambda: inference.outputs(model, "_N", nodes)
    }
    with torch.no_grad():
        ways |= other_libraries(partition)
        times = [{name: seconds(way) for name, way in ways.items()} for _ in range(given.rounds)]
    taken = {name: statistics.median(of[name] for of in times) for name in ways}
    layered = taken["layer by layer"]

    some = np.random.default_rng(0).permutation(nodes)[: BATCH * given.batches]
    begin = time.perf_counter()
    sampled_out = inference.outputs(Opaque(model), "_N", some)
    count = f"minibatches ({given.batches} of {len(nodes) // BATCH:,} run)"
    taken[count] = (time.perf_counter() - begin) / len(some) * len(nodes)
    worst = float((sampled_out - exact[torch.from_numpy(some)]).abs().max())
    rows = [
        [
            name,
            f"{taken[name]:,.1f}",
            f"{len(nodes) / taken[name]:,.0f}",
            f"{taken[name] / layered:.2f}",
        ]
        for name in taken
    ]
    print(table(["", "s for all nodes", "nodes/s", "times as long"], rows))
    print(f"memory of layer-wise inference: {memory:.2f} GB more, of it the mapped graph; {load()}")
    print(f"largest difference of an output: {worst:.1e}")
    if worst > 1e-4:
        print("the outputs differ", file=sys.stderr)
        return 1
    return int(given.scale == "full" and taken[LAYERED_DGL] < WANTED * layered)


if __name__ == "__main__":
    sys.exit(main())
