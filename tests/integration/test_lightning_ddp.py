"""Lightning on two ranks of ``torchrun``: one answer for both, and the same losses as ever."""

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
RANKS = (0, 1)


def torchrun(phase: str, directory: Path, environment: dict[str, str], **job: Any) -> list[Any]:
    """Run a phase of the job on two ranks; return what each of them found."""
    arguments = json.dumps({"phase": phase, "out": str(directory), **job})
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [sys.executable, *launcher, "-m", "tests.integration.lightning_job", arguments],
        cwd=ROOT,
        env=os.environ | environment | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return [json.loads((directory / f"{phase}-{rank}.json").read_text()) for rank in RANKS]


class TwoRanks:
    """A run of 20 steps on two ranks, and every way to go on with it in new processes."""

    def __init__(self, weed: WeedServer, directory: Path) -> None:
        store = weed.new_root()
        environment = weed.env()
        self.trained = torchrun(
            "train", directory, environment, store=store, node=str(directory / "first")
        )
        saved = directory / "first" / "project" / "checkpoints"
        self.links = sorted(path.name for path in saved.iterdir())
        elsewhere = "/gone/with/the/node/project/checkpoints/epoch=0-step=20.ckpt"
        self.resumed = torchrun(
            "resume",
            directory,
            environment,
            node=str(directory / "fresh"),
            references={
                "last": (store, "last"),
                "latest": (store, "tier://latest"),
                "url": (store, store),
                "path": (store, elsewhere),
                "here": (store, str(saved / "epoch=0-step=20.ckpt")),
                "empty": (store.replace("/run", "/empty"), "last"),
                "scratch": (store, None),
                "missing": (store, "nowhere/different=3.ckpt"),
                "no-bucket": ("s3://no-such-bucket-here/run", "last"),
            },
        )


@pytest.fixture(scope="module")
def ranks(weed: WeedServer, tmp_path_factory: pytest.TempPathFactory) -> TwoRanks:
    return TwoRanks(weed, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("rank", RANKS)
def test_training_is_the_same_with_and_without_tiering(ranks: TwoRanks, rank: int) -> None:
    reference, saved = ranks.trained[rank]["reference"], ranks.trained[rank]["saved"]
    assert saved == {s: loss for s, loss in reference.items() if int(s) < 20}


def test_ranks_compute_losses_of_their_own(ranks: TwoRanks) -> None:
    """Negative control: equality on each rank says something about each rank."""
    assert ranks.trained[0]["reference"] != ranks.trained[1]["reference"]


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("reference", ["last", "latest", "url", "path", "here"])
def test_resume_in_new_processes_is_bit_exact_on_every_rank(
    ranks: TwoRanks, reference: str, rank: int
) -> None:
    expected = {s: loss for s, loss in ranks.trained[rank]["reference"].items() if int(s) >= 20}
    assert len(expected) == 20
    assert ranks.resumed[rank][reference] == expected
    assert ranks.resumed[rank]["scratch"] != ranks.trained[rank]["reference"]


@pytest.mark.parametrize("rank", RANKS)
def test_last_with_nothing_saved_starts_from_scratch_on_every_rank(
    ranks: TwoRanks, rank: int
) -> None:
    assert ranks.resumed[rank]["empty"] == ranks.resumed[rank]["scratch"]


@pytest.mark.parametrize("rank", RANKS)
def test_p9_all_ranks_raise_what_rank_0_found(ranks: TwoRanks, rank: int) -> None:
    missing, no_bucket = ranks.resumed[rank]["missing"], ranks.resumed[rank]["no-bucket"]
    assert missing.startswith("NotFoundError: ")
    assert "nowhere/different=3.ckpt" in missing
    assert no_bucket.startswith("NotFoundError: ")
    assert "no-such-bucket-here" in no_bucket


def test_only_one_rank_saves(ranks: TwoRanks) -> None:
    assert ranks.links == [f"epoch=0-step={step}.ckpt" for step in (10, 15, 20, 5)]
