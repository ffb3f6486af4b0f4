"""Durable and careful file operations on the staging disk."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_tiering.errors import CapacityError, ConfigError
from ckpt_tiering.model.digest import FileDigest, StreamDigest
from ckpt_tiering.units import MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = [
    "boot_id",
    "digest_file",
    "disk_errors",
    "ensure_local_filesystem",
    "ensure_room",
    "free_bytes",
    "fsync_directory",
    "make_private",
    "remove_tree",
    "tree_bytes",
    "write_atomically",
    "write_direct",
]

_TEMPORARY_SUFFIX = ".tmp"
_DIRECT_BYTES = 16 * MIB
_ALIGNMENT = 4096  # of O_DIRECT, on any disk of this century
_NO_ROOM = frozenset([errno.ENOSPC, errno.EDQUOT, errno.EFBIG])

# SQLite's WAL needs memory shared by all its users, which these can't give between nodes; and a
# staging disk that is not the node's own would make every node's agent fight for one lock.
_NETWORK_FILESYSTEMS = frozenset(
    [
        "afs",
        "beegfs",
        "ceph",
        "cifs",
        "fuse.gcsfuse",
        "fuse.glusterfs",
        "fuse.s3fs",
        "fuse.sshfs",
        "glusterfs",
        "gpfs",
        "lustre",
        "nfs",
        "nfs4",
        "ocfs2",
        "pvfs2",
        "smb3",
        "smbfs",
        "wekafs",
    ]
)


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn the operating system's "no room" for ``path`` into `CapacityError`; pass other errors.

    Raises:
        CapacityError: The disk, a quota or a limit on the length of files has no room.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        raise CapacityError(
            f"{path} can't be written: {error.strerror}",
            hint="free space on this disk; for staging, set nvme_budget lower",
        ) from error


def fsync_directory(path: Path) -> None:
    """Make the entries of a directory survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_private(path: Path) -> Path:
    """Create a directory, and its parents, that only its owner can enter."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"directory {path} can't be made: {error.strerror}",
            hint="give a writable directory on a node-local disk as staging",
        ) from error
    return path


def write_atomically(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Replace a file as a whole: readers see the old bytes or the new ones, never a part.

    Args:
        path: The file.
        data: Its new contents.
        durable: Also survive a power cut (fsync of file and directory).
    """
    temporary = path.with_name(path.name + _TEMPORARY_SUFFIX)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]
        if durable:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
    temporary.replace(path)
    if durable:
        fsync_directory(path.parent)


def remove_tree(path: Path, *, inside: Path) -> None:
    """Delete a directory tree; a missing one is no error. Never follows links out of ``inside``.

    Args:
        path: What to delete.
        inside: A directory that must contain it, as a guard against wrong paths.

    Raises:
        ValueError: ``path`` is not below ``inside``.
    """
    where, root = path.parent.resolve() / path.name, inside.resolve()
    if path.name in {"", ".."} or not where.is_relative_to(root) or where == root:
        raise ValueError(f"{path} is not below {inside}")
    if where.is_symlink():
        where.unlink()
    elif where.exists():
        shutil.rmtree(where)


def _walk(path: Path) -> Iterator[os.stat_result]:
    for directory, _, names in os.walk(path):
        for name in names:
            try:
                yield os.lstat(os.path.join(directory, name))  # noqa: PTH118  hot loop
            except FileNotFoundError:
                continue


def tree_bytes(path: Path) -> int:
    """Return the bytes that the files of a tree take on disk."""
    return sum(s.st_blocks * 512 for s in _walk(path) if stat.S_ISREG(s.st_mode))


def write_direct(path: Path, source: memoryview, on_chunk: Callable[[memoryview], None]) -> None:
    """Write memory to a new file past the page cache, and make it durable. Blocks on the disk.

    Buffered writes cost several times the processor time and slow the training beside them; a file
    system that can't do without gets them.

    Args:
        path: The file; must not exist.
        source: Page-aligned memory, such as a mapping.
        on_chunk: Called with each piece before it is written.

    Raises:
        CapacityError: The disk has no room.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with disk_errors(path):
        try:
            descriptor = os.open(path, flags | os.O_DIRECT, 0o644)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            descriptor = os.open(path, flags, 0o644)
        try:
            for start in range(0, len(source), _DIRECT_BYTES):
                chunk = source[start : start + _DIRECT_BYTES]
                on_chunk(chunk)
                aligned = len(chunk) & -_ALIGNMENT
                _write_all(descriptor, chunk[:aligned])
                if aligned < len(chunk):  # the end of the file: shorter than a block
                    _leave_direct(descriptor)
                    _write_all(descriptor, chunk[aligned:])
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _write_all(descriptor: int, data: memoryview) -> None:
    while data:
        try:
            data = data[os.write(descriptor, data) :]
        except OSError as error:
            if error.errno != errno.EINVAL or not _leave_direct(descriptor):
                raise


def _leave_direct(descriptor: int) -> bool:
    """Go on with buffered writes; return whether that is a change."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
    return bool(flags & os.O_DIRECT)


def digest_file(path: Path, part_bytes: int) -> FileDigest:
    """Read a file once and return its digest, with parts of ``part_bytes``."""
    stream = StreamDigest(part_bytes)
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(MIB):
            stream.update(chunk)
    return stream.digest()


def free_bytes(path: Path) -> int:
    """Return the bytes that this user may still write to the file system of ``path``."""
    return shutil.disk_usage(path).free


def boot_id() -> str:
    """Return the kernel's id of this boot, so that pids of an earlier boot mean nothing."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def _filesystem_type(path: Path) -> str:
    best, kind = "", "unknown"
    for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines():
        fields = line.split(" ")
        mount = fields[1].replace("\\040", " ")
        inside = path == Path(mount) or path.is_relative_to(mount)
        if inside and len(mount) >= len(best):
            best, kind = mount, fields[2]
    return kind


def ensure_local_filesystem(path: Path, *, kind: str | None = None) -> None:
    """Refuse a network file system as staging disk.

    Args:
        path: An existing directory.
        kind: Type of its file system, as in ``/proc/self/mounts``; looked up by default.

    Raises:
        ConfigError: ``path`` lies on a network file system.
    """
    kind = kind or _filesystem_type(path.resolve())
    if kind.lower() in _NETWORK_FILESYSTEMS:
        raise ConfigError(
            f"staging directory {path} lies on a network file system ({kind})",
            hint="give a directory on a disk of the node itself, such as its NVMe",
        )


def ensure_room(path: Path, wanted_bytes: int) -> None:
    """Refuse to start writing what can't fit.

    Raises:
        CapacityError: Less than ``wanted_bytes`` are free.
    """
    free = free_bytes(path)
    if free < wanted_bytes:
        raise CapacityError(
            f"staging disk of {path} has {free} bytes free, {wanted_bytes} are needed",
            hint="free space, or set nvme_budget lower so that durable saves are evicted earlier",
        )
