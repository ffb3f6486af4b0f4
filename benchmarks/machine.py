"""The machine and the date that results belong to."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

__all__ = ["describe"]


def describe(scratch: Path, now_s: float) -> dict[str, Any]:
    """Describe this machine without naming it."""
    return {
        "date": datetime.fromtimestamp(now_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "disk": _disk(scratch),
        "kernel": platform.release(),
    }


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()


def _disk(path: Path) -> str:
    """Return file system and kind of the disk that a path is on."""
    within = [
        part
        for part in psutil.disk_partitions(all=True)
        if path.absolute().is_relative_to(part.mountpoint)
    ]
    mounted = max(within, key=lambda part: len(part.mountpoint))
    device = Path(mounted.device).name
    kind = device.rstrip("0123456789")
    known = {"vd": "virtio disk", "nvme": "NVMe", "sd": "SCSI or SATA disk", "xvd": "Xen disk"}
    named = next((text for start, text in known.items() if kind.startswith(start)), "disk")
    return f"{mounted.fstype} on {named}" if device != mounted.fstype else mounted.fstype
