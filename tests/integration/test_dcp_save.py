"""DCP, the saving side: ranks agree once, then each copies its own part and goes on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.servers import WeedServer

ROOT = Path(__file__).parent.parent.parent
STORM_S = float(os.environ.get("DCP_STORM_SECONDS", "3"))


def torchrun(
    weed: WeedServer, directory: Path, *phases: str, num_ranks: int = 2, **job: Any
) -> dict[str, list[Any]]:
    """Run phases of the job in one go; return what each rank found, by phase."""
    arguments = {"phases": phases, "out": str(directory), "store": weed.new_root(), **job}
    launcher = ["-m", "torch.distributed.run", "--rdzv-backend", "c10d"]
    launcher += ["--rdzv-endpoint", "127.0.0.1:0", f"--nproc-per-node={num_ranks}"]
    done = subprocess.run(
        [sys.executable, *launcher, "-m", "tests.integration.dcp_job", json.dumps(arguments)],
        cwd=ROOT,
        env=os.environ | weed.env() | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200 + 2 * float(job.get("seconds", 0)),
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return {
        phase: [json.loads((directory / f"{phase}-{r}.json").read_text()) for r in range(num_ranks)]
        for phase in phases
    }


Found = dict[str, list[Any]]


def p8_fsdp2_with_adam_needs_no_collective_after_the_first_save(found: Found) -> None:
    """The stock reader loads it, on two ranks."""
    for rank in found["fsdp"]:
        assert rank["equal"]
        assert rank["resumed0"] == [2, True], "from this node's disk"
        assert rank["resumed1"] == [2, True], "on a node that never saw it"
        assert rank["replicated"] == [True, [0]], "of what all have, rank 0's is saved"
        assert rank["files"] == [
            "d.ckpt",
            "d.ckpt/.metadata",
            "d.ckpt/__0_0.distcp",
            "d.ckpt/__1_0.distcp",
            "d.ckpt/meta0.pt",
            "d.ckpt/meta1.pt",
        ]
        assert rank["info"] == [2, 2, {"format": "dcp"}]
        assert rank["named"] == 1
        assert rank["load"].startswith("ConfigError")
        assert "restore(into=state)" in rank["load"]


def p7_what_changes_right_after_the_call_was_saved_as_it_was(found: Found) -> None:
    assert [rank["equal"] for rank in found["instant"]] == [[True] * 9] * 2


def p5_a_layout_may_change_but_not_on_one_rank_alone(found: Found) -> None:
    first, second = found["layouts"]
    assert first["ids"] == second["ids"]
    assert first["ids"][-1].endswith(".2"), "two attempts of step 5 failed before"
    assert first["second"] == {"own0": 4000, "own1": 4000, "note": 100_000}
    assert first["last"] == {"own0": "f", "own1": "f", "other": 1}
    assert first["latest"] == second["latest"] == 4
    for error in (second["alone"], second["outgrown"]):
        assert error.startswith("WaitTimeoutError: rank 0 did not come to plan the layout")
        assert "within 1 s, as rank 1 did" in error


def p6_ranks_that_were_told_different_things_save_nothing(found: Found) -> None:
    for rank in found["disagree"]:
        assert "rank 1 has part_bytes=6291456 where rank 0 has 5242880" in rank["error"]
        assert rank["saves"] == 0


def p13_dcps_own_save_and_async_save_go_through_the_writer(found: Found) -> None:
    for rank in found["writer"]:
        assert rank["saves"] == [1, 2, 3, 4, 5, 6, 9]
        assert rank["numbers"] == [True] * 7
        assert rank["named"] == 1


def p1_a_rank_that_fails_fails_the_save_on_all(found: Found) -> None:
    for rank in found["writer"]:
        assert rank["failed"].startswith("CheckpointException")
        assert "no more memory here" in rank["failed"]
        assert "use_collectives=False" in rank["alone"]
        assert "rank 1 has step=8 where rank 0 has 7" in rank["steps"]
        assert rank["latest"] == 6


PROMISES = (
    p8_fsdp2_with_adam_needs_no_collective_after_the_first_save,
    p7_what_changes_right_after_the_call_was_saved_as_it_was,
    p5_a_layout_may_change_but_not_on_one_rank_alone,
    p6_ranks_that_were_told_different_things_save_nothing,
    p13_dcps_own_save_and_async_save_go_through_the_writer,
    p1_a_rank_that_fails_fails_the_save_on_all,
)


@pytest.mark.timeout(300)
def test_two_ranks_keep_these_promises(
    weed: WeedServer, tmp_path: Path, subtests: pytest.Subtests
) -> None:
    """One launch for all of them, as it takes longer than any."""
    phases = ("fsdp", "instant", "layouts", "disagree", "writer")
    found = torchrun(weed, tmp_path, *phases, mode="memory", process=True)
    for promise in PROMISES:
        with subtests.test(promise.__name__):
            promise(found)


@pytest.mark.timeout(300)
def test_four_ranks_on_a_two_dimensional_mesh(weed: WeedServer, tmp_path: Path) -> None:
    found = torchrun(weed, tmp_path, "mesh", "layouts", num_ranks=4, mode="disk")
    assert [rank["equal"] for rank in found["mesh"]] == [True] * 4
    assert "rank 0, 2, 3 did not come" in found["layouts"][1]["alone"]


@pytest.mark.timeout(300 + 3 * STORM_S)
def test_p8_saves_without_pause_and_a_delayed_agent_never_deadlock(
    weed: WeedServer, tmp_path: Path
) -> None:
    found = torchrun(weed, tmp_path, "storm", seconds=STORM_S)["storm"]
    assert found[0]["ids"] == found[1]["ids"]
    for rank in found:
        assert rank["committed"] == len(rank["ids"]) > STORM_S
        assert rank["equal"]
