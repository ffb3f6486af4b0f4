"""Copy memory to its place in an arena: what a save costs the step loop, nearly all of it."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import torch

from ckpt_tiering.snapshot import cuda
from ckpt_tiering.units import KIB

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ckpt_tiering.snapshot.arena import Arena
    from ckpt_tiering.snapshot.walk import Walk

__all__ = ["copy_memory", "copy_tensors", "fill"]

# Below this a copy by several threads is no faster, and setting it up costs more than the copy.
SMALL_BYTES = 256 * KIB
# Bytes one by one are copied more slowly than words; this is the type that torch is fastest with.
WORD = torch.float32


def fill(arena: Arena, walk: Walk, offsets: Sequence[int], *, base: int = 0) -> None:
    """Copy each storage of a state to its offset. Blocks until all bytes are there, GPUs' too.

    Args:
        arena: Large enough for all.
        walk: The state.
        offsets: One for each of its storages.
        base: What the offsets count from.
    """
    blocks = zip(walk.addresses, walk.sizes, offsets, strict=True)
    copy_memory(arena, ((address, size, base + at) for address, size, at in blocks if address))
    targets, sources = [], []
    for storage, address, size, offset in zip(
        walk.storages, walk.addresses, walk.sizes, offsets, strict=True
    ):
        if size and not address:
            sources.append(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage))
            targets.append(arena.tensor[base + offset : base + offset + size])
    if sources:
        arena.pin()
        cuda.copy_and_wait(targets, sources)


def copy_memory(arena: Arena, blocks: Iterable[tuple[int, int, int]]) -> None:
    """Copy pieces of this process's memory into an arena.

    Args:
        arena: Large enough for all.
        blocks: Address, length in bytes and offset of each; they exist until this returns.
    """
    copy_bytes = _memmove()
    start = arena.tensor.data_ptr()
    large: list[tuple[int, int, int]] = []
    for address, size, offset in blocks:
        if size < SMALL_BYTES or (offset | address) % WORD.itemsize:
            copy_bytes(start + offset, address, size)
            continue
        rest = size % WORD.itemsize
        large.append((address, size - rest, offset))
        if rest:
            copy_bytes(start + offset + size - rest, address + size - rest, rest)
    if large:
        whole = arena.tensor
        # One call for all: each return to Python may wait 5 ms for a thread that has the GIL.
        torch._foreach_copy_(
            [whole[offset : offset + size].view(WORD) for _, size, offset in large],
            [_words_at(address, size) for address, size, _ in large],
        )


def copy_tensors(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy what is not plain memory of this process; blocks until all bytes are there.

    Args:
        targets: Views of an arena, which is pinned where that helps.
        sources: Tensors of the same shapes and dtypes, on any device and of any strides.
    """
    on_gpu: list[tuple[torch.Tensor, torch.Tensor]] = []
    others: list[tuple[torch.Tensor, torch.Tensor]] = []
    for target, source in zip(targets, sources, strict=True):
        if not source.is_cuda:
            others.append((target, source))
            continue
        same = source.stride() == target.stride() and not (source.is_conj() or source.is_neg())
        # Other strides would take a copy on the way, which nobody waits for: make it over there.
        on_gpu.append((target, source if same else _like(target, source)))
    if on_gpu:
        cuda.copy_and_wait([target for target, _ in on_gpu], [source for _, source in on_gpu])
    if others:
        torch._foreach_copy_([target for target, _ in others], [source for _, source in others])


def _like(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    made = torch.empty_strided(
        source.shape, target.stride(), dtype=source.dtype, device=source.device
    )
    return made.copy_(source)


def _words_at(address: int, num_bytes: int) -> torch.Tensor:
    return torch.frombuffer((ctypes.c_char * num_bytes).from_address(address), dtype=WORD)


def _memmove() -> Any:
    """Return C's ``memmove``, called with the GIL held: to give it up may cost more."""
    memmove = ctypes.PyDLL(None).memmove
    memmove.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    memmove.restype = None
    return memmove
