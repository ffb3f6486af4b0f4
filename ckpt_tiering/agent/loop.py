"""The agent: takes staged saves to the store, one step at a time, until nothing is left to do.

Two threads of its own beside those of requests and connections: the *worker*, which is the only one
that moves saves, and the *pulse*, which writes the status page and the event log.
"""

from __future__ import annotations

import os
import secrets
import sqlite3
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ckpt_tiering import __version__
from ckpt_tiering.agent.advance import Advancer
from ckpt_tiering.agent.protocol import (
    PROTOCOL_VERSION,
    AgentSettings,
    Drop,
    Hello,
    Pin,
    Request,
    Sealed,
    Snapshot,
    Stop,
)
from ckpt_tiering.agent.removals import Removals
from ckpt_tiering.agent.server import Server
from ckpt_tiering.agent.sessions import Sessions, StoreOpener
from ckpt_tiering.agent.stager import Stager
from ckpt_tiering.agent.statuspage import PENDING_STATES, status_page
from ckpt_tiering.clock import Clock, SystemClock
from ckpt_tiering.errors import AgentError, ErrorKind, FormatError
from ckpt_tiering.flow.meter import Meter
from ckpt_tiering.fsio import boot_id, free_bytes, remove_tree, write_atomically
from ckpt_tiering.journal.journal import Journal
from ckpt_tiering.model.events import Event, EventKind
from ckpt_tiering.model.ids import SaveId
from ckpt_tiering.model.layout import StagingLayout, StoreUrl
from ckpt_tiering.model.lifecycle import SaveState
from ckpt_tiering.observe.bus import EventLog
from ckpt_tiering.observe.redact import redact
from ckpt_tiering.pipeline.admit import Admission, admit, staged_directories
from ckpt_tiering.retention import evictable
from ckpt_tiering.stores.hot import HotFiles
from ckpt_tiering.stores.opening import open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pydantic import BaseModel

__all__ = ["Agent", "Until"]

Until = Literal["no_trainer", "idle", "stopped"]

PULSE_S = 0.5
JOURNAL_RETRY_S = 5.0
FIRST_TRAINER_WITHIN_S = 30.0
LEASE_S = 60.0
NVME_SHARE = 0.8


