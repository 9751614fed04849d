"""The engine and the kernels on one device, without Ray or Lightning.

A generated graph in memory (GraphSAGE, hidden 256, fanout [15, 10], as in `make bench`), and in
one process:

- the kernels on the device against the same on the CPU: equal to 1e-4 in fp32, or exit code 1;
- the kernels' times on the device, forward and backward;
- training steps from the engine's batches, in fp32 and bf16: sampling and features on the CPU, one
  batch ahead, transfer, compute;
- the upper limit: the same model and blocks with everything on the device before the clock
  starts, so that a step gathers features there and computes.

Needs torch, numpy, scipy, numba, pydantic and pyyaml; DGL is not used on a GPU.

    python benchmarks/gpu.py [--device cuda] [--nodes 1200000] [--steps 50]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from machine import load, table
from torch import Tensor

from raygnn.config.graph import PlantedGraph
from raygnn.config.model import read_model
from raygnn.graph.data import DEFAULT_ETYPE, DEFAULT_NTYPE
from raygnn.graph.sources import planted
from raygnn.graph.staging.shard import Rows, Shard
from raygnn.models.kernels.message_passing import NATIVE
from raygnn.models.network import Network, Schema
from raygnn.models.registry import build_model
from raygnn.sampling.batch import Adjacency, Batch
from raygnn.sampling.exchange import Exchange, World
from raygnn.sampling.features import FEATURES, FeatureStore, Inputs
from raygnn.sampling.loader import BatchMaker, Prefetcher
from raygnn.sampling.plan import SeedPlan, resolve_fanouts
from raygnn.sampling.sampler import NeighborSampler
from raygnn.sampling.seeds import NodeSeeds, TaskSeeds

HIDDEN, FANOUT, BATCH, WARMUP, PREFETCH = 256, (15, 10), 1000, 5, 2
TOLERANCE = 1e-4
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Graph:
    shard: Shard
    features: Tensor
    labels: Tensor
    train: np.ndarray
    classes: int


def generate(nodes: int) -> Graph:
    """The planted graph as one rank's shard, whole and in memory."""
    options = PlantedGraph(format="planted", nodes=nodes)
    data = planted.read(options)
    frame, edges = data.nodes[DEFAULT_NTYPE], data.edges[DEFAULT_ETYPE]
    order = np.argsort(edges.dst, kind="stable")
    indptr = np.zeros(nodes + 1, np.int64)
    np.cumsum(np.bincount(edges.dst, minlength=nodes), out=indptr[1:])
    ids = np.arange(nodes, dtype=np.int32)
    shard = Shard(
        rank=0,
        ntypes=[DEFAULT_NTYPE],
        etypes=[DEFAULT_ETYPE],
        bounds={DEFAULT_NTYPE: np.array([0, nodes])},
        topology={DEFAULT_ETYPE: Rows(0, indptr, edges.src[order].astype(np.int32), ids, {})},
        node_data={DEFAULT_NTYPE: {}},
        original={DEFAULT_NTYPE: ids},
        replicated=True,
        staged=cast("Any", None),  # nothing is mapped
        span=(0, 1),
        held=(0, 1),
    )
    return Graph(
        shard,
        torch.from_numpy(frame.data["feat"]),
        torch.from_numpy(frame.data["label"]),
        np.flatnonzero(frame.data["train_mask"]),
        options.classes,
    )


def network(graph: Graph, dtype: torch.dtype) -> Network:
    torch.manual_seed(0)
    width = graph.features.shape[1]
    config = read_model(kind="sage", hidden=HIDDEN, layers=len(FANOUT), dropout=0.0)
    schema = Schema({DEFAULT_NTYPE: width}, [DEFAULT_ETYPE], graph.classes, target=DEFAULT_NTYPE)
    return cast("Network", build_model(config, schema)).to(dtype)


def maker(graph: Graph, dtype: torch.dtype, combine: str | None) -> BatchMaker:
    world = World(0, 1)
    exchange, shard = Exchange(world), graph.shard
    tables = {DEFAULT_NTYPE: {FEATURES: graph.features.to(dtype)}}
    return BatchMaker(
        seeds=TaskSeeds(
            SeedPlan(num_seeds=len(graph.train), global_batch=BATCH, seed=0, accumulate=1),
            NodeSeeds(DEFAULT_NTYPE, graph.train, graph.labels[graph.train]),
            world,
        ),
        sampler=NeighborSampler(shard, exchange),
        store=FeatureStore(shard.bounds, exchange, tables, ring=PREFETCH + 3),
        fanouts=resolve_fanouts(FANOUT, shard.etypes),
        inputs={DEFAULT_NTYPE: Inputs((FEATURES,), (), ())},
        combine=combine,
    )


