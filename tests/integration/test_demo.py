"""The demo is a test: one job loses its uploader and its node, and resumes from the bucket."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import psutil
import pytest
import torch
from rich.console import Console

from examples.quickstart.demo import table
from examples.quickstart.losses import first_difference
from examples.quickstart.node import RANKS, Node
from examples.quickstart.story import MIN_COMPARED, Plan, Story, Tale
from examples.quickstart.timeline import draw

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.servers import WeedServer

# Three or four jobs of two processes, on a machine that may be busy with other tests.
pytestmark = pytest.mark.timeout(400)

# Small batches are quick, and the uploads are held down to a pace of their own.
PLAN = Plan(steps=45, save_every=6, batch_size=4)


class Told:
    """A story that was told to its end, and the means to tell more of it."""

    def __init__(self, server: WeedServer, work: Path) -> None:
        self.story = Story(server, work / "nodes", PLAN, Console(width=110))
        self.tale: Tale = self.story.tell()
        self.work = work


@pytest.fixture(scope="module")
def told(weed: WeedServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Told]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in weed.env().items():
            patch.setenv(name, value)
        yield Told(weed, tmp_path_factory.mktemp("demo"))


def test_p1_resume_after_losing_the_node_is_bit_exact_on_every_rank(told: Told) -> None:
    """The story compares too; this shares no code with it."""
    tale = told.tale
    assert tale.second is not None
    first = tale.resumed_step
    for rank in range(RANKS):
        resumed = {step: loss.exact for step, loss in tale.second.losses[rank].items()}
        expected = {
            step: loss.exact for step, loss in tale.reference[rank].items() if step >= first
        }
        assert resumed == expected
        assert len(resumed) >= MIN_COMPARED
    ranks = [{x.exact for x in losses.values()} for losses in tale.reference.values()]
    assert not set.intersection(*ranks)  # else one rank could stand for the other


def test_a_dropped_optimizer_state_would_be_noticed(told: Told, tmp_path: Path) -> None:
    """Negative control: same weights and data, no moments, and the comparison fails."""
    tale = told.tale
    info = next(s for s in told.story.witness.saves() if s.step == tale.resumed_step)
    told.story.witness.restore(tmp_path / "files", info)
    (file,) = (tmp_path / "files").rglob("*.ckpt")
    checkpoint: dict[str, Any] = torch.load(file, weights_only=True)
    checkpoint["optimizer_states"][0]["state"].clear()
    torch.save(checkpoint, tmp_path / "dropped.ckpt")
    with Node(told.work / "control") as node:
        told.story.resume_elsewhere(
            node, str(tmp_path / "dropped.ckpt"), steps=tale.resumed_step + 3
        )
        losses = node.losses()
    before = {
        r: {s: x for s, x in steps.items() if s == tale.resumed_step} for r, steps in losses.items()
    }
    assert first_difference(before, tale.reference) is None, "the weights were restored"
    wrong = first_difference(losses, tale.reference)
    assert wrong is not None
    assert f"step {tale.resumed_step + 1}:" in wrong


def test_p5_a_killed_agent_is_reported_and_its_save_becomes_durable(told: Told) -> None:
    tale = told.tale
    assert tale.first is not None
    killed = tale.first.saves[tale.killed_step]
    assert killed.started_at is not None
    assert killed.durable_at is not None
    assert killed.started_at < tale.killed_at < tale.restarted_at < tale.lost_at
    assert killed.durable_at > tale.killed_at


def test_p6_everything_that_was_durable_still_is(told: Told) -> None:
    tale = told.tale
    assert tale.first is not None
    assert tale.second is not None
    durable = {
        save.save_id
        for record in (tale.first, tale.second)
        for save in record.saves.values()
        if save.durable_at is not None
    }
    assert {save.save_id for save in told.story.witness.saves()} >= durable


def test_the_table_and_the_timeline_show_every_save(told: Told, tmp_path: Path) -> None:
    assert told.tale.first is not None
    assert told.tale.second is not None
    saves = len(told.tale.first.saves) + len(told.tale.second.saves)
    assert table(told.tale).row_count == saves
    draw(told.tale, tmp_path / "timeline.png")
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")


def test_nothing_is_left_running_and_the_lost_node_is_gone(told: Told) -> None:
    nodes = told.work / "nodes"
    running = [
        process.info["cmdline"]
        for process in psutil.process_iter(["cmdline"])
        if str(nodes) in " ".join(process.info["cmdline"] or [])
    ]
    assert not running
    assert not (nodes / "node-1").exists()
