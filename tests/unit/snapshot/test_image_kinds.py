"""Whatever ``torch.save`` takes, the image holds the same: pickle, records, aliases."""

from __future__ import annotations

import io
import itertools
import random
import subprocess
import sys
import warnings
import zipfile
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.serialization import config as _config

from ckpt_tiering.snapshot.arena import Arena
from ckpt_tiering.snapshot.image import TorchImage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


# Not annotated by torch.
config: Any = _config
_TypedStorage: Any = torch.TypedStorage


@dataclass
class Progress:
    step: int = 3
    history: list[float] = field(default_factory=lambda: [0.5, 0.25])
    best: torch.Tensor = field(default_factory=lambda: torch.arange(3.0))


class Marked(torch.Tensor):
    pass


def aliased() -> dict[str, Any]:
    base = torch.randn(6, 4)
    return {
        "base": base,
        "tied": base,
        "view": base[1:3, ::2],
        "transposed": base.t(),
        "expanded": torch.randn(1, 3).expand(5, 3),
        "detached": base.detach(),
        "same name": "0",
    }


def quantized() -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        per_tensor = torch.quantize_per_tensor(torch.randn(4, 4), 0.1, 2, torch.quint8)
        scales, zeros = torch.tensor([0.1, 0.2]), torch.tensor([0, 1])
        per_channel = torch.quantize_per_channel(torch.randn(2, 3), scales, zeros, 0, torch.qint8)
    return {"tensor": per_tensor, "channel": per_channel}


def sparse() -> dict[str, Any]:
    dense = torch.tensor([[0.0, 2.0], [3.0, 0.0]])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {
            "coo": dense.to_sparse(),
            "csr": dense.to_sparse_csr(),
            "csc": dense.to_sparse_csc(),
        }


def attributed() -> dict[str, Any]:
    tensor = torch.randn(3)
    tensor.note = {"of": torch.zeros(2)}  # type: ignore[attr-defined]
    return {"noted": tensor, "marked": torch.randn(2).as_subclass(Marked)}


def storages() -> dict[str, Any]:
    tensor = torch.randn(5)
    typed = _TypedStorage(
        wrap_storage=tensor.untyped_storage(), dtype=torch.float32, _internal=True
    )
    untyped = torch.full((10,), 7, dtype=torch.uint8).untyped_storage()
    return {"tensor": tensor, "typed": typed, "untyped": untyped}


def module_and_optimizer() -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(5, 4)).sum().backward()
    optimizer.step()
    return {
        "model": model.state_dict(),
        "module": model,
        "optimizer": optimizer.state_dict(),
        "parameter": nn.Parameter(torch.randn(2)),
    }


def misaligned() -> dict[str, Any]:
    """Lengths that are no multiple of a word, small and beyond what is copied in one go."""
    sizes = [0, 1, 2, 3, 5, 63, 64, 65, 262_143, 262_144, 262_145, 1_000_003]
    return {str(size): torch.randint(0, 256, (size,)).to(torch.uint8) for size in sizes} | {
        "odd start": torch.arange(100, dtype=torch.uint8)[3:]
    }


def dtypes() -> dict[str, Any]:
    plain = {str(dtype): torch.ones(3).to(dtype) for dtype in (
        torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16,
        torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
        torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2,
    )}  # fmt: skip
    nans = torch.tensor([0x7FA00001, -1, 0x7F800001], dtype=torch.int32).view(torch.float32)
    return plain | {
        "nans": nans.repeat(200_000),
        "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
        "negative": torch.randn(3, dtype=torch.complex64).conj().imag,
    }


def plain_objects() -> dict[str, Any]:
    return {
        "progress": Progress(),
        "ordered": OrderedDict(a=1),
        "empty ordered": OrderedDict(),
        "nested": [({"x": {1, 2}}, (None, True, b"bytes", 1.5, "ü"))],
        "numpy": np.arange(10).reshape(2, 5),
        "numpy scalar": np.float32(2.5),
        "device": torch.device("cpu"),
        "dtype": torch.bfloat16,
        "size": torch.Size([1, 2]),
        "rng": (torch.get_rng_state(), np.random.get_state(), random.getstate()),
    }


def tensors_of_odd_shapes() -> dict[str, Any]:
    return {
        "scalar": torch.tensor(1.5),
        "empty": torch.empty(0),
        "empty rows": torch.empty(0, 4, dtype=torch.int32),
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "grad": torch.randn(3, requires_grad=True),
        "of a graph": (torch.randn(3, requires_grad=True) * 2).detach().requires_grad_(),
        "meta": torch.empty(3, device="meta"),
        "large": torch.randn(512, 513),
        "shared": torch.randn(10).share_memory_(),  # type: ignore[no-untyped-call]
    }


KINDS: list[Callable[[], dict[str, Any]]] = [
    aliased, quantized, sparse, attributed, storages, module_and_optimizer, misaligned, dtypes,
    plain_objects, tensors_of_odd_shapes, dict,
]  # fmt: skip


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena()
    yield made
    made.close()


