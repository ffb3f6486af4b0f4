from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_tiering.agent.removals import Removals
from ckpt_tiering.errors import StorePermissionError
from ckpt_tiering.model.events import Event, EventKind
from ckpt_tiering.model.ids import SaveId
from ckpt_tiering.model.lifecycle import SaveState
from ckpt_tiering.pipeline.resolve import durable_ids
from ckpt_tiering.testing.faults import Fault
from tests.unit.agent.sessions import node_sessions
from tests.unit.world import URL, World, world

if TYPE_CHECKING:
    from ckpt_tiering.agent.sessions import Sessions
    from ckpt_tiering.journal.rows import SaveRow

RUN = str(URL)
SOME = {"a": b"1"}
FORGOTTEN = Event(kind=EventKind.AGENT_STOPPED, at=0.0)


@pytest.fixture
def removals(node: World, sessions: Sessions) -> Removals:
    return Removals(node.journal, sessions, node.clock)


def durable(node: World, step: int, name: str | None = None, incarnation: str = "abcd") -> SaveRow:
    return node.durable(SOME, step=step, name=name, save_id=SaveId(step, incarnation))


def wish(node: World, row: SaveRow) -> None:
    node.journal.request_removal(RUN, row.store_options, save_id=row.save_id)


def work_off(removals: Removals) -> int:
    """Work until there is nothing to do; return the number of turns."""
    turns = 0
    while removals.work():
        turns += 1
        assert turns < 100, "it never ends"
    return turns


def state_of(node: World, row: SaveRow) -> SaveState:
    return node.find(row.save_id).state


def test_p6_a_wish_waits_until_something_newer_is_durable(node: World, removals: Removals) -> None:
    old = durable(node, 100)
    wish(node, old)
    assert work_off(removals) == 0
    node.admitted(SOME, step=200)  # staged is not durable
    assert work_off(removals) == 0
    assert state_of(node, old) is SaveState.DURABLE
    durable(node, 300)
    work_off(removals)
    assert state_of(node, old) is SaveState.REMOVING


def test_p6_the_newest_of_one_step_is_what_counts(node: World, removals: Removals) -> None:
    newer = node.durable(SOME, save_id=SaveId(100, "abcd", 10))
    older = node.durable(SOME, save_id=SaveId(100, "abcd", 2))
    wish(node, newer)
    wish(node, older)
    work_off(removals)
    assert state_of(node, older) is SaveState.REMOVING
    assert state_of(node, newer) is SaveState.DURABLE


def test_p6_what_was_resumed_from_stays_and_the_refusal_is_told_once(
    node: World, removals: Removals
) -> None:
    old = durable(node, 100)
    durable(node, 200)
    node.journal.pin(RUN, [old.save_id])
    wish(node, old)
    for _ in range(3):
        assert work_off(removals) == 0
    assert state_of(node, old) is SaveState.DURABLE
    (event,) = node.events("removal_refused")
    assert event["save_id"] == old.save_id
    node.journal.pin(RUN, [])
    work_off(removals)
    assert state_of(node, old) is SaveState.REMOVING


def test_a_name_means_the_saves_of_it_that_others_made(node: World, removals: Removals) -> None:
    theirs = durable(node, 100, "last", "aaaa")
    mine = durable(node, 200, "last", "bbbb")
    other = durable(node, 300, "best", "aaaa")
    durable(node, 400, "last", "bbbb")
    node.journal.request_removal(RUN, mine.store_options, name="last", not_of="bbbb")
    work_off(removals)
    assert state_of(node, theirs) is SaveState.REMOVING
    assert state_of(node, mine) is state_of(node, other) is SaveState.DURABLE


def test_p6_a_save_from_before_this_journal_is_found_and_goes_after_a_newer_one(
    node: World, removals: Removals
) -> None:
    old = durable(node, 100, "last", "aaaa")
    node.journal.forget(old, FORGOTTEN)
    node.journal.request_removal(RUN, old.store_options, name="last", not_of="bbbb")
    work_off(removals)
    assert SaveId.parse(old.save_id) in durable_ids(node.session), "nothing newer yet"
    durable(node, 200, "last", "bbbb")
    work_off(removals)
    assert durable_ids(node.session) == [SaveId(200, "bbbb")]
    (event,) = node.events("deleted")
    assert (event["save_id"], event["objects"]) == (old.save_id, 2)
    assert node.journal.removals() == []


def test_p5_an_error_of_the_store_is_told_and_tried_again_later(
    node: World, removals: Removals
) -> None:
    old = durable(node, 100)
    node.journal.forget(old, FORGOTTEN)
    durable(node, 200)
    wish(node, old)
    node.faults.add(Fault(verb="delete", error=lambda: StorePermissionError("no s3:DeleteObject")))
    assert work_off(removals) == 0
    (event,) = node.events("retry_storm")
    assert "DeleteObject" in event["error"]
    assert work_off(removals) == 0, "not before some time has passed"
    node.clock.advance(31)
    assert work_off(removals) == 1
    assert durable_ids(node.session) == [SaveId(200, "abcd")]


@settings(max_examples=15)
@given(data=st.data())
def test_p6_no_sequence_of_saves_and_wishes_leaves_less_than_there_was(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    with world(tmp_path_factory.mktemp("nvme")) as node, node_sessions(node) as sessions:
        removals = Removals(node.journal, sessions, node.clock)
        for step in data.draw(st.permutations(range(6))):
            before = durable_ids(node.session)
            durable(node, step, data.draw(st.sampled_from([None, "last", "best"])))
            for victim in data.draw(st.lists(st.integers(0, 6), max_size=3)):
                node.journal.request_removal(RUN, "{}", save_id=str(SaveId(victim, "abcd")))
            work_off(removals)
            after = durable_ids(node.session)
            assert not before or after[0] >= before[0]
            for row in node.journal.saves(RUN, [SaveState.REMOVING]):
                assert SaveId.parse(row.save_id) < after[0]


def test_p6_a_wish_without_a_name_does_not_mean_all_saves_without_one(
    node: World, removals: Removals
) -> None:
    unnamed = durable(node, 100)
    node.journal.forget(unnamed, FORGOTTEN)
    durable(node, 200, "last")
    node.journal.request_removal(RUN, "{}", name="", not_of="zzzz")
    work_off(removals)
    assert SaveId.parse(unnamed.save_id) in durable_ids(node.session)


def test_p5_a_wish_for_no_save_does_not_end_the_agent(node: World, removals: Removals) -> None:
    durable(node, 100)
    node.journal.request_removal(RUN, "{}", save_id="latest")
    assert work_off(removals) == 0
