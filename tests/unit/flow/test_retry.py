from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from ckpt_tiering.errors import CredentialError, ThrottledError, TransientError
from ckpt_tiering.flow.retry import Retrier
from ckpt_tiering.testing.fake_clock import FakeClock

if TYPE_CHECKING:
    from collections.abc import Callable


class Flaky:
    """Fails ``times`` times, then returns ``"done"``."""

    def __init__(self, times: int, make: Callable[[str], Exception] = TransientError) -> None:
        self.times = times
        self.calls = 0
        self.make = make

    def __call__(self) -> str:
        self.calls += 1
        if self.calls <= self.times:
            raise self.make(f"failure {self.calls}")
        return "done"


Notes = list[tuple[str, int, float]]


def retrier(
    clock: FakeClock, stop: threading.Event | None = None, notes: Notes | None = None
) -> Retrier:
    kept = [] if notes is None else notes
    return Retrier(
        clock,
        stop or threading.Event(),
        max_wait_s=10.0,
        give_up_after_s=100.0,
        on_retry=lambda error, attempt, wait_s: kept.append((error.message, attempt, wait_s)),
    )


def test_it_goes_on_until_it_works_and_says_so() -> None:
    clock, work = FakeClock(), Flaky(3)
    notes: Notes = []
    assert retrier(clock, notes=notes).call(work) == "done"
    assert work.calls == 4
    assert [(message, attempt) for message, attempt, _ in notes] == [
        ("failure 1", 1),
        ("failure 2", 2),
        ("failure 3", 3),
    ]
    assert clock.waits_s == [wait_s for _, _, wait_s in notes]


def test_the_waits_double_up_to_the_longest() -> None:
    longest = [0.5, 1, 2, 4, 8, 10, 10]
    for _ in range(50):
        clock = FakeClock()
        retrier(clock).call(Flaky(7))
        assert all(0 <= got <= most for got, most in zip(clock.waits_s, longest, strict=True))


def test_throttled_calls_wait_longer() -> None:
    longest = [2, 4, 8, 10]
    for _ in range(50):
        clock = FakeClock()
        retrier(clock).call(Flaky(4, ThrottledError))
        waits = zip(clock.waits_s, longest, strict=True)
        assert all(most / 2 <= got <= most for got, most in waits)


def test_p5_it_gives_up_at_the_bound_with_the_last_error() -> None:
    clock, work = FakeClock(), Flaky(10**6)
    with pytest.raises(TransientError) as caught:
        retrier(clock).call(work)
    assert caught.value.message == f"failure {work.calls}"
    assert clock.monotonic() == pytest.approx(100.0)


def test_p5_time_spent_in_the_call_counts() -> None:
    clock, work = FakeClock(), Flaky(10**6)

    def slow() -> str:
        clock.advance(60)
        return work()

    with pytest.raises(TransientError):
        retrier(clock).call(slow)
    assert work.calls == 2


@pytest.mark.parametrize("error", [CredentialError("expired"), KeyError("bug")])
def test_other_errors_come_out_at_once(error: Exception) -> None:
    clock = FakeClock()

    def fail() -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        retrier(clock).call(fail)
    assert caught.value is error
    assert clock.waits_s == []


def test_p5_a_stop_ends_a_wait() -> None:
    clock, stop, work = FakeClock(), threading.Event(), Flaky(10**6)
    clock.at(5.0, stop.set)
    with pytest.raises(TransientError):
        retrier(clock, stop).call(work)
    assert clock.monotonic() == 5.0
    assert len(clock.waits_s) == work.calls


def test_a_stop_before_the_call_leaves_one_attempt() -> None:
    clock, stop, work = FakeClock(), threading.Event(), Flaky(10**6)
    stop.set()
    with pytest.raises(TransientError):
        retrier(clock, stop).call(work)
    assert work.calls == 1
    assert clock.waits_s == []
