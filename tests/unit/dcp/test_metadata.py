from __future__ import annotations

import builtins
import os
import pickle
import pickletools
import struct
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path, PosixPath, PureWindowsPath
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
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
from torch.distributed.checkpoint.state_dict_saver import save

from ckpt_tiering.dcp import pickled
from ckpt_tiering.dcp.metadata import load_metadata
from ckpt_tiering.dcp.pickled import unpickle
from ckpt_tiering.errors import FormatError

FILES = {"__0_0.distcp": 1 << 40, "__1_0.distcp": 500}
SIZE = torch.Size


def tensor(*size: int, chunks: Any = None, **properties: Any) -> TensorStorageMetadata:
    whole = ChunkStorageMetadata(SIZE([0] * len(size)), SIZE(size))
    return TensorStorageMetadata(
        TensorProperties(**properties), SIZE(size), [whole] if chunks is None else chunks
    )


def index(**changes: Any) -> Metadata:
    """An index with everything that DCP's own writers put into one."""
    chunks = [
        ChunkStorageMetadata(SIZE([0, 0]), SIZE([4, 5])),
        ChunkStorageMetadata(SIZE([4, 0]), SIZE([3, 5])),
        ChunkStorageMetadata(SIZE([8, 0]), SIZE([0, 5])),
    ]
    metadata = Metadata(
        state_dict_metadata={
            "w": tensor(7, 5, chunks=chunks),
            "scalar": tensor(dtype=torch.bfloat16),
            "f8": tensor(3, dtype=torch.float8_e4m3fn, memory_format=torch.channels_last),
            "é" * 200: BytesStorageMetadata(),
            "opt.lr": BytesStorageMetadata(),
        },
        planner_data={"w": ("w",), "opt.lr": ("opt", "param_groups", 0, "lr")},
        storage_data={
            MetadataIndex("w", SIZE([0, 0]), 0): _StorageInfo("__0_0.distcp", 5, 1577),
            MetadataIndex("w", SIZE([4, 0]), 1): _StorageInfo("__0_0.distcp", 1 << 33, 1 << 35),
            MetadataIndex("opt.lr"): _StorageInfo("__1_0.distcp", 0, 500),
        },
        storage_meta=StorageMeta(PosixPath("/tmp/x"), "id", None, ["torch"]),
        version="1.0.0",
    )
    return replace(metadata, **changes)


def load(metadata: Any, protocol: int = 4) -> Metadata:
    return load_metadata(pickle.dumps(metadata, protocol), FILES)


# --- what DCP writes ------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", [4, 5])
def test_what_dcp_writes_is_read_as_stock_pickle_reads_it(protocol: int) -> None:
    assert load(index(), protocol) == index()
    found = load(index())
    assert [i.index for i in found.storage_data] == [0, 1, None]
    stored: Any = found.state_dict_metadata["w"]
    assert isinstance(stored.size, SIZE)
    assert load(index(), protocol).storage_data[MetadataIndex("w", [4, 0])].length == 1 << 35


def test_what_dcps_own_writer_wrote_is_read(tmp_path: Path) -> None:
    state = {
        "w": torch.randn(7, 5),
        "last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "complex": torch.zeros(3, dtype=torch.complex64),
        "nested": {"list": [1, {"x": 2.5}], "empty": {}, "text": "é"},
    }
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        save(state, checkpoint_id=tmp_path)
    data = (tmp_path / ".metadata").read_bytes()
    files = {p.name: p.stat().st_size for p in tmp_path.iterdir()}
    stock = pickle.loads(data)  # noqa: TID251  our own bytes
    assert load_metadata(memoryview(data), files) == stock


@pytest.mark.parametrize("field", ["planner_data", "storage_meta", "version"])
def test_what_may_be_missing_may_be_missing(field: str) -> None:
    assert load(index(**{field: None})) == index(**{field: None})


def test_ordered_dicts_and_old_names_are_read() -> None:
    ordered = index(state_dict_metadata=OrderedDict(index().state_dict_metadata))
    assert load(ordered) == ordered
    old = b"torch.distributed._shard.sharded_tensor.metadata"
    body = b"\x80\x04\x8c%c%b\x8c\x10TensorProperties\x93." % (len(old), old)
    assert unpickle(body).cls is TensorProperties


# --- what an attacker writes ----------------------------------------------------------------------


class Evil:
    def __init__(self, function: Any, *arguments: Any) -> None:
        self.reduced = (function, arguments)

    def __reduce__(self) -> Any:
        return self.reduced


def evil_calls(marker: Path) -> dict[str, Any]:
    command = f"touch {marker}"
    return {
        "os.system": Evil(os.system, command),
        "eval": Evil(eval, f"__import__('os').system({command!r})"),
        "getattr": Evil(getattr, "x", "upper"),
        "import": Evil(builtins.__import__, "os"),
        "torch.load": Evil(torch.load, str(marker)),
        "torch.storage": Evil(torch.storage._load_from_bytes, b"x"),
        "set_default_dtype": Evil(torch.set_default_dtype, torch.float64),
        "Path.touch": Evil(Path.touch, marker),
        "type": Evil(type, "T", (), {}),
        "windows": PureWindowsPath("x"),
    }


