"""What a trainer knows of its saves: what it handed over, what the status page says of it.

Never blocks on the agent or the store; waiting is looking at a small file again and again.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckpt_tiering.agent.client import heartbeat_age, read_status
from ckpt_tiering.agent.protocol import RunStatus, SaveStatus
from ckpt_tiering.agent.protocol import Status as StatusPage
from ckpt_tiering.errors import SaveFailedError, WaitTimeoutError
from ckpt_tiering.model.catalog import SaveInfo
from ckpt_tiering.model.ids import SaveId
from ckpt_tiering.observe.lag import DurablePoint, Trainer, lag_metrics

if TYPE_CHECKING:
    from ckpt_tiering.clock import Clock
    from ckpt_tiering.model.layout import StagingLayout

__all__ = ["DurableSave", "Ledger", "Status"]

_log = logging.getLogger(__name__)

HEARTBEAT_ALIVE_S = 5.0
_POLL_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class DurableSave:
    """A save that became durable. Times are seconds since the epoch.

    Attributes:
        save_id: Its id.
        step: Its training step.
        name: The user's name for it.
        snapshot_at: When its state was captured.
        durable_at: When its commit was seen.
        upload_seconds: Seconds from the first byte to the last.
        total_bytes: Bytes of its objects.
    """

    save_id: str
    step: int
    name: str | None
    snapshot_at: float
    durable_at: float
    upload_seconds: float
    total_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """What this node knows of its run.

    Attributes:
        pending: Saves that are staged here and not durable yet.
        failed: Saves that were staged here and can't become durable.
        last_durable: Newest durable save that passed this node, or that was resumed from.
        agent_alive: Whether the agent gave a sign of life within five seconds.
        heartbeat_age: Seconds since its last one; None if there never was one.
    """

    pending: tuple[SaveStatus, ...]
    failed: tuple[SaveStatus, ...]
    last_durable: SaveStatus | SaveInfo | None
    agent_alive: bool
    heartbeat_age: float | None


class Ledger:
    """The saves of one run on this node, as one trainer process sees them.

    Args:
        layout: The staging directory.
        run: URL of the run's root.
        incarnation: Token of this start of the job.
        clock: Where time comes from.
    """

    def __init__(self, layout: StagingLayout, run: str, incarnation: str, clock: Clock) -> None:
        self._layout = layout
        self._run = run
        self._incarnation = incarnation
        self._clock = clock
        self._started_at = clock.now()
        self._first_step: int | None = None
        self._stall_s: float | None = None
        self._handed_over: dict[str, int] = {}  # id -> bytes, in the order of the hand-overs
        self._unwanted: set[str] = set()
        self._not_staged: dict[str, str] = {}
        self._resumed: SaveInfo | None = None
        self._reported_durable: set[str] = set()
        self._raised: set[str] = set()

    # --- what the trainer tells --------------------------------------------------------------

    def rename(self, incarnation: str) -> None:
        """Take another token for this start of the job; before the first save."""
        self._incarnation = incarnation

    def began(self, step: int) -> None:
        """Note the first step that this trainer is known to be at."""
        if self._first_step is None:
            self._first_step = step

    def handed_over(self, save_id: str, num_bytes: int, stall_s: float) -> None:
        """Note a save that was sealed, and for how long the step loop stood still for it."""
        self._handed_over[save_id] = num_bytes
        self._stall_s = stall_s

    def not_staged(self, save_id: str, error: str) -> None:
        """Note a save that was captured and could not be written to NVMe."""
        self._handed_over.pop(save_id, None)
        self._not_staged[save_id] = error

    def unwanted(self, save_id: str) -> None:
        """Note that the removal of a save was asked for: it need not become durable."""
        self._unwanted.add(save_id)

    def resumed(self, save: SaveInfo) -> None:
        """Note the save that training went on from."""
        self._resumed = save
        self._first_step = save.step

    # --- what is known -----------------------------------------------------------------------

    def _page(self) -> tuple[StatusPage | None, RunStatus]:
        page = read_status(self._layout)
        empty = RunStatus(run=self._run, pending=(), failed=(), durable=())
        return page, page.run(self._run) if page else empty

    def pending(self) -> list[str]:
        """Return the saves that are staged here and not known to be through, oldest first."""
        _, run = self._page()
        return sorted(self._pending_bytes(run), key=SaveId.parse)

    def _pending_bytes(self, run: RunStatus) -> dict[str, int]:
        """Return the bytes of each pending save.

        The agent hears of saves in the order of their hand-overs. So one that it does not call
        pending, though it knows it or a later one, is through: durable, failed or removed.
        """
        pending = {s.save_id: s.total_bytes for s in run.pending} | dict.fromkeys(run.incomplete, 0)
        known = pending.keys() | {s.save_id for s in (*run.failed, *run.durable)}
        heard = False
        for save_id, num_bytes in reversed(list(self._handed_over.items())):
            heard = heard or save_id in known
            if save_id not in pending and (heard or save_id in self._unwanted):
                del self._handed_over[save_id]
            else:
                pending.setdefault(save_id, num_bytes)
        return pending

    def wait(self, timeout: float | None, *, not_before: float = 0.0) -> None:
        """Wait until nothing is pending.

        Args:
            timeout: Seconds; None for no bound.
            not_before: Monotonic time; believe no older status page.

        Raises:
            WaitTimeoutError: Something is still pending; says what, and why.
        """
        deadline = None if timeout is None else self._clock.monotonic() + timeout
        while True:
            page, run = self._page()
            age = heartbeat_age(page, self._clock) if page else None
            fresh = not not_before or (
                age is not None and self._clock.monotonic() - age > not_before
            )
            pending = self._pending_bytes(run)
            if fresh and not pending:
                return
            if deadline is not None and self._clock.monotonic() >= deadline:
                raise self._timed_out(sorted(pending, key=SaveId.parse), timeout or 0.0)
            self._clock.sleep(_POLL_S)

    def _timed_out(self, pending: list[str], timeout: float) -> WaitTimeoutError:
        page, run = self._page()
        known = {s.save_id: s for s in run.pending}
        details = []
        for save_id in pending:
            save = known.get(save_id)
            why = f": {save.error}" if save and save.error else ""
            details.append(f"{save_id} ({save.state if save else 'not taken in yet'}{why})")
        age = heartbeat_age(page, self._clock) if page else None
        agent = (
            "no agent was ever seen" if age is None else f"the agent's last sign: {age:.0f} s ago"
        )
        return WaitTimeoutError(
            f"{len(pending)} saves are not durable after {timeout:.0f} s ({agent}): "
            f"{', '.join(details)}",
            hint=f"see `ckpt-tiering status {self._layout.staging}`; the agent goes on with them",
        )

    def raise_failed(self, *, quiet: bool) -> None:
        """Report the saves of this job that failed for good, each once.

        Args:
            quiet: Log instead of raising.

        Raises:
            SaveFailedError: One or more did.
        """
        _, run = self._page()
        failed = {s.save_id: s.error or "" for s in run.failed} | self._not_staged
        fresh = {i: SaveId.parse(i) for i in failed if i not in self._raised}
        self._raised.update(fresh)
        mine = {i: save for i, save in fresh.items() if save.incarnation == self._incarnation}
        if not mine:
            return
        message = "; ".join(f"save of step {s.step} ({i}): {failed[i]}" for i, s in mine.items())
        if not quiet:
            step = min(mine.values()).step
            raise SaveFailedError(f"failed for good: {message}", step=step)
        _log.error("failed for good: %s", message)

    def raise_not_staged(self) -> None:
        """Report saves that could not be written to NVMe, each once.

        Raises:
            SaveFailedError: One or more could not.
        """
        fresh = {i: why for i, why in self._not_staged.items() if i not in self._raised}
        self._raised.update(fresh)
        if fresh:
            raise SaveFailedError("; ".join(f"save {i}: {why}" for i, why in fresh.items()))

    def status(self) -> Status:
        """Return what is known of the run."""
        page, run = self._page()
        age = heartbeat_age(page, self._clock) if page else None
        return Status(
            pending=run.pending,
            failed=run.failed,
            last_durable=self._newest_durable(run),
            agent_alive=age is not None and age < HEARTBEAT_ALIVE_S,
            heartbeat_age=age,
        )

    def _newest_durable(self, run: RunStatus) -> SaveStatus | SaveInfo | None:
        known: list[SaveStatus | SaveInfo] = [*run.durable[:1]]
        if self._resumed is not None:
            known.append(self._resumed)
        return max(known, key=lambda s: SaveId.parse(s.save_id), default=None)

    def metrics(self, step: int) -> dict[str, float]:
        """Return the metrics of `ckpt_tiering.model.events.METRICS` at a training step."""
        self.began(step)
        page, run = self._page()
        return lag_metrics(
            step=step,
            now=self._clock.now(),
            trainer=Trainer(
                started_at=self._started_at,
                first_step=self._first_step or 0,
                stall_s=self._stall_s,
                backlog=tuple(self._pending_bytes(run).values()),
            ),
            durable=_durable_point(self._newest_durable(run)),
            heartbeat_age_s=heartbeat_age(page, self._clock) if page else None,
            retries=page.retries if page else 0,
            throttled_s=page.throttled_s if page else 0.0,
        )

    def new_durable(self) -> list[DurableSave]:
        """Return the saves of this node that became durable since the last call, oldest first."""
        fresh = []
        _, run = self._page()
        for save in reversed(run.durable):
            if save.save_id in self._reported_durable or save.durable_at is None:
                continue
            self._reported_durable.add(save.save_id)
            if save.durable_at < self._started_at:
                continue  # before this trainer's time
            fresh.append(
                DurableSave(
                    save_id=save.save_id,
                    step=save.step,
                    name=save.name,
                    snapshot_at=save.snapshot_at,
                    durable_at=save.durable_at,
                    upload_seconds=(save.uploaded_at or 0.0) - (save.started_at or 0.0),
                    total_bytes=save.total_bytes,
                )
            )
        return fresh


def _durable_point(save: SaveStatus | SaveInfo | None) -> DurablePoint | None:
    if save is None:
        return None
    if isinstance(save, SaveInfo):
        return DurablePoint(step=save.step, snapshot_at=save.snapshot_at)
    return DurablePoint(
        step=save.step,
        snapshot_at=save.snapshot_at,
        staged_at=save.staged_at,
        started_at=save.started_at,
        uploaded_at=save.uploaded_at,
        total_bytes=save.total_bytes,
    )
