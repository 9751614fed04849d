"""A job on many graphs as one writes it without raygnn: Ray Train, Lightning, dgl.batch.

For the contrast: what becomes of it when graphs come in different dtypes.
"""

from __future__ import annotations

from typing import Any


def loop(config: dict[str, Any]) -> None:
    """Train an epoch in bf16 on `HalfConverted`, a share of it on each worker."""
    import lightning.pytorch as pl
    import torch
    from ray.train import get_context
    from ray.train.lightning import RayDDPStrategy, RayLightningEnvironment, prepare_trainer
    from torch import nn
    from torch.utils.data import DataLoader, DistributedSampler

    from raygnn.graph.dgl import dgl as door  # one that can be imported with this torch
    from tests.support.datasets import HalfConverted

    dgl = door()
    from dgl.nn import GINConv

    class LightningGin(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.conv = GINConv(nn.Linear(4, 8), "sum")
            self.head = nn.Linear(8, 2)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            graph, y = batch
            h = torch.relu(self.conv(graph, graph.ndata["feat"]))
            graph.ndata["h"] = h.float()  # DGL sums no bf16 over the nodes of a graph on a CPU
            sums = dgl.sum_nodes(graph, "h").to(h.dtype)
            return nn.functional.cross_entropy(self.head(sums).float(), y)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def collate(samples: list[Any]) -> tuple[Any, torch.Tensor]:
        graphs, labels = zip(*samples)
        return dgl.batch(graphs), torch.tensor(labels)

    data = HalfConverted(**config)
    world = get_context().get_world_size()
    sampler = DistributedSampler(
        data, num_replicas=world, rank=get_context().get_world_rank(), shuffle=False
    )
    trainer = pl.Trainer(
        max_epochs=1,
        accelerator="cpu",
        precision="bf16-true",
        strategy=RayDDPStrategy(),
        plugins=[RayLightningEnvironment()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    loader = DataLoader(data, batch_size=1, sampler=sampler, collate_fn=collate)
    try:
        prepare_trainer(trainer).fit(LightningGin(), loader)
    except Exception as error:  # DGL's own class can not be unpickled where DGL is broken
        raise RuntimeError(f"{type(error).__name__}: {error}") from None
