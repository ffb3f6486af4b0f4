"""What Linux says of processes: CPU, memory and descriptors of a whole tree, cheaply."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Memory", "busy_s", "cpu_s", "descendants", "memory_of", "num_fds"]

_PROC = Path("/proc")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_IDLE_COLUMNS = {3, 4}  # idle, iowait
_GUEST_COLUMN = 8  # and what follows is in user time already


class Memory(NamedTuple):
    """Memory of a process tree: anonymous pages of all, and the shared pages of the largest."""

    anon_bytes: int
    shared_bytes: int

    @property
    def total_bytes(self) -> int:
        """Both together."""
        return self.anon_bytes + self.shared_bytes


def descendants(pid: int) -> set[int]:
    """Return a process and all that it started, and those started, as far as they still are."""
    found = {pid}
    try:
        for task in (_PROC / str(pid) / "task").iterdir():
            for child in (task / "children").read_text().split():
                found |= descendants(int(child))
    except (FileNotFoundError, ProcessLookupError):
        pass  # it ended while we looked
    return found


def cpu_s(pids: Iterable[int]) -> float:
    """Return the CPU seconds of processes and of their children that ended and were waited for."""
    ticks = 0
    for pid in pids:
        try:
            fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        ticks += sum(int(field) for field in fields[11:15])  # utime, stime, cutime, cstime
    return ticks / _TICKS_PER_S


def busy_s() -> float:
    """Return the CPU seconds that all processes of the machine used since it started."""
    line = (_PROC / "stat").read_text().partition("\n")[0]
    columns = [int(field) for field in line.split()[1 : 1 + _GUEST_COLUMN]]
    return sum(t for i, t in enumerate(columns) if i not in _IDLE_COLUMNS) / _TICKS_PER_S


def memory_of(pids: Iterable[int]) -> Memory:
    """Return the memory of processes as the kernel counts it now."""
    anon = shared = 0
    for pid in pids:
        try:
            status = (_PROC / str(pid) / "status").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        anon += _kib(status, "RssAnon:")
        shared = max(shared, _kib(status, "RssShmem:"))
    return Memory(anon * 1024, shared * 1024)


def _kib(status: str, name: str) -> int:
    words = status.partition(name)[2].split(maxsplit=1)
    return int(words[0]) if words else 0  # a zombie has no memory


def num_fds(pids: Iterable[int]) -> int:
    """Return the number of descriptors that processes hold."""
    total = 0
    for pid in pids:
        try:
            total += len(os.listdir(_PROC / str(pid) / "fd"))  # noqa: PTH208  no Path a descriptor
        except (FileNotFoundError, ProcessLookupError):
            continue
    return total
