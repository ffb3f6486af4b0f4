"""The states that are saved, and the step that is trained between saves."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ckpt_tiering.clock import SystemClock

if TYPE_CHECKING:
    from benchmarks.sizes import Size

__all__ = ["State", "Step", "Timing", "make_state"]

KINDS = ("weight", "exp_avg", "exp_avg_sq")
NUM_MATRICES, NUM_VECTORS = 39, 60
EMBEDDING_SHARE = 0.2
MATMUL_SIDE, PYTHON_ITERATIONS = 1150, 380_000  # about 80 ms on the machine of the first results
SMALL_STEP = 1 / 80  # of that
NUM_TOUCHED = 180
CLOCK = SystemClock()


@dataclass(frozen=True, slots=True)
class State:
    """A state, its length in bytes, and tensors of it that a step changes."""

    tensors: dict[str, dict[str, torch.Tensor]]
    num_bytes: int
    touched: list[torch.Tensor]

    def tree(self, step: int) -> dict[str, Any]:
        """Return what a training loop would save at a step."""
        return {**self.tensors, "step": step, "lr": 1e-3}


def make_state(size: Size) -> State:
    """Make a state of random tensors: like a model with Adam, or of small ones of one length."""
    shapes = _small(size) if size.num_tensors else _model(size.num_bytes)
    block = torch.rand(1 << 18)
    tensors: dict[str, dict[str, torch.Tensor]] = {kind: {} for kind in KINDS}
    for number, (name, shape) in enumerate(shapes):
        tensor = torch.empty(shape)
        flat = tensor.view(-1)
        for start in range(0, len(flat), len(block)):
            piece = flat[start : start + len(block)]
            piece.copy_(block[: len(piece)])
        tensors[KINDS[number % len(KINDS)]][name] = tensor
    every = [tensor for group in tensors.values() for tensor in group.values()]
    small = sorted(every, key=torch.Tensor.numel)[:NUM_TOUCHED]
    return State(tensors, sum(t.numel() * t.element_size() for t in every), small)


def _model(num_bytes: int) -> list[tuple[str, tuple[int, ...]]]:
    num_elements = num_bytes // 4 // len(KINDS)
    width = max(16, min(1024, num_elements // 10_000))
    rest = num_elements * (1 - EMBEDDING_SHARE) - NUM_VECTORS * width
    shapes: list[tuple[str, tuple[int, ...]]] = []
    shapes += [("embedding", (int(num_elements * EMBEDDING_SHARE / width), width))]
    shapes += [(f"matrix.{i}", (int(rest / NUM_MATRICES / width), width)) for i in range(39)]
    shapes += [(f"vector.{i}", (width,)) for i in range(NUM_VECTORS)]
    return [shape for shape in shapes for _ in KINDS]


def _small(size: Size) -> list[tuple[str, tuple[int, ...]]]:
    elements = size.num_bytes // size.num_tensors // 4
    return [(f"layer.{i // len(KINDS)}", (elements,)) for i in range(size.num_tensors)]


class Timing(NamedTuple):
    """What a step took: seconds, and CPU seconds of its own thread."""

    wall_s: float
    cpu_s: float


class Step:
    """A step: a part that releases the GIL, a part that holds it, and a change to the state.

    Args:
        state: Of which the small tensors are changed.
        is_small: Whether to take about 1 ms instead of about 80.
    """

    def __init__(self, state: State, *, is_small: bool) -> None:
        scale = SMALL_STEP if is_small else 1.0
        side = round(MATMUL_SIDE * scale ** (1 / 3))
        self._left, self._right = torch.rand(side, side), torch.rand(side, side)
        self._product = torch.empty(side, side)
        self._iterations = round(PYTHON_ITERATIONS * scale)
        self._touched = state.touched[: NUM_TOUCHED // 3 if is_small else NUM_TOUCHED]

    def __call__(self) -> Timing:
        """Train."""
        cpu = time.thread_time()
        start = CLOCK.monotonic()
        for _ in range(2):
            torch.mm(self._left, self._right, out=self._product)
        total = 0
        for number in range(self._iterations):
            total += number & 3
        for tensor in self._touched:
            tensor.add_(1e-6)
        return Timing(CLOCK.monotonic() - start, time.thread_time() - cpu)
