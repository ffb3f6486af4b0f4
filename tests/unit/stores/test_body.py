from __future__ import annotations

import itertools
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tiering.errors import IntegrityError
from ckpt_tiering.model.digest import PartCrc, crc64
from ckpt_tiering.stores.body import WINDOW_BYTES, Body, BytesPiece, FilePiece

PIECES = st.lists(st.tuples(st.booleans(), st.binary(max_size=50)), max_size=6)


def drain(body: Body, sizes: list[int] | None = None) -> bytes:
    reader, chunks = body.open(), []
    windows = itertools.cycle(sizes or [-1])
    while chunk := reader.read(next(windows)):
        chunks.append(chunk)
    return b"".join(chunks)


def build(folder: str, pieces: list[tuple[bool, bytes]]) -> tuple[Body, bytes]:
    """Make a body of pieces of memory and of one file, with other bytes around them."""
    file, offset = Path(folder, "staged"), 0
    made: list[BytesPiece | FilePiece] = []
    with file.open("wb") as stream:
        for in_file, data in pieces:
            if in_file:
                stream.write(b"?" + data + b"?")
                made.append(FilePiece(file, offset + 1, len(data)))
                offset += len(data) + 2
            else:
                made.append(BytesPiece(data))
    whole = b"".join(data for _, data in pieces)
    return Body(made, PartCrc(len(whole), crc64(whole))), whole


@given(pieces=PIECES, sizes=st.lists(st.integers(1, 40), min_size=1, max_size=4))
def test_p3_the_bytes_are_the_pieces_in_order(
    pieces: list[tuple[bool, bytes]], sizes: list[int]
) -> None:
    with TemporaryDirectory() as folder:
        body, whole = build(folder, pieces)
        assert body.size_bytes == len(body.open()) == len(whole)
        assert drain(body, sizes) == whole
        assert drain(body) == whole


@given(pieces=PIECES, first=st.integers(0, 60), seed=st.integers(0, 300))
def test_a_reader_can_start_again_anywhere(
    pieces: list[tuple[bool, bytes]], first: int, seed: int
) -> None:
    """HTTP clients seek to the end for the length, and back to send again."""
    with TemporaryDirectory() as folder:
        body, whole = build(folder, pieces)
        reader = body.open()
        reader.read(first)
        assert reader.seek(0, os.SEEK_END) == len(whole)
        middle = seed % (len(whole) + 1)
        reader.seek(middle)
        assert b"".join(iter(lambda: reader.read(7), b"")) == whole[middle:]
        assert reader.seek(0) == 0
        assert b"".join(iter(lambda: reader.read(7), b"")) == whole
        assert reader.tell() == len(whole)


@given(data=st.binary(min_size=1, max_size=60), place=st.integers(0), bit=st.integers(0, 7))
def test_p3_one_changed_bit_is_found_before_the_end(data: bytes, place: int, bit: int) -> None:
    changed = bytearray(data)
    changed[place % len(data)] ^= 1 << bit
    body = Body((BytesPiece(bytes(changed)),), PartCrc(len(data), crc64(data)), "file 7")
    chunks, received = iter(partial(body.open().read, 13), b""), bytearray()
    with pytest.raises(IntegrityError, match="file 7 changed"):
        received.extend(chunk for window in chunks for chunk in window)
    assert len(received) < len(data)


def test_memory_is_bounded_by_one_window() -> None:
    data = bytes(3 * WINDOW_BYTES)
    reader = Body.of_bytes(data).open()
    assert len(reader.read()) == len(reader.read(1 << 30)) == WINDOW_BYTES


def test_bandwidth_sees_every_byte_once() -> None:
    seen: list[int] = []
    body = replace(Body.of_bytes(bytes(100)), on_read=seen.append)
    drain(body, [33])
    assert seen == [33, 33, 33, 1]


def test_pieces_that_do_not_add_up_are_refused() -> None:
    with pytest.raises(ValueError, match="pieces hold 3 bytes"):
        Body((BytesPiece(b"abc"),), PartCrc(4, 0)).open()


def test_a_staged_file_that_is_gone_is_named(tmp_path: Path) -> None:
    body = Body((FilePiece(tmp_path / "gone", 0, 3),), PartCrc(3, crc64(b"abc")))
    with pytest.raises(IntegrityError, match="gone can't be read: No such file"):
        drain(body)


def test_p12_a_link_is_not_followed(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"abc")
    (tmp_path / "link").symlink_to(secret)
    body = Body((FilePiece(tmp_path / "link", 0, 3),), PartCrc(3, crc64(b"abc")))
    with pytest.raises(IntegrityError, match="can't be read"):
        drain(body)
