"""DCP's data file (``__0_0.distcp``) in an arena: its items' archives one behind the other.

Items are what DCP calls them: tensors of plain memory, and objects, which are pickled. The file is
what DCP's own writer makes (objects first, then tensors, in the order of the plan), except that
each item begins at a multiple of 64 bytes, that objects have room to grow, and that no checksums
(CRC-32) are taken. The offsets and lengths in ``.metadata`` say where the items are, so that any
reader of DCP's files reads it.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO

import torch

from ckpt_tiering.model.extent import PAGE_BYTES, Extent
from ckpt_tiering.snapshot.archives import (
    TensorArchive,
    dense_strides,
    object_archive,
    tensor_archive,
)
from ckpt_tiering.snapshot.fill import copy_memory, copy_tensors, fill
from ckpt_tiering.snapshot.garbage import no_collection
from ckpt_tiering.snapshot.walk import Walk

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from ckpt_tiering.snapshot.arena import Arena
    from ckpt_tiering.snapshot.skeleton import Layout

__all__ = ["DistcpFiles", "DistcpLayout", "is_plain"]

ALIGN_BYTES = 64
BLOB_SPARE_BYTES = 256
PLAIN_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer})


def is_plain(value: Any) -> bool:
    """Tell whether a value is a tensor that is stored as such; all others are pickled."""
    return (
        type(value) in PLAIN_TENSORS
        and value.layout is torch.strided
        and not (value.is_quantized or value.is_nested)
    )


@dataclass(frozen=True, slots=True, eq=False)
class _ObjectPlace:
    """Where an object is; without an archive it is bytes that are an archive already."""

    offset: int
    archive: Layout | None
    room: int

    @property
    def pickle_at(self) -> int:
        return self.offset + (self.archive.pickle_at if self.archive else 0)

    @property
    def end(self) -> int:
        return self.offset + (self.archive.num_bytes if self.archive else self.room)

    def holds(self, value: Walk | bytes) -> bool:
        if isinstance(value, bytes):
            return self.archive is None and len(value) <= self.room
        return (
            self.archive is not None
            and len(value.pickled) <= self.room
            and value.sizes == self.archive.sizes
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Contents:
    """What an arena was filled with last."""

    layout: DistcpLayout
    pickles: list[bytes]


def _aligned(offset: int, to: int = ALIGN_BYTES) -> int:
    return -(-offset // to) * to


def _kinds(tensors: Sequence[torch.Tensor]) -> list[tuple[torch.dtype, torch.Size]]:
    return [(tensor.dtype, tensor.shape) for tensor in tensors]


def _bytes_of(value: Walk | bytes) -> bytes:
    return value if isinstance(value, bytes) else value.pickled


class DistcpLayout:
    """The plan of a data file, for items of these kinds.

    Args:
        objects: What `archives.pickle_object` made of each, or the bytes of a whole archive.
        tensors: Tensors for which `is_plain` holds, on any device.

    Attributes:
        num_bytes: Length of the file.
    """

    def __init__(self, objects: Sequence[Walk | bytes], tensors: Sequence[torch.Tensor]) -> None:
        end = 0
        self._objects: list[_ObjectPlace] = []
        for value in objects:
            if isinstance(value, bytes):
                room = _aligned(len(value) + BLOB_SPARE_BYTES)
                place = _ObjectPlace(_aligned(end), None, room)
            else:
                archive = object_archive(value)
                place = _ObjectPlace(_aligned(end), archive, archive.pickle_room)
            self._objects.append(place)
            end = place.end
        self._kinds = _kinds(tensors)
        self._offsets: list[int] = []
        self._archives: list[TensorArchive] = []
        self._data: list[tuple[int, int, tuple[int, ...]]] = []  # offset, length, strides
        for tensor in tensors:
            offset = _aligned(end)
            archived = tensor_archive(tensor.dtype, tensor.shape, dense_strides(tensor))
            self._offsets.append(offset)
            self._archives.append(archived)
            self._data.append((offset + len(archived.head), archived.data_bytes, archived.stride))
            end = offset + archived.num_bytes
        self.num_bytes = end

    def holds(self, objects: Sequence[Walk | bytes], tensors: Sequence[torch.Tensor]) -> bool:
        """Tell whether other values of the items can be put in the same places."""
        return (
            len(objects) == len(self._objects)
            and all(p.holds(v) for p, v in zip(self._objects, objects, strict=True))
            and _kinds(tensors) == self._kinds
        )

    def places(self, objects: Sequence[Walk | bytes]) -> list[tuple[int, int]]:
        """Return offset and length of each item, objects first."""
        there = []
        for place, value in zip(self._objects, objects, strict=True):
            length = len(value) if isinstance(value, bytes) else place.end - place.offset
            there.append((place.offset, length))
        lengths = [archive.num_bytes for archive in self._archives]
        return [*there, *zip(self._offsets, lengths, strict=True)]

    # --- into an arena -----------------------------------------------------------------------

    def put(
        self, arena: Arena, objects: Sequence[Walk | bytes], tensors: Sequence[torch.Tensor]
    ) -> None:
        """Fill the first `num_bytes` of an arena with the file. Blocks for the copy, GPUs' too.

        Args:
            arena: Large enough.
            objects: As of the constructor; the layout holds them.
            tensors: Likewise.
        """
        held = arena.contents
        pickles = [_bytes_of(value) for value in objects]
        known: Sequence[bytes | None] = [None] * len(pickles)
        if isinstance(held, _Contents) and held.layout is self:
            known = held.pickles
        else:
            for offset, data in self._frame():
                arena.write(offset, data)
        arena.contents = None  # until all is there
        for place, value, old, new in zip(self._objects, objects, known, pickles, strict=True):
            if old != new:
                arena.write(place.pickle_at, new + bytes(place.room - len(new)))
            if place.archive and place.archive.sizes and isinstance(value, Walk):
                fill(arena, value, place.archive.offsets, base=place.offset)
        self._put_tensors(arena, tensors)
        arena.contents = _Contents(self, pickles)

    def _frame(self) -> Iterator[tuple[int, bytes]]:
        """Yield everything but pickles and data, zeros between the items included."""
        end = 0
        for place in self._objects:
            yield end, bytes(place.offset - end)
            for offset, data in place.archive.pieces if place.archive else ():
                yield place.offset + offset, data
            end = place.end
        for offset, archive in zip(self._offsets, self._archives, strict=True):
            yield end, bytes(offset - end) + archive.head
            end = offset + archive.num_bytes
            yield end - len(archive.tail), archive.tail

    def _put_tensors(self, arena: Arena, tensors: Sequence[torch.Tensor]) -> None:
        blocks: list[tuple[int, int, int]] = []
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for tensor, (offset, size, stride) in zip(tensors, self._data, strict=True):
            if not size:
                continue
            if tensor.is_cpu and tensor.stride() == stride and not _is_lazy(tensor):
                blocks.append((tensor.data_ptr(), size, offset))
            else:
                memory = arena.tensor[offset : offset + size].view(tensor.dtype)
                targets.append(memory.as_strided(tensor.shape, stride, memory.storage_offset()))
                sources.append(_readable(tensor))
        copy_memory(arena, blocks)
        if sources:
            if any(source.is_cuda for source in sources):
                arena.pin()
            copy_tensors(targets, sources)

    # --- into a stream -----------------------------------------------------------------------

    def write(
        self, stream: BinaryIO, objects: Sequence[Walk | bytes], tensors: Sequence[torch.Tensor]
    ) -> None:
        """Write the very same file to a stream; arguments as of `put`."""
        end = 0
        for place, value in zip(self._objects, objects, strict=True):
            stream.write(bytes(place.offset - end))
            stream.write(_object_bytes(place, value))
            end = place.end
        for offset, archive, tensor in zip(self._offsets, self._archives, tensors, strict=True):
            stream.write(bytes(offset - end) + archive.head)
            _write_data(stream, tensor, archive)
            stream.write(archive.tail)
            end = offset + archive.num_bytes


def _is_lazy(tensor: torch.Tensor) -> bool:
    """Tell whether what a tensor says is not what its memory holds."""
    return tensor.is_conj() or tensor.is_neg()


def _readable(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor if tensor.is_cpu or tensor.is_cuda else tensor.cpu()


def _memory_at(address: int, num_bytes: int) -> memoryview:
    return memoryview((ctypes.c_char * num_bytes).from_address(address)).cast("B")


def _object_bytes(place: _ObjectPlace, value: Walk | bytes) -> bytes | bytearray:
    data = _bytes_of(value)
    padded = data + bytes(place.room - len(data))
    if place.archive is None:
        return padded
    made = bytearray(place.archive.num_bytes)
    for offset, piece in (*place.archive.pieces, (place.archive.pickle_at, padded)):
        made[offset : offset + len(piece)] = piece
    assert isinstance(value, Walk)
    for storage, size, offset in zip(
        value.storages, value.sizes, place.archive.offsets, strict=True
    ):
        if size:
            here = storage.cpu()  # type: ignore[no-untyped-call]
            made[offset : offset + size] = _memory_at(here.data_ptr(), size)
    return made


def _write_data(stream: BinaryIO, tensor: torch.Tensor, archive: TensorArchive) -> None:
    if not archive.data_bytes:
        return
    here = tensor.detach().cpu()
    if here.stride() != archive.stride or _is_lazy(here):
        dense = torch.empty_strided(here.shape, archive.stride, dtype=here.dtype, device="cpu")
        here = dense.copy_(here)
    stream.write(_memory_at(here.data_ptr(), archive.data_bytes))


class DistcpFiles:
    """One rank's files of a DCP checkpoint: a `Source`.

    Args:
        path: Path of the data file in the checkpoint.
        layout: Its layout.
        objects: Values of its objects, which the layout holds.
        tensors: Values of its tensors.
        others: Small files next to it, by path.
    """

    def __init__(
        self,
        path: str,
        layout: DistcpLayout,
        objects: Sequence[Walk | bytes],
        tensors: Sequence[torch.Tensor],
        others: Mapping[str, bytes],
    ) -> None:
        self._path = path
        self._layout = layout
        self._objects = objects
        self._tensors = tensors
        self._others = others

    def capture(self, arena: Arena) -> tuple[Extent, ...]:
        """Put the files into an arena; see `DistcpLayout.put`."""
        extents = [Extent(self._path, 0, self._layout.num_bytes)]
        end = _aligned(self._layout.num_bytes, PAGE_BYTES)
        for path, data in self._others.items():
            extents.append(Extent(path, end, len(data)))
            end = _aligned(end + len(data), PAGE_BYTES)
        arena.reserve(end)
        with no_collection():
            self._layout.put(arena, self._objects, self._tensors)
        for extent, data in zip(extents[1:], self._others.values(), strict=True):
            arena.write(extent.offset, data)
        return tuple(extents)

    def write(self, open_file: Callable[[str], BinaryIO]) -> None:
        """Write the files to streams, byte for byte the same."""
        with open_file(self._path) as stream:
            self._layout.write(stream, self._objects, self._tensors)
        for path, data in self._others.items():
            with open_file(path) as stream:
                stream.write(data)
