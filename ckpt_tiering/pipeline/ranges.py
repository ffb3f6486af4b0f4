"""Byte ranges of a save's files, verified: from NVMe if a good copy is there, else from the store.

No byte is handed out before the block that holds it was compared with the manifest, and no block is
read twice, however many ranges touch it.
"""

from __future__ import annotations

import hashlib
import os
import stat
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, groupby
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_tiering.errors import FormatError, IntegrityError, NotFoundError, TransientError
from ckpt_tiering.model.digest import crc64
from ckpt_tiering.model.events import EventKind
from ckpt_tiering.model.manifest import FileEntry
from ckpt_tiering.model.ranges import Block, ByteRange, Request, blocks_of, plan_requests

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ckpt_tiering.model.manifest import NodeManifest
    from ckpt_tiering.pipeline.session import Session

__all__ = ["Deliver", "RangesReport", "read_ranges"]

QUARANTINE_SUFFIX = ".corrupt"  # as a restore of whole files names them

LocalCopies = Callable[[FileEntry], Iterable[Path]]
Deliver = Callable[[int, memoryview], None]
Tell = Callable[[EventKind, dict[str, str | float]], None]


@dataclass(slots=True)
class RangesReport:
    """What reading ranges took.

    Attributes:
        nvme_bytes: Bytes that came from copies on this node, whole blocks.
        downloaded_bytes: Bytes that came from the store, gaps and repetitions included.
        quarantined: Bad copies on NVMe that were set aside.
        nvme_files: Files of which something came from a copy on this node.
        store_files: Files of which something came from the store.
    """

    nvme_bytes: int = 0
    downloaded_bytes: int = 0
    quarantined: list[str] = field(default_factory=list)
    nvme_files: set[str] = field(default_factory=set)
    store_files: set[str] = field(default_factory=set)

    def as_fields(self) -> dict[str, str | float]:
        """Return it as fields of an event, named as those of a restore of whole files."""
        return {
            "from_nvme": len(self.nvme_files - self.store_files),
            "from_store": len(self.store_files),
            "bytes": self.downloaded_bytes,
            "nvme_bytes": self.nvme_bytes,
        }


