from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest

from ckpt_tiering.agent.ledger import Ledger
from ckpt_tiering.agent.statuspage import status_page
from ckpt_tiering.errors import SaveFailedError, WaitTimeoutError
from ckpt_tiering.fsio import boot_id
from ckpt_tiering.model.ids import SaveId
from ckpt_tiering.model.lifecycle import SaveState
from ckpt_tiering.pipeline.resolve import read_info
from tests.unit.world import URL

if TYPE_CHECKING:
    from ckpt_tiering.journal.rows import SaveRow
    from tests.unit.world import World

SOME = {"a": b"1"}


@pytest.fixture
def ledger(node: World) -> Ledger:
    node.clock.advance(1000)
    return new_ledger(node)


def new_ledger(node: World, incarnation: str = "abcd") -> Ledger:
    return Ledger(node.layout, str(URL), incarnation, node.clock)


def pulse(node: World, boot: str | None = None) -> None:
    """Write the status page as the agent does."""
    page = status_page(
        node.journal,
        node.meter.read(),
        pid=1,
        boot_id=boot or boot_id(),
        heartbeat=node.clock.monotonic(),
    )
    node.layout.status.write_bytes(page.model_dump_json().encode())


def hand_over(node: World, ledger: Ledger, step: int = 100, **changes: Any) -> SaveRow:
    row = node.admitted(SOME, step=step, **changes)
    ledger.handed_over(row.save_id, row.total_bytes, 0.25)
    return row


def finish(node: World, row: SaveRow) -> None:
    node.commit(node.publish(node.verify(node.upload(row))))


# --- what is pending ------------------------------------------------------------------------------


def test_without_an_agent_everything_handed_over_is_pending(node: World, ledger: Ledger) -> None:
    assert ledger.pending() == []
    row = hand_over(node, ledger)
    assert ledger.pending() == [row.save_id]
    status = ledger.status()
    assert (status.agent_alive, status.heartbeat_age, status.last_durable) == (False, None, None)


@pytest.mark.parametrize("content", [b"", b"torn{", b"{}", b"\xff"])
def test_p5_a_page_that_can_not_be_read_is_no_good_news(
    node: World, ledger: Ledger, content: bytes
) -> None:
    row = hand_over(node, ledger)
    node.layout.status.write_bytes(content)
    assert ledger.pending() == [row.save_id]


def test_p1_a_page_from_before_the_hand_over_knows_nothing_of_it(
    node: World, ledger: Ledger
) -> None:
    pulse(node)
    node.clock.advance(1)
    row = hand_over(node, ledger)
    assert ledger.pending() == [row.save_id]
    node.clock.advance(1)
    pulse(node)
    assert ledger.pending() == [row.save_id], "the agent says so, too"
    finish(node, row)
    node.clock.advance(1)
    pulse(node)
    assert ledger.pending() == []


def test_p1_a_page_from_before_a_reboot_is_no_sign_of_life(node: World, ledger: Ledger) -> None:
    node.clock.advance(50)
    pulse(node, boot="of another time")
    row = hand_over(node, ledger)
    assert ledger.pending() == [row.save_id]
    assert ledger.status().heartbeat_age is None
    assert not ledger.status().agent_alive


def test_waiting_ends_when_nothing_is_pending(node: World, ledger: Ledger) -> None:
    row = hand_over(node, ledger)

    def agent() -> None:
        finish(node, row)
        pulse(node)

    node.clock.at(node.clock.monotonic() + 3.0, agent)
    begun = node.clock.monotonic()
    ledger.wait(10.0)
    assert node.clock.monotonic() - begun == pytest.approx(3.0, abs=0.1)


def test_p5_waiting_is_bounded_and_says_what_for_and_why(node: World, ledger: Ledger) -> None:
    row = hand_over(node, ledger)
    node.journal.update(row, error="AccessDenied: s3:PutObject")
    node.clock.advance(1)
    pulse(node)
    other = hand_over(node, ledger, 200)
    begun = node.clock.monotonic()
    with pytest.raises(WaitTimeoutError) as caught:
        ledger.wait(10.0)
    assert node.clock.monotonic() - begun == pytest.approx(10.0, abs=0.1)
    message = str(caught.value)
    assert f"{row.save_id} (staged: AccessDenied: s3:PutObject)" in message
    assert f"{other.save_id} (not taken in yet)" in message
    assert "last sign: 10 s ago" in message
    assert "ckpt-tiering status" in (caught.value.hint or "")


def test_no_time_to_wait_still_looks_once(node: World, ledger: Ledger) -> None:
    ledger.wait(0.0)
    hand_over(node, ledger)
    with pytest.raises(WaitTimeoutError, match="no agent was ever seen"):
        ledger.wait(0.0)


