from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pytest

from ckpt_tiering.errors import NotFoundError, TransientError
from ckpt_tiering.model.ids import SaveId
from ckpt_tiering.model.layout import commit_key, save_prefix
from ckpt_tiering.pipeline.remove import remove_from_store
from ckpt_tiering.pipeline.resolve import durable_ids, load_save, read_info
from ckpt_tiering.stores.base import DeleteFailure
from ckpt_tiering.stores.wrapper import WrapperStore
from ckpt_tiering.testing.faults import Fault
from tests.unit.world import POOR, World, world

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

VICTIM, NEIGHBOUR = SaveId(100, "abcd"), SaveId(200, "abcd")


def test_p6_the_manifest_goes_first(node: World) -> None:
    node.durable()
    node.store.calls.clear()
    assert remove_from_store(node.session, VICTIM) == 2
    deletes = [c.key for c in node.store.calls if c.verb == "delete"]
    assert deletes[0] == commit_key(VICTIM)
    assert node.stored() == []


def test_p6_other_saves_stay_whole(node: World) -> None:
    node.durable()
    node.durable(step=200)
    repeat = node.durable(save_id=SaveId(100, "abcd", 1))  # its key begins like the victim's
    remove_from_store(node.session, VICTIM)
    assert durable_ids(node.session) == [NEIGHBOUR, SaveId.parse(repeat.save_id)]
    for save_id in durable_ids(node.session):
        load_save(node.session, save_id)
    assert node.stored(save_prefix(VICTIM)) == []


@pytest.mark.parametrize("nth", [1, 2])
@pytest.mark.parametrize("when", ["before", "after"])
def test_p6_a_removal_that_was_cut_is_no_save_and_can_be_repeated(
    node: World, nth: int, when: str
) -> None:
    node.durable()
    for extra in range(20):  # more than the retries of a minute
        fault = Fault(verb="delete", nth=nth + extra, when="before")
        node.faults.add(fault if when == "before" else Fault(verb="delete", nth=nth, when="after"))
    with contextlib.suppress(TransientError):
        remove_from_store(node.session, VICTIM)
    if nth > 1 or when == "after":
        with pytest.raises(NotFoundError):
            read_info(node.session, VICTIM)
    node.faults.heal()
    remove_from_store(node.session, VICTIM)
    assert node.stored() == []


def test_removing_nothing_is_fine(node: World) -> None:
    assert remove_from_store(node.session, VICTIM) == 0


@pytest.mark.parametrize("ours", ["saves/000000000100-abcd/n00000/f/big", "p"])
def test_p6_open_uploads_of_the_save_end_and_no_others(node: World, ours: str) -> None:
    key = ours if ours.startswith("saves") else f"{save_prefix(VICTIM)}n00000/p/0000.tar"
    node.memory.create_upload(key)
    kept = node.memory.create_upload(f"{save_prefix(NEIGHBOUR)}n00000/f/big")
    remove_from_store(node.session, VICTIM)
    assert [u.upload_id for u in node.memory.list_uploads("")] == [kept]


def test_a_store_that_lists_no_uploads_is_not_asked(tmp_path: Path) -> None:
    with world(tmp_path, can=POOR) as node:
        node.durable()
        remove_from_store(node.session, VICTIM)
        assert node.store.count("list_uploads") == 0
        assert node.stored() == []


class KeepsSome(WrapperStore):
    """A store whose policy forbids to delete some keys."""

    def __init__(self, inner: World, kept: str) -> None:
        super().__init__(inner.store)
        self.kept = kept

    def delete(self, keys: Sequence[str]) -> tuple[DeleteFailure, ...]:
        kept = [key for key in keys if self.kept in key]
        self.inner.delete([key for key in keys if key not in kept])
        return tuple(DeleteFailure(key, "AccessDenied") for key in kept)


def test_p6_if_the_manifest_stays_everything_stays(node: World) -> None:
    node.durable()
    before = node.stored()
    object.__setattr__(node.session, "store", KeepsSome(node, "commits/"))
    with pytest.raises(TransientError, match="AccessDenied") as caught:
        remove_from_store(node.session, VICTIM)
    assert commit_key(VICTIM) in str(caught.value)
    assert "DeleteObject" in (caught.value.hint or "")
    assert node.stored() == before


def test_what_could_not_be_deleted_is_reported(node: World) -> None:
    node.durable()
    object.__setattr__(node.session, "store", KeepsSome(node, ".tar"))
    with pytest.raises(TransientError, match=r"1 of 2 objects can't be deleted; .*0000\.tar"):
        remove_from_store(node.session, VICTIM)
