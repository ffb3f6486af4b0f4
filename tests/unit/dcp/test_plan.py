"""What a layout depends on, and who saves what."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from ckpt_tiering.dcp.plan import FlatState, Share, fill_metadata, kept


class Counter:
    def __init__(self) -> None:
        self.count = 7

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def state() -> dict[str, Any]:
    return {
        "model": {"w": torch.ones(4, 3), "b": torch.zeros(3)},
        "list": [torch.ones(2), 5],
        "counter": Counter(),
        "note": "text",
    }


def flat(value: dict[str, Any]) -> FlatState:
    return FlatState.of(value, is_coordinator=True)


def changed(**values: Any) -> dict[str, Any]:
    return state() | values


def test_values_of_a_layout_have_its_signature() -> None:
    other = changed(note={"quite": ["another", "object"]}, list=[torch.zeros(2), "y"])
    other["counter"].count = 1 << 70
    other["model"]["w"] = torch.zeros(3, 4).t()
    assert flat(state()).signature == flat(changed(note="other")).signature
    other["note"] = None
    assert flat(state()).signature == flat(other).signature


@pytest.mark.parametrize(
    "other",
    [
        changed(more=1),
        changed(model={"w": torch.ones(4, 3), "b": torch.zeros(4)}),
        changed(model={"w": torch.ones(4, 3), "b": torch.zeros(3).double()}),
        changed(model={"w": torch.ones(4, 3), "b": 3}),
        changed(model={"b": torch.zeros(3), "w": torch.ones(4, 3)}),
        {"model.w": torch.ones(4, 3), "model": {"b": torch.zeros(3)}} | {
            key: value for key, value in state().items() if key != "model"
        },
        changed(note=torch.ones(1)),
    ],
)  # fmt: skip
def test_another_layout_has_another_signature(other: dict[str, Any]) -> None:
    assert flat(state()).signature != flat(other).signature


def test_equal_tensors_are_shared_out_and_equal_objects_are_rank_0s() -> None:
    states = [flat(state() | {f"own{rank}": rank}) for rank in range(3)]
    local = [one.planner.create_local_plan() for one in states]
    final, _ = states[0].planner.create_global_plan(local)
    mine = [[item.index.fqn for item in plan.items] for plan in final]
    assert {"note", "counter.count", "list.1", "own0"} <= set(mine[0])
    assert "own1" in mine[1]
    assert "own2" in mine[2]
    assert all(len(names) > 1 for names in mine)
    every = [name for names in mine for name in names]
    assert len(every) == len(set(every)) == 9
    for plan, whole in zip(local, final, strict=True):
        numbers = kept(plan, whole.items)
        assert {plan.items[n].index for n in numbers} == {item.index for item in whole.items}


def test_a_share_finds_its_values_in_each_state() -> None:
    planned = flat(state())
    share = Share.of(planned.planner.create_local_plan().items, planned.values)
    assert [item.index.fqn for item in share.tensors] == ["model.w", "model.b", "list.0"]
    later = state()
    later["model"]["b"] += 5
    later["note"] = [1]
    values = flat(later).values
    assert share.memory(values)[1].data_ptr() == later["model"]["b"].data_ptr()
    assert [pickle.loads(one.pickled) for one in share.pickles(values)] == [5, 7, [1]]  # noqa: TID251


def test_p13_the_metadata_is_made_of_dcps_own_classes_only() -> None:
    planned = flat(state())
    local = planned.planner.create_local_plan()
    _, metadata = planned.planner.create_global_plan([local])
    index = {item.index: ("__0_0.distcp", 64 * n, 10) for n, item in enumerate(local.items)}
    data = fill_metadata(metadata, index, "s3://b/run")
    assert b"ckpt_tiering" not in data
    read = pickle.loads(data)  # noqa: TID251
    assert read.storage_data[MetadataIndex("model.b", [0])].offset == 64
    assert read.version == "1.0.0"
    assert read.storage_meta.checkpoint_id == "s3://b/run"
