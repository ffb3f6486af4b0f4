"""Counts what the agent moved, repeated and waited for. Progress is bytes, not being alive."""

from __future__ import annotations

import threading
from dataclasses import dataclass

__all__ = ["Meter", "Reading"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Totals since the agent started.

    Attributes:
        sent_bytes: Bytes handed to the store, repeated ones included.
        retries: Requests that were repeated.
        throttled_s: Seconds that requests waited for bandwidth or because the store asked to.
        corrupt_uploads: Objects that were sent again because the store held other bytes.
    """

    sent_bytes: int = 0
    retries: int = 0
    throttled_s: float = 0.0
    corrupt_uploads: int = 0


class Meter:
    """Thread-safe counters."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sent_bytes = 0
        self._retries = 0
        self._throttled_s = 0.0
        self._corrupt_uploads = 0

    def sent(self, num_bytes: int) -> None:
        """Count bytes that leave."""
        with self._lock:
            self._sent_bytes += num_bytes

    def retried(self) -> None:
        """Count a request that is repeated."""
        with self._lock:
            self._retries += 1

    def throttled(self, seconds: float) -> None:
        """Count time spent waiting on purpose."""
        with self._lock:
            self._throttled_s += seconds

    def corrupt_upload(self) -> None:
        """Count an object that the store held wrongly."""
        with self._lock:
            self._corrupt_uploads += 1

    def read(self) -> Reading:
        """Return the totals."""
        with self._lock:
            return Reading(
                sent_bytes=self._sent_bytes,
                retries=self._retries,
                throttled_s=self._throttled_s,
                corrupt_uploads=self._corrupt_uploads,
            )
