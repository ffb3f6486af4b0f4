from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tiering.errors import CapacityError, ErrorKind
from ckpt_tiering.model.parts import (
    MAX_OBJECT_BYTES,
    MAX_PART_BYTES,
    MAX_PARTS,
    MIN_PART_BYTES,
    PartPlan,
    plan_parts,
)
from ckpt_tiering.units import GIB, MIB


@given(st.integers(0, 5000), st.integers(1, 100), st.integers(1, 50))
def test_parts_cover_the_object_exactly(size: int, part_bytes: int, max_parts: int) -> None:
    plan = plan_parts(size, part_bytes, max_parts=max_parts)
    spans = [plan.span(number) for number in range(1, plan.num_parts + 1)]
    assert [byte for start, end in spans for byte in range(start, end)] == list(range(size))
    assert all(end - start == plan.part_bytes for start, end in spans[:-1])
    assert plan.num_parts <= max_parts


@given(st.integers(0, MAX_OBJECT_BYTES), st.integers(MIN_PART_BYTES, MAX_PART_BYTES))
def test_the_length_is_the_smallest_multiple_that_fits(size: int, part_bytes: int) -> None:
    plan: PartPlan | None
    try:
        plan = plan_parts(size, part_bytes)
    except CapacityError:
        plan = None
    if plan is None:
        factor = -(-size // (part_bytes * MAX_PARTS))
        assert factor * part_bytes > MAX_PART_BYTES, "a length that fits was not found"
        return
    factor, rest = divmod(plan.part_bytes, part_bytes)
    assert rest == 0
    assert plan.num_parts <= MAX_PARTS
    assert plan.part_bytes <= MAX_PART_BYTES
    smaller = PartPlan(size, max(1, factor - 1) * part_bytes)
    assert factor == 1 or smaller.num_parts > MAX_PARTS


def test_p5_b15_part_length_is_raised_before_the_first_byte() -> None:
    size = 1536 * GIB
    plan = plan_parts(size, 128 * MIB)
    assert (plan.part_bytes, plan.num_parts) == (256 * MIB, 6144)
    assert plan.span(plan.num_parts)[1] == size


def test_p5_b15_an_eleventh_part_is_never_planned() -> None:
    assert plan_parts(10 * 7, 7, max_parts=10) == PartPlan(70, 7)
    assert plan_parts(10 * 7 + 1, 7, max_parts=10) == PartPlan(71, 14)


@pytest.mark.parametrize(
    ("size", "part_bytes"), [(MAX_OBJECT_BYTES + 1, 128 * MIB), (48 * 1024 * GIB, 3 * GIB)]
)
def test_p5_b15_an_object_over_the_limit_is_refused_at_once(size: int, part_bytes: int) -> None:
    with pytest.raises(CapacityError) as caught:
        plan_parts(size, part_bytes)
    assert caught.value.kind is ErrorKind.OBJECT_TOO_LARGE
    assert "TiB" in str(caught.value)
    assert caught.value.hint


def test_an_empty_object_has_no_part() -> None:
    assert plan_parts(0, 128 * MIB).num_parts == 0
