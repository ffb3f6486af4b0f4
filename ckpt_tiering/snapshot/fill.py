"""Copy storages to their places: what a save costs the step loop, nearly all of it."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import torch

from ckpt_tiering.snapshot import cuda
from ckpt_tiering.units import KIB

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.storage import UntypedStorage

    from ckpt_tiering.snapshot.arena import Arena
    from ckpt_tiering.snapshot.walk import Walk

__all__ = ["fill"]

# Below this a copy by several threads is no faster, and setting it up costs more than the copy.
SMALL_BYTES = 256 * KIB
# Bytes one by one are copied more slowly than words; this is the type that torch is fastest with.
WORD = torch.float32


def fill(arena: Arena, walk: Walk, offsets: Sequence[int]) -> None:
    """Copy each storage of a state to its offset. Blocks until all bytes are there, GPUs' too.

    Args:
        arena: Large enough for all.
        walk: The state.
        offsets: One for each of its storages.
    """
    copy_bytes = _memmove()
    base = arena.tensor.data_ptr()
    large: list[tuple[UntypedStorage, int]] = []
    on_gpu: list[tuple[UntypedStorage, int]] = []
    for storage, size, address, offset in zip(
        walk.storages, walk.sizes, walk.addresses, offsets, strict=True
    ):
        if not address:
            if size:
                on_gpu.append((storage, offset))
        elif size < SMALL_BYTES or offset % WORD.itemsize:
            copy_bytes(base + offset, address, size)
        else:
            large.append((storage, offset))
            if rest := size % WORD.itemsize:
                done = size - rest
                copy_bytes(base + offset + done, address + done, rest)
    if large:
        # One call for all: each return to Python may wait 5 ms for a thread that has the GIL.
        torch._foreach_copy_(*_views(arena, large, WORD))
    if on_gpu:
        arena.pin()
        cuda.copy_and_wait(*_views(arena, on_gpu, torch.uint8))


def _memmove() -> Any:
    """Return C's ``memmove``, called with the GIL held: to give it up may cost more."""
    memmove = ctypes.PyDLL(None).memmove
    memmove.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    memmove.restype = None
    return memmove


def _views(
    arena: Arena, pairs: Sequence[tuple[UntypedStorage, int]], dtype: torch.dtype
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return targets and sources as tensors of one type; whole elements only."""
    targets, sources = [], []
    whole = arena.tensor
    for storage, offset in pairs:
        source = torch.empty(0, dtype=dtype, device=storage.device).set_(storage)
        targets.append(whole[offset : offset + source.numel() * dtype.itemsize].view(dtype))
        sources.append(source)
    return targets, sources
