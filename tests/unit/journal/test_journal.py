from __future__ import annotations

import sqlite3
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_tiering.errors import ConfigError, ErrorKind
from ckpt_tiering.journal.journal import Journal
from ckpt_tiering.journal.rows import NewSave, ObjectRow, SaveRow
from ckpt_tiering.model.events import Event, EventKind
from ckpt_tiering.model.ids import SaveId
from ckpt_tiering.model.lifecycle import OBJECT_MOVES, ObjectState, SaveState, check_move
from ckpt_tiering.model.plan import PlannedObject
from tests.unit.model.documents import file_entry
from tests.unit.world import open_journal

if TYPE_CHECKING:
    from pathlib import Path

RUN = "memory://bucket/run"
EVENT = Event(kind=EventKind.STAGED, at=1.0, run=RUN)
UNSTORABLE = Event(kind=EventKind.DURABLE, at=1.0, fields={"x": object()})  # type: ignore[dict-item]


class Killed(BaseException):
    """The process ends here."""


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return journal_in(tmp_path)


def journal_in(directory: Path, owner: str = "me") -> Journal:
    return open_journal(directory / "journal.db", Journal, owner)


def new_save(
    step: int = 100, *, repeat: int = 0, run: str = RUN, incarnation: str = "abcd"
) -> NewSave:
    return NewSave(
        run=run,
        store_options="{}",
        save_id=str(SaveId(step, incarnation, repeat)),
        step=step,
        name="last",
        node="n00000",
        num_nodes=1,
        ranks=(0, 1),
        metadata={"loss": 1.5},
        directory="/nvme/x",
        snapshot_at=1.0,
        staged_at=2.0,
        objects=tuple(
            PlannedObject(key=f"k{i}", is_pack=bool(i), size_bytes=10, crc=2**64 - 1, part_bytes=3)
            for i in range(2)
        ),
        files=(("r000000/f/a", file_entry("a")), ("r000001/f/b", file_entry("b", rank=1))),
    )


def admitted(journal: Journal, step: int = 100, **changes: Any) -> SaveRow:
    save = new_save(step, **changes)
    assert journal.admit(save, EVENT)
    row = journal.find(save.run, save.save_id)
    assert row is not None
    return row


def at(journal: Journal, row: SaveRow, *states: SaveState) -> SaveRow:
    for state in states:
        fields: dict[str, Any] = {"durable_at": 9.0} if state is SaveState.DURABLE else {}
        row = journal.move(row, state, **fields)
    return row


S = SaveState
TO_DURABLE = (S.UPLOADED, S.VERIFIED, S.PUBLISHED, S.DURABLE)


# --- what goes in comes out -----------------------------------------------------------------------


def test_a_save_is_remembered_over_a_restart(journal: Journal, tmp_path: Path) -> None:
    row = admitted(journal)
    journal.close()
    again = journal_in(tmp_path, "another")
    assert again.find(RUN, row.save_id) == row
    assert (row.ranks, row.metadata, row.total_bytes) == ((0, 1), {"loss": 1.5}, 20)
    assert [f.entry.path for f in again.files(row)] == ["a", "b"]
    assert [(o.key, o.crc, o.is_pack) for o in again.objects(row)] == [
        ("k0", 2**64 - 1, False),
        ("k1", 2**64 - 1, True),
    ]
    again.close()


def test_p1_a_save_enters_once(journal: Journal) -> None:
    admitted(journal)
    assert not journal.admit(new_save(), EVENT)
    assert len(journal.events_after(0)) == 1
    assert journal.admit(new_save(run="memory://bucket/other"), EVENT), "runs do not collide"
    assert journal.runs() == ["memory://bucket/other", RUN]


def test_p1_a_save_that_enters_failed_is_never_worked_on(journal: Journal) -> None:
    failed = Event(kind=EventKind.FAILED, at=1.0)
    assert journal.admit(new_save(), EVENT, failed=failed, error="why")
    (row,) = journal.saves()
    assert (row.state, row.error) == (SaveState.FAILED, "why")
    assert journal.claim(1e9, 60) is None
    assert [r["kind"] for _, r in journal.events_after(0)] == ["staged", "failed"]


def test_others_may_read_while_the_agent_writes(journal: Journal, tmp_path: Path) -> None:
    row = admitted(journal)
    reader = Journal(tmp_path / "journal.db", read_only=True)
    with journal.transaction():
        assert reader.find(RUN, row.save_id) == row
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        reader.emit(EVENT)
    reader.close()


def test_a_journal_begins_empty_and_survives_a_power_cut(tmp_path: Path) -> None:
    fresh = Journal(tmp_path / "fresh.db")
    assert not fresh.saves()
    assert not fresh.removals()
    pragmas = [fresh._query(f"PRAGMA {p}")[0][0] for p in ("journal_mode", "synchronous")]
    assert pragmas == ["wal", 2]
    fresh.close()


