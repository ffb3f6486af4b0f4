"""Keep Python's garbage collector out of a copy."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["no_collection"]


@contextmanager
def no_collection() -> Iterator[None]:
    """Put collections off until the end of the block.

    A state of thousands of tensors makes thousands of short-lived tuples, which sets off a full
    collection every few saves: 250 ms where the save itself takes 30. None of them are garbage
    that only the collector could free.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
