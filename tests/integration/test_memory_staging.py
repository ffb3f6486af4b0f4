"""P1, P7, P8: a state is copied into memory, and what the agent does with it is its own time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import pytest
import torch

from ckpt_tiering import TieredCheckpointer
from ckpt_tiering.agent.client import read_status
from ckpt_tiering.errors import SaveFailedError
from ckpt_tiering.model.layout import StagingLayout, StoreUrl
from ckpt_tiering.observe.bus import read_events
from tests.staging import reader
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

WAIT_S = 90.0


@dataclass
class Progress:
    epoch: int


class Fickle:
    """Pickles differently each time, so that no plan of its file holds."""

    def __init__(self) -> None:
        self.times = 0

    def __getstate__(self) -> dict[str, int]:
        self.times += 1
        return {"times": self.times}


def agent_of(staging: Path) -> psutil.Process:
    def find() -> psutil.Process | None:
        page = read_status(StagingLayout(staging))
        alive = page is not None and psutil.pid_exists(page.pid)
        return psutil.Process(page.pid) if page is not None and alive else None

    return until(find, "an agent with a status page")


@pytest.fixture
def saver(bucket_url: str, tmp_path: Path) -> Iterator[TieredCheckpointer]:
    """A checkpointer that stages in memory, with its agent running."""
    with TieredCheckpointer(
        bucket_url, staging=tmp_path / "nvme", staging_mode="memory", drain_timeout=20
    ) as checkpointer:
        checkpointer.start()
        yield checkpointer


def test_p7_a_save_is_of_the_state_at_the_call(saver: TieredCheckpointer, tmp_path: Path) -> None:
    """The agent stands still until everything was changed in place."""
    base = torch.arange(200_000.0)
    state: dict[str, Any] = {
        "tensor": torch.ones(1000),
        "view": base[10:20],
        "array": np.arange(5),
        "list": [1, 2],
        "dict": {"a": 1},
        "dataclass": Progress(3),
        "rng": torch.get_rng_state(),
        "step": 7,
    }
    rng = state["rng"].clone()
    agent = agent_of(tmp_path / "nvme")
    agent.suspend()
    try:
        saver.save(7, state)
        state["tensor"].zero_()
        base.zero_()
        state["array"] += 9
        state["list"].append(3)
        state["dict"]["a"] = 2
        state["dataclass"].epoch = 4
        state["rng"].zero_()
        state["step"] = 8
    finally:
        agent.resume()
    saver.wait(WAIT_S)
    loaded = saver.load(weights_only=False)
    assert torch.equal(loaded["tensor"], torch.ones(1000))
    assert torch.equal(loaded["view"], torch.arange(10.0, 20.0))
    assert loaded["array"].tolist() == [0, 1, 2, 3, 4]
    assert (loaded["list"], loaded["dict"], loaded["step"]) == ([1, 2], {"a": 1}, 7)
    assert loaded["dataclass"].epoch == 3
    assert torch.equal(loaded["rng"], rng)


def test_p8_the_call_does_not_wait_for_the_agent(saver: TieredCheckpointer, tmp_path: Path) -> None:
    """It returns while the agent stands still; the next one waits for the memory, and says so."""
    agent = agent_of(tmp_path / "nvme")
    agent.suspend()
    try:
        saver.save(1, {"w": torch.zeros(1000)})
        assert saver.metrics(2)["ckpt/staged"] == 1
        second = threading.Thread(target=saver.save, args=(2, {"w": torch.ones(1000)}))
        second.start()
        second.join(0.3)
        assert second.is_alive(), "the memory still belongs to the save before"
    finally:
        agent.resume()
    second.join(WAIT_S)
    saver.wait(WAIT_S)
    assert [s.step for s in saver.saves()] == [2, 1]
    assert torch.equal(saver.load("latest")["w"], torch.ones(1000))


def test_p1_agent_killed_before_it_wrote_a_snapshot(
    saver: TieredCheckpointer, tmp_path: Path
) -> None:
    """The trainer still has the memory, and gives it to the next agent."""
    agent = agent_of(tmp_path / "nvme")
    agent.suspend()
    saver.save(1, {"w": torch.full((5000,), 3.0)})
    agent.kill()
    saver.wait(WAIT_S)
    assert torch.equal(saver.load()["w"], torch.full((5000,), 3.0))
    kinds = [e["kind"] for e in read_events(StagingLayout(tmp_path / "nvme").events)]
    assert kinds.count("durable") == 1
    assert "agent_lost" in kinds


def test_p1_trainer_killed_before_its_snapshot_was_written(bucket_url: str, tmp_path: Path) -> None:
    """The agent has the memory, and finishes."""
    script = """
