"""The callback in every trainer, which wakes only beside our ``CheckpointIO``."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from torch.distributed.tensor import DTensor

from ckpt_tiering.errors import ConfigError
from ckpt_tiering_lightning.checkpoint_io import TieredCheckpointIO
from ckpt_tiering_lightning.names import Places
from ckpt_tiering_lightning.resume import BYPASSING
from ckpt_tiering_lightning.sharded import SHARDING, take_over
from ckpt_tiering_lightning.telemetry import Telemetry

if TYPE_CHECKING:
    import torch
    from lightning.pytorch import LightningModule, Trainer

__all__ = ["TieringCompanion", "companion_factory"]

# A person at a terminal waits for the prompt, and Lightning ignores further interrupts: what is
# staged goes on in the agent.
_INTERRUPT_WAIT_S = 30.0
log = logging.getLogger(__name__)


def companion_factory() -> list[Callback]:
    """Return the callbacks that Lightning adds to a trainer: entry point of the package."""
    return [TieringCompanion()]


def _of(trainer: Trainer) -> Any:
    # Some public attributes are set by Lightning's connectors, where type checkers don't see them.
    return trainer


def _tiered_io(trainer: Trainer) -> TieredCheckpointIO | None:
    io = trainer.strategy.checkpoint_io
    return io if isinstance(io, TieredCheckpointIO) else None


def _refuse_what_would_not_work(trainer: Trainer) -> None:
    io = trainer.strategy.checkpoint_io
    if isinstance(io, _WrappingCheckpointIO) and isinstance(io.checkpoint_io, TieredCheckpointIO):
        raise ConfigError(
            f"TieredCheckpointIO inside {type(io).__name__} would never be drained",
            hint="give TieredCheckpointIO to the trainer by itself: it uploads in the background",
        )
    if isinstance(io, TieredCheckpointIO) and isinstance(trainer.strategy, BYPASSING):
        raise ConfigError(
            f"{type(trainer.strategy).__name__} saves and loads past every CheckpointIO, so"
            " TieredCheckpointIO would tier nothing",
            hint="DeepSpeed is tiered through its engine, in a later release; until then use DDP,"
            " FSDPStrategy or ModelParallelStrategy",
        )


def _expected_bytes(trainer: Trainer, pl_module: LightningModule) -> int:
    """Return about what this rank will save: weights, and what optimizers keep of each."""
    weights = sum(_bytes_here(t) for t in (*pl_module.parameters(), *pl_module.buffers()))
    kept = 0
    for optimizer in trainer.optimizers:
        for group in optimizer.param_groups:
            copies = 2 if "betas" in group else int(bool(group.get("momentum")))
            kept += copies * sum(map(_bytes_here, group["params"]))
    return weights + kept


def _bytes_here(tensor: torch.Tensor) -> int:
    part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return part.numel() * part.element_size()


def _saves(trainer: Trainer, io: TieredCheckpointIO) -> bool:
    return trainer.is_global_zero or io.every_rank_saves


class TieringCompanion(Callback):
    """Reports the durable lag to the trainer's loggers, and drains at the end of training.

    Has no state, so it leaves no trace in checkpoints. Works on the ranks that save, and in no
    trainer whose ``CheckpointIO`` is not ours.
    """

    def __init__(self) -> None:
        self._telemetry = Telemetry()
        self._reported_step = -1

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse what can't work, take over strategies that shard; when fitting, start the agent.

        Raises:
            ConfigError: The trainer's strategy would save past us.
        """
        _refuse_what_would_not_work(trainer)
        io = _tiered_io(trainer)
        if io is None:
            return
        io.every_rank_saves = False
        if isinstance(trainer.strategy, SHARDING):
            take_over(trainer.strategy, io)
        # The checkpoints that others save on an exception are to be in what we drain, so we come
        # last. A new list: the old one is being walked over.
        others = [c for c in _of(trainer).callbacks if c is not self]
        _of(trainer).callbacks = [*others, self]
        io.places = Places(root=str(trainer.default_root_dir), dirpaths=io.places.dirpaths)
        if stage == "fit":
            io.forget_loaded()
            if _saves(trainer, io) and not _of(trainer).fast_dev_run:
                io.start()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Learn the directories of the checkpoint callbacks, which are set up by now."""
        io = _tiered_io(trainer)
        if io is not None:
            dirpaths = (getattr(c, "dirpath", None) for c in trainer.checkpoint_callbacks)
            io.places = Places(
                root=str(trainer.default_root_dir), dirpaths=tuple(str(d) for d in dirpaths if d)
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Protect the checkpoint that was resumed from; from now on saves cost a copy only."""
        io = _tiered_io(trainer)
        if io is not None and _saves(trainer, io):
            io.mark_resumed()
            # These upload the file as soon as the save returns.
            io.in_background = not any(getattr(lg, "_log_model", False) for lg in trainer.loggers)
            if io.in_background and _of(trainer).checkpoint_callbacks:
                io.checkpointer.prepare(_expected_bytes(trainer, pl_module))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Have the files of later saves there when they return: users may look at them."""
        io = _tiered_io(trainer)
        if io is not None:
            io.in_background = False

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Report every ``log_every_n_steps``."""
        io = _tiered_io(trainer)
        step = trainer.global_step
        interval = _of(trainer).log_every_n_steps
        if (
            io is not None
            and trainer.is_global_zero
            and interval
            and step % interval == 0
            and step != self._reported_step  # batches that only accumulate gradients are no steps
        ):
            self._reported_step = step
            self._report(trainer, io)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Drain, and report what became durable meanwhile. Never hides the exception."""
        io = _tiered_io(trainer)
        if io is None or not _saves(trainer, io):
            return
        io.in_background = False
        try:
            self._report(trainer, io)  # the trackers may not live to see the end of the drain
            io.close(_INTERRUPT_WAIT_S if isinstance(exception, KeyboardInterrupt) else None)
            self._finish(trainer, io)
        except Exception:
            log.exception("what is staged was not drained after the exception that ended training")

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Report for the last time: Lightning has torn the ``CheckpointIO`` down before."""
        io = _tiered_io(trainer)
        if io is not None and _saves(trainer, io) and stage == "fit":
            io.teardown()
            self._finish(trainer, io)

    def _report(self, trainer: Trainer, io: TieredCheckpointIO) -> None:
        if trainer.is_global_zero:
            self._telemetry.report(trainer, io.checkpointer)

    def _finish(self, trainer: Trainer, io: TieredCheckpointIO) -> None:
        self._report(trainer, io)
        if trainer.is_global_zero:
            self._telemetry.finish(trainer.loggers)
