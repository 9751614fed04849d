"""A plain Ray Train and Lightning job, whose strategy is told to wait 20 s for a collective.

What `bench_frozen.py` holds raygnn against. Usage: ``plain_frozen.py DIRECTORY TIMEOUT``. Each
rank writes ``rank-<r>-<pid>`` there when a start of it has made its first step.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def loop(config: dict[str, Any]) -> None:
    import lightning.pytorch as pl
    import torch
    from ray.train import get_context
    from ray.train.lightning import RayDDPStrategy, RayLightningEnvironment, prepare_trainer
    from torch.utils.data import DataLoader, TensorDataset

    class Linear(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(100, 47)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            x, y = batch
            time.sleep(0.1)
            return torch.nn.functional.cross_entropy(self.layer(x), y)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=0.003)

        def on_train_batch_end(self, *_: Any) -> None:
            rank = get_context().get_world_rank()
            Path(config["directory"], f"rank-{rank}-{os.getpid()}").touch()

    data = TensorDataset(torch.randn(1024, 100), torch.randint(47, (1024,)))
    trainer = pl.Trainer(
        max_epochs=1000,
        accelerator="cpu",
        strategy=RayDDPStrategy(timeout=timedelta(seconds=config["timeout"])),
        plugins=[RayLightningEnvironment()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    prepare_trainer(trainer).fit(Linear(), DataLoader(data, batch_size=512))


def main() -> None:
    ray.init(include_dashboard=False, num_cpus=4)
    with tempfile.TemporaryDirectory() as storage:
        TorchTrainer(
            loop,
            train_loop_config={"directory": sys.argv[1], "timeout": float(sys.argv[2])},
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(
                storage_path=storage, failure_config=FailureConfig(max_failures=3)
            ),
        ).fit()


if __name__ == "__main__":
    main()
