"""Base of stores that stand before another one."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from ckpt_tiering.errors import CkptTieringError
from ckpt_tiering.stores.base import ListsUploads, TagsObjects

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ckpt_tiering.model.layout import StoreUrl
    from ckpt_tiering.stores.base import (
        AlreadyExists,
        Completed,
        CompletedPart,
        DeleteFailure,
        ObjectInfo,
        ObjectStore,
        OpenUpload,
        StoredPart,
        UploadGone,
        Written,
    )
    from ckpt_tiering.stores.body import Body

__all__ = ["WrapperStore"]

T = TypeVar("T")


class WrapperStore:
    """Passes every verb on; a subclass overrides verbs, or `around` for all of them.

    Args:
        inner: The store that does the work.
    """

    def __init__(self, inner: ObjectStore) -> None:
        self.inner = inner

    def around(self, verb: str, key: str, call: Callable[[], T]) -> T:
        """Make the call to the inner store.

        Args:
            verb: Name of the method of `ObjectStore`.
            key: Its key; the prefix for the listing verbs, all keys with commas for ``delete``.
            call: Does it. For ``get`` and ``list`` it returns an iterator that has not begun yet.
        """
        return call()

    @property
    def url(self) -> StoreUrl:
        """Root that keys are relative to."""
        return self.inner.url

    def put(
        self,
        key: str,
        body: Body,
        *,
        if_absent: bool = False,
        tag: str | None = None,
        writer: str | None = None,
    ) -> Written | AlreadyExists:
        """See `ObjectStore.put`."""
        return self.around(
            "put",
            key,
            lambda: self.inner.put(key, body, if_absent=if_absent, tag=tag, writer=writer),
        )

    def head(self, key: str) -> ObjectInfo | None:
        """See `ObjectStore.head`."""
        return self.around("head", key, lambda: self.inner.head(key))

    def get(self, key: str, start: int = 0, end: int | None = None) -> Iterator[bytes]:
        """See `ObjectStore.get`."""
        return self.around("get", key, lambda: self.inner.get(key, start, end))

    def list(self, prefix: str, start_after: str = "") -> Iterator[ObjectInfo]:
        """See `ObjectStore.list`."""
        return self.around("list", prefix, lambda: self.inner.list(prefix, start_after))

    def delete(self, keys: Sequence[str]) -> tuple[DeleteFailure, ...]:
        """See `ObjectStore.delete`."""
        return self.around("delete", ",".join(keys), lambda: self.inner.delete(keys))

    def create_upload(self, key: str, *, tag: str | None = None) -> str:
        """See `ObjectStore.create_upload`."""
        return self.around("create_upload", key, lambda: self.inner.create_upload(key, tag=tag))

    def put_part(self, key: str, upload_id: str, number: int, body: Body) -> str | UploadGone:
        """See `ObjectStore.put_part`."""
        return self.around(
            "put_part", key, lambda: self.inner.put_part(key, upload_id, number, body)
        )

    def list_parts(self, key: str, upload_id: str) -> tuple[StoredPart, ...] | UploadGone:
        """See `ObjectStore.list_parts`."""
        return self.around("list_parts", key, lambda: self.inner.list_parts(key, upload_id))

    def complete_upload(
        self, key: str, upload_id: str, parts: Sequence[CompletedPart], *, crc64nvme: int
    ) -> Completed | UploadGone:
        """See `ObjectStore.complete_upload`."""
        return self.around(
            "complete_upload",
            key,
            lambda: self.inner.complete_upload(key, upload_id, parts, crc64nvme=crc64nvme),
        )

    def abort_upload(self, key: str, upload_id: str) -> None:
        """See `ObjectStore.abort_upload`."""
        self.around("abort_upload", key, lambda: self.inner.abort_upload(key, upload_id))

    def close(self) -> None:
        """See `ObjectStore.close`."""
        self.inner.close()

    def tag(self, key: str, value: str) -> bool:
        """See `TagsObjects.tag`; an error if the inner store has no tags."""
        inner = self.inner
        if not isinstance(inner, TagsObjects):
            raise CkptTieringError(f"{self.url} has no tags", op="tag", key=key)
        return self.around("tag", key, lambda: inner.tag(key, value))

    def list_uploads(self, prefix: str) -> tuple[OpenUpload, ...]:
        """See `ListsUploads.list_uploads`; an error if the inner store can't."""
        inner = self.inner
        if not isinstance(inner, ListsUploads):
            raise CkptTieringError(f"{self.url} lists no uploads", op="list_uploads", key=prefix)
        return self.around("list_uploads", prefix, lambda: inner.list_uploads(prefix))
