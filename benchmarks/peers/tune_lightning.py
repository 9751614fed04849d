"""A search as one writes it by hand: Ray Tune, Lightning and PyG's GCN on the whole of Cora.

What `bench_search.py` compares ``raygnn tune`` with: a function per trial, which reports each
validation to Tune and stores the best weights. Usage: ``tune_lightning.py ROOT TRIALS EPOCHS
CONCURRENT``; ROOT has PyG's Cora.
"""

from __future__ import annotations

import sys
import tempfile
from typing import Any

import ray
from ray import tune


def trial(setting: dict[str, Any]) -> None:
    import lightning.pytorch as pl
    import torch
    from lightning.pytorch.callbacks import ModelCheckpoint
    from ray.tune.integration.pytorch_lightning import TuneReportCheckpointCallback
    from torch.nn.functional import cross_entropy, dropout
    from torch.utils.data import DataLoader
    from torch_geometric.datasets import Planetoid
    from torch_geometric.nn import GCNConv
    from torch_geometric.transforms import NormalizeFeatures

    torch.set_num_threads(1)
    graph = Planetoid(setting["root"], "Cora", transform=NormalizeFeatures())[0]

    class Gcn(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.first = GCNConv(graph.num_features, setting["hidden"])
            self.second = GCNConv(setting["hidden"], 7)

        def forward(self) -> torch.Tensor:
            h = dropout(graph.x, setting["dropout"], self.training)
            h = self.first(h, graph.edge_index).relu()
            return self.second(dropout(h, setting["dropout"], self.training), graph.edge_index)

        def training_step(self, *_: Any) -> torch.Tensor:
            return cross_entropy(self()[graph.train_mask], graph.y[graph.train_mask])

        def validation_step(self, *_: Any) -> None:
            right = self()[graph.val_mask].argmax(1) == graph.y[graph.val_mask]
            self.log("accuracy", right.float().mean())

        def configure_optimizers(self) -> torch.optim.Optimizer:
            decay = setting["weight_decay"]
            return torch.optim.Adam(self.parameters(), lr=setting["lr"], weight_decay=decay)

    with tempfile.TemporaryDirectory() as place:
        pl.Trainer(
            max_epochs=setting["epochs"],
            accelerator="cpu",
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[
                ModelCheckpoint(place, monitor="accuracy", mode="max"),
                TuneReportCheckpointCallback(["accuracy"], save_checkpoints=False),
            ],
        ).fit(Gcn(), DataLoader([0]), DataLoader([0]))


def main() -> None:
    root, trials, epochs, concurrent = sys.argv[1], *map(int, sys.argv[2:])
    ray.init(include_dashboard=False, num_cpus=concurrent)
    with tempfile.TemporaryDirectory() as storage:
        found = tune.Tuner(
            tune.with_resources(trial, {"cpu": 1}),
            param_space={
                "lr": tune.loguniform(1e-4, 1e-1),
                "weight_decay": tune.choice([0.0, 0.0005, 0.005]),
                "hidden": tune.choice([64, 128, 256]),
                "dropout": tune.uniform(0, 0.8),
                "root": root,
                "epochs": epochs,
            },
            tune_config=tune.TuneConfig(metric="accuracy", mode="max", num_samples=trials),
            run_config=tune.RunConfig(storage_path=storage, verbose=0),
        ).fit()
    if found.errors:
        raise found.errors[0]
    print("best", found.get_dataframe("accuracy", "max")["accuracy"].max())


if __name__ == "__main__":
    main()
