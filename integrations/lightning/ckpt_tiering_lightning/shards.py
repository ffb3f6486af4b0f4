"""Sharded checkpoints: every rank saves and loads its own part, and rank 0 says which, and where.

In the store, and restored from it, such a checkpoint is the directory that Lightning itself makes:
DCP's files, and ``meta.pt`` with all that is no tensor of the model or the optimizers.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    create_default_local_load_plan,
)

from ckpt_tiering.dcp.plan import METADATA_FILE, data_file
from ckpt_tiering.dcp.reader import TieredStorageReader
from ckpt_tiering.errors import CkptTieringError, FormatError, NotFoundError
from ckpt_tiering_lightning.agreement import decided_by_rank_zero, succeed_together
from ckpt_tiering_lightning.checkpoint_io import file_of
from ckpt_tiering_lightning.links import add_links, staged_files, unlink_staged
from ckpt_tiering_lightning.names import is_remote, tidy

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.distributed.checkpoint.planner import LoadPlan

    from ckpt_tiering.api import SaveInfo
    from ckpt_tiering_lightning.checkpoint_io import TieredCheckpointIO

__all__ = ["META_FILE", "Shards", "saves_shards"]

META_FILE = "meta.pt"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Order:
    """What rank 0 tells the other ranks at a save.

    Attributes:
        reference: Path of the checkpoint.
        step: Training step.
        name: Name of the save.
        file: Directory of the shards within the save.
        metadata: Facts to keep with the save.
        gone: Names and paths of the checkpoints whose removal was asked for since the save before.
    """

    reference: str
    step: int
    name: str
    file: str
    metadata: dict[str, Any]
    gone: tuple[tuple[str, str], ...]


class Shards:
    """The parts of sharded checkpoints that are this rank's.

    Args:
        checkpoint_io: Of this process.
    """

    def __init__(self, checkpoint_io: TieredCheckpointIO) -> None:
        self.io = checkpoint_io
        self._gone: list[tuple[str, str]] = []

    def save(
        self,
        path: str | Path,
        state: Mapping[str, Any],
        rest: dict[str, Any],
        *,
        facts: dict[str, Any] | None = None,
    ) -> None:
        """Copy this rank's part of a state, and leave it to the agent. All ranks save together.

        As rank 0 alone knows the path and which checkpoints are to go, it tells the others, where
        Lightning's own strategies broadcast the path. Otherwise it is as the save of an unsharded
        checkpoint; see `TieredCheckpointIO.save_checkpoint`.

        Args:
            path: Where the checkpoint is wanted; that of rank 0 counts.
            state: The model's and the optimizers' state dicts, by key.
            rest: What else the checkpoint has. That of rank 0 is saved.
            facts: The whole checkpoint, where ``rest`` does not say enough about it.
        """
        order = decided_by_rank_zero(lambda: self._order(tidy(path), facts or rest))
        checkpointer = self.io.checkpointer
        self.io.start()
        self.io.mark_resumed()
        rank = dist.get_rank() if dist.is_initialized() else 0
        if rank:
            self._hear_of(order.gone, data_file(rank))
        save_id = checkpointer.save(
            order.step,
            state,
            sharded=True,
            name=order.name,
            metadata=order.metadata,
            extra={} if rank else {META_FILE: _written(rest)},
            directory=order.file,
        )
        self.io.saved(order.name, save_id)
        if not is_remote(order.reference):
            names = [data_file(rank)] if rank else [data_file(0), METADATA_FILE, META_FILE]
            add_links(
                order.reference,
                {n: checkpointer.local_path(save_id, f"{order.file}/{n}") for n in names},
            )

    def _order(self, reference: str, facts: dict[str, Any]) -> _Order:
        step, name, metadata = self.io.describe(facts, reference)
        gone, self._gone = tuple(self._gone), []
        return _Order(
            reference=reference,
            step=step,
            name=name.name,
            file=name.file,
            metadata=metadata | {"sharded": True},
            gone=gone,
        )

    def _hear_of(self, gone: tuple[tuple[str, str], ...], file: str) -> None:
        for name, reference in gone:
            if not is_remote(reference):
                staging = self.io.checkpointer.config.staging
                # Only this rank's: there may be new links of others at the same path.
                unlink_staged(reference, staging, wanted=lambda link: link == file)
            self.io.checkpointer.request_removal(name)

    def remove(self, path: str | Path) -> None:
        """Ask for a checkpoint to be removed. For rank 0, whose choice holds for all.

        The other ranks hear of it at the next save, without which nothing is removed anyway.
        """
        reference = tidy(path)
        self.io.remove_checkpoint(path)
        self._gone.append((self.io.places.name_of(reference).name, reference))

    def load(
        self,
        save: SaveInfo,
        state: dict[str, Any],
        *,
        strict: bool,
        weights_only: bool | None,
    ) -> None:
        """Load this rank's part of a sharded checkpoint, in place. All ranks load together.

        Args:
            save: The save, the same on all ranks.
            state: State dicts, by key, that have the wanted keys, shapes and placements. The
                checkpoint may have been saved by another number of ranks.
            strict: Whether everything in ``state`` has to be in the checkpoint.
            weights_only: False to load objects that only code of the checkpoint's can make again.

        Raises:
            FormatError: The checkpoint does not fit the state, or is not Lightning's.
            CkptTieringError: The store can't be reached, or no copy is whole.
        """
        config = self.io.checkpointer.config
        reader = TieredStorageReader(
            save.run,
            save.save_id,
            config.staging,
            prefix=file_of(save),
            allow_pickle=weights_only is False,
            concurrency=config.concurrency,
            **config.store_options.model_dump(),
        )
        planner = _Planner(allow_partial_load=not strict)
        try:
            _load_together(state, reader, planner)
        except CheckpointException as error:
            failures = [failure for failure, _ in error.failures.values()]
            for failure in failures:
                if isinstance(failure, CkptTieringError):
                    raise failure from error
            raise FormatError(
                f"{save.url} can't be loaded into this model: {failures[0]}",
                hint="with `strict_loading = False` a module keeps what a checkpoint lacks",
            ) from error

    def meta(self, save: SaveInfo, weights_only: bool | None) -> dict[str, Any]:
        """Return what else the checkpoint has. All ranks ask together; errors as of `load`.

        Args:
            save: The save, the same on all ranks.
            weights_only: As of ``torch.load``.
        """
        path = f"{file_of(save)}/{META_FILE}"
        file = succeed_together(lambda: self.io.checkpointer.fetch(save, path))
        return _read_meta(file, weights_only)

    def check_staged(self, path: str) -> None:
        """Compare what a directory of links leads to with its digests. All ranks check together.

        Raises:
            NotFoundError: Not all of the checkpoint is on every node; it has to be durable first.
            IntegrityError: A file is not what was sealed.
        """
        staging = self.io.checkpointer.config.staging
        names = decided_by_rank_zero(lambda: staged_files(path, staging))

        def check() -> None:
            lacking = set(names) - set(staged_files(path, staging))
            if lacking or not {METADATA_FILE, META_FILE} <= set(names):
                raise NotFoundError(
                    f"{path} is staged but not durable, and not all of it is on this node",
                    hint="wait until it is durable: raise resume_wait, or see"
                    " `ckpt-tiering status` for what keeps the agent",
                )
            for name in names:
                self.io.checkpointer.staged_copy(Path(path) / name)

        succeed_together(check)


def saves_shards(strategy: Any) -> bool:
    """Return whether an FSDP or model-parallel strategy, of trainers or Fabric's, saves shards."""
    full_or_sharded = getattr(strategy, "_state_dict_type", None)
    if full_or_sharded is None:
        return bool(strategy._save_distributed_checkpoint)  # noqa: SLF001
    return bool(full_or_sharded == "sharded")