class Clock:
    """Time on the device: what was started there is waited for."""

    def __init__(self, device: torch.device):
        self._wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None

    def now(self) -> float:
        self._wait()
        return time.perf_counter()

    def best(self, call: Callable[[], object], repeat: int = 20) -> float:
        """The shortest of some calls, ms."""
        call()
        times = []
        for _ in range(repeat):
            start = self.now()
            call()
            times.append(self.now() - start)
        return 1e3 * min(times)


class Trainer:
    """A model and its optimizer on the device."""

    def __init__(self, graph: Graph, dtype: torch.dtype, device: torch.device):
        self.model = network(graph, dtype).to(device)
        self._optimizer = torch.optim.Adam(self.model.parameters())

    def step(self, batch: Batch) -> None:
        out = self.model(batch.blocks, batch.x, batch.degree, batch.combined)
        self.learn(out, batch.y)

    def learn(self, out: Tensor, y: Tensor) -> None:
        self._optimizer.zero_grad()
        F.cross_entropy(out.float(), y).backward()
        self._optimizer.step()


def random_block(num_dst: int, fanout: int, num_src: int) -> Adjacency:
    """With isolated destinations."""
    degree = torch.full((num_dst,), fanout)
    degree[::7] = 0
    indptr = F.pad(degree.cumsum(0), (1, 0))
    return Adjacency(indptr, torch.randint(0, num_src, (int(indptr[-1]),)))


def kernel_calls(adj: Adjacency, num_src: int) -> Iterator[tuple[str, Callable, list[Tensor]]]:
    """``(name, call on (edges, *inputs), inputs)``."""
    edges = len(adj.src)
    x = torch.randn(num_src, HIDDEN)
    for reduce in ("sum", "mean", "max"):
        yield reduce, lambda a, x, r=reduce: NATIVE.aggregate(a, x, r), [x]
    weighted = [x, torch.rand(edges)]
    yield "weighted sum", lambda a, x, w: NATIVE.aggregate(a, x, "sum", w), weighted

    def attention(a: Adjacency, x: Tensor, score: Tensor) -> Tensor:
        return NATIVE.attend(a, x, NATIVE.edge_softmax(a, score, num_src))

    yield "attention, 8 heads", attention, [x.view(num_src, 8, -1), torch.randn(edges, 8)]


def kernels(device: torch.device) -> tuple[list[list[str]], float]:
    """Rows of the table of kernels, and the largest difference between device and CPU in fp32."""
    torch.manual_seed(0)
    num_dst, num_src, clock = 1000, 11_000, Clock(device)
    adj = random_block(num_dst, FANOUT[0], num_src)
    rows, worst = [], 0.0
    for name, call, inputs in kernel_calls(adj, num_src):
        row = [name]
        for dtype in DTYPES.values():

            def outcome(place: torch.device, dtype=dtype, call=call, inputs=inputs):  # type: ignore[no-untyped-def]
                leaves = [i.to(place, dtype).requires_grad_() for i in map(Tensor.detach, inputs)]
                edges = adj.to(place)  # the CPU's as well: what is built from it is built again
                out = call(edges, *leaves)
                grads = torch.autograd.grad(out, leaves, torch.ones_like(out))
                return [t.detach().cpu() for t in (out, *grads)]

            if dtype == torch.float32:
                pairs = zip(outcome(device), outcome(torch.device("cpu")))
                gap = max(float((a - b).abs().max()) for a, b in pairs)
                worst = max(worst, gap)
                row.append(f"{gap:.1e}")
            leaves = [i.to(device, dtype).detach().requires_grad_() for i in inputs]
            start = adj.to(device)
            upstream = torch.ones_like(call(start, *leaves))

            def both(call=call, leaves=leaves, upstream=upstream, start=start) -> None:  # type: ignore[no-untyped-def]
                fresh = Adjacency(start.indptr, start.src)
                torch.autograd.grad(call(fresh, *leaves), leaves, upstream)

            row.append(f"{clock.best(both):.2f}")
        rows.append(row)
    return rows, worst


def model_gap(graph: Graph, device: torch.device) -> float:
    """Largest difference of outputs and gradients of one batch, device and CPU, fp32."""
    batch = maker(graph, torch.float32, None)(0, 0)
    found = []
    for place in (device, torch.device("cpu")):
        model, there = network(graph, torch.float32).to(place), batch.to(place)
        out = model(there.blocks, there.x, there.degree)
        F.cross_entropy(out, there.y).backward()
        found.append(
            [out.detach().cpu(), *(cast("Tensor", p.grad).cpu() for p in model.parameters())]
        )
    return max(float((a - b).abs().max()) for a, b in zip(*found))


