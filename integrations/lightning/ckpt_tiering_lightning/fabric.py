"""Fabric's strategies that shard take no ``CheckpointIO``; attached, they save and load through it.

``fabric.save``, ``fabric.load`` and ``fabric.load_raw`` are used as ever then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from lightning.fabric.strategies.fsdp import FSDPStrategy
from lightning.fabric.strategies.model_parallel import ModelParallelStrategy
from lightning.fabric.strategies.strategy import _apply_filter, _validate_keys_for_strict_loading
from lightning.fabric.utilities.load import _move_state_into
from lightning.fabric.utilities.types import _Stateful
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn import Module
from torch.optim import Optimizer

from ckpt_tiering_lightning.agreement import succeed_together
from ckpt_tiering_lightning.checkpoint_io import TieredCheckpointIO, is_sharded
from ckpt_tiering_lightning.locate import OrdinaryFile, StagedLink
from ckpt_tiering_lightning.names import tidy
from ckpt_tiering_lightning.sharded import own_paths
from ckpt_tiering_lightning.shards import Shards, saves_shards

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from lightning.fabric import Fabric

    from ckpt_tiering.api import SaveInfo

__all__ = ["attach"]

_State: TypeAlias = "dict[str, Any]"
_Filter: TypeAlias = "dict[str, Callable[[str, Any], bool]]"


def attach(fabric: Fabric, checkpoint_io: TieredCheckpointIO) -> None:
    """Have ``fabric.save`` and ``fabric.load`` go through a `TieredCheckpointIO`.

    For any strategy; those that don't shard take it as ``Fabric(plugins=[...])``, too. Nothing says
    when training is over: end with ``checkpoint_io.close()`` on every rank.
    """
    strategy = fabric.strategy
    if isinstance(strategy, FSDPStrategy | ModelParallelStrategy):
        _Attached(strategy, checkpoint_io).install()
    else:
        strategy.checkpoint_io = checkpoint_io


def _sharded_model(state: _State) -> tuple[str, Module]:
    """Return the one model in a state whose parameters are spread over ranks, and its key.

    Raises:
        ValueError: There is none, or more than one.
    """
    found = {key: part for key, part in state.items() if _is_spread(part)}
    if len(found) != 1:
        raise ValueError(
            f"the state has {len(found)} models that were set up with the strategy; a sharded"
            " checkpoint is of exactly one: {'model': model, ...}"
        )
    return next(iter(found.items()))


def _is_spread(part: Any) -> bool:
    return isinstance(part, Module) and (
        any(isinstance(parameter, DTensor) for parameter in part.parameters())
        or any(isinstance(module, FullyShardedDataParallel) for module in part.modules())
    )


class _Attached:
    """What a sharding strategy of Fabric's does instead of its own saving and loading."""

    def __init__(
        self, strategy: FSDPStrategy | ModelParallelStrategy, checkpoint_io: TieredCheckpointIO
    ) -> None:
        for name in ("save_checkpoint", "load_checkpoint"):
            vars(strategy).pop(name, None)
        self._strategy = strategy
        self._io = checkpoint_io
        self._shards = Shards(checkpoint_io)
        self._sharded = saves_shards(strategy)
        self._load_as_ever = strategy.load_checkpoint

    def install(self) -> None:
        """Replace the strategy's methods."""
        self._io.every_rank_saves = self._sharded
        self._strategy.save_checkpoint = self.save_checkpoint  # type: ignore[method-assign]
        self._strategy.load_checkpoint = self.load_checkpoint  # type: ignore[method-assign]

    def save_checkpoint(
        self,
        path: str | Path,
        state: _State,
        storage_options: Any | None = None,
        filter: _Filter | None = None,
    ) -> None:
        """Save a checkpoint; all ranks call it. See `TieredCheckpointIO.save_checkpoint`.

        Raises:
            TypeError: ``storage_options`` are given.
            NotImplementedError: What is to be sharded is to be filtered, as in Fabric.
            ValueError: There is not exactly one model of the strategy's in the state.
            CkptTieringError: As there.
        """
        if storage_options is not None:
            raise TypeError("`storage_options` are not supported: give options to the constructor")
        if filter is not None and self._sharded:
            raise NotImplementedError("a sharded checkpoint can't be filtered when it is loaded")
        _, model = _sharded_model(state)
        options = StateDictOptions(full_state_dict=not self._sharded, cpu_offload=not self._sharded)
        tensors: _State = {}
        rest: _State = {}
        for key, part in state.items():
            converted: Any
            if isinstance(part, Module):
                converted, target = get_model_state_dict(part, options=options), tensors
            elif isinstance(part, Optimizer):
                converted, target = get_optimizer_state_dict(model, part, options=options), tensors
            else:
                converted = part.state_dict() if isinstance(part, _Stateful) else part
                target = rest
            _apply_filter(key, filter or {}, converted, target)
        if self._sharded:
            self._shards.save(path, tensors, rest)
        elif self._strategy.is_global_zero:
            self._io.save_checkpoint(tensors | rest, path)

    def load_checkpoint(
        self,
        path: str | Path,
        state: Any = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> _State:
        """Load a checkpoint; all ranks call it. See `TieredCheckpointIO.load_checkpoint`.

        Raises:
            ValueError: There is not exactly one model of the strategy's in the state.
            KeyError: The checkpoint lacks something of ``state``, and ``strict`` is set.
            CkptTieringError: As there.
        """
        # Before 2.6 there is no such argument.
        more = {} if weights_only is None else {"weights_only": weights_only}
        found = self._io.find(tidy(path))
        if isinstance(found, OrdinaryFile):
            return self._load_as_ever(found.path, state, strict, **more)
        if isinstance(found, StagedLink) and found.is_directory:
            self._shards.check_staged(found.path)
            return self._load_as_ever(found.path, state, strict, **more)
        if not isinstance(found, StagedLink) and is_sharded(found) and isinstance(state, dict):
            remainder = self._load_shards(found, state, strict, weights_only)
        else:
            file = succeed_together(lambda: self._io.bring(found))
            with own_paths(self._strategy):
                remainder = self._load_as_ever(file, state, strict, **more)
        self._io.loaded(found)
        return remainder

    def _load_shards(
        self, found: SaveInfo, state: _State, strict: bool, weights_only: bool | None
    ) -> _State:
        key, model = _sharded_model(state)
        optimizers = {k: part for k, part in state.items() if isinstance(part, Optimizer)}
        meta = self._shards.meta(found, weights_only)
        wanted = state.keys() - {key} - optimizers.keys()
        _validate_keys_for_strict_loading(wanted, meta.keys(), strict=strict)
        parts: _State = {k: get_optimizer_state_dict(model, part) for k, part in optimizers.items()}
        parts[key] = get_model_state_dict(model)
        self._shards.load(found, parts, strict=strict, weights_only=weights_only)
        set_model_state_dict(model, parts[key], options=StateDictOptions(strict=strict))
        for name, optimizer in optimizers.items():
            set_optimizer_state_dict(model, optimizer, parts[name])
        _move_state_into(source=meta, destination=state, keys=wanted)
        return meta
