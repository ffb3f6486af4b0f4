"""Reading checkpoints: which there are, and their files, from the nearest tier. Needs no agent."""

from __future__ import annotations

import fcntl
import logging
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

from ckpt_tiering.clock import Clock, SystemClock
from ckpt_tiering.errors import (
    ConfigError,
    ErrorKind,
    FormatError,
    IntegrityError,
    NotFoundError,
    TransientError,
)
from ckpt_tiering.flow.meter import Meter
from ckpt_tiering.flow.retry import Retrier
from ckpt_tiering.fsio import make_private, remove_tree
from ckpt_tiering.model.catalog import SaveInfo, newest_named
from ckpt_tiering.model.events import EventKind
from ckpt_tiering.model.findings import Finding, Problem, SaveCheck
from ckpt_tiering.model.ids import SaveId
from ckpt_tiering.model.layout import StagingLayout, StoreUrl, check_relative_path
from ckpt_tiering.observe.bus import append_line
from ckpt_tiering.pipeline.ranges import Deliver, RangesReport, read_ranges
from ckpt_tiering.pipeline.recheck import recheck
from ckpt_tiering.pipeline.resolve import (
    Catalog,
    WholeSave,
    all_infos,
    catalog,
    check_manifests,
    commits,
    load_save,
    newest,
    read_info,
)
from ckpt_tiering.pipeline.restore import RestoreReport, restore_files
from ckpt_tiering.pipeline.session import Session
from ckpt_tiering.stores.base import Capabilities
from ckpt_tiering.stores.opening import open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from ckpt_tiering.config import StoreOptions
    from ckpt_tiering.model.manifest import FileEntry
    from ckpt_tiering.model.ranges import ByteRange

__all__ = ["Reader"]

_log = logging.getLogger(__name__)

GIVE_UP_AFTER_S = 60.0
MAX_WAIT_S = 10.0
TIER_SCHEME = "tier://"
# Reading asks nothing of a store that any of them lacks, and trusts no checksum but its own.
_READING = Capabilities(
    conditional_put=False, checks_crc64nvme=False, tags=False, lists_uploads=False
)


