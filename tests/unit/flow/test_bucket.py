from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tiering.clock import SystemClock
from ckpt_tiering.flow.bucket import BURST_S, TokenBucket
from ckpt_tiering.testing.fake_clock import FakeClock


@given(
    rate=st.floats(1.0, 1e10),
    takes=st.lists(st.integers(0, 10**7), max_size=30),
    pauses=st.lists(st.floats(0, 10), min_size=30, max_size=30),
)
def test_p8_no_more_leaves_than_the_rate_and_one_burst(
    rate: float, takes: list[int], pauses: list[float]
) -> None:
    takes = [min(take, int(rate * 100)) for take in takes]  # keep the test short
    clock, taken = FakeClock(), 0
    bucket = TokenBucket(rate, clock)
    for take, pause in zip(takes, pauses, strict=False):
        bucket.take(take)
        taken += take
        assert taken <= rate * (clock.monotonic() + BURST_S) * (1 + 1e-9) + 2
        clock.advance(pause)


def test_p8_the_rate_is_used_up() -> None:
    clock = FakeClock()
    bucket = TokenBucket(1000.0, clock)
    for _ in range(100):
        bucket.take(500)
    assert clock.monotonic() == pytest.approx(50_000 / 1000 - BURST_S, abs=0.01)


def test_one_take_may_be_larger_than_the_burst() -> None:
    clock = FakeClock()
    waited_s = TokenBucket(1000.0, clock).take(10_000)
    assert waited_s == pytest.approx(10 - BURST_S, abs=0.01)


def test_idle_time_is_not_saved_up() -> None:
    clock = FakeClock()
    bucket = TokenBucket(1000.0, clock)
    clock.advance(3600)
    bucket.take(5000)
    assert clock.monotonic() - 3600 == pytest.approx(5 - BURST_S, abs=0.01)


def test_without_a_rate_nothing_waits() -> None:
    clock = FakeClock()
    bucket = TokenBucket(None, clock)
    assert bucket.take(10**15) == 0.0
    assert clock.waits_s == []


def test_p8_a_new_rate_holds_for_who_waits_already() -> None:
    clock = FakeClock()
    bucket = TokenBucket(1.0, clock)
    clock.at(10.0, lambda: bucket.set_rate(1_000_000.0))
    bucket.take(1_000_000)
    assert clock.monotonic() == pytest.approx(11, abs=0.3)
    bucket.set_rate(None)
    assert bucket.take(10**12) == 0.0


def test_a_limit_that_comes_later_owes_nothing_for_before() -> None:
    clock = FakeClock()
    bucket = TokenBucket(None, clock)
    bucket.take(10**12)
    bucket.set_rate(1000.0)
    bucket.take(1000)
    assert clock.monotonic() == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize("rate", [0.0, -1.0])
def test_a_rate_that_lets_nothing_through_is_refused(rate: float) -> None:
    with pytest.raises(ValueError, match="nothing"):
        TokenBucket(rate, FakeClock())


def test_threads_share_one_rate() -> None:
    clock = SystemClock()
    bucket = TokenBucket(1_000_000.0, clock)
    started_s = clock.monotonic()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(bucket.take, [1000] * 400))
    assert clock.monotonic() - started_s >= 0.4 - BURST_S - 0.001
