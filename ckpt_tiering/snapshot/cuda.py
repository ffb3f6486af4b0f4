"""Copies from GPUs into the arena. NOT RUN: the machines this was written on have no GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

_cuda: Any = torch.cuda  # half of it is not annotated

__all__ = ["copy_and_wait", "in_use", "pin", "unpin"]


def in_use() -> bool:
    """Tell whether this process uses CUDA already; asking must not make it start to."""
    return bool(_cuda.is_available() and _cuda.is_initialized())


def pin(address: int, num_bytes: int) -> bool:
    """Register memory for direct access by GPUs; False where the driver refuses."""
    # The result is an enumeration or a number, by version; success is 0 in both.
    return int(_cuda.cudart().cudaHostRegister(address, num_bytes, 0)) == 0


def unpin(address: int) -> None:
    """Undo `pin`; must come before the memory is unmapped."""
    _cuda.cudart().cudaHostUnregister(address)


def copy_and_wait(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy GPU tensors into memory of ours; blocks until all bytes have arrived.

    On a side stream of each GPU, ordered after what the current stream was asked to do, so that
    nothing else that runs on the GPU is waited for. The caller may change the sources afterwards.
    """
    events = []
    for device in {source.device for source in sources}:
        side = _cuda.Stream(device)
        side.wait_stream(_cuda.current_stream(device))
        with _cuda.stream(side):
            for target, source in zip(targets, sources, strict=True):
                if source.device == device:
                    target.copy_(source, non_blocking=True)
            event = _cuda.Event()
            event.record(side)
        events.append(event)
    for event in events:
        event.synchronize()
