"""Which saves there are: reads `commits/`, trusts nothing it finds there."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from ckpt_tiering.errors import ErrorKind, FormatError, NotFoundError
from ckpt_tiering.model.catalog import SaveInfo
from ckpt_tiering.model.findings import Finding, Problem
from ckpt_tiering.model.ids import SaveId
from ckpt_tiering.model.layout import COMMITS_PREFIX, commit_key
from ckpt_tiering.model.manifest import (
    MAX_DOCUMENT_BYTES,
    Manifest,
    NodeManifest,
    NodeRef,
    decode,
    make_manifest,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckpt_tiering.pipeline.session import Session

__all__ = [
    "Catalog",
    "WholeSave",
    "all_infos",
    "catalog",
    "check_manifests",
    "commits",
    "durable_ids",
    "load_save",
    "newest",
    "read_info",
]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WholeSave:
    """A durable save with all its node manifests."""

    info: SaveInfo
    nodes: tuple[NodeManifest, ...]


@dataclass(frozen=True, slots=True)
class Catalog:
    """What lies below `commits/`: the saves, newest first, and what is no usable commit."""

    saves: tuple[SaveInfo, ...]
    unusable: tuple[Finding, ...]


def commits(session: Session) -> tuple[list[SaveId], list[Finding]]:
    """Return the ids of all durable saves, newest first, and foreign files; by one listing."""
    listing = session.call(lambda: list(session.store.list(COMMITS_PREFIX)))
    ids: list[SaveId] = []
    foreign: list[Finding] = []
    for info in listing:
        name = info.key.removeprefix(COMMITS_PREFIX)
        try:
            save_id = SaveId.parse(name.removesuffix(".json"))
        except FormatError:
            save_id = None
        if save_id is not None and commit_key(save_id) == info.key:
            ids.append(save_id)
        else:
            why = f"{info.key} is no commit of ours; ignored"
            foreign.append(Finding(problem=Problem.FOREIGN, key=info.key, message=why))
    return sorted(ids, reverse=True), foreign


def durable_ids(session: Session) -> list[SaveId]:
    """Return the ids of all durable saves, newest first, by one listing.

    Foreign files below ``commits/`` are left alone and mentioned in the log.
    """
    ids, foreign = commits(session)
    for finding in foreign:
        _log.info("%s: %s", session.store.url, finding.message)
    return ids


def _read(session: Session, key: str) -> bytes:
    """Read a document; of one that is too long to be decoded only as much as shows that."""

    def attempt() -> bytes:
        data = bytearray()
        for chunk in session.store.get(key):
            data += chunk
            if len(data) > MAX_DOCUMENT_BYTES:
                break
        return bytes(data)

    return session.call(attempt)


def _manifest(session: Session, save_id: SaveId) -> Manifest:
    key = commit_key(save_id)
    manifest = decode(Manifest, _read(session, key), key)
    if manifest.save_id != str(save_id):
        raise FormatError(f"{key} is the manifest of save {manifest.save_id}", key=key)
    return manifest


def read_info(session: Session, save_id: SaveId) -> SaveInfo:
    """Read the manifest of a save.

    Raises:
        NotFoundError: There is no such durable save.
        FormatError: What is there is no manifest of it.
    """
    return SaveInfo.of(session.store.url, _manifest(session, save_id))


def load_save(session: Session, save_id: SaveId) -> WholeSave:
    """Read the manifest of a save and the node manifests it points to, comparing their digests.

    Raises:
        NotFoundError: The save, or one of its node manifests, is not there.
        FormatError: A manifest is not what the commit point says.
    """
    manifest = _manifest(session, save_id)
    nodes = tuple(_checked_node(_read(session, ref.key), ref) for ref in manifest.nodes)
    return WholeSave(SaveInfo.of(session.store.url, manifest), nodes)


def _checked_node(data: bytes, ref: NodeRef) -> NodeManifest:
    if hashlib.sha256(data).hexdigest() != ref.sha256:
        raise FormatError(
            f"{ref.key} is not the node manifest that was committed: its SHA-256 differs",
            key=ref.key,
        )
    return decode(NodeManifest, data, ref.key)


def check_manifests(
    session: Session, save_id: SaveId
) -> tuple[list[NodeManifest] | None, list[Finding]]:
    """Read all manifests of a save, going on where `load_save` stops.

    Returns:
        The node manifests that are good (None if not even the commit point is), and what is wrong.

    Raises:
        NotFoundError: There is no such durable save.
    """
    key = commit_key(save_id)
    try:
        manifest = _manifest(session, save_id)
    except FormatError as error:
        return None, [_unusable(key, save_id, error.message)]
    looked = [(ref.key, *_look_at_node(session, save_id, ref)) for ref in manifest.nodes]
    wrong = [finding for _, _, finding in looked if not isinstance(finding, NodeManifest)]
    good = [(k, data, node) for k, data, node in looked if isinstance(node, NodeManifest)]
    if not wrong and not _follows(manifest, good):
        why = f"{key} does not follow from its node manifests"
        wrong.append(_unusable(key, save_id, why))
    return [node for _, _, node in good], wrong


def _follows(manifest: Manifest, nodes: list[tuple[str, bytes, NodeManifest]]) -> bool:
    try:
        return make_manifest(nodes) == manifest
    except ValueError:  # the nodes contradict one another
        return False


def _unusable(key: str, save_id: SaveId, why: str) -> Finding:
    return Finding(problem=Problem.MANIFEST, key=key, message=why, save_id=str(save_id))


def _look_at_node(
    session: Session, save_id: SaveId, ref: NodeRef
) -> tuple[bytes, NodeManifest | Finding]:
    try:
        data = _read(session, ref.key)
    except NotFoundError as error:
        if error.kind is ErrorKind.NO_SUCH_BUCKET:
            raise
        finding = _unusable(ref.key, save_id, f"{ref.key} is not there")
        return b"", replace(finding, problem=Problem.MISSING, expected=ref.sha256)
    try:
        return data, _checked_node(data, ref)
    except FormatError as error:
        found = hashlib.sha256(data).hexdigest()
        finding = _unusable(ref.key, save_id, error.message)
        return data, replace(finding, expected=ref.sha256, found=found)


def catalog(session: Session) -> Catalog:
    """Read all manifests, in parallel. What can't be used is told, not logged."""
    ids, unusable = commits(session)
    saves: list[SaveInfo] = []

    def read(save_id: SaveId) -> None:
        try:
            saves.append(read_info(session, save_id))
        except NotFoundError as error:
            if error.kind is ErrorKind.NO_SUCH_BUCKET:
                raise  # otherwise it was deleted since the listing
        except FormatError as error:
            unusable.append(_unusable(commit_key(save_id), save_id, error.message))

    session.run_all(partial(read, save_id) for save_id in ids)
    return Catalog(
        tuple(sorted(saves, key=lambda s: s.id, reverse=True)),
        tuple(sorted(unusable, key=lambda f: f.key, reverse=True)),
    )


def all_infos(session: Session) -> Iterator[SaveInfo]:
    """Yield all durable saves, newest first. A manifest that can't be read is logged and passed.

    One that vanishes between the listing and the reading was deleted meanwhile.
    """
    for save_id in durable_ids(session):
        try:
            yield read_info(session, save_id)
        except NotFoundError:
            continue
        except FormatError as error:
            _log.warning("save %s is unusable: %s", save_id, error.message)


def newest(session: Session) -> SaveInfo | None:
    """Return the newest durable save; None if there is none."""
    return next(all_infos(session), None)
