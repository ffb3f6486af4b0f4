"""CRC64NVME of files and of their parts, taken while the bytes stream by.

The polynomial and its use as a *full object* checksum are those of Amazon S3 (CRC-64/NVME); the
implementation is the one of the AWS Common Runtime. The checksum of a whole is combined from those
of its parts, so no byte is read twice.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from awscrt import checksums

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "FileDigest",
    "PartCrc",
    "StreamDigest",
    "combine",
    "crc64",
    "crc_from_b64",
    "crc_to_b64",
]


def crc64(data: bytes | bytearray | memoryview, previous: int = 0) -> int:
    """Return the CRC64NVME of ``data``, continuing from ``previous``."""
    return int(checksums.crc64nvme(data, previous))


def combine(first: int, second: int, second_bytes: int) -> int:
    """Return the CRC64NVME of two joined pieces from those of the pieces."""
    return int(checksums.combine_crc64nvme(first, second, second_bytes)) if second_bytes else first


def crc_to_b64(crc: int) -> str:
    """Write a CRC64NVME as S3 does: base64 of eight big-endian bytes."""
    return base64.b64encode(crc.to_bytes(8, "big")).decode()


def crc_from_b64(text: str) -> int:
    """Read a CRC64NVME as S3 writes it."""
    return int.from_bytes(base64.b64decode(text, validate=True), "big")


@dataclass(frozen=True, slots=True)
class PartCrc:
    """Checksum of one piece.

    Attributes:
        size_bytes: Length of the piece.
        crc: Its CRC64NVME.
    """

    size_bytes: int
    crc: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FileDigest:
    """Digest of a file, whole and by part.

    Attributes:
        size_bytes: Length of the file.
        crc: CRC64NVME of the whole.
        part_bytes: Length of each part but the last.
        part_crcs: CRC64NVME of each part, in order; empty for an empty file.
    """

    size_bytes: int
    crc: int
    part_bytes: int
    part_crcs: tuple[int, ...]

    def regroup(self, part_bytes: int) -> tuple[PartCrc, ...]:
        """Return the checksums for larger parts, a multiple of the ones that were taken."""
        factor, rest = divmod(part_bytes, self.part_bytes)
        if rest or not factor:
            raise ValueError(f"{part_bytes} is not a multiple of {self.part_bytes}")
        parts = []
        for start in range(0, len(self.part_crcs), factor):
            group = self.part_crcs[start : start + factor]
            sizes = [
                min(self.part_bytes, self.size_bytes - (start + i) * self.part_bytes)
                for i in range(len(group))
            ]
            parts.append(join(PartCrc(s, c) for s, c in zip(sizes, group, strict=True)))
        return tuple(parts)


def join(pieces: Iterable[PartCrc]) -> PartCrc:
    """Return the checksum of pieces in a row."""
    size, crc = 0, 0
    for piece in pieces:
        crc = combine(crc, piece.crc, piece.size_bytes)
        size += piece.size_bytes
    return PartCrc(size, crc)


@dataclass(slots=True)
class StreamDigest:
    """Takes the digest of a stream of bytes, part by part.

    Args:
        part_bytes: Length of each part but the last.
    """

    part_bytes: int
    _done: list[PartCrc] = field(default_factory=list)
    _current: int = 0
    _filled: int = 0

    def update(self, data: bytes | bytearray | memoryview) -> None:
        """Take in the next bytes. Does not keep ``data``."""
        view = memoryview(data).cast("B")
        while view:
            piece = view[: self.part_bytes - self._filled]
            self._current = crc64(piece, self._current)
            self._filled += len(piece)
            view = view[len(piece) :]
            if self._filled == self.part_bytes:
                self._close_part()

    def _close_part(self) -> None:
        self._done.append(PartCrc(self._filled, self._current))
        self._current, self._filled = 0, 0

    def digest(self) -> FileDigest:
        """Return the digest of all bytes so far. More bytes may follow."""
        parts = [*self._done, PartCrc(self._filled, self._current)] if self._filled else self._done
        whole = join(parts)
        return FileDigest(
            size_bytes=whole.size_bytes,
            crc=whole.crc,
            part_bytes=self.part_bytes,
            part_crcs=tuple(p.crc for p in parts),
        )
