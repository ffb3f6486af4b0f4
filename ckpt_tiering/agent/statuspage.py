"""The status page: what the journal says, for trainers and the CLI to look at without asking."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_tiering import __version__
from ckpt_tiering.agent.protocol import RunStatus, SaveStatus, Status
from ckpt_tiering.model.layout import StoreUrl
from ckpt_tiering.model.lifecycle import SaveState

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    from ckpt_tiering.flow.meter import Reading
    from ckpt_tiering.journal.journal import Journal
    from ckpt_tiering.journal.rows import SaveRow

__all__ = ["PENDING_STATES", "save_status", "status_page"]

DURABLE_SHOWN = 32
PENDING_STATES = (
    SaveState.STAGED,
    SaveState.UPLOADED,
    SaveState.VERIFIED,
    SaveState.PUBLISHED,
)


def save_status(row: SaveRow) -> SaveStatus:
    """Describe one save of the journal."""
    return SaveStatus(
        save_id=row.save_id,
        step=row.step,
        name=row.name,
        state=row.state,
        total_bytes=row.total_bytes,
        snapshot_at=row.snapshot_at,
        staged_at=row.staged_at,
        started_at=row.started_at,
        uploaded_at=row.uploaded_at,
        durable_at=row.durable_at,
        error=row.error,
    )


def status_page(  # noqa: PLR0913  all but two by keyword
    journal: Journal,
    reading: Reading,
    *,
    incomplete: Collection[Path] = (),
    held: Collection[tuple[str, str]] = (),
    pid: int,
    boot_id: str,
    heartbeat: float,
) -> Status:
    """Describe all runs of a journal.

    Args:
        journal: What is known.
        reading: Totals.
        incomplete: Directories of saves that not all ranks of this node have sealed.
        held: Run and save id of snapshots that are in memory only.
        pid: The agent's process.
        boot_id: The boot it belongs to.
        heartbeat: Monotonic seconds.
    """
    runs = [
        RunStatus(
            run=run,
            pending=tuple(save_status(s) for s in journal.saves(run, PENDING_STATES)),
            incomplete=(
                *(d.name for d in incomplete if d.parent.parent.name == StoreUrl.parse(run).slug),
                *(save_id for of, save_id in held if of == run),
            ),
            failed=tuple(save_status(s) for s in journal.saves(run, (SaveState.FAILED,))),
            durable=tuple(save_status(s) for s in journal.newest_durable(run, DURABLE_SHOWN)),
        )
        for run in sorted({*journal.runs(), *(run for run, _ in held)})
    ]
    return Status(
        release=__version__,
        pid=pid,
        boot_id=boot_id,
        heartbeat=heartbeat,
        sent_bytes=reading.sent_bytes,
        retries=reading.retries,
        throttled_s=reading.throttled_s,
        runs=tuple(runs),
    )