class Agent:
    """The background process of a node, without the process.

    Args:
        layout: The staging directory; the caller holds its lock.
        clock: Where time comes from.
        opener: How stores are opened.
        journal: The journal; opened at its place by default.
        until: When to end by itself: ``no_trainer`` (nothing to do, and the trainers that came
            are gone), ``idle`` (nothing to do), or ``stopped`` (never).
        settings: Until a trainer brings its own; the last trainer's by default.
    """

    def __init__(
        self,
        layout: StagingLayout,
        *,
        clock: Clock | None = None,
        opener: StoreOpener = open_store,
        journal: Journal | None = None,
        until: Until = "no_trainer",
        settings: AgentSettings | None = None,
    ) -> None:
        self._layout = layout
        self._clock = clock or SystemClock()
        self._journal = journal or Journal(layout.journal, owner=secrets.token_hex(8))
        self._until = until
        self._settings = settings or self._last_settings()
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._news = threading.Event()
        self._incomplete: frozenset[Path] = frozenset()
        self._new_settings: AgentSettings | None = None
        self._environment_changed = threading.Event()
        self._meter = Meter()
        self._hot = HotFiles()
        self._log = EventLog(self._journal, layout.events)
        self._sessions = Sessions(
            self._journal, self._clock, self._stop, self._meter, hot=self._hot, opener=opener
        )
        self._sessions.configure(self._settings)
        self._advancer = Advancer(self._journal, self._sessions, self._clock, layout.staging)
        self._removals = Removals(self._journal, self._sessions, self._clock)
        self._stager = Stager(layout, self._clock, self._hot, self._take_in, self._refuse)
        self._server = Server(layout.agent_dir, self._handle, self._on_trainers)
        self._boot_id = boot_id()
        self._alone_since: float | None = self._clock.monotonic()

    def _last_settings(self) -> AgentSettings:
        kept = self._journal.settings()
        return AgentSettings() if kept is None else AgentSettings.model_validate_json(kept)

    # --- what others ask of it ---------------------------------------------------------------

    def stop(self) -> None:
        """Ask the agent to give up the parts in hand and end. Safe in a signal handler."""
        self._stop.set()
        self._wake.set()

    def _on_trainers(self) -> None:
        if not self._server.trainers:
            self._hot.clear()
        self._wake.set()

    def _handle(
        self, request: Request, descriptor: int | None, push: Callable[[BaseModel], None]
    ) -> None:
        if descriptor is not None and not isinstance(request, Snapshot):
            os.close(descriptor)
        match request:
            case Snapshot():
                if descriptor is not None:
                    self._stager.put(request, descriptor, push)
            case Hello():
                self._greet(request)
            case Sealed():
                self._take_in(Path(request.directory))
            case Drop():
                self._journal.request_removal(
                    request.run,
                    request.store_options,
                    save_id=request.save_id,
                    name=request.name,
                    not_of=request.not_of,
                )
            case Pin():
                self._journal.pin(request.run, request.save_ids)
            case Stop():
                self.stop()
        self._wake.set()

    def _take_in(self, directory: Path, *, check_digests: bool = False) -> None:
        """Put a sealed save into the journal."""
        if not directory.is_relative_to(self._layout.runs_dir) or not directory.is_dir():
            return
        now = self._clock.now()
        if (
            admit(self._journal, directory, now, check_digests=check_digests)
            is Admission.INCOMPLETE
        ):
            self._incomplete |= {directory}
        else:
            self._incomplete -= {directory}
        self._news.set()

    def _refuse(self, snapshot: Snapshot, why: str) -> None:
        """Say of a snapshot that it can't be staged. Never raises: the next one is to be staged."""
        try:
            step = SaveId.parse(snapshot.save_id).step
        except FormatError:
            step = None  # which may be why
        event = Event(
            kind=EventKind.FAILED,
            at=self._clock.now(),
            run=snapshot.run,
            save_id=snapshot.save_id,
            step=step,
            fields={"error": redact(why)},
        )
        try:
            self._journal.emit(event)
        except sqlite3.Error as error:
            sys.stderr.write(f"event {event.kind} can't be kept: {error}\n")

    def _greet(self, hello: Hello) -> None:
        if hello.protocol != PROTOCOL_VERSION or hello.release != __version__:
            raise AgentError(
                f"this agent is of release {__version__}, the trainer of {hello.release}",
                kind=ErrorKind.AGENT_VERSION,
            )
        self._journal.set_settings(hello.settings.model_dump_json())
        self._sessions.limit(hello.settings.max_bandwidth)
        self._new_settings = hello.settings  # the rest when the worker is between two steps
        self._take_over(hello.environment)
        self._sweep_torn(StoreUrl.parse(hello.run), hello.incarnation)

    def _take_over(self, environment: Mapping[str, str]) -> None:
        """Go on with the credentials of the newest trainer, unless this agent is a service."""
        mine = {k: v for k, v in os.environ.items() if k.startswith("AWS_")}
        if self._until == "stopped" or not environment or environment == mine:
            return
        for name in mine.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)
        self._environment_changed.set()

    def _sweep_torn(self, url: StoreUrl, incarnation: str) -> None:
        """Delete what earlier starts of a run staged and did not finish: it can't become whole."""
        saves = self._layout.run_dir(url) / "saves"
        for directory in sorted(saves.iterdir()) if saves.is_dir() else ():
            try:
                save_id = SaveId.parse(directory.name)
            except FormatError:
                continue  # not ours
            # What the agent itself is about to write of a trainer that is gone is not torn.
            in_hand = (str(url), str(save_id)) in self._stager.held
            known = in_hand or self._journal.find(str(url), str(save_id)) is not None
            if known or save_id.incarnation == incarnation:
                continue
            event = Event(
                kind=EventKind.TORN,
                at=self._clock.now(),
                run=str(url),
                save_id=directory.name,
                step=save_id.step,
                fields={"error": "its trainer died before all ranks of this node had sealed it"},
            )
            self._journal.emit(event)
            remove_tree(directory, inside=self._layout.staging)

    # --- the worker --------------------------------------------------------------------------

    def run(self) -> None:
        """Work until stopped, or until there is nothing left to do. Blocks."""
        self._journal.reclaim()
        self._say(EventKind.AGENT_STARTED, pid=os.getpid(), release=__version__)
        for directory in staged_directories(self._layout):
            self._take_in(directory, check_digests=True)
        self._stager.start()
        self._server.start()
        done = threading.Event()
        pulse = threading.Thread(target=self._pulse, args=(done,), name="pulse")
        pulse.start()
        try:
            while not self._stop.is_set() and not self._finished():
                try:
                    self._turn()
                except sqlite3.Error as error:  # a full disk; what is staged is not less staged
                    sys.stderr.write(f"the journal can't be written: {error}\n")
                    self._clock.wait(self._stop, JOURNAL_RETRY_S)
        finally:
            self._server.close()
            self._stager.close()
            self._sessions.close()
            self._say(EventKind.AGENT_STOPPED, pid=os.getpid(), pending=len(self._pending()))
            done.set()
            self._news.set()
            pulse.join()
            self._journal.close()

    def _turn(self) -> None:
        self._wake.clear()
        if self._environment_changed.is_set():
            self._environment_changed.clear()
            self._sessions.close()
            self._journal.reclaim()  # what waits because of the old credentials is due now
        settings, self._new_settings = self._new_settings, None
        if settings is not None:
            self._settings = settings
            self._sessions.configure(settings)
        save = self._journal.claim(self._clock.now(), LEASE_S)
        if save is not None:
            self._advancer.advance(save)
            self._news.set()
            if save.state is SaveState.PUBLISHED:
                self._evict()
        elif not self._removals.work():
            due = self._journal.next_due()
            wait_s = PULSE_S if due is None else min(PULSE_S, due - self._clock.now())
            self._clock.wait(self._wake, max(0.01, wait_s))

    def _evict(self) -> None:
        """Delete staged copies of durable saves until the staging disk keeps its budget."""
        rows = [s for s in self._journal.saves() if s.on_nvme and Path(s.directory).exists()]
        used = sum(s.total_bytes for s in rows)
        budget = self._settings.nvme_budget or int(
            NVME_SHARE * (free_bytes(self._layout.staging) + used)
        )
        by_id = {
            (s.run, SaveId.parse(s.save_id)): s
            for s in rows
            if s.state in {SaveState.DURABLE, SaveState.SETTLED}
        }
        for run in {run for run, _ in by_id}:
            sizes = [(i, s.total_bytes) for (r, i), s in by_id.items() if r == run]
            for save_id in evictable(sizes, used, budget):
                row = by_id[run, save_id]
                remove_tree(Path(row.directory), inside=self._layout.staging)
                event = Event(
                    kind=EventKind.EVICTED,
                    at=self._clock.now(),
                    run=run,
                    save_id=row.save_id,
                    step=row.step,
                    fields={"bytes": row.total_bytes},
                )
                self._journal.update(row, event, on_nvme=False)
                used -= row.total_bytes

    def _pending(self) -> list[str]:
        return [s.save_id for s in self._journal.saves(states=PENDING_STATES)]

    def _finished(self) -> bool:
        """Tell whether to end: no trainer, and nothing to do or no time left to do it in."""
        now = self._clock.monotonic()
        if self._until == "stopped" or self._server.trainers:
            self._alone_since = None
            return False
        if self._alone_since is None:
            self._alone_since = now
        alone_s = now - self._alone_since
        expecting = self._until == "no_trainer" and not self._server.ever_had_trainers
        if expecting and alone_s < FIRST_TRAINER_WITHIN_S:
            return False
        if self._stager.held:
            return False  # only this process holds it
        busy = self._journal.next_due() is not None or self._removals.work()
        return not busy or alone_s > self._settings.linger

    # --- the pulse ---------------------------------------------------------------------------

    def _pulse(self, done: threading.Event) -> None:
        last = False
        while not last:
            last = done.is_set()
            try:
                self._write_status()
                self._log.copy()
            except (OSError, sqlite3.Error) as error:
                # A full disk: the page grows old, which is how it is seen.
                sys.stderr.write(f"status page or event log can't be written: {error}\n")
            self._clock.wait(self._news, PULSE_S)
            self._news.clear()

    def _write_status(self) -> None:
        page = status_page(
            self._journal,
            self._meter.read(),
            incomplete=self._incomplete,
            held=self._stager.held,
            pid=os.getpid(),
            boot_id=self._boot_id,
            heartbeat=self._clock.monotonic(),
        )
        write_atomically(self._layout.status, page.model_dump_json().encode(), durable=False)

    def _say(self, kind: EventKind, **fields: str | float) -> None:
        self._journal.emit(Event(kind=kind, at=self._clock.now(), fields=fields))
