"""Load a sharded checkpoint in place: all ranks the same one, each its own part."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.checkpoint import state_dict_loader

from ckpt_tiering.dcp.reader import TieredStorageReader

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckpt_tiering.dcp.exchange import Exchange
    from ckpt_tiering.model.catalog import SaveInfo
    from ckpt_tiering.reader import Reader

__all__ = ["load_into"]


def load_into(
    state: dict[str, Any],
    resolve: Callable[[], SaveInfo],
    reader: Reader,
    exchange: Exchange,
) -> SaveInfo:
    """Load a save into a state dict, in place. All ranks call it.

    Args:
        state: Has the keys, shapes and placements that are wanted.
        resolve: Finds the save; asked on rank 0 only, whose answer holds for all.
        reader: Of the run.
        exchange: How the ranks agree.

    Returns:
        The save that was loaded.

    Raises:
        CkptTieringError: As of ``resolve``, on all ranks.
        CheckpointException: DCP's: some rank could not load its part.
    """
    size, rank = exchange.size, exchange.rank
    info: SaveInfo | None = exchange.agree(
        lambda: resolve() if rank == 0 else None, lambda found: [found[0]] * size
    )
    assert info is not None
    storage = TieredStorageReader.of(reader, info)
    # DCP talks about its plans: on a group of their own, never on that of the training.
    ranks = tuple(exchange.ranks)
    group = _group(ranks) if size > 1 else None
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            state_dict_loader.load(
                state,
                storage_reader=storage,
                process_group=group,
                no_dist=size == 1,
            )
    except BaseException:
        _groups.pop(ranks, None)  # it may have failed in the middle of talking; the next one is new
        raise
    return info


# Kept for all loads. One that is destroyed leaves its addresses in the job's store, where the next
# group of these ranks, which has the same name, would find them.
_groups: dict[tuple[int, ...], dist.ProcessGroup] = {}


def _group(ranks: tuple[int, ...]) -> dist.ProcessGroup:
    """Return a group of our own, on the CPUs of these ranks, each of which asks for it."""
    group = _groups.get(ranks)
    known = distributed_c10d._world.pg_names  # noqa: SLF001  without those that were destroyed
    if group is None or group not in known:
        group = dist.new_group(list(ranks), backend="gloo", use_local_synchronization=True)
        _groups[ranks] = group
    return group
