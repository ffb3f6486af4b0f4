from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_tiering.errors import FormatError, NotFoundError
from ckpt_tiering.model.catalog import SaveInfo, newest_named
from ckpt_tiering.model.ids import SaveId
from ckpt_tiering.model.layout import commit_key, node_manifest_key
from ckpt_tiering.pipeline.resolve import (
    all_infos,
    durable_ids,
    load_save,
    newest,
    read_info,
)
from ckpt_tiering.stores.body import Body
from ckpt_tiering.testing.faults import Fault
from tests.unit.world import URL, World, world

if TYPE_CHECKING:
    from collections.abc import Sequence

ID = SaveId(100, "abcd")
SOME = {"a": b"1"}


def put(node: World, key: str, data: bytes) -> None:
    node.memory.put(key, Body.of_bytes(data))


@settings(max_examples=30)
@given(
    st.lists(
        st.builds(
            SaveId, st.integers(0, 12), st.sampled_from(["aaaa", "bbbb"]), st.integers(0, 12)
        ),
        unique=True,
        max_size=10,
    )
)
def test_the_newest_comes_first_by_rule_not_by_text_or_time(
    tmp_path_factory: pytest.TempPathFactory, ids: list[SaveId]
) -> None:
    with world(tmp_path_factory.mktemp("nvme")) as node:
        for save_id in ids:
            put(node, commit_key(save_id), b"{}")
        by_rule = sorted(ids, key=lambda i: (i.step, i.incarnation, i.repeat))
        assert durable_ids(node.session) == by_rule[::-1]


def test_a_tenth_repeat_is_newer_than_a_second(node: World) -> None:
    for repeat in (2, 10, 0):
        node.durable(SOME, save_id=SaveId(7, "abcd", repeat))
    found = newest(node.session)
    assert found is not None
    assert found.save_id == "000000000007-abcd.10"


def test_p2_files_of_others_below_commits_are_left_alone(
    node: World, caplog: pytest.LogCaptureFixture
) -> None:
    node.durable(SOME)
    strange = ["readme.txt", "000000000200-abcd", "000000000200-abcd.00.json", "x/1.json"]
    for name in strange:
        put(node, f"commits/{name}", b"hello")
    with caplog.at_level(logging.INFO):
        assert durable_ids(node.session) == [ID]
    assert all(name in caplog.text for name in strange)


def test_an_empty_store_has_no_newest_save(node: World) -> None:
    assert newest(node.session) is None
    with pytest.raises(NotFoundError):
        read_info(node.session, ID)


def test_p1_saves_without_a_commit_are_not_seen(node: World) -> None:
    node.publish(node.verified(SOME))
    assert newest(node.session) is None


@pytest.mark.parametrize("data", [b"", b"torn{", b"[]"])
def test_p9_an_unusable_manifest_is_passed_over_and_mentioned(
    node: World, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    node.durable(SOME)
    put(node, commit_key(SaveId(200, "abcd")), data)
    found = newest(node.session)
    assert found is not None
    assert found.step == 100
    assert "000000000200-abcd" in caplog.text


def test_p12_a_manifest_under_another_saves_name_is_refused(node: World) -> None:
    node.durable(SOME)
    put(node, commit_key(SaveId(200, "abcd")), node.read(commit_key(ID)))
    with pytest.raises(FormatError, match="manifest of save 000000000100"):
        read_info(node.session, SaveId(200, "abcd"))
    assert [info.step for info in all_infos(node.session)] == [100]


def test_a_save_that_vanishes_while_it_is_listed_is_passed_over(node: World) -> None:
    node.durable(SOME)
    node.durable(SOME, step=200)
    gone = Fault(verb="get", key=commit_key(SaveId(200, "abcd")), error=lambda: NotFoundError("x"))
    node.faults.add(gone)
    assert [info.step for info in all_infos(node.session)] == [100]


def test_p12_a_node_manifest_must_be_the_one_that_was_committed(node: World) -> None:
    node.durable(SOME)
    key = node_manifest_key(ID, "n00000")
    put(node, key, node.read(key).replace(b'"a"', b'"b"'))
    with pytest.raises(FormatError, match="SHA-256 differs") as caught:
        load_save(node.session, ID)
    assert key in str(caught.value)
    node.memory.delete([key])
    with pytest.raises(NotFoundError):
        load_save(node.session, ID)


def test_a_save_says_what_it_is(node: World) -> None:
    node.durable(SOME, name="best.ckpt", metadata={"loss": 0.5})
    info = read_info(node.session, ID)
    assert (info.run, info.id, info.step) == (str(URL), ID, 100)
    assert (info.name, info.metadata, info.num_files) == ("best.ckpt", {"loss": 0.5}, 1)
    assert info.url == "memory://bucket/run/commits/000000000100-abcd.json"
    assert load_save(node.session, ID).info == info


# --- names ----------------------------------------------------------------------------------------


def infos(names: Sequence[str | None]) -> list[SaveInfo]:
    return [
        SaveInfo(
            run=str(URL),
            save_id=str(SaveId(step, "abcd")),
            step=step,
            name=name,
            metadata={},
            snapshot_at=0.0,
            total_bytes=0,
            num_files=0,
            num_nodes=1,
            verified="checksum",
        )
        for step, name in enumerate(names)
    ]


@pytest.mark.parametrize(
    ("names", "wanted", "step"),
    [
        (["a/last.ckpt", "a/last.ckpt"], "a/last.ckpt", 1),
        (["a/last.ckpt", "b/last.ckpt"], "a/last.ckpt", 0),
        (["x/v0/last.ckpt", "x/v1/last.ckpt"], "/other/v0/last.ckpt", 0),
        (["x/v0/last.ckpt", "x/v1/last.ckpt"], "last.ckpt", 1),
        (["a/last.ckpt", None], "last.ckpt", 0),
        (["a/last.ckpt", None], "best.ckpt", None),
        (["last.ckpt"], "/other/node/last.ckpt", 0),
        (["a/b/last.ckpt"], "/nowhere/last.ckpt", None),
        (["not-last.ckpt"], "last.ckpt", None),
        ([None], "", None),
    ],
)
def test_a_name_finds_the_longest_common_tail_then_the_newest(
    names: list[str | None], wanted: str, step: int | None
) -> None:
    found = newest_named(infos(names), wanted)
    assert (found.step if found else None) == step


def test_names_are_looked_for_in_the_store(node: World) -> None:
    node.durable(SOME, name="a/last.ckpt")
    node.durable(SOME, name="a/other.ckpt", step=200)
    found = newest_named(all_infos(node.session), "/elsewhere/a/last.ckpt")
    assert found is not None
    assert found.step == 100
    assert newest_named(all_infos(node.session), "nothing") is None
