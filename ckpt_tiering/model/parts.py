"""How an object is cut into the parts of a multipart upload."""

from __future__ import annotations

from dataclasses import dataclass

from ckpt_tiering.errors import CapacityError, ErrorKind
from ckpt_tiering.units import GIB, MIB, format_bytes

__all__ = ["MAX_PART_BYTES", "MIN_PART_BYTES", "PartPlan", "block_bytes", "plan_parts"]

# Limits of Amazon S3 (its quotas page, 2026): parts of 5 MiB to 5 GiB, at most 10,000 of them.
MIN_PART_BYTES = 5 * MIB
MAX_PART_BYTES = 5 * GIB
MAX_PARTS = 10_000
MAX_OBJECT_BYTES = int(48.8 * (1 << 40))
# A range of a file can be verified by reading the blocks that it touches, and no more than those.
MAX_BLOCK_BYTES = 8 * MIB


@dataclass(frozen=True, slots=True)
class PartPlan:
    """The parts of one object.

    Attributes:
        size_bytes: Length of the object.
        part_bytes: Length of each part but the last.
    """

    size_bytes: int
    part_bytes: int

    @property
    def num_parts(self) -> int:
        """Number of parts; an empty object has none."""
        return -(-self.size_bytes // self.part_bytes)

    def span(self, number: int) -> tuple[int, int]:
        """Return start (inclusive) and end (exclusive) of part ``number``, counted from 1."""
        start = (number - 1) * self.part_bytes
        return start, min(start + self.part_bytes, self.size_bytes)


def block_bytes(part_bytes: int) -> int:
    """Return the length of the pieces whose digests are taken; parts consist of whole ones."""
    while part_bytes > MAX_BLOCK_BYTES and part_bytes % 2 == 0:
        part_bytes //= 2
    return part_bytes


def plan_parts(
    size_bytes: int,
    part_bytes: int,
    *,
    max_parts: int = MAX_PARTS,
    max_object_bytes: int = MAX_OBJECT_BYTES,
) -> PartPlan:
    """Choose the part length: ``part_bytes``, or the smallest multiple that fits ``max_parts``.

    Raises:
        CapacityError: The object is over the limit of the store, or no part length fits.
    """
    if size_bytes > max_object_bytes:
        raise CapacityError(
            f"an object of {format_bytes(size_bytes)} is over the store's limit of "
            f"{format_bytes(max_object_bytes)}",
            kind=ErrorKind.OBJECT_TOO_LARGE,
            hint="shard the checkpoint into more files",
        )
    factor = max(1, -(-size_bytes // (part_bytes * max_parts)))
    if factor * part_bytes > MAX_PART_BYTES and factor > 1:
        raise CapacityError(
            f"{format_bytes(size_bytes)} does not fit into {max_parts:,} parts of at most "
            f"{format_bytes(MAX_PART_BYTES)}",
            kind=ErrorKind.OBJECT_TOO_LARGE,
            hint="shard the checkpoint into more files",
        )
    return PartPlan(size_bytes, factor * part_bytes)
