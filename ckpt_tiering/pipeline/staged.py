"""A look at what is staged on this node before it is durable: compared with its seal, as always."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_tiering.errors import IntegrityError, NotFoundError
from ckpt_tiering.fsio import digest_file
from ckpt_tiering.model.layout import FILES_NAME, SEAL_NAME
from ckpt_tiering.model.plan import digest_of
from ckpt_tiering.model.seal import decode_seal

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["find_staged"]


def find_staged(directory: Path, path: str) -> Path:
    """Return a staged file of a save, after reading it once and comparing.

    Args:
        directory: Staging directory of the save.
        path: Path within the checkpoint.

    Raises:
        NotFoundError: No shard of the save on this node has it.
        IntegrityError: It is not what was sealed.
        FormatError: The seal is torn.
    """
    for sealed in sorted(directory.glob(f"*/{SEAL_NAME}")):
        for entry in decode_seal(sealed.read_bytes(), str(sealed)).files:
            if entry.path != path or entry.kind != "file":
                continue
            file = sealed.parent / FILES_NAME / path
            if digest_file(file, entry.part_bytes) != digest_of(entry):
                raise IntegrityError(f"staged file {file} changed after it was sealed", key=path)
            return file
    raise NotFoundError(f"no shard staged in {directory} has a file {path!r}")
