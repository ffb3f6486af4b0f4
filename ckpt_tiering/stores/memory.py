"""A whole store in the memory of the process, for tests and ``memory://`` roots."""

from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ckpt_tiering.errors import (
    CkptTieringError,
    ConfigError,
    ErrorKind,
    IntegrityError,
    NotFoundError,
)
from ckpt_tiering.model.digest import crc64
from ckpt_tiering.model.layout import StoreUrl
from ckpt_tiering.stores.base import (
    AlreadyExists,
    Capabilities,
    Completed,
    CompletedPart,
    DeleteFailure,
    ObjectInfo,
    OpenUpload,
    StoredPart,
    UploadGone,
    Written,
)
from ckpt_tiering.stores.body import WINDOW_BYTES, Body

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["MemoryBucket", "MemoryStore"]

EVERYTHING = Capabilities(
    conditional_put=True, checks_crc64nvme=True, tags=True, lists_uploads=True
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Object:
    data: bytes
    etag: str
    crc64nvme: int | None
    tag: str | None = None
    writer: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    data: bytes
    etag: str


@dataclass(slots=True)
class _Upload:
    key: str
    tag: str | None
    parts: dict[int, _Part] = field(default_factory=dict)


class MemoryBucket:
    """Contents of a bucket; several stores (roots) may share one. All access is under its lock."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.objects: dict[str, _Object] = {}
        self.uploads: dict[str, _Upload] = {}
        self._numbers = itertools.count(1)

    def new_token(self, kind: str) -> str:
        """Return a token that this bucket has not given out before."""
        return f"{kind}-{next(self._numbers)}"


class MemoryStore:
    """`ObjectStore`, `TagsObjects` and `ListsUploads` without a network. Never blocks.

    Args:
        url: Root of the run.
        bucket: Where the objects are; a new, empty bucket by default.
        behaves: Which abilities to have; without one it does what real servers without it do:
            overwrite, accept wrong checksums and report none, or refuse the request.
        min_part_bytes: Least length of all parts but the last (5 MiB on Amazon's).
    """

    def __init__(
        self,
        url: StoreUrl | None = None,
        *,
        bucket: MemoryBucket | None = None,
        behaves: Capabilities = EVERYTHING,
        min_part_bytes: int = 0,
    ) -> None:
        self._url = url or StoreUrl("memory", "test", "")
        self._bucket = bucket or MemoryBucket()
        self._behaves = behaves
        self._min_part_bytes = min_part_bytes

    @property
    def url(self) -> StoreUrl:
        """Root that keys are relative to."""
        return self._url

    def put(
        self,
        key: str,
        body: Body,
        *,
        if_absent: bool = False,
        tag: str | None = None,
        writer: str | None = None,
    ) -> Written | AlreadyExists:
        """Write an object; see `ObjectStore.put`."""
        data = self._receive(body)  # outside the lock: reading may block on bandwidth
        with self._bucket.lock:
            full = self._url.prefix + key
            if if_absent and self._behaves.conditional_put and full in self._bucket.objects:
                return AlreadyExists()
            etag = self._bucket.new_token("object")
            self._bucket.objects[full] = _Object(
                data=data,
                etag=etag,
                crc64nvme=self._reported_crc(data),
                tag=tag if self._behaves.tags else None,
                writer=writer,
            )
            return Written(etag)

    def head(self, key: str) -> ObjectInfo | None:
        """Return what the store knows of an object; see `ObjectStore.head`."""
        with self._bucket.lock:
            found = self._bucket.objects.get(self._url.prefix + key)
        if found is None:
            return None
        return ObjectInfo(
            key=key,
            size_bytes=len(found.data),
            etag=found.etag,
            crc64nvme=found.crc64nvme,
            writer=found.writer,
        )

    def get(self, key: str, start: int = 0, end: int | None = None) -> Iterator[bytes]:
        """Yield bytes of an object in windows; see `ObjectStore.get`."""
        if end is not None and end <= start:
            return
        with self._bucket.lock:
            found = self._bucket.objects.get(self._url.prefix + key)
        if found is None:
            raise NotFoundError(f"there is no object {self._name(key)}", op="get", key=key)
        size = len(found.data)
        if (end is not None and end > size) or (start and start >= size):
            raise IntegrityError(
                f"{self._name(key)} ends before byte {start if end is None else end}",
                op="get",
                key=key,
            )
        stop = size if end is None else end
        for offset in range(start, stop, WINDOW_BYTES):
            yield found.data[offset : min(offset + WINDOW_BYTES, stop)]

    def list(self, prefix: str, start_after: str = "") -> Iterator[ObjectInfo]:
        """Yield all objects below ``prefix`` in the order of their UTF-8 bytes."""
        below, after = self._url.prefix + prefix, self._url.prefix + start_after
        with self._bucket.lock:
            found = [
                ObjectInfo(key=self._relative(key), size_bytes=len(o.data), etag=o.etag)
                for key, o in sorted(
                    self._bucket.objects.items(), key=lambda item: item[0].encode()
                )
                if key.startswith(below) and (not start_after or key.encode() > after.encode())
            ]
        yield from found

    def delete(self, keys: Sequence[str]) -> tuple[DeleteFailure, ...]:
        """Delete objects; missing ones are no failure."""
        with self._bucket.lock:
            for key in keys:
                self._bucket.objects.pop(self._url.prefix + key, None)
        return ()

    def create_upload(self, key: str, *, tag: str | None = None) -> str:
        """Open a multipart upload; see `ObjectStore.create_upload`."""
        with self._bucket.lock:
            upload_id = self._bucket.new_token("upload")
            self._bucket.uploads[upload_id] = _Upload(self._url.prefix + key, tag)
            return upload_id

    def put_part(self, key: str, upload_id: str, number: int, body: Body) -> str | UploadGone:
        """Send one part; see `ObjectStore.put_part`."""
        data = self._receive(body)
        with self._bucket.lock:
            upload = self._upload(key, upload_id)
            if upload is None:
                return UploadGone()
            etag = self._bucket.new_token("part")
            upload.parts[number] = _Part(data=data, etag=etag)
            return etag

    def list_parts(self, key: str, upload_id: str) -> tuple[StoredPart, ...] | UploadGone:
        """Return all parts that the store holds of an upload."""
        with self._bucket.lock:
            upload = self._upload(key, upload_id)
            if upload is None:
                return UploadGone()
            return tuple(
                StoredPart(number, len(part.data), part.etag)
                for number, part in sorted(upload.parts.items())
            )

    def complete_upload(
        self, key: str, upload_id: str, parts: Sequence[CompletedPart], *, crc64nvme: int
    ) -> Completed | UploadGone:
        """Make the object from its parts; see `ObjectStore.complete_upload`."""
        with self._bucket.lock:
            upload = self._upload(key, upload_id)
            if upload is None:
                return UploadGone()
            data = self._assemble(upload, parts, crc64nvme)
            del self._bucket.uploads[upload_id]
            etag = self._bucket.new_token("object")
            self._bucket.objects[upload.key] = _Object(
                data=data,
                etag=etag,
                crc64nvme=self._reported_crc(data),
                tag=upload.tag if self._behaves.tags else None,
            )
            return Completed(etag)

    def abort_upload(self, key: str, upload_id: str) -> None:
        """Drop an upload and its parts; one that is gone is no error."""
        with self._bucket.lock:
            if self._upload(key, upload_id) is not None:
                del self._bucket.uploads[upload_id]

    def close(self) -> None:
        """Do nothing: there is no connection."""

    def tag(self, key: str, value: str) -> bool:
        """Set the tag of an object; return False if there is no such object."""
        if not self._behaves.tags:
            raise CkptTieringError("this store has no tags", op="tag", key=key)
        with self._bucket.lock:
            full = self._url.prefix + key
            found = self._bucket.objects.get(full)
            if found is None:
                return False
            self._bucket.objects[full] = replace(found, tag=value)
            return True

    def tag_of(self, key: str) -> str | None:
        """Return the tag of an object; not a verb of `ObjectStore`, for tests."""
        with self._bucket.lock:
            return self._bucket.objects[self._url.prefix + key].tag

    def list_uploads(self, prefix: str) -> tuple[OpenUpload, ...]:
        """Return the open multipart uploads below ``prefix``."""
        if not self._behaves.lists_uploads:
            raise CkptTieringError("this store lists no uploads", op="list_uploads", key=prefix)
        with self._bucket.lock:
            return tuple(
                OpenUpload(self._relative(upload.key), upload_id)
                for upload_id, upload in self._bucket.uploads.items()
                if upload.key.startswith(self._url.prefix + prefix)
            )

    def _receive(self, body: Body) -> bytes:
        """Read a body as a server does: by its length, then compare with the checksum sent."""
        reader = body.open()
        chunks = []
        while chunk := reader.read(WINDOW_BYTES):
            chunks.append(chunk)
        data = b"".join(chunks)
        self._compare(data, body.checksum.crc, body.name)
        return data

    def _compare(self, data: bytes, crc: int, name: str) -> None:
        if self._behaves.checks_crc64nvme and crc64(data) != crc:
            raise IntegrityError(f"{name} does not have the checksum that was sent with it")

    def _reported_crc(self, data: bytes) -> int | None:
        return crc64(data) if self._behaves.checks_crc64nvme else None

    def _upload(self, key: str, upload_id: str) -> _Upload | None:
        upload = self._bucket.uploads.get(upload_id)
        return upload if upload is not None and upload.key == self._url.prefix + key else None

    def _assemble(self, upload: _Upload, parts: Sequence[CompletedPart], crc: int) -> bytes:
        ordered = sorted(parts, key=lambda part: part.number)
        data = []
        for part in ordered:
            held = upload.parts.get(part.number)
            if held is None or held.etag != part.etag:
                raise IntegrityError(f"part {part.number} of {upload.key} is another one")
            if part is not ordered[-1] and len(held.data) < self._min_part_bytes:
                raise ConfigError(f"part {part.number} of {upload.key} is too small")
            self._compare(held.data, part.crc64nvme, f"part {part.number} of {upload.key}")
            data.append(held.data)
        if not ordered:
            raise CkptTieringError(f"upload of {upload.key} has no parts", kind=ErrorKind.PERMANENT)
        whole = b"".join(data)
        self._compare(whole, crc, upload.key)
        return whole

    def _name(self, key: str) -> str:
        return f"{self._url}/{key}"

    def _relative(self, key: str) -> str:
        return key.removeprefix(self._url.prefix)


def _by_bytes(item: tuple[str, _Object]) -> bytes:
    return item[0].encode()
