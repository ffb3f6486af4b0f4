"""One answer for all ranks. Used only where all ranks are: when a checkpoint is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist

from ckpt_tiering.errors import CkptTieringError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["decided_by_rank_zero", "succeed_together"]

T = TypeVar("T")


def decided_by_rank_zero(decide: Callable[[], T]) -> T:
    """Call ``decide`` on rank 0 and return its answer on every rank.

    A collective when a process group of more than one rank is there. Every rank raises what rank 0
    raised.
    """
    if not _several_ranks():
        return decide()
    outcome: list[Any] = [None, None]
    error: Exception | None = None
    if dist.get_rank() == 0:
        try:
            outcome[0] = decide()
        except Exception as caught:  # noqa: BLE001  raised below, on every rank
            error = caught
            outcome[1] = _portable(caught, 0)
    dist.broadcast_object_list(outcome, src=0)
    if error is not None:
        raise error
    if outcome[1] is not None:
        raise outcome[1]
    answer: T = outcome[0]
    return answer


def succeed_together(action: Callable[[], T]) -> T:
    """Call ``action`` on every rank and return each rank's own result.

    A collective when a process group of more than one rank is there. If it failed on any rank,
    every rank raises: its own error, or that of the lowest rank that has one.
    """
    if not _several_ranks():
        return action()
    result: T | None = None
    error: Exception | None = None
    try:
        result = action()
    except Exception as caught:  # noqa: BLE001  raised below, on every rank
        error = caught
    errors: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error and _portable(error, dist.get_rank()))
    if error is not None:
        raise error
    for other in errors:
        if other is not None:
            raise other
    return result  # type: ignore[return-value]  # there was no error, so it is the action's


def _several_ranks() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _portable(error: Exception, rank: int) -> CkptTieringError:
    if isinstance(error, CkptTieringError):
        context = {key: str(value) for key, value in error.context.items()} | {"rank": rank}
        return type(error)(error.message, kind=error.kind, hint=error.hint, **context)
    return CkptTieringError(f"rank {rank}: {type(error).__name__}: {error}", rank=rank)
