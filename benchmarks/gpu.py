"""What a GPU does with the engine, without Ray, DGL or a network: one JSON, in under 9 minutes.

A generated graph in memory (GraphSAGE, hidden 256, fanout [15, 10], as in `make bench`):

- kernels on the device against the same on the CPU: message passing equal to 1e-4 in fp32; draws,
  numbers and rows equal to the bit, also of batches that are made while the device is busy; or exit
  code 1;
- training steps from the engine's batches, in fp32 and bf16: neighbours drawn on the CPU or the
  device, rows in the device's memory, page-locked in the host's, or gathered by the CPU;
- the time line of some steps: which share of it the device was idle;
- the upper limit: the same model with rows and blocks on the device before the clock starts; and
  PyG's SAGEConv on the same blocks.

What fails is in the JSON with its error, and the rest goes on; parts that would begin after
``--limit`` seconds are left out, and named, and none goes on for more than 105 s beyond it: a part
that waits for the GPU as long as that ends the process, with the JSON of those before it. With
``--device cpu`` Triton's interpreter runs the device's kernels, to show that all of this runs;
take a small ``--nodes``. Trainings on a GPU are those of the tests: `make gpu`.

    python benchmarks/gpu.py [--device cuda] [--nodes 1200000] [--batch 1000] [--out gpu.json]
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for deterministic algorithms
os.environ["TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"] = "0"  # some images shorten fp32 products
if "cpu" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # before torch loads it

import numpy as np
import torch
import torch.nn.functional as F
from machine import load, table
from torch import Tensor

from raygnn.config.graph import PlantedGraph
from raygnn.config.model import read_model
from raygnn.graph.data import DEFAULT_ETYPE, DEFAULT_NTYPE
from raygnn.graph.sources import planted
from raygnn.graph.staging.shard import InEdgeLists, Shard
from raygnn.models.message_passing import NATIVE
from raygnn.models.network import Network, Schema
from raygnn.models.registry import build_model
from raygnn.sampling.batch import Adjacency, Batch, Block
from raygnn.sampling.cache import choose, inclusion
from raygnn.sampling.exchange import Exchange, World
from raygnn.sampling.features import FEATURES, FeatureStore, Inputs
from raygnn.sampling.loader import BatchMaker, Prefetcher, SideStream
from raygnn.sampling.plan import SeedPlan, resolve_fanouts
from raygnn.sampling.sampler import NeighborSampler
from raygnn.sampling.seeds import NodeSeeds, TaskSeeds

GRACE = 90  # seconds in which what began before the limit must be through
HIDDEN, FANOUT, BATCH, PREFETCH = 256, (15, 10), 1000, 2
TOLERANCE = 1e-4  # of sums in fp32
# Steps before the timed ones, batches made while the device is busy, and timed calls of a kernel.
# Triton's interpreter is slow, and its times mean nothing.
WARMUP, BESIDE, CALLS = (1, 3, 1) if "cpu" in sys.argv else (5, 30, 20)
JUDGED = ("kernels", "model_gap", "differs")
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
        topology={
            DEFAULT_ETYPE: InEdgeLists(0, indptr, edges.src[order].astype(np.int32), ids, {})
        },
        node_data={DEFAULT_NTYPE: {}},
        original={DEFAULT_NTYPE: ids},
        replicated=True,
        staged=cast("Any", None),  # nothing is mapped
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


PLACES = (("cpu", "cpu"), ("cpu", "gpu"), ("gpu", "cpu"), ("gpu", "pinned"), ("gpu", "gpu"))
NEAR = 0.2  # of the rows in the device's memory, where the others are page-locked


def maker(
    graph: Graph,
    dtype: torch.dtype,
    combine: str | None,
    device: torch.device | None = None,
    places: tuple[str, str] = ("cpu", "cpu"),
) -> BatchMaker:
    """``places``: where neighbours are drawn, and where rows are read."""
    world = World(0, 1)
    exchange, shard = Exchange(world), graph.shard
    tables = {DEFAULT_NTYPE: {FEATURES: graph.features.to(dtype)}}
    fanouts = resolve_fanouts(FANOUT, shard.etypes)
    sampler: Any = NeighborSampler(shard, exchange)
    store: Any = FeatureStore(shard.bounds, exchange, tables, ring=PREFETCH + 3)
    if device is not None and places[0] == "gpu":
        from raygnn.sampling.device.device_sampler import DeviceSampler

        sampler = DeviceSampler(shard, device)
    if device is not None and places[1] != "cpu":
        from raygnn.sampling.device.device_features import DeviceFeatures

        near = None
        if places[1] == "pinned":
            seeds = {DEFAULT_NTYPE: graph.train}
            scores = inclusion(shard, seeds, BATCH, fanouts, replace=False)
            near = choose(scores, shard.bounds, (), NEAR)
        store = DeviceFeatures(store, device, near)
    return BatchMaker(
        seeds=TaskSeeds(
            SeedPlan(num_seeds=len(graph.train), global_batch=BATCH, seed=0, accumulate=1),
            NodeSeeds(DEFAULT_NTYPE, graph.train, graph.labels[graph.train]),
            world,
        ),
        sampler=sampler,
        store=store,
        fanouts=fanouts,
        inputs={DEFAULT_NTYPE: Inputs((FEATURES,), (), ())},
        combine=combine,
    )


def equality(graph: Graph, device: torch.device) -> dict[str, str | None]:
    """What of draws and rows differs between device and CPU, to the bit; None: nothing."""
    from raygnn.sampling.device.device_sampler import DeviceSampler, difference

    found: dict[str, str | None] = {}
    shard, seeds = graph.shard, {DEFAULT_NTYPE: graph.train[:BATCH]}
    for fanout, replace, pinned in (
        (FANOUT, False, False),
        (FANOUT, True, False),
        (FANOUT, False, True),
        ((5, -1), False, False),
    ):
        hops = resolve_fanouts(fanout, shard.etypes)
        ways: list[Any] = [
            NeighborSampler(shard, Exchange(World(0, 1)), seed=3, replace=replace),
            DeviceSampler(shard, device, seed=3, replace=replace, pinned=pinned),
        ]
        (one, ids), (other, nodes) = (w.sample(seeds, hops, epoch=1, step=2) for w in ways)
        same = np.array_equal(ids[DEFAULT_NTYPE], nodes[DEFAULT_NTYPE].cpu().numpy())
        name = f"draws {list(fanout)}{', replace' * replace}{', pinned' * pinned}"
        found[name] = difference(one, other) or (None if same else "the input nodes")
    for places in PLACES[1:]:
        for name, dtype in DTYPES.items():
            x, y = (
                maker(graph, dtype, None, device, way)(0, 0).x[DEFAULT_NTYPE].cpu()
                for way in (PLACES[0], places)
            )
            where = f"rows on {places[1]}, drawn on {places[0]}, {name}"
            found[where] = None if torch.equal(x, y) else "rows"
    for places in PLACES[2:]:
        found[f"made beside training, {places[1]}"] = beside(graph, device, places)
    return found


def beside(graph: Graph, device: torch.device, places: tuple[str, str]) -> str | None:
    """What of batches differs that are made and handed over while the device is busy."""
    make, busy = maker(graph, torch.float32, None, device, places), torch.rand(2048, 2048)
    busy, came = busy.to(device), []
    for batch in prepared(make, device, BESIDE):
        came.append({name: rows.clone() for name, rows in batch.x.items()})
        for _ in range(5 if device.type == "cuda" else 0):
            busy = (busy @ busy).softmax(1)
    plain = maker(graph, torch.float32, None)
    for number, rows in enumerate(came):
        expected = plain(*divmod(number, plain.plan.steps_per_epoch)).x
        if not all(torch.equal(rows[name].cpu(), expected[name]) for name in expected):
            return f"the rows of batch {number}"
    return None


def prepared(make: BatchMaker, device: torch.device, count: int) -> Iterator[Batch]:
    """Batches from a side stream, two of them ahead, as training takes them."""
    cuda, per_epoch = device.type == "cuda", make.plan.steps_per_epoch
    side = SideStream(device, torch.cuda if cuda else torch.cpu)

    def local(number: int) -> Batch:
        batch = make(*divmod(number, per_epoch))
        return batch.pinned(device) if cuda else batch

    def made(number: int) -> Any:
        return side.make(lambda: local(number))

    for batch, ready in Prefetcher(made, range(count), PREFETCH):
        side.hand_over(batch, ready)
        yield batch


class Clock:
    """Time on the device: what was started there is waited for."""

    def __init__(self, device: torch.device):
        self._wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None

    def now(self) -> float:
        self._wait()
        return time.perf_counter()

    def best(self, call: Callable[[], object]) -> float:
        """The shortest of some calls, ms."""
        call()
        times = []
        for _ in range(CALLS):
            start = self.now()
            call()
            times.append(self.now() - start)
        return 1e3 * min(times)


class Trainer:
    """A model and its optimizer on the device."""

    def __init__(self, graph: Graph, dtype: torch.dtype, device: torch.device, model: Any = None):
        self.model = (model or network(graph, dtype)).to(device, dtype)
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


def moved(adj: Adjacency, device: torch.device) -> Adjacency:
    return Adjacency(adj.indptr.to(device), adj.src.to(device))


def kernel_calls(adj: Adjacency, num_src: int) -> Iterator[tuple[str, Callable, list[Tensor]]]:
    """``(name, call on (edges, *inputs), inputs)``."""
    edges = len(adj.src)
    x = torch.randn(num_src, HIDDEN)
    for reduce in ("sum", "mean", "max"):
        yield reduce, lambda a, x, r=reduce: NATIVE.aggregate(a, x, r), [x]
    weighted = [x, torch.rand(edges)]
    yield "weighted sum", lambda a, x, w: NATIVE.aggregate(a, x, "sum", w), weighted

    def attention(a: Adjacency, x: Tensor, score: Tensor) -> Tensor:
        return NATIVE.attend(a, x, NATIVE.edge_softmax(a, score))

    yield "attention, 8 heads", attention, [x.view(num_src, 8, -1), torch.randn(edges, 8)]


def largest(one: Tensor, other: Tensor) -> float:
    """The largest difference; infinite where a number is none."""
    return float((one - other).abs().nan_to_num(nan=float("inf")).max())


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
                edges = moved(adj, place)  # the CPU's as well: what is built from it is built again
                out = call(edges, *leaves)
                grads = torch.autograd.grad(out, leaves, torch.ones_like(out))
                return [t.detach().cpu() for t in (out, *grads)]

            if dtype == torch.float32:
                pairs = zip(outcome(device), outcome(torch.device("cpu")))
                gap = max(largest(a, b) for a, b in pairs)
                worst = max(worst, gap)
                row.append(f"{gap:.1e}")
            leaves = [i.to(device, dtype).detach().requires_grad_() for i in inputs]
            start = moved(adj, device)
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
    return max(largest(a, b) for a, b in zip(*found))


def engine(
    graph: Graph,
    dtype: torch.dtype,
    device: torch.device,
    steps: int,
    places: tuple[str, str] = ("cpu", "cpu"),
    *,
    combine: bool = False,
    record: bool = False,
) -> dict[str, Any]:
    """ms per step of training from the engine's batches, two prepared ahead, without a wait but at
    both ends; ``sample`` and ``features`` are the preparing thread's own time. With ``record`` the
    share of the time in which the device was idle."""
    clock, trainer = Clock(device), Trainer(graph, dtype, device)
    cuda = device.type == "cuda"
    how = trainer.model.first_combine if combine else None
    make = maker(graph, dtype, how, device, places)
    parts, begin = dict.fromkeys(("sample", "features"), 0.0), 0.0
    kinds = [torch.profiler.ProfilerActivity.CPU, *([torch.profiler.ProfilerActivity.CUDA] * cuda)]
    profile = torch.profiler.profile(activities=kinds)
    for number, batch in enumerate(prepared(make, device, WARMUP + steps)):
        if number == WARMUP:
            if record:
                profile.__enter__()  # takes seconds
            begin = clock.now()
        trainer.step(batch)
        if number >= WARMUP:
            parts = {name: spent + batch.seconds[name] for name, spent in parts.items()}
    total = clock.now() - begin
    found: dict[str, Any] = {n: 1e3 * spent / steps for n, spent in parts.items()}
    found["step"] = 1e3 * total / steps
    if record:
        profile.__exit__(None, None, None)
        launches = sum("LaunchKernel" in event.name for event in profile.events())
        found |= idle(profile, device) | {"launches per step, and of its batch": launches / steps}
    return found


def idle(profile: Any, device: torch.device) -> dict[str, Any]:
    """Of the time from the first to the last that the device did, the share in which it did
    nothing; and what took it longest, ms. Annotations, such as an optimizer's step, are not of
    what it did: they last from their first kernel to their last."""
    kind = torch.autograd.DeviceType.CUDA if device.type == "cuda" else None
    spans = sorted(
        (e.time_range.start, e.time_range.end)
        for e in profile.events()
        if kind is None or (e.device_type == kind and not e.is_user_annotation)
    )
    busy, until = 0.0, spans[0][0]
    for start, end in spans:
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    by = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
    averages = (event for event in profile.key_averages() if not event.is_user_annotation)
    top = sorted(averages, key=lambda event: -getattr(event, by))[:12]
    share = 1 - busy / max(1e-9, until - spans[0][0])
    return {"idle": share, "top": {event.key: getattr(event, by) / 1e3 for event in top}}


def limit(
    graph: Graph, dtype: torch.dtype, device: torch.device, steps: int, model: Any = None
) -> dict[str, float]:
    """ms per step with features and blocks on the device from the start."""
    clock, trainer = Clock(device), Trainer(graph, dtype, device, model)
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
    begin = 0.0
    for number in range(WARMUP + steps):
        if number == WARMUP:
            begin = clock.now()
        blocks, ids, y = ready[number % len(ready)]
        x = {DEFAULT_NTYPE: features.index_select(0, ids)}
        trainer.learn(trainer.model(blocks, x, {}), y)
    return {"step": 1e3 * (clock.now() - begin) / steps}


class PygSage(torch.nn.Module):
    """PyG's layers on the same blocks."""

    def __init__(self, graph: Graph):
        from torch_geometric.nn import SAGEConv

        super().__init__()
        widths = [graph.features.shape[1], *[HIDDEN] * (len(FANOUT) - 1), graph.classes]
        self._layers = torch.nn.ModuleList(map(SAGEConv, widths, widths[1:]))

    def forward(self, blocks: list[Block], x: dict[str, Tensor], _: object) -> Tensor:
        rows = x[DEFAULT_NTYPE]
        for layer, block in zip(self._layers, blocks):
            adj = block.adj[DEFAULT_ETYPE]
            given = rows, rows[: adj.num_dst]
            rows = layer(given, torch.stack([adj.src, adj.dst]), size=tuple(map(len, given)))
            rows = rows if layer is self._layers[-1] else rows.relu()
        return rows


