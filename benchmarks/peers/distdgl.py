"""DistDGL as its authors run it: a server and a trainer on each host, one thread each.

Follows DGL's ``examples/distributed/graphsage`` and, for the environment, its ``tools/launch.py``.
Left out is ``model.join()``, which costs the example a reduction per step: here every trainer has
the same number of batches. With ``--epochs`` it is a whole job, evaluated after each epoch as the
example does: all nodes exactly, layer by layer, through DGL's distributed tensors.

    PYTHONPATH=benchmarks python -m peers.distdgl --partition DIR [--steps 20] [--rate 1gbit]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from peers import BENCHMARKS
from peers.model import BATCH, SAGE, SEED, Job, Report, Result, measure, sampler, train_whole
from raygnn.graph.dgl import dgl
from raygnn.graph.partition.layout import read_meta
from tests.support.hosts import Host, hosts, missing

SECONDS = 600.0
EVALUATED = 100_000  # nodes in a batch of the evaluation, by the example's default
_IP_CONFIG = "/tmp/ip_config.txt"  # each host has its own /tmp
_STORE_PORT = 29500
_LAST = 20.0  # seconds for all to end when the first has


def run_distdgl(
    partition: Path, group: Sequence[Host], steps: int, seconds: float = SECONDS, epochs: int = 0
) -> Result | Job:
    """Train on a partition that has one part for each host.

    Args:
        partition: the directory; what lies below /tmp must be shared with the hosts.
        steps: of each trainer, after the warm-up.
        seconds: for all of it, loading included.
        epochs: of a whole job instead, whose `Job` is returned, as the first trainer has it.

    Raises:
        RuntimeError: a server or trainer failed or ended early, or there was not enough time;
            with the end of what it wrote. None of them is left running.
    """
    meta = read_meta(partition)
    if meta.num_parts != len(group):
        raise RuntimeError(f"{meta.num_parts} parts for {len(group)} hosts: {partition}")
    addresses = "\n".join(host.address for host in group)
    for host in group:
        write = ["sh", "-c", f'echo "$1" > {_IP_CONFIG}', "sh", addresses]
        host.run(write, timeout=30)
    what = ["--partition", str(meta.config_file), "--graph", meta.graph_name]
    what += ["--steps", str(steps), "--epochs", str(epochs)]
    with tempfile.TemporaryDirectory() as directory:
        running: dict[str, _Running] = {}
        try:
            for role in ("server", "trainer"):
                for rank, host in enumerate(group):
                    running[f"{role} {rank}"] = _Running(
                        host,
                        [sys.executable, "-m", "peers.distdgl", "--role", role, *what],
                        _environment(role, rank, host, group, meta.config_file),
                        Path(directory, f"{role}{rank}"),
                    )
            _watch(running, seconds)
            trainers = [each for name, each in running.items() if name.startswith("trainer")]
            if epochs:
                return Job.find(trainers[0].text())
            return Result.together([Result.find(each.text()) for each in trainers])
        finally:
            for each in running.values():
                each.close()


class _Running:
    """A program in a host, and what it writes."""

    def __init__(self, host: Host, argv: list[str], environment: dict[str, str], path: Path):
        self._path = path
        with path.open("wb") as output:
            self.process = host.popen(
                argv, env=environment, cwd=BENCHMARKS, stdout=output, stderr=subprocess.STDOUT
            )

    def text(self) -> str:
        return self._path.read_text(errors="replace")

    def close(self) -> None:
        self.process.kill()
        self.process.wait(30)


def _environment(
    role: str, rank: int, host: Host, group: Sequence[Host], part_config: Path
) -> dict[str, str]:
    """What launch.py and torchrun set for one process."""
    common = {
        "DGL_ROLE": "server" if role == "server" else "client",
        "DGL_NUM_SAMPLER": "0",
        "DGL_NUM_CLIENT": str(len(group)),
        "DGL_CONF_PATH": str(part_config),
        "DGL_IP_CONFIG": _IP_CONFIG,
        "DGL_NUM_SERVER": "1",
        "DGL_GRAPH_FORMAT": "csc",
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",  # for what a killed one said
    }
    only = {
        "server": {"DGL_SERVER_ID": str(rank)},
        "trainer": {
            "DGL_DIST_MODE": "distributed",
            "DGL_GROUP_ID": "0",
            "MASTER_ADDR": group[0].address,
            "MASTER_PORT": str(_STORE_PORT),
            "RANK": str(rank),
            "LOCAL_RANK": "0",
            "WORLD_SIZE": str(len(group)),
            "GLOO_SOCKET_IFNAME": host.interface,
        },
    }
    return os.environ | common | only[role]


def _watch(running: dict[str, _Running], seconds: float) -> None:
    """Until all are done. A trainer whose server died would wait and spin for ever."""
    end = time.monotonic() + seconds
    while True:
        codes = {name: each.process.poll() for name, each in running.items()}
        if None not in codes.values() or any(codes.values()):
            break
        if 0 in codes.values():  # once the first is done, the others are about to be
            end = min(end, time.monotonic() + _LAST)
        if time.monotonic() > end:
            break
        time.sleep(0.1)
    for name, code in codes.items():
        if code:
            said = running[name].text()[-4000:]
            raise RuntimeError(f"DistDGL's {name} ended with {code}:\n{said}")
    if any(codes[name] is None for name in codes if name.startswith("trainer")):
        said = "\n".join(f"{name}: …{each.text()[-1000:]}" for name, each in running.items())
        raise RuntimeError(f"DistDGL was not done in time:\n{said}")


def serve() -> None:
    """Serve this host's part; ends when the trainers are done."""
    module = dgl()
    module.seed(SEED)
    module.distributed.initialize(_IP_CONFIG)


