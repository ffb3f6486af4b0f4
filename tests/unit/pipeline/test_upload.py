from __future__ import annotations

import io
import os
import tarfile
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_tiering.errors import CredentialError, IntegrityError, TransientError
from ckpt_tiering.model.lifecycle import ObjectState, SaveState
from ckpt_tiering.stores.body import Body
from ckpt_tiering.testing.faults import Fault
from tests.unit.world import POOR, SMALL, World, world

if TYPE_CHECKING:
    from pathlib import Path

    from ckpt_tiering.journal.rows import SaveRow

PART = 3 << 20
BIG = bytes(range(251)) * 35_000  # over the 8 MiB of a pack, in three parts
FILES = {"big.bin": BIG, **SMALL}
BIG_KEY = "saves/000000000100-abcd/n00000/f/big.bin"
PACK_KEY = "saves/000000000100-abcd/n00000/p/0000.tar"


def staged(node: World) -> SaveRow:
    return node.admitted(FILES, part_bytes=PART)


def killed() -> Exception:
    """What no retry follows: stands for the end of the agent."""
    return CredentialError("killed")


def arrived(node: World) -> None:
    assert node.stored() == [BIG_KEY, PACK_KEY]
    assert node.read(BIG_KEY) == BIG
    with tarfile.open(fileobj=io.BytesIO(node.read(PACK_KEY))) as tar:
        for path, data in SMALL.items():
            member = tar.extractfile(path)
            assert member is not None
            assert member.read() == data


def test_p13_large_files_and_packs_arrive_as_they_are(node: World) -> None:
    row = node.upload(staged(node))
    assert row.state is SaveState.UPLOADED
    assert row.started_at is not None
    assert row.uploaded_at is not None
    arrived(node)
    assert [node.memory.tag_of(key) for key in node.stored()] == ["pending", "pending"]
    assert node.store.count("put_part") == 3
    (event,) = node.events("uploaded")
    assert event["bytes"] == row.total_bytes
    assert node.meter.read().sent_bytes == row.total_bytes


def test_nothing_to_send_is_uploaded(node: World) -> None:
    assert node.upload(node.admitted({})).state is SaveState.UPLOADED
    assert node.store.calls == []


def test_p8_every_window_asks_for_leave_before_it_goes(node: World) -> None:
    asked: list[int] = []
    object.__setattr__(node.session, "on_send", asked.append)
    row = node.upload(staged(node))
    assert sum(asked) == row.total_bytes
    assert max(asked) <= 1 << 20


# --- going on where another agent ended -----------------------------------------------------------


@pytest.mark.parametrize("nth", [1, 2, 3])
@pytest.mark.parametrize("when", ["before", "after"])
def test_p4_parts_that_the_store_has_are_not_sent_again(node: World, nth: int, when: str) -> None:
    row = staged(node)
    node.faults.add(
        Fault(verb="put_part", nth=nth, when="after", error=killed)
        if when == "after"
        else Fault(verb="put_part", nth=nth, error=killed)
    )
    with pytest.raises(CredentialError):
        node.upload(row)
    (upload,) = node.memory.list_uploads("")
    held = node.memory.list_parts(upload.key, upload.upload_id)
    assert isinstance(held, tuple)
    node.restart_agent()
    node.store.calls.clear()
    assert node.upload(row).state is SaveState.UPLOADED
    arrived(node)
    assert node.store.count("put_part") == 3 - len(held)
    assert node.store.count("create_upload") == 0
    assert node.memory.list_uploads("") == ()


def test_p4_an_upload_whose_id_was_never_noted_is_found(node: World) -> None:
    row = staged(node)
    node.faults.add(Fault(verb="create_upload", when="after", error=killed))
    with pytest.raises(CredentialError):
        node.upload(row)
    node.memory.create_upload(BIG_KEY)  # and another, by a retry below us
    foreign = node.memory.create_upload(BIG_KEY + "2")
    node.restart_agent()
    node.upload(row)
    arrived(node)
    assert node.store.count("create_upload") == 1
    assert [u.upload_id for u in node.memory.list_uploads("")] == [foreign]


def test_a_store_that_lists_no_uploads_gets_a_new_one(tmp_path: Path) -> None:
    with world(tmp_path, can=POOR) as node:
        row = staged(node)
        node.faults.add(Fault(verb="create_upload", when="after", error=killed))
        with pytest.raises(CredentialError):
            node.upload(row)
        assert node.upload(row).state is SaveState.UPLOADED
        arrived(node)


def test_p4_a_part_of_the_wrong_length_is_sent_again(node: World) -> None:
    row = staged(node)
    node.faults.add(Fault(verb="put_part", nth=None, error=killed))
    with pytest.raises(CredentialError):
        node.upload(row)
    node.faults.heal()
    (upload,) = node.memory.list_uploads("")
    node.memory.put_part(BIG_KEY, upload.upload_id, 2, Body.of_bytes(b"cut short"))
    node.memory.put_part(BIG_KEY, upload.upload_id, 9, Body.of_bytes(b"never planned"))
    node.upload(row)
    arrived(node)


