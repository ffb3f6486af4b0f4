"""The trainer's memory for snapshots: when to use it, and when it is free again.

One arena: the next snapshot waits until the agent has the one before on NVMe.
"""

from __future__ import annotations

import logging
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckpt_tiering.errors import CapacityError, WaitTimeoutError

if TYPE_CHECKING:
    from ckpt_tiering.config import StagingMode
    from ckpt_tiering.model.extent import Extent
    from ckpt_tiering.snapshot.source import Source

__all__ = ["Captured", "SnapshotMemory"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """Files in memory that the agent can take over.

    Attributes:
        descriptor: The memory.
        generation: Of the memory, for these files.
        extents: Where they lie.
    """

    descriptor: int
    generation: int
    extents: tuple[Extent, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of all files."""
        return sum(extent.size_bytes for extent in self.extents)


class SnapshotMemory:
    """Captures states into an arena that the agent reads.

    Args:
        mode: ``memory`` or ``disk``, or ``auto`` for memory where there is room.
        free_within_s: Bound in seconds of the wait for the snapshot before.
    """

    def __init__(self, mode: StagingMode, free_within_s: float) -> None:
        self._mode = mode
        self._free_within_s = free_within_s
        self._free = threading.Condition()
        self._in_use: set[str] = set()
        self._said = False
        self._arena: Any = None  # its module imports torch
        self._preparing: threading.Thread | None = None

    def capture(self, source: Source) -> Captured | None:
        """Copy a state, as of this call, into memory that the agent can take over.

        Blocks for as long as the snapshot before is not on NVMe, and for the copy.

        Returns:
            Where its files are; None if this state is to be staged on disk.

        Raises:
            CapacityError: There is no room in memory, and the mode is ``memory``.
            WaitTimeoutError: The snapshot before is still not on NVMe.
        """
        if self._mode == "disk":
            return None
        from ckpt_tiering.snapshot.walk import Unsupported  # torch only if needed

        arena = self._made()
        self.wait_free()
        try:
            generation = arena.begin()
            extents = source.capture(arena)
        except Unsupported as error:
            self._say(f"this state can't be laid out in memory ({error})")
            return None
        except CapacityError as error:
            if self._mode == "memory":
                raise
            self._say(f"there is no room for it in memory ({error.message})")
            return None
        return Captured(descriptor=arena.fd, generation=generation, extents=extents)

    def prepare(self, num_bytes: int) -> None:
        """Take memory ahead, in the background, so that the first save does not pay for it.

        Args:
            num_bytes: Expected length of the file; what is missing is taken by the save itself.
        """
        if self._mode != "disk" and self._preparing is None:
            arena = self._made()
            self._preparing = threading.Thread(
                target=_reserve, args=(arena, num_bytes), name="arena", daemon=True
            )
            self._preparing.start()

    def _made(self) -> Any:
        from ckpt_tiering.snapshot.arena import Arena  # torch only if needed
        from ckpt_tiering.snapshot.memory import fits, room_for

        if self._arena is None:
            self._arena = Arena(has_room=room_for if self._mode == "auto" else fits)
        return self._arena

    def _say(self, why: str) -> None:
        if not self._said:
            self._said = True
            _log.warning("checkpoints are staged on disk, in the step loop: %s", why)

    def take(self, save_id: str) -> None:
        """Note that a save lies in the memory."""
        with self._free:
            self._in_use.add(save_id)

    def release(self, save_id: str) -> None:
        """Note that a save no longer needs the memory."""
        with self._free:
            self._in_use.discard(save_id)
            self._free.notify_all()

    def wait_free(self) -> None:
        """Wait until nothing needs the memory.

        Raises:
            WaitTimeoutError: Something still does.
        """
        if self._preparing is not None:
            self._preparing.join()
        with self._free:
            if not self._free.wait_for(lambda: not self._in_use, self._free_within_s):
                raise WaitTimeoutError(
                    f"the agent has not written save {', '.join(self._in_use)} to NVMe within "
                    f"{self._free_within_s:.0f} s",
                    hint="see `ckpt-tiering status`, and whether the disk is full or stuck",
                )

    def close(self) -> None:
        """Let go of the memory, unless an agent has yet to be given it."""
        if self._preparing is not None:
            self._preparing.join()
            self._preparing = None
        if self._arena is not None and not self._in_use:
            self._arena.close()
            self._arena = None


def _reserve(arena: Any, num_bytes: int) -> None:
    with suppress(CapacityError):  # the save will find out, and decide
        arena.reserve(num_bytes)
