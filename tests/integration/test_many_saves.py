"""B52: memory does not grow with the number of saves, in the trainer nor in the agent."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

NUM_SAVES = 30
EARLY = 3
MAX_GROWTH = 1.1

# A process of its own: a test runner's memory says nothing of a trainer's.
TRAINER = """
import sys, psutil, torch
from ckpt_tiering import TieredCheckpointer
store, staging, num_saves, early = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
state = {f"w{i}": torch.randn(1 << 20) for i in range(16)}
sizes = {}
with TieredCheckpointer(store, staging=staging, staging_mode="memory") as saver:
    saver.start()
    (agent,) = psutil.Process().children()
    for step in range(1, num_saves + 1):
        saver.save(step, state, name="last")
        saver.wait(60)
        sizes[step] = (psutil.Process().memory_info().rss, agent.memory_info().rss)
print(*sizes[early], *sizes[num_saves])
"""


def test_b52_memory_stays_flat_over_thirty_saves(bucket_url: str, tmp_path: Path) -> None:
    """64 MiB each; the resident memory after the last is within 1.1 times that after the third."""
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            TRAINER,
            bucket_url,
            str(tmp_path / "nvme"),
            str(NUM_SAVES),
            str(EARLY),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    trainer_early, agent_early, trainer, agent = map(int, done.stdout.split())
    assert trainer <= MAX_GROWTH * trainer_early
    assert agent <= MAX_GROWTH * agent_early