def test_p4_a_completion_with_a_lost_reply_is_not_done_again(node: World) -> None:
    node.faults.add(Fault(verb="complete_upload", when="after"))
    assert node.upload(staged(node)).state is SaveState.UPLOADED
    assert node.store.count("put_part") == 3
    arrived(node)


def test_p4_a_completion_that_nobody_noted_is_seen_by_the_next_agent(node: World) -> None:
    row = staged(node)
    node.faults.add(Fault(verb="complete_upload", when="after", error=killed))
    with pytest.raises(CredentialError):
        node.upload(row)
    node.restart_agent()
    node.upload(row)
    assert node.store.count("put_part") == 3
    arrived(node)


@pytest.mark.parametrize("parts_known", [True, False])
def test_p4_an_upload_that_was_aborted_behind_our_back_starts_anew(
    node: World, parts_known: bool
) -> None:
    row = staged(node)
    verb = "complete_upload" if parts_known else "put_part"
    node.faults.add(Fault(verb=verb, error=killed))
    with pytest.raises(CredentialError):
        node.upload(row)
    (upload,) = node.memory.list_uploads("")
    node.memory.abort_upload(upload.key, upload.upload_id)
    with pytest.raises(TransientError, match="sent again") as caught:
        node.upload(row)
    assert caught.value.kind == "no_such_upload"
    assert node.upload(row).state is SaveState.UPLOADED
    arrived(node)


@settings(max_examples=25)
@given(st.data())
def test_p4_killed_at_any_requests_the_objects_arrive(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    verbs = ["put", "create_upload", "put_part", "list_parts", "complete_upload", "list_uploads"]
    with world(tmp_path_factory.mktemp("nvme")) as node:
        row = staged(node)
        for _ in range(data.draw(st.integers(1, 4))):
            node.faults.add(
                Fault(
                    verb=data.draw(st.sampled_from(verbs)),
                    nth=data.draw(st.integers(1, 2)),
                    when=data.draw(st.sampled_from(["before", "after"])),
                    error=killed,
                )
            )
        for _ in range(6):
            try:
                node.upload(row)
                break
            except CredentialError:
                node.restart_agent()
        arrived(node)
        assert node.find(row.save_id).state is SaveState.UPLOADED
        assert node.memory.list_uploads("") == ()


# --- bytes that are not what they were ------------------------------------------------------------


@pytest.mark.parametrize("path", ["big.bin", "model.pt"])
@pytest.mark.parametrize("how", ["flip", "cut", "gone"])
def test_p3_a_staged_file_that_changed_is_never_sent_whole(
    node: World, path: str, how: str
) -> None:
    row = staged(node)
    source = node.layout.staging / row.directory / "r000000/f" / path
    data = source.read_bytes()
    if how == "flip":
        source.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    elif how == "cut":
        os.truncate(source, len(data) - 1)
    else:
        source.unlink()
    with pytest.raises(IntegrityError) as caught:
        node.upload(row)
    assert path in str(caught.value) or PACK_KEY in str(caught.value)
    assert (BIG_KEY if path == "big.bin" else PACK_KEY) not in node.stored()
    assert node.find(row.save_id).state is SaveState.STAGED


@pytest.mark.parametrize("verb", ["put", "put_part"])
def test_p3_bytes_damaged_on_the_wire_are_sent_again_and_counted(node: World, verb: str) -> None:
    node.faults.add(Fault(verb=verb, error=lambda: IntegrityError("BadDigest")))
    node.upload(staged(node))
    assert node.meter.read().corrupt_uploads == 1
    arrived(node)


def test_p5_a_wire_that_damages_everything_ends_within_a_bound(node: World) -> None:
    node.faults.add(Fault(verb="put", nth=None, error=lambda: IntegrityError("BadDigest")))
    begun = node.clock.monotonic()
    with pytest.raises(TransientError, match="damaged on its way"):
        node.upload(node.admitted())
    assert node.clock.monotonic() - begun <= 120


def test_p5_parts_that_the_store_has_wrongly_are_sent_anew_three_times(node: World) -> None:
    row = staged(node)
    node.faults.add(
        Fault(verb="complete_upload", nth=None, error=lambda: IntegrityError("other part"))
    )
    for _ in range(3):
        with pytest.raises(TransientError, match="sent again"):
            node.upload(row)
        assert node.memory.list_uploads("") == ()
    with pytest.raises(IntegrityError, match="other part"):
        node.upload(row)
    (big, _) = node.journal.objects(row)
    assert (big.state, big.resends) == (ObjectState.OPEN, 3)
