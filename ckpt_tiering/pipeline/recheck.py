"""Compares what a store has of a durable save with its node manifests, object by object.

The quick way asks the store (a HEAD each). The deep way downloads every byte once, by ranges in
parallel, and digests whole objects and the files in them; a bad object is read once more, so that
the wire is not taken for the store. An object whose checksum the store knew at the commit, and
knows no longer, was written anew by somebody: it is read in any case.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

from ckpt_tiering.errors import ErrorKind, IntegrityError, NotFoundError, TransientError
from ckpt_tiering.model.digest import PartCrc, crc64, join
from ckpt_tiering.model.findings import CheckedBy, Finding, Problem
from ckpt_tiering.units import MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from ckpt_tiering.model.manifest import FileEntry, NodeManifest, ObjectEntry
    from ckpt_tiering.pipeline.session import Session

__all__ = ["RecheckReport", "recheck"]

REQUEST_BYTES = 64 * MIB


@dataclass(slots=True)
class RecheckReport:
    """What a recheck found.

    Attributes:
        findings: What is wrong.
        checked_by: Number of good objects, by how they were compared.
    """

    findings: list[Finding] = field(default_factory=list)
    checked_by: Counter[CheckedBy] = field(default_factory=Counter)


def recheck(
    session: Session,
    nodes: Sequence[NodeManifest],
    *,
    deep: bool = False,
    progress: Callable[[int], None] = lambda _: None,
) -> RecheckReport:
    """Compare all objects of a save with its node manifests. Blocks on the store.

    Args:
        session: The store.
        nodes: The node manifests.
        deep: Download and digest everything; otherwise the store is asked.
        progress: Called with the number of bytes done, from several threads.

    Raises:
        CkptTieringError: The store can't be asked; what is wrong with an object is a finding.
    """
    job = _Recheck(session, progress)
    subjects = [subject for node in nodes for subject in _subjects(node)]
    session.run_all(partial(job.ask, subject, deep=deep) for subject in subjects)
    unclear = [s for s in subjects if s.must_be_read]
    session.run_all(job.readings(unclear))
    suspects = [s for s in unclear if s.compare()]
    session.run_all(job.readings(suspects, again=True))
    for subject in suspects:
        subject.findings = subject.findings or subject.compare()
    report = RecheckReport()
    for subject in subjects:
        if subject.findings:
            report.findings += subject.findings
        else:
            report.checked_by[subject.checked_by] += 1
    return report


class _Subject:
    """One object with the files in it, and what was seen of it."""

    def __init__(self, save_id: str, entry: ObjectEntry, files: Sequence[FileEntry]) -> None:
        self.save_id = save_id
        self.entry = entry
        self.files = files
        self.findings: list[Finding] = []
        self.checked_by = CheckedBy.SIZE
        self.must_be_read = False
        self._crcs: dict[int, PartCrc] = {}  # by where the piece starts

    def found(
        self,
        problem: Problem,
        why: str,
        *,
        expected: str,
        found: str | None = None,
        path: str | None = None,
        span: tuple[int, int] | None = None,
    ) -> Finding:
        """Make a finding of this object."""
        start, end = span or (None, None)
        return Finding(
            problem=problem,
            key=self.entry.key,
            message=f"{self.entry.key} {why}",
            save_id=self.save_id,
            path=path,
            start=start,
            end=end,
            expected=expected,
            found=found,
        )

    def missing(self) -> Finding:
        """Make the finding that the object is not there."""
        return self.found(Problem.MISSING, "is not there", expected=self.entry.crc64nvme)

    def short(self, size_bytes: int | None) -> Finding:
        """Make the finding that the object has another length."""
        said = self.entry.size_bytes
        seen = "fewer" if size_bytes is None else str(size_bytes)
        return self.found(
            Problem.SIZE,
            f"has {seen} bytes, the manifest says {said}",
            expected=str(said),
            found=None if size_bytes is None else str(size_bytes),
        )

    # --- by pieces ---------------------------------------------------------------------------

    def pieces(self) -> list[tuple[int, int]]:
        """Cut the object where any file, or part of a file, starts or ends."""
        cuts = {0, self.entry.size_bytes}
        for file in self.files:
            cuts.update(a for a, _ in _parts(file))
            cuts.add(file.offset + file.size_bytes)
        return list(pairwise(sorted(cuts)))

    def note(self, start: int, crc: PartCrc) -> None:
        """Keep the checksum of a piece."""
        self._crcs[start] = crc

    def _crc(self, start: int, end: int) -> str:
        pieces = []
        while start < end:
            piece = self._crcs[start]
            pieces.append(piece)
            start += piece.size_bytes
        return f"{join(pieces).crc:016x}"

    def compare(self) -> list[Finding]:
        """Compare the bytes that were read with the manifest; nothing was if there are findings."""
        if self.findings:
            return []
        self.checked_by = CheckedBy.READ
        findings = []
        whole = self._crc(0, self.entry.size_bytes)
        if whole != self.entry.crc64nvme:
            why = f"has CRC64NVME {whole}, the manifest says {self.entry.crc64nvme}"
            findings.append(
                self.found(Problem.CHECKSUM, why, expected=self.entry.crc64nvme, found=whole)
            )
        for file in self.files:
            findings += self._compare_file(file)
        return findings

    def _compare_file(self, file: FileEntry) -> Iterator[Finding]:
        parts = list(zip(_parts(file), file.parts, strict=True))
        bad = [(span, said) for span, said in parts if self._crc(*span) != said]
        whole = (file.offset, file.offset + file.size_bytes)
        if not bad and self._crc(*whole) != file.crc64nvme:
            bad = [(whole, file.crc64nvme)]
        for (start, end), said in bad:
            seen = self._crc(start, end)
            yield self.found(
                Problem.FILE,
                f"damages {file.path!r}: its bytes {start - file.offset} to {end - file.offset} "
                f"have CRC64NVME {seen}, the manifest says {said}",
                expected=said,
                found=seen,
                path=file.path,
                span=(start, end),
            )


def _parts(file: FileEntry) -> Iterator[tuple[int, int]]:
    """Yield where each part of a file starts and ends in its object."""
    end = file.offset + file.size_bytes
    for start in range(file.offset, end, file.part_bytes):
        yield start, min(start + file.part_bytes, end)


def _subjects(node: NodeManifest) -> Iterator[_Subject]:
    files: dict[int, list[FileEntry]] = {}
    for file in node.files:
        if file.kind == "file":
            files.setdefault(file.object, []).append(file)
    for index, entry in enumerate(node.objects):
        yield _Subject(node.save_id, entry, files.get(index, []))


class _Recheck:
    def __init__(self, session: Session, progress: Callable[[int], None]) -> None:
        self._session = session
        self._progress = progress
        self._lock = threading.Lock()

    def ask(self, subject: _Subject, *, deep: bool) -> None:
        """Compare an object with what the store says of it."""
        entry = subject.entry
        info = self._session.call(lambda: self._session.store.head(entry.key))
        if info is None:
            subject.findings = [subject.missing()]
        elif info.size_bytes != entry.size_bytes:
            subject.findings = [subject.short(info.size_bytes)]
        # A store whose checksums were seen to be worth nothing made `verified` say so.
        elif deep or (entry.verified == "checksum" and info.crc64nvme is None):
            subject.must_be_read = True
        elif entry.verified == "checksum":
            subject.checked_by = CheckedBy.CHECKSUM
            seen = f"{info.crc64nvme:016x}"
            if seen != entry.crc64nvme:
                why = f"has CRC64NVME {seen}, the manifest says {entry.crc64nvme}"
                subject.findings = [
                    subject.found(Problem.CHECKSUM, why, expected=entry.crc64nvme, found=seen)
                ]
        if not subject.must_be_read:
            self._progress(entry.size_bytes)

    def readings(
        self, subjects: Iterable[_Subject], *, again: bool = False
    ) -> Iterator[Callable[[], None]]:
        """Yield the downloads of some objects."""
        for subject in subjects:
            batch: list[tuple[int, int]] = []
            for piece in subject.pieces():
                if batch and piece[1] - batch[0][0] > REQUEST_BYTES:
                    yield partial(self._read, subject, batch, again=again)
                    batch = []
                batch.append(piece)
            if batch:
                yield partial(self._read, subject, batch, again=again)

    def _read(self, subject: _Subject, pieces: Sequence[tuple[int, int]], *, again: bool) -> None:
        try:
            crcs = self._session.call(lambda: self._digests(subject.entry.key, pieces))
        except NotFoundError as error:
            if error.kind is ErrorKind.NO_SUCH_BUCKET:
                raise
            self._failed(subject, subject.missing())
        except IntegrityError:
            self._failed(subject, subject.short(None))
        else:
            for (start, _), crc in zip(pieces, crcs, strict=True):
                subject.note(start, crc)
        if not again:
            self._progress(pieces[-1][1] - pieces[0][0])

    def _failed(self, subject: _Subject, finding: Finding) -> None:
        with self._lock:
            subject.findings = subject.findings or [finding]

    def _digests(self, key: str, pieces: Sequence[tuple[int, int]]) -> list[PartCrc]:
        """Download neighbouring pieces in one request, and digest each."""
        position, index, crc = pieces[0][0], 0, 0
        crcs: list[PartCrc] = []
        for chunk in self._session.store.get(key, position, pieces[-1][1]):
            view = memoryview(chunk)
            while view and index < len(pieces):
                start, end = pieces[index]
                taken = view[: end - position]
                crc = crc64(taken, crc)
                position += len(taken)
                view = view[len(taken) :]
                if position == end:
                    crcs.append(PartCrc(end - start, crc))
                    index, crc = index + 1, 0
        if index != len(pieces):
            raise TransientError(f"{key} ended at byte {position} of {pieces[-1][1]}", key=key)
        return crcs
