from __future__ import annotations

import contextlib
import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tiering.errors import FormatError
from ckpt_tiering.model import manifest as module
from ckpt_tiering.model.manifest import Manifest, NodeManifest, decode, encode, make_manifest
from tests.unit.model.documents import (
    as_json,
    dir_entry,
    file_entry,
    link_entry,
    manifest,
    node_manifest,
    sha256,
    with_bytes,
)
from tests.unit.model.strategies import legal_paths

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), text
)
times = st.floats(0, 1e12)


@given(
    path=legal_paths,
    data=st.binary(max_size=20),
    name=st.none() | text,
    metadata=st.dictionaries(text, scalars, max_size=4),
    at=times,
)
def test_p1_a_document_is_read_back_as_it_was(
    path: str, data: bytes, name: str | None, metadata: dict[str, Any], at: float
) -> None:
    node = node_manifest([file_entry(path, data)], name=name, metadata=metadata, snapshot_at=at)
    again = decode(NodeManifest, encode(node), "node")
    assert again == node
    assert encode(again) == encode(node)
    whole = manifest(node)
    assert decode(Manifest, encode(whole), "manifest") == whole
    assert {k: type(v) for k, v in again.metadata.items()} == {
        k: type(v) for k, v in metadata.items()
    }


def three_nodes() -> list[NodeManifest]:
    return [
        node_manifest([file_entry(f"r{i}.pt")], node=f"n{i:05d}", num_nodes=3, snapshot_at=float(i))
        for i in range(3)
    ]


@given(st.permutations(range(3)))
def test_p2_the_manifest_does_not_depend_on_who_makes_it(order: list[int]) -> None:
    nodes = three_nodes()
    mine = make_manifest([with_bytes(nodes[i]) for i in order])
    read = [decode(NodeManifest, encode(node), "n") for node in nodes]
    theirs = make_manifest([with_bytes(node) for node in read])
    assert encode(mine) == encode(theirs)
    assert [ref.node for ref in mine.nodes] == ["n00000", "n00001", "n00002"]
    assert mine.nodes[0].sha256 == sha256(encode(nodes[0]))
    assert (mine.num_files, mine.total_bytes, mine.snapshot_at) == (3, 3 << 20, 2.0)


def test_p3_the_weakest_verification_labels_the_save() -> None:
    nodes = three_nodes()
    weak = nodes[1].objects[0].model_copy(update={"verified": "read-back"})
    nodes[1] = nodes[1].model_copy(update={"objects": (weak,)})
    assert manifest(*nodes).verified == "read-back"
    assert manifest(*three_nodes()).verified == "checksum"


@pytest.mark.parametrize(
    "other",
    [
        node_manifest(node="n00001", num_nodes=2, save_id="000000000101-abcd"),
        node_manifest(node="n00001", num_nodes=2, name="another"),
        node_manifest(node="n00001", num_nodes=3),
        node_manifest([file_entry("a")], node="n00001", num_nodes=2),
        node_manifest([file_entry("a/b")], node="n00001", num_nodes=2),
        node_manifest([link_entry("a", "b")], node="n00001", num_nodes=2),
        node_manifest(node="n00000", num_nodes=2),
    ],
    ids=["id", "name", "number", "same file", "below a file", "link for file", "node twice"],
)
def test_p1_nodes_in_disagreement_make_no_manifest(other: NodeManifest) -> None:
    first = node_manifest([file_entry("a")], num_nodes=2)
    with pytest.raises(FormatError):
        make_manifest([with_bytes(first), with_bytes(other)])


@pytest.mark.parametrize("count", [1, 2])
def test_p1_fewer_or_more_nodes_than_expected_make_no_manifest(count: int) -> None:
    nodes = [node_manifest(node=f"n{i:05d}", num_nodes=3 - count) for i in range(count)]
    with pytest.raises(FormatError, match=r"names \d nodes of \d"):
        make_manifest([with_bytes(node) for node in nodes])


def test_nodes_may_have_directories_in_common() -> None:
    nodes = [node_manifest([dir_entry("d")], node=f"n{i:05d}", num_nodes=2) for i in range(2)]
    assert manifest(*nodes).num_files == 0


# --- strict when read -----------------------------------------------------------------------------

BENDS: dict[str, dict[str, Any]] = {
    "unknown field": {"extra": 1},
    "unknown version": {"version": 2},
    "version of another type": {"version": "1"},
    "another format": {"format": "ckpt-tiering/manifest"},
    "no id": {"save_id": "latest"},
    "id of another step": {"step": 99},
    "step as text": {"step": "100"},
    "step as float": {"step": 100.0},
    "step over all bounds": {"step": 1 << 70},
    "no nodes": {"num_nodes": 0},
    "node with a path": {"node": "../n00000"},
    "node in other digits": {"node": "n\u0660\u0660\u0660\u0660\u0660"},
    "no files": {"files": None},
    "nested metadata": {"metadata": {"a": {}}},
    "name as list": {"name": ["a"]},
}
FILE_BENDS: dict[str, dict[str, Any]] = {
    "path escape": {"path": "../../etc/passwd"},
    "absolute path": {"path": "/etc/passwd"},
    "path through dots": {"path": "a/../../b"},
    "unknown kind": {"kind": "device"},
    "negative size": {"size_bytes": -1},
    "negative offset": {"offset": -1},
    "over the end": {"offset": (1 << 20) - 3},
    "object not there": {"object": 1},
    "checksum too short": {"crc64nvme": "ab"},
    "checksum in capitals": {"crc64nvme": "A" * 16},
    "part checksum missing": {"parts": []},
    "part of no bytes": {"part_bytes": 0},
    "target of a file": {"target": "a"},
    "unknown file field": {"uid": 0},
    "mode over all bits": {"mode": 0o10000},
}


