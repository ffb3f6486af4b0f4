"""The training loop of one process: saves, steps until durable, quiet steps, next save."""

from __future__ import annotations

import os
import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from benchmarks.procfs import busy_s, cpu_s, descendants, num_fds
from benchmarks.sizes import GB
from benchmarks.states import Timing
from ckpt_tiering.clock import SystemClock

if TYPE_CHECKING:
    from benchmarks.states import State, Step
    from benchmarks.variants import Pending, Variant

__all__ = ["Bystanders", "Loop", "Plan"]

CLOCK = SystemClock()
GIVE_UP_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How long to train without saving: at least so many steps, and at least so many seconds."""

    baseline_steps: int = 20
    baseline_s: float = 1.6
    quiet_steps: int = 6
    quiet_s: float = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Bystanders:
    """Processes that belong to the measurement and not to what is measured."""

    server: int
    others: tuple[int, ...]


@dataclass(slots=True)
class _Usage:
    """CPU seconds up to a moment: of the trainer's tree, of the server, of all the machine."""

    at: float
    tree: float
    server: float
    others: float
    machine: float

    @property
    def foreign(self) -> float:
        """What is neither the trainer's nor the benchmark's."""
        return self.machine - self.tree - self.server - self.others


@dataclass(slots=True)
class Loop:
    """Trains, saves and measures. Everything is of this process and of what it starts."""

    variant: Variant
    state: State
    step: Step
    plan: Plan
    bystanders: Bystanders
    baseline: list[Timing] = field(default_factory=list)
    number: int = 0

    def warm_up(self) -> None:
        """Train without saving; what later steps are compared with."""
        self._train(steps=3, seconds=0.0)
        self.baseline = self._train(steps=self.plan.baseline_steps, seconds=self.plan.baseline_s)

    @property
    def baseline_s(self) -> float:
        """Median seconds of a step without a save."""
        return statistics.median(timing.wall_s for timing in self.baseline)

    def _train(self, *, steps: int, seconds: float) -> list[Timing]:
        done: list[Timing] = []
        end = CLOCK.monotonic() + seconds
        while len(done) < steps or CLOCK.monotonic() < end:
            done.append(self.step())
        return done

    def save(self) -> dict[str, Any]:
        """Save once; train until it is durable, and a little longer; return what was measured."""
        self.number += 1
        before = self._usage()
        wall = CLOCK.now()
        begin = CLOCK.monotonic()
        pending = self.variant.save(self.number, self.state)
        stall_s = CLOCK.monotonic() - begin
        in_flight: list[Timing] = []
        while (durable_at := pending.poll()) is None:
            in_flight.append(self._step_and_poll(pending))
            if CLOCK.monotonic() - begin > GIVE_UP_S:
                raise TimeoutError(f"not durable after {GIVE_UP_S:.0f} s")
        fds = num_fds([*self._tree()])
        quiet = self._train(steps=self.plan.quiet_steps, seconds=self.plan.quiet_s)
        after = self._usage()
        own_steps_cpu_s = sum(timing.cpu_s for timing in (*in_flight, *quiet))
        walls = [timing.wall_s for timing in in_flight]
        phases = {k: round(at - wall, 4) for k, at in self.variant.phases().items() if at >= wall}
        return {
            "stall_s": stall_s,
            "durable_s": max(stall_s, durable_at - begin),
            "lost_s": stall_s + sum(wall_s - self.baseline_s for wall_s in walls),
            "inflation": statistics.fmean(walls) / self.baseline_s - 1 if walls else None,
            "num_steps_in_flight": len(walls),
            "steps_in_flight_ms": [round(wall_s * 1000, 2) for wall_s in walls],
            "cpu_s_per_gb": (after.tree - before.tree - own_steps_cpu_s)
            / self.state.num_bytes
            * GB,
            "server_cpu_s_per_gb": (after.server - before.server) / self.state.num_bytes * GB,
            "foreign_cpus": self._foreign(before, after),
            "fds": fds,
            "phases": phases,
        }

    def _step_and_poll(self, pending: Pending) -> Timing:
        """Train one step; asking for the save is part of its time, and of the save's CPU."""
        start = CLOCK.monotonic()
        cpu_s = self.step().cpu_s
        pending.poll()
        return Timing(CLOCK.monotonic() - start, cpu_s)

    def _tree(self) -> set[int]:
        return descendants(os.getpid()) | self.variant.agents()

    def _usage(self) -> _Usage:
        return _Usage(
            at=CLOCK.monotonic(),
            tree=cpu_s(self._tree()),
            server=cpu_s([self.bystanders.server]),
            others=cpu_s(self.bystanders.others),
            machine=busy_s(),
        )

    @staticmethod
    def _foreign(before: _Usage, after: _Usage) -> float:
        return (after.foreign - before.foreign) / (after.at - before.at)
