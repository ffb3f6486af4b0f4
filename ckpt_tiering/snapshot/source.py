"""What can be saved: something that puts whole files into memory, or else into streams."""

from __future__ import annotations

from typing import TYPE_CHECKING, BinaryIO, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckpt_tiering.model.extent import Extent
    from ckpt_tiering.snapshot.arena import Arena

__all__ = ["Source"]


class Source(Protocol):
    """The files of one rank's share of a save, as of the call."""

    def capture(self, arena: Arena) -> tuple[Extent, ...]:
        """Put the files into an arena; afterwards nothing of them depends on the state.

        Raises:
            CapacityError: No memory for them.
            Unsupported: They can't be laid out in memory; `write` may do.
        """
        ...

    def write(self, open_file: Callable[[str], BinaryIO]) -> None:
        """Write the files to streams, which ``open_file`` gives for each path."""
        ...
