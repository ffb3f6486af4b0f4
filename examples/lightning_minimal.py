"""The smallest Lightning script that ships its checkpoints to a bucket and goes on from there.

    python examples/lightning_minimal.py s3://bucket/run-42 /nvme/ckpt 100

Run it again with more steps, on this machine or another: it goes on where it stopped. One line is
ours, marked below. ``AWS_ENDPOINT_URL`` leads it to a server other than Amazon's.
"""

from __future__ import annotations

import sys

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

from ckpt_tiering_lightning import TieredCheckpointIO


class Adder(pl.LightningModule):
    """Learns to add up eight numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(8, 1)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        (x,) = batch
        loss = torch.nn.functional.mse_loss(self.net(x), x.sum(1, keepdim=True))
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def main(store: str, staging: str, max_steps: str) -> None:
    trainer = pl.Trainer(
        plugins=[TieredCheckpointIO(store, staging=staging)],  # this one
        callbacks=[ModelCheckpoint(every_n_train_steps=10)],
        max_steps=int(max_steps),
        accelerator="auto",
        devices=1,
        logger=False,
    )
    data = DataLoader(TensorDataset(torch.randn(4096, 8)), batch_size=16)
    trainer.fit(Adder(), data, ckpt_path="last")


if __name__ == "__main__":
    main(*sys.argv[1:])
