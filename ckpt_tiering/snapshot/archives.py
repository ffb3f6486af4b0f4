"""One item of a ``.distcp`` file: the archive that ``torch.save`` makes of it, but for its data.

All of it is made with ``torch.save``'s checksums (CRC-32) turned off: they are 0 then, and nothing
depends on the data. ``torch.load`` never looks at them.
"""

from __future__ import annotations

import pickle
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch.serialization import get_crc32_options, set_crc32_options, skip_data

from ckpt_tiering.snapshot.skeleton import Layout, Sink, lay_out
from ckpt_tiering.snapshot.walk import Unsupported, Walk, walk

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["TensorArchive", "dense_strides", "object_archive", "pickle_object", "tensor_archive"]

PLAIN_TYPES = frozenset({bool, int, float, str, type(None)})
# Optimizers have thousands of numbers, which do not grow. Their pickles begin with one of these.
NUMBERS = tuple(b"\x80\x02" + code for code in (b"K", b"M", b"J", b"\x8a", b"G", b"\x88", b"\x89"))
NUMBER_ROOM_BYTES = 64
ROOM_BYTES = 4096


@dataclass(frozen=True, slots=True, eq=False)
class TensorArchive:
    """The archive of a tensor.

    Attributes:
        head: What is before the data; of a tensor without elements, everything.
        tail: What is behind the data.
        data_bytes: Length of the data.
        stride: The strides that the data has there.
    """

    head: bytes
    tail: bytes
    data_bytes: int
    stride: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Length of the archive."""
        return len(self.head) + self.data_bytes + len(self.tail)


def dense_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the strides that DCP's own writer stores a tensor with: its own where it is dense."""
    if tensor.is_contiguous():
        return tensor.stride()
    shape = torch.empty_strided(tensor.shape, tensor.stride(), device="meta")
    return torch.empty_like(shape, memory_format=torch.preserve_format).stride()


@lru_cache(maxsize=8192)
def tensor_archive(dtype: torch.dtype, shape: torch.Size, stride: tuple[int, ...]) -> TensorArchive:
    """Lay out the archive of a plain tensor on the CPU that needs no gradient.

    Raises:
        Unsupported: ``torch.save`` writes it otherwise than expected.
    """
    # Memory that nobody touches does not exist: this may be larger than all there is.
    tensor = torch.empty_strided(shape, stride, dtype=dtype, device="cpu")
    sink = Sink()
    with _without_checksums(), skip_data():
        torch.save(tensor, sink)  # type: ignore[arg-type]  # only writes
    if [size for _, size in sink.gaps] != [tensor.nbytes][: tensor.nbytes]:
        raise Unsupported(f"torch.save leaves other gaps than the data of a {dtype} {shape}")
    head, *tail = [bytes(data) for _, data in sink.pieces]
    return TensorArchive(head, tail[0] if tail else b"", tensor.nbytes, stride)


def pickle_object(value: Any) -> Walk:
    """Pickle an object as it is now, apart from the memory of tensors in it.

    Raises:
        Unsupported: Some tensor's memory can't be read as plain bytes.
    """
    if type(value) in PLAIN_TYPES:
        pickled = pickle.dumps(value, protocol=torch.serialization.DEFAULT_PROTOCOL)
        return Walk(pickled=pickled, storages=(), sizes=(), addresses=())
    return walk(value, fast=False)


def object_archive(now: Walk) -> Layout:
    """Lay out the archive of an object, with room for it to grow."""
    size = len(now.pickled)
    room = max(ROOM_BYTES, -(-2 * size // ROOM_BYTES) * ROOM_BYTES)
    if size <= NUMBER_ROOM_BYTES // 2 and now.pickled.startswith(NUMBERS):
        room = NUMBER_ROOM_BYTES
    if not now.storages:
        return _bare_archive(room)
    with _without_checksums():
        return lay_out({}, now, compare=False, room=room)


@lru_cache(maxsize=256)
def _bare_archive(room: int) -> Layout:
    nothing = Walk(pickled=b"N.", storages=(), sizes=(), addresses=())
    with _without_checksums():
        return lay_out({}, nothing, compare=False, room=room)


@contextmanager
def _without_checksums() -> Iterator[None]:
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(before)
