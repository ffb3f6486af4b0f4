"""How a snapshot lies in memory that the trainer fills and the agent reads.

The memory begins with a page of its own, which holds the *generation*: the trainer raises it before
it writes anything else anew. Whoever reads bytes first and then finds the generation that he was
told has the bytes of that snapshot, so the agent may go on reading from memory that nobody keeps
for it.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

__all__ = ["GENERATION", "HEADER_BYTES", "PAGE_BYTES", "Extent"]

PAGE_BYTES = 4096
HEADER_BYTES = PAGE_BYTES
GENERATION = struct.Struct("<Q")  # at offset 0


@dataclass(frozen=True, slots=True)
class Extent:
    """A whole file in memory.

    Attributes:
        path: Its path in the checkpoint.
        offset: Where it begins, counted from the end of the header; a multiple of `PAGE_BYTES`.
        size_bytes: Its length.
    """

    path: str
    offset: int
    size_bytes: int
