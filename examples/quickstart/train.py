"""Train a small language model with Lightning, and resume it on whatever machine is at hand.

    torchrun --standalone --nproc-per-node 2 train.py --store s3://bucket/run --staging /nvme/ckpt

A stock script but for the lines that are marked: a stock `Trainer`, a stock `ModelCheckpoint`, and
`ckpt_path="last"`. Run the same command again after a crash, on this node or on another, and it
goes on from the newest checkpoint that is durable in the bucket.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from ckpt_tiering_lightning import TieredCheckpointIO  # <- this one,
from examples.quickstart.losses import LossLog
from examples.quickstart.model import CharTransformer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", help="s3://bucket/run; without it, plain Lightning")
    parser.add_argument("--staging", type=Path, default=Path("staging"), help="directory on NVMe")
    parser.add_argument("--resume", default="last", help="what to resume from")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=20)
    args = parser.parse_args()

    torch.set_num_threads(1)  # sums in another order round to other bits
    pl.seed_everything(0, verbose=False)

    trainer = pl.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=int(os.environ["WORLD_SIZE"]),  # set by torchrun
        max_steps=args.steps,
        deterministic=True,
        logger=CSVLogger("logs", name=None, flush_logs_every_n_steps=1),
        log_every_n_steps=1,
        callbacks=[
            ModelCheckpoint("checkpoints", every_n_train_steps=args.save_every, save_top_k=-1),
            LossLog(Path("losses")),  # for the demo to compare
        ],
        enable_progress_bar=False,
        enable_model_summary=False,
        # v----- and this one
        plugins=[TieredCheckpointIO(args.store, staging=args.staging)] if args.store else None,
    )
    trainer.fit(CharTransformer(batch_size=args.batch_size), ckpt_path=args.resume)
    # Lightning leaves gloo's threads running, of which one may abort a process that exits while it
    # still lets go of its last tensor (https://github.com/pytorch/pytorch/pull/179291).
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
