from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ckpt_tiering.model.ids import SaveId
from ckpt_tiering.retention import evictable, may_remove

ids = st.builds(
    SaveId, st.integers(0, 6), st.sampled_from(["aaaa", "bbbb"]), st.sampled_from([0, 2, 10])
)
id_sets = st.frozensets(ids, max_size=8)


@given(durable=id_sets, protected=id_sets, wishes=st.lists(ids, max_size=30), later=st.lists(ids))
def test_p6_no_sequence_of_wishes_ends_with_less_than_there_was(
    durable: frozenset[SaveId],
    protected: frozenset[SaveId],
    wishes: list[SaveId],
    later: list[SaveId],
) -> None:
    """Wishes and new saves in any order: the newest durable save only ever gets newer."""
    there = set(durable)
    for turn, wish in enumerate(wishes):
        newest = max(there, default=None)
        if may_remove(wish, there, protected):
            there.discard(wish)
        assert max(there, default=None) == newest
        assert protected & durable <= there
        if turn < len(later):
            there.add(later[turn])
    assert not durable or max(there) >= max(durable)


@given(victim=ids, durable=id_sets)
def test_p6_nothing_goes_before_something_newer_is_durable(
    victim: SaveId, durable: frozenset[SaveId]
) -> None:
    newer = [save for save in durable if save > victim]
    assert may_remove(victim, durable, ()) == bool(newer)
    assert not may_remove(victim, durable, [victim])


def test_p6_a_tenth_repeat_is_newer_than_a_second() -> None:
    second, tenth = SaveId(7, "aaaa", 2), SaveId(7, "aaaa", 10)
    assert may_remove(second, [second, tenth], ())
    assert not may_remove(tenth, [second, tenth], ())


sizes = st.dictionaries(ids, st.integers(0, 100), max_size=8)


@given(on_nvme=sizes, others=st.integers(0, 300), budget=st.integers(0, 500))
def test_p6_only_durable_copies_are_evicted_oldest_first_and_the_newest_stays(
    on_nvme: dict[SaveId, int], others: int, budget: int
) -> None:
    used = sum(on_nvme.values()) + others
    chosen = evictable(list(on_nvme.items()), used, budget)
    assert chosen == sorted(on_nvme)[: len(chosen)]
    assert not on_nvme or max(on_nvme) not in chosen
    left = used - sum(on_nvme[save] for save in chosen)
    assert left <= budget or len(chosen) == max(0, len(on_nvme) - 1), "as many as it takes"
    if chosen:
        assert left + on_nvme[chosen[-1]] > budget, "and no more"
