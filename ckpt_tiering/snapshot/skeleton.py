"""Where everything lies in a ``torch.save`` file, and the bytes of it that are not data."""

from __future__ import annotations

import pickle
import struct
import zlib
from contextlib import ExitStack
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch.serialization import skip_data

from ckpt_tiering.snapshot.walk import Unsupported

if TYPE_CHECKING:
    import io
    from collections.abc import Mapping

    from ckpt_tiering.snapshot.arena import Arena
    from ckpt_tiering.snapshot.walk import Walk

__all__ = ["Layout", "PickleDiffersError", "Sink", "lay_out"]

# Counters and random states change the pickle's length a little from save to save. What follows
# a pickle's end is ignored, as the documentation of `pickle.load` says, so the record is longer.
SPARE_BYTES = 512
ROUND_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Layout:
    """The plan of one file.

    Attributes:
        num_bytes: Length of the file.
        pickle_at: Offset of ``data.pkl``.
        pickle_room: Length of its record; the pickle itself may be shorter.
        checksums_at: Offsets of the CRC-32 of that record.
        sizes: Lengths of the storages.
        offsets: Where they go; of no meaning for those of length 0.
        pieces: Everything else, as pairs of offset and bytes.
    """

    num_bytes: int
    pickle_at: int
    pickle_room: int
    checksums_at: tuple[int, ...]
    sizes: tuple[int, ...]
    offsets: tuple[int, ...]
    pieces: tuple[tuple[int, bytes], ...]

    def holds(self, walk: Walk) -> bool:
        """Tell whether a state can be put in the same places, without too much left empty."""
        used = len(walk.pickled)
        fits = used <= self.pickle_room <= 2 * used + ROUND_BYTES
        return fits and self.sizes == walk.sizes

    def write(self, arena: Arena, pickled: bytes) -> None:
        """Put everything but the storages' data in place; only the pickle if the rest stands."""
        if arena.contents is not self:
            arena.contents = None
            for offset, data in self.pieces:
                arena.write(offset, data)
            arena.contents = self
        rest = bytes(self.pickle_room - len(pickled))
        arena.write(self.pickle_at, pickled)
        arena.write(self.pickle_at + len(pickled), rest)
        checksum = zlib.crc32(rest, zlib.crc32(pickled))
        for offset in self.checksums_at:
            arena.write(offset, struct.pack("<I", checksum))


class PickleDiffersError(Exception):
    """Our pickle of a state is not what ``torch.save`` makes of it."""


class Sink:
    """A file that is written front to back with gaps; keeps the bytes and where the gaps are."""

    def __init__(self) -> None:
        self.pieces: list[tuple[int, bytearray]] = [(0, bytearray())]
        self.gaps: list[tuple[int, int]] = []
        self._position = 0

    def write(self, data: memoryview) -> int:
        """Append bytes; return how many."""
        self.pieces[-1][1].extend(data)
        self._position += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = 0) -> int:
        """Leave a gap; return the position behind it."""
        end = offset + (self._position if whence else 0)
        self.gaps.append((self._position, end - self._position))
        self._position = end
        self.pieces.append((end, bytearray()))
        return end

    def tell(self) -> int:
        """Return the position."""
        return self._position

    def flush(self) -> None:
        """Do nothing."""


def _substitute(walk: Walk, room: int, later: ExitStack, *, compare: bool) -> Any:
    """Return a ``pickle_module`` by which ``torch.save`` writes the pickle that we have already.

    It also turns ``skip_data`` on, only after pickling: some kinds of tensors refuse to be
    pickled under it, although their storages can be left out as well as any other.
    """

    class Pickler(pickle.Pickler):
        def __init__(self, stream: io.BytesIO, *, protocol: int) -> None:
            super().__init__(stream, protocol=protocol)
            self._stream = stream

        def dump(self, obj: Any) -> None:
            if compare:
                super().dump(obj)
                if self._stream.getbuffer() != walk.pickled:
                    raise PickleDiffersError
                self._stream.seek(0)
                self._stream.truncate()
            else:  # torch registers the storages it is asked about: same order, same names
                for storage in walk.storages:
                    self.persistent_id(storage)
            self._stream.write(walk.pickled)
            self._stream.write(bytes(room - len(walk.pickled)))
            later.enter_context(skip_data())

    return SimpleNamespace(__name__="pickle", Pickler=Pickler)


def lay_out(
    state: Mapping[str, Any], walk: Walk, *, compare: bool, room: int | None = None
) -> Layout:
    """Plan the file of a state by letting ``torch.save`` write it without the data.

    Args:
        state: The state.
        walk: What `walk` made of it.
        compare: Pickle once more, as ``torch.save`` does, and refuse any difference.
        room: Length of the record of the pickle; a little more than it takes now by default.

    Raises:
        PickleDiffersError: There is one.
        Unsupported: torch refuses, or this version of it writes files otherwise than expected.
    """
    if room is None:
        room = -(-(len(walk.pickled) + SPARE_BYTES) // ROUND_BYTES) * ROUND_BYTES
    sink = Sink()
    with ExitStack() as later:
        module = _substitute(walk, room, later, compare=compare)
        try:
            torch.save(state, sink, pickle_module=module)  # type: ignore[arg-type]  # only writes
        except RuntimeError as error:
            raise Unsupported(f"torch.save can't lay the state out: {error}") from error
    if [size for _, size in sink.gaps] != [size for size in walk.sizes if size]:
        raise Unsupported("torch.save left other gaps than the storages' sizes")
    gaps = iter(sink.gaps)
    pickle_at, checksums_at = _find_pickle(sink, walk.pickled, room)
    head = bytes(sink.pieces[0][1])
    end = pickle_at + room
    tail = [(offset, bytes(data)) for offset, data in sink.pieces[1:]]
    return Layout(
        num_bytes=sink.tell(),
        pickle_at=pickle_at,
        pickle_room=room,
        checksums_at=checksums_at,
        sizes=walk.sizes,
        offsets=tuple([next(gaps)[0] if size else 0 for size in walk.sizes]),
        pieces=((0, head[:pickle_at]), (end, head[end:]), *tail),
    )


def _find_pickle(sink: Sink, pickled: bytes, room: int) -> tuple[int, tuple[int, int]]:
    """Find the first record, ``data.pkl``, and the two places that hold its checksum."""
    head = sink.pieces[0][1]
    flags, name_bytes, extra_bytes = struct.unpack_from("<6xH18x2H", head)
    at = 30 + name_bytes + extra_bytes
    if not head[:4] == b"PK\3\4" or head[at : at + len(pickled)] != pickled:
        raise Unsupported("data.pkl is not the first record of what torch.save wrote")
    follows = bool(flags & 8) and head[at + room :][:4] == b"PK\x07\x08"
    start, last = sink.pieces[-1]
    directory = _directory_at(last)
    if last[directory - start :][:4] != b"PK\1\2":
        raise Unsupported("no zip directory at the end of what torch.save wrote")
    return at, (at + room + 4 if follows else 14, directory + 16)


def _directory_at(last: bytearray) -> int:
    """Return the offset of a zip's directory, read from the records at its end."""
    at = int.from_bytes(last[-6:-2], "little")
    if at == 0xFFFF_FFFF:  # noqa: PLR2004  written in the zip64 record instead
        record = last.rfind(b"PK\x06\x06")
        at = int.from_bytes(last[record + 48 : record + 56], "little")
    return at
