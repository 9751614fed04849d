"""Lightning's count of epochs in a checkpoint, as it would be had the run never stopped."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl


class Position(pl.Callback):
    """Corrects the count of epochs that Lightning saves.

    When it goes on from a checkpoint of an epoch's last batch it does not count the next epoch as
    begun. What it saves from then on reads as if no epoch were under way, and when it goes on
    from that, it does not restore the position in the data: it begins with the first batch of
    all again.
    """

    def on_save_checkpoint(
        self, trainer: pl.Trainer, module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        done = trainer.current_epoch
        count = {"ready": done + 1, "started": done + 1, "processed": done, "completed": done}
        saved = checkpoint["loops"]["fit_loop"]["epoch_progress"]
        saved["total"], saved["current"] = dict(count), dict(count)
