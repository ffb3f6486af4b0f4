"""Memory of a snapshot that outlives the trainer: an anonymous file, handed on by descriptor."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import weakref
from typing import TYPE_CHECKING

import torch

from ckpt_tiering.errors import CapacityError
from ckpt_tiering.model.extent import GENERATION, HEADER_BYTES, PAGE_BYTES
from ckpt_tiering.snapshot import cuda
from ckpt_tiering.snapshot.memory import fits
from ckpt_tiering.units import MIB, format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Arena"]

# A signal (a profiler's, every 10 ms) makes the kernel undo and restart an allocation, so one call
# asks for no more than it gets done in between.
STRIDE_BYTES = 32 * MIB
MADV_POPULATE_WRITE = 23  # Linux 5.14; `mmap` does not name it
NO_MEMORY = frozenset({errno.ENOSPC, errno.ENOMEM, errno.EFBIG, errno.EDQUOT})


class Arena:
    """One anonymous file in memory (``memfd``), mapped here.

    It belongs to no directory, so a container's small ``/dev/shm`` does not matter, and another
    process that was given ``fd`` keeps the memory when this one closes it or dies. Not for use
    from several threads at once.

    Args:
        has_room: Asked for the number of further bytes before any is taken. The kernel does not
            refuse memory, it kills, so the least is to ask ``memory.fits`` (default);
            ``memory.room_for`` leaves some to the trainer.

    Attributes:
        fd: The descriptor, close-on-exec, the same until ``close``; -1 afterwards.
        capacity_bytes: Bytes that are there, a multiple of 4096; 0 at first.
        generation: How often `begin` was called.
        contents: What the writer who filled the arena last knows it by, so that it need not write
            again what still stands. Whoever writes anything else sets it to None or its own.
    """

    def __init__(self, *, has_room: Callable[[int], bool] = fits) -> None:
        self.fd = os.memfd_create("ckpt-tiering", os.MFD_CLOEXEC)
        self.capacity_bytes = 0
        self.generation = 0
        self.contents: object = None
        self._has_room = has_room
        self._close = weakref.finalize(self, os.close, self.fd)
        self._map: mmap.mmap | None = None
        self._tensor = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._pinned: Callable[[], object] | None = None

    @property
    def tensor(self) -> torch.Tensor:
        """All bytes as ``uint8``. A view of before a growth shows the old part, same memory."""
        return self._tensor

    def reserve(self, num_bytes: int) -> None:
        """Make room for at least so many bytes; what is in the arena stays. Never shrinks.

        Blocks until all pages exist and are mapped (about 0.4 s per GiB), without the GIL, so
        that no save pays for them. Call it ahead from a background thread to prepare.

        Raises:
            CapacityError: There is no such memory; nothing has changed.
        """
        if self.fd < 0:
            raise ValueError("the arena is closed")
        wanted = -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
        if wanted <= self.capacity_bytes:
            return
        more = wanted - self.capacity_bytes
        if not self._has_room(more):
            raise _no_memory(more)
        there = os.fstat(self.fd).st_size
        try:
            _take_pages(self.fd, there, HEADER_BYTES + wanted)
            mapping = mmap.mmap(self.fd, HEADER_BYTES + wanted)
        except BaseException as error:
            os.ftruncate(self.fd, there)
            if isinstance(error, OSError) and error.errno in NO_MEMORY:
                raise _no_memory(more) from error
            raise
        self._unpin()
        self._map = mapping
        self._tensor = torch.frombuffer(mapping, dtype=torch.uint8, offset=HEADER_BYTES)
        self.capacity_bytes = wanted
        _map_pages(self._tensor.data_ptr(), wanted)

    def begin(self) -> int:
        """Declare that what is in the arena is about to be overwritten; return the generation."""
        self.generation += 1
        os.pwrite(self.fd, GENERATION.pack(self.generation), 0)
        return self.generation

    def write(self, offset: int, data: bytes) -> None:
        """Put bytes at an offset; they must fit."""
        if not 0 <= offset <= offset + len(data) <= self.capacity_bytes:
            raise ValueError(f"{len(data)} bytes at {offset} are beyond {self.capacity_bytes}")
        if self._map is not None:
            start = HEADER_BYTES + offset
            self._map[start : start + len(data)] = data

    def pin(self) -> None:
        """Register the memory with CUDA, so that copies from a GPU run at full speed, unwaited.

        Does nothing where it is registered already, or CUDA is not in use. Not run without a GPU.
        """
        if self._pinned is None and self.capacity_bytes and cuda.in_use():
            address = self._tensor.data_ptr()
            if cuda.pin(address, self.capacity_bytes):
                self._pinned = weakref.finalize(self, cuda.unpin, address)

    def _unpin(self) -> None:
        if self._pinned is not None:
            self._pinned()
            self._pinned = None

    def close(self) -> None:
        """Close the descriptor and let go of the mapping. May be called again.

        The mapping itself goes with the last tensor that shows it, so none is left dangling.
        """
        self._unpin()
        self._close()
        self.fd = -1
        self.capacity_bytes = 0
        self.contents = None
        self._map = None
        self._tensor = torch.empty(0, dtype=torch.uint8, device="cpu")


def _no_memory(num_bytes: int) -> CapacityError:
    return CapacityError(
        f"no memory for {format_bytes(num_bytes)} more of snapshot",
        hint="set staging_mode=disk, or give the job more memory",
    )


def _take_pages(fd: int, start: int, end: int) -> None:
    """Let a file grow, page by page: a file that was only made longer fails when it is used."""
    for offset in range(start, end, STRIDE_BYTES):
        os.posix_fallocate(fd, offset, min(STRIDE_BYTES, end - offset))


def _map_pages(address: int, num_bytes: int) -> None:
    """Enter all pages in this process's page table, or the first copy faults on each of them.

    Best effort: an old kernel refuses, and all that is lost is time.
    """
    advise = ctypes.CDLL(None).madvise  # `mmap.madvise` would hold the GIL
    advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for offset in range(0, num_bytes, STRIDE_BYTES):
        advise(address + offset, min(STRIDE_BYTES, num_bytes - offset), MADV_POPULATE_WRITE)
