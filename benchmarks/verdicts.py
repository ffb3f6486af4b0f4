"""The bounds that ours is held to, each with what was measured, and where ours loses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from benchmarks.summary import Summary

__all__ = ["Loss", "Verdict", "by_size", "losses", "verdicts"]

FLOOR, BEST_RIVAL, SMALL_RIVAL = "memcpy", "dcp_process", "dcp_thread"
OURS = ("ours", "ours_dcp")
FLOOR_FACTOR, FLOOR_EXTRA_S = 1.2, 0.005
FIRST_FACTOR = 1.6
LOST_FACTOR, DURABLE_FACTOR, CPU_FACTOR = 0.6, 0.65, 0.55
PEAK_FACTOR = 2.25
SMALL_STALL_S, SMALL_FACTOR = 0.060, 0.35
P99_FACTOR = 1.1
NOTABLE = 1.03


@dataclass(frozen=True, slots=True)
class Verdict:
    """One bound at one size.

    Attributes:
        size: Label of the size.
        variant: Which of ours.
        bound: The bound in words.
        value: What was measured, in the unit of the limit.
        limit: The most that is good; None if what it is compared with was not measured.
        note: The figures behind it.
    """

    size: str
    variant: str
    bound: str
    value: float
    limit: float | None
    note: str

    @property
    def answer(self) -> str:
        """Say ``pass``, ``FAIL`` or ``no data``."""
        if self.limit is None:
            return "no data"
        return "pass" if self.value <= self.limit else "FAIL"


@dataclass(frozen=True, slots=True)
class Loss:
    """A figure of which a rival's is better than ours."""

    size: str
    rival: str
    what: str
    ours: float
    theirs: float

    @property
    def ratio(self) -> float:
        """Ours over theirs."""
        return self.ours / self.theirs


def by_size(found: Iterable[Summary]) -> dict[str, dict[str, Summary]]:
    """Group summaries by size, and within by variant."""
    groups: dict[str, dict[str, Summary]] = {}
    for summary in found:
        groups.setdefault(summary.size, {})[summary.variant] = summary
    return groups


def verdicts(found: Iterable[Summary]) -> list[Verdict]:
    """Hold ours to the bounds, at each size that was measured."""
    checked: list[Verdict] = []
    for size, group in by_size(found).items():
        for name in OURS:
            if name in group:
                check = _small if "x" in size else _model
                checked += check(size, group[name], group)
    return checked


def _model(size: str, ours: Summary, group: Mapping[str, Summary]) -> list[Verdict]:
    floor, rival = group.get(FLOOR), group.get(BEST_RIVAL)
    stall_limit = FLOOR_FACTOR * floor.stall_s.median + FLOOR_EXTRA_S if floor else None
    stall, peak = ours.stall_s.median, ours.peak_bytes / ours.state_bytes
    stall_note = _ratio(stall, floor.stall_s.median if floor else None)
    bound = f"stall <= {FLOOR_FACTOR} x memcpy + 5 ms"
    checked = [Verdict(size, ours.variant, bound, stall, stall_limit, stall_note)]

    def at_most(what: str, factor: float, than: str, mine: float, theirs: float | None) -> None:
        limit = None if theirs is None else factor * theirs
        bound = f"{what} <= {factor} x {than}"
        checked.append(Verdict(size, ours.variant, bound, mine, limit, _ratio(mine, theirs)))

    first = floor.first_stall_s if floor else None
    at_most("first stall", FIRST_FACTOR, "memcpy's first", ours.first_stall_s, first)
    at_most("lost", LOST_FACTOR, BEST_RIVAL, ours.lost_s, rival.lost_s if rival else None)
    durable = rival.durable_s.median if rival else None
    at_most("durable", DURABLE_FACTOR, BEST_RIVAL, ours.durable_s.median, durable)
    cpu = rival.cpu_s_per_gb if rival else None
    at_most("CPU per GB", CPU_FACTOR, BEST_RIVAL, ours.cpu_s_per_gb, cpu)
    at_most("peak / state", PEAK_FACTOR, "1", peak, 1.0)
    return [*checked, _p99(size, ours)]


def _small(size: str, ours: Summary, group: Mapping[str, Summary]) -> list[Verdict]:
    rival = group.get(SMALL_RIVAL)
    theirs = rival.stall_s.median if rival else None
    limit = max(SMALL_STALL_S, SMALL_FACTOR * (theirs or 0.0))
    bound = f"stall <= 60 ms or <= {SMALL_FACTOR} x {SMALL_RIVAL}"
    stall = ours.stall_s.median
    stall_verdict = Verdict(size, ours.variant, bound, stall, limit, _ratio(stall, theirs))
    return [stall_verdict, _p99(size, ours)]


def _p99(size: str, ours: Summary) -> Verdict:
    value = (ours.p99_ms or 0.0) / ours.baseline_p99_ms
    return Verdict(
        size,
        ours.variant,
        f"p99 of steps until durable <= {P99_FACTOR} x baseline's, where a core is free",
        value,
        P99_FACTOR,
        f"{value:.2f} x",
    )


def _ratio(mine: float, theirs: float | None) -> str:
    return f"{mine / theirs:.2f} x" if theirs else "-"


def losses(found: Iterable[Summary]) -> list[Loss]:
    """Return where a rival was better by more than 3 %, the worst first."""
    lost: list[Loss] = []
    for size, group in by_size(found).items():
        ours = group.get("ours")
        for name, rival in group.items() if ours else ():
            if ours is None or name in OURS or name == FLOOR:
                continue
            figures = (
                ("stall of the first save, s", ours.first_stall_s, rival.first_stall_s),
                ("stall, s", ours.stall_s.median, rival.stall_s.median),
                ("lost per save, s", ours.lost_s, rival.lost_s),
                ("durable, s", ours.durable_s.median, rival.durable_s.median),
                ("CPU, s per GB", ours.cpu_s_per_gb, rival.cpu_s_per_gb),
                ("peak memory, x state", _peak(ours), _peak(rival)),
                ("descriptors", float(ours.fds), float(rival.fds)),
            )
            lost += [
                Loss(size, name, what, mine, theirs)
                for what, mine, theirs in figures
                if mine > NOTABLE * theirs > 0
            ]
    return sorted(lost, key=lambda loss: loss.ratio, reverse=True)


def _peak(summary: Summary) -> float:
    return summary.peak_bytes / summary.state_bytes
