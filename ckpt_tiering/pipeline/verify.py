"""Third stage: what the store has is compared with the digests taken at staging.

The store's own checksum and size where it computes them (see `Capabilities`); otherwise the object
is read back and digested here. Which of the two it was is kept and written into the manifest.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Literal

from ckpt_tiering.errors import IntegrityError, TransientError
from ckpt_tiering.model.digest import crc64
from ckpt_tiering.model.events import Event, EventKind
from ckpt_tiering.model.lifecycle import ObjectState, SaveState

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckpt_tiering.journal.journal import Journal
    from ckpt_tiering.journal.rows import ObjectRow, SaveRow
    from ckpt_tiering.pipeline.session import Session
    from ckpt_tiering.stores.base import ObjectInfo

__all__ = ["verify"]

MAX_RESENDS = 3
Verified = Literal["checksum", "read-back"]


def verify(journal: Journal, session: Session, save: SaveRow, now: Callable[[], float]) -> SaveRow:
    """Compare all objects of an uploaded save with their digests.

    Returns:
        The save: verified, or staged again if an object is to be sent (again).

    Raises:
        IntegrityError: The store held other bytes again and again.
        CkptTieringError: As of `ObjectStore`, after the retries.
    """
    wrong: list[ObjectRow] = []
    objects = journal.objects(save)
    if any(o.state not in {ObjectState.SENT, ObjectState.VERIFIED} for o in objects):
        # An agent died between putting objects back and putting the save back, see `_send_again`.
        return journal.move(save, SaveState.STAGED)
    pending = [o for o in objects if o.state is ObjectState.SENT]
    session.run_all(partial(_check, journal, session, obj, wrong) for obj in pending)
    if wrong:
        return _send_again(journal, session, save, wrong, now())
    modes = sorted({o.verified for o in journal.objects(save) if o.verified})
    event = Event(
        kind=EventKind.VERIFIED,
        at=now(),
        run=save.run,
        save_id=save.save_id,
        step=save.step,
        fields={"verified": ",".join(modes)},
    )
    return journal.move(save, SaveState.VERIFIED, event)


def _check(journal: Journal, session: Session, obj: ObjectRow, wrong: list[ObjectRow]) -> None:
    info = session.call(lambda: session.store.head(obj.key))
    mode = _compare(session, obj, info)
    if mode is None:
        wrong.append(obj)
    else:
        journal.move_object(obj, ObjectState.VERIFIED, verified=mode)


def _compare(session: Session, obj: ObjectRow, info: ObjectInfo | None) -> Verified | None:
    if info is None or info.size_bytes != obj.size_bytes:
        return None
    if session.capabilities.checks_crc64nvme and info.crc64nvme is not None:
        return "checksum" if info.crc64nvme == obj.crc else None
    return "read-back" if session.call(lambda: _read_back(session, obj)) == obj.crc else None


def _read_back(session: Session, obj: ObjectRow) -> int:
    crc, size = 0, 0
    for chunk in session.store.get(obj.key):
        crc = crc64(chunk, crc)
        size += len(chunk)
    if size != obj.size_bytes:
        raise TransientError(f"{obj.key} ended after {size} of {obj.size_bytes} bytes")
    return crc


def _send_again(
    journal: Journal, session: Session, save: SaveRow, wrong: list[ObjectRow], now: float
) -> SaveRow:
    """Put back objects that the store holds wrongly; their source is checked while it is sent."""
    keys = ", ".join(o.key for o in wrong[:5])
    for obj in wrong:
        session.meter.corrupt_upload()
        if obj.resends >= MAX_RESENDS:
            raise IntegrityError(
                f"the store holds other bytes than were sent, {obj.resends + 1} times: {obj.key}",
                hint="check what lies between this node and the store, and the store itself",
                key=obj.key,
            )
        journal.move_object(obj, ObjectState.PLANNED)
    event = Event(
        kind=EventKind.CORRUPT,
        at=now,
        run=save.run,
        save_id=save.save_id,
        step=save.step,
        fields={"where": "store", "objects": len(wrong), "keys": keys, "reaction": "sent again"},
    )
    return journal.move(save, SaveState.STAGED, event)
