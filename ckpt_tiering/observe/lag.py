"""How far durability lags behind training: computed on the trainer's side, from the status page.

Both lags rise without the agent's help, so a dead agent can't look like a healthy one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["DurablePoint", "Trainer", "lag_metrics"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DurablePoint:
    """A durable save, as far as the lag is concerned. Times are seconds since the epoch.

    Attributes:
        step: Its training step.
        snapshot_at: When its state was captured.
        staged_at: When it was complete on NVMe; None if it was not staged on this node.
        started_at: When its upload began.
        uploaded_at: When the store had all its objects.
        total_bytes: Bytes of its objects.
    """

    step: int
    snapshot_at: float
    staged_at: float | None = None
    started_at: float | None = None
    uploaded_at: float | None = None
    total_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """What the trainer itself knows.

    Attributes:
        started_at: When this trainer began, seconds since the epoch; the lag counts from here
            while nothing is durable.
        first_step: Step that it began at.
        stall_s: Seconds that the step loop stood still for the newest save.
        backlog: Bytes of each save that is staged on this node and not durable.
    """

    started_at: float
    first_step: int
    stall_s: float | None
    backlog: Sequence[int]


def lag_metrics(  # noqa: PLR0913  what the metrics are made of, all by keyword
    *,
    step: int,
    now: float,
    trainer: Trainer,
    durable: DurablePoint | None,
    heartbeat_age_s: float | None,
    retries: int,
    throttled_s: float,
) -> dict[str, float]:
    """Return the metrics of `ckpt_tiering.model.events.METRICS` that have a value now.

    Args:
        step: Current training step.
        now: Seconds since the epoch.
        trainer: What the trainer knows.
        durable: Newest durable save; None if there is none.
        heartbeat_age_s: Seconds since the agent's last sign of life; None if none was ever seen.
        retries: Repeated requests since the agent started.
        throttled_s: Seconds that requests waited on purpose since the agent started.
    """
    since = durable.snapshot_at if durable else trainer.started_at
    values: dict[str, float] = {
        "ckpt/durable_lag_steps": max(0, step - (durable.step if durable else trainer.first_step)),
        "ckpt/durable_lag_seconds": max(0.0, now - since),
        "ckpt/backlog_bytes": sum(trainer.backlog),
        "ckpt/staged": len(trainer.backlog),
        "ckpt/retries": retries,
        "ckpt/throttled_seconds": throttled_s,
    }
    if trainer.stall_s is not None:
        values["ckpt/stall_seconds"] = trainer.stall_s
    if heartbeat_age_s is not None:
        values["ckpt/agent_heartbeat_age"] = heartbeat_age_s
    if durable is not None:
        values["ckpt/last_durable_step"] = durable.step
        if durable.staged_at is not None:
            values["ckpt/stage_seconds"] = max(0.0, durable.staged_at - durable.snapshot_at)
        if durable.started_at is not None and durable.uploaded_at is not None:
            seconds = max(0.0, durable.uploaded_at - durable.started_at)
            values["ckpt/upload_seconds"] = seconds
            if seconds > 0:  # wall clocks are set back at times
                values["ckpt/upload_bytes_per_second"] = durable.total_bytes / seconds
    return values
