"""What a request to a store carries: pieces of memory and of files, read in small windows.

Memory stays at one window a request, whatever the size of the part. The checksum is taken again
while the bytes leave: a source that changed after it was staged is found before its last byte has
gone out, so that not even a store without checksums ever completes such a request.
"""

from __future__ import annotations

import io
import os
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ckpt_tiering.errors import IntegrityError
from ckpt_tiering.model.digest import PartCrc, crc64, join

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from ckpt_tiering.stores.hot import HotFile

__all__ = ["Body", "BodyReader", "BytesPiece", "FilePiece"]

WINDOW_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class BytesPiece:
    """A piece of memory."""

    data: bytes

    @property
    def size_bytes(self) -> int:
        """Length of the piece."""
        return len(self.data)

    def read(self, start: int, size_bytes: int) -> bytes:
        """Return at most ``size_bytes`` from offset ``start``."""
        return self.data[start : start + size_bytes]


@dataclass(frozen=True, slots=True)
class FilePiece:
    """A window of a file.

    Attributes:
        path: The file; opened at each window, so that thousands of pieces hold no descriptor.
        offset: Where the piece starts in the file.
        size_bytes: Length of the piece.
        hot: The same file in memory, which is faster while it lasts.
    """

    path: Path
    offset: int
    size_bytes: int
    hot: HotFile | None = None

    def read(self, start: int, size_bytes: int) -> bytes:
        """Return at most ``size_bytes`` from offset ``start``; raise if the file is too short."""
        wanted = min(size_bytes, self.size_bytes - start)
        if self.hot is not None:
            data = self.hot.read(self.offset + start, wanted)
            if data is not None:
                return data
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise IntegrityError(
                f"staged file {self.path} can't be read: {error.strerror}", key=str(self.path)
            ) from error
        try:
            data = os.pread(descriptor, wanted, self.offset + start)
        finally:
            os.close(descriptor)
        if not data and wanted:
            raise IntegrityError(
                f"staged file {self.path} ends before byte {self.offset + start + wanted}: "
                "it was cut after it was staged",
                key=str(self.path),
            )
        return data


@dataclass(frozen=True, slots=True)
class Body:
    """The bytes of one request, with the checksum that was taken when they were staged.

    Attributes:
        pieces: What the bytes consist of, in order.
        checksum: Length and CRC64NVME of all of them.
        name: What to call the bytes in an error.
        on_read: Called with the number of bytes that are about to leave, from the sending thread;
            may block (bandwidth) or raise (shutdown).
    """

    pieces: Sequence[BytesPiece | FilePiece]
    checksum: PartCrc
    name: str = "body"
    on_read: Callable[[int], None] | None = field(default=None, compare=False)

    @classmethod
    def of_bytes(cls, data: bytes, name: str = "body") -> Body:
        """Make a body of bytes in memory."""
        return cls((BytesPiece(data),), join([PartCrc(len(data), crc64(data))]), name)

    @property
    def size_bytes(self) -> int:
        """Length of the body."""
        return self.checksum.size_bytes

    def check(self) -> None:
        """Read all of it and compare. Blocks on the disk.

        Raises:
            IntegrityError: The bytes do not have the checksum.
        """
        reader = replace(self, on_read=None).open()
        while reader.read():
            continue

    def open(self) -> BodyReader:
        """Return a new reader at offset 0; one a request attempt."""
        return BodyReader(self)


class BodyReader(io.RawIOBase):
    """Seekable stream over a body, as HTTP clients want it.

    Raises:
        IntegrityError: (by ``read``) The bytes do not have the checksum of the body.
    """

    def __init__(self, body: Body) -> None:
        super().__init__()
        self._body = body
        self._starts = []
        total = 0
        for piece in body.pieces:
            self._starts.append(total)
            total += piece.size_bytes
        if total != body.size_bytes:
            raise ValueError(f"pieces hold {total} bytes, the checksum is of {body.size_bytes}")
        self._index = 0
        self._position = 0
        self._crc = 0
        self._checked = 0  # bytes covered by _crc, always a prefix

    def __len__(self) -> int:
        return self._body.size_bytes

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the offset of the next byte."""
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move to an offset; HTTP clients use it to learn the length and to send again."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: len(self)}[whence]
        self._position, self._index = base + offset, 0
        if self._position == 0:
            self._crc, self._checked = 0, 0
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        """Return the next bytes, at most one window; empty at the end."""
        if self._position >= len(self):
            return b""
        wanted = WINDOW_BYTES if size is None or size < 0 else min(size, WINDOW_BYTES)
        data = self._gather(wanted)
        if self._body.on_read is not None:
            self._body.on_read(len(data))
        if self._checked == self._position:
            self._crc = crc64(data, self._crc)
            self._checked += len(data)
        self._position += len(data)
        if self._checked == len(self):
            self._compare()
        return data

    def _gather(self, wanted: int) -> bytes:
        chunks: list[bytes] = []
        position, index = self._position, self._index
        while wanted and index < len(self._body.pieces):
            piece, start = self._body.pieces[index], position - self._starts[index]
            if start >= piece.size_bytes:
                index += 1
                continue
            data = piece.read(start, wanted)
            chunks.append(data)
            position += len(data)
            wanted -= len(data)
        self._index = index
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def _compare(self) -> None:
        if self._crc != self._body.checksum.crc:
            raise IntegrityError(
                f"{self._body.name} changed after it was staged: CRC64NVME is "
                f"{self._crc:016x}, was {self._body.checksum.crc:016x}",
                key=self._body.name,
            )

    def readinto(self, buffer: Any) -> int:
        """Read into a writable buffer; return the number of bytes."""
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)
