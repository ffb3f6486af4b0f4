"""A character-level transformer and its data. Nothing in here knows how it is checkpointed."""

from __future__ import annotations

import itertools
from pydoc_data.topics import topics
from typing import TYPE_CHECKING

import lightning.pytorch as pl
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig

VOCABULARY = 128
CONTEXT = 48


def text() -> torch.Tensor:
    """Return Python's own reference documentation, which every Python brings along."""
    pages = "\n\n".join(topics[name] for name in sorted(topics))
    return torch.tensor(list(pages.encode("ascii", "replace")), dtype=torch.long)


class Batches(IterableDataset[torch.Tensor]):
    """Endless random windows of the text; which ones depends on step and rank alone.

    Lightning does not put a plain data loader back to where it was within an epoch, so a resumed
    run would see other data. These are a function of the step, which every checkpoint has.
    """

    def __init__(self, *, first_step: int, rank: int, size: int) -> None:
        self._text = text()
        self._first_step, self._rank, self._size = first_step, rank, size

    def __iter__(self) -> Iterator[torch.Tensor]:
        for step in itertools.count(self._first_step):
            generator = torch.Generator().manual_seed(1000 * step + self._rank)
            last = len(self._text) - CONTEXT - 1
            starts = torch.randint(last, (self._size,), generator=generator)
            yield torch.stack([self._text[s : s + CONTEXT + 1] for s in starts.tolist()])


class CharTransformer(pl.LightningModule):
    """Three blocks, 2.4 million weights: with AdamW a checkpoint of 29 MB.

    No dropout: Lightning's checkpoints don't hold the state of random generators.
    """

    def __init__(self, *, width: int = 256, blocks: int = 3, batch_size: int = 20) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.characters = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, 8, 4 * width, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(blocks)
        )
        self.out = nn.Linear(width, VOCABULARY)

    def forward(self, characters: torch.Tensor) -> torch.Tensor:
        x = self.characters(characters) + self.positions.weight
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        logits: torch.Tensor = self.out(x)
        return logits

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        logits = self(batch[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 20))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": warmup, "interval": "step"}}

    def train_dataloader(self) -> DataLoader[torch.Tensor]:
        # Called after a checkpoint was loaded, so this is the step to go on from.
        batches = Batches(first_step=self.global_step, rank=self.global_rank, size=self.batch_size)
        return DataLoader(batches, batch_size=None)
