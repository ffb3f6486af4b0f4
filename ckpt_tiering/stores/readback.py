"""What an unclear reply meant, from what the store holds now. Pure: no I/O in here.

A reply is lost like this:

1. We send a PUT (or the completion of a multipart upload).
2. The store takes it and makes the object.
3. The answer does not reach us: a timeout, a reset, a 500 from a proxy on the way.
4. We, or a library below us, send the same request again.
5. The store refuses (``412`` for a conditional PUT, ``NoSuchUpload`` for a completion), because
   of the object that event 2 made.

Seen from event 5 alone, our own success looks like somebody else's. So the object is asked: HEAD,
and where that can't tell, its bytes. Two rules:

- A write that did happen is never reported as a failure when the store can prove it.
- A real failure is never turned into a success that can't be proven. A name, a size or our token
  on the object prove nothing about its contents; only equal checksums, or bytes, do.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

from ckpt_tiering.model.digest import PartCrc, crc64

if TYPE_CHECKING:
    from ckpt_tiering.stores.base import ObjectInfo

__all__ = ["PutReadback", "UploadReadback", "classify_put", "classify_upload"]


class PutReadback(StrEnum):
    """Whose object is at the key of a PUT with an unclear reply."""

    OURS = "ours"  # our bytes, written by us: event 2 happened
    SAME_BYTES = "same_bytes"  # our bytes, written by another: as good as ours
    FOREIGN = "foreign"  # other bytes: a conflict
    ABSENT = "absent"  # nothing there: event 2 did not happen, send again
    UNKNOWN = "unknown"  # right size, but nothing to compare: read the bytes and ask again


class UploadReadback(StrEnum):
    """What became of a multipart upload that the store no longer knows."""

    DONE = "done"  # the object is the one we uploaded
    ABSENT = "absent"  # no object: the upload was aborted or expired, start it again
    FOREIGN = "foreign"  # another object is at the key
    UNKNOWN = "unknown"  # right size, but no checksum to compare: read the bytes


def classify_put(
    expected: PartCrc,
    writer: str,
    seen: ObjectInfo | None,
    seen_bytes: bytes | None = None,
) -> PutReadback:
    """Tell whose object is there.

    Args:
        expected: Length and CRC64NVME of what we sent.
        writer: Token that we sent with it.
        seen: What HEAD says now; None if there is no object.
        seen_bytes: The bytes that are there now, where they were read; they outrank what the store
            says of its checksum.
    """
    if seen is None:
        return PutReadback.ABSENT
    if seen_bytes is not None:
        same = PartCrc(len(seen_bytes), crc64(seen_bytes)) == expected
    elif seen.size_bytes != expected.size_bytes:
        same = False
    elif seen.crc64nvme is None:
        return PutReadback.UNKNOWN
    else:
        same = seen.crc64nvme == expected.crc
    if not same:
        return PutReadback.FOREIGN
    return PutReadback.OURS if seen.writer == writer else PutReadback.SAME_BYTES


def classify_upload(size_bytes: int, crc64nvme: int, seen: ObjectInfo | None) -> UploadReadback:
    """Tell whether the object at the key is the one that a vanished upload was to become.

    Args:
        size_bytes: Length of what we uploaded.
        crc64nvme: Checksum of the whole of it.
        seen: What HEAD says now; None if there is no object.
    """
    if seen is None:
        return UploadReadback.ABSENT
    if seen.size_bytes != size_bytes:
        return UploadReadback.FOREIGN
    if seen.crc64nvme is None:
        return UploadReadback.UNKNOWN
    return UploadReadback.DONE if seen.crc64nvme == crc64nvme else UploadReadback.FOREIGN