def engine(
    graph: Graph, dtype: torch.dtype, device: torch.device, steps: int, *, combine: bool
) -> dict[str, float]:
    """ms per step of training from the engine's batches, in parts."""
    clock, trainer = Clock(device), Trainer(graph, dtype, device)
    make = maker(graph, dtype, trainer.model.first_combine if combine else None)
    per_epoch = make.plan.steps_per_epoch
    parts = dict.fromkeys(("sample", "features", "wait", "transfer", "compute"), 0.0)
    begin = mark = 0.0
    numbers = range(WARMUP + steps)
    batches = Prefetcher(lambda n: make(*divmod(n, per_epoch)), numbers, PREFETCH)
    for number, batch in zip(numbers, batches):
        got = clock.now()
        there = batch.to(device)
        moved = clock.now()
        trainer.step(there)
        now = clock.now()
        if number == WARMUP - 1:
            begin = now
        elif number >= WARMUP:
            spent = {"wait": got - mark, "transfer": moved - got, "compute": now - moved}
            for name, seconds in (spent | batch.seconds).items():
                parts[name] += seconds
        mark = now
    return {n: 1e3 * s / steps for n, s in parts.items()} | {"step": 1e3 * (mark - begin) / steps}


def limit(graph: Graph, dtype: torch.dtype, device: torch.device, steps: int) -> dict[str, float]:
    """ms per step with features and blocks on the device from the start."""
    clock, trainer = Clock(device), Trainer(graph, dtype, device)
    make = maker(graph, dtype, None)
    features = graph.features.to(device, dtype)
    per_epoch = make.plan.steps_per_epoch
    ready = []
    for number in range(WARMUP + min(steps, 20)):  # as many as fit beside the features
        epoch, step = divmod(number, per_epoch)
        start = make.seeds(epoch, step)
        blocks, nodes = make.sampler.sample(start.nodes, make.fanouts, epoch=epoch, step=step)
        ids = torch.from_numpy(nodes[DEFAULT_NTYPE]).to(device)
        ready.append(([block.to(device) for block in blocks], ids, start.fields["y"].to(device)))
    parts = {"features": 0.0, "compute": 0.0}
    begin = mark = 0.0
    for number in range(WARMUP + steps):
        blocks, ids, y = ready[number % len(ready)]
        at = clock.now()
        x = {DEFAULT_NTYPE: features.index_select(0, ids)}
        gathered = clock.now()
        trainer.learn(trainer.model(blocks, x, {}), y)
        mark = clock.now()
        if number == WARMUP - 1:
            begin = mark
        elif number >= WARMUP:
            parts["features"] += gathered - at
            parts["compute"] += mark - gathered
    return {n: 1e3 * s / steps for n, s in parts.items()} | {"step": 1e3 * (mark - begin) / steps}


def setting(device: torch.device) -> str:
    """Device, threads, versions."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    packages = ("torch", "numpy", "numba")
    try:
        found = {name: version(name) for name in (*packages, "dgl")}
    except PackageNotFoundError:  # not needed here
        found = {name: version(name) for name in packages}
    versions = ", ".join(f"{package} {number}" for package, number in found.items())
    return f"- device: {name}; {torch.get_num_threads()} threads; {load()}\n- versions: {versions}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda", help="cuda or cpu (cuda)")
    parser.add_argument("--nodes", type=int, default=1_200_000, metavar="N", help="(1,200,000)")
    parser.add_argument("--steps", type=int, default=50, metavar="N", help="timed steps (50)")
    options = parser.parse_args()
    device = torch.device(options.device)
    print(setting(device), flush=True)

    rows, gap = kernels(device)
    header = ["forward + backward", "fp32, from CPU", "fp32, ms", "bf16, ms"]
    print(f"\nkernels, 1,000 × {FANOUT[0]} edges, {HIDDEN} wide\n")
    print(table(header, rows), flush=True)

    graph = generate(options.nodes)
    edges = graph.shard.topology[DEFAULT_ETYPE].num_edges
    print(f"\n{options.nodes:,} nodes, {edges:,} edges, {graph.features.shape[1]} features\n")
    gap = max(gap, model_gap(graph, device))
    parts = ("sample", "features", "wait", "transfer", "compute", "step")
    rows = []
    for precision, dtype in DTYPES.items():
        best = limit(graph, dtype, device, options.steps)
        ways = {
            "all on the device": best,
            "engine": engine(graph, dtype, device, options.steps, combine=True),
            "engine, rows not combined": engine(graph, dtype, device, options.steps, combine=False),
        }
        for way, ms in ways.items():
            row = [f"{way}, {precision}", *(f"{ms[p]:.1f}" if p in ms else "" for p in parts)]
            row += [f"{1e3 * BATCH / ms['step']:,.0f}", f"{best['step'] / ms['step']:.2f}"]
            rows.append(row)
    header = [
        f"batches of {BATCH:,}",
        *(f"{part}, ms" for part in parts),
        "seeds/s",
        "of the limit",
    ]
    print(table(header, rows))
    print(f"\nlargest difference from the CPU, fp32: {gap:.1e} (limit {TOLERANCE:g})")
    return 0 if gap <= TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
