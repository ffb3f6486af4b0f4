"""Sizes and durations as people write them: ``"128MiB"``, ``"2.5GB/s"``, ``"30s"``."""

from __future__ import annotations

import re
from decimal import Decimal

from ckpt_tiering.errors import ConfigError

__all__ = ["GIB", "KIB", "MIB", "format_bytes", "format_seconds", "parse_bytes", "parse_seconds"]

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

_BYTE_UNITS: dict[str, Decimal | int] = {
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
_SECOND_UNITS: dict[str, Decimal | int] = {
    "": 1,
    "ms": Decimal("0.001"),
    "s": 1,
    "m": 60,
    "min": 60,
    "h": 3600,
    "d": 86400,
}
_QUANTITY = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)(\s*/s)?\s*")
_TOO_MUCH = 1 << 63


def _parse(
    text: str | float, units: dict[str, Decimal | int], what: str, *, rate: bool
) -> float | Decimal:
    value: float | Decimal | None = None
    if isinstance(text, int | float) and not isinstance(text, bool):
        value = text
    elif isinstance(text, str) and (match := _QUANTITY.fullmatch(text)):
        unit = units.get(match[2].lower())
        if unit is not None and (rate or not match[3]):
            value = Decimal(match[1]) * unit
    if value is None or not -_TOO_MUCH < value < _TOO_MUCH:
        known = ", ".join(unit for unit in units if unit)
        raise ConfigError(
            f"{text!r} is not {what}", hint=f"write a number with one of the units {known}"
        )
    return value


def parse_bytes(text: str | float) -> int:
    """Read a size (or a rate with ``/s``) in bytes; a bare number is bytes.

    Raises:
        ConfigError: The text is not a size.
    """
    return int(_parse(text, _BYTE_UNITS, "a size in bytes", rate=True))


def parse_seconds(text: str | float) -> float:
    """Read a duration in seconds; a bare number is seconds.

    Raises:
        ConfigError: The text is not a duration.
    """
    return float(_parse(text, _SECOND_UNITS, "a duration", rate=False))


def format_bytes(num_bytes: float) -> str:
    """Write a size with three significant digits, or all before the point, and a binary unit."""
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while len(units) > 1 and abs(round(num_bytes)) >= KIB:
        num_bytes /= KIB
        del units[0]
    whole = units[0] == "B" or abs(num_bytes) >= 100  # noqa: PLR2004  three digits
    return f"{num_bytes:.0f} {units[0]}" if whole else f"{num_bytes:.3g} {units[0]}"


def format_seconds(seconds: float) -> str:
    """Write a duration for a table: ``12 ms``, ``3.4 s``, ``2 m 05 s``."""
    if round(seconds, 3) < 1:
        return f"{seconds * 1e3:.0f} ms"
    if round(seconds, 1) < 60:  # noqa: PLR2004  seconds in a minute
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} m {rest:02d} s"
