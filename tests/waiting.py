"""Waiting for a condition, with a deadline and a name: no test sleeps to be lucky."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, TypeVar

from ckpt_tiering.clock import SystemClock

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")
_POLL_S = 0.02


def until(condition: Callable[[], T | None], what: str, *, within_s: float = 60.0) -> T:
    """Return the first true value of a condition; fail if it has none in time."""
    clock = SystemClock()
    deadline = clock.monotonic() + within_s
    never = threading.Event()
    while clock.monotonic() < deadline:
        value = condition()
        if value:
            return value
        clock.wait(never, _POLL_S)
    raise AssertionError(f"{what} did not come about within {within_s:.0f} s")
