"""P1, P5, P8: the agent: one a disk, adopted, lost, replaced, never ended by its trainer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import psutil
import pytest

from ckpt_tiering import TieredCheckpointer
from ckpt_tiering.agent.client import read_status
from ckpt_tiering.errors import SaveFailedError, WaitTimeoutError
from ckpt_tiering.model.layout import StagingLayout
from ckpt_tiering.observe.bus import read_events
from ckpt_tiering.units import MIB
from tests.staging import reader, tree
from tests.waiting import until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.servers import S3Server

WAIT_S = 90.0
PART_BYTES = 5 * MIB


def agent_pid(staging: Path) -> int:
    def pid() -> int | None:
        page = read_status(StagingLayout(staging))
        return page.pid if page is not None and psutil.pid_exists(page.pid) else None

    return until(pid, "an agent with a status page")


def kinds(staging: Path) -> list[str]:
    return [event["kind"] for event in read_events(StagingLayout(staging).events)]


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_p5_killed_agent_is_noticed_and_replaced(bucket_url: str, tmp_path: Path) -> None:
    """SIGKILL while parts go up: another agent takes over by itself and finishes the save."""
    source, staging = tmp_path / "source", tmp_path / "nvme"
    source.mkdir()
    (source / "w").write_bytes(os.urandom(6 * PART_BYTES))
    with TieredCheckpointer(
        bucket_url, staging=staging, part_bytes=PART_BYTES, max_bandwidth=10 * MIB
    ) as saver:
        saver.start()
        first = agent_pid(staging)
        saver.save(1, source)
        until(lambda: (page := read_status(StagingLayout(staging))) and page.sent_bytes, "bytes")
        os.kill(first, signal.SIGKILL)
        saver.wait(WAIT_S)
        assert agent_pid(staging) != first
        events = read_events(StagingLayout(staging).events)
        (lost,) = [e for e in events if e["kind"] == "agent_lost"]
        assert lost["error"] == "killed by signal 9"
        assert "agent_restarted" in kinds(staging)
        assert [e["kind"] for e in events].count("durable") == 1
    assert reader(bucket_url).latest() is not None


def test_p1_agent_finishes_after_its_trainer_is_gone(bucket_url: str, tmp_path: Path) -> None:
    """The trainer dies right after `save` returned; the agent drains, then ends by itself."""
    script = """
import os, signal, sys
from ckpt_tiering import TieredCheckpointer
saver = TieredCheckpointer(sys.argv[1], staging=sys.argv[2], max_bandwidth="20MiB")
saver.save(5, sys.argv[3])
os.kill(os.getpid(), signal.SIGKILL)
"""
    source, staging = tmp_path / "source", tmp_path / "nvme"
    source.mkdir()
    (source / "w").write_bytes(os.urandom(20 * MIB))
    trainer = subprocess.run(
        [sys.executable, "-c", script, bucket_url, str(staging), str(source)],
        check=False,
        timeout=WAIT_S,
    )
    assert trainer.returncode == -signal.SIGKILL
    pid = agent_pid(staging)
    until(lambda: gone(pid), "the end of the agent", within_s=WAIT_S)
    latest = reader(bucket_url).latest()
    assert latest is not None
    assert latest.step == 5
    assert kinds(staging)[-1] == "agent_stopped"


def test_p8_agent_ignores_what_ends_a_job(bucket_url: str, tmp_path: Path) -> None:
    """In a session of its own, niced, and deaf to the signals a scheduler sends to everybody."""
    with TieredCheckpointer(bucket_url, staging=tmp_path / "nvme") as saver:
        saver.start()
        process = psutil.Process(agent_pid(tmp_path / "nvme"))
        assert os.getsid(process.pid) == process.pid
        assert process.nice() == 19
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(process.pid, number)
        (tmp_path / "source").mkdir()
        saver.save(1, tmp_path / "source")
        saver.wait(WAIT_S)
        assert process.is_running()
        assert "agent_lost" not in kinds(tmp_path / "nvme")


def test_one_agent_a_staging_directory(bucket_url: str, tmp_path: Path) -> None:
    """A second trainer adopts the agent that runs; a second agent refuses to start."""
    staging = tmp_path / "nvme"
    with TieredCheckpointer(bucket_url, staging=staging) as first:
        first.start()
        pid = agent_pid(staging)
        with TieredCheckpointer(bucket_url + "-other", staging=staging) as second:
            second.start()
            assert agent_pid(staging) == pid
            command = [sys.executable, "-m", "ckpt_tiering.agent", "--staging", str(staging)]
            refused = subprocess.run(command, capture_output=True, text=True, check=False)
            assert refused.returncode == 3
            assert "already serves" in refused.stderr


def test_staging_path_over_the_limit_of_unix_sockets(bucket_url: str, tmp_path: Path) -> None:
    deep = tmp_path / "/".join(["d" * 60] * 4) / "nvme"
    (tmp_path / "source").mkdir()
    with TieredCheckpointer(bucket_url, staging=deep) as saver:
        saver.save(1, tmp_path / "source")
        saver.wait(WAIT_S)
    assert (deep / "agent").stat().st_mode & 0o777 == 0o700


def test_p5_store_that_is_away_shows_and_heals(
    weed: S3Server, bucket_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wrong credentials: staged, pending with its reason, lag rising; right ones: durable.

    A job that starts with new credentials brings them to the agent that an earlier one started.
    """
    staging = tmp_path / "nvme"
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "a").write_bytes(b"1")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with TieredCheckpointer(bucket_url, staging=staging, drain_timeout=20) as saver:
        saver.save(3, tmp_path / "source")
        until(lambda: "credentials_expired" in kinds(staging), "the event", within_s=WAIT_S)
        with pytest.raises(WaitTimeoutError, match="not durable"):
            saver.wait(0.2)
        values = saver.metrics(step=9)
        assert values["ckpt/durable_lag_steps"] == 6
        assert values["ckpt/staged"] == 1
        saver.close(timeout=0)
    first = agent_pid(staging)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", weed.secret_key)
    with TieredCheckpointer(bucket_url, staging=staging, drain_timeout=20) as next_job:
        assert next_job.settle_pending(WAIT_S)
        assert agent_pid(staging) == first, "the agent goes on, with the new job's credentials"
        latest = next_job.latest()
        assert latest is not None
        assert latest.step == 3
    text = StagingLayout(staging).events.read_text(encoding="utf-8")
    assert weed.access_key not in text
    assert weed.secret_key not in text


