from __future__ import annotations

import errno
import os
import threading
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_tiering.errors import FormatError, IntegrityError, NotFoundError, TransientError
from ckpt_tiering.model.digest import crc64
from ckpt_tiering.model.ids import SaveId
from ckpt_tiering.model.manifest import FileEntry, ObjectEntry
from ckpt_tiering.model.ranges import ByteRange, plan_requests
from ckpt_tiering.pipeline import ranges as module
from ckpt_tiering.pipeline.ranges import RangesReport, read_ranges
from ckpt_tiering.pipeline.resolve import load_save
from ckpt_tiering.stores.body import Body
from ckpt_tiering.testing.faults import Fault
from tests.unit.model.documents import file_entry, link_entry, node_manifest
from tests.unit.world import URL, World, world

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from ckpt_tiering.model.events import EventKind

ID = SaveId(100, "abcd")
PART = 1 << 20
BIG = bytes(range(251)) * 35_000  # nine blocks, an object of its own
FILES = {"big.bin": BIG, "a.pt": b"weights" * 100, "b.pt": b"bias" * 50, "empty": b""}
BIG_KEY = "saves/000000000100-abcd/n00000/f/big.bin"
PACK_KEY = "saves/000000000100-abcd/n00000/p/0000.tar"


@pytest.fixture
def saved(node: World) -> World:
    node.durable(FILES, part_bytes=PART)
    node.store.calls.clear()
    return node


class Reading:
    """What one call of `read_ranges` handed out and told."""

    def __init__(self, node: World, wanted: list[ByteRange], *, nvme: bool = False) -> None:
        self.node, self.wanted, self.nvme = node, wanted, nvme
        self.got: dict[int, bytes] = {}
        self.told: list[tuple[str, dict[str, Any]]] = []
        self._lock = threading.Lock()

    def run(self) -> RangesReport:
        nodes = load_save(self.node.session, ID).nodes
        self.node.store.calls.clear()
        return read_ranges(
            self.node.session,
            nodes,
            self.wanted,
            self.take,
            local_copies=self.copies if self.nvme else lambda _: (),
            tell=self.tell,
        )

    def take(self, number: int, data: memoryview) -> None:
        with self._lock:
            assert number not in self.got, "delivered once"
            self.got[number] = bytes(data)

    def copies(self, entry: FileEntry) -> Iterable[Path]:
        return [copy_of(self.node, entry.path)]

    def tell(self, kind: EventKind, fields: dict[str, Any]) -> None:
        self.told.append((kind.value, fields))

    def assert_right(self, files: dict[str, bytes] | None = None) -> None:
        files = FILES if files is None else files
        expected = {n: files[w.path][w.start : w.end] for n, w in enumerate(self.wanted)}
        assert self.got == expected

    @property
    def gets(self) -> list[str]:
        return [c.key for c in self.node.store.calls if c.verb == "get"]


def copy_of(node: World, path: str) -> Path:
    return node.layout.staged_file(node.layout.save_dir(URL, ID), 0, path)


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def whole(path: str) -> ByteRange:
    return ByteRange(path, 0, len(FILES[path]))


EVERYTHING = [whole(path) for path in FILES]


# --- what is wanted comes, and little more --------------------------------------------------------


def test_p9_ranges_come_from_the_store(saved: World) -> None:
    wanted = [ByteRange("big.bin", 3 * PART - 5, 3 * PART + 5), ByteRange("a.pt", 7, 21)]
    reading = Reading(saved, wanted)
    report = reading.run()
    reading.assert_right()
    assert report.downloaded_bytes == 2 * PART + len(FILES["a.pt"])
    assert (report.nvme_bytes, report.store_files) == (0, {"big.bin", "a.pt"})
    assert reading.told == [
        ("restored", {"from_nvme": 0, "from_store": 2, "bytes": report.downloaded_bytes,
                      "nvme_bytes": 0})
    ]  # fmt: skip


def test_p9_ranges_come_from_nvme_without_a_download(saved: World) -> None:
    reading = Reading(saved, EVERYTHING, nvme=True)
    report = reading.run()
    reading.assert_right()
    assert reading.gets == []
    assert (report.downloaded_bytes, report.nvme_bytes) == (0, sum(map(len, FILES.values())))


def test_members_of_a_pack_are_one_request(saved: World) -> None:
    reading = Reading(saved, [whole("b.pt"), whole("a.pt"), whole("empty")])
    reading.run()
    reading.assert_right()
    assert reading.gets == [PACK_KEY]


