"""The agent's memory: which save stands where. Every change is one transaction on the NVMe.

Only the agent writes; others may read while it does (SQLite's WAL). What was about to happen is
written before it happens, what did happen after it: an agent killed in between finds its way by
asking the store.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from ckpt_tiering.journal.database import Database
from ckpt_tiering.journal.rows import FileRow, NewSave, ObjectRow, Removal, SaveRow
from ckpt_tiering.model.ids import SaveId
from ckpt_tiering.model.lifecycle import OBJECT_MOVES, ObjectState, SaveState, check_move
from ckpt_tiering.model.manifest import FileEntry

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Iterable, Sequence

    from ckpt_tiering.model.events import Event

__all__ = ["Journal"]

_ACTIONABLE = (
    SaveState.STAGED,
    SaveState.UPLOADED,
    SaveState.VERIFIED,
    SaveState.PUBLISHED,
    SaveState.DURABLE,
    SaveState.REMOVING,
)
_COLUMNS = (
    "id, run, store_options, save_id, step, name, node, num_nodes, ranks, metadata, directory, "
    "state, total_bytes, snapshot_at, staged_at, started_at, uploaded_at, durable_at, "
    "node_manifest, writer, on_nvme, error, attempts, retry_at"
)
_SAVE_FIELDS = frozenset(
    {"started_at", "uploaded_at", "durable_at", "node_manifest", "writer", "on_nvme", "error"}
    | {"attempts", "retry_at"}
)


def _save_row(row: Sequence[Any]) -> SaveRow:
    values = dict(zip(_COLUMNS.split(", "), row, strict=True))
    values["ranks"] = tuple(json.loads(values["ranks"]))
    values["metadata"] = json.loads(values["metadata"])
    values["state"] = SaveState(values["state"])
    values["on_nvme"] = bool(values["on_nvme"])
    return SaveRow(**values)


def _marks(values: Sequence[object]) -> str:
    return ", ".join("?" * len(values))


class Journal(Database):
    """The journal of one staging directory. Safe to use from several threads.

    Arguments and errors are those of `Database`.
    """

    # --- saves -------------------------------------------------------------------------------

    def admit(
        self, save: NewSave, event: Event, *, failed: Event | None = None, error: str | None = None
    ) -> bool:
        """Take a staged save in; return False if it is already there.

        Args:
            save: The save.
            event: Says that it was staged.
            failed: Says that it can't become durable: it enters so, and is never worked on.
            error: Why, if so.
        """
        state = SaveState.STAGED if failed is None else SaveState.FAILED
        with self.transaction() as db:
            cursor = db.execute(
                "INSERT INTO saves (run, store_options, save_id, step, name, node, num_nodes, "
                "ranks, metadata, directory, state, total_bytes, snapshot_at, staged_at, error) "
                f"VALUES ({', '.join('?' * 15)}) ON CONFLICT DO NOTHING RETURNING id",
                (
                    save.run,
                    save.store_options,
                    save.save_id,
                    save.step,
                    save.name,
                    save.node,
                    save.num_nodes,
                    json.dumps(save.ranks),
                    json.dumps(save.metadata),
                    save.directory,
                    state,
                    sum(o.size_bytes for o in save.objects),
                    save.snapshot_at,
                    save.staged_at,
                    error,
                ),
            )
            row = cursor.fetchone()
            if row is None:
                return False
            db.executemany(
                "INSERT INTO files VALUES (?, ?, ?, ?)",
                (
                    (row[0], i, source, entry.model_dump_json())
                    for i, (source, entry) in enumerate(save.files)
                ),
            )
            db.executemany(
                "INSERT INTO objects (save, position, key, is_pack, size_bytes, crc, part_bytes, "
                "state) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    (
                        *(row[0], i, o.key, o.is_pack, o.size_bytes, f"{o.crc:016x}"),
                        *(o.part_bytes, ObjectState.PLANNED),
                    )
                    for i, o in enumerate(save.objects)
                ),
            )
            self._put_event(db, event)
            if failed is not None:
                self._put_event(db, failed)
            return True

    def saves(self, run: str | None = None, states: Sequence[SaveState] = ()) -> list[SaveRow]:
        """Return saves, oldest id first; of one run and in some states, if given."""
        where, values = ["1"], list[Any]()
        if run is not None:
            where.append("run = ?")
            values.append(run)
        if states:
            where.append(f"state IN ({_marks(states)})")
            values += states
        rows = self._query(
            f"SELECT {_COLUMNS} FROM saves WHERE {' AND '.join(where)} ORDER BY id", values
        )
        return [_save_row(row) for row in rows]

    def save(self, row_id: int) -> SaveRow | None:
        """Return one save; None if it is gone."""
        rows = self._query(f"SELECT {_COLUMNS} FROM saves WHERE id = ?", (row_id,))
        return _save_row(rows[0]) if rows else None

    def newest_durable(self, run: str, limit: int) -> list[SaveRow]:
        """Return the newest durable saves of a run that passed this node, newest first."""
        durable = "run = ? AND durable_at IS NOT NULL AND state != 'removing'"
        rows = self._query(
            f"SELECT {_COLUMNS} FROM saves WHERE {durable} AND step >= COALESCE((SELECT step "
            f"FROM saves WHERE {durable} ORDER BY step DESC LIMIT 1 OFFSET ?), 0)",
            (run, run, limit - 1),
        )
        # Within a step the id decides, by a rule that SQL's order of texts does not know.
        newest = sorted((_save_row(row) for row in rows), key=lambda s: SaveId.parse(s.save_id))
        return newest[::-1][:limit]

    def runs(self) -> list[str]:
        """Return the runs that have saves here."""
        return [row[0] for row in self._query("SELECT DISTINCT run FROM saves ORDER BY run")]

    def find(self, run: str, save_id: str) -> SaveRow | None:
        """Return the save of a run with this id; None if there is none."""
        rows = self._query(
            f"SELECT {_COLUMNS} FROM saves WHERE run = ? AND save_id = ?", (run, save_id)
        )
        return _save_row(rows[0]) if rows else None

    def claim(self, now: float, lease_s: float) -> SaveRow | None:
        """Take the save that is due next: removals first, then the oldest. None if none is due."""
        with self.transaction() as db:
            row = db.execute(
                f"SELECT {_COLUMNS} FROM saves WHERE state IN ({_marks(_ACTIONABLE)}) "
                "AND retry_at <= ? AND (owner IS NULL OR owner = ? OR lease_until < ?) "
                "ORDER BY state = 'removing' DESC, attempts > 0, id LIMIT 1",
                (*_ACTIONABLE, now, self._owner, now),
            ).fetchone()
            if row is None:
                return None
            db.execute(
                "UPDATE saves SET owner = ?, lease_until = ? WHERE id = ?",
                (self._owner, now + lease_s, row[0]),
            )
        return _save_row(row)

    def reclaim(self) -> None:
        """Free the leases of agents that went before, and let everything be due at once.

        The caller holds the directory's lock, so nobody else works on these saves.
        """
        with self.transaction() as db:
            db.execute("UPDATE saves SET owner = NULL, retry_at = 0")

    def next_due(self) -> float | None:
        """Return when the next save is due, in seconds since the epoch; None if there is none."""
        rows = self._query(
            f"SELECT MIN(retry_at) FROM saves WHERE state IN ({_marks(_ACTIONABLE)})", _ACTIONABLE
        )
        return None if rows[0][0] is None else float(rows[0][0])

    def update(self, save: SaveRow, event: Event | None = None, **fields: Any) -> SaveRow:
        """Set fields of a save, and keep an event with the same stroke."""
        unknown = set(fields) - _SAVE_FIELDS
        if unknown:
            raise ValueError(f"saves have no settable {unknown}")
        with self.transaction() as db:
            self._set(db, save, fields)
            if event is not None:
                self._put_event(db, event)
            return self._again(save)

    @staticmethod
    def _set(db: sqlite3.Connection, save: SaveRow, fields: dict[str, Any]) -> None:
        if fields:
            assignments = ", ".join(f"{name} = ?" for name in fields)
            db.execute(f"UPDATE saves SET {assignments} WHERE id = ?", (*fields.values(), save.id))

    def move(
        self, save: SaveRow, state: SaveState, event: Event | None = None, **fields: Any
    ) -> SaveRow:
        """Move a save to another state. An error that was noted is over unless given again.

        Raises:
            ValueError: The move is not legal, or the save is gone.
        """
        with self.transaction() as db:
            check_move(self._again(save).state, state)
            db.execute(
                "UPDATE saves SET state = ?, error = NULL, attempts = 0, retry_at = 0 WHERE id = ?",
                (state, save.id),
            )
            self._set(db, save, fields)
            if event is not None:
                self._put_event(db, event)
            return self._again(save)

    def _again(self, save: SaveRow) -> SaveRow:
        fresh = self.save(save.id)
        if fresh is None:
            raise ValueError(f"save {save.save_id} is gone from the journal")
        return fresh

    def forget(self, save: SaveRow, event: Event) -> None:
        """Drop a save that was deleted everywhere, and the wishes for that."""
        with self.transaction() as db:
            db.execute(
                "DELETE FROM removals WHERE run = ? AND save_id = ?", (save.run, save.save_id)
            )
            db.execute("DELETE FROM saves WHERE id = ?", (save.id,))
            self._put_event(db, event)

    def files(self, save: SaveRow) -> list[FileRow]:
        """Return the files of a save, in order."""
        rows = self._query(
            "SELECT source, entry FROM files WHERE save = ? ORDER BY position", (save.id,)
        )
        return [FileRow(source, FileEntry.model_validate_json(entry)) for source, entry in rows]

    # --- objects and parts -------------------------------------------------------------------

    def objects(self, save: SaveRow) -> list[ObjectRow]:
        """Return the objects of a save, in order."""
        rows = self._query(
            "SELECT id, position, key, is_pack, size_bytes, crc, part_bytes, state, upload_id, "
            "verified, resends FROM objects WHERE save = ? ORDER BY position",
            (save.id,),
        )
        return [
            ObjectRow(
                id=r[0],
                position=r[1],
                key=r[2],
                is_pack=bool(r[3]),
                size_bytes=r[4],
                crc=int(r[5], 16),
                part_bytes=r[6],
                state=ObjectState(r[7]),
                upload_id=r[8],
                verified=r[9],
                resends=r[10],
            )
            for r in rows
        ]

    def move_object(
        self,
        obj: ObjectRow,
        state: ObjectState,
        *,
        upload_id: str | None = None,
        verified: str | None = None,
    ) -> None:
        """Move an object to another state. Going back to ``planned`` forgets its upload.

        Raises:
            ValueError: The move is not legal.
        """
        with self.transaction() as db:
            (old,) = db.execute("SELECT state FROM objects WHERE id = ?", (obj.id,)).fetchone()
            if state not in OBJECT_MOVES[ObjectState(old)]:
                raise ValueError(f"an object can't go from {old} to {state}")
            if state is ObjectState.PLANNED:
                db.execute("DELETE FROM parts WHERE object = ?", (obj.id,))
            db.execute(
                "UPDATE objects SET state = ?, verified = ?, resends = resends + ?, "
                "upload_id = CASE WHEN ? THEN NULL ELSE COALESCE(?, upload_id) END WHERE id = ?",
                (
                    state,
                    verified,
                    state is ObjectState.PLANNED,
                    state is ObjectState.PLANNED,
                    upload_id,
                    obj.id,
                ),
            )

    def add_part(self, obj: ObjectRow, number: int, etag: str) -> None:
        """Note a part that the store has."""
        with self.transaction() as db:
            db.execute(
                "INSERT OR REPLACE INTO parts VALUES (?, ?, ?)",
                (obj.id, number, etag),
            )

    def parts(self, obj: ObjectRow) -> dict[int, str]:
        """Return the entity tags of the parts that the store has, by number."""
        return dict(
            self._query("SELECT number, etag FROM parts WHERE object = ? ORDER BY 1", (obj.id,))
        )

    # --- wishes, facts and events ------------------------------------------------------------

    def request_removal(
        self, run: str, store_options: str, *, save_id: str = "", name: str = "", not_of: str = ""
    ) -> None:
        """Note that somebody wants a save, or all saves of a name, to go; see `Removal`."""
        with self.transaction() as db:
            db.execute(
                "INSERT OR IGNORE INTO removals (run, store_options, save_id, name, not_of) "
                "VALUES (?, ?, ?, ?, ?)",
                (run, store_options, save_id, name, not_of),
            )

    def removals(self) -> list[Removal]:
        """Return the wishes that were neither granted nor dropped."""
        columns = ("id", "run", "store_options", "save_id", "name", "not_of")
        rows = self._query(f"SELECT {', '.join(columns)} FROM removals ORDER BY id")
        return [Removal(**dict(zip(columns, row, strict=True))) for row in rows]

    def drop_removals(self, run: str, save_id: str, event: Event | None = None) -> None:
        """Forget the wishes for a save, which were granted or are moot."""
        with self.transaction() as db:
            db.execute("DELETE FROM removals WHERE run = ? AND save_id = ?", (run, save_id))
            if event is not None:
                self._put_event(db, event)

    def resolve_removal(self, wish: Removal, save_ids: Iterable[str]) -> None:
        """Replace a wish for a name by wishes for saves."""
        with self.transaction() as db:
            db.executemany(
                "INSERT OR IGNORE INTO removals (run, store_options, save_id, name, not_of) "
                "VALUES (?, ?, ?, '', '')",
                ((wish.run, wish.store_options, save_id) for save_id in save_ids),
            )
            db.execute("DELETE FROM removals WHERE id = ?", (wish.id,))

    def pin(self, run: str, save_ids: Sequence[str]) -> None:
        """Protect these saves of a run from removal, and no others."""
        with self.transaction() as db:
            db.execute("DELETE FROM pins WHERE run = ?", (run,))
            db.executemany("INSERT INTO pins VALUES (?, ?)", ((run, s) for s in save_ids))

    def pins(self, run: str) -> frozenset[str]:
        """Return the protected saves of a run."""
        return frozenset(
            r[0] for r in self._query("SELECT save_id FROM pins WHERE run = ?", (run,))
        )
