"""A look at what is staged here and not durable yet: no manifest vouches for it, its seal does."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_tiering.errors import IntegrityError, NotFoundError
from ckpt_tiering.fsio import digest_file
from ckpt_tiering.model.layout import FILES_NAME, SEAL_NAME
from ckpt_tiering.model.plan import digest_of
from ckpt_tiering.model.seal import decode_seal

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["verified_copy"]


def verified_copy(link: Path) -> Path:
    """Return the staged file that ``link`` is or leads to, after reading all of it once.

    Raises:
        NotFoundError: It is not on this node, or its save was never sealed.
        IntegrityError: It is not what was sealed.
        FormatError: The seal is torn.
    """
    file = link.resolve()
    shard = next((p for p in file.parents if (p / SEAL_NAME).is_file()), None)
    if shard is None:
        raise NotFoundError(f"checkpoint {link} is neither durable nor staged on this node")
    seal = decode_seal((shard / SEAL_NAME).read_bytes(), str(shard / SEAL_NAME))
    path = file.relative_to(shard / FILES_NAME).as_posix()
    digest = next((digest_of(entry) for entry in seal.files if entry.path == path), None)
    if digest is None or digest_file(file, digest.part_bytes) != digest:
        raise IntegrityError(
            f"{file} is not what was staged for save {seal.save_id}, which is not durable",
            hint="resume from an earlier checkpoint",
            key=path,
        )
    return file
