"""P7, P13: DCP's data file laid out in memory is what DCP's own writer makes of the same items."""

from __future__ import annotations

import gc
import io
import warnings
from typing import TYPE_CHECKING, Any, BinaryIO

import pytest
import torch
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex

from ckpt_tiering.snapshot.archives import pickle_object
from ckpt_tiering.snapshot.arena import Arena
from ckpt_tiering.snapshot.distcp import DistcpFiles, DistcpLayout, is_plain
from ckpt_tiering.snapshot.garbage import no_collection

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

DTYPES = (
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8,
    torch.bool, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16,
)  # fmt: skip


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena()
    yield made
    made.close()


def put(
    arena: Arena, layout: DistcpLayout, objects: list[Any], tensors: list[torch.Tensor]
) -> bytes:
    arena.reserve(layout.num_bytes)
    layout.put(arena, objects, tensors)
    return arena.tensor[: layout.num_bytes].numpy().tobytes()


def file_of(arena: Arena, objects: list[Any], tensors: list[torch.Tensor]) -> bytes:
    """Lay items out from scratch, in memory and through a stream, which must be the same."""
    layout = DistcpLayout(objects, tensors)
    data = put(arena, layout, objects, tensors)
    stream = io.BytesIO()
    layout.write(stream, objects, tensors)
    assert stream.getvalue() == data
    return data


def items_of(data: bytes, layout: DistcpLayout, objects: list[Any]) -> list[bytes]:
    return [data[offset : offset + length] for offset, length in layout.places(objects)]


def load(item: bytes) -> Any:
    return torch.load(io.BytesIO(item), weights_only=False)