def test_a_block_is_fetched_once_however_many_ranges_touch_it(saved: World) -> None:
    wanted = [ByteRange("big.bin", start, start + 900) for start in range(0, 5000, 100)]
    reading = Reading(saved, [*wanted, whole("big.bin"), ByteRange("big.bin", 9, 9)])
    report = reading.run()
    reading.assert_right()
    assert report.downloaded_bytes == len(BIG)
    assert reading.gets == [BIG_KEY]


def test_a_range_longer_than_a_request_is_put_together(
    saved: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "plan_requests", lambda b: plan_requests(b, request_bytes=2 * PART))
    reading = Reading(saved, [whole("big.bin"), ByteRange("big.bin", PART, 6 * PART)])
    report = reading.run()
    reading.assert_right()
    assert len(reading.gets) == 5
    assert report.downloaded_bytes == len(BIG)


@settings(max_examples=25)
@given(st.data())
def test_p9_any_ranges_from_any_tier(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    files = {f"f{n}": bytes([n + i % 7 for i in range(n * 13)]) for n in range(6)}
    places = st.tuples(st.sampled_from(sorted(files)), st.integers(0, 65), st.integers(0, 65))
    wanted = [
        ByteRange(path, *sorted((min(a, len(files[path])), min(b, len(files[path])))))
        for path, a, b in data.draw(st.lists(places, max_size=12))
    ]
    gone = data.draw(st.sets(st.sampled_from(sorted(files))))
    bad = data.draw(st.sets(st.sampled_from(sorted(files))))
    with world(tmp_path_factory.mktemp("nvme")) as node:
        node.durable(files, part_bytes=4)
        for path in gone:
            copy_of(node, path).unlink()
        for path in bad - gone:
            if files[path]:
                flip(copy_of(node, path), 3)
        reading = Reading(node, wanted, nvme=True)
        reading.run()
        reading.assert_right(files)


@pytest.mark.parametrize(
    ("wanted", "error"),
    [
        (ByteRange("missing", 0, 0), NotFoundError),
        (ByteRange("a.pt", 0, 701), FormatError),
        (ByteRange("a.pt", -1, 3), FormatError),
        (ByteRange("a.pt", 5, 4), FormatError),
    ],
)
def test_what_is_not_there_is_refused_before_anything_is_read(
    saved: World, wanted: ByteRange, error: type[Exception]
) -> None:
    reading = Reading(saved, [whole("big.bin"), wanted])
    with pytest.raises(error):
        reading.run()
    assert reading.gets == []
    assert reading.got == {}


def test_a_link_is_not_read_through(node: World) -> None:
    nodes = [node_manifest([file_entry("f"), link_entry("l", "f")])]
    with pytest.raises(NotFoundError, match="'l'"):
        read_ranges(node.session, nodes, [ByteRange("l", 0, 1)], lambda *_: None)


# --- bad copies on this node ----------------------------------------------------------------------


@pytest.mark.parametrize("path", ["big.bin", "a.pt"])
def test_p9_a_flipped_bit_on_nvme_is_set_aside_and_the_store_is_used(
    saved: World, path: str
) -> None:
    copy = copy_of(saved, path)
    flip(copy, 100)
    reading = Reading(saved, EVERYTHING, nvme=True)
    report = reading.run()
    reading.assert_right()
    assert report.quarantined == [str(copy)]
    assert path in report.store_files
    assert not copy.exists()
    assert len(list(copy.parent.glob("*.corrupt"))) == 1
    assert [kind for kind, _ in reading.told] == ["corrupt", "restored"]
    assert reading.told[0][1] == {"where": "nvme", "error": f"{copy} was set aside"}


def test_p9_a_bad_block_elsewhere_in_the_copy_is_not_seen_and_not_handed_out(saved: World) -> None:
    flip(copy_of(saved, "big.bin"), 5 * PART)
    reading = Reading(saved, [ByteRange("big.bin", 10, 20)], nvme=True)
    report = reading.run()
    reading.assert_right()
    assert report.quarantined == []
    assert report.nvme_bytes == PART


@pytest.mark.parametrize("how", ["shorter", "longer", "gone", "link", "directory", "pipe"])
def test_p9_other_bad_copies_are_not_used(saved: World, how: str) -> None:
    copy = copy_of(saved, "a.pt")
    data = copy.read_bytes()
    copy.unlink()
    if how in {"shorter", "longer"}:
        copy.write_bytes(data[:-1] if how == "shorter" else data + b"x")
    elif how == "link":
        copy.with_name("elsewhere").write_bytes(data)
        copy.symlink_to("elsewhere")
    elif how == "directory":
        copy.mkdir()
    elif how == "pipe":
        os.mkfifo(copy)
    reading = Reading(saved, [whole("a.pt")], nvme=True)
    report = reading.run()
    reading.assert_right()
    assert report.store_files == {"a.pt"}
    assert bool(report.quarantined) == (how in {"shorter", "longer"})


def test_p9_a_disk_that_can_not_read_is_not_the_end(
    saved: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", fail)
    reading = Reading(saved, [whole("a.pt")], nvme=True)
    report = reading.run()
    reading.assert_right()
    assert report.store_files == {"a.pt"}


def test_p9_a_copy_of_zeros_is_no_copy(saved: World) -> None:
    """The right name and the right size, after a power cut."""
    copy = copy_of(saved, "big.bin")
    copy.write_bytes(bytes(len(BIG)))
    reading = Reading(saved, [ByteRange("big.bin", 0, 3)], nvme=True)
    reading.run()
    reading.assert_right()
    assert not copy.exists()


# --- bad copies in the store ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "at", "path"), [(BIG_KEY, 7 << 20, "big.bin"), (PACK_KEY, 600, "a.pt")]
)
def test_p9_a_flipped_bit_in_the_store_is_named_with_both_digests(
    saved: World, key: str, at: int, path: str
) -> None:
    saved.damage(key, at=at)
    reading = Reading(saved, [whole(path)])
    with pytest.raises(IntegrityError) as caught:
        reading.run()
    message = str(caught.value)
    assert key in message
    assert f"'{path}'" in message
    assert "bytes " in message
    digests = [w.rstrip("\n,") for w in message.split() if len(w.rstrip(",")) == 16]
    assert len(set(digests)) == 2
    assert caught.value.hint
    assert reading.got == {}
    assert [(k, f["where"]) for k, f in reading.told] == [("corrupt", "store")]


def test_p9_all_tiers_bad_tells_of_both(saved: World) -> None:
    flip(copy_of(saved, "a.pt"), 1)
    saved.damage(PACK_KEY, at=600)
    reading = Reading(saved, [whole("a.pt")], nvme=True)
    with pytest.raises(IntegrityError):
        reading.run()
    assert [f["where"] for _, f in reading.told] == ["store", "nvme"]


@pytest.mark.parametrize("key", [BIG_KEY, PACK_KEY])
@pytest.mark.parametrize("when", ["flip", "cut", "before", "after"])
def test_p9_a_wire_that_lies_once_is_asked_again(saved: World, key: str, when: Any) -> None:
    saved.faults.add(Fault(verb="get", key=key, when=when))
    reading = Reading(saved, EVERYTHING)
    reading.run()
    reading.assert_right()


def test_p5_downloads_that_are_always_cut_end_within_a_bound(saved: World) -> None:
    saved.faults.add(Fault(verb="get", key=BIG_KEY, nth=None, when="cut"))
    with pytest.raises(TransientError, match="big"):
        Reading(saved, [whole("big.bin")]).run()


def test_what_the_callee_raises_is_raised(saved: World) -> None:
    class Refusing(Reading):
        def take(self, number: int, data: memoryview) -> None:
            raise FormatError(f"no {len(data)}")

    with pytest.raises(FormatError, match="no 0"):
        Refusing(saved, EVERYTHING).run()
    with pytest.raises(FormatError, match="no 700"):
        Refusing(saved, [whole("a.pt")]).run()


# --- manifests that somebody wrote by hand --------------------------------------------------------


def test_p12_files_that_overlap_in_their_object_do_not_spoil_each_other(
    node: World, tmp_path: Path
) -> None:
    """A copy of one must not be written over verified bytes of the other."""
    data = bytes(range(40))
    key = "saves/000000000100-abcd/n00000/p/0000.tar"
    one = file_entry("one", data[:20], part_bytes=10)
    other = file_entry("two", b"\xff" * 20, part_bytes=10).model_copy(update={"offset": 5})
    manifest = node_manifest([one, other]).model_copy(
        update={
            "objects": (
                ObjectEntry(
                    key=key, size_bytes=40, crc64nvme=f"{crc64(data):016x}", verified="checksum"
                ),
            )
        }
    )
    node.memory.put(key, Body.of_bytes(data))
    (tmp_path / "two").write_bytes(b"\xff" * 20)
    got: dict[int, bytes] = {}
    read_ranges(
        node.session,
        [manifest],
        [ByteRange("one", 0, 20), ByteRange("two", 0, 20)],
        lambda n, view: got.update({n: bytes(view)}),
        local_copies=lambda f: [tmp_path / "two"] if f.path == "two" else [],
    )
    assert got == {0: data[:20], 1: b"\xff" * 20}
