"""Tables of the journal, and how a database of an older release is brought up to date."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_tiering.errors import ConfigError, ErrorKind

if TYPE_CHECKING:
    import sqlite3

__all__ = ["migrate"]

# One script a version; a released one is never edited.
_MIGRATIONS = (
    """
    CREATE TABLE saves (
        id              INTEGER PRIMARY KEY,
        run             TEXT NOT NULL,
        store_options   TEXT NOT NULL,
        save_id         TEXT NOT NULL,
        step            INTEGER NOT NULL,
        name            TEXT,
        node            TEXT NOT NULL,
        num_nodes       INTEGER NOT NULL,
        ranks           TEXT NOT NULL,
        metadata        TEXT NOT NULL,
        directory       TEXT NOT NULL,
        state           TEXT NOT NULL,
        total_bytes     INTEGER NOT NULL,
        snapshot_at     REAL NOT NULL,
        staged_at       REAL NOT NULL,
        started_at      REAL,
        uploaded_at     REAL,
        durable_at      REAL,
        node_manifest   BLOB,
        writer          TEXT,
        on_nvme         INTEGER NOT NULL DEFAULT 1,
        error           TEXT,
        attempts        INTEGER NOT NULL DEFAULT 0,
        retry_at        REAL NOT NULL DEFAULT 0,
        owner           TEXT,
        lease_until     REAL NOT NULL DEFAULT 0,
        UNIQUE (run, save_id)
    );
    CREATE INDEX saves_by_state ON saves (state, retry_at);
    CREATE TABLE files (
        save            INTEGER NOT NULL REFERENCES saves ON DELETE CASCADE,
        position        INTEGER NOT NULL,
        source          TEXT NOT NULL,
        entry           TEXT NOT NULL,
        PRIMARY KEY (save, position)
    ) WITHOUT ROWID;
    CREATE TABLE objects (
        id              INTEGER PRIMARY KEY,
        save            INTEGER NOT NULL REFERENCES saves ON DELETE CASCADE,
        position        INTEGER NOT NULL,
        key             TEXT NOT NULL,
        is_pack         INTEGER NOT NULL,
        size_bytes      INTEGER NOT NULL,
        crc             TEXT NOT NULL,
        part_bytes      INTEGER NOT NULL,
        state           TEXT NOT NULL,
        upload_id       TEXT,
        verified        TEXT,
        resends         INTEGER NOT NULL DEFAULT 0,
        UNIQUE (save, position)
    );
    CREATE TABLE parts (
        object          INTEGER NOT NULL REFERENCES objects ON DELETE CASCADE,
        number          INTEGER NOT NULL,
        etag            TEXT NOT NULL,
        PRIMARY KEY (object, number)
    ) WITHOUT ROWID;
    CREATE TABLE removals (
        id              INTEGER PRIMARY KEY,
        run             TEXT NOT NULL,
        store_options   TEXT NOT NULL,
        save_id         TEXT NOT NULL,
        name            TEXT NOT NULL,
        not_of          TEXT NOT NULL,
        UNIQUE (run, save_id, name, not_of)
    );
    CREATE TABLE pins (
        run             TEXT NOT NULL,
        save_id         TEXT NOT NULL,
        PRIMARY KEY (run, save_id)
    ) WITHOUT ROWID;
    CREATE TABLE capabilities (
        run             TEXT PRIMARY KEY,
        value           TEXT NOT NULL
    ) WITHOUT ROWID;
    CREATE TABLE settings (
        id              INTEGER PRIMARY KEY CHECK (id = 1),
        value           TEXT NOT NULL
    );
    CREATE TABLE events (
        seq             INTEGER PRIMARY KEY AUTOINCREMENT,
        value           TEXT NOT NULL
    );
    """,
)


def migrate(connection: sqlite3.Connection) -> None:
    """Create or update the tables.

    Raises:
        ConfigError: The database was written by a newer release.
    """
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version > len(_MIGRATIONS):
        raise ConfigError(
            f"the journal has schema version {version}, this release knows {len(_MIGRATIONS)}",
            kind=ErrorKind.AGENT_VERSION,
            hint="upgrade ckpt-tiering, or give another staging directory",
        )
    for number in range(version, len(_MIGRATIONS)):
        # executescript would commit before it starts; a crash must leave the old schema or the new.
        statements = ";".join(("BEGIN IMMEDIATE", _MIGRATIONS[number]))
        connection.executescript(f"{statements}; PRAGMA user_version = {number + 1}; COMMIT;")