def test_an_older_page_is_not_believed_where_that_is_asked_for(node: World, ledger: Ledger) -> None:
    pulse(node)
    not_before = node.clock.monotonic()
    with pytest.raises(WaitTimeoutError):
        ledger.wait(1.0, not_before=not_before)
    pulse(node)
    ledger.wait(1.0, not_before=not_before)


# --- what failed, what is durable -----------------------------------------------------------------


def test_p5_a_failed_save_is_raised_once_with_step_and_reason(node: World, ledger: Ledger) -> None:
    row = hand_over(node, ledger)
    node.journal.move(row, SaveState.FAILED, error="the bytes rotted")
    pulse(node)
    with pytest.raises(SaveFailedError, match=r"step 100 .*: the bytes rotted") as caught:
        ledger.raise_failed(quiet=False)
    assert caught.value.context == {"step": 100}
    ledger.raise_failed(quiet=False)


def test_a_failed_save_can_be_logged_instead(
    node: World, ledger: Ledger, caplog: pytest.LogCaptureFixture
) -> None:
    node.journal.move(hand_over(node, ledger), SaveState.FAILED, error="the bytes rotted")
    pulse(node)
    with caplog.at_level(logging.ERROR):
        ledger.raise_failed(quiet=True)
    assert "the bytes rotted" in caplog.text


def test_b08_failures_of_an_earlier_start_are_not_this_ones(node: World, ledger: Ledger) -> None:
    row = hand_over(node, ledger, save_id=SaveId(100, "earlier"))
    node.journal.move(row, SaveState.FAILED, error="x")
    pulse(node)
    ledger.raise_failed(quiet=False)


def test_new_durable_saves_are_told_once_oldest_first(node: World) -> None:
    finish(node, node.admitted(SOME, step=50))
    node.clock.advance(10)
    ledger = new_ledger(node)
    for step in (100, 200):
        finish(node, hand_over(node, ledger, step, name=f"s{step}"))
        node.clock.advance(1)
    pulse(node)
    fresh = ledger.new_durable()
    assert [(s.step, s.name) for s in fresh] == [(100, "s100"), (200, "s200")]
    assert all(s.upload_seconds >= 0 and s.total_bytes > 0 for s in fresh)
    assert ledger.new_durable() == []


def test_p5_the_lag_counts_from_the_newest_durable_save(node: World, ledger: Ledger) -> None:
    ledger.began(90)
    row = hand_over(node, ledger)
    node.clock.advance(5)
    metrics = ledger.metrics(130)
    assert metrics["ckpt/durable_lag_steps"] == 40
    assert metrics["ckpt/backlog_bytes"] == row.total_bytes
    assert "ckpt/agent_heartbeat_age" not in metrics
    finish(node, row)
    pulse(node)
    node.clock.advance(2)
    metrics = ledger.metrics(140)
    assert metrics["ckpt/durable_lag_steps"] == 40
    assert metrics["ckpt/durable_lag_seconds"] == pytest.approx(7.0)
    assert metrics["ckpt/agent_heartbeat_age"] == pytest.approx(2.0)
    assert metrics["ckpt/stall_seconds"] == 0.25
    assert metrics["ckpt/staged"] == 0


def test_the_save_that_was_resumed_from_counts_until_a_newer_one(
    node: World, ledger: Ledger
) -> None:
    finish(node, node.admitted(SOME))
    ledger.resumed(read_info(node.session, SaveId(100, "abcd")))
    assert ledger.metrics(110)["ckpt/durable_lag_steps"] == 10
    finish(node, hand_over(node, ledger, 200))
    pulse(node)
    last = ledger.status().last_durable
    assert last is not None
    assert last.step == 200
    node.clock.advance(6)
    assert not ledger.status().agent_alive


def test_a_tenth_repeat_is_pending_after_a_second(node: World, ledger: Ledger) -> None:
    for repeat in (10, 2):
        ledger.handed_over(str(SaveId(7, "abcd", repeat)), 1, 0.0)
    assert ledger.pending() == ["000000000007-abcd.2", "000000000007-abcd.10"]


def test_p1_a_save_that_waits_for_other_ranks_is_pending(node: World, ledger: Ledger) -> None:
    """Its agent answered, but admission is incomplete: no page will name it before rank 1 seals."""
    _, seal = node.stage(SOME, ranks_on_node=2)
    ledger.handed_over(seal.save_id, 1, 0.0)
    node.clock.advance(1)
    pulse(node)
    assert ledger.pending() == [seal.save_id]


def test_p1_a_page_from_before_a_reboot_does_not_end_a_wait(node: World, ledger: Ledger) -> None:
    node.clock.advance(10**6)
    pulse(node, boot="of another time")
    with pytest.raises(WaitTimeoutError):
        ledger.wait(1.0, not_before=100.0)
