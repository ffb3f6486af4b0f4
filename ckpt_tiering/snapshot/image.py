"""A state as the very file that ``torch.save`` would write, in an arena instead of on a disk."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckpt_tiering.snapshot.fill import fill
from ckpt_tiering.snapshot.skeleton import Layout, PickleDiffersError, lay_out
from ckpt_tiering.snapshot.walk import Unsupported, Walk, walk

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckpt_tiering.snapshot.arena import Arena

__all__ = ["TorchImage", "Unsupported"]


class TorchImage:
    """Lays states out as ``torch.save`` files; keeps the plan while states are alike.

    Differences from the file that ``torch.save`` writes: the record ``data.pkl`` has zeros after
    the end of the pickle, and the checksums (CRC-32) of the tensors' records are 0, since taking
    them would cost as much as the copy. ``torch.load`` checks none. ``zipfile`` lists the file and
    reads ``data.pkl``, whose checksum is right; ``testzip()`` names the first tensor's record,
    and ``read()`` of one raises ``BadZipFile``.

    One image is for states of one kind, one after the other, in any number of arenas.
    """

    def __init__(self) -> None:
        self._layout: Layout | None = None
        self._fast = True
        self._compared = False

    def capture(self, state: Mapping[str, Any], arena: Arena) -> int:
        """Fill an arena with the file of a state as it is now; return the file's length in bytes.

        Blocks for the pickling of everything that is not a tensor's memory, and for one copy of
        that memory. Afterwards the caller may change the state: nothing in the arena refers to
        it. Nobody may be reading the arena meanwhile. The file ends at the length returned; what
        is behind it are remains. After an exception other than those two the arena's bytes are
        good for nothing.

        Args:
            state: What ``torch.save`` would be given.
            arena: Grows when the file does not fit.

        Raises:
            CapacityError: No memory to grow; the arena is as it was.
            Unsupported: Let ``torch.save`` try, to a disk; the arena is as it was.
        """
        now = walk(state, fast=self._fast)
        layout = self._layout
        if layout is None or not layout.holds(now):
            layout, now = self._lay_out(state, now)
        arena.reserve(layout.num_bytes)
        layout.write(arena, now.pickled)
        fill(arena, now, layout.offsets)
        return layout.num_bytes

    def _lay_out(self, state: Mapping[str, Any], now: Walk) -> tuple[Layout, Walk]:
        try:
            self._layout = lay_out(state, now, compare=not self._compared)
        except PickleDiffersError:
            if not self._fast:
                raise Unsupported("the state pickles differently each time") from None
            self._fast = False
            return self._lay_out(state, walk(state, fast=False))
        self._compared = True
        return self._layout, now
