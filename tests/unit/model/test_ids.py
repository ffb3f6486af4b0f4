from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tiering.errors import FormatError
from ckpt_tiering.model.ids import (
    MAX_REPEAT,
    MAX_STEP,
    SaveId,
    new_incarnation,
    node_name,
    rank_name,
)

incarnations = st.text("0123456789abcdefghijklmnopqrstuvwxyz", min_size=4, max_size=32)
save_ids = st.builds(SaveId, st.integers(0, MAX_STEP), incarnations, st.integers(0, MAX_REPEAT))


@given(save_ids)
def test_the_text_of_an_id_is_read_back(save_id: SaveId) -> None:
    assert SaveId.parse(str(save_id)) == save_id


@given(st.text("0129\u0660", min_size=11, max_size=13), st.text("019.", max_size=4))
def test_p2_an_id_has_one_spelling(step: str, end: str) -> None:
    """Two spellings would be two commits of one save."""
    text = f"{step}-abcd{end}"
    try:
        save_id = SaveId.parse(text)
    except FormatError:
        return
    assert str(save_id) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "100-abcd",
        "000000000100",
        "000000000100-abc",
        "000000000100-ABCD",
        "000000000100-abcd.0",
        "000000000100-abcd.01",
        "000000000100-abcd.1000000",
        "000000000100-abcd\n",
        "00000000010\u0660-abcd",  # an Arabic zero is a digit, too
        "../000000000100-abcd",
    ],
)
def test_other_texts_are_no_ids(text: str) -> None:
    with pytest.raises(FormatError):
        SaveId.parse(text)


@pytest.mark.parametrize(
    ("step", "incarnation", "repeat"),
    [
        (-1, "abcd", 0),
        (MAX_STEP + 1, "abcd", 0),
        (1, "abc", 0),
        (1, "ab/cd", 0),
        (1, "a" * 33, 0),
        (1, "abcd", -1),
        (1, "abcd", MAX_REPEAT + 1),
    ],
)
def test_what_could_not_be_read_back_is_refused(step: int, incarnation: str, repeat: int) -> None:
    with pytest.raises(FormatError):
        SaveId(step, incarnation, repeat)


@given(st.lists(save_ids, max_size=8))
def test_the_newest_save_is_the_greatest_id(ids: list[SaveId]) -> None:
    by_rule = sorted(ids, key=lambda i: (i.step, i.incarnation, i.repeat))
    assert sorted(ids) == by_rule


def test_a_tenth_repeat_is_newer_than_a_second_one() -> None:
    assert SaveId(7, "abcd", 10) > SaveId(7, "abcd", 2) > SaveId(7, "abcd")
    assert SaveId(8, "aaaa") > SaveId(7, "zzzz", 99)


@given(st.integers(0, 10**13), st.integers(1, 10**13))
def test_a_later_start_has_a_greater_token(start_ms: int, later_ms: int) -> None:
    first = new_incarnation(start_ms / 1000)
    assert SaveId(1, first).incarnation == first
    assert new_incarnation((start_ms + later_ms + 1) / 1000) > first[:9]


def test_tokens_of_one_moment_differ() -> None:
    assert len({new_incarnation(1_800_000_000.0) for _ in range(50)}) == 50


def test_names_sort_like_numbers() -> None:
    assert node_name(3) == "n00003"
    assert rank_name(3) == "r000003"
    assert sorted(map(node_name, range(12))) == [node_name(i) for i in range(12)]
    assert sorted(map(rank_name, range(12))) == [rank_name(i) for i in range(12)]