def records(data: bytes) -> dict[str, bytes]:
    """Return what a zip file holds, found by its directory, checksums not looked at."""
    found = {}
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        for info in archive.infolist():
            header = data[info.header_offset : info.header_offset + 30]
            lengths = [int.from_bytes(header[at : at + 2], "little") for at in (26, 28)]
            start = info.header_offset + 30 + sum(lengths)
            name = info.filename.partition("/")[2]
            assert info.compress_type == zipfile.ZIP_STORED
            found[name] = data[start : start + info.file_size]
    return found


def stock(state: dict[str, Any]) -> dict[str, bytes]:
    stream = io.BytesIO()
    torch.save(state, stream)
    return records(stream.getvalue())


def captured(image: TorchImage, state: dict[str, Any], arena: Arena) -> bytes:
    length = image.capture(state, arena)
    assert length <= arena.capacity_bytes
    return arena.tensor[:length].numpy().tobytes()


def assert_same_file(data: bytes, state: dict[str, Any]) -> None:
    ours, theirs = records(data), stock(state)
    assert list(ours) == list(theirs)
    for name in ours:
        if name == "data.pkl":
            assert ours[name].rstrip(b"\0") == theirs[name].rstrip(b"\0")
            assert ours[name].startswith(theirs[name])
        elif name != ".data/serialization_id":  # a hash of checksums, which ours has not
            assert ours[name] == theirs[name], name


@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
def test_the_file_holds_what_torch_save_writes(make: Callable[[], Any], arena: Arena) -> None:
    image, state = TorchImage(), make()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # sparse CSR is beta, quantization deprecated: torch's say
        assert_same_file(captured(image, state, arena), state)
        assert_same_file(captured(image, state, arena), state)
        again = make()
        assert_same_file(captured(image, again, arena), again)


@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
def test_torch_load_reads_it(make: Callable[[], Any], arena: Arena, tmp_path: Path) -> None:
    state = make()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        file = tmp_path / "state.pt"
        file.write_bytes(captured(TorchImage(), state, arena))
        for mmap in (False, True):
            loaded = torch.load(file, weights_only=False, mmap=mmap)
            assert list(loaded) == list(state)
            assert stock(loaded)["data.pkl"] == stock(reloaded(state))["data.pkl"]


def reloaded(state: dict[str, Any]) -> dict[str, Any]:
    stream = io.BytesIO()
    torch.save(state, stream)
    stream.seek(0)
    loaded: dict[str, Any] = torch.load(stream, weights_only=False)
    return loaded


def test_weights_only_and_computed_offsets_read_it(arena: Arena, tmp_path: Path) -> None:
    state = aliased() | misaligned()
    file = tmp_path / "state.pt"
    file.write_bytes(captured(TorchImage(), state, arena))
    for computed, mmap in itertools.product((False, True), repeat=2):
        with config.patch({"load.calculate_storage_offsets": computed}):
            loaded = torch.load(file, weights_only=True, mmap=mmap)
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(loaded[name], value)
                assert loaded[name].stride() == value.stride()
        assert loaded["tied"].data_ptr() == loaded["base"].data_ptr()
        assert loaded["view"].untyped_storage()._cdata == loaded["base"].untyped_storage()._cdata


def test_zipfile_reads_the_pickle_and_names_the_first_tensor_as_unchecked(arena: Arena) -> None:
    image = TorchImage()
    for value in (1, 2, 2**40):
        data = captured(image, {"a": torch.randn(5), "b": value, "c": torch.randn(5)}, arena)
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            assert archive.read("archive/data.pkl").startswith(b"\x80\x02")
            assert archive.testzip() == "archive/data/0"
            with pytest.raises(zipfile.BadZipFile):
                archive.read("archive/data/0")


@pytest.mark.parametrize("alignment", [1, 4096])
def test_an_own_alignment_is_followed(arena: Arena, alignment: int) -> None:
    state = aliased() | misaligned()
    with config.patch({"save.storage_alignment": alignment}):
        assert_same_file(captured(TorchImage(), state, arena), state)


DISTRIBUTED = """
import io, os, tempfile, torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from ckpt_tiering.snapshot.arena import Arena
from ckpt_tiering.snapshot.image import TorchImage

with tempfile.NamedTemporaryFile() as file:
    dist.init_process_group("gloo", init_method=f"file://{file.name}", rank=0, world_size=1)
    tensor = distribute_tensor(torch.randn(4, 3), init_device_mesh("cpu", (1,)), [Shard(0)])
    arena, image = Arena(), TorchImage()
    for _ in range(2):
        tensor.to_local().add_(1)
        length = image.capture({"weight": tensor, "local": tensor.to_local()}, arena)
        data = arena.tensor[:length].numpy().tobytes()
        loaded = torch.load(io.BytesIO(data), weights_only=False)
        assert type(loaded["weight"]) is type(tensor)
        assert loaded["weight"].placements == tensor.placements
        assert torch.equal(loaded["weight"].to_local(), tensor.to_local())
        assert loaded["weight"].to_local().data_ptr() == loaded["local"].data_ptr()
    dist.destroy_process_group()
print("same")
"""


def test_a_dtensor_keeps_its_placements() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", DISTRIBUTED],
        check=False,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.stdout == "same\n", done.stderr
