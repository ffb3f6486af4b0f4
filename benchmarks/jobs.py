"""Runs one job in a process of its own, and watches how much memory its tree takes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.procfs import Memory, descendants, memory_of
from ckpt_tiering.agent.client import read_status
from ckpt_tiering.clock import SystemClock
from ckpt_tiering.model.layout import StagingLayout

if TYPE_CHECKING:
    from benchmarks.sink_process import SinkProcess
    from benchmarks.sizes import Size

__all__ = ["Job", "run_job"]

ROOT = Path(__file__).resolve().parents[1]
REGION = "us-east-1"
SAMPLE_S = 0.03
GIVE_UP_S = 900.0
CLOCK = SystemClock()


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One variant at one size in one process.

    Attributes:
        variant: Name.
        size: Size of the state.
        repeat: Which repeat of the run it is, from 0.
        saves: Number of saves after the first.
        is_quick: Whether few and short steps will do.
        scratch: A folder of the runner's on the disk to measure.
        bucket: Bucket of the server.
        prefix: Prefix in it, of this job alone.
    """

    variant: str
    size: Size
    repeat: int
    saves: int
    is_quick: bool
    scratch: Path
    bucket: str
    prefix: str

    def arguments(self, home: str, server: SinkProcess) -> str:
        """Write the job for its process."""
        return json.dumps(
            {
                "variant": self.variant,
                "size": self.size.label,
                "saves": self.saves,
                "is_quick": self.is_quick,
                "home": home,
                "bucket": self.bucket,
                "prefix": self.prefix,
                "region": REGION,
                "server": server.pid,
                "others": [os.getpid()],
            }
        )


def run_job(job: Job, server: SinkProcess) -> list[dict[str, Any]]:
    """Run a job; return its lines. What it left on disk and in memory is gone afterwards."""
    os.sync()  # what the job before left to write is not this one's to pay for
    with (
        tempfile.TemporaryDirectory(dir=job.scratch) as home,
        tempfile.TemporaryFile("w+") as errors,
    ):
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.worker", job.arguments(home, server)],
            cwd=ROOT,
            env=_environment(server),
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
        layout = StagingLayout(Path(home) / "nvme")
        output, peak = _watched(process, layout)
        _end(process, layout)
        errors.seek(0)
        said = errors.read()
    lines = [json.loads(line) for line in output.splitlines()]
    if process.returncode:
        reason = " ".join(said.split()[-40:]) or f"exit status {process.returncode}"
        lines.append({"kind": "failed", "reason": reason})
    common = {"variant": job.variant, "size": job.size.label, "repeat": job.repeat}
    for line in lines:
        if line["kind"] == "process":
            line |= {
                "peak_bytes": peak.total_bytes,
                "peak_anon_bytes": peak.anon_bytes,
                "peak_shared_bytes": peak.shared_bytes,
            }
    return [common | line for line in lines]


def _environment(server: SinkProcess) -> dict[str, str]:
    own = ("AWS_", "CKPT_TIERING_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    return {
        **kept,
        **server.env(),
        "AWS_REGION": REGION,
        "MASTER_ADDR": "127.0.0.1",  # else DCP's process asks DNS for this host's name
        "PYTHONWARNINGS": "ignore",
    }


def _watched(process: subprocess.Popen[str], layout: StagingLayout) -> tuple[str, Memory]:
    """Wait for a process; return what it printed, and the most memory that its tree took."""
    output: list[str] = []
    assert process.stdout is not None
    reader = threading.Thread(target=lambda: output.append(process.stdout.read()))  # type: ignore[union-attr]
    reader.start()
    peak = Memory(0, 0)
    give_up_at = CLOCK.monotonic() + GIVE_UP_S
    while process.poll() is None:
        now = memory_of(descendants(process.pid) | _agents(layout))
        peak = max(peak, now, key=lambda memory: memory.total_bytes)
        if CLOCK.monotonic() > give_up_at:
            os.killpg(process.pid, signal.SIGKILL)
        CLOCK.sleep(SAMPLE_S)
    reader.join()
    return output[0], peak


def _agents(layout: StagingLayout) -> set[int]:
    """Find our agent, which has a session of its own and may outlive its trainer."""
    page = read_status(layout) if layout.status.exists() else None
    return set() if page is None else {page.pid}


def _end(process: subprocess.Popen[str], layout: StagingLayout) -> None:
    """End what a job that failed left running."""
    if not process.returncode:
        return
    for pid in _agents(layout):
        command = Path(f"/proc/{pid}/cmdline")
        if command.exists() and str(layout.staging) in command.read_text():
            os.kill(pid, signal.SIGKILL)
