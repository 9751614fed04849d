"""DGL's own NeighborSampler and DataLoader in one process, the whole graph in its memory.

With ``--epochs`` it is a whole job, evaluated as in DGL's ``examples/pytorch/graphsage``:
the validation nodes by sampled neighbourhoods after each epoch, at the end the test nodes exactly,
layer by layer over all nodes.

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
from peers.model import BATCH, SAGE, SEED, Job, Report, Result, measure, sampler, train_whole
from raygnn.graph.dgl import dgl
from raygnn.graph.partition.layout import read_meta
from raygnn.graph.partition.read import read_in_edges, read_node_data

SECONDS = 600.0
EVALUATED = 4096  # nodes in a batch of the evaluation, as in the example
MASKS = ("train_mask", "val_mask", "test_mask")


def run_dgl_loader(
    partition: Path,
    steps: int,
    threads: int = 2,
    workers: int = 0,
    seconds: float = SECONDS,
    epochs: int = 0,
) -> Result | Job:
    """Train in a process of its own.

    Args:
        partition: the directory; its parts are put together to the whole graph.
        steps: after the warm-up.
        threads: of the process.
        workers: more processes that sample, with one thread each; 0: the process itself does.
        seconds: for all of it, loading included.
        epochs: of a whole job instead, whose `Job` is returned.

    Raises:
        RuntimeError: it failed or was not done in time; with the end of what it wrote.
    """
    command = [sys.executable, "-m", "peers.dgl_loader", "--partition", str(partition.resolve())]
    command += ["--steps", str(steps), "--threads", str(threads), "--workers", str(workers)]
    done = subprocess.run(
        [*command, "--seconds", str(seconds), "--epochs", str(epochs)],
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
    return (Job if epochs else Result).find(done.stdout)


def load(partition: Path) -> tuple[Any, Tensor, Tensor, dict[str, Tensor]]:
    """Put the parts together.

    Returns:
        The graph in CSC form, features ``[N, F]``, labels int64 ``[N]``, and the nodes of
        ``train_mask`` and so on, int64.
    """
    meta = read_meta(partition)
    (ntype,), (etype,) = meta.ntypes, meta.etypes
    indptr, src = [torch.zeros(1, dtype=torch.int64)], []
    columns: dict[str, list[Tensor]] = {name: [] for name in ("feat", "label", *MASKS)}
    for p in range(meta.num_parts):
        edges, data = read_in_edges(meta, p)[etype], read_node_data(meta, p)[ntype]
        indptr.append(torch.from_numpy(edges.indptr)[1:] + indptr[-1][-1])
        src.append(torch.from_numpy(edges.src).long())
        for name, pieces in columns.items():
            pieces.append(data[name])
    edges = ("csc", (torch.cat(indptr), torch.cat(src), torch.empty(0, dtype=torch.int64)))
    graph = dgl().graph(edges, num_nodes=meta.num_nodes(ntype))
    feat, label, *masks = (torch.cat(pieces) for pieces in columns.values())
    nodes = {name: mask.bool().nonzero().squeeze(1) for name, mask in zip(MASKS, masks)}
    return graph, feat, label.long(), nodes


def inference(model: SAGE, graph: Any, feat: Tensor, workers: int = 0) -> Tensor:
    """Return the outputs of all nodes, layer by layer in minibatches, as in DGL's example."""
    everyone = torch.arange(len(feat))
    for number, layer in enumerate(model.layers):
        out = torch.empty(len(feat), model.widths[number + 1])
        loader = dgl().dataloading.DataLoader(
            graph,
            everyone,
            dgl().dataloading.MultiLayerFullNeighborSampler(1),
            batch_size=EVALUATED,
            num_workers=workers,
        )
        for inputs, rows, (block,) in loader:
            out[rows] = layer(block, feat[inputs])
        feat = out.relu() if number == 0 else out
    return feat


def train(partition: Path, steps: int, threads: int, workers: int, epochs: int) -> Report:
    """As in DGL's example, but that the features are fetched where it can be timed."""
    torch.set_num_threads(threads)
    torch.manual_seed(SEED)
    dgl().seed(SEED)
    graph, feat, label, nodes = load(partition)
    model = SAGE(feat.shape[1])

    def batches(sampler: Any, nodes: Tensor, **options: Any) -> Any:
        options = {"batch_size": BATCH, "num_workers": workers, **options}
        return dgl().dataloading.DataLoader(graph, nodes, sampler, **options)

    def fetch(inputs: Tensor, seeds: Tensor) -> tuple[Tensor, Tensor]:
        return feat[inputs], label[seeds]

    def evaluate(last: bool) -> float:
        if not last:
            correct = 0
            for input_nodes, seeds, blocks in batches(sampler(), nodes["val_mask"]):
                x, labels = fetch(input_nodes, seeds)
                correct += int((model(blocks, x).argmax(1) == labels).sum())
            return correct / len(nodes["val_mask"])
        h = inference(model, graph, feat, workers)
        tested = nodes["test_mask"]
        return float((h[tested].argmax(1) == label[tested]).float().mean())

    loader = batches(sampler(), nodes["train_mask"], shuffle=True, drop_last=True)
    if epochs:
        return train_whole(loader, fetch, model, epochs, evaluate)
    return measure(loader, fetch, model, steps, lambda: None)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--partition", type=Path, required=True, help="directory of a partition")
    parser.add_argument("--steps", type=int, default=20, help="steps that count")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--workers", type=int, default=0, help="processes that sample")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="limit of the whole run")
    parser.add_argument("--epochs", type=int, default=0, help="of a whole job, instead of steps")
    arguments = parser.parse_args()
    faulthandler.dump_traceback_later(arguments.seconds, exit=True)
    counts = (arguments.steps, arguments.threads, arguments.workers, arguments.epochs)
    result = train(arguments.partition, *counts)
    print(result.line(), flush=True)
    faulthandler.cancel_dump_traceback_later()
    return 0


if __name__ == "__main__":
    sys.exit(main())
