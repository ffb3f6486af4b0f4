from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tiering.model.events import METRICS
from ckpt_tiering.observe.lag import DurablePoint, Trainer, lag_metrics

TRAINER = Trainer(started_at=1000.0, first_step=50, stall_s=0.25, backlog=(10, 20))
DURABLE = DurablePoint(
    step=100,
    snapshot_at=1100.0,
    staged_at=1101.5,
    started_at=1102.0,
    uploaded_at=1104.0,
    total_bytes=4000,
)


def metrics(**changes: Any) -> dict[str, float]:
    values: dict[str, Any] = {
        "step": 130,
        "now": 1160.0,
        "trainer": TRAINER,
        "durable": DURABLE,
        "heartbeat_age_s": 0.5,
        "retries": 3,
        "throttled_s": 1.5,
    }
    return lag_metrics(**values | changes)


def test_p5_all_metrics_have_a_value_once_something_is_durable() -> None:
    assert metrics() == {
        "ckpt/durable_lag_steps": 30,
        "ckpt/durable_lag_seconds": 60.0,
        "ckpt/last_durable_step": 100,
        "ckpt/backlog_bytes": 30,
        "ckpt/staged": 2,
        "ckpt/stall_seconds": 0.25,
        "ckpt/stage_seconds": 1.5,
        "ckpt/upload_seconds": 2.0,
        "ckpt/upload_bytes_per_second": 2000.0,
        "ckpt/retries": 3,
        "ckpt/throttled_seconds": 1.5,
        "ckpt/agent_heartbeat_age": 0.5,
    }
    assert set(metrics()) == set(METRICS)


def test_p5_while_nothing_is_durable_the_lag_counts_from_the_start() -> None:
    values = metrics(durable=None, heartbeat_age_s=None)
    assert values["ckpt/durable_lag_steps"] == 80
    assert values["ckpt/durable_lag_seconds"] == 160.0
    assert "ckpt/last_durable_step" not in values
    assert "ckpt/agent_heartbeat_age" not in values


@given(
    step=st.integers(0, 10**6),
    now=st.floats(0, 1e10),
    later=st.floats(0, 1e6),
    durable=st.none() | st.just(DURABLE),
)
def test_p5_the_lag_rises_without_anybodys_help(
    step: int, now: float, later: float, durable: DurablePoint | None
) -> None:
    first = metrics(step=step, now=now, durable=durable)
    second = metrics(step=step + 1, now=now + later, durable=durable)
    for name in ("ckpt/durable_lag_steps", "ckpt/durable_lag_seconds"):
        assert 0 <= first[name] <= second[name]


@pytest.mark.parametrize("uploaded_at", [1102.0, 1000.0])
def test_p10_a_clock_that_was_set_back_makes_no_wild_numbers(uploaded_at: float) -> None:
    point = DurablePoint(
        step=100,
        snapshot_at=1100.0,
        staged_at=1090.0,
        started_at=1102.0,
        uploaded_at=uploaded_at,
        total_bytes=4000,
    )
    values = metrics(durable=point, now=900.0)
    assert values["ckpt/upload_seconds"] == values["ckpt/stage_seconds"] == 0.0
    assert values["ckpt/durable_lag_seconds"] == 0.0
    assert "ckpt/upload_bytes_per_second" not in values


def test_a_save_that_was_resumed_from_says_nothing_of_this_nodes_upload() -> None:
    values = metrics(durable=DurablePoint(step=100, snapshot_at=1100.0))
    assert not {n for n in values if "upload" in n or "stage_" in n}
