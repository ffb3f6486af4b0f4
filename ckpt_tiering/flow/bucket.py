"""A token bucket: how many bytes per second may leave."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckpt_tiering.clock import Clock

__all__ = ["TokenBucket"]

BURST_S = 0.1
_SLICE_S = 0.25  # how long a waiter may go without noticing a new rate


class TokenBucket:
    """Lets bytes through at a rate that can change at any time. Safe to use from several threads.

    Bytes are numbered: `take` reserves the next ``n`` of them at once and then waits, without a
    lock, until the rate has released the last of these. So waiters go in the order they came, a
    take may be larger than the burst, and a new rate holds for those who wait already.

    Args:
        rate_bytes_per_s: Bytes per second; None lets everything through.
        clock: Measures and waits.
    """

    def __init__(self, rate_bytes_per_s: float | None, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._rate = _checked(rate_bytes_per_s)
        self._reserved = 0  # bytes given out, from the beginning
        self._released = self._burst  # bytes that the rate has let through, from the beginning
        self._at_s = clock.monotonic()

    @property
    def rate_bytes_per_s(self) -> float | None:
        """Bytes per second; None for no limit."""
        return self._rate

    @property
    def _burst(self) -> float:
        return (self._rate or 0.0) * BURST_S

    def set_rate(self, rate_bytes_per_s: float | None) -> None:
        """Change the rate; who waits notices within a quarter of a second."""
        with self._lock:
            self._refill()
            self._rate = _checked(rate_bytes_per_s)

    def take(self, num_bytes: int) -> float:
        """Block until ``num_bytes`` more may leave; return how many seconds that took."""
        started_s = self._clock.monotonic()
        with self._lock:
            self._refill()
            self._reserved += num_bytes
            last = self._reserved
            wait_s = self._wait_s(last)
        while wait_s > 0:
            self._clock.sleep(min(wait_s, _SLICE_S))
            with self._lock:
                self._refill()
                wait_s = self._wait_s(last)
        return self._clock.monotonic() - started_s

    def _refill(self) -> None:
        now_s = self._clock.monotonic()
        if self._rate is None:
            self._released = max(self._released, float(self._reserved))
        else:
            released = self._released + self._rate * (now_s - self._at_s)
            self._released = min(released, self._reserved + self._burst)
        self._at_s = now_s

    def _wait_s(self, last: int) -> float:
        missing = last - self._released
        # Less than a byte is nothing: a wait too short for the clock to show would never end.
        return 0.0 if self._rate is None or missing < 1 else missing / self._rate


def _checked(rate_bytes_per_s: float | None) -> float | None:
    if rate_bytes_per_s is not None and rate_bytes_per_s <= 0:
        raise ValueError(f"a rate of {rate_bytes_per_s} bytes per second lets nothing through")
    return rate_bytes_per_s