def setting(device: torch.device) -> str:
    """Device, threads, versions."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    found = {"CUDA": str(torch.version.cuda)}
    for package in ("torch", "triton", "lightning", "numpy", "numba", "torch_geometric", "dgl"):
        with suppress(PackageNotFoundError):  # not all are needed
            found[package] = version(package)
    versions = ", ".join(f"{package} {number}" for package, number in found.items())
    return f"- device: {name}; {torch.get_num_threads()} threads; {load()}\n- versions: {versions}"


def throughput(graph: Graph, device: torch.device, steps: int) -> list[dict[str, Any]]:
    """A row for each precision and place."""
    rows = []
    for precision, dtype in DTYPES.items():
        best = limit(graph, dtype, device, steps)
        ways = {"all on the device from the start": best}
        if find_spec("torch_geometric"):
            ways["the same by PyG's layers"] = limit(graph, dtype, device, steps, PygSage(graph))
        ways["cpu, cpu, combined"] = engine(graph, dtype, device, steps, combine=True)
        for places in PLACES:
            ways[", ".join(places)] = engine(graph, dtype, device, steps, places)
        for way, ms in ways.items():
            speed = {"seeds_per_second": 1e3 * BATCH / ms["step"]}
            of_limit = {"of_the_limit": best["step"] / ms["step"]}
            rows.append({"precision": precision, "drawn, read": way, **ms, **speed, **of_limit})
    return rows


def device_of(name: str) -> torch.device:
    """With its number: a process can not make "cuda" its own, only "cuda:0"."""
    device = torch.device(name)
    return torch.device("cuda", 0) if device == torch.device("cuda") else device


class Alarm:
    """Raises in the main thread when a part takes too long, and ends the process a little later
    where that is in torch and waits for the GPU."""

    def __init__(self, seconds: float):
        self._seconds = max(1, int(seconds))

    def __enter__(self) -> None:
        signal.signal(signal.SIGALRM, self._ring)
        signal.alarm(self._seconds)
        faulthandler.dump_traceback_later(self._seconds + 15, exit=True)

    def __exit__(self, *_: object) -> None:
        signal.alarm(0)
        faulthandler.cancel_dump_traceback_later()

    def _ring(self, *_: object) -> None:
        raise TimeoutError(f"not through after {self._seconds} s")


def main() -> int:
    global BATCH
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda", help="cuda or cpu (cuda)")
    parser.add_argument("--nodes", type=int, default=1_200_000, metavar="N", help="(1,200,000)")
    parser.add_argument("--steps", type=int, default=50, metavar="N", help="timed steps (50)")
    parser.add_argument("--out", type=Path, default=Path("gpu.json"), help="the JSON (gpu.json)")
    parser.add_argument("--limit", type=float, default=420, metavar="S", help="(420)")
    parser.add_argument("--skip", nargs="*", default=[], metavar="PART", help="such as kernels")
    parser.add_argument("--batch", type=int, default=BATCH, metavar="N", help=f"seeds ({BATCH:,})")
    options = parser.parse_args()
    BATCH = options.batch
    device, steps = device_of(options.device), options.steps
    begin, found = time.perf_counter(), {"setting": setting(device), "seconds": {}, "failed": {}}
    found["left_out"] = []
    print(found["setting"], flush=True)

    def part(name: str, make: Callable[[], Any]) -> Any:
        """Into the JSON, which is whole after each part."""
        start = time.perf_counter()
        if name in options.skip or start - begin > options.limit:
            found["left_out"].append(name)
            return None
        try:
            with Alarm(options.limit + GRACE - (start - begin)):
                found[name] = make()
        except Exception as error:
            traceback.print_exc()
            found["failed"][name] = repr(error)
        found["seconds"][name] = time.perf_counter() - start
        options.out.write_text(json.dumps(found, indent=1))
        print(f"\n{name}\n{json.dumps(found.get(name), indent=1)}", flush=True)
        return found.get(name)

    _, gap = part("kernels", lambda: kernels(device)) or ([], 0.0)
    graph = generate(options.nodes)
    found["edges"] = graph.shard.topology[DEFAULT_ETYPE].num_edges
    model = part("model_gap", lambda: model_gap(graph, device)) or 0.0
    different = part("differs", lambda: equality(graph, device)) or {}
    part("throughput", lambda: throughput(graph, device, steps))
    part(
        "time_line",
        lambda: engine(graph, torch.bfloat16, device, min(steps, 20), ("gpu", "gpu"), record=True),
    )
    if "throughput" in found:
        header = ["precision", "drawn, read", "sample", "features", "step", "of_the_limit"]
        shown = [[str(row.get(h, ""))[:28] for h in header] for row in found["throughput"]]
        print(table(header, shown))
    wrong = [name for name in JUDGED if name in found["failed"]]
    wrong += [name for name, one in (("kernels", gap), ("model_gap", model)) if one > TOLERANCE]
    wrong += [name for name, what in different.items() if what is not None]
    said = f"wrong: {', '.join(wrong)}" if wrong else "nothing differs from the CPU"
    left_out = [name for name in JUDGED if name in found["left_out"]]
    print(f"\n{time.perf_counter() - begin:.0f} s; {said}; left out: {', '.join(left_out) or '-'}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
