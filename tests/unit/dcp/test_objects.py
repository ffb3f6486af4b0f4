from __future__ import annotations

import datetime as dt
import io
import os
import random
from collections import Counter, OrderedDict
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PosixPath
from typing import Any

import numpy as np
import pytest
import torch
from torch.serialization import add_safe_globals, get_safe_globals

from ckpt_tiering.dcp.objects import harmless_object, read_tensor
from ckpt_tiering.errors import FormatError


def archive(value: Any) -> memoryview:
    made = io.BytesIO()
    torch.save(value, made)
    return memoryview(made.getvalue())


def through(value: Any) -> Any:
    return torch.load(harmless_object(archive(value), "x"), weights_only=False)


@pytest.mark.parametrize(
    "value",
    [
        None, True, -(1 << 80), 2.5, 1j, "é", b"\x00\xff", bytearray(b"x"), [1, [2]], (1, (2,)),
        {"a": 1}, {1, 2}, frozenset({1}), OrderedDict(a=1), Counter("aab"), slice(1, 5, 2),
        range(3), torch.float16, torch.Size([1, 2]), torch.device("cpu"),
        dt.datetime(2026, 1, 2, 3, tzinfo=dt.UTC), dt.date(2026, 1, 2), dt.timedelta(days=1),
        dt.time(3), Decimal("1.5"), Fraction(1, 3), PosixPath("/x/y"),
        np.float64(2.5), np.int32(7), np.bool_(True), np.datetime64("2026-01-02"), np.str_("x"),
        random.Random(3).getstate(),
    ],
    ids=lambda value: repr(value)[:40],
)  # fmt: skip
def test_plain_values_come_through(value: Any) -> None:
    found = through(value)
    assert found == value
    assert type(found) is type(value)


def test_arrays_tensors_and_random_states_come_through() -> None:
    arrays = [
        np.arange(6).reshape(2, 3),
        np.array(["a", "bc"]),
        np.zeros(2, dtype=[("x", "f4"), ("y", "i8")]),
        np.asfortranarray(np.ones((2, 3), np.float16)),
    ]
    for array in arrays:
        found = through(array)
        assert (found == array).all()
        assert found.dtype == array.dtype
    shared = torch.arange(4)
    found = through({"a": shared, "b": shared[1:], "rng": torch.get_rng_state()})
    assert torch.equal(found["a"], shared)
    assert found["a"].untyped_storage().data_ptr() == found["b"].untyped_storage().data_ptr()
    state: Any = np.random.RandomState(3).get_state()
    assert (through(state)[1] == state[1]).all()


class Evil:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.marker}",)


def test_p12_an_object_that_runs_code_is_refused_and_does_not(tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    for value in (Evil(marker), [{"deep": Evil(marker)}], np.array([Evil(marker)], dtype=object)):
        with pytest.raises(FormatError, match=r"object 'opt\.x' is not made of plain") as caught:
            harmless_object(archive(value), "opt.x")
        assert "allow_pickle" in (caught.value.hint or "")
        assert not marker.exists()
    with pytest.raises(FormatError, match="tensor 'w' can't be read"):
        read_tensor(archive(Evil(marker)), "w")
    assert not marker.exists()


class Own:
    def __init__(self) -> None:
        self.value = 3


def test_classes_that_the_user_allows_come_through_and_stay_allowed() -> None:
    with pytest.raises(FormatError, match="Own"):
        through(Own())
    before = get_safe_globals()
    add_safe_globals([Own, np.ndarray])
    try:
        assert through(Own()).value == 3
        assert Own in get_safe_globals()
        assert np.ndarray in get_safe_globals()
        assert np.dtype not in get_safe_globals(), "what was allowed for us is not any more"
    finally:
        torch.serialization.clear_safe_globals()
        add_safe_globals(before)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(7, 5),
        torch.zeros(()),
        torch.zeros(0, 3),
        torch.randn(5, 7).t(),
        torch.arange(3).to(torch.float8_e4m3fn),
        torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.randn(3, dtype=torch.complex64),
    ],
)
def test_tensors_come_through(tensor: torch.Tensor) -> None:
    found = read_tensor(archive(tensor), "w")
    assert found.dtype == tensor.dtype
    assert torch.equal(found.to(torch.complex64), tensor.to(torch.complex64))
    assert found.stride() == tensor.stride()


@pytest.mark.parametrize("data", [b"", b"x" * 100, bytes(archive(torch.ones(3)))[:-30]])
def test_p12_what_is_no_tensor_is_refused(data: bytes) -> None:
    with pytest.raises(FormatError, match="'w'"):
        read_tensor(memoryview(data), "w")


def test_p12_an_object_in_the_place_of_a_tensor_is_refused() -> None:
    with pytest.raises(FormatError, match="should be a tensor and is a dict"):
        read_tensor(archive({"a": 1}), "w")
