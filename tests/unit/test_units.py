from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tiering.errors import ConfigError
from ckpt_tiering.units import (
    GIB,
    KIB,
    MIB,
    format_bytes,
    format_seconds,
    parse_bytes,
    parse_seconds,
)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("128MiB", 128 * MIB),
        ("1.5 GiB", 3 * GIB // 2),
        ("2.5GB/s", 2_500_000_000),
        (" 10 kb ", 10_000),
        ("7b", 7),
        (7, 7),
        (7.9, 7),
        ("1tib", 1 << 40),
        (2**53 + 1, 2**53 + 1),
    ],
)
def test_sizes_as_people_write_them(text: str | float, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30s", 30), ("250ms", 0.25), ("2m", 120), ("1.5h", 5400), ("1d", 86400), (3, 3), ("4", 4)],
)
def test_durations_as_people_write_them(text: str | float, seconds: float) -> None:
    assert parse_seconds(text) == seconds


NEITHER: list[Any] = [
    *("", "MiB", "-5", "-5MiB", "1e3", "5 parsecs", "5MiB5", "\u0665s", "9" * 400),
    *(None, [1], {}, True, float("nan"), float("inf"), float("-inf"), 1e300),
]


@pytest.mark.parametrize("text", NEITHER, ids=[repr(t)[:20] for t in NEITHER])
def test_p5_anything_else_is_a_config_error(text: Any) -> None:
    for parse in (parse_bytes, parse_seconds):
        with pytest.raises(ConfigError) as caught:
            parse(text)
        assert caught.value.hint


def test_a_unit_of_the_other_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match="'5s' is not a size"):
        parse_bytes("5s")
    with pytest.raises(ConfigError, match="'5MiB' is not a duration"):
        parse_seconds("5MiB")
    with pytest.raises(ConfigError, match="'5/s' is not a duration"):
        parse_seconds("5/s")


@given(st.integers(0, 1 << 62))
def test_whole_bytes_are_read_exactly(num_bytes: int) -> None:
    assert parse_bytes(str(num_bytes)) == parse_bytes(num_bytes) == num_bytes


@given(st.integers(0, 1 << 62))
def test_a_written_size_reads_back_to_three_digits(num_bytes: int) -> None:
    text = format_bytes(num_bytes)
    assert "e" not in text
    assert parse_bytes(text) == pytest.approx(num_bytes, rel=0.006, abs=0)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (KIB, "1 KiB"),
        (1023 * KIB, "1023 KiB"),
        (MIB - 1, "1 MiB"),
        (128 * MIB, "128 MiB"),
        (3 * GIB // 2, "1.5 GiB"),
        (5000 << 40, "5000 TiB"),
    ],
)
def test_sizes_for_tables(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 ms"),
        (0.0123, "12 ms"),
        (0.9999, "1.0 s"),
        (3.44, "3.4 s"),
        (59.96, "1 m 00 s"),
        (125, "2 m 05 s"),
        (7200, "120 m 00 s"),
    ],
)
def test_durations_for_tables(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text
