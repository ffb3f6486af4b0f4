"""The only place that asks the machine what time it is, so that tests can answer instead."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import threading

__all__ = ["Clock", "SystemClock"]


class Clock(Protocol):
    """Wall time for records, monotonic time for durations, and waiting."""

    def now(self) -> float:
        """Return seconds since the epoch, UTC. For records only, never for durations."""
        ...

    def monotonic(self) -> float:
        """Return seconds of a clock that never goes back, the same in all processes of a host."""
        ...

    def wait(self, event: threading.Event, timeout_s: float) -> bool:
        """Wait for ``event``, at most ``timeout_s`` seconds; return whether it was set."""
        ...

    def sleep(self, seconds: float) -> None:
        """Block the calling thread for ``seconds``."""
        ...


class SystemClock:
    """The real clock."""

    def now(self) -> float:
        """Return seconds since the epoch, UTC."""
        return time.time()

    def monotonic(self) -> float:
        """Return seconds of ``CLOCK_MONOTONIC``, which all processes of a host share."""
        return time.monotonic()

    def wait(self, event: threading.Event, timeout_s: float) -> bool:
        """Wait for ``event``, at most ``timeout_s`` seconds; return whether it was set."""
        return event.wait(max(0.0, timeout_s))

    def sleep(self, seconds: float) -> None:
        """Block the calling thread for ``seconds``."""
        time.sleep(max(0.0, seconds))
