from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_tiering.errors import (
    ConflictError,
    CredentialError,
    FormatError,
    NotFoundError,
    TransientError,
)
from ckpt_tiering.model.ids import SaveId
from ckpt_tiering.model.layout import commit_key, node_manifest_key
from ckpt_tiering.model.lifecycle import SaveState
from ckpt_tiering.model.manifest import Manifest, NodeManifest, decode, encode
from ckpt_tiering.pipeline.resolve import load_save
from ckpt_tiering.stores.body import Body
from ckpt_tiering.stores.memory import EVERYTHING, MemoryBucket
from ckpt_tiering.testing.faults import Fault
from tests.unit.model.documents import node_manifest
from tests.unit.world import POOR, World, world

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ID = SaveId(100, "abcd")
COMMIT = commit_key(ID)
MINE = node_manifest_key(ID, "n00000")
both_kinds = pytest.mark.parametrize("can", [EVERYTHING, POOR], ids=["conditional", "poor"])


def killed() -> Exception:
    return CredentialError("killed")


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[World]]:
    """Two nodes of one job."""
    bucket = MemoryBucket()
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                world(tmp_path / str(rank), bucket=bucket, node_rank=rank, num_nodes=2)
            )
            for rank in range(2)
        ]


def published(node: World) -> Any:
    return node.publish(node.verified({f"node{node.node_rank}.pt": b"x"}, rank=node.node_rank))


# --- one node -------------------------------------------------------------------------------------


@both_kinds
def test_p1_the_commit_comes_last_and_names_everything(tmp_path: Path, can: Any) -> None:
    with world(tmp_path, can=can) as node:
        row = node.durable(name="last", metadata={"loss": 0.5})
        assert row.state is SaveState.DURABLE
        puts = [c.key for c in node.store.calls if c.verb == "put"]
        assert puts[-2:] == [MINE, COMMIT]
        manifest = decode(Manifest, node.read(COMMIT), COMMIT)
        assert (manifest.name, manifest.metadata) == ("last", {"loss": 0.5})
        assert manifest.verified == ("checksum" if can is EVERYTHING else "read-back")
        whole = load_save(node.session, ID)
        assert {f.path for n in whole.nodes for f in n.files} == {
            "model.pt",
            "meta/config.json",
            "empty.flag",
        }
        (event,) = node.events("durable")
        assert event["verified"] == manifest.verified
        assert event["bytes"] == manifest.total_bytes


