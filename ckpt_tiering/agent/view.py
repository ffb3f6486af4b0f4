"""What a staging directory holds, seen from outside: for people, with the agent alive or dead.

Reads files only. A connection to the agent's socket would count as a trainer, and the lock is for
agents: a look must not keep one from starting.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import psutil

from ckpt_tiering.agent.client import heartbeat_age, read_status
from ckpt_tiering.agent.ledger import HEARTBEAT_ALIVE_S
from ckpt_tiering.agent.statuspage import PENDING_STATES, save_status
from ckpt_tiering.errors import CkptTieringError, FormatError
from ckpt_tiering.journal.journal import Journal
from ckpt_tiering.model.layout import SEAL_NAME
from ckpt_tiering.model.lifecycle import ObjectState, SaveState
from ckpt_tiering.model.seal import decode_seal
from ckpt_tiering.observe.bus import read_events
from ckpt_tiering.observe.redact import redact
from ckpt_tiering.pipeline.admit import staged_directories

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckpt_tiering.agent.protocol import SaveStatus
    from ckpt_tiering.agent.protocol import Status as StatusPage
    from ckpt_tiering.clock import Clock
    from ckpt_tiering.journal.rows import SaveRow
    from ckpt_tiering.model.layout import StagingLayout

__all__ = [
    "AgentView",
    "RunView",
    "SaveView",
    "StagingView",
    "StatusFinding",
    "WishView",
    "last_events",
    "view",
]

DURABLE_SHOWN = 32
PAGE_WITHIN_S = 1.5  # three times the period of the status page
STUCK_ATTEMPTS = 3  # what a second or third attempt overcomes needs nobody's attention
SEALED = "sealed"  # staged and sealed, but no agent has taken it in yet

AgentState = Literal["running", "silent", "gone", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentView:
    """The agent.

    Attributes:
        state: ``running``; ``silent`` (its process is there, but gave no sign of life for five
            seconds); ``gone``; ``none`` (there never was one).
        pid: Its process.
        release: Version of its package.
        heartbeat_age_s: Seconds since its last sign of life; None if that was before this boot.
        sent_bytes: Bytes handed to stores since it started.
        retries: Requests that were repeated since it started.
        throttled_s: Seconds that requests waited on purpose since it started.
    """

    state: AgentState
    pid: int | None = None
    release: str | None = None
    heartbeat_age_s: float | None = None
    sent_bytes: int | None = None
    retries: int | None = None
    throttled_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveView:
    """A save of this node; see `SaveStatus`. What only the journal knows may be None.

    Attributes:
        sent_bytes: Bytes of finished objects and parts that the store has.
        num_objects: Number of objects.
        sent_objects: Number of objects that the store has.
        attempts: Number of times it was put back because of an error.
        retry_at: Not before this time, seconds since the epoch; None if nothing is waited for.
    """

    save_id: str
    step: int
    name: str | None
    state: str
    total_bytes: int
    snapshot_at: float
    staged_at: float
    started_at: float | None = None
    uploaded_at: float | None = None
    durable_at: float | None = None
    error: str | None = None
    sent_bytes: int | None = None
    num_objects: int | None = None
    sent_objects: int | None = None
    attempts: int | None = None
    retry_at: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """A run: its pending saves, oldest first; failed ones; and the newest durable ones."""

    run: str
    pending: tuple[SaveView, ...] = ()
    failed: tuple[SaveView, ...] = ()
    durable: tuple[SaveView, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class WishView:
    """A wish that a save, or all saves of a name, go; see `journal.rows.Removal`."""

    run: str
    save_id: str | None
    name: str | None
    not_of: str | None
    pinned: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusFinding:
    """One thing that somebody should look at.

    Attributes:
        problem: ``failed``, ``stuck`` (an error keeps coming back), ``no_agent``,
            ``agent_silent`` or ``journal`` (it can't be read). Append only.
        message: One sentence.
        run: The run, if it is about one.
        save_id: The save, if it is about one.
    """

    problem: Literal["failed", "stuck", "no_agent", "agent_silent", "journal"]
    message: str
    run: str | None = None
    save_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StagingView:
    """Everything together.

    Attributes:
        staging: The directory.
        now: When this was looked at, seconds since the epoch.
        source: Where the saves are from: ``journal``; ``page`` (the status page, as the journal
            can't be read); ``none``.
    """

    staging: str
    now: float
    source: Literal["journal", "page", "none"]
    agent: AgentView
    runs: tuple[RunView, ...]
    removals: tuple[WishView, ...]
    findings: tuple[StatusFinding, ...]

    def as_json(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return asdict(self)


def view(layout: StagingLayout, clock: Clock) -> StagingView:
    """Look at a staging directory. Reads local files only, and changes nothing."""
    page = read_status(layout)
    agent = _agent(page, layout, clock)
    runs: dict[str, RunView] = {}
    known: set[tuple[str, str]] = set()
    wishes: tuple[WishView, ...] = ()
    source: Literal["journal", "page", "none"] = "none"
    findings: list[StatusFinding] = []
    if layout.journal.exists():
        try:
            runs, wishes, known = _from_journal(layout)
            source = "journal"
        except (sqlite3.Error, CkptTieringError, ValueError) as error:
            why = f"the journal {layout.journal} can't be read: {error}"
            findings.append(StatusFinding(problem="journal", message=why))
    if source == "none" and page is not None:
        runs, source = _from_page(page), "page"
    # The page shows the newest durable saves only: what it does not name may be an older one.
    for run, save in _sealed(layout) if source != "page" else ():
        if (run, save.save_id) not in known:
            seen = runs.get(run, RunView(run=run))
            runs[run] = replace(seen, pending=(*seen.pending, save))
    ordered = tuple(runs[run] for run in sorted(runs))
    return StagingView(
        staging=str(layout.staging),
        now=clock.now(),
        source=source,
        agent=agent,
        runs=ordered,
        removals=wishes,
        findings=(*findings, *_findings(agent, ordered)),
    )


def last_events(layout: StagingLayout, count: int) -> list[dict[str, Any]]:
    """Return the last events, oldest first, with those that a dead agent had not copied yet."""
    if not count:
        return []
    events = read_events(layout.events)
    copied = max((e["seq"] for e in events if isinstance(e.get("seq"), int)), default=0)
    if layout.journal.exists():
        with suppress(sqlite3.Error), closing(Journal(layout.journal, read_only=True)) as journal:
            events += [{"seq": seq, **record} for seq, record in journal.events_after(copied)]
    return events[-count:]


def _agent(page: StatusPage | None, layout: StagingLayout, clock: Clock) -> AgentView:
    if page is None:
        return AgentView(state="none")
    age = heartbeat_age(page, clock)
    fresh = age is not None and age < HEARTBEAT_ALIVE_S
    there = age is not None and _is_agent(page.pid)
    if fresh and not there:  # killed a moment ago, or in another container
        there = _goes_on(page, layout, clock)
    state: AgentState = ("running" if fresh else "silent") if there else "gone"
    return AgentView(
        state=state,
        pid=page.pid,
        release=page.release,
        heartbeat_age_s=age,
        sent_bytes=page.sent_bytes,
        retries=page.retries,
        throttled_s=page.throttled_s,
    )


def _goes_on(page: StatusPage, layout: StagingLayout, clock: Clock) -> bool:
    """Tell whether the status page is still being written, by looking on for a moment."""
    deadline = clock.monotonic() + PAGE_WITHIN_S
    while clock.monotonic() < deadline:
        newer = read_status(layout)
        if newer is not None and newer.heartbeat != page.heartbeat:
            return True
        clock.sleep(0.05)
    return False


def _is_agent(pid: int) -> bool:
    """Tell whether this process is there and is an agent: numbers of processes are used again."""
    try:
        process = psutil.Process(pid)
        command = " ".join(process.cmdline())
        return process.status() != psutil.STATUS_ZOMBIE and (
            "ckpt_tiering" in command or "ckpt-tiering" in command
        )
    except psutil.AccessDenied:
        return True
    except psutil.Error:
        return False


def _from_journal(
    layout: StagingLayout,
) -> tuple[dict[str, RunView], tuple[WishView, ...], set[tuple[str, str]]]:
    """Return runs, wishes, and run and id of every save that the journal knows."""
    journal = Journal(layout.journal, read_only=True)
    try:
        runs = {
            run: RunView(
                run=run,
                pending=tuple(_row(journal, s) for s in journal.saves(run, PENDING_STATES)),
                failed=tuple(_row(journal, s) for s in journal.saves(run, (SaveState.FAILED,))),
                durable=tuple(_row(journal, s) for s in journal.newest_durable(run, DURABLE_SHOWN)),
            )
            for run in journal.runs()
        }
        wishes = tuple(
            WishView(
                run=wish.run,
                save_id=wish.save_id or None,
                name=wish.name or None,
                not_of=wish.not_of or None,
                pinned=wish.save_id in journal.pins(wish.run),
            )
            for wish in journal.removals()
        )
        known = {(save.run, save.save_id) for save in journal.saves()}
    finally:
        journal.close()
    return runs, wishes, known


def _row(journal: Journal, row: SaveRow) -> SaveView:
    objects = journal.objects(row)
    there = [o for o in objects if o.state in {ObjectState.SENT, ObjectState.VERIFIED}]
    sent = sum(o.size_bytes for o in there)
    for obj in objects:
        if obj.state is ObjectState.OPEN:
            sent += min(obj.size_bytes, len(journal.parts(obj)) * obj.part_bytes)
    known = save_status(row).model_dump()
    return SaveView(
        **known | {"error": None if row.error is None else redact(row.error)},
        sent_bytes=sent,
        num_objects=len(objects),
        sent_objects=len(there),
        attempts=row.attempts,
        retry_at=row.retry_at or None,
    )


def _from_page(page: StatusPage) -> dict[str, RunView]:
    def show(save: SaveStatus) -> SaveView:
        return SaveView(**save.model_dump())

    return {
        run.run: RunView(
            run=run.run,
            pending=tuple(map(show, run.pending)),
            failed=tuple(map(show, run.failed)),
            durable=tuple(map(show, run.durable)),
        )
        for run in page.runs
    }


def _sealed(layout: StagingLayout) -> Iterator[tuple[str, SaveView]]:
    """Yield what is sealed on the staging disk, whether or not an agent has taken it in."""
    for directory in staged_directories(layout):
        seals = []
        for path in sorted(directory.glob(f"*/{SEAL_NAME}")):
            try:
                seals.append(decode_seal(path.read_bytes(), str(path)))
            except (OSError, FormatError):
                continue
        if seals:
            first = seals[0]
            yield (
                first.run,
                SaveView(
                    save_id=first.save_id,
                    step=int(first.save_id[:12]),
                    name=first.name,
                    state=SEALED,
                    total_bytes=sum(f.size_bytes for seal in seals for f in seal.files),
                    snapshot_at=first.snapshot_at,
                    staged_at=max(seal.staged_at for seal in seals),
                ),
            )


def _findings(agent: AgentView, runs: tuple[RunView, ...]) -> Iterator[StatusFinding]:
    pending = [(run.run, save) for run in runs for save in run.pending]
    for run in runs:
        for save in run.failed:
            why = f"save {save.save_id} failed for good: {save.error}"
            yield StatusFinding(problem="failed", message=why, run=run.run, save_id=save.save_id)
    for url, save in pending:
        if save.error is not None and (save.attempts is None or save.attempts >= STUCK_ATTEMPTS):
            why = f"save {save.save_id} can't go on: {save.error}"
            yield StatusFinding(problem="stuck", message=why, run=url, save_id=save.save_id)
    if agent.state == "silent":
        why = f"agent {agent.pid} gave no sign of life for {agent.heartbeat_age_s or 0.0:.0f} s"
        yield StatusFinding(problem="agent_silent", message=why)
    if pending and agent.state in {"gone", "none"}:
        why = (
            f"{len(pending)} saves are staged here and not durable, and no agent runs; "
            "`ckpt-tiering agent --until-idle` ships them"
        )
        yield StatusFinding(problem="no_agent", message=why)