@pytest.mark.parametrize("kind", list(evil_calls(Path("x"))))
@pytest.mark.parametrize("where", ["top", "field", "key"])
def test_p12_nothing_is_called(kind: str, where: str, tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    evil = evil_calls(marker)[kind]
    payload: Any = evil
    if where == "field":
        payload = index(planner_data=evil)
    elif where == "key":
        payload = index(storage_data={evil: 1})
    with pytest.raises(FormatError, match="it needs ") as caught:
        load(payload)
    assert caught.value.hint
    assert not marker.exists()
    assert torch.get_default_dtype() is torch.float32


def opcodes(*parts: bytes) -> bytes:
    return b"\x80\x04" + b"".join(parts) + b"."


def text(value: str) -> bytes:
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def name(module: str, attribute: str) -> bytes:
    return text(module) + text(attribute) + b"\x93"


DCP = "torch.distributed.checkpoint.metadata"
CHUNK = name(DCP, "ChunkStorageMetadata")
INDEX = name(DCP, "MetadataIndex")
SIZE_CALL = name("torch", "Size")
DEEP = b")" + b"\x85" * 100_000
WIDE = b")" + b"\x94h\x00" + b"".join(b"\x86\x94h%c" % n for n in range(1, 120)) + b"\x86"


@pytest.mark.parametrize(
    "data",
    {
        "no bytes": b"",
        "no end": b"\x80\x04N",
        "only an end": b".",
        "two results": opcodes(b"NN"),
        "cut text": opcodes(b"X\xff\xff\xff\xffab"),
        "old protocol": b"\x80\x02}.",
        "GLOBAL": opcodes(b"cos\nsystem\n"),
        "INST": opcodes(b"(ios\nsystem\n"),
        "OBJ": opcodes(b"(o"),
        "EXT": opcodes(b"\x82\x01"),
        "PERSID": opcodes(b"Px\n"),
        "BINPERSID": opcodes(b"NQ"),
        "memory by PUT": opcodes(b"Nr\xff\xff\xff\x7f"),
        "memory by BYTEARRAY8": opcodes(b"\x96" + struct.pack("<Q", 1 << 40)),
        "memory by a long": opcodes(b"\x8b" + struct.pack("<i", 1 << 30)),
        "memory of nothing": opcodes(b"h\x05"),
        "dup": opcodes(b"N2"),
        "a longer number": opcodes(b"\x8a\x09" + bytes(9)),
        "hash of a bomb": opcodes(b"}", WIDE, b"Ns"),
        "hash of a deep tuple": opcodes(b"}", DEEP, b"Ns"),
        "hash of an index of a bomb": opcodes(
            b"}", INDEX, b")\x81}(", text("fqn"), WIDE, b"ub", b"Ns"
        ),
        "name of a bomb": opcodes(WIDE, text("x"), b"\x93"),
        "layout of a bomb": opcodes(name("torch.serialization", "_get_layout"), WIDE, b"\x85R"),
        "path of a bomb": opcodes(name("pathlib", "PosixPath"), WIDE, b"\x85R"),
        "size of a bomb": opcodes(SIZE_CALL, WIDE, b"R"),
        "size of texts": opcodes(SIZE_CALL, text("x"), b"\x85\x85R"),
        "size of too much": opcodes(SIZE_CALL, b"\x8a\x09" + b"\xff" * 8 + b"\x00", b"\x85\x85R"),
        "a class as a function": opcodes(CHUNK, b")R"),
        "a function as a class": opcodes(SIZE_CALL, b")\x81"),
        "a dtype as a function": opcodes(name("torch", "float32"), b")R"),
        "arguments for a class": opcodes(CHUNK, b"N\x85\x81"),
        "changes to a class": opcodes(CHUNK, b"}", text("__init__"), b"Nsb"),
        "changes to a class, by slots": opcodes(CHUNK, b"}}", text("__init__"), b"Ns\x86b"),
        "changes to an object": opcodes(
            CHUNK, b")\x81}(", text("offsets"), b"N", text("sizes"), b"Nub}", b"b"
        ),
        "unknown fields": opcodes(CHUNK, b")\x81}(", text("evil"), b"Nub"),
        "state that is no fields": opcodes(CHUNK, b")\x81Nb"),
        "properties that are none": opcodes(name(DCP, "TensorProperties"), b")\x81)b"),
        "appending to nothing": opcodes(b"Na"),
        "appending to a tuple": opcodes(b")Na"),
        "odd entries": opcodes(b"}(Nu"),
        "a mark of nothing": opcodes(b"u"),
        "torch.load": opcodes(name("torch", "load")),
        "torch._dynamo": opcodes(name("torch", "_dynamo")),
        "memory format": opcodes(name(DCP, "_MEM_FORMAT_ENCODING"), b"K\x09\x85R"),
    }.items(),
    ids=lambda item: item[0],
)
def test_p12_hostile_bytes_are_refused(data: tuple[str, bytes]) -> None:
    with pytest.raises(FormatError, match="not an index that DCP wrote"):
        unpickle(data[1])


@pytest.mark.parametrize(
    "data",
    [opcodes(CHUNK, b")\x81"), opcodes(CHUNK), opcodes(DEEP), opcodes(WIDE), opcodes(b"}")],
    ids=["no parts", "a class", "deep", "wide", "dictionary"],
)
def test_p12_what_is_no_index_is_refused(data: bytes) -> None:
    with pytest.raises(FormatError, match="where a Metadata should be"):
        load_metadata(data, FILES)


def test_p12_containers_that_are_filled_later_are_checked_too() -> None:
    """Through the memo, a list can be given other members after its tensor was made."""
    own = index()
    chunks: Any = own.state_dict_metadata["w"].chunks  # type: ignore[union-attr]
    chunks.append(chunks)
    with pytest.raises(FormatError, match="a list where a ChunkStorageMetadata should be"):
        load(own)


@given(st.data())
def test_p12_no_change_of_a_byte_does_more_than_fail(data: st.DataObject) -> None:
    good = bytearray(pickle.dumps(index()))
    for _ in range(data.draw(st.integers(1, 3))):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    try:
        load_metadata(bytes(good), FILES)
    except FormatError:
        return


@given(st.integers(0, 2000))
def test_p12_a_cut_index_is_refused(length: int) -> None:
    data = pickle.dumps(index())
    with pytest.raises(FormatError):
        load_metadata(data[: min(length, len(data) - 1)], FILES)


def test_every_instruction_is_one_that_pickle_writes() -> None:
    """Negative control of the tests above: they do not fail for a reason of their own."""
    known = {ord(code.code) for code in pickletools.opcodes}
    assert set(pickled._INSTRUCTIONS) < known
    assert unpickle(opcodes(b"}", text("k"), b"Ns")) == {"k": None}


# --- what contradicts itself ----------------------------------------------------------------------


def place(path: Any = "__1_0.distcp", offset: Any = 0, length: Any = 1, by: Any = None) -> Metadata:
    return index(storage_data={MetadataIndex("x"): _StorageInfo(path, offset, length, by)})


def chunk(offsets: Any, sizes: Any) -> Metadata:
    chunks = [ChunkStorageMetadata(offsets, sizes)]
    return index(state_dict_metadata={"w": tensor(7, 5, chunks=chunks)})


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (place("../__0_0.distcp"), "not a file of this checkpoint"),
        (place("/etc/passwd"), "not a file of this checkpoint"),
        (place("__9_0.distcp"), "not a file of this checkpoint"),
        (place("x" * 5000), "not a file of this checkpoint"),
        (place(7), "a int where a str"),
        (place(offset=-1), "not within the file's"),
        (place(length=-1), "not within the file's"),
        (place(offset=1, length=500), "not within the file's"),
        (place(offset=True), "a bool where a int"),
        (place(by=["zstd"]), "was transformed"),
        (place(by={"a": 1}), "a dict where"),
        (index(storage_data=None), "a NoneType where a dict"),
        (index(storage_data={MetadataIndex("x"): 3}), "a int where a _StorageInfo"),
        (index(storage_data={"x": 3}), "a str where a MetadataIndex"),
        (index(state_dict_metadata=[]), "a list where a dict"),
        (index(state_dict_metadata={"w": 3}), "a int where"),
        (index(state_dict_metadata={3: BytesStorageMetadata()}), "a int where a str"),
        (index(state_dict_metadata={"w": tensor(-1)}), "can't be of"),
        (index(state_dict_metadata={"w": tensor(1 << 31, 1 << 31)}), "can't be of"),
        (chunk(SIZE([5, 0]), SIZE([3, 5])), "is not within"),
        (chunk(SIZE([-1, 0]), SIZE([3, 5])), "is not within"),
        (chunk(SIZE([0, 0]), SIZE([-3, 5])), "is not within"),
        (chunk(SIZE([0]), SIZE([3])), "is not within"),
        (chunk(SIZE([0, 0]), SIZE([3])), "is not within"),
        (chunk((0, 0), SIZE([3, 5])), "a tuple where a Size"),
        (index(planner_data={"x": ["x"]}), "a list where a tuple"),
        (index(planner_data={"x": ("x", 1 << 40)}), "in a list"),
        (index(planner_data={"x": ("x", -1)}), "in a list"),
        (index(planner_data={"x": (None,)}), "a NoneType where"),
        (index(planner_data=[]), "a list where a dict"),
        (index(version=3), "a int where a str"),
        (index(storage_meta={}), "a dict where"),
    ],
)
def test_p12_contradictions_are_refused(bad: Metadata, why: str) -> None:
    with pytest.raises(FormatError, match=why) as caught:
        load(bad)
    assert len(str(caught.value)) < 600
