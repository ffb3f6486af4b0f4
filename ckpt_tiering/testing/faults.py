"""Stores that remember what was asked of them, and stores that fail on demand."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeVar

from ckpt_tiering.errors import TransientError
from ckpt_tiering.stores.wrapper import WrapperStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ckpt_tiering.stores.base import ObjectStore

__all__ = ["Call", "Fault", "FaultyStore", "RecordingStore"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a verb, with its key (see `WrapperStore.around`)."""

    verb: str
    key: str


class RecordingStore(WrapperStore):
    """Keeps a list of all calls, in the order they began.

    Attributes:
        calls: The calls so far.
    """

    def __init__(self, inner: ObjectStore) -> None:
        super().__init__(inner)
        self.calls: list[Call] = []

    def around(self, verb: str, key: str, call: Callable[[], T]) -> T:
        """Note the call, then make it."""
        self.calls.append(Call(verb, key))
        return call()

    def count(self, verb: str) -> int:
        """Return how often a verb was called."""
        return sum(call.verb == verb for call in self.calls)


def _lost() -> Exception:
    return TransientError("injected fault")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A rule for `FaultyStore`.

    Attributes:
        verb: Method of `ObjectStore` that fails.
        nth: Which call of those that match fails, counted from 1; None for every one.
        when: ``before`` the store sees the request; ``after`` it has done it (a lost reply);
            or, for ``get`` only, the bytes are damaged: ``flip`` a bit of the first byte, or
            ``cut`` the stream after half of it, without an error.
        key: Text that the key must hold; empty for all keys.
        error: Makes the error that is raised.
    """

    verb: str
    nth: int | None = 1
    when: Literal["before", "after", "flip", "cut"] = "before"
    key: str = ""
    error: Callable[[], Exception] = _lost


class FaultyStore(WrapperStore):
    """Fails by rule. Counts matching calls for each rule of its own. Safe to use from threads.

    Args:
        inner: The store that does the work.
        faults: The rules; more can be added with `add` at any time.
    """

    def __init__(self, inner: ObjectStore, faults: Sequence[Fault] = ()) -> None:
        super().__init__(inner)
        self._faults = list(faults)
        self._seen: Counter[int] = Counter()
        self._lock = threading.Lock()

    def add(self, fault: Fault) -> None:
        """Add a rule; its count begins now."""
        with self._lock:
            self._faults.append(fault)

    def heal(self) -> None:
        """Drop all rules."""
        with self._lock:
            self._faults.clear()
            self._seen.clear()

    def around(self, verb: str, key: str, call: Callable[[], T]) -> T:
        """Make the call, or fail, or both."""
        due = self._due(verb, key)
        for fault in due:
            if fault.when == "before":
                raise fault.error()
        answer = call()
        for fault in due:
            if fault.when == "after":
                raise fault.error()
        return answer

    def get(self, key: str, start: int = 0, end: int | None = None) -> Iterator[bytes]:
        """Yield the bytes, damaged where a rule says so."""
        due = self._due("get", key)
        for fault in due:
            if fault.when == "before":
                raise fault.error()
        damage = {fault.when for fault in due}
        data = b"".join(self.inner.get(key, start, end)) if damage else b""
        if not damage:
            yield from self.inner.get(key, start, end)
            return
        if "flip" in damage and data:
            data = bytes([data[0] ^ 1]) + data[1:]
        yield data[: len(data) // 2] if damage & {"cut", "after"} else data
        for fault in due:
            if fault.when == "after":
                raise fault.error()

    def _due(self, verb: str, key: str) -> list[Fault]:
        due = []
        with self._lock:
            for index, fault in enumerate(self._faults):
                if fault.verb == verb and fault.key in key:
                    self._seen[index] += 1
                    if fault.nth in {None, self._seen[index]}:
                        due.append(fault)
        return due
