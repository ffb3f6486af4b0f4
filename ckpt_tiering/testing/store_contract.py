"""What every store must do; a store passes it by a subclass with a fixture ``store``."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Barrier
from typing import TYPE_CHECKING

import pytest

from ckpt_tiering.errors import CapacityError, IntegrityError, NotFoundError
from ckpt_tiering.model.digest import PartCrc, StreamDigest, crc64
from ckpt_tiering.stores.base import (
    AlreadyExists,
    Completed,
    CompletedPart,
    ListsUploads,
    ObjectStore,
    OpenUpload,
    TagsObjects,
    UploadGone,
    Written,
)
from ckpt_tiering.stores.body import Body, BytesPiece, FilePiece

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["StoreContract"]

AWKWARD_KEYS = ("a%20b/c", "a%2Fb", "a=1/%25", "a_-.b", "a%C3%A9")
RACERS = 8


def pattern(size_bytes: int) -> bytes:
    """Return bytes of which no window equals another near it."""
    block = b"".join(number.to_bytes(4, "big") for number in range(1 << 14))
    return (block * (size_bytes // len(block) + 1))[:size_bytes]


def read(store: ObjectStore, key: str, start: int = 0, end: int | None = None) -> bytes:
    """Return bytes of an object."""
    return b"".join(store.get(key, start, end))


def keys_of(store: ObjectStore, prefix: str, start_after: str = "") -> list[str]:
    """Return the keys below a prefix."""
    return [info.key for info in store.list(prefix, start_after)]


def put_part(store: ObjectStore, upload: OpenUpload, number: int, data: bytes) -> CompletedPart:
    """Send a part that must be taken."""
    etag = store.put_part(upload.key, upload.upload_id, number, Body.of_bytes(data))
    assert isinstance(etag, str)
    return CompletedPart(number, etag, crc64(data))


def open_upload(store: ObjectStore, key: str) -> OpenUpload:
    """Open an upload."""
    return OpenUpload(key, store.create_upload(key))


class StoreContract:
    """Tests of `ObjectStore`. The store that the fixture gives is empty, at a root of its own.

    Attributes:
        part_bytes: Length of the parts to try, of which the last is shorter.
        compares_checksums: The store refuses wrong checksums and reports right ones.
        knows_aborted_uploads: The store answers `UploadGone` about an aborted upload.
        many: Number of objects to list: more than a page.
    """

    part_bytes = 1000
    compares_checksums = True
    knows_aborted_uploads = True
    many = 1100

    @pytest.fixture
    def store(self) -> ObjectStore:
        """Give the store under test."""
        raise NotImplementedError

    @pytest.mark.parametrize("size_bytes", [0, 1, 1000, (1 << 20) + 1])
    def test_p3_what_was_put_comes_back(self, store: ObjectStore, size_bytes: int) -> None:
        """Bytes, length and checksum of an object are those that were put."""
        data = pattern(size_bytes)
        assert isinstance(store.put("f", Body.of_bytes(data)), Written)
        assert read(store, "f") == data
        seen = store.head("f")
        assert seen is not None
        assert (seen.key, seen.size_bytes) == ("f", size_bytes)
        if self.compares_checksums:
            assert seen.crc64nvme == crc64(data)

    def test_a_body_of_several_pieces(self, store: ObjectStore, tmp_path: Path) -> None:
        """Memory and windows of files are sent as one."""
        data, file = pattern(3_000_000), tmp_path / "staged"
        file.write_bytes(data)
        pieces = (BytesPiece(b"head"), FilePiece(file, 7, 2_900_000), BytesPiece(b"tail"))
        whole = b"head" + data[7:2_900_007] + b"tail"
        store.put("f", Body(pieces, PartCrc(len(whole), crc64(whole))))
        assert read(store, "f") == whole

    def test_p11_encoded_keys_come_back_as_they_are(self, store: ObjectStore) -> None:
        """Keys with percent escapes are neither decoded nor encoded again."""
        for key in AWKWARD_KEYS:
            store.put(f"names/{key}", Body.of_bytes(key.encode()))
        assert sorted(keys_of(store, "names/")) == sorted(f"names/{key}" for key in AWKWARD_KEYS)
        for key in AWKWARD_KEYS:
            assert read(store, f"names/{key}") == key.encode()
        assert store.head("names/a b/c") is None

    def test_ranges(self, store: ObjectStore) -> None:
        """Start is inclusive, end exclusive."""
        data = pattern(5000)
        store.put("f", Body.of_bytes(data))
        for start, end in [(0, 1), (0, 5000), (1, 4999), (4999, 5000), (17, 17)]:
            assert read(store, "f", start, end) == data[start:end]
        assert read(store, "f", 4000) == data[4000:]

    @pytest.mark.parametrize(("start", "end"), [(0, 11), (5, 20), (10, 11), (10, None)])
    def test_p9_a_range_past_the_end_is_an_error(
        self, store: ObjectStore, start: int, end: int | None
    ) -> None:
        """An object that is shorter than expected is never handed out as if it were whole."""
        store.put("f", Body.of_bytes(b"0123456789"))
        with pytest.raises(IntegrityError):
            read(store, "f", start, end)

    def test_a_missing_object(self, store: ObjectStore) -> None:
        """It is a value for ``head`` and ``delete``, and an error for ``get``."""
        assert store.head("missing") is None
        assert store.delete(["missing"]) == ()
        with pytest.raises(NotFoundError, match="missing"):
            read(store, "missing")

    def test_list_below_a_prefix(self, store: ObjectStore) -> None:
        """A prefix is text; ``start_after`` is exclusive."""
        for key in ("a/1", "a/2", "a/3", "ab", "b"):
            store.put(key, Body.of_bytes(key.encode()))
        assert keys_of(store, "a/") == ["a/1", "a/2", "a/3"]
        assert keys_of(store, "a/", start_after="a/1") == ["a/2", "a/3"]
        assert keys_of(store, "a") == ["a/1", "a/2", "a/3", "ab"]
        assert keys_of(store, "c") == []
        assert {info.size_bytes for info in store.list("a/")} == {3}

    def test_list_and_delete_over_pages(self, store: ObjectStore) -> None:
        """More objects than fit into one answer or one request."""
        keys = [f"many/{number:05d}" for number in range(self.many)]
        with ThreadPoolExecutor(RACERS) as pool:
            list(pool.map(lambda key: store.put(key, Body.of_bytes(b"x")), keys))
        assert keys_of(store, "many/") == keys
        assert keys_of(store, "many/", start_after=keys[10]) == keys[11:]
        assert store.delete(keys) == ()
        assert keys_of(store, "many/") == []

    def test_p1_a_conditional_put_never_overwrites(self, store: ObjectStore) -> None:
        """Losing is an answer; the first object stays."""
        first = store.put("c", Body.of_bytes(b"first"), if_absent=True, writer="w1")
        second = store.put("c", Body.of_bytes(b"second"), if_absent=True, writer="w2")
        assert isinstance(first, Written)
        assert second == AlreadyExists()
        assert read(store, "c") == b"first"
        seen = store.head("c")
        assert seen is not None
        assert seen.writer == "w1"

    def test_p1_a_race_has_one_winner(self, store: ObjectStore) -> None:
        """Of writers at one time exactly one wins, and its bytes are the ones that are there."""
        start = Barrier(RACERS)

        def race(number: int) -> Written | AlreadyExists:
            start.wait()
            return store.put("c", Body.of_bytes(b"%d" % number), if_absent=True)

        with ThreadPoolExecutor(RACERS) as pool:
            answers = list(pool.map(race, range(RACERS)))
        winners = [number for number, got in enumerate(answers) if isinstance(got, Written)]
        assert len(winners) == 1
        assert read(store, "c") == b"%d" % winners[0]

    def test_an_unconditional_put_overwrites(self, store: ObjectStore) -> None:
        """The later one stays."""
        store.put("f", Body.of_bytes(b"first"))
        assert isinstance(store.put("f", Body.of_bytes(b"second")), Written)
        assert read(store, "f") == b"second"

    def test_p3_a_source_that_changed_is_never_stored(
        self, store: ObjectStore, tmp_path: Path
    ) -> None:
        """A staged file that was rewritten is found while it is sent, whatever the store checks."""
        file = tmp_path / "staged"
        data = pattern(2_000_000)
        file.write_bytes(data)
        body = Body((FilePiece(file, 0, len(data)),), PartCrc(len(data), crc64(data)), "staged")
        file.write_bytes(b"!" + data[1:])
        with pytest.raises(IntegrityError, match="changed after it was staged"):
            store.put("f", body)
        file.write_bytes(data[:-1])
        with pytest.raises(IntegrityError, match="cut after it was staged"):
            store.put("f", body)
        upload = open_upload(store, "f")
        with pytest.raises(IntegrityError):
            store.put_part("f", upload.upload_id, 1, body)
        assert store.head("f") is None

    def test_an_error_of_the_body_comes_out_as_it_is(self, store: ObjectStore) -> None:
        """What ``on_read`` raises is not taken for a failure of the store, `OSError` or not."""

        def refuse(num_bytes: int) -> None:
            raise CapacityError("no more")

        body = replace(Body.of_bytes(b"data"), on_read=refuse)
        with pytest.raises(CapacityError, match="no more"):
            store.put("f", body)
        assert store.head("f") is None

    def test_p4_the_writer_is_kept(self, store: ObjectStore) -> None:
        """An own write can be told from another's; without a token there is none."""
        store.put("w", Body.of_bytes(b"x"), writer="Writer-1/a")
        store.put("n", Body.of_bytes(b"x"))
        with_token, without = store.head("w"), store.head("n")
        assert with_token is not None
        assert with_token.writer == "Writer-1/a"
        assert without is not None
        assert without.writer is None

    def test_p3_parts_in_any_order_and_sent_again(self, store: ObjectStore) -> None:
        """The last of two sends of a part counts; the object has the checksum of the whole."""
        data = pattern(2 * self.part_bytes + 7)
        first, second = data[: self.part_bytes], data[self.part_bytes : 2 * self.part_bytes]
        upload = open_upload(store, "big")
        parts = [
            put_part(store, upload, 3, data[2 * self.part_bytes :]),
            put_part(store, upload, 1, second),
            put_part(store, upload, 2, second),
            put_part(store, upload, 1, first),
        ]
        held = store.list_parts("big", upload.upload_id)
        assert not isinstance(held, UploadGone)
        sizes = [self.part_bytes, self.part_bytes, 7]
        assert {(p.number, p.size_bytes) for p in held} == set(enumerate(sizes, start=1))
        assert {parts[0].etag, parts[2].etag, parts[3].etag} <= {p.etag for p in held}
        assert store.head("big") is None
        digest = StreamDigest(self.part_bytes)
        digest.update(data)
        listed = [parts[0], parts[2], parts[3]]
        done = store.complete_upload("big", upload.upload_id, listed, crc64nvme=digest.digest().crc)
        assert isinstance(done, Completed)
        assert read(store, "big") == data
        seen = store.head("big")
        assert seen is not None
        assert seen.size_bytes == len(data)
        if self.compares_checksums:
            assert seen.crc64nvme == crc64(data)

    def test_p3_a_wrong_checksum_completes_nothing(self, store: ObjectStore) -> None:
        """The checksum of the whole is compared before there is an object."""
        if not self.compares_checksums:
            pytest.skip("this store compares no checksums")
        upload = open_upload(store, "big")
        part = put_part(store, upload, 1, b"data")
        with pytest.raises(IntegrityError):
            store.complete_upload("big", upload.upload_id, [part], crc64nvme=crc64(b"date"))
        assert store.head("big") is None

    def test_another_part_than_was_sent_completes_nothing(self, store: ObjectStore) -> None:
        """An entity tag that the store does not hold is an error."""
        upload, other = open_upload(store, "big"), open_upload(store, "other")
        put_part(store, upload, 1, b"data")
        part = put_part(store, other, 1, b"date")
        with pytest.raises(IntegrityError):
            store.complete_upload("big", upload.upload_id, [part], crc64nvme=part.crc64nvme)
        assert store.head("big") is None

    def test_a_fresh_upload_has_no_parts(self, store: ObjectStore) -> None:
        """It is open, and not gone."""
        upload = open_upload(store, "big")
        assert store.list_parts("big", upload.upload_id) == ()

    def test_an_aborted_upload_is_gone(self, store: ObjectStore) -> None:
        """Gone is an answer of every verb; aborting again is no error."""
        upload = open_upload(store, "big")
        part = put_part(store, upload, 1, b"data")
        store.abort_upload("big", upload.upload_id)
        store.abort_upload("big", upload.upload_id)
        if not self.knows_aborted_uploads:
            pytest.skip("this store forgets that an upload was aborted")
        body = Body.of_bytes(b"data")
        assert store.put_part("big", upload.upload_id, 1, body) == UploadGone()
        assert store.list_parts("big", upload.upload_id) == UploadGone()
        done = store.complete_upload("big", upload.upload_id, [part], crc64nvme=part.crc64nvme)
        assert done == UploadGone()
        assert store.head("big") is None

    def test_open_uploads_are_listed(self, store: ObjectStore) -> None:
        """Those below the prefix, until they are completed or aborted."""
        assert isinstance(store, ListsUploads)
        done, dropped = open_upload(store, "u/a%20b"), open_upload(store, "u/2")
        open_upload(store, "v/3")
        assert set(store.list_uploads("u/")) == {done, dropped}
        part = put_part(store, done, 1, b"data")
        store.complete_upload(done.key, done.upload_id, [part], crc64nvme=part.crc64nvme)
        store.abort_upload(dropped.key, dropped.upload_id)
        assert store.list_uploads("u/") == ()

    def test_tags(self, store: ObjectStore) -> None:
        """They can be given with each way to write, and set afterwards."""
        assert isinstance(store, TagsObjects)
        store.put("f", Body.of_bytes(b"x"), tag="pending")
        upload = OpenUpload("big", store.create_upload("big", tag="pending"))
        part = put_part(store, upload, 1, b"data")
        store.complete_upload("big", upload.upload_id, [part], crc64nvme=part.crc64nvme)
        assert store.tag("f", "committed")
        assert store.tag("big", "committed")
        assert not store.tag("missing", "committed")
