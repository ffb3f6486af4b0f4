from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from ckpt_tiering.errors import CredentialError, IntegrityError, TransientError
from ckpt_tiering.journal.journal import Journal
from ckpt_tiering.model.lifecycle import ObjectState, SaveState
from ckpt_tiering.testing.faults import Fault
from tests.unit.world import POOR, URL, World, world

if TYPE_CHECKING:
    from pathlib import Path

FILES = {"a.pt": bytes(9 << 20), "b.json": b"{}"}
KEYS = [
    "saves/000000000100-abcd/n00000/f/a.pt",
    "saves/000000000100-abcd/n00000/p/0000.tar",
]


def how_verified(node: World) -> list[str | None]:
    return [o.verified for o in node.journal.objects(node.find("000000000100-abcd"))]


def test_p3_the_checksums_of_the_store_are_compared(node: World) -> None:
    row = node.upload(node.admitted(FILES))
    node.store.calls.clear()
    assert node.verify(row).state is SaveState.VERIFIED
    assert how_verified(node) == ["checksum", "checksum"]
    assert node.store.count("get") == 0
    (event,) = node.events("verified")
    assert event["verified"] == "checksum"


def test_p3_a_store_without_checksums_is_read_back_and_labelled(tmp_path: Path) -> None:
    with world(tmp_path, can=POOR) as node:
        row = node.verified(FILES)
        assert row.state is SaveState.VERIFIED
        assert how_verified(node) == ["read-back", "read-back"]
        assert node.store.count("get") == 2
        assert node.events("verified")[0]["verified"] == "read-back"


def test_p3_an_object_without_a_reported_checksum_is_read_back(node: World) -> None:
    row = node.upload(node.admitted(FILES))
    full = URL.prefix + KEYS[1]
    stored = node.bucket.objects[full]
    object.__setattr__(stored, "crc64nvme", None)
    node.verify(row)
    assert how_verified(node) == ["checksum", "read-back"]
    assert node.events("verified")[0]["verified"] == "checksum,read-back"


def spoil(node: World, how: str) -> None:
    full = URL.prefix + KEYS[0]
    stored = node.bucket.objects[full]
    if how == "gone":
        del node.bucket.objects[full]
    elif how == "shorter":
        object.__setattr__(stored, "data", stored.data[:-1])
    else:
        node.damage(KEYS[0], at=5_000_000)
        if stored.crc64nvme is not None:
            object.__setattr__(node.bucket.objects[full], "crc64nvme", 12345)


@pytest.mark.parametrize("how", ["gone", "shorter", "other bytes"])
@pytest.mark.parametrize("can", [None, POOR], ids=["honest", "poor"])
def test_p3_b18_what_the_store_has_wrongly_is_sent_again(
    tmp_path: Path, how: str, can: Any
) -> None:
    with world(tmp_path, **({"can": can} if can else {})) as node:
        row = node.upload(node.admitted(FILES))
        spoil(node, how)
        row = node.verify(row)
        assert row.state is SaveState.STAGED
        states = [o.state for o in node.journal.objects(row)]
        assert states == [ObjectState.PLANNED, ObjectState.VERIFIED]
        (event,) = node.events("corrupt")
        assert KEYS[0] in event["keys"]
        assert event["reaction"] == "sent again"
        assert node.meter.read().corrupt_uploads == 1
        node.store.calls.clear()
        assert node.verify(node.upload(row)).state is SaveState.VERIFIED
        assert node.store.count("put") == 0, "what was right is not sent again"
        assert node.read(KEYS[0]) == FILES["a.pt"]


def test_p5_a_store_that_is_always_wrong_ends_the_save_after_a_bound(node: World) -> None:
    row = node.admitted(FILES)
    for _ in range(3):
        row = node.upload(row)
        spoil(node, "other bytes")
        row = node.verify(row)
        assert row.state is SaveState.STAGED
    row = node.upload(row)
    spoil(node, "other bytes")
    with pytest.raises(IntegrityError, match="4 times") as caught:
        node.verify(row)
    assert KEYS[0] in str(caught.value)
    assert caught.value.hint


class DiesBeforeMoving(Journal):
    """An agent that is killed after it put back objects, before it put back their save."""

    def move(self, *args: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt


def test_p1_an_agent_killed_while_it_puts_objects_back_leaves_nothing_unverified(
    node: World,
) -> None:
    row = node.upload(node.admitted(FILES))
    spoil(node, "other bytes")
    node.replace_journal(DiesBeforeMoving)
    with pytest.raises(KeyboardInterrupt):
        node.verify(row)
    node.restart_agent()
    row = node.verify(node.find(row.save_id))
    assert row.state is SaveState.STAGED
    row = node.verify(node.upload(row))
    assert row.state is SaveState.VERIFIED
    assert how_verified(node) == ["checksum", "checksum"]
    assert node.read(KEYS[0]) == FILES["a.pt"]


def test_p4_a_read_back_that_is_cut_is_a_question_not_an_answer(tmp_path: Path) -> None:
    with world(tmp_path, can=POOR) as node:
        row = node.upload(node.admitted(FILES))
        node.faults.add(Fault(verb="get", when="cut"))
        assert node.verify(row).state is SaveState.VERIFIED
        assert node.meter.read().retries == 1


def test_p4_what_was_verified_before_an_error_is_not_asked_again(node: World) -> None:
    row = node.upload(node.admitted(FILES))
    node.faults.add(Fault(verb="head", key="a.pt", error=lambda: CredentialError("expired")))
    with pytest.raises(CredentialError):
        node.verify(row)
    node.verify(row)
    assert node.find(row.save_id).state is SaveState.VERIFIED
    heads = [c.key for c in node.store.calls if c.verb == "head"]
    assert sorted(heads) in ([KEYS[0], KEYS[0], KEYS[1]], [KEYS[0], KEYS[0], KEYS[1], KEYS[1]])


def test_p5_a_store_that_never_answers_ends_within_a_bound(node: World) -> None:
    row = node.upload(node.admitted(FILES))
    node.faults.add(Fault(verb="head", nth=None))
    with pytest.raises(TransientError):
        node.verify(row)
    assert node.find(row.save_id).state is SaveState.UPLOADED