def some(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randint(0, 2, shape).to(dtype)


def kinds() -> dict[str, torch.Tensor]:
    base = torch.arange(600.0)
    made = {f"{dtype}-{shape}": some(dtype, *shape) for dtype in DTYPES for shape in ((), (7, 3))}
    return made | {
        "empty": torch.empty(0, 4),
        "view": base[10:20],
        "odd-view": base.view(torch.uint8)[3:50],
        "strided": base.view(20, 30)[::3, 1::2],
        "transposed": base.view(20, 30).t(),
        "channels-last": torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        "expanded": torch.tensor([5.0]).expand(9),
        "large": torch.randn(300, 1001),
        "large-odd": torch.arange(1_000_003, dtype=torch.int32).to(torch.uint8),
        "large-at-odd": torch.arange(1_000_003, dtype=torch.int32).to(torch.uint8)[1:],
        "large-transposed": torch.randn(300, 1001).t()[2:],
        "parameter": torch.nn.Parameter(torch.randn(3, 3)),
        "ones": torch.randn(1, 5).as_strided((1, 5), (100, 1)),
    }


@pytest.fixture
def no_checksums() -> Iterator[None]:
    torch.serialization.set_crc32_options(False)
    yield
    torch.serialization.set_crc32_options(True)


@pytest.mark.usefixtures("no_checksums")
def test_p13_each_item_is_the_bytes_of_the_stock_writer(arena: Arena, tmp_path: Path) -> None:
    tensors = kinds()
    assert all(is_plain(tensor) for tensor in tensors.values())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state_dict_saver.save(
            dict(tensors), storage_writer=FileSystemWriter(tmp_path, sync_files=False), no_dist=True
        )
    stock = FileSystemReader(tmp_path).read_metadata()
    written = (tmp_path / "__0_0.distcp").read_bytes()
    layout = DistcpLayout([], list(tensors.values()))
    ours = file_of(arena, [], list(tensors.values()))
    for (name, tensor), item in zip(tensors.items(), items_of(ours, layout, []), strict=True):
        info = stock.storage_data[MetadataIndex(name, [0] * tensor.dim())]
        assert item == written[info.offset : info.offset + info.length], name
    assert all(offset % 64 == 0 for offset, _ in layout.places([]))
    assert torch.serialization.get_crc32_options() is False


def test_checksums_of_others_stay_turned_on() -> None:
    DistcpLayout([pickle_object({"a": 1})], [torch.zeros(41, 3)])
    assert torch.serialization.get_crc32_options() is True


def test_p7_conjugates_and_negatives_are_stored_as_what_they_say(arena: Arena) -> None:
    numbers = torch.randn(4, 5, dtype=torch.complex64)
    tensors = [numbers.conj(), numbers.conj().imag, numbers.t().conj()]
    layout = DistcpLayout([], tensors)
    data = file_of(arena, [], tensors)
    for tensor, item in zip(tensors, items_of(data, layout, []), strict=True):
        assert torch.equal(load(item), tensor)


def test_p7_items_may_share_memory_and_need_no_gradient(arena: Arena) -> None:
    base = torch.nn.Parameter(torch.arange(200_000.0))
    tensors = [base, base[5:9], base.view(2, -1).t()]
    layout = DistcpLayout([], tensors)
    data = file_of(arena, [], tensors)
    for tensor, item in zip(tensors, items_of(data, layout, []), strict=True):
        loaded = load(item)
        assert torch.equal(loaded, tensor)
        assert not loaded.requires_grad


def test_p7_values_of_other_strides_go_to_the_same_places(arena: Arena) -> None:
    tensors = [torch.randn(300, 1001), torch.randn(4, 5)]
    layout = DistcpLayout([], tensors)
    put(arena, layout, [], tensors)
    later = [torch.randn(1001, 300).t(), torch.randn(8, 10)[::2, ::2]]
    assert layout.holds([], later)
    data = put(arena, layout, [], later)
    assert all(
        torch.equal(load(item), tensor)
        for item, tensor in zip(items_of(data, layout, []), later, strict=True)
    )
    stream = io.BytesIO()
    layout.write(stream, [], later)
    assert stream.getvalue() == data
    assert not layout.holds([], [later[0], torch.randn(5, 4)])
    assert not layout.holds([], [later[0], later[1].double()])
    assert not layout.holds([], later[:1])


def test_p7_objects_change_within_their_room(arena: Arena) -> None:
    """Nothing moves; zeros follow a pickle that became shorter."""
    shared = torch.randn(10)

    def values(n: int) -> list[Any]:
        state = {"seen": list(range(n)), "text": "é" * n}
        return [n, None, 1e300, True, "s" * n, state, (shared + n, shared[:3] + n), float(n)]

    first = [pickle_object(value) for value in values(3)]
    tensors = [torch.ones(3)]
    layout = DistcpLayout(first, tensors)
    for n in (3, 40, 0, 7):
        objects = [pickle_object(value) for value in values(n)]
        assert layout.holds(objects, tensors)
        tensors[0].fill_(n)
        data = put(arena, layout, objects, tensors)
        fresh = Arena()
        assert put(fresh, layout, objects, tensors) == data
        fresh.close()
        loaded = [load(item) for item in items_of(data, layout, objects)]
        assert loaded[:6] == values(n)[:6]
        assert all(map(torch.equal, loaded[6], values(n)[6]))
        assert loaded[7] == float(n)
        assert torch.equal(loaded[8], tensors[0])
        file_of(arena, objects, tensors)  # somebody else's contents in between


def test_objects_that_outgrow_their_room_are_noticed() -> None:
    layout = DistcpLayout([pickle_object({"a": 1}), pickle_object(1)], [])
    assert layout.holds([pickle_object({"a": "x" * 4000}), pickle_object(1 << 60)], [])
    assert not layout.holds([pickle_object({"a": "x" * 5000}), pickle_object(1)], [])
    assert not layout.holds([pickle_object({"a": 1}), pickle_object("x" * 100)], [])
    assert not layout.holds([pickle_object({"a": torch.ones(1)}), pickle_object(1)], [])
    large = pickle_object({"a": "x" * 9000})
    assert DistcpLayout([large], []).holds([pickle_object({"a": "x" * 18000})], [])


def test_archives_that_somebody_else_made_are_taken_as_they_are(arena: Arena) -> None:
    def archive(value: Any) -> bytes:
        stream = io.BytesIO()
        torch.save(value, stream)
        return stream.getvalue()

    objects: list[Any] = [archive([1, 2]), archive("x")]
    layout = DistcpLayout(objects, [torch.ones(2)])
    for objects in ([archive([1, 2]), archive("x")], [archive([3]), archive("y" * 70)]):
        assert layout.holds(objects, [torch.ones(2)])
        data = put(arena, layout, objects, [torch.ones(2)])
        assert items_of(data, layout, objects)[:2] == objects
    assert not layout.holds([archive([1]), archive("y" * 999)], [torch.ones(2)])


def test_what_is_not_plain_is_pickled(arena: Arena) -> None:
    sparse = torch.eye(3).to_sparse()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantized = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
        assert not is_plain(sparse)
        assert not is_plain(quantized)
        objects = [pickle_object(sparse), pickle_object(quantized)]
        layout = DistcpLayout(objects, [])
        items = items_of(put(arena, layout, objects, []), layout, objects)
        assert torch.equal(load(items[0]).to_dense(), torch.eye(3))
        assert torch.equal(load(items[1]).dequantize(), quantized.dequantize())


def test_small_files_lie_behind_at_pages_of_their_own(arena: Arena) -> None:
    tensors = [torch.randn(5000)]
    others = {"d/.metadata": b"m" * 5000, "d/meta.pt": b"", "d/x": b"x"}
    files = DistcpFiles("d/__0_0.distcp", DistcpLayout([], tensors), [], tensors, others)
    extents = {extent.path: extent for extent in files.capture(arena)}
    assert [extent.offset % 4096 for extent in extents.values()] == [0] * 4
    memory = arena.tensor.numpy().tobytes()
    streams: dict[str, io.BytesIO] = {}

    class Kept(io.BytesIO):
        def close(self) -> None:
            pass

    def open_file(path: str) -> BinaryIO:
        return streams.setdefault(path, Kept())

    files.write(open_file)
    assert streams.keys() == extents.keys()
    for path, extent in extents.items():
        data = memory[extent.offset : extent.offset + extent.size_bytes]
        assert data == streams[path].getvalue() == others.get(path, data)


def test_a_rank_without_items_has_an_empty_file(arena: Arena) -> None:
    files = DistcpFiles("__3_0.distcp", DistcpLayout([], []), [], [], {})
    assert [extent.size_bytes for extent in files.capture(arena)] == [0]


def test_p8_no_collection_falls_into_a_copy_and_the_collector_goes_on_after_it() -> None:
    with no_collection():
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    try:
        with no_collection():
            pass
        assert not gc.isenabled(), "whoever turned it off keeps it off"
    finally:
        gc.enable()
