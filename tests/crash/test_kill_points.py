"""P1: an agent killed at any of its state changes loses nothing and shows nothing half-done.

The table is every call that a save makes to the journal and the store, in order; each is a test
that kills the agent before it, and, for calls to the store, one that kills it after it. (After a
call to the journal is before the next call.)
"""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING

import pytest

from ckpt_tiering.model.layout import StagingLayout
from ckpt_tiering.observe.bus import read_events
from ckpt_tiering.units import MIB
from tests.staging import PART_BYTES, calls, reader, run_agent, stage_save, tree

if TYPE_CHECKING:
    from pathlib import Path

    from mypy_boto3_s3 import S3Client

    from examples.quickstart.weed import WeedServer

NUM_PARTS = 4
FILES = {
    "model.bin": random.Random(7).randbytes(3 * PART_BYTES + 1),
    "nested/epoch=1.json": b"{}",
    "empty": b"",
}
# In the order in which they happen; the pulse's own writes (drop_events) come at any time.
CALLS = (
    *("journal.reclaim:1", "journal.emit:1", "journal.admit:1", "journal.claim:1"),
    *("journal.set_capabilities:1", "journal.update:1"),
    *("journal.move_object:1", "create_upload:1", "journal.move_object:2"),
    *("put_part:1", "journal.add_part:1", "put_part:2", "journal.add_part:2"),
    *("put_part:3", "journal.add_part:3", "put_part:4", "journal.add_part:4"),
    *("put:1", "journal.move_object:3"),
    *("complete_upload:1", "journal.move_object:4", "journal.move:1"),
    *("journal.claim:2", "head:1", "journal.move_object:5", "head:2", "journal.move_object:6"),
    *("journal.move:2", "journal.claim:3", "journal.update:2", "put:2", "journal.move:3"),
    *("journal.claim:4", "list:1", "get:1", "put:3", "journal.move:4"),
    *("journal.claim:5", "tag:1", "tag:2", "journal.move:5", "journal.emit:2"),
)
POINTS = [f"before:{call}" for call in CALLS] + [
    f"after:{call}" for call in CALLS if not call.startswith("journal.")
]


def split(url: str) -> tuple[str, str]:
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    return bucket, prefix


def open_uploads(client: S3Client, url: str) -> list[tuple[str, str]]:
    bucket, prefix = split(url)
    listing = client.list_multipart_uploads(Bucket=bucket, Prefix=f"{prefix}/")
    return [(u["Key"], u["UploadId"]) for u in listing.get("Uploads", [])]


def stored_parts(client: S3Client, url: str) -> int:
    """Return how many parts the store has of the one large file, completed or not."""
    bucket, prefix = split(url)
    listing = client.list_objects_v2(Bucket=bucket, Prefix=f"{prefix}/saves/")
    if any(o["Key"].endswith("f/model.bin") for o in listing.get("Contents", [])):
        return NUM_PARTS
    uploads = open_uploads(client, url)
    return sum(
        len(client.list_parts(Bucket=bucket, Key=key, UploadId=upload).get("Parts", []))
        for key, upload in uploads
    )


def assert_whole_or_absent(url: str, target: Path) -> bool:
    """Look as another process would: a save that is seen is whole."""
    seen = reader(url).latest()
    if seen is None:
        return False
    assert reader(url).verify(seen.id).findings == ()
    reader(url).restore(seen, target)
    assert tree(target) == FILES
    return True


def test_the_table_lists_every_call_of_a_save(bucket_url: str, tmp_path: Path) -> None:
    """A call that is new in the data path must be killed at, too."""
    staging, record = tmp_path / "nvme", tmp_path / "calls"
    stage_save(staging, bucket_url, FILES)
    assert run_agent(staging, record) == 0
    assert tuple(c for c in calls(record) if not c.startswith("journal.drop_events")) == CALLS


@pytest.mark.parametrize("point", POINTS)
def test_p1_agent_killed_at_any_state_change(
    point: str, bucket_url: str, weed: WeedServer, tmp_path: Path
) -> None:
    """Killed there, an agent shows nothing torn; the next one reaches durable, sends no part twice
    that the store has, and leaves no multipart upload open."""
    staging = tmp_path / "nvme"
    client = weed.client()
    save_id = stage_save(staging, bucket_url, FILES)

    assert run_agent(staging, tmp_path / "first", at=point) == -9, "the point was never reached"
    was_durable = assert_whole_or_absent(bucket_url, tmp_path / "seen")
    parts_before = stored_parts(client, bucket_url)

    assert run_agent(staging, tmp_path / "second") == 0
    assert assert_whole_or_absent(bucket_url, tmp_path / "restored")
    latest = reader(bucket_url).latest()
    assert latest is not None
    assert latest.id == save_id
    resent = [c for c in calls(tmp_path / "second") if c.startswith("put_part:")]
    assert len(resent) == NUM_PARTS - parts_before
    assert open_uploads(client, bucket_url) == []
    assert_tagged_and_said_once(client, bucket_url, staging)
    if was_durable:
        assert not any(c.startswith("create_upload") for c in calls(tmp_path / "second"))


def assert_tagged_and_said_once(client: S3Client, url: str, staging: Path) -> None:
    bucket, prefix = split(url)
    for item in client.list_objects_v2(Bucket=bucket, Prefix=f"{prefix}/saves/")["Contents"]:
        if "/nodes/" not in item["Key"]:
            tags = client.get_object_tagging(Bucket=bucket, Key=item["Key"])["TagSet"]
            assert tags == [{"Key": "ckpt-tiering-state", "Value": "committed"}]
    events = read_events(StagingLayout(staging).events)
    for kind in ("staged", "uploaded", "verified", "durable"):
        assert len([e for e in events if e["kind"] == kind]) == 1, kind
    sequence = [e["seq"] for e in events]
    assert sequence == sorted(set(sequence)), json.dumps(events, indent=1)


def test_p1_part_size_makes_several_parts() -> None:
    """The table would prove little if the file were one request."""
    assert PART_BYTES == 5 * MIB
    assert -(-len(FILES["model.bin"]) // PART_BYTES) == NUM_PARTS
