"""First stage, in the trainer: files to NVMe with the digest in the stream, then the seal.

Runs on the caller's thread and blocks for as long as the disk takes. Reaches no store.
"""

from __future__ import annotations

import errno
import io
import os
import stat
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ckpt_tiering.errors import ConfigError, ErrorKind, FormatError
from ckpt_tiering.fsio import (
    disk_errors,
    fsync_directory,
    make_private,
    remove_tree,
    write_atomically,
    write_direct,
)
from ckpt_tiering.model.digest import FileDigest, StreamDigest
from ckpt_tiering.model.layout import (
    FILES_NAME,
    SEAL_NAME,
    StagingLayout,
    check_relative_path,
)
from ckpt_tiering.model.manifest import FileEntry, check_link, check_tree
from ckpt_tiering.model.parts import block_bytes
from ckpt_tiering.units import MIB

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckpt_tiering.clock import Clock
    from ckpt_tiering.model.ids import SaveId
    from ckpt_tiering.model.seal import Seal, ShardHeader

__all__ = ["SavedState", "ShardWriter", "StagedFile", "StagedSave"]

_BUFFER_BYTES = MIB
_PATH_ERRORS = frozenset(
    [errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP]
)


class _DigestingFile(io.RawIOBase):
    """Raw file that takes the digest of what is written, and is complete on disk when closed."""

    def __init__(self, path: Path, mode: int, block_bytes: int) -> None:
        super().__init__()
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._path = path
        self._descriptor = os.open(path, flags, mode)
        self._stream = StreamDigest(block_bytes)
        self._failed: OSError | None = None

    # There is no fileno(): numpy and others would write to it, past the digest.

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        with self._noting_failure():
            left = view
            while left:
                left = left[os.write(self._descriptor, left) :]
        self._stream.update(view)
        return len(view)

    @contextmanager
    def _noting_failure(self) -> Iterator[None]:
        """What was written in part is not what the digest is of: never go on after an error."""
        if self._failed is not None:
            raise self._failed
        try:
            with disk_errors(self._path):
                yield
        except OSError as error:
            self._failed = error
            raise

    def close(self) -> None:
        if not self.closed:
            try:
                with self._noting_failure():
                    os.fsync(self._descriptor)
            finally:
                os.close(self._descriptor)
                super().close()

    def digest(self) -> FileDigest:
        if self._failed is not None:
            raise self._failed
        return self._stream.digest()


class StagedFile(io.BufferedWriter):
    """A file of a shard that is being written. Not seekable; closing it makes it durable."""

    raw: _DigestingFile

    def digest(self) -> FileDigest:
        """Return the digest of all that was written; complete once the file is closed."""
        return self.raw.digest()

    def seekable(self) -> bool:
        """Return False: the digest is taken as the bytes stream by."""
        return False