class _Planner(DefaultLoadPlanner):
    """DCP's planner, less its guess that a checkpoint is of torch before 2.4.

    To guess so it is enough that a rank has no part of some tensor (of FSDP1's), and then that rank
    does not find what it does have a part of.
    """

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        return create_default_local_load_plan(
            self.state_dict, self.metadata, not self.allow_partial_load
        )


def _load_together(
    state: dict[str, Any], reader: TieredStorageReader, planner: DefaultLoadPlanner
) -> None:
    if not dist.is_initialized():
        state_dict_loader.load(state, storage_reader=reader, planner=planner, no_dist=True)
        return
    # DCP talks about its plans, and need not do that by way of GPUs.
    group = dist.new_group(backend="gloo")
    try:
        state_dict_loader.load(state, storage_reader=reader, planner=planner, process_group=group)
    finally:
        dist.destroy_process_group(group)


def _written(rest: dict[str, Any]) -> bytes:
    file = io.BytesIO()
    torch.save(rest, file)
    return file.getvalue()


def _read_meta(file: Path, weights_only: bool | None) -> dict[str, Any]:
    """Load ``meta.pt``; tensors in it come to the CPU, as they do from unsharded checkpoints."""
    # By its default, torch refuses what only code of the checkpoint's could make again.
    more = {} if weights_only is None else {"weights_only": weights_only}
    meta: dict[str, Any] = torch.load(file, map_location="cpu", **more)
    return meta
