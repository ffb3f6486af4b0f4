"""A node of a make-believe cluster: a directory for its disk, and a training job that runs there.

It can be lost, as real ones are: every process on it is killed, and its disk is gone.
"""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from ckpt_tiering.agent.client import read_status
from ckpt_tiering.fsio import remove_tree
from ckpt_tiering.model.layout import StagingLayout
from ckpt_tiering.observe.bus import read_events
from examples.quickstart.losses import Losses, read_losses

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType
    from typing import Self

    from ckpt_tiering.agent.protocol import SaveStatus, Status

__all__ = ["Node", "Record"]

RANKS = 2
TRAIN = Path(__file__).with_name("train.py")
_TAIL_CHARACTERS = 3000


@dataclass(frozen=True, slots=True)
class Record:
    """What a node leaves behind for the historian.

    Attributes:
        name: Its name.
        saves: What was staged there, by step.
        losses: By rank, then by step.
        stall_s: Seconds that the step loop stood still for a save, by step.
    """

    name: str
    saves: dict[int, SaveStatus]
    losses: Losses
    stall_s: dict[int, float]


class Node:
    """A context manager: when it ends, nothing runs on the node any more.

    Args:
        directory: Its disk; created.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.name = directory.name
        self.project = directory / "project"
        self.staging = directory / "nvme"
        self._layout = StagingLayout(self.staging)
        self._job: subprocess.Popen[bytes] | None = None
        self._saves: dict[int, SaveStatus] = {}
        self._events_seen = 0
        self.project.mkdir(parents=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.kill_everything()

    def start(self, arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        """Start ``torchrun train.py <arguments>`` here; does not wait for it."""
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        with (self.project / "job.log").open("wb") as log:
            self._job = subprocess.Popen(
                [*torchrun, "--nproc-per-node", str(RANKS), str(TRAIN), *arguments],
                cwd=self.project,
                env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # a ^C at the terminal is the demo's to handle
            )

    @property
    def exit_code(self) -> int | None:
        """Of the job; None while it runs."""
        assert self._job is not None
        return self._job.poll()

    def log(self) -> str:
        """Return what the job printed."""
        return (self.project / "job.log").read_text(errors="replace")

    def log_tail(self) -> str:
        """Return the end of what the job printed."""
        return self.log()[-_TAIL_CHARACTERS:]

    # --- what can be seen of it --------------------------------------------------------------

    def page(self) -> Status | None:
        """Return the status page of the agent."""
        page = read_status(self._layout)
        for run in page.runs if page else ():
            for save in (*run.durable, *run.pending, *run.failed):
                self._saves[save.step] = save
        return page

    def saves(self) -> dict[int, SaveStatus]:
        """Return what was staged here, by step."""
        self.page()
        return dict(sorted(self._saves.items()))

    def durable_steps(self) -> list[int]:
        """Return the steps of the saves from here that are durable."""
        return [step for step, save in self.saves().items() if save.durable_at is not None]

    def events(self) -> list[dict[str, Any]]:
        """Return all events so far."""
        return read_events(self._layout.events)

    def news(self) -> list[dict[str, Any]]:
        """Return the events since the last call."""
        events = self.events()
        fresh, self._events_seen = events[self._events_seen :], len(events)
        return fresh

    def losses(self) -> Losses:
        """Return the losses of all ranks so far."""
        return read_losses(self.project / "losses")

    def record(self) -> Record:
        """Return what is known of the node."""
        return Record(self.name, self.saves(), self.losses(), self._stalls())

    def _stalls(self) -> dict[int, float]:
        """Read from the trainer's own logger what the saves cost the step loop."""
        stalls: dict[int, float] = {}
        for file in (self.project / "logs").glob("*/metrics.csv"):
            with file.open(newline="") as lines:
                for row in csv.DictReader(lines):
                    if stall := row.get("ckpt/stall_seconds"):
                        stalls[int(row["step"])] = float(stall)
        return stalls

    # --- how it ends -------------------------------------------------------------------------

    def kill_agent(self) -> None:
        """SIGKILL the agent, whose process the status page names."""
        agent = self._agent()
        if agent is not None:
            agent.kill()

    def _agent(self) -> psutil.Process | None:
        page = read_status(self._layout)
        if page is None:
            return None
        try:
            process = psutil.Process(page.pid)
            # A process id can be somebody else's by now.
            return process if str(self.staging) in process.cmdline() else None
        except psutil.Error:
            return None

    def kill_everything(self) -> None:
        """SIGKILL the launcher, the ranks and the agent, as when the power goes."""
        processes: list[psutil.Process] = []
        if self._job is not None and self._job.poll() is None:
            launcher = psutil.Process(self._job.pid)
            # Parents first: nobody is left to start anything anew.
            processes = [launcher, *launcher.children(recursive=True)]
        for process in processes:
            try:
                process.send_signal(signal.SIGKILL)  # psutil checks that it is still the same one
            except psutil.NoSuchProcess:
                continue
        self.kill_agent()  # it outlives its trainer on purpose
        if self._job is not None:
            self._job.wait()
        psutil.wait_procs(processes, timeout=10)

    def lose(self) -> Record:
        """Kill everything, delete the disk, and return what the witnesses remember."""
        self.kill_everything()
        record = self.record()
        remove_tree(self.directory, inside=self.directory.parent)
        return record