class ShardWriter:
    """Stages one rank's shard of one save.

    Args:
        layout: The staging disk.
        header: What the shard is.
        clock: For the times in the seal.
        snapshot_at: When the state was captured; now by default.

    Raises:
        FormatError: The save id was used before on this disk by this rank.
        ConfigError: The name or the metadata can't be written down.
    """

    def __init__(
        self,
        layout: StagingLayout,
        header: ShardHeader,
        clock: Clock,
        *,
        snapshot_at: float | None = None,
    ) -> None:
        self._layout = layout
        self._header = header
        self._clock = clock
        self._snapshot_at = clock.now() if snapshot_at is None else snapshot_at
        self._block_bytes = block_bytes(header.part_bytes)
        self._entries: dict[str, FileEntry] = {}
        self._open: dict[str, StagedFile] = {}
        self._refuse_what_no_seal_holds()
        self.directory = layout.rank_dir(header.url, header.save_id, header.rank)
        if self.directory.exists():
            raise FormatError(f"{self.directory} exists: save {header.save_id} was made before")
        for directory in (layout.staging, layout.runs_dir, layout.run_dir(header.url)):
            make_private(directory)
        self._files = self.directory / FILES_NAME
        self._files.mkdir(parents=True)

    def local_path(self, path: str) -> Path:
        """Return where a file of the shard lies on NVMe."""
        return self._files / path

    def open(self, path: str, mode: int = 0o644) -> StagedFile:
        """Open a new file of the shard for writing.

        Args:
            path: Relative POSIX path within the checkpoint.
            mode: Permission bits to record and to restore.

        Raises:
            FormatError: The path is not legal, was written before, or lies below a file.
            CapacityError: The disk has no room.
        """
        check_relative_path(path)
        self._refuse_twice(path)
        target = self.local_path(path)
        try:
            with disk_errors(target):
                target.parent.mkdir(parents=True, exist_ok=True)
                raw = _DigestingFile(target, mode | 0o600, self._block_bytes)
        except OSError as error:
            if error.errno not in _PATH_ERRORS:
                raise
            raise FormatError(
                f"path {path!r} can't lie on the staging disk: {error.strerror}",
                kind=ErrorKind.PATH,
            ) from error
        file = StagedFile(raw, _BUFFER_BYTES)
        self._open[path] = file
        return file

    def _refuse_twice(self, path: str) -> None:
        if path in self._open or path in self._entries:
            raise FormatError(f"path {path!r} occurs twice in one save", kind=ErrorKind.PATH)

    def add_tree(self, source: Path) -> None:
        """Copy a directory tree into the shard: files, links and empty directories.

        Raises:
            FormatError: A name is not legal, a link leads out of the tree, something is neither
                file, link nor directory, can't be read, or changed while it was copied.
            CapacityError: The disk has no room.
        """
        for path, info in _scan(source):
            if stat.S_ISLNK(info.st_mode):
                target = str((source / path).readlink())
                check_link(path, target)
                self._refuse_twice(path)
                self._entries[path] = FileEntry(
                    path=path, kind="link", rank=self._header.rank, target=target
                )
                link = self.local_path(path)
                with disk_errors(link):
                    link.parent.mkdir(parents=True, exist_ok=True)
                    link.symlink_to(target)
            elif stat.S_ISDIR(info.st_mode):
                mode = stat.S_IMODE(info.st_mode)
                self._entries[path] = FileEntry(
                    path=path, kind="dir", rank=self._header.rank, mode=mode
                )
                with disk_errors(self.local_path(path)):
                    self.local_path(path).mkdir(parents=True, exist_ok=True)
            elif stat.S_ISREG(info.st_mode):
                self._copy(source / path, path, info)
            else:
                raise FormatError(
                    f"{source / path} is neither a file, a link nor a directory",
                    kind=ErrorKind.PATH,
                    hint="move it out of the checkpoint directory",
                )

    def _copy(self, source: Path, path: str, before: os.stat_result) -> None:
        with source.open("rb", buffering=0) as reader, self.open(path, before.st_mode & 0o777) as w:
            while chunk := reader.read(_BUFFER_BYTES):
                w.write(chunk)
            after = os.fstat(reader.fileno())
        facts = ("st_ino", "st_size", "st_mtime_ns")
        if any(getattr(before, fact) != getattr(after, fact) for fact in facts):
            raise FormatError(
                f"{source} changed while it was staged",
                hint="hand a directory over only when nothing writes to it any more",
            )

    def seal(self) -> Seal:
        """Make the shard durable on NVMe and declare it whole. Blocks on the disk.

        Returns:
            The seal that was written.

        Raises:
            FormatError: The files can't lie in one tree, or one was changed past its stream.
            CapacityError: The disk has no room, or had none while a file was written.
        """
        with disk_errors(self.directory):
            for path, file in self._open.items():
                self._entries[path] = self._finish(path, file)
            check_tree(list(self._entries.values()))
            for directory, _, _ in os.walk(self.directory, topdown=False):
                fsync_directory(Path(directory))
            seal = self._make_seal()
            write_atomically(self.directory / SEAL_NAME, seal.encode())
            for parent in (self.directory.parent, self.directory.parent.parent):
                fsync_directory(parent)
        return seal

    def write_image(self, path: str, image: memoryview) -> None:
        """Write a file of the shard from page-aligned memory. Blocks until it is durable.

        Raises:
            FormatError: The path is not legal, or was written before.
            CapacityError: The disk has no room.
        """
        check_relative_path(path)
        self._refuse_twice(path)
        target = self.local_path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        stream = StreamDigest(self._block_bytes)
        write_direct(target, image, stream.update)
        self._entries[path] = self._entry(path, stream.digest())

    def _finish(self, path: str, file: StagedFile) -> FileEntry:
        file.close()
        return self._entry(path, file.digest())

    def _entry(self, path: str, digest: FileDigest) -> FileEntry:
        info = self.local_path(path).lstat()
        if info.st_size != digest.size_bytes:
            raise FormatError(
                f"{path!r} has {info.st_size} bytes, {digest.size_bytes} were written to its stream"
            )
        return FileEntry(
            path=path,
            kind="file",
            rank=self._header.rank,
            mode=stat.S_IMODE(info.st_mode),
            size_bytes=digest.size_bytes,
            crc64nvme=f"{digest.crc:016x}",
            part_bytes=digest.part_bytes,
            parts=tuple(f"{crc:016x}" for crc in digest.part_crcs),
        )

    def _refuse_what_no_seal_holds(self) -> None:
        """Find out before the first byte, not after the last one."""
        seal = self._make_seal()
        try:
            seal.encode()
        except ValueError as error:
            raise ConfigError(
                f"the name or the metadata of save {seal.save_id} is not valid UTF-8"
            ) from error

    def _make_seal(self) -> Seal:
        files = tuple(self._entries.values())
        return self._header.seal(files, self._snapshot_at, self._clock.now())

    def discard(self) -> None:
        """Delete the shard: its save was given up before it was sealed."""
        for file in self._open.values():
            try:
                file.close()
            except OSError:
                continue  # a full disk refuses the last bytes too; they are not wanted any more
        remove_tree(self.directory, inside=self._layout.staging)
        save_dir = self.directory.parent
        if save_dir.exists() and not any(save_dir.iterdir()):
            save_dir.rmdir()


