"""The SQLite database of the journal: one writer, transactions that survive a power cut, events."""

from __future__ import annotations

import json
import sqlite3
import threading
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ckpt_tiering.fsio import ensure_local_filesystem
from ckpt_tiering.journal.schema import migrate

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from ckpt_tiering.model.events import Event

__all__ = ["Database"]


class Database:
    """The journal without its saves. Safe to use from several threads.

    Args:
        path: The database; created if missing.
        owner: Token of this agent, for leases.
        read_only: Only look, as the CLI does beside a running agent.

    Raises:
        ConfigError: The path lies on a network file system, or a newer release wrote the database.
    """

    def __init__(self, path: Path, *, owner: str = "", read_only: bool = False) -> None:
        self._owner = owner
        self._lock = threading.RLock()
        if not read_only:
            ensure_local_filesystem(path.parent)
        target = f"{path.absolute().as_uri()}?mode=ro" if read_only else str(path)
        self._db = sqlite3.connect(
            target, uri=read_only, isolation_level=None, check_same_thread=False, timeout=30
        )
        self._db.execute("PRAGMA foreign_keys = ON")
        if not read_only:
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = FULL")
            migrate(self._db)

    def close(self) -> None:
        """Close the database."""
        with self._lock:
            self._db.close()

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Run writes as one: all of them are on disk afterwards, or none."""
        with self._lock:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")

    def _query(self, sql: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        with self._lock:
            return self._db.execute(sql, values).fetchall()

    def set_capabilities(self, run: str, value: str) -> None:
        """Keep what a store was seen to do, as JSON."""
        with self.transaction() as db:
            db.execute("INSERT OR REPLACE INTO capabilities VALUES (?, ?)", (run, value))

    def capabilities(self, run: str) -> str | None:
        """Return what a store was seen to do; None if it was not probed."""
        rows = self._query("SELECT value FROM capabilities WHERE run = ?", (run,))
        return rows[0][0] if rows else None

    def set_settings(self, value: str) -> None:
        """Keep the newest trainer's settings, as JSON, for agents that start without one."""
        with self.transaction() as db:
            db.execute("INSERT OR REPLACE INTO settings VALUES (1, ?)", (value,))

    def settings(self) -> str | None:
        """Return the newest trainer's settings; None if there never was one."""
        rows = self._query("SELECT value FROM settings")
        return rows[0][0] if rows else None

    def emit(self, event: Event) -> None:
        """Keep an event that goes with no other change."""
        with self.transaction() as db:
            self._put_event(db, event)

    def _put_event(self, db: sqlite3.Connection, event: Event) -> None:
        record = {k: v for k, v in asdict(event).items() if v not in ("", None)}
        record |= record.pop("fields")
        db.execute("INSERT INTO events (value) VALUES (?)", (json.dumps(record),))

    def events_after(self, seq: int) -> list[tuple[int, dict[str, Any]]]:
        """Return events with a sequence number above ``seq``."""
        rows = self._query("SELECT seq, value FROM events WHERE seq > ? ORDER BY seq", (seq,))
        return [(r[0], json.loads(r[1])) for r in rows]

    def newest_event(self) -> int:
        """Return the sequence number of the newest event ever kept; 0 if there was none."""
        rows = self._query("SELECT seq FROM sqlite_sequence WHERE name = 'events'")
        return int(rows[0][0]) if rows else 0

    def drop_events(self, up_to: int) -> None:
        """Forget events that were written to the log."""
        with self.transaction() as db:
            db.execute("DELETE FROM events WHERE seq <= ?", (up_to,))
