"""Wishes that saves go: resolved, checked against P6, granted when something newer is durable."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_tiering.errors import CkptTieringError
from ckpt_tiering.model.events import Event, EventKind
from ckpt_tiering.model.ids import SaveId
from ckpt_tiering.model.lifecycle import SaveState
from ckpt_tiering.observe.redact import redact
from ckpt_tiering.pipeline.remove import remove_from_store
from ckpt_tiering.pipeline.resolve import all_infos
from ckpt_tiering.retention import may_remove

if TYPE_CHECKING:
    from ckpt_tiering.agent.sessions import Sessions
    from ckpt_tiering.clock import Clock
    from ckpt_tiering.journal.journal import Journal
    from ckpt_tiering.journal.rows import Removal

__all__ = ["Removals"]

_RETRY_S = 30.0


class Removals:
    """Grants wishes, one at a time. Used by the agent's one worker thread.

    Args:
        journal: Holds the wishes.
        sessions: The stores.
        clock: For event times and retries.
    """

    def __init__(self, journal: Journal, sessions: Sessions, clock: Clock) -> None:
        self._journal = journal
        self._sessions = sessions
        self._clock = clock
        self._named: dict[str, dict[str, list[str]]] = {}  # run -> name -> ids, before this agent
        self._refused: set[tuple[str, str]] = set()
        self._not_before: dict[int, float] = {}

    def work(self) -> bool:
        """Do one thing for one wish; return False if there is nothing to do now."""
        now = self._clock.monotonic()
        for wish in self._journal.removals():
            if self._not_before.get(wish.id, 0.0) > now:
                continue
            try:
                if self._grant(wish) if wish.save_id else self._resolve(wish):
                    return True
            except CkptTieringError as error:
                self._not_before[wish.id] = now + _RETRY_S
                self._journal.emit(
                    self._event(wish, EventKind.RETRY_STORM, redact(f"removal: {error}"))
                )
        return False

    def _resolve(self, wish: Removal) -> bool:
        """Find the saves of a name, here and from before this node's journal began."""
        ids = {s.save_id for s in self._journal.saves(wish.run) if s.name == wish.name}
        if wish.run not in self._named:
            session = self._sessions.get(wish.run, wish.store_options)
            named: dict[str, list[str]] = {}
            for info in all_infos(session):
                if info.name:
                    named.setdefault(info.name, []).append(info.save_id)
            self._named[wish.run] = named
        ids.update(self._named[wish.run].get(wish.name, []))
        meant = [i for i in ids if not wish.not_of or SaveId.parse(i).incarnation != wish.not_of]
        self._journal.resolve_removal(wish, sorted(meant))
        return True

    def _grant(self, wish: Removal) -> bool:
        victim = SaveId.parse(wish.save_id)
        pins = {SaveId.parse(p) for p in self._journal.pins(wish.run)}
        durable = [SaveId.parse(s.save_id) for s in self._journal.newest_durable(wish.run, 1)]
        if not may_remove(victim, durable, pins):
            if victim in pins and (wish.run, wish.save_id) not in self._refused:
                self._refused.add((wish.run, wish.save_id))
                self._journal.emit(
                    self._event(wish, EventKind.REMOVAL_REFUSED, "the run was resumed from it")
                )
            return False
        row = self._journal.find(wish.run, wish.save_id)
        if row is not None:
            if row.state is SaveState.REMOVING:
                return False
            self._journal.move(row, SaveState.REMOVING)
            return True
        session = self._sessions.get(wish.run, wish.store_options)
        objects = remove_from_store(session, victim)
        event = self._event(wish, EventKind.DELETED, None, objects=objects)
        self._journal.drop_removals(wish.run, wish.save_id, event)
        return True

    def _event(
        self, wish: Removal, kind: EventKind, error: str | None, **fields: str | float
    ) -> Event:
        return Event(
            kind=kind,
            at=self._clock.now(),
            run=wish.run,
            save_id=wish.save_id,
            fields={"name": wish.name, "error": error, **fields},
        )
