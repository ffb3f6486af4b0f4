"""A tiny training job of Lightning's, for a test or a rank of ``torchrun`` to run.

What a rank computes depends on the weights, the optimizer and the step alone, so losses are equal
bit by bit exactly if all three were restored.

    torchrun --nproc-per-node 2 -m tests.integration.lightning_job '{"phase": ..., "out": ...}'
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

from ckpt_tiering_lightning import TieredCheckpointIO

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Node", "TinyModel", "every", "losses", "resume", "tiered", "trainer"]

Losses = dict[int, str]


class TinyModel(pl.LightningModule):
    """Learns to add up sixteen numbers. Keeps the loss of each step, exactly, as text."""

    def __init__(self, seed: int = 1) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.net = torch.nn.Sequential(
            torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)
        )
        self.losses: Losses = {}
        self.lr = 1e-2
        self.batch_size = 2

    def _loss(self, seed: int) -> torch.Tensor:
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(seed))
        loss: torch.Tensor = (self.net(x) - x.sum(1, keepdim=True)).square().mean()
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self._loss(self.global_step * 64 + self.global_rank)
        self.losses[self.global_step] = float(loss.item()).hex()
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", self._loss(-1))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=self.lr)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.9)]

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.arange(4000)), batch_size=self.batch_size)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.arange(2)))


@dataclass(frozen=True)
class Node:
    """Where a node keeps its files. Another one stands for a machine that has seen nothing yet."""

    path: Path

    @property
    def root(self) -> Path:
        return self.path / "project"

    @property
    def staging(self) -> Path:
        return self.path / "nvme"


def every(num_steps: int, **more: Any) -> ModelCheckpoint:
    return ModelCheckpoint(**{"every_n_train_steps": num_steps, "save_top_k": -1, **more})


def tiered(store: str, node: Node, **options: Any) -> TieredCheckpointIO:
    # An agent that can't do its work ends soon after the test.
    given: dict[str, Any] = {"drain_timeout": 60, "linger": 5, **options}
    return TieredCheckpointIO(store, staging=node.staging, **given)


def trainer(
    node: Node,
    io: TieredCheckpointIO | None,
    *,
    max_steps: int,
    callbacks: Sequence[pl.Callback] = (),
    **more: Any,
) -> pl.Trainer:
    """Make a trainer on one CPU, or on the ranks that ``torchrun`` started."""
    options: dict[str, Any] = {
        "default_root_dir": node.root,
        "accelerator": "cpu",
        "devices": 1,
        "max_steps": max_steps,
        "callbacks": list(callbacks),
        "plugins": [io] if io else None,
        "enable_checkpointing": any(isinstance(c, pl.callbacks.Checkpoint) for c in callbacks),
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "limit_val_batches": 0,
        "log_every_n_steps": 5,
        "logger": False,
    }
    return pl.Trainer(**(options | more))


def losses(store: str | None, node: Node, *, max_steps: int, **more: Any) -> Losses:
    """Train from scratch, saving every 5 steps if there is a store; return the losses."""
    model = TinyModel()
    io = tiered(store, node) if store else None
    trainer(node, io, max_steps=max_steps, callbacks=[every(5)] if store else [], **more).fit(model)
    return model.losses


def resume(store: str, node: Node, reference: str | Path | None, **more: Any) -> Losses:
    """Go on to step 40 from ``reference`` with a model that knows nothing; return the losses."""
    model = TinyModel(seed=2)
    trainer(node, tiered(store, node), max_steps=40, **more).fit(model, ckpt_path=reference)
    return model.losses


def _train(job: dict[str, Any], ddp: dict[str, Any]) -> dict[str, Any]:
    node = Node(Path(job["node"]))
    return {
        "reference": losses(None, node, max_steps=40, **ddp),
        "saved": losses(job["store"], node, max_steps=20, **ddp),
    }


def _resume(job: dict[str, Any], ddp: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for label, (store, reference) in job["references"].items():
        node = Node(Path(job["node"]) / label)
        try:
            found[label] = resume(store, node, reference, **ddp)
        except Exception as error:  # noqa: BLE001  what was raised is the answer
            found[label] = f"{type(error).__name__}: {error}"
    return found


def main() -> None:
    job = json.loads(sys.argv[1])
    ddp = {"strategy": "ddp", "devices": int(os.environ["WORLD_SIZE"])}
    answer = {"train": _train, "resume": _resume}[job["phase"]](job, ddp)
    rank = os.environ["RANK"]
    (Path(job["out"]) / f"{job['phase']}-{rank}.json").write_text(json.dumps(answer))
    # Lightning leaves gloo's threads to the end of the process, where they abort it at times.
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
