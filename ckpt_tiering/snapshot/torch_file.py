"""Plain ``torch.save`` files, written through a stream and read back with care."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, BinaryIO

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["read_state", "write_state"]


def write_state(state: Mapping[str, Any], stream: BinaryIO) -> None:
    """Write a state as stock ``torch.save`` does. Blocks until the stream took all of it."""
    torch.save(state, stream)


def read_state(path: Path, *, map_location: Any = "cpu", weights_only: bool = True) -> Any:
    """Read a state file.

    Args:
        path: A file whose bytes were verified.
        map_location: As of ``torch.load``.
        weights_only: As of ``torch.load``; False runs code from the file.
    """
    return torch.load(path, map_location=map_location, weights_only=weights_only)