def test_p5_failed_save_is_raised_once(bucket_url: str, weed: S3Server, tmp_path: Path) -> None:
    """B73: the failure of one save is reported once, for its step, and later saves are durable."""
    staging = tmp_path / "nvme"
    (tmp_path / "source").mkdir()
    with TieredCheckpointer(bucket_url, staging=staging, on_failure="raise") as saver:
        with saver.stage(1) as staged, staged.open("a") as file:
            file.write(b"1")
            bucket, _, root = bucket_url.removeprefix("s3://").partition("/")
            key = f"{root}/commits/{staged.save_id}.json"
            weed.client().put_object(Bucket=bucket, Key=key, Body=b"a stranger")
        until(lambda: saver.status().failed, "the failure", within_s=WAIT_S)
        with pytest.raises(SaveFailedError, match="step 1"):
            saver.save(2, tmp_path / "source")
        for step in (3, 4):
            saver.save(step, tmp_path / "source")
        saver.wait(WAIT_S)
        assert [s.step for s in saver.status().failed] == [1]
        assert saver.status().last_durable is not None


def test_p6_removal_is_a_request(bucket_url: str, tmp_path: Path) -> None:
    """Never the newest, never the one resumed from; granted when something newer is durable."""
    staging, source = tmp_path / "nvme", tmp_path / "source"
    source.mkdir()
    (source / "a").write_bytes(b"1")
    with TieredCheckpointer(bucket_url, staging=staging, drain_timeout=20) as saver:
        for step in (1, 2):
            saver.save(step, source, name=f"step={step}")
        saver.wait(WAIT_S)
        saver.mark_resumed(saver.resolve("step=1"))
        for step in (1, 2):
            saver.request_removal(f"step={step}")
        until(lambda: "removal_refused" in kinds(staging), "the refusal")
        assert [s.step for s in saver.saves()] == [2, 1]
        saver.save(3, source, name="step=3")
        saver.wait(WAIT_S)
        until(lambda: [s.step for s in saver.saves()] == [3, 1], "the removal of 2")
        assert not list(StagingLayout(staging).runs_dir.glob("*/saves/*2-*"))


def test_p6_evicts_durable_saves_only_and_restores_from_the_store(
    bucket_url: str, tmp_path: Path
) -> None:
    staging, source = tmp_path / "nvme", tmp_path / "source"
    source.mkdir()
    (source / "w").write_bytes(os.urandom(4 * MIB))
    with TieredCheckpointer(bucket_url, staging=staging, nvme_budget=9 * MIB) as saver:
        for step in range(1, 5):
            saver.save(step, source)
        saver.wait(WAIT_S)
        until(lambda: kinds(staging).count("evicted") == 2, "two evictions")
        assert [s.step for s in saver.saves()] == [4, 3, 2, 1]
        saver.restore(tmp_path / "restored", saver.saves()[-1])
    assert tree(tmp_path / "restored") == tree(source)
