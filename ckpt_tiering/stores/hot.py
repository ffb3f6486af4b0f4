"""Staged files whose bytes still lie in a trainer's memory: the upload need not read a disk.

The trainer takes its memory back whenever it wants, without asking: it raises the generation first
(`model.extent`), and from then on the file on NVMe is read instead.
"""

from __future__ import annotations

import os
import threading
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckpt_tiering.model.extent import GENERATION, HEADER_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["HotFile", "HotFiles", "HotMemory"]


class HotMemory:
    """A trainer's memory, as of one snapshot. Closes the descriptor when nobody refers to it.

    Args:
        descriptor: The memory; this object's to close.
        generation: Of the snapshot.
    """

    def __init__(self, descriptor: int, generation: int) -> None:
        self._descriptor = descriptor
        self._generation = GENERATION.pack(generation)
        weakref.finalize(self, os.close, descriptor)

    def read(self, offset: int, size_bytes: int) -> bytes | None:
        """Return bytes of the snapshot; None if the trainer has taken its memory back."""
        data = os.pread(self._descriptor, size_bytes, HEADER_BYTES + offset)
        # The order matters: bytes that were read before the generation rose are the snapshot's.
        return data if len(data) == size_bytes and self.is_current() else None

    def is_current(self) -> bool:
        """Tell whether the memory still holds the snapshot."""
        return os.pread(self._descriptor, GENERATION.size, 0) == self._generation


@dataclass(frozen=True, slots=True)
class HotFile:
    """A file in memory.

    Attributes:
        memory: Where.
        offset: Its first byte, counted from the end of the header.
    """

    memory: HotMemory
    offset: int

    def read(self, start: int, size_bytes: int) -> bytes | None:
        """Return bytes from offset ``start`` of the file; None if they are no longer there."""
        return self.memory.read(self.offset + start, size_bytes)


class HotFiles:
    """The staged files that are still in memory, by path. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._files: dict[Path, HotFile] = {}

    def put(self, memory: HotMemory, offsets: Mapping[Path, int]) -> None:
        """Add files of a snapshot, and forget those whose memory was taken back."""
        with self._lock:
            self._files = {p: f for p, f in self._files.items() if f.memory.is_current()}
            self._files |= {path: HotFile(memory, offset) for path, offset in offsets.items()}

    def find(self, path: Path) -> HotFile | None:
        """Return a staged file's place in memory; None if it is on NVMe only."""
        return self._files.get(path)

    def drop(self, directory: Path) -> None:
        """Forget the files below a directory: they were uploaded."""
        with self._lock:
            kept = {p: f for p, f in self._files.items() if not p.is_relative_to(directory)}
            self._files = kept

    def clear(self) -> None:
        """Forget all: their trainers are gone, and the memory is somebody else's now."""
        with self._lock:
            self._files = {}
