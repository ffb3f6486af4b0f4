from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_tiering.agent.protocol import Status
from ckpt_tiering.agent.statuspage import DURABLE_SHOWN, PENDING_STATES, status_page
from ckpt_tiering.model.lifecycle import SaveState
from tests.unit.world import URL

if TYPE_CHECKING:
    from tests.unit.world import World

SOME = {"a": b"1"}


def page(node: World) -> Status:
    return status_page(node.journal, node.meter.read(), pid=7, boot_id="b", heartbeat=3.5)


def test_an_empty_journal_has_a_page(node: World) -> None:
    status = page(node)
    assert (status.pid, status.boot_id, status.heartbeat, status.runs) == (7, "b", 3.5, ())


def test_p5_each_save_is_where_it_belongs(node: World) -> None:
    node.durable(SOME, step=1, name="first")
    node.upload(node.admitted(SOME, step=2))
    failed = node.admitted(SOME, step=3)
    node.journal.move(failed, SaveState.FAILED, error="why")
    node.journal.move(node.durable(SOME, step=4), SaveState.REMOVING)
    node.admitted(SOME, step=5)
    node.settle(node.durable(SOME, step=6))
    node.meter.retried()
    status = Status.model_validate_json(page(node).model_dump_json())
    assert status.retries == 1
    assert status.sent_bytes > 0
    run = status.run(str(URL))
    assert [(s.step, s.state) for s in run.pending] == [(2, "uploaded"), (5, "staged")]
    assert [(s.step, s.error) for s in run.failed] == [(3, "why")]
    assert [(s.step, s.name) for s in run.durable] == [(6, None), (1, "first")]
    assert all(s.durable_at is not None for s in run.durable)


def test_only_the_newest_durable_saves_are_shown(node: World) -> None:
    for step in range(DURABLE_SHOWN + 3):
        row = node.admitted({}, step=step)
        for state in (SaveState.UPLOADED, SaveState.VERIFIED, SaveState.PUBLISHED):
            row = node.journal.move(row, state)
        node.journal.move(row, SaveState.DURABLE, durable_at=float(step))
    shown = page(node).run(str(URL)).durable
    assert [s.step for s in shown] == list(range(DURABLE_SHOWN + 2, 2, -1))


def test_pending_is_what_can_still_become_durable() -> None:
    over = {SaveState.DURABLE, SaveState.SETTLED, SaveState.FAILED, SaveState.REMOVING}
    assert set(PENDING_STATES) == set(SaveState) - over
