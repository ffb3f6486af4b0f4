"""The data path backwards: the files of a save, from NVMe if a good copy is there, else the store.

Every byte is compared with the manifest's digests before a file gets its name; what is being
downloaded bears another one. A bad copy is set aside, reported, and the next tier is tried.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_tiering.errors import FormatError, IntegrityError, TransientError
from ckpt_tiering.fsio import digest_file, disk_errors, ensure_room, fsync_directory
from ckpt_tiering.model.digest import PartCrc, crc64
from ckpt_tiering.model.manifest import FileEntry, NodeManifest
from ckpt_tiering.model.pack import PACK_BELOW_BYTES
from ckpt_tiering.model.plan import digest_of

if TYPE_CHECKING:
    from ckpt_tiering.pipeline.session import Session

__all__ = ["RestoreReport", "restore_files"]

PARTIAL_SUFFIX = ".ckpt-tiering-partial"
QUARANTINE_SUFFIX = ".corrupt"
_CORRUPT_TRIES = 2
_BLOCKS_A_REQUEST = 4

LocalCopies = Callable[[FileEntry], Iterable[Path]]


@dataclass(slots=True)
class RestoreReport:
    """What a restore did.

    Attributes:
        from_nvme: Files that came from a staged copy.
        from_store: Files that were downloaded.
        downloaded_bytes: Bytes that came from the store.
        quarantined: Bad copies on NVMe that were set aside.
    """

    from_nvme: int = 0
    from_store: int = 0
    downloaded_bytes: int = 0
    quarantined: list[str] = field(default_factory=list)


def restore_files(  # noqa: PLR0913  three of them are what, the others how
    session: Session,
    nodes: Sequence[NodeManifest],
    target: Path,
    *,
    wanted: Callable[[str], bool] = lambda _: True,
    local_copies: LocalCopies = lambda _: (),
    share: bool = False,
    progress: Callable[[int], None] = lambda _: None,
) -> RestoreReport:
    """Bring files of a save into a directory. Blocks until they are there, verified and fsynced.

    Args:
        session: The store.
        nodes: All node manifests of the save.
        target: Directory to restore into; existing files of these paths are replaced.
        wanted: Which paths to restore.
        local_copies: Where copies of a file may be; one is used only if its digest is right.
        share: Take local copies by hard link: costs no space, but who writes into them spoils both.
        progress: Called with the number of bytes done, from several threads.

    Raises:
        IntegrityError: No tier has a good copy; names the object and both digests.
        NotFoundError: An object is gone from the store.
        CapacityError: The disk has no room.
        CkptTieringError: As of `ObjectStore`, after the retries.
    """
    job = _Restore(session, target, progress)
    with disk_errors(target):
        target.mkdir(parents=True, exist_ok=True)
        for node in nodes:
            entries = [f for f in node.files if wanted(f.path)]
            for entry in entries:
                job.check_target(entry)
                if entry.kind == "dir":
                    (target / entry.path).mkdir(parents=True, exist_ok=True)
            remote = [
                f
                for f in entries
                if f.kind == "file" and not job.from_local(f, local_copies(f), share=share)
            ]
            ensure_room(target, sum(f.size_bytes for f in remote))
            session.run_all(job.downloads(node, remote))
            for entry in entries:
                if entry.kind == "link":
                    job.link(entry)
        for directory, _, _ in os.walk(target, topdown=False):
            fsync_directory(Path(directory))
    return job.report


def _short_name(entry: FileEntry) -> str:
    """Name a file by its digest: a long path component would not fit with a suffix."""
    return hashlib.sha256(entry.path.encode()).hexdigest()[:24]


class _Restore:
    def __init__(self, session: Session, target: Path, progress: Callable[[int], None]) -> None:
        self._session = session
        self._target = target
        self._progress = progress
        self._lock = threading.Lock()
        self.report = RestoreReport()

    def check_target(self, entry: FileEntry) -> None:
        """Refuse to write through a link, or over something else, that lies in the target."""
        path = self._target / entry.path
        hint = "restore into an empty directory"
        for parent in path.parents[: len(path.parts) - len(self._target.parts) - 1]:
            if parent.is_symlink():
                raise FormatError(
                    f"{parent} is a symbolic link: {entry.path!r} would be written through it",
                    hint=hint,
                )
            if parent.exists() and not parent.is_dir():
                raise FormatError(f"{parent} is not a directory", hint=hint)
        is_dir = path.is_dir() and not path.is_symlink()
        if os.path.lexists(path) and is_dir != (entry.kind == "dir"):
            raise FormatError(f"{path} is there, and is no {entry.kind}", hint=hint)

    def link(self, entry: FileEntry) -> None:
        """Make a symbolic link of the save."""
        path = self._target / entry.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        path.symlink_to(entry.target)

    def from_local(self, entry: FileEntry, copies: Iterable[Path], *, share: bool) -> bool:
        """Take a file from a copy on this node, if the digest of one is right."""
        for copy in copies:
            if not copy.is_file() or copy.is_symlink():
                continue
            # An earlier restore left it, or, unless shared, it is a file of the user's own.
            in_place = copy == self._target / entry.path
            part = copy if in_place else self._partial(entry)
            try:
                if not in_place:
                    self._take(copy, part, share=share)
                # Digested under its new name: what was compared is what gets the file's name.
                good = digest_file(part, entry.part_bytes) == digest_of(entry)
            except OSError as error:
                if error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
                    raise
                good = False  # the disk can't read it, or it was evicted meanwhile
            if good:
                if not in_place and not share:
                    self._set_mode(entry, part)
                self._finish(entry, part)
                self.report.from_nvme += 1
                self._progress(entry.size_bytes)
                return True
            if not in_place:
                part.unlink(missing_ok=True)
            if (share or not in_place) and copy.exists():
                self.report.quarantined.append(str(copy))
                copy.rename(copy.with_name(_short_name(entry) + QUARANTINE_SUFFIX))
        return False

    @staticmethod
    def _take(copy: Path, part: Path, *, share: bool) -> None:
        part.unlink(missing_ok=True)
        if share:
            part.hardlink_to(copy)
        else:
            shutil.copyfile(copy, part)

    def downloads(
        self, node: NodeManifest, entries: Sequence[FileEntry]
    ) -> Iterator[Callable[[], None]]:
        """Yield the downloads: large files one by one, small ones pack by pack."""
        packs: dict[int, list[FileEntry]] = {}
        for entry in entries:
            if entry.size_bytes >= PACK_BELOW_BYTES:
                yield from self._large(node.objects[entry.object].key, entry)
            else:
                packs.setdefault(entry.object, []).append(entry)
        for index, members in packs.items():
            members.sort(key=lambda f: f.offset)
            yield partial(self._pack, node.objects[index].key, members)

    def _partial(self, entry: FileEntry) -> Path:
        path = self._target / entry.path
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.with_name(_short_name(entry) + PARTIAL_SUFFIX)

    def _set_mode(self, entry: FileEntry, part: Path) -> None:
        # Executable bits come from a bucket that others may write to: never restored.
        part.chmod((entry.mode & 0o666) | 0o600)

    def _finish(self, entry: FileEntry, part: Path) -> None:
        descriptor = os.open(part, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        part.replace(self._target / entry.path)

    def _large(self, key: str, entry: FileEntry) -> Iterator[Callable[[], None]]:
        """Yield a task for each stretch; the one that ends last gives the file its name."""
        part_file = self._partial(entry)
        with part_file.open("wb") as sink:
            sink.truncate(entry.size_bytes)
        stretches = digest_of(entry).regroup(_BLOCKS_A_REQUEST * entry.part_bytes)
        starts = range(0, entry.size_bytes, _BLOCKS_A_REQUEST * entry.part_bytes)
        left = set(starts)

        def fetch(start: int, expected: PartCrc) -> None:
            self._stretch(key, entry, part_file, start, expected)
            with self._lock:
                left.discard(start)
                last = not left
            if last:
                self._set_mode(entry, part_file)
                self._finish(entry, part_file)
                self._count(files=1)

        for start, expected in zip(starts, stretches, strict=True):
            yield partial(fetch, start, expected)

    def _count(self, *, files: int = 0, num_bytes: int = 0) -> None:
        with self._lock:
            self.report.from_store += files
            self.report.downloaded_bytes += num_bytes
        if num_bytes:
            self._progress(num_bytes)

    def _stretch(
        self, key: str, entry: FileEntry, part_file: Path, start: int, expected: PartCrc
    ) -> None:
        end = start + expected.size_bytes

        def attempt() -> int:
            crc, position = 0, start
            with part_file.open("r+b", buffering=0) as sink:
                sink.seek(start)
                for chunk in self._session.store.get(key, entry.offset + start, entry.offset + end):
                    crc = crc64(chunk, crc)
                    position += len(chunk)
                    view = memoryview(chunk)
                    while view:  # a nearly full disk takes less than it was given
                        view = view[sink.write(view) :]
            if position != end:
                raise TransientError(f"{key} ended at byte {position} of {end}", key=key)
            return crc

        self._checked(key, f"bytes {start} to {end} of {entry.path!r}", expected.crc, attempt)
        self._count(num_bytes=end - start)

    def _pack(self, key: str, members: Sequence[FileEntry]) -> None:
        """Read the members' stretch of a pack in one request and cut it up."""
        start = members[0].offset
        end = max(m.offset + m.size_bytes for m in members)
        data = b""
        if end > start:
            data = self._session.call(lambda: self._read(key, start, end))
        for entry in members:
            piece = data[entry.offset - start : entry.offset - start + entry.size_bytes]
            expected = int(entry.crc64nvme, 16)
            if crc64(piece) != expected:
                piece = self._member_again(key, entry, expected)
            part = self._partial(entry)
            part.write_bytes(piece)
            self._set_mode(entry, part)
            self._finish(entry, part)
            self._count(files=1, num_bytes=entry.size_bytes)

    def _read(self, key: str, start: int, end: int) -> bytes:
        data = b"".join(self._session.store.get(key, start, end))
        if len(data) != end - start:
            raise TransientError(f"{key} ended after {len(data)} of {end - start} bytes", key=key)
        return data

    def _member_again(self, key: str, entry: FileEntry, expected: int) -> bytes:
        found: list[bytes] = []

        def attempt() -> int:
            found[:] = [self._read(key, entry.offset, entry.offset + entry.size_bytes)]
            return crc64(found[0])

        self._checked(key, repr(entry.path), expected, attempt)
        return found[0]

    def _checked(self, key: str, what: str, expected: int, attempt: Callable[[], int]) -> None:
        """Download until the checksum is right; the wire may lie once, a store lies for good."""
        crc = 0
        for _ in range(_CORRUPT_TRIES):
            crc = self._session.call(attempt)
            if crc == expected:
                return
        raise IntegrityError(
            f"{self._session.store.url}/{key}: {what} has CRC64NVME {crc:016x}, the manifest says "
            f"{expected:016x}",
            hint="restore an older save; `ckpt-tiering verify` lists every bad object",
            key=key,
        )
