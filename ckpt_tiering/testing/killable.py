"""An agent that kills itself at a chosen point: ``python -m ckpt_tiering.testing.killable``.

A point is ``before`` or ``after`` the n-th call of a verb of the store, or of a writing method of
the journal (``journal.move`` and the like). It dies by SIGKILL, so nothing gets to tidy up. Every
call is noted in a file before it begins: a run without a point lists the points there are, and one
with a point shows what it had done.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ckpt_tiering.agent.__main__ import lock_staging
from ckpt_tiering.agent.loop import Agent
from ckpt_tiering.agent.protocol import AgentSettings
from ckpt_tiering.journal.journal import Journal
from ckpt_tiering.model.layout import StagingLayout
from ckpt_tiering.stores.opening import open_store
from ckpt_tiering.stores.wrapper import WrapperStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckpt_tiering.stores.base import ObjectStore

__all__ = ["KillableJournal", "KillableStore", "Killer", "main"]

T = TypeVar("T")


class Killer:
    """Counts calls, notes them, and kills this process at one of them.

    Args:
        point: ``before:put_part:2`` and the like; None for never.
        record: File that calls are noted in.
    """

    def __init__(self, point: str | None, record: Path) -> None:
        self._point = point
        self._record = record
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def begin(self, verb: str, key: str = "") -> str:
        """Note a call; die if this is the point. Returns what to pass to `end`."""
        with self._lock:
            self._counts[verb] += 1
            name = f"{verb}:{self._counts[verb]}"
            with self._record.open("a", encoding="utf-8") as file:
                file.write(f"{name}\t{key}\n")
        self._die_at(f"before:{name}")
        return name

    def end(self, name: str) -> None:
        """Die if the point is after this call."""
        self._die_at(f"after:{name}")

    def _die_at(self, point: str) -> None:
        if point == self._point:
            os.kill(os.getpid(), signal.SIGKILL)


class KillableStore(WrapperStore):
    """A store whose calls a `Killer` watches."""

    def __init__(self, inner: ObjectStore, killer: Killer) -> None:
        super().__init__(inner)
        self._killer = killer

    def around(self, verb: str, key: str, call: Callable[[], T]) -> T:
        """Make the call between the two points."""
        name = self._killer.begin(verb, key)
        result = call()
        self._killer.end(name)
        return result


class KillableJournal(Journal):
    """A journal whose writes a `Killer` watches."""

    def __init__(self, path: Path, killer: Killer) -> None:
        self._killer = killer
        super().__init__(path, owner=f"pid-{os.getpid()}")


def _watched(method: str) -> Callable[..., Any]:
    write = getattr(Journal, method)

    def call(journal: KillableJournal, *arguments: Any, **keywords: Any) -> Any:
        name = journal._killer.begin(f"journal.{method}")  # noqa: SLF001  its own class
        result = write(journal, *arguments, **keywords)
        journal._killer.end(name)  # noqa: SLF001
        return result

    return call


for _method in (
    *("reclaim", "admit", "set_capabilities", "claim", "update", "move", "forget"),
    *("move_object", "add_part", "resolve_removal", "drop_removals", "emit", "drop_events"),
):
    setattr(KillableJournal, _method, _watched(_method))


def main() -> int:
    """Run the agent of a staging directory until it has nothing to do, or dies."""
    parser = argparse.ArgumentParser(prog="python -m ckpt_tiering.testing.killable")
    parser.add_argument("--staging", type=Path, required=True)
    parser.add_argument("--record", type=Path, required=True)
    parser.add_argument("--at", help="before|after:<verb>:<n>")
    options = parser.parse_args()
    layout = StagingLayout(options.staging)
    if lock_staging(layout) is None:
        return 3
    killer = Killer(options.at, options.record)

    def opener(*arguments: Any, **keywords: Any) -> ObjectStore:
        return KillableStore(open_store(*arguments, **keywords), killer)

    Agent(
        layout,
        opener=opener,
        journal=KillableJournal(layout.journal, killer),
        until="idle",
        # One request at a time, so that the n-th call is the same one in every run.
        settings=AgentSettings(concurrency=1),
    ).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
