"""``.metadata``, the index of a DCP checkpoint: read without trust, then checked."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from ckpt_tiering.dcp.pickled import unpickle
from ckpt_tiering.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["load_metadata"]

MAX_BYTES = 1 << 63
# DCP makes lists as long as the highest index says, whatever is in them.
MAX_LIST_INDEX = 1 << 24
MAX_SHOWN = 100  # characters of a stranger's text in a message


def load_metadata(data: bytes | memoryview, files: Mapping[str, int]) -> Metadata:
    """Read the index of a DCP checkpoint. Runs nothing that is in it.

    Args:
        data: The contents of ``.metadata``.
        files: Names and lengths in bytes of the files beside it.

    Returns:
        The index. Each entry lies within a file that is there, each chunk within its tensor.

    Raises:
        FormatError: It is not what DCP's own writer writes, contradicts itself or the files, or is
            of a kind that is not supported.
    """
    metadata = unpickle(bytes(data))
    try:
        _check(metadata, files)
    except (ValueError, TypeError, AttributeError) as error:
        message = error.message if isinstance(error, FormatError) else str(error)
        hint = error.hint if isinstance(error, FormatError) else None
        raise FormatError(f"the index of the checkpoint is not valid: {message}", hint=hint) from (
            error
        )
    return metadata  # type: ignore[no-any-return]  # checked


def _expect(value: Any, *kinds: type) -> None:
    if type(value) not in kinds:
        names = " or ".join(kind.__name__ for kind in kinds)
        raise FormatError(f"a {type(value).__name__} where a {names} should be")


def _shown(text: str) -> str:
    return repr(text[:MAX_SHOWN])


def _check(metadata: Any, files: Mapping[str, int]) -> None:
    _expect(metadata, Metadata)
    _expect(metadata.state_dict_metadata, dict)
    for name, entry in metadata.state_dict_metadata.items():
        _expect(name, str)
        _expect(entry, TensorStorageMetadata, BytesStorageMetadata)
        if isinstance(entry, TensorStorageMetadata):
            _check_tensor(name, entry)
    _expect(metadata.storage_data, dict)
    for index, place in metadata.storage_data.items():
        _expect(index, MetadataIndex)
        _expect(place, _StorageInfo)
        _check_place(index.fqn, place, files)
    _check_paths(metadata.planner_data)
    _expect(metadata.storage_meta, StorageMeta, type(None))
    _expect(getattr(metadata, "version", None), str, type(None))


def _check_tensor(name: str, entry: TensorStorageMetadata) -> None:
    properties = entry.properties
    _expect(properties, TensorProperties)
    _expect(properties.dtype, torch.dtype)
    _expect(properties.layout, torch.layout)
    _expect(entry.size, torch.Size)
    _expect(entry.chunks, list)
    size = entry.size
    if min(size, default=0) < 0 or math.prod(size) * properties.dtype.itemsize >= MAX_BYTES:
        raise FormatError(f"tensor {_shown(name)} can't be of {math.prod(size)} elements")
    for chunk in entry.chunks:
        _expect(chunk, ChunkStorageMetadata)
        _expect(chunk.offsets, torch.Size)
        _expect(chunk.sizes, torch.Size)
        if not len(chunk.offsets) == len(chunk.sizes) == len(size) or not all(
            # An empty chunk may be said to lie anywhere.
            offset >= 0 and length >= 0 and (length == 0 or offset + length <= whole)
            for offset, length, whole in zip(chunk.offsets, chunk.sizes, size, strict=True)
        ):
            raise FormatError(
                f"a chunk of tensor {_shown(name)} is not within its {tuple(size)}: "
                f"{tuple(chunk.sizes)} at {tuple(chunk.offsets)}"
            )


def _check_place(name: str, place: _StorageInfo, files: Mapping[str, int]) -> None:
    _expect(place.relative_path, str)
    _expect(place.offset, int)
    _expect(place.length, int)
    if place.relative_path not in files:
        raise FormatError(
            f"{_shown(name)} is said to be in {_shown(place.relative_path)}, which is not a file "
            "of this checkpoint"
        )
    if not 0 <= place.offset <= place.offset + place.length <= files[place.relative_path]:
        raise FormatError(
            f"{_shown(name)} is said to be at {place.offset} in {place.relative_path!r}, "
            f"{place.length} bytes long, which is not within the file's "
            f"{files[place.relative_path]} bytes"
        )
    transforms = place.transform_descriptors
    _expect(transforms, list, tuple, type(None))
    if transforms:
        kinds = ", ".join(_shown(t) if type(t) is str else type(t).__name__ for t in transforms[:3])
        raise FormatError(
            f"{_shown(name)} was transformed when it was written, by {kinds}",
            hint="restore the files and load them with DCP's own reader, which may know how",
        )


def _check_paths(paths: Any) -> None:
    """Check where in a nested state each entry belongs, as DCP's own planner says it."""
    if paths is None:
        return
    _expect(paths, dict)
    for name, path in paths.items():
        _expect(name, str)
        _expect(path, tuple)
        for step in path:
            _expect(step, str, int)
            if type(step) is int and not 0 <= step < MAX_LIST_INDEX:
                raise FormatError(f"{_shown(name)} is said to be at {step} in a list")
