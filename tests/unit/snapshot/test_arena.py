from __future__ import annotations

import gc
import hashlib
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from ckpt_tiering.errors import CapacityError
from ckpt_tiering.model.extent import HEADER_BYTES
from ckpt_tiering.snapshot import cuda
from ckpt_tiering.snapshot.arena import Arena
from ckpt_tiering.units import GIB, MIB

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena()
    yield made
    made.close()


def descriptors() -> int:
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir()))


def test_growth_keeps_bytes_descriptor_and_earlier_views(arena: Arena) -> None:
    arena.reserve(5000)
    assert arena.capacity_bytes == 8192
    fd, before = arena.fd, arena.tensor
    before[:3] = torch.tensor([1, 2, 3])
    arena.reserve(100_000)
    assert (arena.fd, arena.capacity_bytes) == (fd, 102_400)
    assert len(arena.tensor) == arena.capacity_bytes
    assert arena.tensor[:3].tolist() == [1, 2, 3]
    arena.tensor[1] = 9
    assert before[1] == 9
    assert os.pread(fd, 3, HEADER_BYTES) == b"\1\11\3"


def test_what_fits_is_not_reserved_again(arena: Arena) -> None:
    arena.reserve(10_000)
    address = arena.tensor.data_ptr()
    arena.reserve(12_288)
    arena.reserve(0)
    assert (arena.capacity_bytes, arena.tensor.data_ptr()) == (12_288, address)


def test_all_pages_are_there_and_mapped_before_they_are_used(arena: Arena) -> None:
    arena.reserve(64 * MIB)
    assert os.fstat(arena.fd).st_blocks * 512 >= 64 * MIB
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    arena.tensor.fill_(1)
    assert resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before < 1000


def test_the_descriptor_is_not_inherited_by_programs(arena: Arena) -> None:
    assert not os.get_inheritable(arena.fd)


def test_memory_that_is_refused_changes_nothing() -> None:
    asked: list[int] = []

    def has_room(num_bytes: int) -> bool:
        asked.append(num_bytes)
        return num_bytes <= MIB

    arena = Arena(has_room=has_room)
    arena.reserve(MIB)
    arena.tensor.fill_(7)
    with pytest.raises(CapacityError, match="more of snapshot"):
        arena.reserve(4 * MIB)
    assert asked == [MIB, 3 * MIB]
    assert arena.capacity_bytes == MIB == os.fstat(arena.fd).st_size - HEADER_BYTES
    assert bool((arena.tensor == 7).all())
    arena.close()


def test_an_allocation_that_fails_midway_is_undone(arena: Arena) -> None:
    arena.reserve(MIB)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (48 * MIB, hard))
    try:
        with pytest.raises(CapacityError):
            arena.reserve(64 * MIB)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert arena.capacity_bytes == MIB == os.fstat(arena.fd).st_size - HEADER_BYTES
    arena.reserve(64 * MIB)


def test_more_than_the_machine_has_is_refused_not_killed(arena: Arena) -> None:
    with pytest.raises(CapacityError):
        arena.reserve(1 << 20 << 30)
    assert GIB > arena.capacity_bytes == 0


def test_bytes_are_written_within_bounds_only(arena: Arena) -> None:
    arena.reserve(4096)
    arena.write(4094, b"ab")
    assert os.pread(arena.fd, 2, HEADER_BYTES + 4094) == b"ab"
    for offset in (4095, -1):
        with pytest.raises(ValueError, match="beyond"):
            arena.write(offset, b"ab")


def test_close_may_be_repeated_and_leaves_views_usable() -> None:
    before = descriptors()
    arena = Arena()
    arena.reserve(MIB)
    view = arena.tensor[:10]
    arena.close()
    arena.close()
    view.fill_(3)
    assert view.sum() == 30
    assert (arena.fd, arena.capacity_bytes, len(arena.tensor)) == (-1, 0, 0)
    with pytest.raises(ValueError, match="closed"):
        arena.reserve(1)
    del view
    assert descriptors() == before


def test_an_arena_that_is_forgotten_leaks_nothing() -> None:
    before = descriptors()
    for _ in range(10):
        Arena().reserve(MIB)
    assert descriptors() == before


@pytest.mark.parametrize("how", ["close", "forget"])
def test_pinned_memory_is_released_before_its_mapping(
    monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Without a GPU only the bookkeeping can be tested: what is registered when."""
    pinned: set[int] = set()

    def pin(address: int, num_bytes: int) -> bool:
        assert num_bytes % 4096 == 0
        pinned.add(address)
        return True

    monkeypatch.setattr(cuda, "in_use", lambda: True)
    monkeypatch.setattr(cuda, "pin", pin)
    monkeypatch.setattr(cuda, "unpin", pinned.remove)
    arena = Arena()
    arena.pin()
    assert not pinned
    for num_bytes in (MIB, 2 * MIB):
        arena.reserve(num_bytes)
        assert not pinned
        arena.pin()
        arena.pin()
        assert pinned == {arena.tensor.data_ptr()}
    if how == "close":
        arena.close()
    del arena
    gc.collect()
    assert not pinned


READER = """
import hashlib, os, sys
fd = int(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
print(hashlib.sha256(os.pread(fd, os.fstat(fd).st_size, 0)).hexdigest())
"""


def test_another_process_keeps_the_memory(arena: Arena) -> None:
    arena.reserve(MIB)
    arena.tensor.copy_(torch.randint(0, 256, (MIB,), dtype=torch.uint8))
    digest = hashlib.sha256(os.pread(arena.fd, HEADER_BYTES + MIB, 0)).hexdigest()
    with subprocess.Popen(
        [sys.executable, "-c", READER, str(arena.fd)],
        pass_fds=[arena.fd],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "ready\n"
        arena.close()
        assert reader.communicate("go\n", timeout=60)[0].strip() == digest
