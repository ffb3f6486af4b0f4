from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tiering.snapshot.memory import (
    GroupMemory,
    MemoryReading,
    available_bytes,
    fits,
    read_memory,
    room_for,
)
from ckpt_tiering.units import GIB, MIB

if TYPE_CHECKING:
    from pathlib import Path

sizes = st.integers(min_value=0, max_value=1 << 50)
groups = st.builds(GroupMemory, limit_bytes=sizes, used_bytes=sizes, reclaimable_bytes=sizes)
readings = st.builds(MemoryReading, system_bytes=sizes, groups=st.lists(groups).map(tuple))


def group(limit: int, used: int, reclaimable: int = 0) -> GroupMemory:
    return GroupMemory(limit_bytes=limit, used_bytes=used, reclaimable_bytes=reclaimable)


@pytest.mark.parametrize(
    ("system", "limits", "available"),
    [
        pytest.param(8 * GIB, (), 8 * GIB, id="no cgroup"),
        pytest.param(8 * GIB, (group(4 * GIB, GIB),), 3 * GIB, id="the group is tighter"),
        pytest.param(GIB, (group(4 * GIB, GIB),), GIB, id="the node is tighter"),
        pytest.param(8 * GIB, (group(4 * GIB, 4 * GIB, GIB),), GIB, id="page cache can go"),
        pytest.param(8 * GIB, (group(GIB, 2 * GIB),), 0, id="over the limit"),
        pytest.param(
            8 * GIB, (group(6 * GIB, 0), group(7 * GIB, 5 * GIB)), 2 * GIB, id="a parent's limit"
        ),
    ],
)
def test_the_tightest_bound_counts(
    system: int, limits: tuple[GroupMemory, ...], available: int
) -> None:
    assert MemoryReading(system_bytes=system, groups=limits).available_bytes == available


@given(readings, sizes)
def test_room_leaves_a_quarter_and_512_mib_to_training(reading: MemoryReading, wanted: int) -> None:
    assert room_for(wanted, reading) == (5 * wanted + 4 * 512 * MIB <= 4 * reading.available_bytes)
    assert fits(wanted, reading) or not room_for(wanted, reading)


@given(readings, groups, sizes)
def test_a_further_limit_never_makes_room(
    reading: MemoryReading, further: GroupMemory, wanted: int
) -> None:
    tighter = MemoryReading(system_bytes=reading.system_bytes, groups=(*reading.groups, further))
    assert room_for(wanted, reading) or not room_for(wanted, tighter)


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in {"proc/meminfo": "MemFree: 1 kB\nMemAvailable:  8192 kB\n", **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_v2_reads_the_group_and_its_parents(tmp_path: Path) -> None:
    mount = "sys/fs/cgroup"
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/job/step\n",
            f"{mount}/job/step/memory.max": "max\n",
            f"{mount}/job/step/memory.current": "5\n",
            f"{mount}/job/memory.max": "1000\n",
            f"{mount}/job/memory.high": "900\n",
            f"{mount}/job/memory.current": "500\n",
            f"{mount}/job/memory.stat": "anon 300\ninactive_file 100\nactive_file 7\n",
        },
    )
    reading = read_memory(root)
    assert reading == MemoryReading(system_bytes=8 * MIB, groups=(group(900, 500, 100),))


@pytest.mark.parametrize("inside", ["/docker/0123", "/../other", "/"])
def test_v2_in_a_container_finds_its_group_at_the_mount(tmp_path: Path, inside: str) -> None:
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": f"0::{inside}\n",
            "sys/fs/cgroup/memory.max": "1000\n",
            "sys/fs/cgroup/memory.current": "500\n",
        },
    )
    assert set(read_memory(root).groups) == {group(1000, 500)}


def test_v1_reads_the_memory_controller(tmp_path: Path) -> None:
    mount = "sys/fs/cgroup/memory"
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "4:cpu,cpuacct:/job\n3:memory:/job\n1:name=systemd:/x\n",
            f"{mount}/job/memory.limit_in_bytes": "1000\n",
            f"{mount}/job/memory.usage_in_bytes": "600\n",
            f"{mount}/job/memory.stat": "inactive_file 1\ntotal_inactive_file 50\n",
        },
    )
    assert read_memory(root).groups == (group(1000, 600, 50),)


def test_a_system_that_says_nothing_has_no_room(tmp_path: Path) -> None:
    assert read_memory(tmp_path) == MemoryReading(system_bytes=0)
    assert not room_for(0, read_memory(tmp_path))


def test_this_machine_has_some_memory_but_not_an_exbibyte() -> None:
    assert 0 < available_bytes() < 1 << 60
    assert fits(1)
    assert not fits(1 << 60)
    assert not room_for(1 << 60)
