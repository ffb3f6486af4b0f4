"""Who saves what: DCP's own planning, once per layout instead of at every save."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint._dedup_save_plans import dedup_save_plans
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.utils import find_state_dict_object
from torch.distributed.tensor import DTensor

from ckpt_tiering.snapshot.archives import pickle_object
from ckpt_tiering.snapshot.distcp import is_plain

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

    from ckpt_tiering.snapshot.walk import Walk

__all__ = [
    "METADATA_FILE",
    "FlatState",
    "Share",
    "TieredSavePlanner",
    "data_file",
    "fill_metadata",
    "kept",
    "settled",
]

METADATA_FILE = ".metadata"
# Written by DCP since it has versions of its own.
DCP_VERSION = getattr(filesystem, "CURRENT_DCP_VERSION", None)
SIMPLE_TYPES = (torch.Tensor, dict, list, tuple, int, float, str, bytes, type(None))


def data_file(rank: int) -> str:
    """Return the name of a rank's data file, as DCP's own writer names it."""
    return f"__{rank}_0{filesystem.DEFAULT_SUFFIX}"


class TieredSavePlanner(DefaultSavePlanner):
    """DCP's planner; but objects that all ranks have are saved by the lowest.

    So a counter that grows concerns rank 0 alone, while equal tensors are still shared out.
    """

    def _dedup_save_plans(self, all_plans: list[SavePlan]) -> list[SavePlan]:
        def only(*, objects: bool) -> list[SavePlan]:
            return [
                replace(p, items=[i for i in p.items if _is_object(i) == objects])
                for p in all_plans
            ]

        tensors = dedup_save_plans(only(objects=False), save_to_lowest_rank=False)
        objects = dedup_save_plans(only(objects=True), save_to_lowest_rank=True)
        return [
            replace(tensor_plan, items=[*object_plan.items, *tensor_plan.items])
            for object_plan, tensor_plan in zip(objects, tensors, strict=True)
        ]


def _is_object(item: WriteItem) -> bool:
    return item.type is WriteItemType.BYTE_IO


@dataclass(frozen=True, slots=True, eq=False)
class FlatState:
    """A state dict as DCP sees it: flat, with what a layout depends on.

    Attributes:
        planner: Holds the flat state; nothing was planned yet.
        values: The flat state.
        signature: Equal for states of the same layout, on this rank.
    """

    planner: TieredSavePlanner
    values: dict[str, Any]
    signature: list[Any]

    @classmethod
    def of(cls, state: Mapping[str, Any], *, is_coordinator: bool) -> FlatState:
        """Flatten a state; objects with a ``state_dict`` at its top are asked for theirs."""
        state = {key: _without_state(value) for key, value in state.items()}
        # Flattening sharded tensors copies the whole dictionary; only FSDP1 in 2-D has use for it.
        planner = TieredSavePlanner(flatten_sharded_tensors=False)
        planner.set_up_planner(state, is_coordinator=is_coordinator)
        if any(hasattr(value, "local_shards") for value in planner.state_dict.values()):
            planner = TieredSavePlanner()
            planner.set_up_planner(state, is_coordinator=is_coordinator)
        values = planner.state_dict
        signature = [_kind(key, value) for key, value in values.items()]
        return cls(planner, values, [signature, planner.mappings])


def _without_state(value: Any) -> Any:
    if isinstance(value, SIMPLE_TYPES) or not hasattr(value, "load_state_dict"):
        return value
    return value.state_dict()


def _kind(key: str, value: Any) -> tuple[Any, ...]:
    kind = type(value)
    if kind is DTensor:
        local, spec = value._local_tensor, value._spec  # noqa: SLF001  ten times the cost otherwise
        return key, local.dtype, local.shape, spec.shape, spec.placements, spec.mesh
    if not isinstance(value, torch.Tensor):
        return (key,)
    if hasattr(value, "local_shards"):
        shards = [(s.metadata.shard_offsets, s.metadata.shard_sizes) for s in value.local_shards()]
        return key, value.dtype, value.size(), shards
    return key, kind, value.dtype, value.layout, value.shape


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """What this rank saves of all states of a layout.

    Attributes:
        objects: Items that are pickled, in the order of the data file.
        tensors: Items of plain memory, likewise, behind the objects.
    """

    objects: tuple[WriteItem, ...]
    tensors: tuple[WriteItem, ...]

    @classmethod
    def of(cls, items: Iterable[WriteItem], values: dict[str, Any]) -> Share:
        """Sort a rank's items by how they are stored."""
        objects: list[WriteItem] = []
        tensors: list[WriteItem] = []
        for item in items:
            plain = not _is_object(item) and is_plain(_value(values, item))
            (tensors if plain else objects).append(item)
        return cls(tuple(objects), tuple(tensors))

    @property
    def items(self) -> tuple[WriteItem, ...]:
        """All items, in the order of the data file."""
        return *self.objects, *self.tensors

    def pickles(self, values: dict[str, Any]) -> list[Walk]:
        """Pickle the objects of a state as they are now."""
        return [pickle_object(_value(values, item)) for item in self.objects]

    def memory(self, values: dict[str, Any]) -> list[torch.Tensor]:
        """Return the tensors of a state: views, not copies."""
        return [_value(values, item) for item in self.tensors]


def _value(values: dict[str, Any], item: WriteItem) -> Any:
    value = values[item.index.fqn]
    kind = type(value)
    if kind is torch.Tensor or kind is torch.nn.Parameter:
        return value
    if kind is DTensor and is_plain(value._local_tensor):  # noqa: SLF001  as above
        return value._local_tensor  # noqa: SLF001
    with torch.no_grad():
        return settled(find_state_dict_object(values, item.index))


def settled(value: Any) -> Any:
    """Return a tensor that is there, for one that a collective is still making."""
    wait = getattr(value, "wait", None)
    return wait() if wait is not None and isinstance(value, torch.Tensor) else value


def fill_metadata(
    metadata: Metadata, index: Mapping[MetadataIndex, tuple[str, int, int]], checkpoint_id: str
) -> bytes:
    """Complete the metadata of a global plan; return the file ``.metadata``.

    Of plain objects of DCP's own, so that DCP alone can read it.

    Args:
        metadata: What the global plan says; completed in place.
        index: File, offset and length of each item.
        checkpoint_id: What to call the checkpoint in it.
    """
    metadata.storage_data = {item: _StorageInfo(*place) for item, place in index.items()}
    metadata.storage_meta = StorageMeta(checkpoint_id=checkpoint_id)
    if DCP_VERSION is not None:
        metadata.version = DCP_VERSION
    return pickle.dumps(metadata)


def kept(local: SavePlan, final: Sequence[WriteItem]) -> list[int]:
    """Return which items of a local plan are in the final one: all that need be sent back."""
    final_indexes = {item.index for item in final}
    return [n for n, item in enumerate(local.items) if item.index in final_indexes]
