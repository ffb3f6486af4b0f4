from __future__ import annotations

from ckpt_tiering.model.events import METRICS, EventKind

# Alerts and dashboards of users match on these: add, never change.
KINDS = [
    "snapshot",
    "staged",
    "uploaded",
    "verified",
    "durable",
    "tiered",
    "evicted",
    "deleted",
    "skipped",
    "superseded",
    "retry_storm",
    "credentials_expired",
    "credentials_refreshed",
    "agent_lost",
    "agent_restarted",
    "torn",
    "lag_exceeded",
    "corrupt",
    "restored",
    "failed",
    "removal_refused",
    "agent_started",
    "agent_stopped",
]
NAMES = [
    "durable_lag_steps",
    "durable_lag_seconds",
    "last_durable_step",
    "backlog_bytes",
    "staged",
    "stall_seconds",
    "stage_seconds",
    "upload_seconds",
    "upload_bytes_per_second",
    "retries",
    "throttled_seconds",
    "agent_heartbeat_age",
]


def test_p10_the_names_of_events_are_frozen() -> None:
    assert [kind.value for kind in EventKind][: len(KINDS)] == KINDS


def test_p10_the_names_of_metrics_are_frozen() -> None:
    assert list(METRICS)[: len(NAMES)] == [f"ckpt/{name}" for name in NAMES]
    assert all(METRICS.values())
