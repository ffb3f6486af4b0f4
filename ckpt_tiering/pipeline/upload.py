"""Second stage: every object of a save to the store, resuming what an earlier agent began.

Bytes leave straight from the trainer's memory while it holds them, otherwise from the staged files,
one window a request. Each part carries the checksum taken at staging; a part that the store has is
never sent again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypeVar

from ckpt_tiering.errors import ErrorKind, IntegrityError, TransientError
from ckpt_tiering.model.digest import PartCrc
from ckpt_tiering.model.events import Event, EventKind
from ckpt_tiering.model.lifecycle import ObjectState, SaveState
from ckpt_tiering.model.pack import plan_packs
from ckpt_tiering.model.parts import PartPlan
from ckpt_tiering.model.plan import digest_of
from ckpt_tiering.stores.base import CompletedPart, ListsUploads, UploadGone
from ckpt_tiering.stores.body import Body, BytesPiece, FilePiece
from ckpt_tiering.stores.readback import UploadReadback, classify_upload

if TYPE_CHECKING:
    from ckpt_tiering.journal.journal import Journal
    from ckpt_tiering.journal.rows import FileRow, ObjectRow, SaveRow
    from ckpt_tiering.pipeline.session import Session

__all__ = ["upload"]

PENDING_TAG = "pending"
MAX_RESENDS = 3
T = TypeVar("T")
_Task = Callable[[], None]


def upload(journal: Journal, session: Session, save: SaveRow, now: Callable[[], float]) -> SaveRow:
    """Bring all objects of a staged save to the store. Blocks until the store has them.

    Raises:
        IntegrityError: A staged file is not what it was when it was sealed.
        CkptTieringError: As of `ObjectStore`, after the retries; what was done is kept.
    """
    if save.started_at is None:
        save = journal.update(save, started_at=now())
    files: dict[int, list[FileRow]] = {}
    for row in journal.files(save):
        if row.entry.kind == "file":
            files.setdefault(row.entry.object, []).append(row)
    jobs = [
        _ObjectUpload(journal, session, save, obj, files[obj.position])
        for obj in journal.objects(save)
        if obj.state not in {ObjectState.SENT, ObjectState.VERIFIED}
    ]
    session.run_all(task for job in jobs for task in job.send())
    session.run_all(job.complete for job in jobs if job.is_multipart)
    session.hot.drop(Path(save.directory))
    uploaded_at = now()
    event = Event(
        kind=EventKind.UPLOADED,
        at=uploaded_at,
        run=save.run,
        save_id=save.save_id,
        step=save.step,
        fields={
            "bytes": save.total_bytes,
            "upload_seconds": round(uploaded_at - (save.started_at or uploaded_at), 6),
        },
    )
    return journal.move(save, SaveState.UPLOADED, event, uploaded_at=uploaded_at)


class _ObjectUpload:
    """The upload of one object."""

    def __init__(
        self,
        journal: Journal,
        session: Session,
        save: SaveRow,
        obj: ObjectRow,
        files: list[FileRow],
    ) -> None:
        self._journal = journal
        self._session = session
        self._object = obj
        self._files = files
        self._directory = Path(save.directory)
        self._plan = PartPlan(obj.size_bytes, obj.part_bytes)
        self._tag = PENDING_TAG if session.capabilities.tags else None
        self._upload_id = obj.upload_id or ""
        self.is_multipart = self._plan.num_parts > 1

    def send(self) -> Iterator[_Task]:
        """Yield the requests that are still needed; a multipart upload is opened first."""
        if not self.is_multipart:
            yield self._put
            return
        self._upload_id = self._open()
        done = self._known_parts()
        for number, crc in enumerate(self._part_crcs(), start=1):
            if number not in done:
                yield partial(self._put_part, number, crc)

    def _body(self, start: int, checksum: PartCrc) -> Body:
        return Body(
            pieces=self._pieces(start, checksum.size_bytes),
            checksum=checksum,
            name=self._object.key if self._object.is_pack else str(self._path(self._files[0])),
            on_read=self._on_read,
        )

    def _on_read(self, num_bytes: int) -> None:
        if self._session.on_send is not None:
            self._session.on_send(num_bytes)
        self._session.meter.sent(num_bytes)

    def _path(self, file: FileRow) -> Path:
        return self._directory / file.source

    def _pieces(self, start: int, size_bytes: int) -> tuple[BytesPiece | FilePiece, ...]:
        if not self._object.is_pack:
            return (self._piece(self._files[0], start, size_bytes),)
        (pack,) = plan_packs((f.entry.path, f.entry.size_bytes, f.entry.mode) for f in self._files)
        pieces: list[BytesPiece | FilePiece] = []
        for member, file in zip(pack.members, self._files, strict=True):
            pieces.append(BytesPiece(member.header))
            pieces.append(self._piece(file, 0, member.size_bytes))
            pieces.append(BytesPiece(member.padding))
        return (*pieces, BytesPiece(pack.trailer))

    def _piece(self, file: FileRow, start: int, size_bytes: int) -> FilePiece:
        path = self._path(file)
        return FilePiece(path, start, size_bytes, self._session.hot.find(path))

    def _part_crcs(self) -> tuple[PartCrc, ...]:
        return digest_of(self._files[0].entry).regroup(self._object.part_bytes)

    def _put(self) -> None:
        body = self._body(0, PartCrc(self._object.size_bytes, self._object.crc))
        self._send(body, lambda: self._session.store.put(self._object.key, body, tag=self._tag))
        self._journal.move_object(self._object, ObjectState.SENT)

    def _send(self, body: Body, request: Callable[[], T]) -> T:
        """Send a body; find out who is to blame if the store received other bytes."""

        def attempt() -> T:
            try:
                return request()
            except IntegrityError as error:
                body.check()  # raises if the staged file is to blame: sending again is no use
                self._session.meter.corrupt_upload()
                raise TransientError(
                    f"{body.name} was damaged on its way to the store: {error.message}"
                ) from error

        return self._session.call(attempt)

    def _open(self) -> str:
        store, key = self._session.store, self._object.key
        if self._object.state is ObjectState.OPEN and self._object.upload_id is not None:
            return self._object.upload_id
        if self._object.state is ObjectState.PLANNED:
            # Written before the request: should its reply get lost, the next agent looks for it.
            self._journal.move_object(self._object, ObjectState.OPENING)
            found: list[str] = []
        else:
            found = self._orphans()
        upload_id = (
            found[0]
            if found
            else self._session.call(lambda: store.create_upload(key, tag=self._tag))
        )
        for extra in found[1:]:
            self._session.call(partial(store.abort_upload, key, extra))
        self._journal.move_object(self._object, ObjectState.OPEN, upload_id=upload_id)
        return upload_id

    def _orphans(self) -> list[str]:
        """Find uploads that an earlier agent opened at this key without living to note their id.

        Keys hold the save id, so whatever is open at exactly this key is this node's own.
        """
        store, key = self._session.store, self._object.key
        if not self._session.capabilities.lists_uploads or not isinstance(store, ListsUploads):
            return []
        listing = self._session.call(lambda: store.list_uploads(key))
        return [upload.upload_id for upload in listing if upload.key == key]

    def _known_parts(self) -> dict[int, str]:
        """Ask the store which parts it has; a part counts only if its length is right.

        Its contents need no look: the store refused it if its checksum was wrong, and the checksum
        of the whole object is compared before anything is called durable.
        """
        if self._object.state is ObjectState.PLANNED:
            return {}
        known = self._journal.parts(self._object)
        listing = self._session.call(
            lambda: self._session.store.list_parts(self._object.key, self._upload_id)
        )
        if isinstance(listing, UploadGone):
            # Completed, or aborted behind our back: complete() asks which, and starts anew if so.
            return dict.fromkeys(range(1, self._plan.num_parts + 1), "")
        sizes = [crc.size_bytes for crc in self._part_crcs()]
        stored: dict[int, str] = {}
        for part in listing:
            right = part.number <= len(sizes) and part.size_bytes == sizes[part.number - 1]
            # A store may list several sendings of one part: the one that was noted counts.
            if right and stored.get(part.number) != known.get(part.number, ""):
                stored[part.number] = part.etag
        for number, etag in stored.items():
            if known.get(number) != etag:
                self._journal.add_part(self._object, number, etag)
        return stored

    def _put_part(self, number: int, crc: PartCrc) -> None:
        start, _ = self._plan.span(number)
        body = self._body(start, crc)
        store, key = self._session.store, self._object.key
        etag = self._send(body, lambda: store.put_part(key, self._upload_id, number, body))
        if not isinstance(etag, UploadGone):
            self._journal.add_part(self._object, number, etag)

    def complete(self) -> None:
        """Make the object of its parts, or find out that it was made already."""
        obj, store = self._object, self._session.store
        etags, crcs = self._journal.parts(obj), self._part_crcs()
        gone = len(etags) < len(crcs)  # the store no longer knew the upload at some part
        if not gone:
            parts = [CompletedPart(n, etags[n], c.crc) for n, c in enumerate(crcs, start=1)]
            try:
                outcome = self._session.call(
                    lambda: store.complete_upload(
                        obj.key, self._upload_id, parts, crc64nvme=obj.crc
                    )
                )
            except IntegrityError as error:
                self._start_over(error)
            gone = isinstance(outcome, UploadGone)
        if gone and not self._is_there():
            self._journal.move_object(obj, ObjectState.PLANNED)
            raise TransientError(
                f"multipart upload of {obj.key} is gone from the store; it is sent again",
                kind=ErrorKind.NO_SUCH_UPLOAD,
                hint="check lifecycle rules that abort incomplete multipart uploads",
                key=obj.key,
            )
        self._journal.move_object(obj, ObjectState.SENT)

    def _start_over(self, error: IntegrityError) -> NoReturn:
        """Give up an upload whose parts the store has wrongly."""
        obj, store = self._object, self._session.store
        self._session.meter.corrupt_upload()
        if obj.resends >= MAX_RESENDS:
            raise error
        self._session.call(lambda: store.abort_upload(obj.key, self._upload_id))
        self._journal.move_object(obj, ObjectState.PLANNED)
        raise TransientError(
            f"the store refused the parts of {obj.key}, which are sent again: {error.message}",
            key=obj.key,
        ) from error

    def _is_there(self) -> bool:
        info = self._session.call(lambda: self._session.store.head(self._object.key))
        outcome = classify_upload(self._object.size_bytes, self._object.crc, info)
        # UNKNOWN is good enough to go on to verification, which reads the bytes back.
        return outcome in {UploadReadback.DONE, UploadReadback.UNKNOWN}
