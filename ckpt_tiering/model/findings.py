"""What a verification of durable saves finds, as values."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["CheckedBy", "Finding", "Problem", "SaveCheck"]


class Problem(StrEnum):
    """What is wrong with something in a store. Append only: users' alerts match on them."""

    MISSING = "missing"  # an object that a manifest names is not there
    SIZE = "size"  # it has another length
    CHECKSUM = "checksum"  # it has other bytes
    FILE = "file"  # the stretch of an object that is a file has other bytes than the file had
    MANIFEST = "manifest"  # a manifest can't be read, or is not what was committed
    FOREIGN = "foreign"  # something below `commits/` is no commit of ours


class CheckedBy(StrEnum):
    """How an object was compared with its manifest, from the weakest to the strongest."""

    SIZE = "size"  # the store reports no checksum, or one that was seen to be worth nothing
    CHECKSUM = "checksum"  # the store's own checksum, and the size
    READ = "read"  # every byte was downloaded and digested


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is wrong.

    Attributes:
        problem: What kind of thing.
        key: Object that it was found in, relative to the root of the run.
        message: One sentence for a person.
        save_id: The save; None for what belongs to no save.
        path: File of the checkpoint that is damaged; None if no single one is known to be.
        start: Where the damage starts in the object (inclusive); None if that is not known.
        end: Where it ends (exclusive).
        expected: Digest, or length in bytes, that the manifest says; None if it says none.
        found: What was found instead; None if nothing was.
    """

    problem: Problem
    key: str
    message: str
    save_id: str | None = None
    path: str | None = None
    start: int | None = None
    end: int | None = None
    expected: str | None = None
    found: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveCheck:
    """Result of the verification of one save.

    Attributes:
        save_id: The save.
        readable: Whether its manifest could be read at all.
        findings: What is wrong, by key.
        num_objects: Number of objects that were asked for.
        total_bytes: What they have together according to the manifest.
        checked_by: Number of good objects, by how they were compared.
    """

    save_id: str
    readable: bool
    findings: tuple[Finding, ...] = ()
    num_objects: int = 0
    total_bytes: int = 0
    checked_by: Mapping[CheckedBy, int] = field(default_factory=dict)
