"""Deleting a save: the manifest first, so that it stops being restorable before it loses a byte."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from ckpt_tiering.errors import TransientError
from ckpt_tiering.model.layout import commit_key, save_prefix
from ckpt_tiering.stores.base import ListsUploads

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckpt_tiering.model.ids import SaveId
    from ckpt_tiering.pipeline.session import Session

__all__ = ["remove_from_store"]


def remove_from_store(session: Session, save_id: SaveId) -> int:
    """Delete everything the store has of a save. Safe to repeat.

    Returns:
        The number of objects that were deleted.

    Raises:
        TransientError: Some objects could not be deleted; the message names one.
        CkptTieringError: As of `ObjectStore`, after the retries.
    """
    _delete(session, [commit_key(save_id)])
    prefix = save_prefix(save_id)
    store = session.store
    if session.capabilities.lists_uploads and isinstance(store, ListsUploads):
        lister = store.list_uploads
        for upload in session.call(lambda: lister(prefix)):
            session.call(partial(store.abort_upload, upload.key, upload.upload_id))
    keys = session.call(lambda: [info.key for info in store.list(prefix)])
    _delete(session, keys)
    return len(keys)


def _delete(session: Session, keys: Sequence[str]) -> None:
    if not keys:
        return
    failures = session.call(lambda: session.store.delete(keys))
    if failures:
        raise TransientError(
            f"{len(failures)} of {len(keys)} objects can't be deleted; "
            f"{failures[0].key}: {failures[0].reason}",
            hint="allow s3:DeleteObject below the run's root",
            key=failures[0].key,
        )
