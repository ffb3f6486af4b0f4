"""Sizes of states, as they are written on the command line and in results."""

from __future__ import annotations

from dataclasses import dataclass

from ckpt_tiering.units import parse_bytes

__all__ = ["GB", "Size"]

GB = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Size:
    """A size: ``1GiB`` for a model in 300 tensors, ``5000x1KiB`` for small tensors of one length.

    Attributes:
        label: As written.
        num_bytes: Length of all tensors together, about.
        num_tensors: Number of small tensors; 0 for a model.
    """

    label: str
    num_bytes: int
    num_tensors: int = 0

    @classmethod
    def parse(cls, text: str) -> Size:
        """Read a size.

        Raises:
            ConfigError: It is not one.
        """
        count, times, each = text.partition("x")
        if times:
            return cls(text, int(count) * parse_bytes(each), int(count))
        return cls(text, parse_bytes(text))
