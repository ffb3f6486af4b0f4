"""Manifests for tests: small, true ones, and ways to bend them."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

from ckpt_tiering.model.digest import StreamDigest
from ckpt_tiering.model.manifest import (
    FileEntry,
    Manifest,
    Metadata,
    NodeManifest,
    ObjectEntry,
    encode,
    make_manifest,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

SAVE_ID = "000000000100-abcd"


def file_entry(
    path: str, data: bytes = b"data", *, part_bytes: int = 3, rank: int = 0
) -> FileEntry:
    stream = StreamDigest(part_bytes)
    stream.update(data)
    digest = stream.digest()
    return FileEntry(
        path=path,
        kind="file",
        rank=rank,
        mode=0o644,
        size_bytes=len(data),
        crc64nvme=f"{digest.crc:016x}",
        part_bytes=part_bytes,
        parts=tuple(f"{crc:016x}" for crc in digest.part_crcs),
    )


def link_entry(path: str, target: str) -> FileEntry:
    return FileEntry(path=path, kind="link", rank=0, target=target)


def dir_entry(path: str) -> FileEntry:
    return FileEntry(path=path, kind="dir", rank=0, mode=0o755)


def node_manifest(
    files: Sequence[FileEntry] = (),
    *,
    node: str = "n00000",
    num_nodes: int = 1,
    save_id: str = SAVE_ID,
    name: str | None = None,
    metadata: Metadata | None = None,
    snapshot_at: float = 1.5,
) -> NodeManifest:
    return NodeManifest(
        save_id=save_id,
        step=int(save_id[:12]),
        name=name,
        num_nodes=num_nodes,
        metadata=metadata or {},
        snapshot_at=snapshot_at,
        node=node,
        ranks=(0,),
        objects=(
            ObjectEntry(
                key=f"saves/{save_id}/{node}/p/0000.tar",
                size_bytes=1 << 20,
                crc64nvme="0" * 16,
                verified="checksum",
            ),
        ),
        files=tuple(files),
    )


def with_bytes(node: NodeManifest) -> tuple[str, bytes, NodeManifest]:
    return f"saves/{node.save_id}/nodes/{node.node}.json", encode(node), node


def manifest(*nodes: NodeManifest) -> Manifest:
    return make_manifest([with_bytes(node) for node in nodes or (node_manifest(),)])


def as_json(document: Manifest | NodeManifest) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(encode(document))
    return value


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
