"""The items of a DCP data file, archives of ``torch.save``, decoded without running any code."""

from __future__ import annotations

import datetime as dt
import decimal
import fractions
import io
import pathlib
import threading
from functools import cache
from typing import IO, Any, cast

import torch
from torch.serialization import get_safe_globals, safe_globals

from ckpt_tiering.errors import FormatError

__all__ = ["harmless_object", "read_tensor"]

# `safe_globals` changes a table of the whole process.
_allowing = threading.Lock()


class _Stream(io.RawIOBase):
    """Reads memory without a copy of all of it, which `io.BytesIO` would make."""

    def __init__(self, data: memoryview) -> None:
        super().__init__()
        self._data = data
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: len(self._data)}[whence]
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        into = memoryview(buffer).cast("B")
        piece = self._data[self._at : self._at + len(into)]
        into[: len(piece)] = piece
        self._at += len(piece)
        return len(piece)


def _stream(data: memoryview) -> IO[bytes]:
    return cast("IO[bytes]", _Stream(data))


def read_tensor(data: memoryview, name: str) -> torch.Tensor:
    """Return the tensor of an archive, on the CPU.

    Raises:
        FormatError: It is not an archive of one tensor.
    """
    try:
        value = torch.load(_stream(data), map_location="cpu", weights_only=True)
    except Exception as error:  # a stranger's bytes fail in any way
        raise FormatError(
            f"tensor {name!r} can't be read as what torch.save writes: {_first_line(error)}",
            hint="only DCP's format torch_save is supported, not safetensors",
        ) from error
    if not isinstance(value, torch.Tensor):
        raise FormatError(f"{name!r} should be a tensor and is a {type(value).__name__}")
    return value


def harmless_object(data: memoryview, name: str) -> io.BytesIO:
    """Return an archive of the same object, made by this process of values and nothing else.

    DCP's planners unpickle what they are given with everything allowed.

    Raises:
        FormatError: The object is of a kind that could run code when it is read.
    """
    try:
        with _allowing:
            # What the user allowed already stays allowed afterwards.
            known = get_safe_globals()
            with safe_globals([kind for kind in _harmless() if kind not in known]):
                value = torch.load(_stream(data), weights_only=True)
    except Exception as error:  # a stranger's bytes fail in any way
        raise FormatError(
            f"object {name!r} is not made of plain values: {_first_line(error)}",
            hint="allow its class by torch.serialization.add_safe_globals, or, if you trust "
            "everybody who can write to the store, load with allow_pickle=True",
        ) from error
    made = io.BytesIO()
    torch.save(value, made)
    made.seek(0)
    return made


def _first_line(error: Exception) -> str:
    # torch says what it refused behind general advice.
    text = str(error).rpartition("WeightsUnpickler error:")[2]
    lines = (line.strip() for line in text.splitlines())
    return next(filter(None, lines), type(error).__name__)


@cache
def _harmless() -> list[Any]:
    """Return the kinds of values that are allowed besides torch's own."""
    kinds: list[Any] = [
        dt.date,
        dt.datetime,
        dt.time,
        dt.timedelta,
        dt.timezone,
        decimal.Decimal,
        fractions.Fraction,
        frozenset,
        pathlib.PosixPath,
        pathlib.PurePosixPath,
        range,
        slice,
    ]
    try:
        import numpy as np
    except ImportError:
        return kinds
    reconstruct = np.empty(0).__reduce__()[0]
    scalar = np.float64(0).__reduce__()[0]
    for module in ("numpy.core.multiarray", "numpy._core.multiarray"):  # before and since 2.0
        kinds += [(reconstruct, f"{module}._reconstruct"), (scalar, f"{module}.scalar")]
    kinds += [np.ndarray, np.dtype]
    # Not `object`: an array of those holds whatever its pickle says.
    kinds += [type(np.dtype(code)) for code in "?bBhHiIlLqQefdgFDGSUVmM"]
    return kinds
