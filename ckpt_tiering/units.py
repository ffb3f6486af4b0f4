"""Sizes and durations as people write them: ``"128MiB"``, ``"2.5GB/s"``, ``"30s"``."""

from __future__ import annotations

import re

from ckpt_tiering.errors import ConfigError

__all__ = ["GIB", "KIB", "MIB", "format_bytes", "format_seconds", "parse_bytes", "parse_seconds"]

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

_BYTE_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": KIB,
    "mib": MIB,
    "gib": GIB,
    "tib": 1 << 40,
}
_SECOND_UNITS = {"": 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_QUANTITY = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*(?:/s)?\s*")


def _parse(text: str | float, units: dict[str, float] | dict[str, int], what: str) -> float:
    if isinstance(text, int | float):
        return float(text)
    match = _QUANTITY.fullmatch(text)
    if match is None or match[2].lower() not in units:
        known = ", ".join(unit for unit in units if unit)
        raise ConfigError(
            f"{text!r} is not {what}", hint=f"write a number with one of the units {known}"
        )
    return float(match[1]) * units[match[2].lower()]


def parse_bytes(text: str | float) -> int:
    """Read a size (or a rate with ``/s``) in bytes; a bare number is bytes.

    Raises:
        ConfigError: The text is not a size.
    """
    return int(_parse(text, _BYTE_UNITS, "a size in bytes"))


def parse_seconds(text: str | float) -> float:
    """Read a duration in seconds; a bare number is seconds.

    Raises:
        ConfigError: The text is not a duration.
    """
    return _parse(text, _SECOND_UNITS, "a duration")


def format_bytes(num_bytes: float) -> str:
    """Write a size with three significant digits and a binary unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < KIB:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.3g} {unit}"
        num_bytes /= KIB
    return f"{num_bytes:.4g} TiB"


def format_seconds(seconds: float) -> str:
    """Write a duration for a table: ``12 ms``, ``3.4 s``, ``2 m 05 s``."""
    if seconds < 1:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 60:  # noqa: PLR2004  seconds in a minute
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} m {rest:02d} s"
