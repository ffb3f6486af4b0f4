"""The whole surface of a store: ten verbs, two optional abilities, outcomes as values.

Losing a race is an answer (`AlreadyExists`), and so is an upload that is no longer there
(`UploadGone`); only surprises are exceptions, all of them from `ckpt_tiering.errors`:

- `TransientError`, `ThrottledError`: trying again may help. No verb retries by itself.
- `CredentialError`, `StorePermissionError`: a person or a token service has to do something.
- `IntegrityError`: the store or `Body` found other bytes than the checksum says.
- `NotFoundError` with kind ``no_such_bucket``: there is no such bucket. A missing *object* is never
  an exception of `head` and `delete`.

All keys are relative to the root of the run that the store was opened at.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ckpt_tiering.model.layout import StoreUrl
    from ckpt_tiering.stores.body import Body

__all__ = [
    "AlreadyExists",
    "Capabilities",
    "Completed",
    "CompletedPart",
    "DeleteFailure",
    "ListsUploads",
    "ObjectInfo",
    "ObjectStore",
    "OpenUpload",
    "StoredPart",
    "TagsObjects",
    "UploadGone",
    "Written",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a store was seen to do, by probing it with throw-away keys.

    Attributes:
        conditional_put: PUT with ``If-None-Match: *`` refuses to overwrite.
        checks_crc64nvme: A PUT with a wrong CRC64NVME is refused, and HEAD returns the right one,
            for single and multipart objects. Otherwise durability is proven by reading back.
        tags: Objects can be tagged, at creation and afterwards.
        lists_uploads: Open multipart uploads can be listed.
    """

    conditional_put: bool
    checks_crc64nvme: bool
    tags: bool
    lists_uploads: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectInfo:
    """What a store says of an object.

    Attributes:
        key: Key, relative to the root.
        size_bytes: Length.
        crc64nvme: Checksum of the whole object as the store reports it; None if it reports none
            (listings never do).
        writer: Token of the writer that was given at `ObjectStore.put`; None in listings.
        etag: Entity tag, opaque.
    """

    key: str
    size_bytes: int
    etag: str
    crc64nvme: int | None = None
    writer: str | None = None


@dataclass(frozen=True, slots=True)
class Written:
    """The object was written by this call."""

    etag: str


@dataclass(frozen=True, slots=True)
class AlreadyExists:
    """A conditional put lost: there is an object at the key. It may be our own (lost reply)."""


@dataclass(frozen=True, slots=True)
class Completed:
    """The multipart upload became an object."""

    etag: str


@dataclass(frozen=True, slots=True)
class UploadGone:
    """The store knows no such multipart upload: completed, aborted, or never there."""


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A part that the store holds. The number counts from 1."""

    number: int
    size_bytes: int
    etag: str


@dataclass(frozen=True, slots=True)
class CompletedPart:
    """A part as `ObjectStore.complete_upload` wants it. The number counts from 1."""

    number: int
    etag: str
    crc64nvme: int


@dataclass(frozen=True, slots=True)
class OpenUpload:
    """A multipart upload that is open."""

    key: str
    upload_id: str


@dataclass(frozen=True, slots=True)
class DeleteFailure:
    """A key that could not be deleted, and why."""

    key: str
    reason: str


class ObjectStore(Protocol):
    """A store, opened at the root of one run. Safe to use from several threads."""

    @property
    def url(self) -> StoreUrl:
        """Root that keys are relative to."""
        ...

    def put(
        self,
        key: str,
        body: Body,
        *,
        if_absent: bool = False,
        tag: str | None = None,
        writer: str | None = None,
    ) -> Written | AlreadyExists:
        """Write an object in one request, with its checksum.

        Args:
            key: Where.
            body: The bytes.
            if_absent: Refuse to overwrite (``If-None-Match: *``).
            tag: Value of the tag ``ckpt-tiering-state``; None for no tag.
            writer: Token kept in the object's metadata, to recognise an own write after a lost
                reply.
        """
        ...

    def head(self, key: str) -> ObjectInfo | None:
        """Return what the store knows of an object; None if there is none."""
        ...

    def get(self, key: str, start: int = 0, end: int | None = None) -> Iterator[bytes]:
        """Yield the bytes from ``start`` (inclusive) to ``end`` (exclusive; None for all).

        Raises:
            NotFoundError: There is no such object.
            IntegrityError: The object is shorter than ``end``, or ``start`` is not within it.
            TransientError: The stream was cut on its way.
        """
        ...

    def list(self, prefix: str, start_after: str = "") -> Iterator[ObjectInfo]:
        """Yield all objects below ``prefix``, over all pages, in the store's order."""
        ...

    def delete(self, keys: Sequence[str]) -> tuple[DeleteFailure, ...]:
        """Delete objects; missing ones are no failure. Return what could not be deleted."""
        ...

    def create_upload(self, key: str, *, tag: str | None = None) -> str:
        """Open a multipart upload with full-object CRC64NVME; return its id."""
        ...

    def put_part(self, key: str, upload_id: str, number: int, body: Body) -> str | UploadGone:
        """Send one part with its checksum; return its entity tag. Sending it again is allowed."""
        ...

    def list_parts(self, key: str, upload_id: str) -> tuple[StoredPart, ...] | UploadGone:
        """Return all parts that the store holds of an upload, over all pages.

        A number that was sent several times with different bytes may be there several times
        (SeaweedFS keeps them all); the entity tag says which is which.
        """
        ...

    def complete_upload(
        self, key: str, upload_id: str, parts: Sequence[CompletedPart], *, crc64nvme: int
    ) -> Completed | UploadGone:
        """Make the object from its parts; the checksum is that of the whole object."""
        ...

    def abort_upload(self, key: str, upload_id: str) -> None:
        """Drop an upload and its parts; one that is gone is no error."""
        ...

    def close(self) -> None:
        """Let go of connections; the next verb opens new ones."""
        ...


@runtime_checkable
class TagsObjects(Protocol):
    """Optional ability of a store: tags."""

    def tag(self, key: str, value: str) -> bool:
        """Set the tag ``ckpt-tiering-state``; return False if there is no such object."""
        ...


@runtime_checkable
class ListsUploads(Protocol):
    """Optional ability of a store: finding open multipart uploads."""

    def list_uploads(self, prefix: str) -> tuple[OpenUpload, ...]:
        """Return the open multipart uploads below ``prefix``, over all pages."""
        ...
