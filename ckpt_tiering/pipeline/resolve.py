"""Which saves there are: reads `commits/`, trusts nothing it finds there."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from ckpt_tiering.errors import FormatError, NotFoundError
from ckpt_tiering.model.catalog import SaveInfo, newest_named
from ckpt_tiering.model.ids import SaveId
from ckpt_tiering.model.layout import COMMITS_PREFIX, commit_key
from ckpt_tiering.model.manifest import Manifest, NodeManifest, decode

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckpt_tiering.pipeline.session import Session

__all__ = [
    "WholeSave",
    "all_infos",
    "durable_ids",
    "find_named",
    "load_save",
    "missing_objects",
    "newest",
    "read_info",
]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WholeSave:
    """A durable save with all its node manifests."""

    info: SaveInfo
    nodes: tuple[NodeManifest, ...]


def durable_ids(session: Session) -> list[SaveId]:
    """Return the ids of all durable saves, newest first, by one listing.

    Foreign files below ``commits/`` are left alone and mentioned in the log.
    """
    listing = session.call(lambda: list(session.store.list(COMMITS_PREFIX)))
    ids = []
    for info in listing:
        name = info.key.removeprefix(COMMITS_PREFIX)
        try:
            ids.append(SaveId.parse(name.removesuffix(".json")))
        except FormatError:
            _log.info("%s/%s is no commit of ours; ignored", session.store.url, info.key)
    return sorted(ids, reverse=True)


def _read(session: Session, key: str) -> bytes:
    return b"".join(session.call(lambda: list(session.store.get(key))))


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
    nodes: list[NodeManifest] = []
    for ref in manifest.nodes:
        data = _read(session, ref.key)
        if hashlib.sha256(data).hexdigest() != ref.sha256:
            raise FormatError(
                f"{ref.key} is not the node manifest that was committed: its SHA-256 differs",
                key=ref.key,
            )
        nodes.append(decode(NodeManifest, data, ref.key))
    return WholeSave(SaveInfo.of(session.store.url, manifest), tuple(nodes))


def missing_objects(session: Session, save: WholeSave) -> list[str]:
    """Return what is wrong with the objects of a save, by asking the store for each: a HEAD apiece.

    Each entry names an object that is gone, has another size, or another checksum.
    """
    wrong: list[str] = []

    def look(key: str, size_bytes: int, crc64nvme: str) -> None:
        info = session.call(lambda: session.store.head(key))
        if info is None:
            wrong.append(f"{key} is gone")
        elif info.size_bytes != size_bytes:
            wrong.append(f"{key} has {info.size_bytes} bytes, the manifest says {size_bytes}")
        elif (
            session.capabilities.checks_crc64nvme
            and info.crc64nvme is not None
            and info.crc64nvme != int(crc64nvme, 16)
        ):
            wrong.append(
                f"{key} has CRC64NVME {info.crc64nvme:016x}, the manifest says {crc64nvme}"
            )

    session.run_all(
        partial(look, o.key, o.size_bytes, o.crc64nvme) for n in save.nodes for o in n.objects
    )
    return sorted(wrong)


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


def find_named(session: Session, name: str) -> SaveInfo | None:
    """Return the newest durable save of a name; see `newest_named`."""
    return newest_named(all_infos(session), name)
