from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ckpt_tiering.agent.advance import MAX_BACKOFF_S, Advancer
from ckpt_tiering.errors import (
    ConflictError,
    CredentialError,
    IntegrityError,
    StorePermissionError,
    TransientError,
)
from ckpt_tiering.model.lifecycle import SaveState
from ckpt_tiering.testing.faults import Fault

if TYPE_CHECKING:
    from ckpt_tiering.agent.sessions import Sessions
    from ckpt_tiering.journal.rows import SaveRow
    from tests.unit.world import World

SOME = {"a": b"1"}


@pytest.fixture
def advancer(node: World, sessions: Sessions) -> Advancer:
    return Advancer(node.journal, sessions, node.clock, node.layout.staging)


def again(node: World, row: SaveRow) -> SaveRow:
    return node.find(row.save_id)


def fail_with(node: World, verb: str, error: type[Exception], **changes: Any) -> None:
    node.faults.add(
        Fault(verb=verb, **{"nth": None} | changes, error=lambda: error("it went wrong"))
    )


def test_each_step_takes_a_save_one_state_further(node: World, advancer: Advancer) -> None:
    row, seen = node.admitted(SOME), []
    while row.state is not SaveState.SETTLED:
        seen.append(row.state)
        advancer.advance(row)
        row = again(node, row)
    assert seen == ["staged", "uploaded", "verified", "published", "durable"]
    told = [e["kind"] for e in node.events()]
    assert told == ["staged", "uploaded", "verified", "durable"]


def test_a_missing_node_is_waited_for(node: World, advancer: Advancer) -> None:
    row = node.publish(node.verified(SOME, num_nodes=2))
    advancer.advance(row)
    row = again(node, row)
    assert (row.state, row.attempts) == (SaveState.PUBLISHED, 0)
    assert row.retry_at > node.clock.now()


@pytest.mark.parametrize("error", [TransientError, StorePermissionError, CredentialError, KeyError])
def test_p5_an_error_of_the_world_puts_the_save_back_and_says_so_once(
    node: World, advancer: Advancer, error: type[Exception]
) -> None:
    row = node.admitted(SOME)
    fail_with(node, "put", error)
    waits = []
    for _ in range(12):
        advancer.advance(row)
        row = again(node, row)
        assert row.state is SaveState.STAGED
        assert "it went wrong" in (row.error or "")
        waits.append(row.retry_at - node.clock.now())
    assert waits == sorted(waits)
    assert max(waits) == MAX_BACKOFF_S
    kind = "credentials_expired" if error is CredentialError else "retry_storm"
    assert len(node.events(kind)) == 1
    node.faults.heal()
    advancer.advance(row)
    row = again(node, row)
    assert (row.state, row.error, row.attempts) == (SaveState.UPLOADED, None, 0)


@pytest.mark.parametrize("error", [IntegrityError, ConflictError])
def test_p5_an_error_of_the_bytes_ends_the_save_loudly(
    node: World, advancer: Advancer, error: type[Exception]
) -> None:
    row = node.verified(SOME)
    fail_with(node, "put", error)
    advancer.advance(row)
    row = again(node, row)
    assert (row.state, row.error) == (SaveState.FAILED, "it went wrong")
    (event,) = node.events("failed")
    assert event["error_kind"] == error.default_kind  # type: ignore[attr-defined]
    assert len(node.events("corrupt")) == (error is IntegrityError)


def test_p5_a_staged_file_that_rotted_fails_the_save(node: World, advancer: Advancer) -> None:
    row = node.admitted(SOME)
    (Path(row.directory) / "r000000/f/a").write_bytes(b"2")
    advancer.advance(row)
    assert again(node, row).state is SaveState.FAILED
    (event,) = node.events("corrupt")
    assert event["where"] == "staged"


def test_p6_durable_stays_durable(node: World, advancer: Advancer) -> None:
    row = node.durable(SOME)
    fail_with(node, "tag", IntegrityError)
    advancer.advance(row)
    assert again(node, row).state is SaveState.DURABLE
    node.faults.heal()
    advancer.advance(again(node, row))
    assert again(node, row).state is SaveState.SETTLED


def test_p10_a_secret_in_an_error_is_not_kept(node: World, advancer: Advancer) -> None:
    row = node.admitted(SOME)
    node.faults.add(
        Fault(verb="put", nth=None, error=lambda: CredentialError("at http://me:s3cr3t@host/"))
    )
    advancer.advance(row)
    assert "s3cr3t" not in f"{again(node, row)}{node.events()}"


def test_credentials_are_read_anew_after_they_expired(
    node: World, advancer: Advancer, sessions: Sessions
) -> None:
    row = node.admitted(SOME)
    first = sessions.get(row.run, row.store_options)
    assert sessions.get(row.run, row.store_options) is first
    fail_with(node, "put", CredentialError, nth=1)
    advancer.advance(row)
    assert sessions.get(row.run, row.store_options) is not first


def test_p6_a_removal_deletes_store_disk_and_row(node: World, advancer: Advancer) -> None:
    row = node.journal.move(node.durable(SOME), SaveState.REMOVING)
    node.journal.request_removal(row.run, "{}", save_id=row.save_id)
    fail_with(node, "delete", StorePermissionError, nth=1)
    advancer.advance(row)
    assert again(node, row).state is SaveState.REMOVING, "tried until it is done"
    assert Path(row.directory).exists()
    advancer.advance(again(node, row))
    assert not node.journal.saves()
    assert not node.journal.removals()
    assert not node.stored()
    assert not Path(row.directory).exists()
    (event,) = node.events("deleted")
    assert event["objects"] == 2


def test_p6_nothing_outside_the_staging_disk_is_deleted(
    node: World, advancer: Advancer, tmp_path: Path
) -> None:
    (tmp_path / "precious").mkdir()
    row = node.journal.move(node.admitted(SOME), SaveState.REMOVING)
    with node.journal.transaction() as db:
        db.execute("UPDATE saves SET directory = ?", (str(tmp_path / "nvme/../precious"),))
    advancer.advance(again(node, row))
    assert (tmp_path / "precious").exists()
    assert "not below" in (again(node, row).error or "")


def test_p5_an_outage_of_days_does_not_end_the_agent(node: World, advancer: Advancer) -> None:
    row = node.journal.update(node.admitted(SOME), attempts=1024)
    fail_with(node, "put", CredentialError)
    advancer.advance(row)
    assert again(node, row).retry_at == node.clock.now() + MAX_BACKOFF_S
