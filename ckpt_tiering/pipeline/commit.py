"""Fourth stage: node manifest, then THE commit point, then the tags.

The manifest follows from the node manifests, which every node can read, so any node may write it
and a conditional PUT lets one of them. The one that did says so (`durable`), exactly once, even if
it dies between the PUT and its reply: the object carries its writer's token, which was in the
journal before.
"""

from __future__ import annotations

import secrets
from functools import partial
from typing import TYPE_CHECKING

from ckpt_tiering.errors import ConflictError, NotFoundError, TransientError
from ckpt_tiering.model.events import Event, EventKind
from ckpt_tiering.model.ids import SaveId
from ckpt_tiering.model.layout import commit_key, node_manifest_key, node_manifest_prefix
from ckpt_tiering.model.lifecycle import SaveState
from ckpt_tiering.model.manifest import (
    NodeManifest,
    ObjectEntry,
    decode,
    encode,
    make_manifest,
)
from ckpt_tiering.stores.base import AlreadyExists, TagsObjects
from ckpt_tiering.stores.body import Body

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckpt_tiering.journal.journal import Journal
    from ckpt_tiering.journal.rows import SaveRow
    from ckpt_tiering.pipeline.session import Session

__all__ = ["commit", "publish", "settle"]

COMMITTED_TAG = "committed"


def publish(journal: Journal, session: Session, save: SaveRow) -> SaveRow:
    """Write this node's manifest, after all its objects were verified.

    Raises:
        ConflictError: Another node manifest is there already.
        CkptTieringError: As of `ObjectStore`, after the retries.
    """
    if save.node_manifest is None or save.writer is None:
        save = journal.update(
            save, node_manifest=_node_manifest(journal, save), writer=secrets.token_hex(16)
        )
    assert save.node_manifest is not None
    _put_once(
        session,
        node_manifest_key(SaveId.parse(save.save_id), save.node),
        save.node_manifest,
        save.writer,
    )
    return journal.move(save, SaveState.PUBLISHED)


def _node_manifest(journal: Journal, save: SaveRow) -> bytes:
    objects = journal.objects(save)
    return encode(
        NodeManifest(
            save_id=save.save_id,
            step=save.step,
            name=save.name,
            num_nodes=save.num_nodes,
            metadata=save.metadata,
            snapshot_at=save.snapshot_at,
            node=save.node,
            ranks=save.ranks,
            objects=tuple(
                ObjectEntry(
                    key=o.key,
                    size_bytes=o.size_bytes,
                    crc64nvme=f"{o.crc:016x}",
                    verified="checksum" if o.verified == "checksum" else "read-back",
                )
                for o in objects
            ),
            files=tuple(row.entry for row in journal.files(save)),
        )
    )


def _put_once(session: Session, key: str, data: bytes, writer: str | None) -> bool:
    """Write an object unless it is there; return whether this writer wrote it, now or before.

    Raises:
        ConflictError: Other bytes are there.
    """
    store = session.store
    if not session.capabilities.conditional_put and _check_same(session, key, data):
        return _is_writer(session, key, writer)
    outcome = session.call(
        lambda: store.put(
            key,
            Body.of_bytes(data, key),
            if_absent=session.capabilities.conditional_put,
            writer=writer,
        )
    )
    if isinstance(outcome, AlreadyExists):
        if not _check_same(session, key, data):
            raise TransientError(f"{key} was there and is gone again", key=key)
        return _is_writer(session, key, writer)
    return True


def _check_same(session: Session, key: str, data: bytes) -> bool:
    """Return False if nothing is at ``key``, True if these very bytes are."""
    try:
        there = session.call(lambda: b"".join(session.store.get(key)))
    except NotFoundError:
        return False
    if there != data:
        raise ConflictError(
            f"{session.store.url}/{key} holds another manifest than this node's",
            hint="another job writes below the same store URL; give each run its own",
            key=key,
        )
    return True


def _is_writer(session: Session, key: str, writer: str | None) -> bool:
    info = session.call(lambda: session.store.head(key))
    return info is not None and info.writer is not None and info.writer == writer


def commit(
    journal: Journal, session: Session, save: SaveRow, now: Callable[[], float]
) -> SaveRow | None:
    """Write the manifest if all nodes have published.

    Returns:
        The save, durable; None if a node's manifest is still missing.

    Raises:
        ConflictError: Another manifest is at the commit point.
        FormatError: The nodes do not agree on what the save is.
        CkptTieringError: As of `ObjectStore`, after the retries.
    """
    save_id = SaveId.parse(save.save_id)
    prefix = node_manifest_prefix(save_id)
    listing = session.call(lambda: list(session.store.list(prefix)))
    if len(listing) < save.num_nodes:
        return None
    nodes = []
    for info in listing:
        data = session.call(partial(_read, session, info.key))
        nodes.append((info.key, data, decode(NodeManifest, data, info.key)))
    manifest = make_manifest(nodes)
    wrote = _put_once(session, commit_key(save_id), encode(manifest), save.writer)
    durable_at = now()
    event = Event(
        kind=EventKind.DURABLE,
        at=durable_at,
        run=save.run,
        save_id=save.save_id,
        step=save.step,
        fields={
            "name": save.name,
            "bytes": manifest.total_bytes,
            "verified": manifest.verified,
            "nodes": manifest.num_nodes,
            "snapshot_to_durable_seconds": round(durable_at - manifest.snapshot_at, 6),
        },
    )
    return journal.move(save, SaveState.DURABLE, event if wrote else None, durable_at=durable_at)


def _read(session: Session, key: str) -> bytes:
    return b"".join(session.store.get(key))


def settle(journal: Journal, session: Session, save: SaveRow) -> SaveRow:
    """Tag this node's objects as committed, so that no janitor takes them for orphans."""
    store = session.store
    if session.capabilities.tags and isinstance(store, TagsObjects):
        tag = store.tag
        session.run_all(
            partial(session.call, partial(tag, obj.key, COMMITTED_TAG))
            for obj in journal.objects(save)
        )
    return journal.move(save, SaveState.SETTLED)
