"""What the cost model says of graphs that no machine here could hold.

    python benchmarks/cost_predict.py

Prints the tables of `docs/scaling.md`: ogbn-papers100M and IGBH-full on 8 and 64 nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from cost_model import Cluster, Prediction, UnitCosts, predict
from cost_reach import Degrees, Graph, Job, NodeType, Relation
from machine import table

# One core of the machine that `bench_scaling.py` last ran on at full scale. It has no bf16 units
# (bf16 took 1 / 0.88 as long as fp32 there); here it is taken to be as fast.
COSTS = UnitCosts(
    sample_ns=43.8,
    number_ns=13.4,
    route_ns=9.52,
    locate_ns=42.2,
    gather_ns=0.232,
    gflops=75.1,
    half=1.0,
    collective_ms=0.449,
    peer_ms=0.0194,
    sent_ns=1.44,
    batch_ms=3.86,
    step_ms=5.54,
    base_gb=0.441,
)

# 32 cores, 256 GB, 25 Gbit/s; with a GPU: what a mid-sized one reaches on products this thin
CPU = Cluster(8, 4, 8, 256.0, COSTS, gbit=25, latency_us=50)
GPU = Cluster(8, 1, 32, 256.0, COSTS, gbit=25, latency_us=50, gpu_gflops=8_000, gpu_half=4)

# Share of edges between parts, by the number of workers: assumed, as nobody published them.
CUTS = {8: 0.25, 32: 0.35, 64: 0.40, 256: 0.50}

PAPERS = Graph(
    types={"paper": NodeType(111_059_956, 128, Degrees.power_law(2.2, 29.1, 250e3), 11)},
    relations=(Relation("paper", "paper", 2 * 1_615_685_872),),
    seeds="paper",
    training=1_207_179,
    cut=0.0,
)
PAPERS_JOB = Job(batch=1000, fanouts=(15, 10, 5), hidden=256, classes=172)

_CITES, _WRITTEN, _TOPIC, _AFFILIATED = 3_996_442_004, 716_761_549, 1_050_280_600, 48_521_486
IGBH = Graph(
    types={
        "paper": NodeType(269_346_174, 1024, Degrees.power_law(2.2, 14.8, 250e3), 11),
        "author": NodeType(277_220_883, 1024, Degrees.power_law(2.5, 2.8, 5e3), 3),
        "fos": NodeType(712_960, 1024, Degrees.power_law(1.8, 1473, 50e6), 3),
        "institute": NodeType(26_918, 1024, Degrees.power_law(1.8, 1803, 1e6), 3),
    },
    relations=(
        Relation("paper", "paper", _CITES),
        *(
            Relation(*ends, edges)
            for a, b, edges in (
                ("paper", "author", _WRITTEN),
                ("paper", "fos", _TOPIC),
                ("author", "institute", _AFFILIATED),
            )
            for ends in ((a, b), (b, a))
        ),
    ),
    seeds="paper",
    training=136_278_514,  # 60 % of the 227,130,858 with one of the 2,983 classes
    cut=0.0,
)
IGBH_JOB = Job(batch=1000, fanouts=(15, 10, 5), hidden=256, classes=2983)


def at(graph: Graph, job: Job, cluster: Cluster, cut: float | None = None) -> Prediction:
    share = CUTS[cluster.world] if cut is None else cut
    return predict(replace(graph, cut=share), job, cluster)


def rows(graph: Graph, job: Job) -> list[list[str]]:
    found = []
    for nodes in (8, 64):
        for name, cluster in (("32 cores", CPU), ("a GPU", GPU)):
            for precision in ("fp32", "bf16", "int8"):
                for replicated in (True, False):
                    chosen = replace(job, precision=precision, replicated=replicated)
                    found.append(_row(f"{nodes} × {name}", graph, chosen, cluster, nodes))
    return found


def _row(where: str, graph: Graph, job: Job, cluster: Cluster, nodes: int) -> list[str]:
    found = at(graph, job, replace(cluster, nodes=nodes))
    memory, step = found.memory, found.step
    return [
        f"{where}, {job.precision}, {'replicated' if job.replicated else 'partitioned'}",
        f"{memory.topology / 1e9:.0f} + {memory.features / 1e9:.0f}",
        f"{memory.private / 1e9:.1f}",
        f"{memory.total / 1e9:.0f}",
        f"{memory.peak / 1e9:.0f}",
        "yes" if found.fits else "no",
        f"{found.sent.data / 1e6:.0f}",
        f"{step.data:.0f}",
        f"{step.model:.0f}",
        f"{step.total:.0f}",
        f"{found.seeds_per_second:,.0f}",
        f"{found.epoch_seconds:,.0f}",
        step.bottleneck,
    ]


HEADER = [
    "nodes, precision, topology",
    "structure + features, GB",
    "a worker's own, GB",
    "node, GB",
    "peak, GB",
    "fits",
    "sent, MB",
    "data, ms",
    "model, ms",
    "step, ms",
    "seeds/s",
    "epoch, s",
    "bound by",
]


def turns(graph: Graph, job: Job, cluster: Cluster) -> list[list[str]]:
    """What happens if one thing is changed."""
    changes: dict[str, Callable[[], Prediction]] = {
        "as above": lambda: at(graph, job, cluster),
        "cache 0": lambda: at(graph, replace(job, cache=0.0), cluster),
        "cache 5 %": lambda: at(graph, replace(job, cache=0.05), cluster),
        "cache 25 %": lambda: at(graph, replace(job, cache=0.25), cluster),
        "cut half as large": lambda: at(graph, job, cluster, CUTS[cluster.world] / 2),
        "random partition": lambda: at(graph, job, cluster, 1 - 1 / cluster.world),
        "int8 features": lambda: at(graph, replace(job, precision="int8"), cluster),
        "int8 features, cache 1 %": lambda: at(
            graph, replace(job, precision="int8", cache=0.01), cluster
        ),
        "100 Gbit/s": lambda: at(graph, job, replace(cluster, gbit=100)),
        "one worker a node, 32 cores": lambda: at(
            graph, job, replace(cluster, workers=1, cores=32)
        ),
        "fanout 10, 10, 5": lambda: at(graph, replace(job, fanouts=(10, 10, 5)), cluster),
        "steeper degrees (2.6)": lambda: at(_steeper(graph, 2.6), job, cluster),
        "flatter degrees (1.9)": lambda: at(_steeper(graph, 1.9), job, cluster),
    }
    found = []
    for name, make in changes.items():
        each = make()
        total = sum(each.reach.inputs.values())
        remote, hits = (sum(x.values()) for x in (each.reach.remote, each.reach.hits))
        found.append(
            [
                name,
                f"{total / 1e3:,.0f}",
                f"{remote / 1e3:,.0f}",
                f"{100 * hits / remote:.0f} %",
                f"{each.sent.data / 1e6:.0f}",
                f"{each.memory.peak / 1e9:.0f}",
                f"{each.step.total:.0f}",
                f"{each.seeds_per_second:,.0f}",
                each.step.bottleneck,
            ]
        )
    return found


TURNS = [
    "changed",
    "inputs, k",
    "remote, k",
    "cached",
    "sent, MB",
    "peak, GB",
    "step, ms",
    "seeds/s",
    "bound by",
]


def _steeper(graph: Graph, power: float) -> Graph:
    means = {
        t: sum(r.edges for r in graph.relations if r.source == t) / kind.nodes
        for t, kind in graph.types.items()
    }
    return replace(
        graph,
        types={
            t: replace(
                kind,
                degrees=Degrees.power_law(power, means[t], max(kind.degrees.weight) * means[t]),
            )
            for t, kind in graph.types.items()
        },
    )


def main() -> None:
    for name, graph, job in (
        ("ogbn-papers100M", PAPERS, PAPERS_JOB),
        ("IGBH-full", IGBH, IGBH_JOB),
    ):
        print(f"\n### {name}\n\n" + table(HEADER, rows(graph, job)))
        half = replace(job, precision="bf16")
        print("\n8 × 32 cores, bf16, replicated:\n\n" + table(TURNS, turns(graph, half, CPU)))


if __name__ == "__main__":
    main()