def test_a_journal_of_a_newer_release_is_refused(journal: Journal, tmp_path: Path) -> None:
    with journal.transaction() as db:
        db.execute("PRAGMA user_version = 99")
    journal.close()
    with pytest.raises(ConfigError, match="version 99") as caught:
        journal_in(tmp_path)
    assert caught.value.kind is ErrorKind.AGENT_VERSION


# --- moves and events are one ---------------------------------------------------------------------


@settings(max_examples=25)
@given(st.lists(st.sampled_from(SaveState), max_size=12))
def test_p1_only_legal_moves_are_made_and_each_leaves_its_event(
    tmp_path_factory: pytest.TempPathFactory, wishes: list[SaveState]
) -> None:
    journal = journal_in(tmp_path_factory.mktemp("j"))
    row, state, events = admitted(journal), S.STAGED, 1
    for wish in wishes:
        try:
            check_move(state, wish)
        except ValueError:
            with pytest.raises(ValueError, match="can't go"):
                journal.move(row, wish, EVENT)
        else:
            journal.move(row, wish, EVENT)
            state, events = wish, events + 1
        found = journal.save(row.id)
        assert found is not None
        assert found.state is state
        assert len(journal.events_after(0)) == events
    journal.close()


def test_p1_a_change_and_its_event_are_kept_together_or_not_at_all(journal: Journal) -> None:
    row = admitted(journal)
    changes: list[Any] = [
        lambda: journal.move(row, S.UPLOADED, UNSTORABLE, uploaded_at=3.0),
        lambda: journal.update(row, UNSTORABLE, error="x"),
        lambda: journal.forget(row, UNSTORABLE),
        lambda: journal.admit(new_save(200), UNSTORABLE),
        lambda: journal.admit(new_save(200), EVENT, failed=UNSTORABLE),
        lambda: journal.drop_removals(RUN, row.save_id, UNSTORABLE),
    ]
    journal.request_removal(RUN, "{}", save_id=row.save_id)
    for change in changes:
        with pytest.raises(TypeError):
            change()
        assert journal.saves() == [row]
        assert len(journal.events_after(0)) == len(journal.removals()) == 1
        assert len(journal.files(row)) == 2


def test_p1_an_agent_killed_within_a_change_made_none(journal: Journal, tmp_path: Path) -> None:
    row = admitted(journal)

    def be_killed() -> None:
        with journal.transaction() as db:
            db.execute("UPDATE saves SET state = 'durable'")
            raise Killed

    with pytest.raises(Killed):
        be_killed()
    assert journal.saves() == [row]
    with journal.transaction() as db:
        db.execute("UPDATE saves SET state = 'durable'")
        copy = tmp_path / "at the power cut"
        copy.mkdir()
        for file in tmp_path.glob("journal.db*"):
            (copy / file.name).write_bytes(file.read_bytes())
        db.execute("UPDATE saves SET state = 'staged'")
    found = journal_in(copy).find(RUN, row.save_id)
    assert found is not None
    assert found.state is S.STAGED


def test_a_move_ends_an_error_that_was_noted(journal: Journal) -> None:
    row = journal.update(admitted(journal), error="throttled", attempts=3, retry_at=99.0)
    assert (row.error, row.attempts, row.retry_at) == ("throttled", 3, 99.0)
    row = journal.move(row, S.UPLOADED)
    assert (row.error, row.attempts, row.retry_at) == (None, 0, 0.0)


def test_what_is_gone_or_unknown_is_not_changed(journal: Journal) -> None:
    row = admitted(journal)
    with pytest.raises(ValueError, match="settable"):
        journal.update(row, state="durable")
    journal.forget(row, EVENT)
    with pytest.raises(ValueError, match="is gone"):
        journal.update(row, EVENT)
    with pytest.raises(ValueError, match="is gone"):
        journal.move(row, S.UPLOADED, EVENT)
    assert len(journal.events_after(0)) == 2, "nothing is told of what did not happen"
    assert journal.objects(row) == []


def test_p4_objects_move_by_their_own_rules(journal: Journal) -> None:
    row = admitted(journal)

    def obj() -> ObjectRow:
        return journal.objects(row)[0]

    for old in ObjectState:
        for new in ObjectState:
            with journal.transaction() as db:
                db.execute("UPDATE objects SET state = ?", (old,))
            if new in OBJECT_MOVES[old]:
                journal.move_object(obj(), new)
                assert obj().state is new
            else:
                with pytest.raises(ValueError, match="can't go"):
                    journal.move_object(obj(), new)


