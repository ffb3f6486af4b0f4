"""P1, P2: one commit point, whoever writes it; what is seen is whole; a stranger is a conflict."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import pytest

from ckpt_tiering.model.ids import SaveId
from ckpt_tiering.model.layout import StagingLayout, commit_key, node_manifest_key
from ckpt_tiering.observe.bus import read_events
from tests.staging import PART_BYTES, reader, run_agent, stage_save, tree

if TYPE_CHECKING:
    from pathlib import Path

    from tests.servers import S3Server

WAIT_S = 90.0


def start_agent(staging: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "ckpt_tiering.testing.killable", "--staging", str(staging)]
    return subprocess.Popen([*command, "--record", f"{staging}.calls"])


def durable_events(*stagings: Path) -> list[dict[str, object]]:
    return [
        event
        for staging in stagings
        for event in read_events(StagingLayout(staging).events)
        if event["kind"] == "durable"
    ]


def keys_below(server: S3Server, url: str, prefix: str) -> list[str]:
    bucket, _, root = url.removeprefix("s3://").partition("/")
    listing = server.client().list_objects_v2(Bucket=bucket, Prefix=f"{root}/{prefix}")
    return [item["Key"] for item in listing.get("Contents", [])]


def test_p2_two_nodes_race_to_commit_one_save(
    any_bucket_url: str, s3_server: S3Server, tmp_path: Path
) -> None:
    """Both see that all nodes have published; one manifest, and one of them says `durable`."""
    for step in range(1, 6):
        for rank in range(2):
            stage_save(
                tmp_path / f"node{rank}",
                any_bucket_url,
                {f"shard-{rank}.bin": b"%d of %d" % (rank, step)},
                step=step,
                node_rank=rank,
                num_nodes=2,
            )
    agents = [start_agent(tmp_path / f"node{rank}") for rank in range(2)]
    assert [agent.wait(WAIT_S) for agent in agents] == [0, 0]
    said = durable_events(tmp_path / "node0", tmp_path / "node1")
    assert sorted(str(e["step"]) for e in said) == ["1", "2", "3", "4", "5"]
    assert len(keys_below(s3_server, any_bucket_url, "commits/")) == 5
    newest = reader(any_bucket_url).latest()
    assert newest is not None
    reader(any_bucket_url).restore(newest, tmp_path / "restored")
    assert tree(tmp_path / "restored") == {"shard-0.bin": b"0 of 5", "shard-1.bin": b"1 of 5"}


def test_p2_two_agents_with_the_same_staged_save(bucket_url: str, tmp_path: Path) -> None:
    """A copied staging disk: the second agent finds the first one's manifest and agrees."""
    for name in ("disk", "copy"):
        stage_save(tmp_path / name, bucket_url, {"a": b"1"})
    first, second = (StagingLayout(tmp_path / n).runs_dir for n in ("disk", "copy"))
    (seal,) = first.glob("*/saves/*/*/seal.json")
    next(second.glob("*/saves/*/*/seal.json")).write_bytes(seal.read_bytes())
    agents = [start_agent(tmp_path / name) for name in ("disk", "copy")]
    assert [agent.wait(WAIT_S) for agent in agents] == [0, 0]
    assert len(durable_events(tmp_path / "disk", tmp_path / "copy")) == 1


@pytest.mark.parametrize("where", ["commit", "node manifest"])
def test_p2_foreign_manifest_is_a_loud_conflict(
    where: str, bucket_url: str, weed: S3Server, tmp_path: Path
) -> None:
    save_id = stage_save(tmp_path / "nvme", bucket_url, {"a": b"1"})
    key = commit_key(save_id) if where == "commit" else node_manifest_key(save_id, "n00000")
    bucket, _, root = bucket_url.removeprefix("s3://").partition("/")
    weed.client().put_object(Bucket=bucket, Key=f"{root}/{key}", Body=b'{"not": "ours"}')
    assert run_agent(tmp_path / "nvme", tmp_path / "calls") == 0
    events = read_events(StagingLayout(tmp_path / "nvme").events)
    (failed,) = [e for e in events if e["kind"] == "failed"]
    assert failed["error_kind"] == "conflict"
    assert key in failed["error"]
    assert not durable_events(tmp_path / "nvme")
    stored = weed.client().get_object(Bucket=bucket, Key=f"{root}/{key}")["Body"].read()
    assert stored == b'{"not": "ours"}', "the stranger's object is left as it was"


def test_p1_a_missing_node_keeps_the_save_invisible(bucket_url: str, tmp_path: Path) -> None:
    """One of two nodes never reports: nothing is committed, the answer stays the previous one."""
    previous = stage_save(tmp_path / "node0", bucket_url, {"a": b"old"}, step=1)
    assert run_agent(tmp_path / "node0", tmp_path / "calls") == 0
    stage_save(tmp_path / "node0", bucket_url, {"a": b"new"}, step=2, num_nodes=2)
    assert run_agent(tmp_path / "node0", tmp_path / "calls", at="before:list:4") == -9
    latest = reader(bucket_url).latest()
    assert latest is not None
    assert latest.id == previous

    stage_save(tmp_path / "node1", bucket_url, {"b": b"new"}, step=2, node_rank=1, num_nodes=2)
    assert run_agent(tmp_path / "node1", tmp_path / "calls1") == 0
    latest = reader(bucket_url).latest()
    assert latest is not None
    assert latest.id == SaveId(2, "abcd1234")


def test_p1_nobody_ever_sees_a_save_that_is_not_whole(bucket_url: str, tmp_path: Path) -> None:
    """Another process looks all the time while saves go up: whatever it sees can be restored."""
    rng = random.Random(5)
    for step in range(1, 5):
        files = {"big": rng.randbytes(PART_BYTES + step), "small": b"%d" % step}
        stage_save(tmp_path / "nvme", bucket_url, files, step=step)
    seen: set[int] = set()
    wrong: list[str] = []
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            latest = reader(bucket_url).latest()
            if latest is not None:
                wrong.extend(str(f) for f in reader(bucket_url).verify(latest.id).findings)
                seen.add(latest.step)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        assert run_agent(tmp_path / "nvme", tmp_path / "calls") == 0
    finally:
        done.set()
        watcher.join()
    assert wrong == []
    assert seen
    assert max(seen) <= 4
