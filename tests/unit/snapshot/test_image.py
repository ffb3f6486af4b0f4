from __future__ import annotations

import copy
import hashlib
import io
import os
import pickle
import random
import subprocess
import sys
import warnings
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.serialization import config as _config

from ckpt_tiering.errors import CapacityError
from ckpt_tiering.model.extent import HEADER_BYTES
from ckpt_tiering.snapshot import walk as walk_module
from ckpt_tiering.snapshot.arena import Arena
from ckpt_tiering.snapshot.image import TorchImage, Unsupported
from ckpt_tiering.snapshot.skeleton import Layout, lay_out
from ckpt_tiering.snapshot.walk import walk
from ckpt_tiering.units import MIB

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


config: Any = _config  # not annotated by torch


@dataclass
class Progress:
    step: int = 1
    losses: list[float] = field(default_factory=lambda: [1.0])


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena()
    yield made
    made.close()


def load(arena: Arena, *, weights_only: bool = False) -> Any:
    """Load the file that is in an arena; behind it may be remains of longer ones."""
    assert isinstance(arena.contents, Layout)
    file = arena.tensor[: arena.contents.num_bytes].numpy().tobytes()
    return torch.load(io.BytesIO(file), weights_only=weights_only)


def assert_equal(found: Any, wanted: Any) -> None:
    assert type(found) is type(wanted)
    if isinstance(wanted, torch.Tensor):
        assert (found.dtype, found.shape, found.stride()) == (
            wanted.dtype, wanted.shape, wanted.stride()
        )  # fmt: skip
        assert torch.equal(found, wanted)
    elif isinstance(wanted, np.ndarray):
        np.testing.assert_array_equal(found, wanted)
    elif isinstance(wanted, dict):
        assert list(found) == list(wanted)
        for key in wanted:
            assert_equal(found[key], wanted[key])
    elif isinstance(wanted, list | tuple):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            assert_equal(one, other)
    else:
        assert found == wanted


