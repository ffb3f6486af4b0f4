"""A reader of pickles that knows what DCP's ``.metadata`` consists of, and nothing else.

``pickle`` runs what it is told to; even with a list of allowed names, an attacker's file can change
the classes on that list, fill all memory from five bytes, or never end. This reader has no way to
call or change anything: of the pickle machine it knows the instructions that DCP's files have, and
of the things in them the classes of DCP's index, which it makes only of checked parts.
"""

from __future__ import annotations

import gc
import struct
from dataclasses import dataclass
from pathlib import PosixPath
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

from ckpt_tiering.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["unpickle"]

MAX_INT_BYTES = 8
MAX_NAME = 100  # characters of a stranger's text in a message
PROTOCOLS = frozenset({4, 5})  # what Python 3.8 and later write unless they are told otherwise
STOP = 0x2E
_DCP = "torch.distributed.checkpoint.metadata"
_OLD_DCP = "torch.distributed._shard.sharded_tensor.metadata"
_CLASSES: dict[tuple[str, str], type] = {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _StorageInfo,
    (_DCP, "BytesStorageMetadata"): BytesStorageMetadata,
    (_DCP, "ChunkStorageMetadata"): ChunkStorageMetadata,
    (_DCP, "Metadata"): Metadata,
    (_DCP, "MetadataIndex"): MetadataIndex,
    (_DCP, "StorageMeta"): StorageMeta,
    (_DCP, "TensorProperties"): TensorProperties,
    (_DCP, "TensorStorageMetadata"): TensorStorageMetadata,
    (_OLD_DCP, "TensorProperties"): TensorProperties,  # torch before 2.3
}


def _text(value: Any) -> str:
    # Not even to be shown, hashed or compared: nested tuples can make that take forever.
    if type(value) is not str:
        raise ValueError(f"a {type(value).__name__} where a text should be")
    return value


def _size(*arguments: Any) -> torch.Size:
    (dims,) = arguments
    if type(dims) is not tuple or any(type(dim) is not int for dim in dims):
        raise ValueError("a torch.Size of other things than numbers")
    return torch.Size(dims)


def _layout(*arguments: Any) -> torch.layout:
    (name,) = arguments
    found = vars(torch).get(_text(name).removeprefix("torch."))
    if type(found) is not torch.layout:
        raise ValueError(f"unknown layout {name[:MAX_NAME]!r}")
    return found


def _memory_format(*arguments: Any) -> torch.memory_format:
    (number,) = arguments
    if type(number) is not int:
        raise ValueError("a memory format that is no number")
    return (torch.contiguous_format, torch.channels_last, torch.preserve_format)[number]


def _path(*parts: Any) -> PosixPath:
    return PosixPath(*map(_text, parts))


def _ordered_dict(*arguments: Any) -> dict[Any, Any]:
    if arguments:
        raise ValueError("an OrderedDict with arguments")
    return {}


_CALLS: dict[tuple[str, str], Callable[..., Any]] = {
    ("collections", "OrderedDict"): _ordered_dict,
    ("pathlib", "PosixPath"): _path,
    ("pathlib._local", "PosixPath"): _path,  # Python 3.13
    ("torch", "Size"): _size,
    ("torch.serialization", "_get_layout"): _layout,
    (_DCP, "_MEM_FORMAT_ENCODING"): _memory_format,
    (_OLD_DCP, "MEM_FORMAT_ENCODING"): _memory_format,
}


@dataclass(slots=True, eq=False)
class _Global:
    """A name in the file that stands for something of ours."""

    cls: type | None = None
    call: Callable[..., Any] | None = None


@dataclass(slots=True, eq=False)
class _Draft:
    """An object whose parts have not been read yet, and where the file will refer to it."""

    cls: type
    memo_at: int | None = None