class _Ranges:
    """The ranges of one file that are wanted, by place."""

    def __init__(self, wanted: Iterable[tuple[int, int, int]]) -> None:
        self._wanted = sorted(wanted)  # start, end, number
        self._starts = [start for start, _, _ in self._wanted]
        # Ranges may contain one another: the highest end up to each of them does not fall.
        self._tops = list(accumulate((end for _, end, _ in self._wanted), max))

    def within(self, start: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Yield start, end and number of the ranges that share bytes with a stretch."""
        first = bisect_right(self._tops, start)
        for item in self._wanted[first : bisect_left(self._starts, end)]:
            if item[1] > start:
                yield item


# --- reading it -----------------------------------------------------------------------------------


def read_ranges(
    session: Session,
    nodes: Sequence[NodeManifest],
    ranges: Sequence[ByteRange],
    deliver: Deliver,
    *,
    local_copies: LocalCopies = lambda _: (),
    tell: Tell = lambda _kind, _fields: None,
) -> RangesReport:
    """Read ranges of files of a save. Blocks until each was delivered.

    Takes memory for ``session.concurrency`` requests of up to 64 MiB (or one block, if that is
    longer), and for the ranges that are longer than a request while they are put together.

    Args:
        session: The store.
        nodes: All node manifests of the save.
        ranges: What is wanted, in any order; ranges may overlap.
        deliver: Called once for each range with its index in ``ranges`` and its bytes, which are
            the callee's from then on; from several threads, in no order.
        local_copies: Where copies of a file on this node may be. They are ours: one that has a
            wrong block is set aside.
        tell: Called in the end with each event (corrupt, restored) and its fields.

    Raises:
        IntegrityError: No tier has a good copy of a block; names object, bytes and both digests.
        NotFoundError: The save has no such file, or an object is gone from the store.
        FormatError: A range is of something else than a file, or reaches over its end.
        CkptTieringError: As of `ObjectStore`, after the retries.
    """
    report = RangesReport()
    requests = plan_requests(_blocks(nodes, ranges))
    assembly = _Assembly(ranges, deliver)
    assembly.deliver_empty()
    job = _Reading(session, assembly, _Copies(local_copies, report), report)
    try:
        session.run_all(partial(job.read, request) for request in requests)
    except IntegrityError as error:
        tell(EventKind.CORRUPT, {"where": "store", "error": error.message})
        raise
    finally:
        for copy in report.quarantined:
            tell(EventKind.CORRUPT, {"where": "nvme", "error": f"{copy} was set aside"})
    tell(EventKind.RESTORED, report.as_fields())
    return report


def _blocks(nodes: Sequence[NodeManifest], ranges: Sequence[ByteRange]) -> Iterable[Block]:
    """Return each block that a range touches, once."""
    files = {f.path: (f, node.objects) for node in nodes for f in node.files if f.kind == "file"}
    blocks: dict[tuple[str, int], Block] = {}
    for wanted in ranges:
        if wanted.path not in files:
            raise NotFoundError(f"the save has no file {wanted.path!r}", key=wanted.path)
        file, objects = files[wanted.path]
        if not 0 <= wanted.start <= wanted.end <= file.size_bytes:
            raise FormatError(
                f"bytes {wanted.start} to {wanted.end} of {file.path!r} are not within its "
                f"{file.size_bytes} bytes",
                key=file.path,
            )
        for block in blocks_of(file, objects[file.object].key, wanted.start, wanted.end):
            blocks[file.path, block.start] = block
    return blocks.values()


class _Assembly:
    """Delivers each range as soon as all of it was read."""

    def __init__(self, ranges: Sequence[ByteRange], deliver: Deliver) -> None:
        self._deliver = deliver
        self._ranges = ranges
        by_path: dict[str, list[tuple[int, int, int]]] = {}
        for number, wanted in enumerate(ranges):
            if wanted.start < wanted.end:
                item = (wanted.start, wanted.end, number)
                by_path.setdefault(wanted.path, []).append(item)
        self._by_path: Mapping[str, _Ranges] = {p: _Ranges(r) for p, r in by_path.items()}
        self._lock = threading.Lock()
        self._partial: dict[int, bytearray] = {}
        self._left: dict[int, int] = {}

    def deliver_empty(self) -> None:
        """Deliver the ranges for which nothing need be read."""
        for number, wanted in enumerate(self._ranges):
            if wanted.start == wanted.end:
                self._deliver(number, memoryview(b""))

    def take(self, path: str, start: int, data: memoryview) -> None:
        """Take verified bytes of a file, each of them once."""
        for first, last, number in self._by_path[path].within(start, start + len(data)):
            if start <= first and last <= start + len(data):
                self._deliver(number, data[first - start : last - start])
            else:
                self._add(number, first, last, start, data)

    def _add(self, number: int, first: int, last: int, start: int, data: memoryview) -> None:
        low, high = max(first, start), min(last, start + len(data))
        with self._lock:
            if number not in self._partial:
                self._partial[number] = bytearray(last - first)
                self._left[number] = last - first
            buffer = self._partial[number]
        buffer[low - first : high - first] = data[low - start : high - start]
        with self._lock:
            self._left[number] -= high - low
            if self._left[number]:
                return
            del self._partial[number]
        self._deliver(number, memoryview(buffer))


class _Copies:
    """The copies of files on this node, as long as nothing wrong was seen in them."""

    def __init__(self, local_copies: LocalCopies, report: RangesReport) -> None:
        self._local_copies = local_copies
        self._report = report
        self._lock = threading.Lock()
        self._usable: dict[str, list[Path]] = {}

    def read(self, block: Block, into: memoryview) -> bool:
        """Read a block from a copy; return whether there was one whose digest is right."""
        file = block.file
        with self._lock:
            if file.path not in self._usable:
                self._usable[file.path] = list(self._local_copies(file))
            copies = tuple(self._usable[file.path])
        for copy in copies:
            good = _read_copy(copy, block, into)
            if good:
                return True
            self._reject(file, copy, bad=good is not None)
        return False

    def _reject(self, file: FileEntry, copy: Path, *, bad: bool) -> None:
        """Use a copy no more. A bad one is set aside, for whoever wants to know."""
        with self._lock:
            if copy not in self._usable[file.path]:
                return
            self._usable[file.path].remove(copy)
        if bad:
            # The digest of the path: a long path component would not fit with a suffix.
            name = hashlib.sha256(file.path.encode()).hexdigest()[:24] + QUARANTINE_SUFFIX
            try:
                copy.rename(copy.with_name(name))
            except FileNotFoundError:
                return  # another rank of this node was faster
            self._report.quarantined.append(str(copy))


def _read_copy(copy: Path, block: Block, into: memoryview) -> bool | None:
    """Read a block; tell whether it is right. None if the copy is not there."""
    try:
        # O_NONBLOCK: opening a named pipe would wait for a writer.
        descriptor = os.open(copy, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        there = os.fstat(descriptor)
        if not stat.S_ISREG(there.st_mode):
            return None
        if there.st_size != block.file.size_bytes:
            return False
        done = 0
        while done < len(into):
            count = os.preadv(descriptor, [into[done:]], block.start + done)
            if not count:
                return False
            done += count
    except OSError:
        return False  # the disk can't read it
    finally:
        os.close(descriptor)
    return crc64(into) == block.crc


class _Reading:
    def __init__(
        self, session: Session, assembly: _Assembly, copies: _Copies, report: RangesReport
    ) -> None:
        self._session = session
        self._assembly = assembly
        self._copies = copies
        self._report = report
        self._lock = threading.Lock()

    def read(self, request: Request) -> None:
        """Read a request from the nearest tiers, and deliver what it completes."""
        data = memoryview(bytearray(request.end - request.start))
        missing = []
        for block in request.blocks:
            place = _place(request, block)
            if self._copies.read(block, data[place]):
                with self._lock:
                    self._report.nvme_bytes += block.end - block.start
                    self._report.nvme_files.add(block.file.path)
            else:
                missing.append(block)
        for rest in plan_requests(missing):
            first = rest.start - request.start
            self._from_store(rest, data[first : first + rest.end - rest.start])
        for path, group in groupby(request.blocks, key=lambda b: b.file.path):
            blocks = list(group)
            stretch = slice(_place(request, blocks[0]).start, _place(request, blocks[-1]).stop)
            self._assembly.take(path, blocks[0].start, data[stretch])

    def _from_store(self, request: Request, into: memoryview) -> None:
        self._fetch(request.key, request.start, into)
        for block in request.blocks:
            piece = into[_place(request, block)]
            if crc64(piece) != block.crc:
                # The wire may lie once, a store lies for good.
                self._fetch(block.key, block.at, piece)
                self._compare(block, crc64(piece))
        with self._lock:
            self._report.store_files.update(block.file.path for block in request.blocks)

    def _fetch(self, key: str, start: int, into: memoryview) -> None:
        end = start + len(into)

        def attempt() -> None:
            done = 0
            for chunk in self._session.store.get(key, start, end):
                stop = done + len(chunk)
                with self._lock:
                    self._report.downloaded_bytes += len(chunk)
                if stop > len(into):
                    break
                into[done:stop] = chunk
                done = stop
            if done != len(into):
                raise TransientError(f"{key} ended at byte {start + done} of {end}", key=key)

        self._session.call(attempt)

    def _compare(self, block: Block, crc: int) -> None:
        if crc != block.crc:
            raise IntegrityError(
                f"{self._session.store.url}/{block.key}: bytes {block.start} to {block.end} of "
                f"{block.file.path!r} have CRC64NVME {crc:016x}, the manifest says "
                f"{block.crc:016x}",
                hint="load an older save; `ckpt-tiering verify` lists every bad object",
                key=block.key,
            )


def _place(request: Request, block: Block) -> slice:
    """Return where a block lies in the bytes of its request."""
    first = block.at - request.start
    return slice(first, first + block.end - block.start)
