"""Events from the journal into `events.jsonl`, each exactly once, even over crashes.

The journal keeps an event in the transaction that it reports on; here it is copied out. Lines bear
the journal's sequence number, so what was copied before a crash is seen from the log's own tail.
"""

from __future__ import annotations

import errno
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
    """Append one event as a JSON line; lines of several processes never mix.

    Raises:
        OSError: The line is not there, or only a part of it (a full disk).
    """
    # Before it is JSON: a secret is not found among escapes, and escapes must not be cut.
    safe = {key: redact(v) if isinstance(v, str) else v for key, v in record.items()}
    line = json.dumps(safe, ensure_ascii=False) + "\n"
    # A lone surrogate, from a path that is not UTF-8, becomes its JSON escape.
    _append(path, line.encode(errors="backslashreplace"))


def _append(path: Path, data: bytes) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o600)
    try:
        if os.write(descriptor, data) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    finally:
        os.close(descriptor)


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None  # torn by a power cut or a full disk
    return record if isinstance(record, dict) else None


def read_events(path: Path) -> list[dict[str, Any]]:
    """Return all events of a log; a line torn by a power cut is passed over."""
    lines = path.read_bytes().split(b"\n") if path.exists() else []
    return [record for line in lines if (record := _parse(line)) is not None]


class EventLog:
    """Copies events from a journal to a log.

    Args:
        journal: Where events are kept first.
        path: The log.
    """

    def __init__(self, journal: Journal, path: Path) -> None:
        self._journal = journal
        self._path = path
        self._seq: int | None = None  # of the last event in the log; None if it has to be looked up

    def _last_seq(self) -> int:
        """Find the last event of ours in the log, among those of trainers, which have no number."""
        if not self._path.exists():
            return 0
        with self._path.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            size, seq, tail = 0, None, b""
            while size < end and seq is None:
                size = min(end, max(_TAIL_BYTES, 2 * size))
                file.seek(end - size)
                tail = file.read(size)
                records = (_parse(line) for line in reversed(tail.split(b"\n")))
                seq = next((r["seq"] for r in records if r and isinstance(r.get("seq"), int)), None)
            torn = end > 0 and not tail.endswith(b"\n")
        if torn:
            _append(self._path, b"\n")  # a torn line must not swallow the next one
        if seq is None or seq > self._journal.newest_event():
            return 0  # the journal was made anew and counts from the beginning
        return int(seq)

    def copy(self) -> None:
        """Copy new events to the log, then let the journal forget them.

        Raises:
            OSError: The log can't be written; what is missing is copied by a later call.
        """
        seq = self._last_seq() if self._seq is None else self._seq
        self._seq = None  # until all went well
        events = self._journal.events_after(seq)
        for seq, record in events:
            append_line(self._path, {"seq": seq, **record})
        if events:
            self._journal.drop_events(seq)
        self._seq = seq
