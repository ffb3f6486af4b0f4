"""What the sink knows of its objects and uploads: their checksums, and the bytes of small ones.

Pure state behind one lock; requests and sockets are in `benchmarks.sink`.
"""

from __future__ import annotations

import base64
import secrets
import threading
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from awscrt import checksums

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

__all__ = ["ALGORITHMS", "Bucket", "Named", "Received", "S3Error", "Stored", "Upload"]

FULL, COMPOSITE = "FULL_OBJECT", "COMPOSITE"


class Algorithm(NamedTuple):
    """A checksum of S3.

    Attributes:
        update: Takes bytes and the checksum so far.
        combine: Takes two checksums and the length of the second piece.
        size_bytes: Length.
    """

    update: Callable[[bytes | memoryview, int], int]
    combine: Callable[[int, int, int], int]
    size_bytes: int

    def text(self, crc: int) -> str:
        """Write a checksum as S3 does."""
        return base64.b64encode(crc.to_bytes(self.size_bytes, "big")).decode()


ALGORITHMS = {
    "crc64nvme": Algorithm(checksums.crc64nvme, checksums.combine_crc64nvme, 8),
    "crc32": Algorithm(checksums.crc32, checksums.combine_crc32, 4),
    "crc32c": Algorithm(checksums.crc32c, checksums.combine_crc32c, 4),
}


class S3Error(Exception):
    """An error that S3 has a code for."""

    def __init__(self, status: int, code: str, message: str = "") -> None:
        super().__init__(message or code)
        self.status = status
        self.code = code


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """What came in a body.

    Attributes:
        size_bytes: Length.
        crcs: Checksums that were computed, by algorithm: those that the client sent or announced,
            CRC64NVME if it did neither.
        data: The bytes; None if they were discarded.
    """

    size_bytes: int
    crcs: Mapping[str, int]
    data: bytes | None

    @property
    def etag(self) -> str:
        """Entity tag: as long as an MD5, which would cost more than all the rest."""
        return _tag(next(iter(self.crcs.values())), self.size_bytes)

    def compare(self, claims: Mapping[str, str]) -> None:
        """Compare with the checksums that the client sent, by algorithm.

        Raises:
            S3Error: One is wrong.
        """
        for name, text in claims.items():
            if ALGORITHMS[name].text(self.crcs[name]) != text:
                raise S3Error(400, "BadDigest", f"the {name} you specified is not that received")


@dataclass(slots=True, kw_only=True)
class Stored:
    """An object. ``data`` is None if its bytes were discarded."""

    size_bytes: int
    etag: str
    checksums: Mapping[str, str]
    checksum_type: str
    modified_s: float
    metadata: Mapping[str, str]
    tags: str
    data: bytes | None


@dataclass(slots=True, kw_only=True)
class Upload:
    """An open multipart upload."""

    key: str
    algorithm: str | None
    checksum_type: str
    metadata: Mapping[str, str]
    tags: str
    parts: dict[int, Received] = field(default_factory=dict)


class Named(NamedTuple):
    """A part as the client names it to complete an upload."""

    number: int
    etag: str
    checksums: Mapping[str, str]


