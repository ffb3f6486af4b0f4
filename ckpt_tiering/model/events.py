"""What happened: events, and the names of the metrics. One table, frozen by a test."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["METRICS", "Event", "EventKind"]


class EventKind(StrEnum):
    """Kinds of events. Append only: users' alerts match on them."""

    SNAPSHOT = "snapshot"
    STAGED = "staged"
    UPLOADED = "uploaded"
    VERIFIED = "verified"
    DURABLE = "durable"
    TIERED = "tiered"
    EVICTED = "evicted"
    DELETED = "deleted"
    SKIPPED = "skipped"
    SUPERSEDED = "superseded"
    RETRY_STORM = "retry_storm"
    CREDENTIALS_EXPIRED = "credentials_expired"
    CREDENTIALS_REFRESHED = "credentials_refreshed"
    AGENT_LOST = "agent_lost"
    AGENT_RESTARTED = "agent_restarted"
    TORN = "torn"
    LAG_EXCEEDED = "lag_exceeded"
    CORRUPT = "corrupt"
    RESTORED = "restored"
    FAILED = "failed"
    REMOVAL_REFUSED = "removal_refused"
    AGENT_STARTED = "agent_started"
    AGENT_STOPPED = "agent_stopped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One thing that happened.

    Attributes:
        kind: What.
        at: Seconds since the epoch, UTC.
        run: URL of the run's root; empty for what concerns the agent as a whole.
        save_id: The save it is about; empty if none.
        step: Training step of the save; None if none.
        fields: More, as scalars; units are in the names.
    """

    kind: EventKind
    at: float
    run: str = ""
    save_id: str = ""
    step: int | None = None
    fields: Mapping[str, str | int | float | bool | None] = field(default_factory=dict)


METRICS: dict[str, str] = {
    "ckpt/durable_lag_steps": "current step minus step of the newest durable checkpoint",
    "ckpt/durable_lag_seconds": "now minus the time of the newest durable checkpoint's snapshot",
    "ckpt/last_durable_step": "step of the newest durable checkpoint",
    "ckpt/backlog_bytes": "bytes staged on this node and not durable yet",
    "ckpt/staged": "saves staged on this node and not durable yet",
    "ckpt/stall_seconds": "seconds that the step loop stood still for the newest save",
    "ckpt/stage_seconds": "seconds from the snapshot until the newest durable save was staged",
    "ckpt/upload_seconds": "seconds from staged to uploaded of the newest durable save",
    "ckpt/upload_bytes_per_second": "bytes per second of that upload",
    "ckpt/retries": "requests to the store that were repeated, since the agent started",
    "ckpt/throttled_seconds": "seconds that requests waited for bandwidth or the store's throttle",
    "ckpt/agent_heartbeat_age": "seconds since the agent's last sign of life",
}
