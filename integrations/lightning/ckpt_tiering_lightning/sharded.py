"""Strategies that shard save and load past every ``CheckpointIO``. Taken over, they come to ours.

Methods are replaced on the strategy's instance, so that its class, and what else is derived from
it, stays as it is.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from ckpt_tiering.errors import ConfigError
from ckpt_tiering_lightning.agreement import succeed_together
from ckpt_tiering_lightning.checkpoint_io import TieredCheckpointIO, is_sharded
from ckpt_tiering_lightning.locate import OrdinaryFile, StagedLink
from ckpt_tiering_lightning.names import is_scratch, tidy
from ckpt_tiering_lightning.shards import Shards, saves_shards

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch.optim import Optimizer

    from ckpt_tiering.api import SaveInfo

__all__ = ["SHARDING", "optimizer_key", "own_paths", "take_over"]

SHARDING = (FSDPStrategy, ModelParallelStrategy)
_Strategy: TypeAlias = "FSDPStrategy | ModelParallelStrategy"
_MARK = "_ckpt_tiering"
# Copies of the tensors would be made anew at each save, and would not even be copies where the
# tensors are on the CPU: the one copy that is needed is made when they are saved.
_NO_COPIES = StateDictOptions(full_state_dict=False, cpu_offload=False)
_REPLACED = ("save_checkpoint", "load_checkpoint", "remove_checkpoint", "teardown")
_REPLACED_IF_SHARDED = ("lightning_module_state_dict", "optimizer_state")


def take_over(strategy: _Strategy, checkpoint_io: TieredCheckpointIO) -> None:
    """Have a strategy save and load through a `TieredCheckpointIO`. Once is enough.

    Raises:
        ConfigError: The strategy is of a class that saves or loads in a way of its own.
    """
    base = next(known for known in SHARDING if isinstance(strategy, known))
    for name in (*_REPLACED, *_REPLACED_IF_SHARDED):
        if getattr(type(strategy), name) is not getattr(base, name):
            raise ConfigError(
                f"{type(strategy).__name__} has a `{name}` of its own, which would not be called",
                hint=f"use {base.__name__} itself, or save through `TieredCheckpointer` yourself",
            )
    before = getattr(strategy, _MARK, None)
    if before is not None and before.io is checkpoint_io:
        return
    for name in (*_REPLACED, *_REPLACED_IF_SHARDED):
        vars(strategy).pop(name, None)
    TakenOver(strategy, checkpoint_io).install()


def optimizer_key(index: int) -> str:
    """Return under which key Lightning's sharded checkpoints have an optimizer's state."""
    return f"optimizer_{index}"


@contextmanager
def own_paths(strategy: Any) -> Iterator[None]:
    """Let every rank load from a path of its own: a strategy takes rank 0's, by broadcast.

    The file that all ranks are to load was brought to each node's own staging directory.
    """

    def broadcast(obj: Any, src: int = 0) -> Any:
        return obj

    strategy.broadcast = broadcast
    try:
        yield
    finally:
        del strategy.broadcast


class TakenOver:
    """What a sharding strategy of a trainer's does instead.

    Args:
        strategy: The strategy, with its own methods in place.
        checkpoint_io: Of this process.
    """

    def __init__(self, strategy: _Strategy, checkpoint_io: TieredCheckpointIO) -> None:
        self._strategy = strategy
        self._shards = Shards(checkpoint_io)
        self._key = "state_dict" if isinstance(strategy, ModelParallelStrategy) else "model"
        self._original = {name: getattr(strategy, name) for name in _REPLACED}

    @property
    def io(self) -> TieredCheckpointIO:
        """What is saved and loaded through."""
        return self._shards.io

    def install(self) -> None:
        """Replace the strategy's methods."""
        sharded = saves_shards(self._strategy)
        self.io.every_rank_saves = sharded
        for name in (*_REPLACED, *(_REPLACED_IF_SHARDED if sharded else ())):
            setattr(self._strategy, name, getattr(self, name))
        setattr(self._strategy, _MARK, self)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return this rank's part of the model's state: the very tensors, no copies."""
        assert self._strategy.model is not None
        return get_model_state_dict(self._strategy.model, options=_NO_COPIES)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return this rank's part of an optimizer's state: the very tensors, no copies."""
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer.optimizer
        assert self._strategy.model is not None
        return get_optimizer_state_dict(self._strategy.model, optimizer, options=_NO_COPIES)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Save a checkpoint; all ranks call it. See `TieredCheckpointIO.save_checkpoint`.

        Raises:
            TypeError: ``storage_options`` are given.
            CkptTieringError: As there.
        """
        if storage_options is not None:
            raise TypeError(
                "`Trainer.save_checkpoint(..., storage_options=...)` is not supported with"
                " `TieredCheckpointIO`: give options to its constructor"
            )
        if not self.io.every_rank_saves or is_scratch(tidy(filepath)):
            self._original["save_checkpoint"](checkpoint, filepath)
            return
        optimizers = checkpoint.get("optimizer_states", [])
        state = {self._key: checkpoint["state_dict"]}
        state |= {optimizer_key(index): part for index, part in enumerate(optimizers)}
        self._shards.save(filepath, state, _without_tensors(checkpoint), facts=checkpoint)

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a checkpoint; all ranks call it. See `TieredCheckpointIO.load_checkpoint`.

        A sharded checkpoint is loaded by any number of ranks. One that consists of a file, and one
        that was not saved by us, is loaded as the strategy does.

        Raises:
            KeyError: Training was to go on from a checkpoint that has weights only.
            CkptTieringError: As there.
        """
        reference = tidy(checkpoint_path)
        asked = self.io.weights_only if weights_only is None else weights_only
        if is_scratch(reference):
            return self._load_as_ever(checkpoint_path, asked)
        found = self.io.find(reference)
        if isinstance(found, OrdinaryFile):
            return self._load_as_ever(found.path, asked)
        if not isinstance(found, StagedLink) and is_sharded(found):
            checkpoint = self._load_shards(found, asked)
        elif isinstance(found, StagedLink) and found.is_directory:
            self._shards.check_staged(found.path)
            return self._load_as_ever(found.path, asked)
        else:
            file = succeed_together(lambda: self.io.bring(found))
            with own_paths(self._strategy):
                checkpoint = self._load_as_ever(file, asked)
        self.io.loaded(found)
        return checkpoint

    def _load_as_ever(self, path: str | Path, weights_only: bool | None) -> dict[str, Any]:
        # Before 2.6 there is no such argument.
        more = {} if weights_only is None else {"weights_only": weights_only}
        checkpoint: dict[str, Any] = self._original["load_checkpoint"](path, **more)
        return checkpoint

    def _load_shards(self, found: SaveInfo, weights_only: bool | None) -> dict[str, Any]:
        model = self._strategy.model
        module = self._strategy.lightning_module
        assert model is not None
        assert module is not None
        fitting = module.trainer.state.fn == TrainerFn.FITTING
        optimizers = list(self._strategy.optimizers) if fitting else []
        if optimizers and found.metadata.get("weights_only"):
            raise KeyError(
                f"training can't go on from {found.url}, which contains only the model. This is"
                " probably due to `ModelCheckpoint.save_weights_only` being set to `True`."
            )
        meta = self._shards.meta(found, weights_only)
        strict = module.strict_loading
        state: dict[str, Any] = {self._key: get_model_state_dict(model, options=_NO_COPIES)}
        for index, optimizer in enumerate(optimizers):
            state[optimizer_key(index)] = self.optimizer_state(optimizer)
        self._shards.load(found, state, strict=strict, weights_only=weights_only)
        set_model_state_dict(model, state[self._key], options=StateDictOptions(strict=strict))
        for index, optimizer in enumerate(optimizers):
            set_optimizer_state_dict(model, optimizer, state[optimizer_key(index)])
        return meta

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Ask for a checkpoint to be removed: what rank 0 asks for."""
        if not self._strategy.is_global_zero:
            return
        if self.io.every_rank_saves and not is_scratch(tidy(filepath)):
            self._shards.remove(filepath)
        else:
            self._original["remove_checkpoint"](filepath)

    def teardown(self) -> None:
        """Tear the strategy down, and then the ``CheckpointIO``, which these strategies forget."""
        self._original["teardown"]()
        self.io.teardown()


def _without_tensors(checkpoint: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in checkpoint.items() if k not in {"state_dict", "optimizer_states"}}