@both_kinds
@pytest.mark.parametrize("key", [MINE, COMMIT], ids=["node manifest", "manifest"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_p4_a_lost_reply_changes_nothing_and_is_told_once(
    tmp_path: Path, can: Any, key: str, when: Any
) -> None:
    with world(tmp_path, can=can) as node:
        node.faults.add(Fault(verb="put", key=key, when=when))
        assert node.durable().state is SaveState.DURABLE
        assert len(node.events("durable")) == 1


@both_kinds
@settings(max_examples=30)
@given(data=st.data())
def test_p1_p2_killed_at_any_requests_it_becomes_durable_exactly_once(
    tmp_path_factory: pytest.TempPathFactory, can: Any, data: st.DataObject
) -> None:
    with world(tmp_path_factory.mktemp("nvme"), can=can) as node:
        row = node.admitted()
        for _ in range(data.draw(st.integers(1, 4))):
            node.faults.add(
                Fault(
                    verb=data.draw(st.sampled_from(["put", "get", "head", "list"])),
                    nth=data.draw(st.integers(1, 4)),
                    when=data.draw(st.sampled_from(["before", "after"])),
                    error=killed,
                )
            )
        steps: dict[SaveState, Any] = {
            SaveState.STAGED: node.upload,
            SaveState.UPLOADED: node.verify,
            SaveState.VERIFIED: node.publish,
            SaveState.PUBLISHED: node.commit,
        }
        for _ in range(30):
            row = node.find(row.save_id)
            if row.state is SaveState.DURABLE:
                break
            assert COMMIT not in node.stored() or row.state is SaveState.PUBLISHED
            try:
                steps[row.state](row)
            except CredentialError:
                node.restart_agent()
        assert row.state is SaveState.DURABLE
        assert len(node.events("durable")) == 1
        node.faults.heal()
        load_save(node.session, ID)


@both_kinds
def test_p2_another_node_manifest_at_our_key_is_a_conflict(tmp_path: Path, can: Any) -> None:
    with world(tmp_path, can=can) as node:
        row = node.verified()
        foreign = encode(node_manifest(name="foreign"))
        node.memory.put(MINE, Body.of_bytes(foreign))
        with pytest.raises(ConflictError, match="another manifest") as caught:
            node.publish(row)
        assert caught.value.hint
        assert node.read(MINE) == foreign, "it is never overwritten"
        assert node.find(row.save_id).state is SaveState.VERIFIED


@both_kinds
def test_p2_another_manifest_at_the_commit_point_is_a_conflict(tmp_path: Path, can: Any) -> None:
    with world(tmp_path, can=can) as node:
        row = node.publish(node.verified())
        node.memory.put(COMMIT, Body.of_bytes(b"foreign"))
        with pytest.raises(ConflictError):
            node.commit(row)
        assert node.read(COMMIT) == b"foreign"
        assert node.events("durable") == []


def test_p4_a_commit_that_vanishes_is_not_taken_for_done(node: World) -> None:
    row = node.publish(node.verified())
    node.memory.put(COMMIT, Body.of_bytes(b"of a removal in progress"))

    def vanish() -> Exception:
        node.memory.delete([COMMIT])
        return NotFoundError("gone")

    node.faults.add(Fault(verb="get", key=COMMIT, error=vanish))
    with pytest.raises(TransientError, match="gone again"):
        node.commit(row)
    committed = node.commit(row)
    assert committed is not None
    assert COMMIT in node.stored()


def test_p2_the_bytes_of_a_node_manifest_are_fixed_before_they_are_sent(node: World) -> None:
    row = node.verified()
    node.faults.add(Fault(verb="put", key=MINE, error=killed))
    with pytest.raises(CredentialError):
        node.publish(row)
    noted = node.find(row.save_id)
    assert noted.node_manifest is not None
    assert noted.writer
    node.restart_agent()
    published = node.publish(noted)
    assert (published.writer, node.read(MINE)) == (noted.writer, noted.node_manifest)


# --- several nodes --------------------------------------------------------------------------------


def test_p1_nothing_is_committed_before_the_last_node_has_published(nodes: list[World]) -> None:
    first, second = nodes
    row = published(first)
    assert first.commit(row) is None
    assert COMMIT not in first.stored()
    other = published(second)
    assert second.commit(other) is not None
    assert first.commit(row) is not None
    assert decode(Manifest, first.read(COMMIT), COMMIT).num_nodes == 2


@pytest.mark.parametrize("writer", [0, 1])
def test_p1_who_wrote_the_commit_says_so_and_nobody_else(nodes: list[World], writer: int) -> None:
    rows = [published(node) for node in nodes]
    nodes[writer].commit(rows[writer])
    nodes[1 - writer].commit(rows[1 - writer])
    assert len(nodes[writer].events("durable")) == 1
    assert nodes[1 - writer].events("durable") == []
    assert nodes[1 - writer].find(str(ID)).state is SaveState.DURABLE


def test_p4_the_writer_that_was_killed_before_it_could_say_so_says_it_later(
    nodes: list[World],
) -> None:
    rows = [published(node) for node in nodes]
    nodes[0].faults.add(Fault(verb="put", key=COMMIT, when="after", error=killed))
    with pytest.raises(CredentialError):
        nodes[0].commit(rows[0])
    nodes[1].commit(rows[1])
    nodes[0].restart_agent()
    nodes[0].commit(rows[0])
    assert (len(nodes[0].events("durable")), nodes[1].events("durable")) == (1, [])


def test_p5_nodes_in_disagreement_are_told_apart(nodes: list[World]) -> None:
    first, second = nodes
    row = first.publish(first.verified({"a": b"1"}))
    second.publish(second.verified({"b": b"2"}, rank=1, name="another"))
    with pytest.raises(FormatError, match="n00000 has None, n00001 has 'another'"):
        first.commit(row)
    assert COMMIT not in first.stored()


def test_p1_more_manifests_than_nodes_are_no_save(node: World) -> None:
    row = node.publish(node.verified())
    stray = encode(node_manifest(node="n00007"))
    node.memory.put(node_manifest_key(ID, "n00007"), Body.of_bytes(stray))
    with pytest.raises(FormatError, match="names 2 nodes of 1"):
        node.commit(row)
    assert COMMIT not in node.stored()


def test_p12_a_node_manifest_that_is_none_is_refused(nodes: list[World]) -> None:
    row = published(nodes[0])
    nodes[0].memory.put(node_manifest_key(ID, "n00001"), Body.of_bytes(b"{}"))
    with pytest.raises(FormatError, match="n00001"):
        nodes[0].commit(row)


# --- afterwards -----------------------------------------------------------------------------------


def test_tags_say_committed_after_the_commit(node: World) -> None:
    row = node.durable()
    data = [o.key for o in node.journal.objects(row)]
    assert {node.memory.tag_of(key) for key in data} == {"pending"}
    assert node.settle(row).state is SaveState.SETTLED
    assert {node.memory.tag_of(key) for key in data} == {"committed"}


def test_a_store_without_tags_settles_without_them(tmp_path: Path) -> None:
    with world(tmp_path, can=POOR) as node:
        assert node.settle(node.durable()).state is SaveState.SETTLED
        assert node.store.count("tag") == 0


def test_p5_an_outage_leaves_it_where_it_was(node: World) -> None:
    row = node.publish(node.verified())
    node.faults.add(Fault(verb="put", nth=None, key=COMMIT))
    with pytest.raises(TransientError):
        node.commit(row)
    assert node.find(row.save_id).state is SaveState.PUBLISHED
    assert isinstance(decode(NodeManifest, node.read(MINE), MINE), NodeManifest)
