"""One step of one save, and what an error does to it. The agent's worker calls nothing else.

An error of the world (network, credentials, permissions) puts the save back for later: what is
staged waits for as long as it takes. An error of the bytes (corrupt, conflicting, too large) ends
it, loudly.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from ckpt_tiering.errors import (
    CapacityError,
    CkptTieringError,
    ConfigError,
    ConflictError,
    CredentialError,
    FormatError,
    IntegrityError,
)
from ckpt_tiering.fsio import remove_tree
from ckpt_tiering.model.events import Event, EventKind
from ckpt_tiering.model.ids import SaveId
from ckpt_tiering.model.lifecycle import SaveState
from ckpt_tiering.observe.redact import redact
from ckpt_tiering.pipeline.commit import commit, publish, settle
from ckpt_tiering.pipeline.remove import remove_from_store
from ckpt_tiering.pipeline.upload import upload
from ckpt_tiering.pipeline.verify import verify

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckpt_tiering.agent.sessions import Sessions
    from ckpt_tiering.clock import Clock
    from ckpt_tiering.journal.journal import Journal
    from ckpt_tiering.journal.rows import SaveRow
    from ckpt_tiering.pipeline.session import Session

__all__ = ["Advancer"]

POLL_OTHER_NODES_S = 0.5
MAX_BACKOFF_S = 60.0
_MAX_DOUBLINGS = 10  # keeps the power in range over days of trying

# Waiting changes nothing about these: the bytes, or what is written at their place, are wrong.
_FINAL: Final = (IntegrityError, ConflictError, FormatError, CapacityError, ConfigError)


class Advancer:
    """Moves saves on.

    Args:
        journal: Where they stand.
        sessions: Their stores.
        clock: For times and back-off.
        staging: The staging directory, outside of which nothing is deleted.
    """

    def __init__(self, journal: Journal, sessions: Sessions, clock: Clock, staging: Path) -> None:
        self._journal = journal
        self._sessions = sessions
        self._clock = clock
        self._staging = staging
        self._steps: dict[SaveState, Callable[[Session, SaveRow], object]] = {
            SaveState.STAGED: self._upload,
            SaveState.UPLOADED: self._verify,
            SaveState.VERIFIED: lambda session, save: publish(journal, session, save),
            SaveState.PUBLISHED: self._commit,
            SaveState.DURABLE: lambda session, save: settle(journal, session, save),
            SaveState.REMOVING: self._remove,
        }

    def advance(self, save: SaveRow) -> None:
        """Take the next step of a save; an error is noted in the journal, never raised."""
        try:
            session = self._sessions.get(save.run, save.store_options)
            self._steps[save.state](session, save)
        except _FINAL as error:
            self._fail(save, error)
        except CkptTieringError as error:
            self._postpone(save, error)
        except Exception as error:  # noqa: BLE001  a bug in one save must not stop the others
            self._postpone(save, error)

    def _upload(self, session: Session, save: SaveRow) -> None:
        upload(self._journal, session, save, self._clock.now)

    def _verify(self, session: Session, save: SaveRow) -> None:
        verify(self._journal, session, save, self._clock.now)

    def _commit(self, session: Session, save: SaveRow) -> None:
        if commit(self._journal, session, save, self._clock.now) is None:
            self._journal.update(save, retry_at=self._clock.now() + POLL_OTHER_NODES_S)

    def _remove(self, session: Session, save: SaveRow) -> None:
        objects = remove_from_store(session, SaveId.parse(save.save_id))
        remove_tree(Path(save.directory), inside=self._staging)
        event = self._event(save, EventKind.DELETED, objects=objects, bytes=save.total_bytes)
        self._journal.forget(save, event)

    def _event(self, save: SaveRow, kind: EventKind, **fields: str | float | None) -> Event:
        return Event(
            kind=kind,
            at=self._clock.now(),
            run=save.run,
            save_id=save.save_id,
            step=save.step,
            fields=fields,
        )

    def _fail(self, save: SaveRow, error: CkptTieringError) -> None:
        current = self._journal.save(save.id)
        if current is None or current.state in {SaveState.DURABLE, SaveState.REMOVING}:
            # Durable stays durable, and a removal is tried until it is done.
            self._postpone(save, error)
            return
        message = redact(str(error))
        kind = EventKind.CORRUPT if isinstance(error, IntegrityError) else EventKind.FAILED
        if kind is EventKind.CORRUPT:
            self._journal.emit(
                self._event(save, kind, where="staged", error=message, reaction="save failed")
            )
        failed = self._event(save, EventKind.FAILED, error=message, error_kind=error.kind)
        self._journal.move(save, SaveState.FAILED, failed, error=message)

    def _postpone(self, save: SaveRow, error: Exception) -> None:
        current = self._journal.save(save.id)
        if current is None:
            return
        known = isinstance(error, CkptTieringError)
        message = redact(str(error) if known else f"{type(error).__name__}: {error}")
        attempts = current.attempts + 1
        wait_s = min(MAX_BACKOFF_S, 0.5 * 2.0 ** min(attempts, _MAX_DOUBLINGS))
        event = None
        if isinstance(error, CredentialError):
            # The next try reads the credentials anew, from wherever they come.
            self._sessions.close()
            if attempts == 1:
                event = self._event(save, EventKind.CREDENTIALS_EXPIRED, error=message)
        elif attempts == 1:
            event = self._event(save, EventKind.RETRY_STORM, error=message, state=current.state)
        self._journal.update(
            current,
            event,
            error=message,
            attempts=attempts,
            retry_at=self._clock.now() + wait_s,
        )