@dataclass(frozen=True, slots=True)
class SavedState:
    """A state that was saved.

    Attributes:
        save_id: Text of the save id.
        local_path: Where its file lies on NVMe, or will as soon as the agent wrote it.
    """

    save_id: str
    local_path: Path


class StagedSave:
    """A save that is being staged; see `ckpt_tiering.api.TieredCheckpointer.stage`.

    Attributes:
        save_id: Text of its id.
        stall_seconds: Seconds from the call until it was sealed; None before that.
    """

    def __init__(self, save_id: SaveId, writer: ShardWriter) -> None:
        self.save_id = str(save_id)
        self.stall_seconds: float | None = None
        self._writer = writer

    def open(self, path: str, mode: int = 0o644) -> StagedFile:
        """Open a new file of the checkpoint for writing; see `ShardWriter.open`."""
        return self._writer.open(path, mode)

    def add_tree(self, source: str | Path) -> None:
        """Copy a directory tree into the checkpoint; see `ShardWriter.add_tree`."""
        self._writer.add_tree(Path(source))

    def local_path(self, path: str) -> Path:
        """Return where a file of the checkpoint lies on NVMe, while it is there."""
        return self._writer.local_path(path)


def _scan(root: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Yield path and status of everything below ``root``, without following links."""

    def refuse(error: OSError) -> NoReturn:
        # Left to itself, os.walk passes over what it can't read: a checkpoint with holes.
        raise FormatError(f"{error.filename} can't be staged: {error.strerror}") from error

    for directory, folders, names in os.walk(root, onerror=refuse):
        folders.sort()
        relative = os.path.relpath(directory, root)
        for name in sorted(folders + names):
            path = name if relative == "." else f"{relative}/{name}"
            check_relative_path(path)
            try:
                info = os.lstat(os.path.join(directory, name))  # noqa: PTH118  raw names
            except FileNotFoundError as error:
                refuse(error)
            yield path, info
