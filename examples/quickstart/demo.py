"""A training job loses its uploader, then its whole node, and goes on from the bucket, bit for bit.

    make demo

Starts an S3 server of its own (``weed``), trains a small model on two CPU ranks, and takes one to
two minutes. Everything is in a temporary directory, and nothing runs any more when it ends.
Ends with 1 if a promise was broken.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ckpt_tiering.clock import SystemClock
from examples.quickstart.story import Plan, ProofError, Story, Tale
from examples.quickstart.timeline import draw
from examples.quickstart.weed import WeedServer

if TYPE_CHECKING:
    from types import FrameType

    from ckpt_tiering.agent.protocol import SaveStatus
    from examples.quickstart.node import Record

OUT = Path(__file__).with_name("out")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, default=OUT, help="directory for the timeline")
    parser.add_argument("--steps", type=int, default=Plan().steps, help="steps to train")
    args = parser.parse_args()
    plan = Plan(steps=args.steps)
    console = Console(width=None if sys.stdout.isatty() else 110)
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, _leave)
    clock = SystemClock()
    began = clock.monotonic()
    try:
        with tempfile.TemporaryDirectory(prefix="ckpt-tiering-demo-") as work:
            tale = _tell(Path(work), plan, console)
    except ProofError as error:
        console.print("\n[bold red]✘ The demo failed:[/]", escape(str(error)), highlight=False)
        return 1
    except KeyboardInterrupt:
        console.print("\nInterrupted; everything was stopped and removed.")
        return 130
    console.print()
    console.print(table(tale))
    args.out.mkdir(parents=True, exist_ok=True)
    draw(tale, args.out / "timeline.png")
    took = clock.monotonic() - began
    where = os.path.relpath(args.out / "timeline.png")
    console.print(f"\nAll proofs hold. The timeline is in [bold]{where}[/] ({took:.0f} s).")
    return 0


def _tell(work: Path, plan: Plan, console: Console) -> Tale:
    for name in list(os.environ):
        if name.startswith(("AWS_", "CKPT_TIERING_")):
            del os.environ[name]  # a bucket of the user's own is no place for a demo
    with WeedServer() as server:
        console.print(f"S3 server: weed (SeaweedFS), process {server.pid}, {server.endpoint_url}")
        os.environ.update(server.env())
        return Story(server, work, plan, console).tell()


def _leave(_signal: int, _frame: FrameType | None) -> None:
    # A second ^C must not disturb what the first one has stopped and removed.
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, signal.SIG_IGN)
    raise KeyboardInterrupt


def table(tale: Tale) -> Table:
    """Return what became of each save."""
    result = Table(
        title="Checkpoints",
        caption="stall: the step loop stood still · staged, durable: seconds after the snapshot · "
        "lag: steps trained meanwhile, when it turned durable",
        caption_style="dim",
    )
    result.add_column("node")
    for name in ("step", "size", "stall", "staged", "durable", "lag"):
        result.add_column(name, justify="right")
    result.add_column("")
    for record in (tale.first, tale.second):
        assert record is not None
        for save in record.saves.values():
            result.add_row(*_cells(tale, record, save))
        result.add_section()
    return result


def _cells(tale: Tale, record: Record, save: SaveStatus) -> list[str]:
    step, durable_at = save.step, save.durable_at
    stall_s = record.stall_s.get(step)
    note = ""
    if record is tale.first:
        if step == tale.killed_step:
            note = "agent killed in its upload"
        elif step == tale.resumed_step:
            note = "resumed from"
        elif durable_at is None:
            note = "lost with the node"
    trained = sum(durable_at is not None and x.at <= durable_at for x in record.losses[0].values())
    lag = min(record.losses[0]) + trained - step
    return [
        record.name,
        str(step),
        f"{save.total_bytes / 1e6:.1f} MB",
        "" if stall_s is None else f"{stall_s * 1e3:.0f} ms",
        f"{save.staged_at - save.snapshot_at:.2f} s",
        "[red]never[/]" if durable_at is None else f"{durable_at - save.snapshot_at:.2f} s",
        "" if durable_at is None else str(lag),
        note,
    ]


if __name__ == "__main__":
    sys.exit(main())
