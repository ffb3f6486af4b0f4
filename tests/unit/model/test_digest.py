from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tiering.model.digest import (
    FileDigest,
    PartCrc,
    StreamDigest,
    combine,
    crc64,
    crc_from_b64,
    crc_to_b64,
    join,
)

CHECK = 0xAE8B14860A799888  # of b"123456789", from the catalogue of CRC parameters

chunks = st.lists(st.binary(max_size=40), max_size=12)


def by_definition(data: bytes) -> int:
    """CRC-64/NVME bit by bit, sharing no code with what is tested."""
    crc = 0xFFFFFFFFFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x9A6C9329AC4BC9B5 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFFFFFFFFFF


@given(st.binary(max_size=200))
def test_p3_the_checksum_is_the_one_of_the_standard(data: bytes) -> None:
    assert crc64(data) == by_definition(data)
    assert by_definition(b"123456789") == CHECK


@given(chunks)
def test_p3_the_checksum_of_the_whole_follows_from_its_pieces(pieces: list[bytes]) -> None:
    whole = b"".join(pieces)
    assert join(PartCrc(len(p), crc64(p)) for p in pieces) == PartCrc(len(whole), crc64(whole))
    running = 0
    for piece in pieces:
        running = crc64(piece, running)
    assert running == crc64(whole)


@given(st.binary(max_size=50), st.binary(max_size=50))
def test_p3_two_pieces_combine(first: bytes, second: bytes) -> None:
    assert combine(crc64(first), crc64(second), len(second)) == crc64(first + second)


def digest_of(data: bytes, part_bytes: int) -> FileDigest:
    return FileDigest(
        size_bytes=len(data),
        crc=crc64(data),
        part_bytes=part_bytes,
        part_crcs=tuple(crc64(data[i : i + part_bytes]) for i in range(0, len(data), part_bytes)),
    )


@given(chunks, st.integers(1, 30))
def test_p3_the_digest_does_not_depend_on_how_the_bytes_come(
    pieces: list[bytes], part_bytes: int
) -> None:
    stream = StreamDigest(part_bytes)
    so_far = b""
    for piece in pieces:
        stream.update(memoryview(bytearray(piece)))
        so_far += piece
        assert stream.digest() == digest_of(so_far, part_bytes)
    assert stream.digest() == digest_of(b"".join(pieces), part_bytes)


@given(st.binary(max_size=300), st.integers(1, 30), st.integers(1, 12))
def test_p3_parts_regroup_into_larger_ones_without_reading(
    data: bytes, part_bytes: int, factor: int
) -> None:
    large = part_bytes * factor
    expected = tuple(
        PartCrc(len(piece), crc64(piece))
        for piece in (data[i : i + large] for i in range(0, len(data), large))
    )
    assert digest_of(data, part_bytes).regroup(large) == expected


@pytest.mark.parametrize("part_bytes", [0, 3, 7, 15])
def test_parts_do_not_regroup_across_their_limits(part_bytes: int) -> None:
    with pytest.raises(ValueError, match="multiple"):
        digest_of(bytes(40), 10).regroup(part_bytes)


def test_an_empty_file_has_no_parts() -> None:
    digest = StreamDigest(10).digest()
    assert digest == FileDigest(size_bytes=0, crc=0, part_bytes=10, part_crcs=())
    assert digest.regroup(20) == ()


def test_arrays_count_their_bytes_not_their_items() -> None:
    stream = StreamDigest(8)
    stream.update(memoryview(bytes(range(16))).cast("I"))
    assert stream.digest() == digest_of(bytes(range(16)), 8)


@given(st.integers(0, 2**64 - 1))
def test_checksums_are_written_as_s3_does(crc: int) -> None:
    assert crc_from_b64(crc_to_b64(crc)) == crc
    assert crc_to_b64(0x0102030405060708) == "AQIDBAUGBwg="


@pytest.mark.parametrize("text", ["not base64!", "A"])
def test_other_text_is_no_checksum(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        crc_from_b64(text)
