"""P1: who stands where is agreed on, and ranks that were told different things save nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ckpt_tiering.dcp.topology import RankFacts, places
from ckpt_tiering.errors import ConfigError

FACTS = RankFacts(
    node="a", run="s3://b/r", world_size=4, part_bytes=5 << 20, staging_mode="auto", step=3
)


def test_nodes_are_counted_by_their_lowest_ranks() -> None:
    nodes = ["b", "a", "b", "c"]
    facts = {rank: replace(FACTS, node=node) for rank, node in enumerate(nodes)}
    there = places(facts, "abcd")
    assert [(p.rank, p.node_rank, p.ranks_on_node) for p in there] == [
        (0, 0, 2),
        (1, 1, 1),
        (2, 0, 2),
        (3, 2, 1),
    ]
    assert {(p.num_nodes, p.incarnation) for p in there} == {(3, "abcd")}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("run", "s3://b/other"),
        ("world_size", 5),
        ("part_bytes", 8 << 20),
        ("staging_mode", "disk"),
        ("step", 4),
        ("attempt", 1),
    ],
)
def test_p6_a_disagreement_names_rank_and_both_values(field: str, value: Any) -> None:
    facts = dict.fromkeys(range(4), FACTS) | {2: replace(FACTS, **{field: value})}
    with pytest.raises(ConfigError) as caught:
        places(facts, "abcd")
    assert str(caught.value).startswith(
        f"rank 2 has {field}={value!r} where rank 0 has {getattr(FACTS, field)!r}"
    )


def test_p6_a_rank_too_few_is_refused() -> None:
    with pytest.raises(ConfigError, match="4 ranks save, and 3 of them came"):
        places(dict.fromkeys(range(3), FACTS), "abcd")
