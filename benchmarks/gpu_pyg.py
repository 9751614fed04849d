"""PyG's NeighborLoader and SAGEConv on the graph of `gpu.py`, beside its figures."""

from __future__ import annotations

import time

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor


def step_ms(
    edges: tuple[Tensor, Tensor],
    features: Tensor,
    labels: Tensor,
    train: np.ndarray,
    classes: int,
    device: torch.device,
    steps: int,
    *,
    hidden: int,
    fanout: tuple[int, ...],
    batch: int,
    warmup: int = 5,
) -> float:
    """ms per training step, batches for a GPU prepared by 4 processes of PyG's."""
    from torch_geometric.data import Data
    from torch_geometric.loader import NeighborLoader
    from torch_geometric.nn import GraphSAGE

    workers = 4 if device.type == "cuda" else 0
    data = Data(x=features, y=labels, edge_index=torch.stack(edges))
    loader = NeighborLoader(
        data,
        num_neighbors=list(fanout),
        batch_size=batch,
        input_nodes=torch.from_numpy(train),
        shuffle=True,
        num_workers=workers,
        persistent_workers=workers > 0,
    )
    model = GraphSAGE(features.shape[1], hidden, len(fanout), classes).to(device)
    optimizer = torch.optim.Adam(model.parameters())
    begin, done = 0.0, 0
    while done < warmup + steps:
        for some in loader:
            if done == warmup:
                begin = _now(device)
            there = some.to(device)
            out = model(there.x, there.edge_index)[: there.batch_size]
            optimizer.zero_grad()
            F.cross_entropy(out, there.y[: there.batch_size]).backward()
            optimizer.step()
            done += 1
            if done == warmup + steps:
                break
    return 1e3 * (_now(device) - begin) / steps


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
