"""Agent's first stage: sealed shards become a row in the journal, with objects planned.

A shard without a whole seal was never staged: nothing of it is uploaded or offered.
"""

from __future__ import annotations

import json
import stat
from enum import Enum, auto
from typing import TYPE_CHECKING

from ckpt_tiering.errors import CapacityError, FormatError
from ckpt_tiering.fsio import digest_file
from ckpt_tiering.journal.rows import NewSave
from ckpt_tiering.model.events import Event, EventKind
from ckpt_tiering.model.ids import SaveId, node_name, rank_name
from ckpt_tiering.model.layout import FILES_NAME, SEAL_NAME, StagingLayout
from ckpt_tiering.model.plan import PlannedObject, digest_of, plan_objects
from ckpt_tiering.model.seal import Seal, decode_seal

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from ckpt_tiering.journal.journal import Journal
    from ckpt_tiering.model.manifest import FileEntry

__all__ = ["Admission", "admit", "staged_directories"]


class Admission(Enum):
    """What became of a save's staging directory."""

    TAKEN = auto()
    KNOWN = auto()
    INCOMPLETE = auto()  # some rank of this node has not sealed yet
    TORN = auto()  # sealed, but not what the seal says: an event names the files


def staged_directories(layout: StagingLayout) -> Iterator[Path]:
    """Yield the directories of all saves that lie on the staging disk, oldest id first."""
    if layout.runs_dir.is_dir():
        for run in sorted(layout.runs_dir.iterdir()):
            saves = run / "saves"
            if saves.is_dir():
                yield from sorted(saves.iterdir())


def admit(journal: Journal, directory: Path, now: float, *, check_digests: bool) -> Admission:
    """Take a staged save into the journal.

    Args:
        journal: Where to.
        directory: Staging directory of the save.
        now: Seconds since the epoch.
        check_digests: Also read every file and compare; for what an earlier agent or an earlier
            boot left, where the page cache may never have reached the disk.
    """
    shards = sorted(p for p in directory.iterdir() if (p / SEAL_NAME).exists())
    if not shards:
        return Admission.INCOMPLETE
    try:
        seals = [decode_seal((s / SEAL_NAME).read_bytes(), str(s / SEAL_NAME)) for s in shards]
    except FormatError as error:
        journal.emit(_torn(directory, now, error.message))
        return Admission.TORN
    first = seals[0]
    if journal.find(first.run, first.save_id) is not None:
        return Admission.KNOWN
    disagreement = _disagreement(seals)
    if disagreement:
        _refuse(journal, directory, seals, now, disagreement)
        return Admission.TAKEN
    if len(seals) < first.ranks_on_node:
        return Admission.INCOMPLETE
    broken = [b for seal in seals for b in _broken_files(directory, seal, check_digests)]
    if broken:
        why = "; ".join(broken[:10])
        journal.emit(_torn(directory, now, why))
        _refuse(journal, directory, seals, now, f"torn on the staging disk: {why}")
        return Admission.TORN
    try:
        objects, files = _plan(seals)
    except (CapacityError, FormatError) as error:
        _refuse(journal, directory, seals, now, error.message)
        return Admission.TAKEN
    taken = journal.admit(_new_save(directory, seals, objects, files), _event(seals, now))
    return Admission.TAKEN if taken else Admission.KNOWN


def _disagreement(seals: Sequence[Seal]) -> str | None:
    for seal in seals[1:]:
        field = seals[0].agrees_with(seal)
        if field:
            return (
                f"ranks disagree on the save's {field}: rank {seals[0].rank} has "
                f"{getattr(seals[0], field)!r}, rank {seal.rank} has {getattr(seal, field)!r}"
            )
    return None


def _plan(seals: Sequence[Seal]) -> tuple[tuple[PlannedObject, ...], tuple[FileEntry, ...]]:
    node = node_name(seals[0].node_rank)
    files = [f for seal in seals for f in seal.files]
    return plan_objects(SaveId.parse(seals[0].save_id), node, files, seals[0].part_bytes)


def _new_save(
    directory: Path,
    seals: Sequence[Seal],
    objects: tuple[PlannedObject, ...],
    files: tuple[FileEntry, ...],
) -> NewSave:
    first = seals[0]
    return NewSave(
        run=first.run,
        store_options=json.dumps(first.store_options),
        save_id=first.save_id,
        step=SaveId.parse(first.save_id).step,
        name=first.name,
        node=node_name(first.node_rank),
        num_nodes=first.num_nodes,
        ranks=tuple(seal.rank for seal in seals),
        metadata=first.metadata,
        directory=str(directory),
        snapshot_at=min(seal.snapshot_at for seal in seals),
        staged_at=max(seal.staged_at for seal in seals),
        objects=objects,
        files=tuple((f"{rank_name(f.rank)}/{FILES_NAME}/{f.path}", f) for f in files),
    )


def _event(seals: Sequence[Seal], now: float) -> Event:
    first = seals[0]
    return Event(
        kind=EventKind.STAGED,
        at=now,
        run=first.run,
        save_id=first.save_id,
        step=SaveId.parse(first.save_id).step,
        fields={
            "name": first.name,
            "bytes": sum(f.size_bytes for seal in seals for f in seal.files),
            "files": sum(len(seal.files) for seal in seals),
            "stage_seconds": max(s.staged_at - s.snapshot_at for s in seals),
        },
    )


def _refuse(journal: Journal, directory: Path, seals: Sequence[Seal], now: float, why: str) -> None:
    """Keep a save that can never become durable in the journal, so that it is seen."""
    save = _new_save(directory, seals, (), ())
    event = Event(
        kind=EventKind.FAILED,
        at=now,
        run=save.run,
        save_id=save.save_id,
        step=save.step,
        fields={"error": why},
    )
    # With one stroke: a save without objects that is not failed would become durable, empty.
    journal.admit(save, _event(seals, now), failed=event, error=why)


def _broken_files(directory: Path, seal: Seal, check_digests: bool) -> Iterator[str]:
    for entry in seal.files:
        if entry.kind != "file":
            continue
        path = directory / rank_name(entry.rank) / FILES_NAME / entry.path
        try:
            info = path.lstat()
        except OSError as error:
            yield f"{path}: {error.strerror}"
            continue
        if not stat.S_ISREG(info.st_mode):
            yield f"{path} is not a file"
        elif info.st_size != entry.size_bytes:
            yield f"{path} has {info.st_size} bytes, the seal says {entry.size_bytes}"
        elif check_digests and digest_file(path, entry.part_bytes) != digest_of(entry):
            yield f"{path} does not have the digest that the seal says"


def _torn(directory: Path, now: float, why: str) -> Event:
    return Event(
        kind=EventKind.TORN,
        at=now,
        save_id=directory.name,
        fields={"directory": str(directory), "error": why},
    )