def refused(document: dict[str, Any]) -> None:
    data = json.dumps(document).encode()
    with pytest.raises(FormatError, match="node"):
        decode(NodeManifest, data, "node")


@pytest.mark.parametrize("bend", BENDS.values(), ids=list(BENDS))
def test_p12_a_bent_document_is_refused(bend: dict[str, Any]) -> None:
    refused(as_json(node_manifest([file_entry("a")])) | bend)


@pytest.mark.parametrize("bend", FILE_BENDS.values(), ids=list(FILE_BENDS))
def test_p12_a_bent_file_is_refused(bend: dict[str, Any]) -> None:
    document = as_json(node_manifest([file_entry("a")]))
    document["files"][0] |= bend
    refused(document)


@given(st.data())
def test_p12_a_document_without_any_one_field_is_refused(data: st.DataObject) -> None:
    document = as_json(manifest())
    gone = data.draw(st.sampled_from(sorted(document)))
    del document[gone]
    with pytest.raises(FormatError):
        decode(Manifest, json.dumps(document).encode(), "m")


@pytest.mark.parametrize(
    "bend", [{"key": "../x"}, {"key": "/x"}, {"sha256": "0" * 63}, {"size_bytes": 0}, {"node": "x"}]
)
def test_p12_a_bent_pointer_is_refused(bend: dict[str, Any]) -> None:
    document = as_json(manifest())
    document["nodes"][0] |= bend
    with pytest.raises(FormatError):
        decode(Manifest, json.dumps(document).encode(), "m")


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("field", ["snapshot_at", "metadata"])
def test_p12_numbers_that_json_does_not_have_are_refused(number: str, field: str) -> None:
    document = as_json(node_manifest())
    document[field] = {"loss": "HERE"} if field == "metadata" else "HERE"
    data = json.dumps(document).replace('"HERE"', number).encode()
    with pytest.raises(FormatError):
        decode(NodeManifest, data, "node")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b"\xff\xfe",
        b'"text"',
        b"{",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"format":"ckpt-tiering/node-manifest","version":1,"files":' + b"[" * 5000,
        "{}".encode("utf-16"),
    ],
)
def test_p12_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(FormatError):
        decode(NodeManifest, data, "node")


@given(st.integers(0, 2000), st.integers(0, 7))
def test_p12_a_flipped_bit_gives_a_document_or_a_format_error(at: int, bit: int) -> None:
    data = bytearray(encode(node_manifest([file_entry("a"), link_entry("l", "a")])))
    data[at % len(data)] ^= 1 << bit
    with contextlib.suppress(FormatError):
        decode(NodeManifest, bytes(data), "node")


def test_p12_a_document_over_the_limit_is_refused_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encode(node_manifest())
    monkeypatch.setattr(module, "MAX_DOCUMENT_BYTES", len(data) - 1)
    with pytest.raises(FormatError, match="too many"):
        decode(NodeManifest, data, "node")


# --- one tree, and links that stay in it ----------------------------------------------------------


@pytest.mark.parametrize(
    "files",
    [
        [file_entry("a"), file_entry("a")],
        [file_entry("a"), dir_entry("a")],
        [dir_entry("a"), dir_entry("a")],
        [file_entry("a"), file_entry("a/b")],
        [file_entry("a/b/c"), link_entry("a", "x")],
        [link_entry("a", "d"), dir_entry("a/b")],
        [file_entry("a/b"), file_entry("a/b/c/d/e")],
    ],
)
def test_p12_files_that_can_not_lie_in_one_tree_are_refused(files: list[Any]) -> None:
    node = node_manifest()
    document = as_json(node)
    document["files"] = [as_json(node_manifest([file]))["files"][0] for file in files]
    refused(copy.deepcopy(document))


GOOD_LINKS = [("a", "b"), ("d/a", "../b"), ("d/e/a", "../../b/c"), ("a", "./b/./c"), ("d/a", "..")]
BAD_LINKS = [
    ("a", ""),
    ("a", "/etc/passwd"),
    ("a", ".."),
    ("d/a", "../.."),
    ("d/a", "../../d/b"),
    ("a", "./../b"),
    ("a", "b\0"),
    # Through another link: `x/y/top -> ../..` is the root, and `..` of that is outside.
    ("a", "x/y/top/.."),
    ("a", "x/y/top/../etc/passwd"),
    ("a", "b/../c"),
]


@pytest.mark.parametrize(("path", "target"), GOOD_LINKS)
def test_p11_links_that_stay_inside_are_kept(path: str, target: str) -> None:
    node = node_manifest([link_entry(path, target)])
    assert decode(NodeManifest, encode(node), "node").files[0].target == target


@pytest.mark.parametrize(("path", "target"), BAD_LINKS)
def test_p12_links_that_leave_are_refused(path: str, target: str) -> None:
    document = as_json(node_manifest([link_entry(path, "b")]))
    document["files"][0]["target"] = target
    refused(document)
