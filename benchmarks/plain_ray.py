"""The least that Ray Train and Lightning can do: two workers, one linear layer, one step.

What `bench_start.py` holds raygnn's start against. Everything is left as it comes, but for the
dashboard. Usage: ``plain_ray.py FILE``; rank 0 creates FILE when the first step is done.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def loop(config: dict[str, str]) -> None:
    import lightning.pytorch as pl
    import torch
    import torchmetrics
    from ray.train import get_context
    from ray.train.lightning import RayDDPStrategy, RayLightningEnvironment, prepare_trainer
    from torch.utils.data import DataLoader, TensorDataset

    class Linear(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(100, 47)
            self.accuracy = torchmetrics.classification.MulticlassAccuracy(47)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            x, y = batch
            logits = self.layer(x)
            self.accuracy(logits, y)
            return torch.nn.functional.cross_entropy(logits, y)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=0.003)

        def on_train_batch_end(self, *_: Any) -> None:
            if get_context().get_world_rank() == 0:
                Path(config["file"]).touch()

    data = TensorDataset(torch.randn(1024, 100), torch.randint(47, (1024,)))
    trainer = pl.Trainer(
        max_steps=1,
        accelerator="cpu",
        strategy=RayDDPStrategy(),
        plugins=[RayLightningEnvironment()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    prepare_trainer(trainer).fit(Linear(), DataLoader(data, batch_size=512))


def main() -> None:
    ray.init(include_dashboard=False)
    with tempfile.TemporaryDirectory() as storage:
        TorchTrainer(
            loop,
            train_loop_config={"file": str(Path(sys.argv[1]).resolve())},
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(storage_path=storage),
        ).fit()


if __name__ == "__main__":
    main()
