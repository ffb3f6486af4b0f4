"""Pickle a state as ``torch.save`` does, with the tensors' memory left aside."""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.serialization import location_tag
from torch.storage import TypedStorage, UntypedStorage

from ckpt_tiering.errors import CkptTieringError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Unsupported", "Walk", "walk"]

# Not annotated by torch, all of them.
_AnyTypedStorage: Any = TypedStorage
_serialization: Any = torch.serialization
_storage: Any = torch.storage

READABLE_DEVICES = frozenset({"cpu", "cuda"})


class Unsupported(CkptTieringError):  # noqa: N818  a detour, not a failure
    """A state that can't be laid out in memory; stock ``torch.save`` decides what becomes of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Walk:
    """A state of one instant, apart from its storages' bytes, which still are the user's.

    Attributes:
        pickled: What ``torch.save`` writes as ``data.pkl``, byte for byte.
        storages: The storages in the order of their records, each once.
        sizes: Their lengths in bytes.
        addresses: Where they begin; 0 for one that is empty or not in the CPU's memory.
    """

    pickled: bytes
    storages: tuple[UntypedStorage, ...]
    sizes: tuple[int, ...]
    addresses: tuple[int, ...]


def walk(state: Mapping[str, Any], *, fast: bool) -> Walk:
    """Pickle a state.

    Args:
        state: What to pickle. Code of its objects runs, as with any pickling.
        fast: Take plain tensors apart here instead of by ``Tensor.__reduce_ex__``, which takes
            twice as long. The result is the same as long as torch's internals are; the caller
            compares before it relies on it.

    Raises:
        Unsupported: Some tensor's memory can't be read as plain bytes.
    """
    stream = io.BytesIO()
    pickler = (_FastPickler if fast else _StockPickler)(stream)
    pickler.dump(state)
    return Walk(
        pickled=stream.getvalue(),
        storages=tuple(pickler.storages),
        sizes=tuple(pickler.sizes),
        addresses=tuple(pickler.addresses),
    )


class _Reference:
    """Stands for a storage in what the fast pickler hands to pickle; ready made."""

    __slots__ = ("persistent_id",)

    def __init__(self, persistent_id: tuple[Any, ...]) -> None:
        self.persistent_id = persistent_id


class _NoHooks:
    """Stands for the empty ``OrderedDict`` that is pickled with each tensor, at half its cost."""

    __slots__ = ()


class _KnownTypes(dict[type, bool]):
    """Whether a type is a storage's; a plain lookup, as it is asked for every object pickled."""

    def __missing__(self, kind: type) -> bool:
        self[kind] = (
            kind is _Reference or issubclass(kind, TypedStorage) or kind in torch._storage_classes  # noqa: SLF001  what torch.is_storage looks in
        )
        return self[kind]


class _StockPickler(pickle.Pickler):
    """As ``torch.serialization._save`` pickles, but for the check of what can be read."""

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream, protocol=torch.serialization.DEFAULT_PROTOCOL)
        self.storages: list[UntypedStorage] = []
        self._is_storage = _KnownTypes()
        self.sizes: list[int] = []
        self.addresses: list[int] = []
        self._known: dict[int, tuple[str, torch.dtype]] = {}
        self._dtypes: dict[int, torch.dtype] = {}

    def persistent_id(self, obj: Any) -> tuple[Any, ...] | None:
        if not self._is_storage[type(obj)]:
            return None
        if type(obj) is _Reference:
            return obj.persistent_id
        kind: Any
        if isinstance(obj, _AnyTypedStorage):
            storage, dtype = obj._untyped_storage, obj.dtype  # noqa: SLF001  as torch.save
            kind = getattr(torch, obj._pickle_storage_type())  # noqa: SLF001
            length = obj._size()  # noqa: SLF001
        else:
            storage, dtype = obj, torch.uint8
            kind = _serialization.normalize_storage_type(type(obj))
            length = obj.nbytes()
        key = self.key_of(storage, dtype)
        return "storage", kind, key, location_tag(storage), length

    def key_of(self, storage: UntypedStorage, dtype: torch.dtype) -> str:
        """Return the name of a storage's record; the same storage has the same."""
        identity = storage._cdata  # noqa: SLF001  as torch.save; two views have two Python objects
        known = self._known.get(identity)
        if known is None:
            known = self._known[identity] = self._register(storage, dtype)
        if known[1] != dtype:
            raise Unsupported(f"a storage seen as {known[1]} and as {dtype}")
        return known[0]

    def _register(self, storage: UntypedStorage, dtype: torch.dtype) -> tuple[str, torch.dtype]:
        size = storage.nbytes()
        device = storage.device.type
        if device not in READABLE_DEVICES:
            raise Unsupported(f"a storage of {size} bytes on the device {device}")
        address = storage.data_ptr()
        if size and not address:
            raise Unsupported(f"a storage of {size} bytes without memory")
        if address:  # two storages may share memory, and torch.save wants them of one type
            dtype = self._dtypes.setdefault(address, dtype)
        self.storages.append(storage)
        self.sizes.append(size)
        self.addresses.append(address if size and device == "cpu" else 0)
        return str(len(self.storages) - 1), dtype


def _storage_types() -> dict[torch.dtype, Any]:
    """Return the class that ``torch.save`` names for each dtype of a ``_rebuild_tensor_v2``."""
    names = _storage._dtype_to_storage_type_map()  # noqa: SLF001
    newer = _storage._new_dtypes()  # noqa: SLF001
    return {dtype: getattr(torch, name) for dtype, name in names.items() if dtype not in newer}


class _FastPickler(_StockPickler):
    """Takes plain tensors apart itself; all others go torch's way."""

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream)
        self._storage_types = _storage_types()

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is not torch.Tensor:
            return (OrderedDict, ()) if type(obj) is _NoHooks else NotImplemented
        storage_type = self._storage_types.get(obj.dtype)
        if storage_type is None or obj.__dict__ or not _is_plain(obj):
            return NotImplemented
        storage = obj.untyped_storage()
        key = self.key_of(storage, obj.dtype)
        location = "cpu" if obj.is_cpu else location_tag(storage)
        length = storage.nbytes() // obj.itemsize
        reference = _Reference(("storage", storage_type, key, location, length))
        shape = (obj.storage_offset(), tuple(obj.size()), obj.stride())
        arguments = (reference, *shape, obj.requires_grad, _NoHooks())
        return torch._utils._rebuild_tensor_v2, arguments  # noqa: SLF001  what the file names


def _is_plain(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is all said by storage, dtype, offset, shape and strides."""
    return (
        (tensor.is_cpu or tensor.is_cuda)
        and tensor.layout is torch.strided
        and not (tensor.is_quantized or tensor.is_nested)
        and not (tensor.is_conj() or tensor.is_neg())
        and not tensor._backward_hooks  # noqa: SLF001  of which torch warns
    )