class Bucket:
    """Objects and uploads of a bucket. Safe to use from several threads."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._objects: dict[str, Stored] = {}
        self._uploads: dict[str, Upload] = {}

    # --- objects -----------------------------------------------------------------------------

    def put(
        self,
        key: str,
        body: Received,
        *,
        metadata: Mapping[str, str],
        tags: str,
        if_absent: bool = False,
    ) -> Stored:
        """Make an object of a body whose checksums were compared."""
        stored = Stored(
            size_bytes=body.size_bytes,
            etag=body.etag,
            checksums={name: ALGORITHMS[name].text(crc) for name, crc in body.crcs.items()},
            checksum_type=FULL,
            modified_s=self._now(),
            metadata=metadata,
            tags=tags,
            data=body.data,
        )
        self.place(key, stored, if_absent=if_absent)
        return stored

    def place(self, key: str, stored: Stored, *, if_absent: bool = False) -> None:
        """Put an object at a key.

        Raises:
            S3Error: There is one, and there should be none.
        """
        with self._lock:
            if if_absent and key in self._objects:
                raise S3Error(412, "PreconditionFailed", "there is an object at the key")
            self._objects[key] = stored

    def get(self, key: str) -> Stored:
        """Return an object."""
        with self._lock:
            try:
                return self._objects[key]
            except KeyError:
                raise S3Error(404, "NoSuchKey", f"there is no object {key}") from None

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects; missing ones are no error."""
        with self._lock:
            for key in keys:
                self._objects.pop(key, None)

    def below(self, prefix: str, after: str) -> Iterator[tuple[str, Stored]]:
        """Yield the objects whose keys have a prefix and come after a key, in order."""
        with self._lock:
            found = [i for i in self._objects.items() if i[0].startswith(prefix) and i[0] > after]
        yield from sorted(found, key=lambda item: item[0])

    # --- uploads -----------------------------------------------------------------------------

    def open_upload(self, upload: Upload) -> str:
        """Open a multipart upload; return its id."""
        upload_id = secrets.token_hex(16)
        with self._lock:
            self._uploads[upload_id] = upload
        return upload_id

    def upload(self, key: str, upload_id: str) -> Upload:
        """Return an open upload."""
        with self._lock:
            upload = self._uploads.get(upload_id)
        if upload is None or upload.key != key:
            raise S3Error(404, "NoSuchUpload", f"there is no upload {upload_id} of {key}")
        return upload

    def uploads_below(self, prefix: str) -> list[tuple[str, Upload]]:
        """Return ids and uploads whose keys have a prefix."""
        with self._lock:
            open_now = list(self._uploads.items())
        return sorted(
            ((i, u) for i, u in open_now if u.key.startswith(prefix)), key=lambda it: it[1].key
        )

    def drop_upload(self, key: str, upload_id: str) -> None:
        """Abort an upload."""
        self.upload(key, upload_id)
        with self._lock:
            self._uploads.pop(upload_id, None)

    def complete(
        self,
        key: str,
        upload_id: str,
        named: Sequence[Named],
        *,
        claims: Mapping[str, str],
        if_absent: bool = False,
    ) -> Stored:
        """Make an object of parts.

        Raises:
            S3Error: There is no such upload or part, or a checksum is wrong.
        """
        upload = self.upload(key, upload_id)
        parts = [_found(upload, part) for part in named]
        if not parts or any(a.number >= b.number for a, b in pairwise(named)):
            raise S3Error(400, "InvalidPartOrder", "parts are missing or not in order")
        algorithm = upload.algorithm or "crc64nvme"
        text = (_composite if upload.checksum_type == COMPOSITE else _full)(parts, algorithm)
        if claims.get(algorithm, text) != text:
            raise S3Error(400, "BadDigest", f"the {algorithm} of the whole is not the one claimed")
        data = [part.data for part in parts if part.data is not None]
        stored = Stored(
            size_bytes=(size_bytes := sum(part.size_bytes for part in parts)),
            etag=f"{_tag(_joined(parts, algorithm), size_bytes)}-{len(parts)}",
            checksums={algorithm: text},
            checksum_type=upload.checksum_type,
            modified_s=self._now(),
            metadata=upload.metadata,
            tags=upload.tags,
            data=b"".join(data) if len(data) == len(parts) else None,
        )
        self.place(key, stored, if_absent=if_absent)
        with self._lock:
            self._uploads.pop(upload_id, None)
        return stored


def _tag(crc: int, size_bytes: int) -> str:
    return f"{crc:016x}{size_bytes:016x}"


def _found(upload: Upload, named: Named) -> Received:
    part = upload.parts.get(named.number)
    if part is None or part.etag != named.etag.strip('"'):
        raise S3Error(400, "InvalidPart", f"part {named.number} is not one that was sent")
    for name, text in named.checksums.items():
        if name not in part.crcs or ALGORITHMS[name].text(part.crcs[name]) != text:
            raise S3Error(400, "InvalidPart", f"part {named.number} has another {name}")
    return part


def _joined(parts: Iterable[Received], algorithm: str) -> int:
    crc = 0
    for part in parts:
        if part.size_bytes:
            crc = ALGORITHMS[algorithm].combine(crc, part.crcs[algorithm], part.size_bytes)
    return crc


def _full(parts: Sequence[Received], algorithm: str) -> str:
    return ALGORITHMS[algorithm].text(_joined(parts, algorithm))


def _composite(parts: Sequence[Received], algorithm: str) -> str:
    how = ALGORITHMS[algorithm]
    of_parts = b"".join(part.crcs[algorithm].to_bytes(how.size_bytes, "big") for part in parts)
    return f"{how.text(how.update(of_parts, 0))}-{len(parts)}"
