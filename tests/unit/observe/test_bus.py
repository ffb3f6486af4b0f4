from __future__ import annotations

import json
import os
import threading
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_tiering.journal.journal import Journal
from ckpt_tiering.model.events import Event, EventKind
from ckpt_tiering.observe.bus import EventLog, append_line, read_events
from tests.unit.world import open_journal

if TYPE_CHECKING:
    from pathlib import Path

NASTY = ["a\nb", "\u2028 \x85 \x0b \x1c", "\u00e4\U0001f600", '"}\\', "\udcff"]


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return open_journal(tmp_path / "journal.db", Journal)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "events.jsonl"


def emit(journal: Journal, *texts: str) -> None:
    for text in texts:
        journal.emit(Event(kind=EventKind.DURABLE, at=1.0, fields={"text": text}))


def texts(path: Path) -> list[Any]:
    return [record["text"] for record in read_events(path) if "text" in record]


# --- lines ----------------------------------------------------------------------------------------


@given(st.dictionaries(st.text(min_size=1, max_size=8), st.text(max_size=30) | st.integers()))
def test_p10_an_event_is_read_back_whatever_it_holds(
    tmp_path_factory: pytest.TempPathFactory, record: dict[str, Any]
) -> None:
    path = tmp_path_factory.mktemp("log") / "events.jsonl"
    append_line(path, record)
    append_line(path, {"next": 1})
    assert read_events(path) == [record, {"next": 1}]


@pytest.mark.parametrize("text", NASTY)
def test_p10_nasty_text_is_one_line(path: Path, text: str) -> None:
    append_line(path, {"text": text})
    assert path.read_bytes().count(b"\n") == 1
    assert texts(path) == [text]


@pytest.mark.parametrize(
    "text",
    ['{"SecretAccessKey": "opensesame"}', "http://user:opensesame@h/x", 'token": opensesame'],
)
def test_p10_a_secret_is_taken_out_and_the_line_stays_whole(
    path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "token" in text:
        monkeypatch.setenv("AWS_SESSION_TOKEN", "opensesame")
    append_line(path, {"error": text, "save_id": "x"})
    assert b"opensesame" not in path.read_bytes()
    (record,) = read_events(path)
    assert record["save_id"] == "x"
    assert "***" in record["error"]


def test_the_log_is_its_owners_alone(path: Path) -> None:
    append_line(path, {"a": 1})
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_log_that_is_not_there_has_no_events(path: Path) -> None:
    assert read_events(path) == []


def test_p10_lines_of_several_writers_do_not_mix(path: Path) -> None:
    def write(who: int) -> None:
        for number in range(50):
            append_line(path, {"who": who, "number": number, "pad": "x" * 2000})

    threads = [threading.Thread(target=write, args=(who,)) for who in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert Counter((r["who"], r["number"]) for r in read_events(path)) == Counter(
        (who, number) for who in range(4) for number in range(50)
    )


# --- each exactly once ----------------------------------------------------------------------------


def test_p5_events_go_from_the_journal_to_the_log(journal: Journal, path: Path) -> None:
    log = EventLog(journal, path)
    emit(journal, *NASTY)
    log.copy()
    log.copy()
    assert texts(path) == NASTY
    assert journal.events_after(0) == []
    emit(journal, "later")
    EventLog(journal, path).copy()
    assert texts(path) == [*NASTY, "later"]
    assert [r["seq"] for r in read_events(path)] == list(range(1, len(NASTY) + 2))


class DiesBeforeForgetting(Journal):
    """An agent that is killed between the copy and the forgetting."""

    def drop_events(self, up_to: int) -> None:
        raise KeyboardInterrupt


@settings(max_examples=60)
@given(data=st.data(), foreign=st.booleans())
def test_p5_an_event_is_there_once_wherever_the_power_was_cut(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, foreign: bool
) -> None:
    """The log may end after any byte of what was copied before the journal forgot it."""
    directory = tmp_path_factory.mktemp("log")
    path = directory / "events.jsonl"
    journal = open_journal(directory / "journal.db", DiesBeforeForgetting)
    emit(journal, *NASTY)
    for _ in range(2):
        with suppress(KeyboardInterrupt):
            EventLog(journal, path).copy()
        written = path.read_bytes()
        path.write_bytes(written[: data.draw(st.integers(0, len(written)))])
        if foreign and path.read_bytes().endswith(b"\n"):
            append_line(path, {"kind": "agent_lost"})  # a trainer's line, which has no number
    journal.close()
    survivor = open_journal(directory / "journal.db", Journal)
    EventLog(survivor, path).copy()
    emit(survivor, "after")
    EventLog(survivor, path).copy()
    assert sorted(texts(path), key=str) == sorted([*NASTY, "after"], key=str)
    survivor.close()


def test_p5_a_full_disk_costs_no_event(
    journal: Journal, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, real = EventLog(journal, path), os.write
    emit(journal, "one", "two", "three")
    left = [1000, 20, 0]

    def nearly_full(descriptor: int, data: bytes) -> int:
        room = left.pop(0) if left else len(data)
        if not room:
            raise OSError(28, "No space left on device")
        return real(descriptor, data[:room])

    monkeypatch.setattr(os, "write", nearly_full)
    with pytest.raises(OSError, match="No space left"):
        log.copy()
    with pytest.raises(OSError, match="No space left"):
        log.copy()
    log.copy()
    assert texts(path) == ["one", "two", "three"]
    assert [r["seq"] for r in read_events(path)] == [1, 2, 3]


def test_p5_many_lines_of_trainers_do_not_hide_the_last_number(
    journal: Journal, path: Path
) -> None:
    dying = open_journal(path.parent / "journal.db", DiesBeforeForgetting)
    emit(journal, "x" * 200_000, "y")
    with pytest.raises(KeyboardInterrupt):
        EventLog(dying, path).copy()
    for _ in range(300):
        append_line(path, {"kind": "corrupt", "pad": "z" * 1000})
    EventLog(journal, path).copy()
    assert [len(text) for text in texts(path)] == [200_000, 1]


def test_p5_a_journal_that_was_made_anew_is_heard(path: Path, tmp_path: Path) -> None:
    path.write_text(json.dumps({"seq": 500, "text": "old"}) + "\n")
    journal = open_journal(tmp_path / "new.db", Journal)
    emit(journal, "new")
    EventLog(journal, path).copy()
    assert texts(path) == ["old", "new"]
    assert journal.events_after(0) == []


@pytest.mark.parametrize("junk", [b"12\n", b"[]\n", b"null\n", b"{}\n", b"\xff\xfe\n", b"\n\n"])
def test_lines_that_are_no_events_are_passed_over(
    journal: Journal, path: Path, junk: bytes
) -> None:
    emit(journal, "one")
    EventLog(journal, path).copy()
    with path.open("ab") as file:
        file.write(junk)
    emit(journal, "two")
    EventLog(journal, path).copy()
    assert texts(path) == ["one", "two"]
