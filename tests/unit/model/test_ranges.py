from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tiering.model.digest import crc64
from ckpt_tiering.model.ranges import Block, blocks_of, plan_requests
from tests.unit.model.documents import file_entry

DATA = bytes(range(23))
FILE = file_entry("f", DATA, part_bytes=5)


@given(st.integers(0, 23), st.integers(0, 23))
def test_p9_a_range_is_covered_by_whole_blocks_and_no_more_of_them(start: int, end: int) -> None:
    blocks = list(blocks_of(FILE, "k", start, end))
    assert bool(blocks) == (start < end)
    for block in blocks:
        assert block.crc == crc64(DATA[block.start : block.end])
        assert block.start < end
        assert block.end > start
        assert block.start % 5 == 0
    for one, other in pairwise(blocks):
        assert one.end == other.start
    if blocks:
        assert blocks[0].start <= start
        assert blocks[-1].end >= end


blocks = st.builds(
    lambda key, at, size, path: Block(
        file_entry(path).model_copy(update={"offset": at}), key, 0, size, 0
    ),
    key=st.sampled_from(["a", "b"]),
    at=st.integers(0, 200),
    size=st.integers(1, 40),
    path=st.sampled_from(["x", "y"]),
)


@given(st.lists(blocks, max_size=30), st.integers(0, 30), st.integers(1, 100))
def test_requests_hold_each_block_once_and_keep_their_bounds(
    wanted: list[Block], gap: int, most: int
) -> None:
    requests = plan_requests(wanted, gap_bytes=gap, request_bytes=most)
    gathered = [block for request in requests for block in request.blocks]
    assert sorted(map(id, gathered)) == sorted(map(id, wanted))
    for request in requests:
        places = [(b.at, b.at + b.end - b.start) for b in request.blocks]
        assert {b.key for b in request.blocks} == {request.key}
        assert (request.start, request.end) == (places[0][0], places[-1][1])
        assert request.end - request.start <= most or len(places) == 1
        for (_, end), (start, _) in pairwise(places):
            assert 0 <= start - end <= gap, "overlapping blocks never share a buffer"


def test_neighbours_become_one_request() -> None:
    wanted = [*blocks_of(FILE, "k", 0, 23)]
    assert len(plan_requests(reversed(wanted), gap_bytes=0, request_bytes=23)) == 1
    assert len(plan_requests(wanted, gap_bytes=0, request_bytes=22)) == 2
    assert len(plan_requests([wanted[0], wanted[2]], gap_bytes=4)) == 2
    assert len(plan_requests([wanted[0], wanted[2]], gap_bytes=5)) == 1


@pytest.mark.parametrize("data", [b"", b"x"])
def test_nothing_wanted_is_no_block(data: bytes) -> None:
    assert list(blocks_of(file_entry("e", data), "k", 0, 0)) == []
