"""What a save costs and how long durability takes, beside the plain ways, in one interleaved run.

    make bench ARGS="--mib 256 --rounds 5"

Every round runs all variants in a new order against one SeaweedFS server; what is printed are
medians and ratios of the same run. On a shared machine absolute numbers mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import boto3
import torch
from rich.console import Console
from rich.table import Table

from ckpt_tiering import TieredCheckpointer
from ckpt_tiering.clock import SystemClock
from ckpt_tiering.units import MIB

try:
    from examples.quickstart.weed import WeedServer
except ModuleNotFoundError:  # run as a script, whose folder is on the path instead of the root
    import sys

    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from examples.quickstart.weed import WeedServer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

NUM_TENSORS = 300
CLOCK = SystemClock()


def make_state(mib: int) -> dict[str, torch.Tensor]:
    """Return random tensors of ``mib`` MiB together."""
    each = mib * MIB // 4 // NUM_TENSORS
    return {f"layer.{i}.weight": torch.randn(each) for i in range(NUM_TENSORS)}


def write_and_sync(state: Mapping[str, Any], path: Path) -> None:
    """Write a state as a careful loop without us would: torch.save, then fsync."""
    with path.open("wb") as file:
        torch.save(dict(state), file)
        os.fsync(file.fileno())


class Variants:
    """The ways to save that are compared. Each returns stall and time to durable in seconds."""

    def __init__(self, server: WeedServer, home: Path, state: Mapping[str, torch.Tensor]) -> None:
        self._home = home
        self._bucket = server.new_bucket()
        self._client = boto3.client("s3")
        self._ours = TieredCheckpointer(f"s3://{self._bucket}/ours", staging=home / "nvme")
        self._ours.start()
        self._step = 0
        self._copies = {name: torch.zeros_like(tensor) for name, tensor in state.items()}

    def ours(self, state: Mapping[str, Any]) -> tuple[float, float]:
        """Save to NVMe, upload, verify, commit; durable means compared and committed."""
        self._step += 1
        start = CLOCK.monotonic()
        self._ours.save(self._step, state)
        stall = CLOCK.monotonic() - start
        self._ours.wait()
        return stall, CLOCK.monotonic() - start

    def memcpy(self, state: Mapping[str, Any]) -> tuple[float, float]:
        """Copy every tensor into memory that is there: what no snapshot can do without."""
        start = CLOCK.monotonic()
        for name, tensor in state.items():
            self._copies[name].copy_(tensor)
        stall = CLOCK.monotonic() - start
        return stall, stall

    def disk_only(self, state: Mapping[str, Any]) -> tuple[float, float]:
        """torch.save and fsync to the same disk, which is not durable if the node is lost."""
        start = CLOCK.monotonic()
        write_and_sync(state, self._home / "plain.pt")
        stall = CLOCK.monotonic() - start
        return stall, stall

    def disk_then_boto3(self, state: Mapping[str, Any]) -> tuple[float, float]:
        """torch.save to disk, then boto3's upload_file with its defaults, on the caller's thread.

        Its object is never compared with anything: what is measured is the return of the call.
        """
        start = CLOCK.monotonic()
        write_and_sync(state, self._home / "plain.pt")
        self._client.upload_file(str(self._home / "plain.pt"), self._bucket, f"b/{self._step}.pt")
        total = CLOCK.monotonic() - start
        return total, total

    def close(self) -> None:
        """Let go of the agent."""
        self._ours.close()


def measure(mib: int, rounds: int) -> dict[str, dict[str, float]]:
    """Run all variants interleaved; return medians by variant."""
    stalls: dict[str, list[float]] = defaultdict(list)
    durables: dict[str, list[float]] = defaultdict(list)
    for name in [n for n in os.environ if n.startswith("AWS_")]:
        del os.environ[name]
    with WeedServer() as server, tempfile.TemporaryDirectory() as home:
        os.environ.update(server.env())
        state = make_state(mib)
        variants = Variants(server, Path(home), state)
        ways: list[Callable[[Mapping[str, Any]], tuple[float, float]]] = [
            variants.ours,
            variants.memcpy,
            variants.disk_only,
            variants.disk_then_boto3,
        ]
        for number in range(rounds + 1):
            for way in random.sample(ways, len(ways)):
                stall, durable = way(state)
                if number:  # the first round warms up: page cache, connections, the probe
                    stalls[way.__name__].append(stall)
                    durables[way.__name__].append(durable)
        variants.close()
    return {
        name: {
            "stall_s": statistics.median(stalls[name]),
            "durable_s": statistics.median(durables[name]),
        }
        for name in stalls
    }


def main() -> None:
    """Measure, print a table to stderr and one JSON line to stdout."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=128, help="size of the state")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    medians = measure(options.mib, options.rounds)
    table = Table(title=f"{options.mib} MiB, medians of {options.rounds} interleaved rounds")
    for column in ("way", "stall s", "vs memcpy", "durable s", "vs disk, then boto3"):
        table.add_column(column, justify="left" if column == "way" else "right")
    for name, figures in medians.items():
        table.add_row(
            name,
            f"{figures['stall_s']:.3f}",
            f"{figures['stall_s'] / medians['memcpy']['stall_s']:.2f} x",
            f"{figures['durable_s']:.3f}",
            f"{figures['durable_s'] / medians['disk_then_boto3']['durable_s']:.2f} x",
        )
    Console(stderr=True).print(table)
    print(json.dumps({"mib": options.mib, "rounds": options.rounds, "medians": medians}))


if __name__ == "__main__":
    main()