import os, signal, sys, psutil, torch
from ckpt_tiering import TieredCheckpointer
saver = TieredCheckpointer(sys.argv[1], staging=sys.argv[2], staging_mode="memory")
saver.start()
(agent,) = psutil.Process().children()
agent.suspend()
saver.save(5, {"w": torch.full((5000,), 4.0)})
print(agent.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    staging = tmp_path / "nvme"
    trainer = subprocess.run(
        [sys.executable, "-c", script, bucket_url, str(staging)],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
        timeout=WAIT_S,
    )
    assert trainer.returncode == -signal.SIGKILL
    assert reader(bucket_url).latest() is None
    os.kill(int(trainer.stdout), signal.SIGCONT)
    latest = until(reader(bucket_url).latest, "the save", within_s=WAIT_S)
    assert latest.step == 5
    state = torch.load(reader(bucket_url, staging).fetch(latest, "state.pt"))
    assert torch.equal(state["w"], torch.full((5000,), 4.0))


def test_p5_snapshot_that_can_not_be_written(
    saver: TieredCheckpointer, bucket_url: str, tmp_path: Path
) -> None:
    """Something is in the way on the disk: an event, an exception, and the next save goes on."""
    layout = StagingLayout(tmp_path / "nvme")
    in_the_way = layout.run_dir(StoreUrl.parse(bucket_url)) / "saves"
    in_the_way.parent.mkdir(parents=True)
    in_the_way.write_bytes(b"")
    saver.save(1, {"w": torch.zeros(10)})
    with pytest.raises(SaveFailedError, match="000000000001-"):
        saver.wait_staged()
    in_the_way.unlink()
    saver.save(2, {"w": torch.zeros(10)})
    saver.wait(WAIT_S)
    assert [s.step for s in saver.saves()] == [2]
    failed = [e for e in read_events(layout.events) if e["kind"] == "failed"]
    assert [e["step"] for e in failed] == [1]


def test_file_is_what_stock_torch_reads(saver: TieredCheckpointer, tmp_path: Path) -> None:
    saved = saver.save_state(3, {"w": torch.randn(7, 5, dtype=torch.bfloat16)}, file="a/b.ckpt")
    saver.wait_staged()
    assert saved.local_path.relative_to(tmp_path / "nvme").name == "b.ckpt"
    for mmap in (False, True):
        assert torch.load(saved.local_path, mmap=mmap)["w"].shape == (7, 5)
    saver.wait(WAIT_S)


def test_a_module_state_keeps_its_type_and_versions(saver: TieredCheckpointer) -> None:
    """`load_state_dict` needs the metadata that a plain dict would lose."""
    state = torch.nn.Sequential(torch.nn.BatchNorm1d(3)).state_dict()
    saver.save(1, state)
    saver.wait(WAIT_S)
    loaded = saver.load()
    assert type(loaded) is type(state)
    assert vars(loaded)["_metadata"] == vars(state)["_metadata"]


@pytest.mark.parametrize("mode", ["disk", "auto"])
def test_states_that_stay_out_of_memory_are_staged_in_the_call(
    mode: str, bucket_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """By configuration, or because the state can't be laid out; said once."""
    state = {"w": torch.arange(5.0), "fickle": Fickle()}
    with TieredCheckpointer(bucket_url, staging=tmp_path / "nvme", staging_mode=mode) as saver:
        for step in (1, 2):
            saved = saver.save_state(step, state)
            assert saved.local_path.is_file()
        saver.wait(WAIT_S)
        loaded = saver.load(weights_only=False)
    assert torch.equal(loaded["w"], torch.arange(5.0))
    assert loaded["fickle"].times > 0
    said = [m for m in caplog.messages if "staged on disk, in the step loop" in m]
    assert len(said) == (1 if mode == "auto" else 0)