def _find(module: str, name: str) -> Any:
    if module == "torch":
        dtype = vars(torch).get(name)
        if isinstance(dtype, torch.dtype):
            return dtype
    known = (module, name)
    if known in _CLASSES:
        return _Global(cls=_CLASSES[known])
    if known in _CALLS:
        return _Global(call=_CALLS[known])
    full = f"{module}.{name}"
    raise ValueError(f"it needs {full[:MAX_NAME]}, which DCP's index does not consist of")


def _make(cls: type, state: Any) -> Any:
    """Make an object of its parts."""
    if cls is TensorProperties:
        dtype, layout, requires_grad, memory_format, pin_memory = state
        return TensorProperties(dtype, layout, requires_grad, memory_format, pin_memory)
    if type(state) is not dict:
        raise ValueError(f"a {cls.__name__} that is not made of fields")
    if cls is MetadataIndex:  # it is hashed before all is read
        fqn, offset, index = (state.get(field) for field in ("fqn", "offset", "index"))
        if type(fqn) is not str or type(offset) not in {torch.Size, type(None)}:
            raise ValueError("a MetadataIndex of other things than a name and an offset")
        if type(index) not in {int, type(None)}:
            raise ValueError("a MetadataIndex whose index is no number")
    return cls(**state)


class _Machine:
    """Runs the instructions of one file."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: list[Any] = []

    def run(self) -> Any:
        data, steps = self.data, _STEPS
        while (code := data[self.at]) != STOP:
            self.at += 1
            steps[code](self)
        (result,) = self.stack
        return result

    def refuse(self) -> None:
        code = self.data[self.at - 1]
        raise ValueError(f"it has instruction {code:#04x}, which DCP's index does not need")

    def take(self, num_bytes: int) -> bytes:
        piece = self.data[self.at : self.at + num_bytes]
        if len(piece) != num_bytes:
            raise ValueError("it ends too early")
        self.at += num_bytes
        return piece

    def pop_mark(self) -> list[Any]:
        mark = self.marks.pop()
        items = self.stack[mark:]
        del self.stack[mark:]
        return items

    def begin(self) -> None:
        (protocol,) = self.take(1)
        if protocol not in PROTOCOLS:
            raise ValueError(f"a pickle of protocol {protocol}; DCP writes 4 or 5")

    def skip_frame(self) -> None:
        self.take(8)  # the length of what follows; all of it is in memory

    # --- values ------------------------------------------------------------------------------

    def push_byte(self) -> None:
        self.stack.append(self.data[self.at])
        self.at += 1

    def push_number(self, form: struct.Struct) -> None:
        self.stack.append(form.unpack(self.take(form.size))[0])

    def push_long(self) -> None:
        (num_bytes,) = self.take(1)
        if num_bytes > MAX_INT_BYTES:
            raise ValueError("a number of more than 64 bits")
        self.stack.append(int.from_bytes(self.take(num_bytes), "little", signed=True))

    def push_text(self, length: struct.Struct) -> None:
        (num_bytes,) = length.unpack(self.take(length.size))
        self.stack.append(self.take(num_bytes).decode(errors="surrogatepass"))

    def push_tuple(self, length: int) -> None:
        items = tuple(self.stack[-length:])
        del self.stack[-length:]
        self.stack.append(items)

    def push_marked_tuple(self) -> None:
        self.stack.append(tuple(self.pop_mark()))

    # --- containers --------------------------------------------------------------------------

    def append(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not list:
            raise ValueError("items of something that is no list")
        target.extend(items)

    def append_one(self) -> None:
        self.append([self.stack.pop()])

    def append_many(self) -> None:
        self.append(self.pop_mark())

    def set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not dict:
            raise ValueError("entries of something that is no dictionary")
        for key, value in zip(items[::2], items[1::2], strict=True):
            # The hash of nested tuples can take forever, or all of the C stack.
            if type(key) not in {str, int, MetadataIndex}:
                raise ValueError(f"a dictionary with a {type(key).__name__} as key")
            target[key] = value

    def set_one(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self.set_items([key, value])

    def set_many(self) -> None:
        self.set_items(self.pop_mark())

    # --- objects -----------------------------------------------------------------------------

    def memoize(self) -> None:
        value = self.stack[-1]
        if type(value) is _Draft and value.memo_at is None:
            value.memo_at = len(self.memo)
        self.memo.append(value)

    def recall_byte(self) -> None:
        self.stack.append(self.memo[self.data[self.at]])
        self.at += 1

    def recall(self) -> None:
        (index,) = _UINT32.unpack(self.take(4))
        self.stack.append(self.memo[index])

    def push_global(self) -> None:
        name, module = _text(self.stack.pop()), _text(self.stack.pop())
        self.stack.append(_find(module, name))

    def new_object(self) -> None:
        arguments, kind = self.stack.pop(), self.stack.pop()
        if type(kind) is not _Global or kind.cls is None or arguments != ():
            raise ValueError("an object of no class, or with arguments")
        bare = kind.cls is BytesStorageMetadata  # has no parts
        self.stack.append(BytesStorageMetadata() if bare else _Draft(kind.cls))

    def reduce(self) -> None:
        arguments, kind = self.stack.pop(), self.stack.pop()
        if type(kind) is not _Global or kind.call is None or type(arguments) is not tuple:
            raise ValueError("a call of something that is no function")
        self.stack.append(kind.call(*arguments))

    def build(self) -> None:
        state, draft = self.stack.pop(), self.stack.pop()
        if type(draft) is not _Draft:
            raise ValueError("parts of something that is complete")
        made = _make(draft.cls, state)
        self.stack.append(made)
        if draft.memo_at is not None:
            self.memo[draft.memo_at] = made


_BYTE, _UINT16, _INT32, _UINT32 = map(struct.Struct, ("<B", "<H", "<i", "<I"))
# By the codes of `pickletools.opcodes`.
_INSTRUCTIONS: dict[int, Callable[[_Machine], None]] = {
    ord("("): lambda m: m.marks.append(len(m.stack)),
    ord(")"): lambda m: m.stack.append(()),
    ord("]"): lambda m: m.stack.append([]),
    ord("}"): lambda m: m.stack.append({}),
    ord("N"): lambda m: m.stack.append(None),
    0x88: lambda m: m.stack.append(True),
    0x89: lambda m: m.stack.append(False),
    ord("K"): _Machine.push_byte,
    ord("M"): lambda m: m.push_number(_UINT16),
    ord("J"): lambda m: m.push_number(_INT32),
    0x8A: _Machine.push_long,
    0x8C: lambda m: m.push_text(_BYTE),
    ord("X"): lambda m: m.push_text(_UINT32),
    0x85: lambda m: m.push_tuple(1),
    0x86: lambda m: m.push_tuple(2),
    0x87: lambda m: m.push_tuple(3),
    ord("t"): _Machine.push_marked_tuple,
    ord("a"): _Machine.append_one,
    ord("e"): _Machine.append_many,
    ord("s"): _Machine.set_one,
    ord("u"): _Machine.set_many,
    0x94: _Machine.memoize,
    ord("h"): _Machine.recall_byte,
    ord("j"): _Machine.recall,
    0x93: _Machine.push_global,
    0x81: _Machine.new_object,
    ord("R"): _Machine.reduce,
    ord("b"): _Machine.build,
    0x80: _Machine.begin,
    0x95: _Machine.skip_frame,
}


_STEPS = [_INSTRUCTIONS.get(code, _Machine.refuse) for code in range(256)]


def unpickle(data: bytes) -> Any:
    """Read a pickle of DCP's index; the result is of DCP's classes, and not checked any further.

    Raises:
        FormatError: It is anything else.
    """
    # Millions of objects are made and none is dropped: looking for garbage would take most of it.
    collecting = gc.isenabled()
    gc.disable()
    try:
        return _Machine(data).run()
    except (ValueError, TypeError, LookupError, ArithmeticError, struct.error) as error:
        raise FormatError(
            f"it is not an index that DCP wrote: {error}",
            hint="if you trust who wrote it, restore the files and load them with DCP's own reader",
        ) from error
    finally:
        if collecting:
            gc.enable()
