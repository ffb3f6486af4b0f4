from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_tiering.errors import CapacityError
from ckpt_tiering.journal.journal import Journal
from ckpt_tiering.model.layout import SEAL_NAME
from ckpt_tiering.model.lifecycle import SaveState
from ckpt_tiering.model.parts import MAX_OBJECT_BYTES
from ckpt_tiering.model.seal import decode_seal
from ckpt_tiering.pipeline.admit import Admission, admit, staged_directories
from tests.unit.model.documents import file_entry
from tests.unit.world import SMALL, URL, World, world

if TYPE_CHECKING:
    from pathlib import Path

TWO = {"ranks_on_node": 2}


def take(node: World, directory: Path, *, check: bool = True) -> Admission:
    return admit(node.journal, directory, 5.0, check_digests=check)


def test_a_whole_save_enters_with_its_objects_and_an_event(node: World) -> None:
    directory, seal = node.stage(name="last", metadata={"loss": 1.5})
    assert take(node, directory) is Admission.TAKEN
    row = node.find(seal.save_id)
    assert (row.state, row.name, row.metadata) == (SaveState.STAGED, "last", {"loss": 1.5})
    assert [r.source for r in node.journal.files(row)] == [f"r000000/f/{path}" for path in SMALL]
    assert all((directory / r.source).exists() for r in node.journal.files(row))
    (event,) = node.events("staged")
    assert (event["bytes"], event["files"]) == (sum(map(len, SMALL.values())), len(SMALL))


def test_p1_it_enters_once(node: World) -> None:
    directory, _ = node.stage()
    assert take(node, directory) is Admission.TAKEN
    assert take(node, directory) is Admission.KNOWN
    assert len(node.journal.saves()) == len(node.events("staged")) == 1


def test_p1_it_waits_for_all_ranks_of_the_node(node: World) -> None:
    directory, _ = node.stage({"a": b"1"}, **TWO)
    node.writer(rank=1, **TWO).open("b").close()  # staging, not sealed
    assert take(node, directory) is Admission.INCOMPLETE
    assert node.journal.saves() == []
    (directory / "r000001/seal.json.tmp").write_bytes(b"{}")
    assert take(node, directory) is Admission.INCOMPLETE


def test_ranks_enter_together(node: World) -> None:
    node.stage({"a": b"1"}, rank=1, **TWO)
    node.clock.advance(3)
    directory, seal = node.stage({"b": b"2"}, **TWO)
    assert take(node, directory) is Admission.TAKEN
    row = node.find(seal.save_id)
    assert row.ranks == (0, 1)
    assert row.staged_at - row.snapshot_at == 3.0, "of the first snapshot and the last byte"


def test_nothing_staged_is_incomplete(node: World, tmp_path: Path) -> None:
    (tmp_path / "save").mkdir()
    (tmp_path / "save/file").write_text("")
    assert take(node, tmp_path / "save") is Admission.INCOMPLETE


# --- B06: right name, no bytes --------------------------------------------------------------------


def damage(path: Path, how: str) -> None:
    size = path.stat().st_size
    match how:
        case "empty":
            os.truncate(path, 0)
        case "short":
            os.truncate(path, size - 1)
        case "zeros":
            path.write_bytes(bytes(size))
        case "missing":
            path.unlink()
        case "link":
            path.rename(path.with_name("elsewhere"))
            path.symlink_to("elsewhere")
        case "directory":
            path.unlink()
            path.mkdir()
        case _:
            raise AssertionError(how)


@pytest.mark.parametrize("how", ["empty", "short", "zeros", "missing", "link", "directory"])
def test_p1_b06_a_damaged_file_was_not_staged(node: World, how: str) -> None:
    directory, _ = node.stage()
    damage(directory / "r000000/f/model.pt", how)
    assert take(node, directory) is Admission.TORN
    (row,) = node.journal.saves()
    assert row.state is SaveState.FAILED
    assert node.journal.objects(row) == []
    (event,) = node.events("torn")
    assert event["save_id"] == directory.name
    assert "r000000/f/model.pt" in event["error"]


def test_p1_b06_all_damaged_files_are_named(node: World) -> None:
    directory, _ = node.stage({"a": b"1", "b": b"2", "c": b"3"})
    for name, how in {"a": "empty", "b": "zeros", "c": "missing"}.items():
        damage(directory / "r000000/f" / name, how)
    take(node, directory)
    (event,) = node.events("torn")
    assert all(f"/f/{name}" in event["error"] for name in "abc")


@pytest.mark.parametrize("how", ["empty", "short", "zeros"])
def test_p1_b06_a_damaged_seal_was_not_staged(node: World, how: str) -> None:
    directory, _ = node.stage()
    damage(directory / "r000000" / SEAL_NAME, how)
    assert take(node, directory) is Admission.TORN
    (event,) = node.events("torn")
    assert SEAL_NAME in event["error"]


