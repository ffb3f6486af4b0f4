"""Packs: small files side by side in plain tar archives, laid out without reading a byte of them.

An archive is a header, the file's own bytes and padding for each member, so its checksum follows
from the digests that were taken at staging, and the upload reads the staged files themselves.
Headers are deterministic (no times, no owners): a pack built again after a crash is the same bytes.
"""

from __future__ import annotations

import tarfile
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckpt_tiering.units import MIB

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["PACK_BELOW_BYTES", "Member", "Pack", "plan_packs"]

PACK_BELOW_BYTES = 8 * MIB  # P13: files of this length or more are objects of their own
PACK_BYTES = 64 * MIB
_BLOCK = tarfile.BLOCKSIZE
_END = bytes(2 * _BLOCK)


@dataclass(frozen=True, slots=True)
class Member:
    """A file in a pack.

    Attributes:
        path: Path in the checkpoint, which is also its name in the archive.
        size_bytes: Length.
        mode: Permission bits.
        header: Tar headers that precede it.
        offset: Where its bytes start in the archive.
    """

    path: str
    size_bytes: int
    mode: int
    header: bytes
    offset: int

    @property
    def padding(self) -> bytes:
        """Zeros up to the next block."""
        return bytes(-self.size_bytes % _BLOCK)


@dataclass(frozen=True, slots=True)
class Pack:
    """One archive.

    Attributes:
        members: Its files, in order.
        size_bytes: Length of the archive.
    """

    members: tuple[Member, ...]
    size_bytes: int

    @property
    def trailer(self) -> bytes:
        """What ends the archive."""
        return _END


def _header(path: str, size_bytes: int, mode: int) -> bytes:
    info = tarfile.TarInfo(path)
    info.size, info.mode = size_bytes, mode
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "strict")


def plan_packs(files: Iterable[tuple[str, int, int]]) -> Sequence[Pack]:
    """Distribute small files over packs of about 64 MiB.

    Args:
        files: Path, length in bytes and permission bits of each file; the order is kept.
    """
    packs: list[Pack] = []
    members: list[Member] = []
    position = 0
    for path, size_bytes, mode in files:
        if position + size_bytes > PACK_BYTES and members:
            packs.append(Pack(tuple(members), position + len(_END)))
            members, position = [], 0
        header = _header(path, size_bytes, mode)
        member = Member(path, size_bytes, mode, header, position + len(header))
        members.append(member)
        position = member.offset + size_bytes + len(member.padding)
    if members:
        packs.append(Pack(tuple(members), position + len(_END)))
    return packs
