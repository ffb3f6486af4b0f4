"""The one policy of trying again."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, TypeVar

from tenacity import RetryCallState, Retrying, retry_if_exception_type

from ckpt_tiering.errors import ThrottledError, TransientError

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable

    from ckpt_tiering.clock import Clock

__all__ = ["Retrier"]

T = TypeVar("T")

FIRST_WAIT_S = 0.5
FIRST_THROTTLED_WAIT_S = 2.0
_MAX_DOUBLINGS = 30  # keeps the power of two in range over days of trying


class Retrier:
    """Calls again what failed with `TransientError`, later and later, until a bound or a stop.

    The waits double, and each is drawn at random from zero to its value (*full jitter*), so that
    the nodes of a job, which all failed at once, don't come back at once. A throttled call waits
    four times longer and at least half of that. Safe to use from several threads.

    Args:
        clock: Measures and waits.
        stop: Ends all waits; the call that waits raises its last error.
        max_wait_s: Longest wait between two attempts, in seconds.
        give_up_after_s: Bound in seconds from the first attempt to the start of the last one.
        on_retry: Called before each wait with the error, the number of attempts so far, and the
            seconds to wait, from the thread that waits.
    """

    def __init__(
        self,
        clock: Clock,
        stop: threading.Event,
        *,
        max_wait_s: float,
        give_up_after_s: float,
        on_retry: Callable[[TransientError, int, float], None],
    ) -> None:
        self._clock = clock
        self._stop = stop
        self._max_wait_s = max_wait_s
        self._give_up_after_s = give_up_after_s
        self._on_retry = on_retry
        self._random = random.Random()  # noqa: S311  spreads load, guards nothing

    def call(self, fn: Callable[[], T]) -> T:
        """Return what ``fn`` returns; blocks as long as it does, and for the waits in between.

        Raises:
            TransientError: The last one, when the bound was reached or the stop was set.
            Exception: Any other that ``fn`` raised, at once.
        """
        deadline_s = self._clock.monotonic() + self._give_up_after_s
        retrying = Retrying(
            retry=retry_if_exception_type(TransientError),
            wait=lambda state: min(
                self._wait_s(state), max(0.0, deadline_s - self._clock.monotonic())
            ),
            stop=lambda _: self._stop.is_set() or self._clock.monotonic() >= deadline_s,
            before_sleep=self._pause,
            sleep=lambda _: None,  # `_pause` has waited: only it knows the error to raise
            reraise=True,
        )
        return retrying(fn)

    def _wait_s(self, state: RetryCallState) -> float:
        doubled = 2.0 ** min(state.attempt_number - 1, _MAX_DOUBLINGS)
        if isinstance(_error(state), ThrottledError):
            most_s = min(self._max_wait_s, FIRST_THROTTLED_WAIT_S * doubled)
            return self._random.uniform(most_s / 2, most_s)
        return self._random.uniform(0.0, min(self._max_wait_s, FIRST_WAIT_S * doubled))

    def _pause(self, state: RetryCallState) -> None:
        error, wait_s = _error(state), float(state.upcoming_sleep)
        self._on_retry(error, state.attempt_number, wait_s)
        if self._clock.wait(self._stop, wait_s):
            raise error


def _error(state: RetryCallState) -> TransientError:
    error = state.outcome.exception() if state.outcome is not None else None
    if not isinstance(error, TransientError):
        raise TypeError(f"{error!r} is not for trying again")
    return error
