from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tiering.model.lifecycle import (
    OBJECT_MOVES,
    SAVE_MOVES,
    ObjectState,
    SaveState,
    check_move,
)

S = SaveState
# Written out by hand: what may follow what, and nothing else.
LEGAL = {
    (S.STAGED, S.UPLOADED),
    (S.UPLOADED, S.VERIFIED),
    (S.UPLOADED, S.STAGED),
    (S.VERIFIED, S.PUBLISHED),
    (S.PUBLISHED, S.DURABLE),
    (S.DURABLE, S.SETTLED),
    *((state, S.FAILED) for state in (S.STAGED, S.UPLOADED, S.VERIFIED, S.PUBLISHED)),
    *((state, S.REMOVING) for state in S if state is not S.REMOVING),
}


def is_legal(old: SaveState, new: SaveState) -> bool:
    try:
        check_move(old, new)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize(("old", "new"), list(product(S, S)))
def test_p1_only_legal_moves_are_made(old: SaveState, new: SaveState) -> None:
    assert is_legal(old, new) == ((old, new) in LEGAL)


@given(st.lists(st.sampled_from(S), max_size=30))
def test_p1_nothing_is_durable_that_was_not_uploaded_and_verified(wishes: list[SaveState]) -> None:
    state, path = S.STAGED, [S.STAGED]
    for wish in wishes:
        if is_legal(state, wish):
            state = wish
            path.append(state)
    if S.DURABLE in path:
        end = path.index(S.DURABLE)
        assert path[end - 3 : end] == [S.UPLOADED, S.VERIFIED, S.PUBLISHED]
        assert S.FAILED not in path, "durable stays durable"


def test_every_state_has_its_moves() -> None:
    assert set(SAVE_MOVES) == set(SaveState)
    assert set(OBJECT_MOVES) == set(ObjectState)


def test_p3_an_object_is_verified_only_after_it_was_sent() -> None:
    into_verified = {old for old, moves in OBJECT_MOVES.items() if ObjectState.VERIFIED in moves}
    assert into_verified == {ObjectState.SENT}
    assert not OBJECT_MOVES[ObjectState.VERIFIED]


def test_p4_b19_an_upload_is_noted_before_it_is_opened() -> None:
    into_open = {old for old, moves in OBJECT_MOVES.items() if ObjectState.OPEN in moves}
    assert into_open == {ObjectState.OPENING}
