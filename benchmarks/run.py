"""What a save costs training and how long durability takes: ours, the floor and the rivals.

    make bench                                              # all of it: about an hour
    make bench ARGS="--sizes 256MiB --variants ours,memcpy,dcp_process --repeats 2"
    make bench ARGS="--report benchmarks/results/2026-12-03T091500Z.jsonl --write-docs"

Every variant runs in a process of its own for each size and repeat; repeats interleave all variants
in an order shuffled by the seed. JSON lines and plots go to ``benchmarks/results``, tables and
verdicts to stderr. On shared machines absolute seconds mean nothing: read the ratios.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from benchmarks.jobs import Job, run_job
from benchmarks.machine import describe
from benchmarks.plot import draw
from benchmarks.registry import VARIANTS
from benchmarks.sink_process import SinkProcess
from benchmarks.sizes import Size
from benchmarks.summary import read_lines, summaries
from benchmarks.tables import print_tables
from benchmarks.verdicts import verdicts
from benchmarks.write_docs import write_docs
from ckpt_tiering.clock import SystemClock
from ckpt_tiering.units import parse_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["main"]

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
DOCUMENT = ROOT / "docs" / "benchmarks.md"
SIZES = "512MiB,1GiB,2GiB,5000x1KiB"
CLOCK = SystemClock()
CONSOLE = Console(stderr=True, width=None if sys.stderr.isatty() else 170)


@dataclass(frozen=True, slots=True, kw_only=True)
class Campaign:
    """What is measured in one run."""

    sizes: tuple[Size, ...]
    variants: tuple[str, ...]
    repeats: int
    saves: int
    seed: int
    is_quick: bool
    scratch: Path

    def jobs(self) -> Iterator[tuple[int, str, Size]]:
        """Yield repeat, variant and size; within each repeat and size in a new order."""
        order = random.Random(self.seed)
        for repeat in range(self.repeats):
            for size in self.sizes:
                for variant in order.sample(self.variants, len(self.variants)):
                    yield repeat, variant, size


def measure(campaign: Campaign, server: SinkProcess, results: Path) -> None:
    """Run all jobs, one after another; append their lines to a file as they come."""
    skipped: set[str] = set()
    bucket = server.new_bucket()
    todo = list(campaign.jobs())
    with results.open("a") as file:
        for number, (repeat, variant, size) in enumerate(todo, start=1):
            if variant in skipped:
                continue
            CONSOLE.print(f"[{number}/{len(todo)}] repeat {repeat}, {size.label}, {variant}")
            job = Job(
                variant=variant,
                size=size,
                repeat=repeat,
                saves=campaign.saves,
                is_quick=campaign.is_quick,
                scratch=campaign.scratch,
                bucket=bucket,
                prefix=f"{size.label}/{variant}/{repeat}",
            )
            for line in run_job(job, server):
                if line["kind"] in {"skipped", "failed"}:
                    CONSOLE.print(f"  {line['kind']}: {variant}: {line['reason']}", markup=False)
                if line["kind"] == "skipped":
                    skipped.add(variant)
                file.write(json.dumps(line) + "\n")
            file.flush()


def new_results(campaign: Campaign, options: argparse.Namespace, out: Path) -> Path:
    """Start a file with a line on date, machine and settings."""
    out.mkdir(parents=True, exist_ok=True)
    machine = describe(campaign.scratch, CLOCK.now())
    path = out / f"{machine['date'].replace(':', '')}.jsonl"
    head = {
        "kind": "run",
        **machine,
        "seed": campaign.seed,
        "repeats": campaign.repeats,
        "saves": campaign.saves,
        "rate_bytes_per_s": options.rate,
    }
    path.write_text(json.dumps(head) + "\n")
    return path


def report(path: Path, *, with_docs: bool) -> None:
    """Summarise a file of results: table, verdicts, plot, and the document if asked for."""
    lines = read_lines(path)
    found = summaries(lines)
    checked = verdicts(found)
    with path.open("a") as file:
        for summary in found if not any(line["kind"] == "summary" for line in lines) else ():
            file.write(json.dumps({"kind": "summary", **summary.as_dict()}) + "\n")
    print_tables(CONSOLE, found, checked)
    draw(found, path.with_suffix(".png"))
    CONSOLE.print(f"{path}\n{path.with_suffix('.png')}", markup=False)
    if with_docs:
        write_docs(DOCUMENT, lines, found, checked)
        CONSOLE.print(str(DOCUMENT))


def parsed() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="make bench", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--sizes", default=SIZES, help="such as 1GiB, or 5000x1KiB")
    parser.add_argument("--variants", default=",".join(VARIANTS), help="by default all")
    parser.add_argument("--repeats", type=int, default=3, help="processes of each variant and size")
    parser.add_argument("--saves", type=int, default=3, help="of each process, after the first")
    parser.add_argument("--seed", type=int, default=0, help="of the order")
    parser.add_argument("--rate", type=parse_bytes, help="of the link to the server, in a second")
    parser.add_argument("--scratch", type=Path, help="folder on the disk to measure")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for results")
    parser.add_argument("--quick", action="store_true", help="few, short steps: only a trial")
    parser.add_argument("--report", type=Path, help="measure nothing, read these results")
    parser.add_argument("--write-docs", action="store_true", help="write docs/benchmarks.md")
    options = parser.parse_args()
    options.variants = tuple(options.variants.split(","))
    if unknown := set(options.variants) - VARIANTS.keys():
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(VARIANTS)}")
    options.sizes = tuple(Size.parse(text) for text in options.sizes.split(","))
    return options


def main() -> None:
    """Measure and report, or only report."""
    options = parsed()
    path: Path | None = options.report
    if path is None:
        with (
            tempfile.TemporaryDirectory(prefix="bench-", dir=options.scratch) as scratch,
            SinkProcess(bytes_per_s=options.rate) as server,
        ):
            campaign = Campaign(
                sizes=options.sizes,
                variants=options.variants,
                repeats=options.repeats,
                saves=options.saves,
                seed=options.seed,
                is_quick=options.quick,
                scratch=Path(scratch),
            )
            path = new_results(campaign, options, options.out)
            measure(campaign, server, path)
    report(path, with_docs=options.write_docs)


if __name__ == "__main__":
    main()
