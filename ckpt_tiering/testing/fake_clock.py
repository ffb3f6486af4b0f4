"""A clock that tests move."""

from __future__ import annotations

import heapq
import itertools
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["FakeClock"]


class FakeClock:
    """`Clock` whose time passes only by waiting on it, and by `advance`. Nothing ever blocks.

    Args:
        now_s: Wall time to start at, in seconds since the epoch.

    Attributes:
        waits_s: Every wait and sleep that was asked for, in seconds, in order.
    """

    def __init__(self, now_s: float = 1_800_000_000.0) -> None:
        self.waits_s: list[float] = []
        self._now_s = now_s
        self._monotonic_s = 0.0
        self._lock = threading.RLock()
        self._order = itertools.count()
        self._planned: list[tuple[float, int, Callable[[], object]]] = []

    def now(self) -> float:
        """Return the wall time in seconds since the epoch."""
        return self._now_s + self._monotonic_s

    def monotonic(self) -> float:
        """Return the seconds that have passed since the clock was made."""
        return self._monotonic_s

    def at(self, monotonic_s: float, action: Callable[[], object]) -> None:
        """Run ``action`` when the time comes, in the thread that makes it pass."""
        with self._lock:
            heapq.heappush(self._planned, (monotonic_s, next(self._order), action))

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self._pass(seconds, lambda: False)

    def wait(self, event: threading.Event, timeout_s: float) -> bool:
        """Let ``timeout_s`` pass, or as much of it as it takes until a planned action sets it."""
        with self._lock:
            self.waits_s.append(timeout_s)
            self._pass(timeout_s, event.is_set)
        return event.is_set()

    def sleep(self, seconds: float) -> None:
        """Let ``seconds`` pass."""
        with self._lock:
            self.waits_s.append(seconds)
            self._pass(seconds, lambda: False)

    def _pass(self, seconds: float, enough: Callable[[], bool]) -> None:
        with self._lock:
            until_s = self._monotonic_s + max(0.0, seconds)
            while not enough():
                if not self._planned or self._planned[0][0] > until_s:
                    self._monotonic_s = max(self._monotonic_s, until_s)
                    return
                due_s, _, action = heapq.heappop(self._planned)
                self._monotonic_s = max(self._monotonic_s, due_s)
                action()
