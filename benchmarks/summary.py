"""From lines to figures: one summary for each variant and size."""

from __future__ import annotations

import dataclasses
import json
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

__all__ = ["Spread", "Summary", "read_lines", "summaries"]

P99 = 0.99


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and extremes."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Take them of some values."""
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What was measured of one variant at one size. Saves after the first, unless it says else.

    Attributes:
        variant: Name.
        size: Label of the size.
        state_bytes: Length of the tensors.
        num_processes: How many there were.
        num_saves: How many saves after the first, of all processes.
        first_stall_s: Stall of the first saves, median.
        stall_s: Time that the call of the save took.
        lost_s: Stall and what the steps until durable took longer than others, median.
        first_lost_s: The same of the first saves.
        durable_s: Time from the call until durable.
        inflation: How much longer steps were until durable, median; None if there were none.
        cpu_s_per_gb: CPU of trainer and all its processes beyond the steps, median.
        server_cpu_s_per_gb: CPU of the server, median.
        peak_bytes: Most memory of a process tree.
        baseline_p99_ms: 99th percentile of steps without a save.
        p99_ms: The same of steps until durable; None if there were none.
        fds: Most descriptors of the process tree after a save.
        foreign_cpus: Cores that others used meanwhile, mean.
    """

    variant: str
    size: str
    state_bytes: int
    num_processes: int
    num_saves: int
    first_stall_s: float
    stall_s: Spread
    lost_s: float
    first_lost_s: float
    durable_s: Spread
    inflation: float | None
    cpu_s_per_gb: float
    server_cpu_s_per_gb: float
    peak_bytes: int
    baseline_p99_ms: float
    p99_ms: float | None
    fds: int
    foreign_cpus: float

    def as_dict(self) -> dict[str, Any]:
        """Return it for JSON."""
        return dataclasses.asdict(self)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read a file of results."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def summaries(lines: Iterable[dict[str, Any]]) -> list[Summary]:
    """Summarise what was measured, in its order; processes that failed don't count."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for line in lines:
        if line["kind"] in {"save", "process"}:
            groups.setdefault((line["size"], line["variant"]), []).append(line)
    found = []
    for (size, variant), group in groups.items():
        processes = [line for line in group if line["kind"] == "process"]
        whole = {line["repeat"] for line in processes}
        saves = [s for s in group if s["kind"] == "save" and s["repeat"] in whole]
        if any(not save["is_first"] for save in saves):
            found.append(_summary(variant, size, processes, saves))
    return found


def _summary(
    variant: str, size: str, processes: list[dict[str, Any]], saves: list[dict[str, Any]]
) -> Summary:
    first = [save for save in saves if save["is_first"]]
    later = [save for save in saves if not save["is_first"]]
    in_flight = [ms for save in later for ms in save["steps_in_flight_ms"]]
    inflations = [save["inflation"] for save in later if save["inflation"] is not None]

    def median(lines: list[dict[str, Any]], name: str) -> float:
        return float(statistics.median(line[name] for line in lines))

    return Summary(
        variant=variant,
        size=size,
        state_bytes=processes[0]["num_bytes"],
        num_processes=len(processes),
        num_saves=len(later),
        first_stall_s=median(first, "stall_s"),
        stall_s=Spread.of([save["stall_s"] for save in later]),
        lost_s=median(later, "lost_s"),
        first_lost_s=median(first, "lost_s"),
        durable_s=Spread.of([save["durable_s"] for save in later]),
        inflation=statistics.median(inflations) if inflations else None,
        cpu_s_per_gb=median(later, "cpu_s_per_gb"),
        server_cpu_s_per_gb=median(later, "server_cpu_s_per_gb"),
        peak_bytes=max(line["peak_bytes"] for line in processes),
        baseline_p99_ms=_p99([ms for line in processes for ms in line["baseline_ms"]]),
        p99_ms=_p99(in_flight) if in_flight else None,
        fds=max(save["fds"] for save in saves),
        foreign_cpus=statistics.fmean(save["foreign_cpus"] for save in later),
    )


def _p99(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(P99 * len(ordered)))]
