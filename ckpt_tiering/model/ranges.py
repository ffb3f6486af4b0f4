"""Which bytes are read for byte ranges of files: whole blocks, by few requests. No I/O.

A range is verified by reading the *blocks* that it touches: the pieces of a file whose checksums
the manifest has. Neighbouring blocks of an object, be they of one file or of small files in one
pack, are read by one request.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckpt_tiering.units import MIB

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ckpt_tiering.model.manifest import FileEntry

__all__ = ["Block", "ByteRange", "Request", "blocks_of", "plan_requests"]

GAP_BYTES = 1 * MIB
REQUEST_BYTES = 64 * MIB


@dataclass(frozen=True, slots=True)
class ByteRange:
    """A stretch of a file.

    Attributes:
        path: Path in the checkpoint.
        start: First byte.
        end: Behind the last byte.
    """

    path: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Block:
    """A piece of a file that has a checksum of its own.

    Attributes:
        file: The file.
        key: Key of the object that holds it.
        start: First byte, counted in the file.
        end: Behind the last byte, likewise.
        crc: CRC64NVME of the piece.
    """

    file: FileEntry
    key: str
    start: int
    end: int
    crc: int

    @property
    def at(self) -> int:
        """First byte, counted in the object."""
        return self.file.offset + self.start


@dataclass(frozen=True, slots=True)
class Request:
    """What is read at once: some blocks of one object, by place, and small gaps between them.

    Attributes:
        key: Key of the object.
        start: First byte, counted in the object.
        end: Behind the last byte, likewise.
        blocks: The blocks; they do not overlap.
    """

    key: str
    start: int
    end: int
    blocks: tuple[Block, ...]


def blocks_of(file: FileEntry, key: str, start: int, end: int) -> Iterator[Block]:
    """Yield the blocks of a file that hold bytes ``start`` to ``end`` (exclusive) of it."""
    if start >= end:
        return
    size = file.part_bytes
    for index in range(start // size, -(-end // size)):
        first = index * size
        last = min(first + size, file.size_bytes)
        yield Block(file, key, first, last, int(file.parts[index], 16))


def plan_requests(
    blocks: Iterable[Block], *, gap_bytes: int = GAP_BYTES, request_bytes: int = REQUEST_BYTES
) -> list[Request]:
    """Gather blocks into requests, in the order of keys and places.

    Args:
        blocks: Each once, in any order.
        gap_bytes: Bytes that nobody wants and that are read all the same to save a request.
        request_bytes: Bound of a request, unless a single block is longer.
    """
    requests: list[Request] = []
    taken: list[Block] = []
    start = end = 0

    def close() -> None:
        if taken:
            requests.append(Request(taken[0].key, start, end, tuple(taken)))
            taken.clear()

    for block in sorted(blocks, key=lambda b: (b.key, b.at, b.file.path)):
        last = block.at + block.end - block.start
        # Files that overlap in their object are the work of an attacker: never in one buffer.
        fits = 0 <= block.at - end <= gap_bytes and last - start <= request_bytes
        if not (taken and taken[0].key == block.key and fits):
            close()
            start = block.at
        taken.append(block)
        end = last
    close()
    return requests