def test_p1_b06_a_seal_of_a_bad_id_stops_nobody(node: World) -> None:
    directory, seal = node.stage()
    bent = seal.encode().replace(seal.save_id.encode(), b"latest")
    (directory / "r000000" / SEAL_NAME).write_bytes(bent)
    assert take(node, directory) is Admission.TORN


def test_what_this_agent_saw_being_written_is_not_read_again(node: World) -> None:
    directory, _ = node.stage()
    damage(directory / "r000000/f/model.pt", "zeros")
    assert take(node, directory, check=False) is Admission.TAKEN, "the upload compares anyway"


@settings(max_examples=20)
@given(flips=st.dictionaries(st.integers(0, 699), st.integers(0, 7), min_size=1, max_size=3))
def test_p1_b06_no_flipped_bit_gets_past_the_scan(
    tmp_path_factory: pytest.TempPathFactory, flips: dict[int, int]
) -> None:
    with world(tmp_path_factory.mktemp("nvme")) as node:
        directory, _ = node.stage()
        path = directory / "r000000/f/model.pt"
        data = bytearray(path.read_bytes())
        for at, bit in flips.items():
            data[at] ^= 1 << bit
        path.write_bytes(bytes(data))
        assert take(node, directory) is Admission.TORN


# --- saves that can never become durable ----------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"), [("name", "other"), ("num_nodes", 2), ("ranks_on_node", 3)]
)
def test_p5_ranks_in_disagreement_fail_at_once_and_say_in_what(
    node: World, field: str, value: Any
) -> None:
    node.stage({"a": b"1"}, **TWO)
    directory, seal = node.stage({"b": b"2"}, **TWO | {"rank": 1, field: value})
    assert take(node, directory) is Admission.TAKEN
    row = node.find(seal.save_id)
    assert row.state is SaveState.FAILED
    for text in (field, "rank 0", "rank 1"):
        assert text in (row.error or "")
    (event,) = node.events("failed")
    assert event["error"] == row.error
    assert take(node, directory) is Admission.KNOWN


def test_p11_a_path_that_two_ranks_give_fails_the_save(node: World) -> None:
    node.stage({"a": b"1"}, **TWO)
    directory, seal = node.stage({"a": b"2"}, rank=1, **TWO)
    take(node, directory)
    row = node.find(seal.save_id)
    assert row.state is SaveState.FAILED
    assert "'a' occurs twice" in (row.error or "")


def huge_seal(directory: Path) -> None:
    """Bend a seal so that its file is over the store's limit; the file gets a hole that long."""
    path = directory / "r000000" / SEAL_NAME
    seal = decode_seal(path.read_bytes(), "seal")
    size = 5 << 30
    huge = file_entry("a").model_copy(
        update={"size_bytes": size, "part_bytes": size, "parts": ("0" * 16,)}
    )
    path.write_bytes(seal.model_copy(update={"files": (huge,)}).encode())
    os.truncate(directory / "r000000/f/a", size)


def test_p5_b15_a_file_over_the_limit_fails_before_it_is_sent(
    node: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert MAX_OBJECT_BYTES > 48 << 40
    directory, seal = node.stage({"a": b"1"})
    huge_seal(directory)

    def over_the_limit(*_: object) -> None:
        raise CapacityError("'a': too large")

    monkeypatch.setattr("ckpt_tiering.model.plan.plan_parts", over_the_limit)
    assert take(node, directory, check=False) is Admission.TAKEN
    assert node.find(seal.save_id).state is SaveState.FAILED
    assert node.store.calls == []


class DiesAfterAdmission(Journal):
    """An agent that is killed after its first transaction."""

    def move(self, *args: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt


def test_p1_an_agent_killed_while_it_refuses_leaves_no_empty_save(node: World) -> None:
    """A refused save has no objects: as a staged one it would become durable, empty."""
    node.stage({"a": b"1"}, **TWO)
    directory, seal = node.stage({"b": b"2"}, rank=1, name="other", **TWO)
    node.replace_journal(DiesAfterAdmission)
    with contextlib.suppress(KeyboardInterrupt):
        take(node, directory)
    node.restart_agent()
    assert node.journal.claim(1e12, 60.0) is None
    assert node.find(seal.save_id).state is SaveState.FAILED


# --- what lies on the disk ------------------------------------------------------------------------


def test_staged_saves_are_found_oldest_first(node: World) -> None:
    assert list(staged_directories(node.layout)) == []
    for step in (300, 20, 1000):
        node.stage(step=step)
    names = [d.name for d in staged_directories(node.layout)]
    assert names == sorted(names)
    assert all(d.parent.parent == node.layout.run_dir(URL) for d in staged_directories(node.layout))