def train(graph_name: str, part_config: str, steps: int, epochs: int) -> Report:
    """One trainer, as in DGL's example."""
    import torch
    import torch.distributed as dist

    module = dgl()
    module.distributed.initialize(_IP_CONFIG)
    dist.init_process_group("gloo", timeout=timedelta(minutes=2))
    torch.manual_seed(SEED)
    module.seed(SEED + dist.get_rank())
    graph = module.distributed.DistGraph(graph_name, part_config=part_config)
    train_nodes = module.distributed.node_split(
        graph.ndata["train_mask"], graph.get_partition_book(), force_even=True
    )
    loader = module.dataloading.DistNodeDataLoader(
        graph, train_nodes, sampler(), batch_size=BATCH, shuffle=True, drop_last=True
    )
    model = torch.nn.parallel.DistributedDataParallel(SAGE(graph.ndata["feat"].shape[1]))
    torch.manual_seed(SEED + dist.get_rank())

    def fetch(inputs: torch.Tensor, seeds: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return graph.ndata["feat"][inputs], graph.ndata["label"][seeds].long()

    everyone = module.distributed.node_split(
        torch.ones(graph.num_nodes(), dtype=torch.bool), graph.get_partition_book(), force_even=True
    )

    def evaluate(last: bool) -> float:
        h = graph.ndata["feat"]
        net = model.module
        whole = module.dataloading.NeighborSampler([-1])
        for number, layer in enumerate(net.layers):
            shape = (graph.num_nodes(), net.widths[number + 1])
            out = module.distributed.DistTensor(shape, torch.float32, f"layer{number}")
            for input_nodes, rows, (block,) in module.dataloading.DistNodeDataLoader(
                graph, everyone, whole, batch_size=EVALUATED, shuffle=False, drop_last=False
            ):
                y = layer(block, h[input_nodes])
                out[rows] = y.relu() if number == 0 else y
            h = out
            dist.barrier()
        asked = graph.ndata["test_mask" if last else "val_mask"]
        rows = module.distributed.node_split(asked, graph.get_partition_book(), force_even=True)
        correct = (h[rows].argmax(1) == graph.ndata["label"][rows]).sum()
        counts = torch.stack([correct, torch.tensor(len(rows))])
        dist.all_reduce(counts)
        return float(counts[0] / counts[1])

    result: Report
    if epochs:
        result = train_whole(loader, fetch, model, epochs, evaluate)
    else:
        result = measure(loader, fetch, model, steps, dist.barrier)
    dist.barrier()
    dist.destroy_process_group()
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--partition", type=Path, required=True, help="directory of a partition")
    parser.add_argument("--steps", type=int, default=20, help="steps that count")
    parser.add_argument("--epochs", type=int, default=0, help="of a whole job, instead of steps")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="limit of the whole run")
    parser.add_argument("--rate", help="of the hosts' links, such as 1gbit; unlimited if not given")
    parser.add_argument("--role", choices=["server", "trainer"], help=argparse.SUPPRESS)
    parser.add_argument("--graph", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.role == "server":
        serve()
    elif arguments.role == "trainer":
        counts = (arguments.steps, arguments.epochs)
        print(train(arguments.graph, str(arguments.partition), *counts).line(), flush=True)
    elif reason := missing():
        sys.exit(reason)
    else:
        partition = arguments.partition.resolve()
        parts = read_meta(partition).num_parts
        with hosts(parts, rate=arguments.rate, share=[partition]) as group:
            counts = (arguments.steps, arguments.seconds, arguments.epochs)
            print(run_distdgl(partition, group, *counts).line())
    return 0


if __name__ == "__main__":
    sys.exit(main())