def test_p4_an_object_that_goes_back_forgets_its_upload_and_counts(journal: Journal) -> None:
    row = admitted(journal)
    first, other = journal.objects(row)
    journal.move_object(first, ObjectState.OPENING)
    journal.move_object(first, ObjectState.OPEN, upload_id="u1")
    journal.add_part(first, 2, "old")
    journal.add_part(first, 2, "new")
    journal.add_part(first, 1, "one")
    assert journal.parts(first) == {1: "one", 2: "new"}
    journal.move_object(first, ObjectState.PLANNED)
    again = journal.objects(row)[0]
    assert (again.upload_id, again.resends, journal.parts(again)) == (None, 1, {})
    assert journal.objects(row)[1] == other


# --- leases ---------------------------------------------------------------------------------------


def test_p1_a_save_in_hand_is_not_given_to_another(journal: Journal, tmp_path: Path) -> None:
    admitted(journal)
    other = journal_in(tmp_path, "other")
    assert journal.claim(10.0, 60.0) is not None
    assert other.claim(11.0, 60.0) is None
    assert journal.claim(11.0, 60.0) is not None, "the owner goes on with it"
    assert other.claim(71.5, 60.0) is not None, "a lease ends"
    assert journal.claim(72.0, 60.0) is None
    journal.reclaim()
    assert journal.claim(72.0, 60.0) is not None
    other.close()


def test_removals_come_first_then_what_did_not_fail_then_the_oldest(journal: Journal) -> None:
    first, second, third, last = (admitted(journal, step) for step in (1, 2, 3, 4))
    journal.update(first, attempts=2)
    journal.move(last, S.REMOVING)
    order = []
    while (row := journal.claim(10.0, 60.0)) is not None:
        order.append(row.step)
        journal.forget(row, EVENT)
    assert order == [4, second.step, third.step, 1]


def test_a_save_waits_until_it_is_due(journal: Journal) -> None:
    row = admitted(journal)
    journal.update(row, retry_at=50.0)
    assert journal.claim(49.0, 60.0) is None
    assert journal.next_due() == 50.0
    assert journal.claim(50.0, 60.0) is not None
    at(journal, row, *TO_DURABLE, S.SETTLED)
    assert journal.next_due() is None
    assert journal.claim(1e9, 60.0) is None


# --- what removals need to know -------------------------------------------------------------------


def test_p6_the_newest_durable_save_is_found_by_its_id(journal: Journal) -> None:
    for step, repeat in ((7, 10), (7, 2), (6, 0), (7, 0)):
        at(journal, admitted(journal, step, repeat=repeat), *TO_DURABLE)
    admitted(journal, 9)  # not durable
    gone = at(journal, admitted(journal, 8), *TO_DURABLE)
    at(journal, gone, S.REMOVING)
    at(journal, admitted(journal, 99, run="memory://bucket/other"), *TO_DURABLE)
    found = [s.save_id for s in journal.newest_durable(RUN, 3)]
    assert found == ["000000000007-abcd.10", "000000000007-abcd.2", "000000000007-abcd"]
    assert [s.save_id for s in journal.newest_durable(RUN, 1)] == found[:1]
    assert len(journal.newest_durable(RUN, 99)) == 4
    assert journal.newest_durable("memory://none", 1) == []


def test_p6_pins_hold_until_they_are_replaced(journal: Journal) -> None:
    journal.pin(RUN, ["a", "b"])
    journal.pin("other", ["c"])
    journal.pin(RUN, ["b"])
    assert (journal.pins(RUN), journal.pins("other")) == (frozenset("b"), frozenset("c"))


def test_wishes_are_kept_once_and_a_name_becomes_saves(journal: Journal) -> None:
    for _ in range(2):
        journal.request_removal(RUN, "{}", name="last", not_of="abcd")
    (wish,) = journal.removals()
    journal.request_removal(RUN, "{}", save_id="s1")
    journal.resolve_removal(wish, ["s1", "s2"])
    assert [(w.save_id, w.name, w.not_of) for w in journal.removals()] == [
        ("s1", "", ""),
        ("s2", "", ""),
    ]
    journal.drop_removals(RUN, "s1", EVENT)
    assert [w.save_id for w in journal.removals()] == ["s2"]


def test_events_are_numbered_and_forgotten_when_they_were_copied(journal: Journal) -> None:
    assert journal.newest_event() == 0
    for step in (0, None):
        journal.emit(Event(kind=EventKind.DURABLE, at=0.0, step=step, fields={"bytes": 0}))
    (first, record), (second, other) = journal.events_after(0)
    assert (record, other["kind"]) == (
        {"kind": "durable", "at": 0.0, "step": 0, "bytes": 0},
        "durable",
    )
    assert "step" not in other
    journal.drop_events(second)
    assert (journal.events_after(0), journal.newest_event()) == ([], second)
    journal.emit(EVENT)
    assert journal.events_after(first)[0][0] == second + 1, "numbers are never used again"


def test_what_a_store_can_do_is_kept(journal: Journal) -> None:
    assert journal.capabilities(RUN) is None
    journal.set_capabilities(RUN, "{1}")
    journal.set_capabilities(RUN, "{2}")
    assert journal.capabilities(RUN) == "{2}"
