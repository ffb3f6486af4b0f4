"""``fit(ckpt_path="last")`` asks the store, where Lightning asks only this node's disk.

Lightning chooses the path before any callback is set up, on every process by itself, and starts
from scratch if it finds nothing. There is no hook for it, so its one method is wrapped: trainers
without our ``CheckpointIO`` go through it unchanged.
"""

from __future__ import annotations

import functools
import inspect
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.strategies import DeepSpeedStrategy, ModelParallelStrategy
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info

from ckpt_tiering_lightning.agreement import decided_by_rank_zero
from ckpt_tiering_lightning.links import is_staged
from ckpt_tiering_lightning.locate import newest, reference_to
from ckpt_tiering_lightning.names import is_remote

if TYPE_CHECKING:
    from ckpt_tiering.api import TieredCheckpointer
    from ckpt_tiering_lightning.checkpoint_io import TieredCheckpointIO

__all__ = ["BYPASSING", "install"]

# Its saves and loads never reach a `CheckpointIO`, and are not taken over.
BYPASSING = (DeepSpeedStrategy,)
_METHOD = "_parse_ckpt_path"
_PARAMETERS = ["self", "state_fn", "ckpt_path", "model_provided", "model_connected"]
_RUN = "_run"
_RUN_PARAMETERS = ["self", "model", "ckpt_path", "weights_only"]
_INSTALLED = "_ckpt_tiering_installed"
log = logging.getLogger(__name__)


def install(io_type: type[TieredCheckpointIO]) -> None:
    """Wrap Lightning's choice of ``ckpt_path``, and what it is told about loading it, once.

    A Lightning whose method is not the one we know is left alone, and a warning says what does not
    work then.
    """
    _install_choice(io_type)
    _install_weights_only(io_type)


def _install_choice(io_type: type[TieredCheckpointIO]) -> None:
    original = getattr(_CheckpointConnector, _METHOD, None)
    if getattr(original, _INSTALLED, False):
        return
    if original is None or list(inspect.signature(original).parameters) != _PARAMETERS:
        log.warning(
            "this version of Lightning chooses `ckpt_path` in another way:"
            " write ckpt_path='tier://latest' where you mean 'last'"
        )
        return

    @functools.wraps(original)
    def parse(
        self: Any,
        state_fn: TrainerFn,
        ckpt_path: str | Path | None,
        model_provided: bool,
        model_connected: bool,
    ) -> str | Path | None:
        strategy = self.trainer.strategy
        io = strategy.checkpoint_io
        if (
            isinstance(io, io_type)
            and not isinstance(strategy, BYPASSING)
            and _means_last(self, state_fn, ckpt_path)
        ):
            return _last(self.trainer, io.checkpointer)
        chosen: str | Path | None = original(
            self, state_fn, ckpt_path, model_provided, model_connected
        )
        return chosen

    setattr(parse, _INSTALLED, True)
    setattr(_CheckpointConnector, _METHOD, parse)


def _install_weights_only(io_type: type[TieredCheckpointIO]) -> None:
    """Keep what ``fit(weights_only=...)`` says, which Lightning drops for sharding strategies."""
    original = getattr(Trainer, _RUN, None)
    if original is None or getattr(original, _INSTALLED, False):
        return
    if list(inspect.signature(original).parameters) != _RUN_PARAMETERS:
        return  # before 2.6 there is no such argument

    @functools.wraps(original)
    def run(
        self: Trainer, model: Any, ckpt_path: Any = None, weights_only: bool | None = None
    ) -> Any:
        io = self.strategy.checkpoint_io
        if isinstance(io, io_type):
            io.weights_only = weights_only
        return original(self, model, ckpt_path=ckpt_path, weights_only=weights_only)

    setattr(run, _INSTALLED, True)
    setattr(Trainer, _RUN, run)


def _means_last(connector: Any, state_fn: TrainerFn, ckpt_path: str | Path | None) -> bool:
    if ckpt_path is not None:
        return ckpt_path == "last"
    # What Lightning itself does when it is told nothing: on SLURM its own file first, then "last"
    # if the trainer saves on exceptions.
    if SLURMEnvironment.detect() and connector._hpc_resume_path:  # noqa: SLF001
        return False
    saves_on_exception = any(
        isinstance(callback, OnExceptionCheckpoint) for callback in connector.trainer.callbacks
    )
    return saves_on_exception and state_fn == TrainerFn.FITTING


def _last(trainer: Trainer, checkpointer: TieredCheckpointer) -> str | None:
    if trainer.world_size > 1:
        # All ranks need one answer, and Lightning would make the process group only later. It does
        # nothing the second time.
        if isinstance(trainer.strategy, ModelParallelStrategy):
            # The rest of its setup needs the model, which it does not have yet.
            trainer.strategy._setup_distributed()  # noqa: SLF001
        else:
            trainer.strategy.setup_environment()
    return decided_by_rank_zero(lambda: _choose(trainer, checkpointer))


def _choose(trainer: Trainer, checkpointer: TieredCheckpointer) -> str | None:
    found = newest(checkpointer)
    if found is not None:
        return reference_to(found)
    config = checkpointer.config
    nothing = f'ckpt_path="last": nothing saved in {config.store}, nor staged in {config.staging}'
    file = _newest_file(trainer, config.staging)
    if file is None:
        rank_zero_info(f"{nothing}: starting from scratch")
    else:
        rank_zero_info(f"{nothing}: taking {file}, which was not saved by ckpt-tiering")
    return file


def _newest_file(trainer: Trainer, staging: Path) -> str | None:
    candidates: set[str] = set()
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint):
            candidates |= callback._find_last_checkpoints(trainer)  # noqa: SLF001
        elif isinstance(callback, OnExceptionCheckpoint):
            candidates.add(callback.ckpt_path)
    files = [
        Path(path)
        for path in candidates
        if not is_remote(path) and Path(path).exists() and not is_staged(path, staging)
    ]
    return str(max(files, key=lambda file: file.stat().st_mtime)) if files else None
