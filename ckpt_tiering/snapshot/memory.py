"""How much more memory this process may take: what the node has, and what its cgroups allow."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ckpt_tiering.units import KIB, MIB

__all__ = ["GroupMemory", "MemoryReading", "available_bytes", "fits", "read_memory", "room_for"]

COMFORT_FACTOR = 1.25
COMFORT_BYTES = 512 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMemory:
    """One cgroup that limits this process.

    Attributes:
        limit_bytes: Above this the kernel reclaims, and then kills.
        used_bytes: What is charged to the group, page cache included.
        reclaimable_bytes: The part of it that the kernel drops first (inactive page cache).
    """

    limit_bytes: int
    used_bytes: int
    reclaimable_bytes: int = 0

    @property
    def available_bytes(self) -> int:
        """What can still be charged before the limit is met; negative beyond it."""
        return self.limit_bytes - self.used_bytes + min(self.reclaimable_bytes, self.used_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReading:
    """What the system said at one instant.

    Attributes:
        system_bytes: ``MemAvailable`` of the node.
        groups: The limited cgroups that this process is in, its own and their parents.
    """

    system_bytes: int
    groups: tuple[GroupMemory, ...] = ()

    @property
    def available_bytes(self) -> int:
        """The tightest of all bounds, never negative."""
        bounds = [self.system_bytes, *(group.available_bytes for group in self.groups)]
        return max(0, min(bounds))


def _number(path: Path) -> int | None:
    """Read one number; None for ``max`` (no limit) and for a file that is not there."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def _stat(path: Path, name: str) -> int:
    """Read one counter of a ``memory.stat`` or ``meminfo``; 0 where it is missing."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    for line in lines:
        fields = line.split()
        if fields and fields[0] == name:
            return int(fields[1])
    return 0


def _group_v2(folder: Path) -> GroupMemory | None:
    # Beyond `memory.high` nothing is killed, but every allocation of the trainer is slowed down.
    limits = [_number(folder / name) for name in ("memory.max", "memory.high")]
    known = [limit for limit in limits if limit is not None]
    used = _number(folder / "memory.current")
    if not known or used is None:
        return None
    cache = _stat(folder / "memory.stat", "inactive_file")
    return GroupMemory(limit_bytes=min(known), used_bytes=used, reclaimable_bytes=cache)


def _group_v1(folder: Path) -> GroupMemory | None:
    limit = _number(folder / "memory.limit_in_bytes")
    used = _number(folder / "memory.usage_in_bytes")
    if limit is None or used is None:
        return None
    cache = _stat(folder / "memory.stat", "total_inactive_file")
    return GroupMemory(limit_bytes=limit, used_bytes=used, reclaimable_bytes=cache)


def _folders(mount: Path, inside: str) -> list[Path]:
    """Return a group's folder and its parents' up to the mount.

    A container without a cgroup namespace reads the host's path but sees only its own group,
    mounted as the root: folders that do not exist have no files, and the mount counts.
    """
    group = mount / inside.lstrip("/")
    if ".." in Path(inside).parts:  # the group lies outside of what this namespace shows
        group = mount
    return [group, *(parent for parent in group.parents if parent.is_relative_to(mount))]


def read_memory(root: Path = Path("/")) -> MemoryReading:
    """Read the node's memory and the cgroups' limits (v2, v1 or both). Some ten small files.

    Args:
        root: Where ``proc`` and ``sys`` are; another one for tests.
    """
    mount = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    groups: list[GroupMemory | None] = []
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, inside = rest.partition(":")
        if not controllers:
            groups += map(_group_v2, _folders(mount, inside))
        elif "memory" in controllers.split(","):
            groups += map(_group_v1, _folders(mount / "memory", inside))
    return MemoryReading(
        system_bytes=_stat(root / "proc/meminfo", "MemAvailable:") * KIB,
        groups=tuple(group for group in groups if group is not None),
    )


def available_bytes() -> int:
    """Return how many bytes this process can take now without anything being killed."""
    return read_memory().available_bytes


def fits(num_bytes: int, reading: MemoryReading | None = None) -> bool:
    """Tell whether so many more bytes exist at all. The least that any allocation must pass.

    Args:
        num_bytes: Wanted on top of what is taken.
        reading: What the system said; read now by default.
    """
    return num_bytes <= (reading or read_memory()).available_bytes


def room_for(num_bytes: int, reading: MemoryReading | None = None) -> bool:
    """Tell whether so many more bytes leave enough for training: ``staging_mode=auto``'s rule.

    Args:
        num_bytes: Wanted on top of what is taken.
        reading: What the system said; read now by default.
    """
    wanted = COMFORT_FACTOR * num_bytes + COMFORT_BYTES
    return wanted <= (reading or read_memory()).available_bytes
