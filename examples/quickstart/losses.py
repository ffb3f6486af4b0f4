"""Losses to the last bit: each rank writes its own, and they are compared as text."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lightning.pytorch.callbacks import Callback

if TYPE_CHECKING:
    from pathlib import Path

    import lightning.pytorch as pl

__all__ = ["Loss", "LossLog", "Losses", "first_difference", "read_losses"]


class LossLog(Callback):
    """Appends step, loss and time of every step of this rank to ``<directory>/rank<r>.jsonl``."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._step = trainer.global_step  # it counts on before the batch ends

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        # `hex` is exact, where a rounded number would hide a difference.
        loss = outputs["loss"].item().hex()
        line = {"step": self._step, "loss": loss, "at": time.time()}  # noqa: TID251  a record
        self._directory.mkdir(parents=True, exist_ok=True)
        with (self._directory / f"rank{trainer.global_rank}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")


@dataclass(frozen=True, slots=True)
class Loss:
    """Loss of one step of one rank: exact, as text, and when the step ended."""

    exact: str
    at: float


Losses = dict[int, dict[int, Loss]]  # by rank, then by step


def read_losses(directory: Path) -> Losses:
    """Read what the ranks wrote so far, also while they are writing."""
    losses: Losses = {}
    for file in sorted(directory.glob("rank*.jsonl")):
        steps = losses.setdefault(int(file.stem.removeprefix("rank")), {})
        for line in file.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                record = json.loads(line)
                steps[record["step"]] = Loss(record["loss"], record["at"])
    return losses


def first_difference(some: Losses, reference: Losses) -> str | None:
    """Say where losses first differ from those of the reference; None if they nowhere do.

    Every step of ``some`` must be in the reference; the reference may have more.
    """
    if some.keys() != reference.keys() or not some:
        return f"ranks {sorted(some)} are compared with ranks {sorted(reference)}"
    for rank, steps in some.items():
        for step, loss in sorted(steps.items()):
            other = reference[rank].get(step)
            if other is None or other.exact != loss.exact:
                expected = other.exact if other else "nothing"
                return f"rank {rank}, step {step}: {loss.exact} instead of {expected}"
    return None
