"""DGL's own NeighborSampler and DataLoader in one process, the whole graph in its memory.

PYTHONPATH=benchmarks python -m peers.dgl_loader --partition DIR [--steps 20] [--workers 0]
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from peers import BENCHMARKS
from peers.model import BATCH, SAGE, SEED, Result, measure, sampler
from raygnn.graph.dgl import dgl
from raygnn.graph.partition.layout import read_meta
from raygnn.graph.partition.read import read_in_edges, read_node_data

SECONDS = 600.0


def run_dgl_loader(
    partition: Path, steps: int, threads: int = 2, workers: int = 0, seconds: float = SECONDS
) -> Result:
    """Train in a process of its own.

    Args:
        partition: the directory; its parts are put together to the whole graph.
        steps: after the warm-up.
        threads: of the process.
        workers: more processes that sample, with one thread each; 0: the process itself does.
        seconds: for all of it, loading included.

    Raises:
        RuntimeError: it failed or was not done in time; with the end of what it wrote.
    """
    command = [sys.executable, "-m", "peers.dgl_loader", "--partition", str(partition.resolve())]
    command += ["--steps", str(steps), "--threads", str(threads), "--workers", str(workers)]
    done = subprocess.run(
        [*command, "--seconds", str(seconds)],
        cwd=BENCHMARKS,
        env=os.environ | {"OMP_NUM_THREADS": str(threads)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=seconds + 30,  # it ends itself before
    )
    if done.returncode != 0:
        said = done.stdout[-4000:]
        raise RuntimeError(f"DGL's loader ended with {done.returncode}:\n{said}")
    return Result.find(done.stdout)


def load(partition: Path) -> tuple[Any, Tensor, Tensor, Tensor]:
    """Put the parts together.

    Returns:
        The graph in CSC form, features ``[N, F]``, labels int64 ``[N]``, training nodes int64.
    """
    meta = read_meta(partition)
    (ntype,), (etype,) = meta.ntypes, meta.etypes
    indptr, src = [torch.zeros(1, dtype=torch.int64)], []
    columns: dict[str, list[Tensor]] = {"feat": [], "label": [], "train_mask": []}
    for p in range(meta.num_parts):
        edges, data = read_in_edges(meta, p)[etype], read_node_data(meta, p)[ntype]
        indptr.append(torch.from_numpy(edges.indptr)[1:] + indptr[-1][-1])
        src.append(torch.from_numpy(edges.src).long())
        for name, pieces in columns.items():
            pieces.append(data[name])
    edges = ("csc", (torch.cat(indptr), torch.cat(src), torch.empty(0, dtype=torch.int64)))
    graph = dgl().graph(edges, num_nodes=meta.num_nodes(ntype))
    feat, label, mask = (torch.cat(pieces) for pieces in columns.values())
    return graph, feat, label.long(), mask.bool().nonzero().squeeze(1)


def train(partition: Path, steps: int, threads: int, workers: int) -> Result:
    """As in DGL's example, but that the features are fetched where it can be timed."""
    torch.set_num_threads(threads)
    torch.manual_seed(SEED)
    dgl().seed(SEED)
    graph, feat, label, train_nodes = load(partition)
    loader = dgl().dataloading.DataLoader(
        graph,
        train_nodes,
        sampler(),
        batch_size=BATCH,
        shuffle=True,
        drop_last=True,
        num_workers=workers,
    )

    def fetch(inputs: Tensor, seeds: Tensor) -> tuple[Tensor, Tensor]:
        return feat[inputs], label[seeds]

    return measure(loader, fetch, SAGE(feat.shape[1]), steps, lambda: None)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--partition", type=Path, required=True, help="directory of a partition")
    parser.add_argument("--steps", type=int, default=20, help="steps that count")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--workers", type=int, default=0, help="processes that sample")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="limit of the whole run")
    arguments = parser.parse_args()
    faulthandler.dump_traceback_later(arguments.seconds, exit=True)
    result = train(arguments.partition, arguments.steps, arguments.threads, arguments.workers)
    print(result.line(), flush=True)
    faulthandler.cancel_dump_traceback_later()
    return 0


if __name__ == "__main__":
    sys.exit(main())