def example(seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    large = torch.randn(300, 300, generator=generator)
    return {
        "large": large,
        "small": torch.randn(7, generator=generator),
        "view": large[10:20],
        "step": seed,
    }


def test_changes_after_the_call_are_not_in_the_file(arena: Arena) -> None:
    large = torch.randn(400, 400)
    state: dict[str, Any] = {
        "cpu": torch.randn(10),
        "large": large,
        "view": large[5:7],
        "numpy": np.arange(5.0),
        "shares numpy": torch.from_numpy(np.arange(6.0)),
        "list": [1, [2]],
        "dict": {"a": {"b": 1}},
        "progress": Progress(),
        "rng": [torch.get_rng_state(), np.random.get_state(), random.getstate()],
    }
    image = TorchImage()
    for _ in range(2):  # laid out, and filled again
        wanted = copy.deepcopy(state)
        image.capture(state, arena)
        state["cpu"].add_(1)
        state["view"].zero_()
        state["large"].mul_(2)
        state["numpy"] += 1
        state["shares numpy"].numpy()[:] = 9
        state["list"][1].append(3)
        state["dict"]["a"]["b"] += 1
        state["progress"].step += 1
        state["progress"].losses.append(0.5)
        state["rng"][0].zero_()
        torch.rand(3), np.random.rand(3), random.random()
        assert_equal(load(arena), wanted)
        state["list"][1].pop()


def test_a_second_capture_has_the_new_values_and_nothing_of_the_old(arena: Arena) -> None:
    image = TorchImage()
    for seed in (1, 2, 300, 2**40):
        image.capture(example(seed), arena)
        assert_equal(load(arena, weights_only=True), example(seed))


def test_shapes_keys_and_types_may_change(arena: Arena) -> None:
    image = TorchImage()
    states: list[dict[str, Any]] = [
        example(),
        example() | {"small": torch.randn(8)},
        example() | {"small": torch.randn(7, dtype=torch.float64)},
        example() | {"more": torch.randn(1000, 100)},
        {"small": torch.zeros(2)},
        {"other": torch.zeros(2)},
        {"tied": [torch.zeros(2)] * 2},
        {"text": "x" * 100_000, "other": torch.ones(2)},
        {"text": "x", "other": torch.ones(2)},
        {},
    ]
    for state in states:
        length = image.capture(state, arena)
        assert isinstance(arena.contents, Layout)
        assert length == arena.contents.num_bytes
        assert_equal(load(arena), state)


def test_a_pickle_that_changes_its_length_keeps_the_layout(arena: Arena) -> None:
    image = TorchImage()
    image.capture({"w": torch.zeros(3), "step": 255}, arena)
    layout = arena.contents
    for step in (256, 70_000, 2**50, 1):
        image.capture({"w": torch.zeros(3), "step": step, "rng": random.getstate()[1][:20]}, arena)
        assert arena.contents is layout
        assert load(arena)["step"] == step


values = st.one_of(
    st.integers(), st.text(max_size=300), st.none(), st.lists(st.floats(allow_nan=False))
)
tensors = st.builds(
    lambda dtype, length, seed: (torch.arange(length) * (seed + 1) % 251).to(dtype),
    st.sampled_from([torch.uint8, torch.bool, torch.float32, torch.bfloat16, torch.complex128]),
    st.one_of(st.integers(0, 200), st.sampled_from([65_535, 65_536, 262_147])),
    st.integers(0, 100),
)
states = st.dictionaries(st.sampled_from("abcdefgh"), st.one_of(values, tensors))


@settings(max_examples=30)
@given(st.lists(st.tuples(states, st.integers(0, 1)), min_size=1, max_size=5))
def test_any_sequence_of_states_in_two_arenas(steps: list[tuple[dict[str, Any], int]]) -> None:
    image, arenas = TorchImage(), [Arena(), Arena()]
    last: dict[int, dict[str, Any]] = {}
    for state, which in steps:
        image.capture(state, arenas[which])
        last[which] = state
        for index, wanted in last.items():
            assert_equal(load(arenas[index]), wanted)
    for arena in arenas:
        arena.close()


def test_an_arena_that_another_wrote_to_is_laid_out_again(arena: Arena) -> None:
    one, other = TorchImage(), TorchImage()
    for seed in range(3):
        one.capture(example(seed), arena)
        assert_equal(load(arena), example(seed))
        other.capture({"x": torch.full((50_000,), seed)}, arena)
        assert_equal(load(arena), {"x": torch.full((50_000,), seed)})


def test_a_state_without_room_leaves_the_arena_alone() -> None:
    arena = Arena(has_room=lambda num_bytes: num_bytes < MIB)
    image = TorchImage()
    image.capture(example(1), arena)
    with pytest.raises(CapacityError):
        image.capture({"huge": torch.zeros(MIB)}, arena)
    assert_equal(load(arena), example(1))
    image.capture(example(2), arena)
    assert_equal(load(arena), example(2))
    arena.close()


class Fickle:
    """Never pickles to the same bytes."""

    count = 0

    def __reduce__(self) -> tuple[Any, ...]:
        Fickle.count += 1
        return int, (Fickle.count,)


def seen_as_two_types() -> dict[str, Any]:
    tensor = torch.zeros(4)
    return {"a": tensor, "b": tensor.view(torch.int32)}


def fake() -> dict[str, Any]:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return {"storage": torch.randn(3).untyped_storage()}


@pytest.mark.parametrize(
    "state",
    [
        pytest.param(seen_as_two_types(), id="two types"),
        pytest.param({"s": torch.empty(3, device="meta").untyped_storage()}, id="meta storage"),
        pytest.param(fake(), id="fake storage"),
        pytest.param({"fickle": Fickle()}, id="fickle"),
    ],
)
def test_what_cannot_be_laid_out_is_unsupported(state: Mapping[str, Any], arena: Arena) -> None:
    image = TorchImage()
    image.capture(example(1), arena)
    with pytest.raises(Unsupported):
        TorchImage().capture(state, arena)
    assert_equal(load(arena), example(1))


def test_what_cannot_be_pickled_raises_as_torch_save_does(arena: Arena) -> None:
    image = TorchImage()
    image.capture(example(1), arena)
    with pytest.raises((pickle.PicklingError, AttributeError)):
        image.capture({"function": lambda: None}, arena)
    assert_equal(load(arena), example(1))


def global_settings() -> tuple[Any, ...]:
    return (
        config.save.storage_alignment,
        config.save.compute_crc32,
        torch.serialization._serialization_tls.skip_data,
        torch.get_default_dtype(),
    )


@pytest.mark.parametrize("crc32", [True, False])
def test_settings_of_torch_are_left_as_they_were(arena: Arena, crc32: bool) -> None:
    with config.patch({"save.storage_alignment": 128, "save.compute_crc32": crc32}):
        before = global_settings()
        TorchImage().capture(example(), arena)
        assert global_settings() == before
        for state in (seen_as_two_types(), {"fickle": Fickle()}, {"function": lambda: None}):
            with pytest.raises((Unsupported, pickle.PicklingError, AttributeError)):
                TorchImage().capture(state, arena)
            assert global_settings() == before


def test_skip_data_is_off_again_when_torch_save_fails_after_it(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = global_settings()
    original = torch.serialization._get_storage_alignment

    def refuse_late() -> int:
        if torch.serialization._serialization_tls.skip_data:
            raise RuntimeError("no alignment")
        return original()

    monkeypatch.setattr(torch.serialization, "_get_storage_alignment", refuse_late)
    with pytest.raises(Unsupported, match="no alignment"):
        TorchImage().capture(example(), arena)
    monkeypatch.undo()
    assert global_settings() == before
    assert arena.capacity_bytes == 0


def test_another_default_device_does_not_matter(arena: Arena) -> None:
    image = TorchImage()
    state = example()
    torch.set_default_device("meta")
    try:
        image.capture(state, arena)
    finally:
        torch.set_default_device(None)
    assert_equal(load(arena), example())


def test_a_fast_walk_that_torch_outgrew_is_noticed(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = dict.fromkeys([torch.float32], torch.DoubleStorage)
    monkeypatch.setattr(walk_module, "_storage_types", lambda: wrong)
    image = TorchImage()
    for seed in range(2):
        image.capture(example(seed), arena)
        assert_equal(load(arena), example(seed))


def test_hooks_are_warned_of_as_by_torch_save(arena: Arena) -> None:
    tensor = torch.zeros(2, requires_grad=True)
    tensor.register_hook(lambda grad: grad)  # type: ignore[no-untyped-call]
    with pytest.warns(UserWarning, match="hook"):
        TorchImage().capture({"hooked": tensor}, arena)


def test_a_file_beyond_4_gib_is_laid_out(tmp_path: Path) -> None:
    """Only laid out: the storages are holes of a sparse file, and so is the result."""
    (tmp_path / "zeros").touch()
    os.truncate(tmp_path / "zeros", 5 << 30)
    huge: Any = torch.UntypedStorage.from_file(str(tmp_path / "zeros"), shared=True, nbytes=5 << 30)
    state = {"huge": torch.empty(0, dtype=torch.uint8).set_(huge), "small": torch.zeros(3)}
    now = walk(state, fast=True)
    layout = lay_out(state, now, compare=True)
    path = tmp_path / "file.pt"
    with path.open("wb") as file:
        file.truncate(layout.num_bytes)
        for offset, data in [*layout.pieces, (layout.pickle_at, now.pickled)]:
            os.pwrite(file.fileno(), data, offset)
        padded = now.pickled + bytes(layout.pickle_room - len(now.pickled))
    with path.open("rb") as written:
        for offset in layout.checksums_at:
            found = os.pread(written.fileno(), 4, offset)
            assert found == zlib.crc32(padded).to_bytes(4, "little")
    loaded = torch.load(path, mmap=True)
    assert loaded["huge"].shape == (5 << 30,)
    assert torch.equal(loaded["small"], torch.zeros(3))


READER = """
import hashlib, os, sys
fd, start, length = map(int, sys.argv[1:])
sys.stdin.readline()
print(hashlib.sha256(os.pread(fd, length, start)).hexdigest())
"""


def test_the_file_survives_in_another_process(arena: Arena) -> None:
    length = TorchImage().capture(example(), arena)
    digest = hashlib.sha256(arena.tensor[:length].numpy().tobytes()).hexdigest()
    with subprocess.Popen(
        [sys.executable, "-c", READER, str(arena.fd), str(HEADER_BYTES), str(length)],
        pass_fds=[arena.fd],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as reader:
        arena.close()
        assert reader.communicate("go\n", timeout=60)[0].strip() == digest


def test_thirty_captures_leave_descriptors_and_memory_flat(arena: Arena) -> None:
    image = TorchImage()
    state = {f"w{index}": torch.randn(MIB // 4) for index in range(16)} | {"s": torch.ones(5)}
    descriptors, resident = [], []
    for step in range(30):
        state["w0"].add_(1)
        image.capture(state | {"step": step**9}, arena)
        descriptors.append(len(list(Path("/proc/self/fd").iterdir())))
        resident.append(psutil.Process().memory_info().rss)
    assert descriptors[-1] == descriptors[0]
    assert resident[-1] <= 1.05 * resident[2]


def test_nothing_of_the_state_is_kept_alive(arena: Arena) -> None:
    import gc
    import weakref

    image, tensor = TorchImage(), torch.randn(100_000)
    gone = weakref.ref(tensor.untyped_storage())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        image.capture({"w": tensor}, arena)
    del tensor
    gc.collect()
    assert gone() is None
