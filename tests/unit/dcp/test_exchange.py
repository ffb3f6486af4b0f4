"""P5: ranks agree through a store, or hear within a bound who did not come."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import torch.distributed

from ckpt_tiering.dcp.exchange import Exchange
from ckpt_tiering.errors import ConfigError, SaveFailedError, WaitTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable

dist: Any = torch.distributed  # exports little, for the type checker


class Ranks:
    """Threads that stand for ranks, with a store that is one process's own."""

    def __init__(self, size: int, timeout_s: float) -> None:
        self.store: Any = dist.HashStore()
        self.exchanges = [Exchange(timeout_s=timeout_s) for _ in range(size)]
        for rank, exchange in enumerate(self.exchanges):
            exchange.rank, exchange.size, exchange.store = rank, size, self.store

    def run(self, call: Callable[[Exchange], Any], ranks: list[int] | None = None) -> list[Any]:
        """Have ranks do something at once; return results or errors."""

        def one(exchange: Exchange) -> Any:
            try:
                return call(exchange)
            except Exception as error:  # noqa: BLE001
                return error

        chosen = [self.exchanges[r] for r in (ranks or range(len(self.exchanges)))]
        with ThreadPoolExecutor(len(chosen)) as pool:
            return list(pool.map(one, chosen))

    def left(self) -> int:
        return int(self.store.num_keys())


def doubled(exchange: Exchange) -> tuple[int, list[int]]:
    meeting = exchange.meet()
    first = meeting.agree(lambda: exchange.rank, lambda ranks: [2 * rank for rank in ranks])
    second = meeting.agree(lambda: first, lambda values: [values] * len(values))
    return first, second


def test_each_rank_gets_its_answer_and_nothing_is_left_in_the_store() -> None:
    ranks = Ranks(4, timeout_s=30)
    for _ in range(3):
        assert ranks.run(doubled) == [(2 * r, [0, 2, 4, 6]) for r in range(4)]
    assert ranks.left() == 0


def test_large_values_go_in_chunks() -> None:
    ranks = Ranks(2, timeout_s=30)
    data = os.urandom(9 << 20)
    answers = ranks.run(lambda e: e.agree(lambda: data, lambda values: values[::-1]))
    assert answers == [data, data]


def test_one_rank_needs_no_store() -> None:
    assert doubled(Exchange()) == (0, [0])


@pytest.mark.parametrize("failing", [0, 2])
def test_p5_what_fails_on_one_rank_is_raised_on_all(failing: int) -> None:
    ranks = Ranks(3, timeout_s=30)

    def produce(exchange: Exchange) -> int:
        if exchange.rank == failing:
            raise ValueError("no such tensor")
        return 1

    errors = ranks.run(lambda e: e.agree(lambda: produce(e), lambda values: values))
    for error in errors:
        assert isinstance(error, SaveFailedError)
        assert f"rank {failing}: ValueError: no such tensor" in str(error)
    assert ranks.left() == 0


def test_p5_what_is_refused_on_rank_0_is_raised_on_all() -> None:
    ranks = Ranks(3, timeout_s=30)

    def refuse(values: list[int]) -> list[int]:
        raise ConfigError(f"no {values}", hint="try again")

    errors = ranks.run(lambda e: e.agree(lambda: e.rank, refuse))
    assert [type(error) for error in errors] == [ConfigError] * 3
    assert all("no [0, 1, 2]" in str(e) and e.hint == "try again" for e in errors)


def test_p5_all_that_came_hear_who_did_not() -> None:
    ranks = Ranks(4, timeout_s=0.3)
    errors = ranks.run(doubled, [0, 2])
    assert [type(error) for error in errors] == [WaitTimeoutError] * 2
    assert all("rank 1, 3 did not come" in str(error) for error in errors)
    (error,) = ranks.run(doubled, [3])
    assert "rank 0, 1, 2 did not come" in str(error)


def test_p5_a_rank_that_gave_up_can_come_again() -> None:
    ranks = Ranks(3, timeout_s=0.3)
    assert "rank 0, 2 did not come" in str(ranks.run(doubled, [1])[0])
    for exchange in ranks.exchanges:
        exchange.timeout_s = 30
    assert ranks.run(doubled) == [(2 * r, [0, 2, 4]) for r in range(3)]


def test_p5_a_rank_that_leaves_midway_is_named() -> None:
    ranks = Ranks(3, timeout_s=0.5)
    left = threading.Event()

    def leave(exchange: Exchange) -> Any:
        meeting = exchange.meet()
        first = meeting.agree(lambda: 1, lambda values: values)
        if exchange.rank == 2:
            left.set()
            return first
        assert left.wait(30)
        return meeting.agree(lambda: 1, lambda values: values)

    errors = ranks.run(leave)
    assert all("rank 2 did not come" in str(error) for error in errors[:2])
