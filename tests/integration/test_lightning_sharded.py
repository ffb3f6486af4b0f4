"""Strategies of Lightning's that shard: the same line, and every rank saves and loads its part."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.servers import WeedServer

ROOT = Path(__file__).parent.parent.parent
SHARDS = [".metadata", "__0_0.distcp", "__1_0.distcp", "meta.pt"]
RUN_LIMIT_S = 400


class Launcher:
    """Runs phases of the job on real ranks, against one store."""

    def __init__(self, weed: WeedServer, out: Path) -> None:
        self._weed = weed
        self._out = out
        self._store = f"{weed.new_root()}/run"

    def __call__(self, *phases: str, num_ranks: int = 2, killed: bool = False) -> dict[str, Any]:
        """Return what each rank found, by phase."""
        launcher = ["-m", "torch.distributed.run", "--rdzv-backend", "c10d"]
        launcher += ["--rdzv-endpoint", "127.0.0.1:0", f"--nproc-per-node={num_ranks}"]
        job = json.dumps({"phases": phases, "out": str(self._out), "store": self._store})
        done = subprocess.run(
            [sys.executable, *launcher, "-m", "tests.integration.lightning_sharded_job", job],
            cwd=ROOT,
            env=os.environ | self._weed.env() | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=RUN_LIMIT_S,
        )
        if killed:
            assert str(signal.Signals.SIGKILL.name) in done.stdout, done.stdout[-6000:]
        else:
            assert done.returncode == 0, done.stdout[-6000:]
        return {
            phase: [
                json.loads((self._out / f"{phase}-{rank}.json").read_text())
                for rank in range(num_ranks)
            ]
            for phase in phases
        }


@pytest.fixture
def launch(weed: WeedServer, tmp_path: Path) -> Launcher:
    return Launcher(weed, tmp_path)


def rest_of(losses: dict[str, str], first: int) -> dict[str, str]:
    return {step: loss for step, loss in losses.items() if int(step) >= first}


@pytest.mark.timeout(4 * RUN_LIMIT_S)
def test_p1_fsdp2_goes_on_bit_by_bit_after_everything_was_killed(
    launch: Launcher, subtests: pytest.Subtests
) -> None:
    """Save, SIGKILL of ranks and agent, empty staging: as if nothing had happened."""
    reference = launch("reference")["reference"]
    killed = launch("killed", killed=True)["killed"]
    found = launch("resumed", "stock")
    alone = launch("one_rank", num_ranks=1)["one_rank"]
    for rank in (0, 1):
        losses = reference[rank]["losses"]
        with subtests.test("before the kill", rank=rank):
            assert rest_of(losses, 0).items() >= killed[rank]["losses"].items()
            assert killed[rank]["links"]["epoch=0-step=10.ckpt"] == SHARDS
        resumed = found["resumed"][rank]
        with subtests.test("metadata", rank=rank):
            assert resumed["metadata"]["framework"] == "lightning"
            assert resumed["metadata"]["format"] == "dcp"
            assert resumed["name"] == "checkpoints/epoch=0-step=10.ckpt"
        for way, first in {"last": 10, "latest": 10, "id": 10, "url": 10, "earlier": 5}.items():
            with subtests.test(way, rank=rank):
                assert resumed[way]["losses"] == rest_of(losses, first)
        with subtests.test("state", rank=rank):
            assert resumed["last"]["began"] == reference[rank]["began"]
        with subtests.test("two nodes, both empty", rank=rank):
            assert resumed["nodes"]["losses"] == rest_of(losses, 10)
        with subtests.test("negative control", rank=rank):
            forgetful = resumed["forgetful"]["losses"]
            assert forgetful.keys() == rest_of(losses, 10).keys()
            assert forgetful != rest_of(losses, 10)
        with subtests.test("nothing to go on from", rank=rank):
            assert resumed["nothing"]["losses"] == resumed["scratch"]["losses"]
            assert resumed["missing"].startswith("NotFoundError")
        with subtests.test("stock Lightning", rank=rank):
            assert found["stock"][rank]["directory"] == ["epoch=0-step=10.ckpt", SHARDS]
            assert found["stock"][rank]["losses"] == rest_of(losses, 10)
            assert found["stock"][rank]["ordinary"] == rest_of(losses, 10)
    with subtests.test("one rank from two"):
        assert alone[0] == reference[0]["began"]


@pytest.mark.timeout(RUN_LIMIT_S)
def test_p6_fsdp2_keeps_what_it_must_and_loads_what_it_is_asked(launch: Launcher) -> None:
    for rank in launch("kept")["kept"]:
        assert set(map(tuple, rank["links"].values())) == {tuple(SHARDS)}
        assert "epoch=0-step=20.ckpt" in rank["links"]
        assert "epoch=0-step=15.ckpt" not in rank["links"], "only the best one is kept"
        assert rank["after"] == [SHARDS, False]
        names = [name for _, name, weights_only in rank["saves"] if not weights_only]
        assert names == ["checkpoints/last.ckpt", "checkpoints/epoch=0-step=20.ckpt"]
        assert rank["rejected"].startswith("TypeError")
        assert rank["from_nvme"]["store"] == []
        assert rank["from_nvme"]["nvme"]
        assert "contains only the model" in rank["on_weights"]
        assert rank["validated"] == rank["state"]["weights"]
        assert "state_dict.more" in rank["strict"]
        assert rank["lenient"]


@pytest.mark.timeout(RUN_LIMIT_S)
def test_checkpoints_of_one_file_and_of_shards_are_exchanged(launch: Launcher) -> None:
    """``save_distributed_checkpoint=False``; what DDP can't load says so."""
    reference = launch("reference")["reference"]
    # What DDP and the whole one are to load of this store are shards.
    launch("killed", killed=True)
    for rank, found in enumerate(launch("whole")["whole"]):
        losses = rest_of(reference[rank]["losses"], 10)
        assert found["is_file"]
        assert found["whole"] == losses
        assert found["sharded"] == losses
        assert found["back"] == losses
        assert "only strategies that shard can load" in found["ddp"]


@pytest.mark.timeout(RUN_LIMIT_S)
def test_exceptions_slow_stores_the_older_fsdp_and_fabric(
    launch: Launcher, subtests: pytest.Subtests
) -> None:
    """FSDP of version 1 has no CPUs in mind: here it is told to use them."""
    found = launch("excepted", "slow", "fsdp1", "fabric")
    for rank in (0, 1):
        with subtests.test("saved on an exception", rank=rank):
            assert found["excepted"][rank]["failed"] == "ValueError: as planned"
            assert "Weights only load failed" in found["excepted"][rank]["refused"]
            assert next(iter(found["excepted"][rank]["losses"])) == "8"
        with subtests.test("staged and not durable", rank=rank):
            assert found["slow"][rank]["one node"] == ["no error", True, False]
            assert "not all of it is on this node" in found["slow"][rank]["two nodes"][0]
        with subtests.test("FSDP 1", rank=rank):
            assert found["fsdp1"][rank]["ours"] == found["fsdp1"][rank]["stock"]
            assert len(found["fsdp1"][rank]["ours"]) == 10
        for kind in ("sharded", "whole"):
            with subtests.test(f"Fabric, {kind}", rank=rank):
                fabric = found["fabric"][rank][kind]
                assert fabric == {"equal": True, "found": [3, "saved", {}], "losses": 3}
