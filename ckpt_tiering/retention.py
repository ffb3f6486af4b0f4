"""What may be deleted: pure decisions, no I/O. P6: never end with less than you had."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

    from ckpt_tiering.model.ids import SaveId

__all__ = ["evictable", "may_remove"]


def may_remove(victim: SaveId, durable: Collection[SaveId], protected: Collection[SaveId]) -> bool:
    """Return whether a save may go.

    Args:
        victim: The save that somebody wants to go.
        durable: All durable saves of its run.
        protected: Saves that may not go: resumed from, pinned.
    """
    return victim not in protected and any(save > victim for save in durable)


def evictable(
    durable_on_nvme: Collection[tuple[SaveId, int]], used_bytes: int, budget_bytes: int
) -> list[SaveId]:
    """Choose staged copies to delete so that a staging disk keeps its budget.

    Only durable saves go, oldest first, and the newest of them stays: it is what a restart on this
    node wants.

    Args:
        durable_on_nvme: Durable saves with a staged copy, and its bytes.
        used_bytes: Bytes that all staged saves take.
        budget_bytes: Bytes that they may take.
    """
    chosen = []
    for save, num_bytes in sorted(durable_on_nvme)[:-1]:
        if used_bytes <= budget_bytes:
            break
        chosen.append(save)
        used_bytes -= num_bytes
    return chosen
