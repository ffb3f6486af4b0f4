"""Plain ``torch.save`` files: captured, written through a stream, and read back with care."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, BinaryIO

import torch

from ckpt_tiering.model.extent import Extent

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from ckpt_tiering.snapshot.arena import Arena
    from ckpt_tiering.snapshot.image import TorchImage

__all__ = ["StateFile", "read_state"]


class StateFile:
    """A state that becomes one ``torch.save`` file: a `Source`.

    Args:
        path: Path of the file in the checkpoint.
        state: What ``torch.save`` would be given.
        image: Lays it out in memory; to be kept for the next state of the kind.
    """

    def __init__(self, path: str, state: Mapping[str, Any], image: TorchImage) -> None:
        self._path = path
        self._state = state
        self._image = image

    def capture(self, arena: Arena) -> tuple[Extent, ...]:
        """Lay the file out in an arena; see `TorchImage.capture`."""
        return (Extent(self._path, 0, self._image.capture(self._state, arena)),)

    def write(self, open_file: Callable[[str], BinaryIO]) -> None:
        """Write the file as stock ``torch.save`` does."""
        with open_file(self._path) as stream:
            torch.save(self._state, stream)


def read_state(path: Path, *, map_location: Any = "cpu", weights_only: bool = True) -> Any:
    """Read a state file.

    Args:
        path: A file whose bytes were verified.
        map_location: As of ``torch.load``.
        weights_only: As of ``torch.load``; False runs code from the file.
    """
    return torch.load(path, map_location=map_location, weights_only=weights_only)
