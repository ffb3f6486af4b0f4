"""One process of the benchmark: one variant, one size. Started by `benchmarks.run`.

Reads its job as JSON from its arguments; writes one JSON line for each save to stdout, one at the
end with what is of the whole process, or one that says why the variant can't be measured here.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.loop import Bystanders, Loop, Plan
from benchmarks.registry import VARIANTS
from benchmarks.sizes import Size
from benchmarks.states import Step, make_state
from benchmarks.variants import Setup, UnavailableError

__all__ = ["main"]

QUICK = Plan(baseline_steps=5, baseline_s=0.1, quiet_steps=2, quiet_s=0.05)

PACKAGES = (
    "ckpt-tiering", "torch", "boto3", "botocore", "awscrt", "s3torchconnector", "s3fs",
    "aiobotocore", "fsspec", "lightning", "nvidia-resiliency-ext",
)  # fmt: skip


def main() -> None:
    """Measure one variant at one size."""
    job = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    size = Size.parse(job["size"])
    setup = Setup(
        home=Path(job["home"]), bucket=job["bucket"], prefix=job["prefix"], region=job["region"]
    )
    variant = VARIANTS[job["variant"]].make(setup)
    try:
        variant.open(size.num_bytes)
    except UnavailableError as error:
        say({"kind": "skipped", "reason": str(error)})
        return
    state = make_state(size)
    loop = Loop(
        variant,
        state,
        Step(state, is_small=bool(size.num_tensors) or job["is_quick"]),
        QUICK if job["is_quick"] else Plan(),
        Bystanders(server=job["server"], others=tuple(job["others"])),
    )
    loop.warm_up()
    for number in range(job["saves"] + 1):
        say({"kind": "save", "is_first": not number, "number": number, **loop.save()})
    say(
        {
            "kind": "process",
            "num_bytes": state.num_bytes,
            "baseline_ms": [round(timing.wall_s * 1000, 2) for timing in loop.baseline],
            "versions": versions(),
        }
    )
    variant.close()


def say(line: dict[str, Any]) -> None:
    """Write a line."""
    print(json.dumps(line), flush=True)


def versions() -> dict[str, str]:
    """Return the versions of what takes part, as far as it is installed."""
    found = {"python": sys.version.split()[0]}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


if __name__ == "__main__":  # also keeps the processes that DCP spawns from starting anew
    main()
