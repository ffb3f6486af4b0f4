from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tiering.errors import FormatError
from ckpt_tiering.model.seal import Seal, decode_seal
from tests.unit.model.documents import file_entry
from tests.unit.model.strategies import legal_paths


def seal(**changes: Any) -> Seal:
    fields: dict[str, Any] = {
        "run": "s3://b/run",
        "store_options": {"endpoint_url": None},
        "save_id": "000000000100-abcd",
        "name": "last.ckpt",
        "metadata": {"loss": 1.5, "best": True},
        "snapshot_at": 1.0,
        "staged_at": 2.5,
        "rank": 0,
        "ranks_on_node": 2,
        "node_rank": 0,
        "num_nodes": 1,
        "part_bytes": 3,
        "files": (file_entry("a"),),
    }
    return Seal(**fields | changes)


@given(legal_paths, st.binary(max_size=10))
def test_p11_a_seal_is_read_back_as_it_was(path: str, data: bytes) -> None:
    written = seal(files=(file_entry(path, data),))
    assert decode_seal(written.encode(), "seal") == written


@given(st.integers(0, len(seal().encode()) - 1))
def test_p1_b06_a_seal_torn_anywhere_is_no_seal(length: int) -> None:
    with pytest.raises(FormatError, match=r"seal\.json"):
        decode_seal(seal().encode()[:length], "seal.json")


def test_p1_b06_a_seal_of_zeros_is_no_seal() -> None:
    with pytest.raises(FormatError):
        decode_seal(bytes(len(seal().encode())), "seal.json")


@pytest.mark.parametrize(
    "bend",
    [
        {"version": 2},
        {"extra": 1},
        {"save_id": "latest"},
        {"rank": -1},
        {"rank": 1},  # not the rank of its files
        {"ranks_on_node": 0},
        {"num_nodes": 0},
        {"part_bytes": 0},
        {"files": [{"path": "../a", "kind": "dir", "rank": 0}]},
    ],
    ids=str,
)
def test_p12_a_bent_seal_is_refused(bend: dict[str, Any]) -> None:
    bent = json.loads(seal().encode()) | bend
    with pytest.raises(FormatError):
        decode_seal(json.dumps(bent).encode(), "seal.json")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("run", "s3://b/other"),
        ("save_id", "000000000101-abcd"),
        ("name", None),
        ("ranks_on_node", 3),
        ("node_rank", 1),
        ("num_nodes", 2),
        ("part_bytes", 4),
    ],
)
def test_p5_shards_that_differ_in_what_they_share_say_in_what(field: str, value: Any) -> None:
    assert seal().agrees_with(seal(**{field: value})) == field


def test_shards_may_differ_in_what_is_their_own() -> None:
    other = seal(rank=1, files=(), metadata={}, snapshot_at=9.0)
    assert seal().agrees_with(other) is None


def test_p10_a_loss_that_is_not_a_number_does_not_cost_the_save() -> None:
    written = seal(metadata={"loss": float("nan")})
    assert decode_seal(written.encode(), "seal").metadata == {"loss": None}
