"""Rows of the journal as values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckpt_tiering.model.lifecycle import ObjectState, SaveState
    from ckpt_tiering.model.manifest import FileEntry, Metadata
    from ckpt_tiering.model.plan import PlannedObject

__all__ = ["FileRow", "NewSave", "ObjectRow", "Removal", "SaveRow"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NewSave:
    """A save as it enters the journal: this node's share, all ranks together.

    Attributes:
        run: URL of the run's root.
        store_options: JSON of how to reach the store.
        save_id: Text of the save id.
        step: Training step.
        name: The user's name for the save.
        node: Name of this node within the save.
        num_nodes: Number of nodes that contribute.
        ranks: Ranks of this node that contribute.
        metadata: The user's own facts.
        directory: Staging directory of the save.
        snapshot_at: Seconds since the epoch.
        staged_at: Seconds since the epoch.
        objects: What goes to the store.
        files: Source path relative to ``directory``, and manifest entry, of each file.
    """

    run: str
    store_options: str
    save_id: str
    step: int
    name: str | None
    node: str
    num_nodes: int
    ranks: tuple[int, ...]
    metadata: Metadata
    directory: str
    snapshot_at: float
    staged_at: float
    objects: tuple[PlannedObject, ...]
    files: tuple[tuple[str, FileEntry], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRow:
    """A save in the journal. Times are seconds since the epoch.

    Attributes:
        id: Row id.
        state: Where it stands.
        total_bytes: Sum of its objects' sizes.
        node_manifest: Bytes of the node manifest, once they are fixed.
        writer: Token by which this node recognises its own commit.
        on_nvme: Whether the staged files are still there.
        error: What went wrong last; None if nothing did.
        attempts: Number of times it was put back because of an error.
        retry_at: Not before this time.
    """

    id: int
    run: str
    store_options: str
    save_id: str
    step: int
    name: str | None
    node: str
    num_nodes: int
    ranks: tuple[int, ...]
    metadata: Metadata
    directory: str
    state: SaveState
    total_bytes: int
    snapshot_at: float
    staged_at: float
    started_at: float | None
    uploaded_at: float | None
    durable_at: float | None
    node_manifest: bytes | None
    writer: str | None
    on_nvme: bool
    error: str | None
    attempts: int
    retry_at: float


@dataclass(frozen=True, slots=True)
class FileRow:
    """A file of a save: where it is staged, relative to the save's directory, and its entry."""

    source: str
    entry: FileEntry


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectRow:
    """An object of a save.

    Attributes:
        id: Row id.
        position: Index that file entries refer to.
        key: Key relative to the root.
        is_pack: Whether it is a pack of small files.
        size_bytes: Length.
        crc: CRC64NVME of the whole.
        part_bytes: Length of its parts.
        state: Where it stands.
        upload_id: Id of its multipart upload, once known.
        verified: How it was verified, once it was.
        resends: Number of times it was sent anew because the store held something else.
    """

    id: int
    position: int
    key: str
    is_pack: bool
    size_bytes: int
    crc: int
    part_bytes: int
    state: ObjectState
    upload_id: str | None
    verified: str | None
    resends: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Removal:
    """A wish that a save, or all saves of a name, go.

    Attributes:
        id: Row id.
        run: URL of the run's root.
        store_options: JSON of how to reach the store.
        save_id: The save; empty if the wish is for a name.
        name: The name; empty if the wish is for a save.
        not_of: For a name: saves of this incarnation are not meant.
    """

    id: int
    run: str
    store_options: str
    save_id: str
    name: str
    not_of: str
