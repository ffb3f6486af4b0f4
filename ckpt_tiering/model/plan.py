"""Which objects a node's files become: large files as they are, small ones in packs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckpt_tiering.errors import CapacityError
from ckpt_tiering.model.digest import FileDigest, PartCrc, crc64, join
from ckpt_tiering.model.layout import file_key, pack_key
from ckpt_tiering.model.manifest import FileEntry, check_tree
from ckpt_tiering.model.pack import PACK_BELOW_BYTES, Pack, plan_packs
from ckpt_tiering.model.parts import plan_parts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckpt_tiering.model.ids import SaveId

__all__ = ["PlannedObject", "digest_of", "plan_objects"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedObject:
    """An object that is to be.

    Attributes:
        key: Key relative to the root.
        is_pack: A pack of small files; otherwise one file as it is.
        size_bytes: Length.
        crc: CRC64NVME of the whole.
        part_bytes: Length of its parts, should it need more than one.
    """

    key: str
    is_pack: bool
    size_bytes: int
    crc: int
    part_bytes: int


def digest_of(entry: FileEntry) -> FileDigest:
    """Return the digest that a manifest or seal holds of a file."""
    return FileDigest(
        size_bytes=entry.size_bytes,
        crc=int(entry.crc64nvme, 16),
        part_bytes=entry.part_bytes,
        part_crcs=tuple(int(part, 16) for part in entry.parts),
    )


def _pack_crc(pack: Pack, crcs: dict[str, int]) -> int:
    pieces = []
    for member in pack.members:
        pieces.append(PartCrc(len(member.header), crc64(member.header)))
        pieces.append(PartCrc(member.size_bytes, crcs[member.path]))
        pieces.append(PartCrc(len(member.padding), crc64(member.padding)))
    pieces.append(PartCrc(len(pack.trailer), crc64(pack.trailer)))
    return join(pieces).crc


def plan_objects(
    save_id: SaveId, node: str, files: Sequence[FileEntry], part_bytes: int
) -> tuple[tuple[PlannedObject, ...], tuple[FileEntry, ...]]:
    """Assign the files of a node to objects.

    Args:
        save_id: The save.
        node: Name of the node.
        files: With digests of pieces whose length divides ``part_bytes``.
        part_bytes: Length of the parts of multipart uploads; raised for huge files.

    Returns:
        The objects, and the files in the same order with ``object`` and ``offset`` filled in.

    Raises:
        CapacityError: A file is over the store's limits.
        FormatError: Two files can't lie in one tree.
    """
    check_tree(files)
    objects: list[PlannedObject] = []
    placed: dict[str, tuple[int, int]] = {}
    regular = [f for f in files if f.kind == "file"]
    for file in regular:
        if file.size_bytes < PACK_BELOW_BYTES:
            continue
        try:
            parts = plan_parts(file.size_bytes, part_bytes)
        except CapacityError as error:
            raise CapacityError(f"{file.path!r}: {error.message}", kind=error.kind) from error
        placed[file.path] = (len(objects), 0)
        objects.append(
            PlannedObject(
                key=file_key(save_id, node, file.path),
                is_pack=False,
                size_bytes=file.size_bytes,
                crc=int(file.crc64nvme, 16),
                part_bytes=parts.part_bytes,
            )
        )
    small = [f for f in regular if f.size_bytes < PACK_BELOW_BYTES]
    crcs = {f.path: int(f.crc64nvme, 16) for f in small}
    for index, pack in enumerate(plan_packs((f.path, f.size_bytes, f.mode) for f in small)):
        for member in pack.members:
            placed[member.path] = (len(objects), member.offset)
        objects.append(
            PlannedObject(
                key=pack_key(save_id, node, index),
                is_pack=True,
                size_bytes=pack.size_bytes,
                crc=_pack_crc(pack, crcs),
                part_bytes=max(1, pack.size_bytes),
            )
        )
    entries = tuple(
        f.model_copy(update={"object": placed[f.path][0], "offset": placed[f.path][1]})
        if f.kind == "file"
        else f
        for f in files
    )
    return tuple(objects), entries
