"""States of a save and of an object on their way to the store, and which moves are legal."""

from __future__ import annotations

from enum import StrEnum

__all__ = ["OBJECT_MOVES", "SAVE_MOVES", "ObjectState", "SaveState", "check_move"]


class SaveState(StrEnum):
    """Where this node's share of a save stands."""

    STAGED = "staged"  # files complete and fsynced on NVMe, digests known
    UPLOADED = "uploaded"  # the store has all objects
    VERIFIED = "verified"  # the store's sizes and checksums equal the digests
    PUBLISHED = "published"  # the node manifest is in the store
    DURABLE = "durable"  # the manifest is visible
    SETTLED = "settled"  # durable, and the objects are tagged so
    FAILED = "failed"  # can't become durable
    REMOVING = "removing"  # being deleted, manifest first; its row goes last


class ObjectState(StrEnum):
    """Where one object stands."""

    PLANNED = "planned"  # nothing was sent that counts
    OPENING = "opening"  # a multipart upload may or may not be open: its id is not known yet
    OPEN = "open"  # multipart upload with a known id
    SENT = "sent"  # the store has said that it has the object
    VERIFIED = "verified"  # what the store has was compared with the digest


SAVE_MOVES: dict[SaveState, frozenset[SaveState]] = {
    SaveState.STAGED: frozenset({SaveState.UPLOADED}),
    SaveState.UPLOADED: frozenset({SaveState.VERIFIED, SaveState.STAGED}),
    SaveState.VERIFIED: frozenset({SaveState.PUBLISHED}),
    SaveState.PUBLISHED: frozenset({SaveState.DURABLE}),
    SaveState.DURABLE: frozenset({SaveState.SETTLED}),
    SaveState.SETTLED: frozenset(),
    SaveState.FAILED: frozenset(),
    SaveState.REMOVING: frozenset(),
}
OBJECT_MOVES: dict[ObjectState, frozenset[ObjectState]] = {
    ObjectState.PLANNED: frozenset({ObjectState.OPENING, ObjectState.SENT}),
    ObjectState.OPENING: frozenset({ObjectState.OPEN}),
    ObjectState.OPEN: frozenset({ObjectState.SENT, ObjectState.PLANNED}),
    ObjectState.SENT: frozenset({ObjectState.VERIFIED, ObjectState.PLANNED}),
    ObjectState.VERIFIED: frozenset(),
}

# Before the commit a save can fail; anything can be asked to go.
_CAN_FAIL = frozenset(
    {SaveState.STAGED, SaveState.UPLOADED, SaveState.VERIFIED, SaveState.PUBLISHED}
)
_CAN_GO = frozenset(SaveState) - {SaveState.REMOVING}


def check_move(old: SaveState, new: SaveState) -> None:
    """Refuse a move of a save that is not legal.

    Raises:
        ValueError: The move is not legal.
    """
    legal = (
        new in SAVE_MOVES[old]
        or (new is SaveState.FAILED and old in _CAN_FAIL)
        or (new is SaveState.REMOVING and old in _CAN_GO)
    )
    if not legal:
        raise ValueError(f"a save can't go from {old} to {new}")
