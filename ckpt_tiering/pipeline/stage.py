"""First stage, in the trainer: files to NVMe with the digest in the stream, then the seal.

Runs on the caller's thread and blocks for as long as the disk takes. Reaches no store.
"""

from __future__ import annotations

import io
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_tiering.errors import CapacityError, ErrorKind, FormatError
from ckpt_tiering.fsio import fsync_directory, make_private, remove_tree, write_atomically
from ckpt_tiering.model.digest import FileDigest, StreamDigest
from ckpt_tiering.model.layout import (
    FILES_NAME,
    SEAL_NAME,
    StagingLayout,
    StoreUrl,
    check_relative_path,
)
from ckpt_tiering.model.manifest import FileEntry, Metadata, check_link, check_tree
from ckpt_tiering.model.seal import Seal
from ckpt_tiering.units import MIB

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckpt_tiering.clock import Clock
    from ckpt_tiering.model.ids import SaveId

__all__ = ["ShardHeader", "ShardWriter", "StagedFile", "StagedSave"]

_BUFFER_BYTES = MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardHeader:
    """What is known of a shard before its first byte; see `Seal` for the fields."""

    url: StoreUrl
    store_options: dict[str, str | None]
    save_id: SaveId
    name: str | None
    metadata: Metadata
    rank: int
    ranks_on_node: int
    node_rank: int
    num_nodes: int
    part_bytes: int


class _DigestingFile(io.RawIOBase):
    """Raw file that takes the digest of what is written, and is complete on disk when closed."""

    def __init__(self, path: Path, mode: int, part_bytes: int) -> None:
        super().__init__()
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._path = path
        self._descriptor = os.open(path, flags, mode)
        self._stream = StreamDigest(part_bytes)

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        left = view
        try:
            while left:
                left = left[os.write(self._descriptor, left) :]
        except OSError as error:
            raise CapacityError(
                f"staging file {self._path} can't be written: {error.strerror}",
                hint="free space on the staging disk, or lower nvme_budget",
            ) from error
        self._stream.update(view)
        return len(view)

    def close(self) -> None:
        if not self.closed:
            try:
                os.fsync(self._descriptor)
            finally:
                os.close(self._descriptor)
                super().close()

    def digest(self) -> FileDigest:
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

    Raises:
        FormatError: The save id was used before on this disk by this rank.
    """

    def __init__(self, layout: StagingLayout, header: ShardHeader, clock: Clock) -> None:
        self._layout = layout
        self._header = header
        self._clock = clock
        self._snapshot_at = clock.now()
        self._entries: dict[str, FileEntry] = {}
        self._open: dict[str, StagedFile] = {}
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
            FormatError: The path is not legal, or was written before.
        """
        check_relative_path(path)
        if path in self._open or path in self._entries:
            raise FormatError(f"path {path!r} occurs twice in one save", kind=ErrorKind.PATH)
        target = self.local_path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        raw = _DigestingFile(target, mode | 0o600, self._header.part_bytes)
        file = StagedFile(raw, _BUFFER_BYTES)
        self._open[path] = file
        return file

    def add_tree(self, source: Path) -> None:
        """Copy a directory tree into the shard: files, links and empty directories.

        Raises:
            FormatError: A name is not legal, a link leads out of the tree, something is neither
                file, link nor directory, or a file changed while it was copied.
        """
        for path, info in _scan(source):
            if stat.S_ISLNK(info.st_mode):
                target = str((source / path).readlink())
                check_link(path, target)
                self._entries[path] = FileEntry(
                    path=path, kind="link", rank=self._header.rank, target=target
                )
                link = self.local_path(path)
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(target)
            elif stat.S_ISDIR(info.st_mode):
                mode = stat.S_IMODE(info.st_mode)
                self._entries[path] = FileEntry(
                    path=path, kind="dir", rank=self._header.rank, mode=mode
                )
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
        if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
            raise FormatError(
                f"{source} changed while it was staged",
                hint="hand a directory over only when nothing writes to it any more",
            )

    def seal(self) -> Seal:
        """Make the shard durable on NVMe and declare it whole. Blocks on the disk.

        Returns:
            The seal that was written.
        """
        for path, file in self._open.items():
            file.close()
            digest = file.digest()
            self._entries[path] = FileEntry(
                path=path,
                kind="file",
                rank=self._header.rank,
                mode=stat.S_IMODE(self.local_path(path).stat().st_mode),
                size_bytes=digest.size_bytes,
                crc64nvme=f"{digest.crc:016x}",
                part_bytes=digest.part_bytes,
                parts=tuple(f"{crc:016x}" for crc in digest.part_crcs),
            )
        check_tree(list(self._entries.values()))
        for directory, _, _ in os.walk(self.directory, topdown=False):
            fsync_directory(Path(directory))
        header = self._header
        seal = Seal(
            run=str(header.url),
            store_options=header.store_options,
            save_id=str(header.save_id),
            name=header.name,
            metadata=header.metadata,
            snapshot_at=self._snapshot_at,
            staged_at=self._clock.now(),
            rank=header.rank,
            ranks_on_node=header.ranks_on_node,
            node_rank=header.node_rank,
            num_nodes=header.num_nodes,
            part_bytes=header.part_bytes,
            files=tuple(self._entries.values()),
        )
        write_atomically(self.directory / SEAL_NAME, seal.encode())
        for parent in (self.directory.parent, self.directory.parent.parent):
            fsync_directory(parent)
        return seal

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
    for directory, folders, names in os.walk(root):
        folders.sort()
        relative = os.path.relpath(directory, root)
        for name in sorted(folders + names):
            path = name if relative == "." else f"{relative}/{name}"
            check_relative_path(path)
            yield path, os.lstat(os.path.join(directory, name))  # noqa: PTH118  raw names