class Reader:
    """Reads the saves of a run, and by URL those of others.

    Args:
        url: Root of the run.
        options: How to reach the store.
        layout: Staging directory of this node, whose copies are used first; None for none.
        concurrency: Number of requests in flight.
        clock: For retries and event times.
    """

    def __init__(
        self,
        url: StoreUrl,
        options: StoreOptions,
        *,
        layout: StagingLayout | None = None,
        concurrency: int = 4,
        clock: Clock | None = None,
    ) -> None:
        self._url = url
        self._options = options
        self._layout = layout
        self._concurrency = concurrency
        self._clock = clock or SystemClock()
        self._kept: Session | None = None

    @contextmanager
    def keep_open(self) -> Iterator[None]:
        """Use one session for all that is asked of this run in a ``with`` block, by one thread."""
        with self._session(self._url) as session:
            self._kept = session
            try:
                yield
            finally:
                self._kept = None

    @contextmanager
    def _session(self, url: StoreUrl) -> Iterator[Session]:
        if self._kept is not None and url == self._url:
            yield self._kept
            return
        stop = threading.Event()
        meter = Meter()

        def retried(error: TransientError, _attempts: int, wait_s: float) -> None:
            meter.retried()
            _log.info("trying again in %.1f s: %s", wait_s, error.message)

        retrier = Retrier(
            self._clock,
            stop,
            max_wait_s=MAX_WAIT_S,
            give_up_after_s=GIVE_UP_AFTER_S,
            on_retry=retried,
        )
        store = open_store(url, self._options, concurrency=self._concurrency, capabilities=_READING)
        with closing(store), ThreadPoolExecutor(self._concurrency, "request") as pool:
            try:
                yield Session(
                    store=store,
                    capabilities=_READING,
                    retrier=retrier,
                    pool=pool,
                    concurrency=self._concurrency,
                    meter=meter,
                )
            finally:
                stop.set()

    # --- which saves there are ---------------------------------------------------------------

    def latest(self) -> SaveInfo | None:
        """Return the newest durable save; None if there is none."""
        with self._session(self._url) as session:
            return newest(session)

    def saves(self) -> list[SaveInfo]:
        """Return all durable saves, newest first."""
        with self._session(self._url) as session:
            return list(all_infos(session))

    def catalog(self) -> Catalog:
        """Return all durable saves, and what else lies where commits do."""
        with self._session(self._url) as session:
            return catalog(session)

    def commits(self) -> tuple[list[SaveId], list[Finding]]:
        """Return the ids of all durable saves, newest first, and foreign files; reads none."""
        with self._session(self._url) as session:
            return commits(session)

    def resolve(self, reference: str) -> SaveInfo:
        """Find a durable save; see `TieredCheckpointer.resolve`.

        Raises:
            NotFoundError: There is no such save; says what was looked for and where.
        """
        text = reference.removeprefix(TIER_SCHEME)
        if text == "latest":
            return self._latest_of(self._url, reference)
        if "://" in text:
            try:
                root, save_id = StoreUrl.parse(text).split_save()
            except ConfigError as error:
                raise NotFoundError(f"{reference!r} is no save: {error.message}") from error
            return (
                self._latest_of(root, reference)
                if save_id is None
                else self._by_id(root, save_id, reference)
            )
        try:
            save_id = SaveId.parse(text)
        except FormatError:
            return self._by_name(text, reference)
        return self._by_id(self._url, save_id, reference)

    def _latest_of(self, root: StoreUrl, reference: str) -> SaveInfo:
        with self._session(root) as session:
            info = newest(session)
        if info is None:
            raise NotFoundError(
                f"{reference!r}: no durable save below {root}/commits/",
                hint="check the URL; `ckpt-tiering ls` lists what is there",
            )
        return info

    def _by_id(self, root: StoreUrl, save_id: SaveId, reference: str) -> SaveInfo:
        with self._session(root) as session, _named(root, save_id, reference):
            return read_info(session, save_id)

    def _by_name(self, name: str, reference: str) -> SaveInfo:
        saves = self.saves()
        info = newest_named(saves, name)
        if info is None:
            names = ", ".join(repr(s.name) for s in saves[:5] if s.name) or "none"
            raise NotFoundError(
                f"{reference!r}: no durable save of that name below {self._url}/commits/ "
                f"({len(saves)} saves; newest names: {names})"
            )
        return info

    # --- their files -------------------------------------------------------------------------

    def load(self, save: SaveInfo) -> WholeSave:
        """Read and compare the node manifests of a save.

        Raises:
            NotFoundError: One is not there.
            FormatError: One is not what was committed.
        """
        with self._session(StoreUrl.parse(save.run)) as session:
            return load_save(session, save.id)

    def verify(
        self,
        save_id: SaveId,
        *,
        deep: bool = False,
        expect: Callable[[int], None] = lambda _: None,
        progress: Callable[[int], None] = lambda _: None,
    ) -> SaveCheck:
        """Compare everything that the store has of a save of this run with its manifests.

        Args:
            save_id: The save.
            deep: Download and digest every byte; otherwise the store is asked.
            expect: Called with the number of bytes that there are, before the first is compared.
            progress: Called with the number of bytes done, from several threads.

        Raises:
            NotFoundError: There is no such durable save, or it was deleted meanwhile.
        """
        with self._session(self._url) as session:
            with _named(self._url, save_id, str(save_id)):
                nodes, wrong = check_manifests(session, save_id)
            if nodes is None:
                return SaveCheck(save_id=str(save_id), readable=False, findings=tuple(wrong))
            total = sum(o.size_bytes for n in nodes for o in n.objects)
            expect(total)
            report = recheck(session, nodes, deep=deep, progress=progress)
            findings = [*wrong, *report.findings]
            if any(f.problem is Problem.MISSING for f in findings):
                with _named(self._url, save_id, str(save_id)):
                    read_info(session, save_id)
        return SaveCheck(
            save_id=str(save_id),
            readable=True,
            findings=tuple(sorted(findings, key=lambda f: (f.key, f.start or 0))),
            num_objects=sum(len(n.objects) for n in nodes),
            total_bytes=total,
            checked_by=report.checked_by,
        )

    def restore(
        self,
        save: SaveInfo,
        target: Path,
        *,
        wanted: Callable[[str], bool] = lambda _: True,
        share: bool = False,
        progress: Callable[[int], None] = lambda _: None,
    ) -> RestoreReport:
        """Bring files of a save into a directory; see `restore_files`.

        Raises:
            IntegrityError: No tier has a good copy.
            NotFoundError: An object, or any file that was wanted, is not there.
        """
        url = StoreUrl.parse(save.run)
        with self._session(url) as session:
            whole = load_save(session, save.id)
            if not any(wanted(f.path) for node in whole.nodes for f in node.files):
                paths = ", ".join(repr(f.path) for n in whole.nodes for f in n.files[:5])
                raise NotFoundError(
                    f"save {save.save_id} of {save.run} has no such file; it has {paths}"
                )
            try:
                report = restore_files(
                    session,
                    whole.nodes,
                    target,
                    wanted=wanted,
                    local_copies=lambda entry: self._copies(url, save.id, entry, target),
                    share=share,
                    progress=progress,
                )
            except IntegrityError as error:
                self._report(EventKind.CORRUPT, save, where="store", error=error.message)
                raise
        for copy in report.quarantined:
            self._report(EventKind.CORRUPT, save, where="nvme", error=f"{copy} was set aside")
        self._report(
            EventKind.RESTORED,
            save,
            from_nvme=report.from_nvme,
            from_store=report.from_store,
            bytes=report.downloaded_bytes,
        )
        return report

    def read_ranges(
        self, whole: WholeSave, ranges: Sequence[ByteRange], deliver: Deliver
    ) -> RangesReport:
        """Read ranges of files of a save; see `pipeline.ranges.read_ranges`."""
        save, url = whole.info, StoreUrl.parse(whole.info.run)
        here = self._layout.restored_dir(url, save.id) if self._layout else None
        with self._session(url) as session:
            return read_ranges(
                session,
                whole.nodes,
                ranges,
                deliver,
                local_copies=lambda entry: self._copies(url, save.id, entry, here),
                tell=lambda kind, fields: self._report(kind, save, **fields),
            )

    def _copies(
        self, url: StoreUrl, save_id: SaveId, entry: FileEntry, target: Path | None
    ) -> Iterable[Path]:
        if target is not None:
            yield target / entry.path
        if self._layout is not None:
            saved = self._layout.save_dir(url, save_id)
            yield self._layout.staged_file(saved, entry.rank, entry.path)

    def fetch(self, save: SaveInfo, path: str | None = None) -> Path:
        """Bring a save to the staging disk, once for all ranks; see `TieredCheckpointer.fetch`.

        Raises:
            ConfigError: There is no staging directory.
            CkptTieringError: As of `restore`.
        """
        if self._layout is None:
            raise ConfigError("fetch needs a staging directory")
        if path is not None:
            check_relative_path(path)
        target = self._layout.restored_dir(StoreUrl.parse(save.run), save.id)
        make_private(self._layout.staging)
        with _lock(target, wait=True):
            self._forget_others(target)
            self.restore(save, target, wanted=lambda p: path in (None, p), share=True)
        return target if path is None else target / path

    def _forget_others(self, target: Path) -> None:
        """Delete what was restored of other saves, unless another process has it in hand."""
        for other in target.parent.iterdir():
            if other.is_dir() and other != target:
                with _lock(other, wait=False) as free:
                    if free:
                        remove_tree(other, inside=target.parent)
                        other.with_name(other.name + ".lock").unlink(missing_ok=True)

    def _report(self, kind: EventKind, save: SaveInfo, **fields: str | float) -> None:
        if self._layout is None or not self._layout.agent_dir.is_dir():
            return
        record = {"kind": kind, "at": self._clock.now(), "run": save.run, "save_id": save.save_id}
        append_line(self._layout.events, {**record, "step": save.step, **fields})


@contextmanager
def _named(root: StoreUrl, save_id: SaveId, reference: str) -> Iterator[None]:
    """Say which save it is that is not there."""
    try:
        yield
    except NotFoundError as error:
        if error.kind is ErrorKind.NO_SUCH_BUCKET:
            raise
        raise NotFoundError(
            f"{reference!r}: save {save_id} is not durable: {root}/commits/ has no manifest of it",
            hint=f"`ckpt-tiering ls {root}` lists the saves that are",
        ) from error


@contextmanager
def _lock(target: Path, *, wait: bool) -> Iterator[bool]:
    """Hold the lock of a restore, if it is free or can be waited for; ranks take turns."""
    path = target.with_name(target.name + ".lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            held = True
        except BlockingIOError:
            held = False
        yield held
    finally:
        os.close(descriptor)
