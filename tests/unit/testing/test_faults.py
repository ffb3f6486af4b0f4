"""The tools of the tests are tested too: a fault that never fires proves nothing."""

from __future__ import annotations

import threading
from functools import partial

import pytest

from ckpt_tiering.errors import ThrottledError, TransientError
from ckpt_tiering.stores.body import Body
from ckpt_tiering.stores.memory import MemoryStore
from ckpt_tiering.testing.fake_clock import FakeClock
from ckpt_tiering.testing.faults import Call, Fault, FaultyStore, RecordingStore
from ckpt_tiering.testing.store_contract import read

BODY = Body.of_bytes(b"data")


def test_before_means_that_nothing_was_done() -> None:
    store = FaultyStore(MemoryStore(), [Fault(verb="put", nth=2)])
    store.put("a", BODY)
    with pytest.raises(TransientError):
        store.put("b", BODY)
    store.put("c", BODY)
    assert [info.key for info in store.list("")] == ["a", "c"]


def test_after_means_that_it_was_done_and_the_reply_was_lost() -> None:
    store = FaultyStore(MemoryStore(), [Fault(verb="put", when="after", key="b")])
    store.put("a", BODY)
    with pytest.raises(TransientError):
        store.put("b", BODY)
    assert read(store, "b") == b"data"


def test_every_call_fails_until_it_heals() -> None:
    store = FaultyStore(MemoryStore())
    store.add(Fault(verb="put", nth=None, error=lambda: ThrottledError("slow down")))
    for _ in range(3):
        with pytest.raises(ThrottledError):
            store.put("a", BODY)
    store.heal()
    store.put("a", BODY)


def test_reads_can_be_damaged() -> None:
    store = FaultyStore(MemoryStore())
    store.put("a", BODY)
    store.add(Fault(verb="get", nth=1, when="flip"))
    store.add(Fault(verb="get", nth=2, when="cut"))
    store.add(Fault(verb="get", nth=3, when="after"))
    assert read(store, "a") == b"eata"
    assert read(store, "a") == b"da"
    with pytest.raises(TransientError):
        read(store, "a")
    assert read(store, "a") == b"data"


def test_calls_are_recorded() -> None:
    store = RecordingStore(MemoryStore())
    store.put("a", BODY)
    read(store, "a")
    store.delete(["a", "b"])
    assert store.calls == [Call("put", "a"), Call("get", "a"), Call("delete", "a,b")]
    assert store.count("put") == 1


def test_the_fake_clock_runs_what_is_due_in_order() -> None:
    clock = FakeClock()
    seen: list[tuple[float, float]] = []

    def note(when: float) -> None:
        seen.append((when, clock.monotonic()))

    for when in (3.0, 1.0, 2.0, 9.0):
        clock.at(when, partial(note, when))
    clock.sleep(5)
    assert seen == [(1.0, 1.0), (2.0, 2.0), (3.0, 3.0)]
    assert clock.monotonic() == 5.0
    started = clock.now()
    stop = threading.Event()
    clock.at(6.0, stop.set)
    assert clock.wait(stop, 10)
    assert clock.now() - started == pytest.approx(1.0)
    assert not clock.wait(threading.Event(), 10)
