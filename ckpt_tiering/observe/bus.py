"""Events from the journal into `events.jsonl`, each exactly once, even over crashes.

The journal keeps an event in the transaction that it reports on; here it is copied out. Lines bear
the journal's sequence number, so what was copied before a crash is seen from the log's own tail.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

from ckpt_tiering.observe.redact import redact

if TYPE_CHECKING:
    from pathlib import Path

    from ckpt_tiering.journal.journal import Journal

__all__ = ["EventLog", "append_line", "read_events"]

_TAIL_BYTES = 1 << 16


def append_line(path: Path, record: dict[str, Any]) -> None:
    """Append one event as a JSON line; lines of several processes never mix."""
    line = redact(json.dumps(record, ensure_ascii=False)) + "\n"
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o600)
    try:
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)


def read_events(path: Path) -> list[dict[str, Any]]:
    """Return all events of a log; a line torn by a power cut is passed over."""
    events = []
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                events.append(json.loads(line))
            except ValueError:
                continue
    return events


class EventLog:
    """Copies events from a journal to a log.

    Args:
        journal: Where events are kept first.
        path: The log.
    """

    def __init__(self, journal: Journal, path: Path) -> None:
        self._journal = journal
        self._path = path
        self._seq = self._last_seq()

    def _last_seq(self) -> int:
        if not self._path.exists():
            return 0
        with self._path.open("rb+") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(0, end - _TAIL_BYTES))
            tail = file.read()
            if tail and not tail.endswith(b"\n"):
                file.write(b"\n")  # a torn line must not swallow the next one
        for line in reversed(tail.splitlines()):
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict) and "seq" in record:
                return int(record["seq"])
        return 0

    def copy(self) -> None:
        """Copy new events to the log, then let the journal forget them."""
        events = self._journal.events_after(self._seq)
        for seq, record in events:
            append_line(self._path, {"seq": seq, **record})
            self._seq = seq
        if events:
            self._journal.drop_events(self._seq)
