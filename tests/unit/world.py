"""One node, its staging disk, its journal and a store, without processes and without a network."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

from ckpt_tiering.flow.meter import Meter
from ckpt_tiering.flow.retry import Retrier
from ckpt_tiering.journal.journal import Journal
from ckpt_tiering.model.ids import SaveId
from ckpt_tiering.model.layout import StagingLayout, StoreUrl
from ckpt_tiering.model.seal import ShardHeader
from ckpt_tiering.pipeline.admit import Admission, admit
from ckpt_tiering.pipeline.commit import commit, publish, settle
from ckpt_tiering.pipeline.session import Session
from ckpt_tiering.pipeline.stage import ShardWriter
from ckpt_tiering.pipeline.upload import upload
from ckpt_tiering.pipeline.verify import verify
from ckpt_tiering.stores.base import Capabilities
from ckpt_tiering.stores.memory import EVERYTHING, MemoryBucket, MemoryStore
from ckpt_tiering.testing.fake_clock import FakeClock
from ckpt_tiering.testing.faults import FaultyStore, RecordingStore

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ckpt_tiering.journal.rows import SaveRow
    from ckpt_tiering.model.seal import Seal

URL = StoreUrl.parse("memory://bucket/run")
POOR = Capabilities(conditional_put=False, checks_crc64nvme=False, tags=False, lists_uploads=False)
SMALL = {"model.pt": b"weights" * 100, "meta/config.json": b"{}", "empty.flag": b""}


@cache
def _empty_journal() -> bytes:
    with TemporaryDirectory() as directory:
        path = Path(directory) / "journal.db"
        Journal(path).close()
        return path.read_bytes()


J = TypeVar("J", bound=Journal)


def open_journal(path: Path, kind: type[J], owner: str = "me") -> J:
    """Open a journal that does not wait for the disk: no test cuts the power."""
    if not path.exists():
        path.write_bytes(_empty_journal())
    journal = kind(path, owner=owner)
    journal._db.execute("PRAGMA synchronous = OFF")
    return journal


class World:
    """A node.

    Attributes:
        store: What the session talks to: records, and fails where it is told to.
        memory: The store behind it.
    """

    def __init__(
        self,
        root: Path,
        *,
        bucket: MemoryBucket | None = None,
        can: Capabilities = EVERYTHING,
        node_rank: int = 0,
        num_nodes: int = 1,
    ) -> None:
        self.layout = StagingLayout(root)
        self.layout.agent_dir.mkdir(parents=True, exist_ok=True)
        self.clock = FakeClock()
        self.bucket = bucket or MemoryBucket()
        self.memory = MemoryStore(URL, bucket=self.bucket, behaves=can)
        self.faults = FaultyStore(self.memory)
        self.store = RecordingStore(self.faults)
        self.can = can
        self.node_rank, self.num_nodes = node_rank, num_nodes
        self.meter = Meter()
        self.pool = ThreadPoolExecutor(2)
        self.journal = self._open_journal(Journal, "me")
        self.session = Session(
            store=self.store,
            capabilities=can,
            retrier=Retrier(
                self.clock,
                threading.Event(),
                max_wait_s=5.0,
                give_up_after_s=60.0,
                on_retry=lambda *_: self.meter.retried(),
            ),
            pool=self.pool,
            concurrency=2,
            meter=self.meter,
        )

    def close(self) -> None:
        self.pool.shutdown()
        self.journal.close()

    def restart_agent(self) -> None:
        """A new agent opens the same journal."""
        self.replace_journal(Journal, "another")
        self.journal.reclaim()

    def replace_journal(self, kind: type[Journal], owner: str = "me") -> None:
        """Open the same journal as another kind of it."""
        self.journal.close()
        self.journal = self._open_journal(kind, owner)

    def _open_journal(self, kind: type[Journal], owner: str) -> Journal:
        return open_journal(self.layout.journal, kind, owner)

    # --- the stages ------------------------------------------------------------------------------

    def header(self, step: int = 100, **changes: Any) -> ShardHeader:
        header = ShardHeader(
            url=URL,
            store_options={"endpoint_url": None, "region": None, "profile": None},
            save_id=SaveId(step, "abcd"),
            name=None,
            metadata={},
            rank=0,
            ranks_on_node=1,
            node_rank=self.node_rank,
            num_nodes=self.num_nodes,
            part_bytes=1 << 20,
        )
        return replace(header, **changes)

    def writer(self, step: int = 100, **changes: Any) -> ShardWriter:
        return ShardWriter(self.layout, self.header(step, **changes), self.clock)

    def stage(
        self, files: Mapping[str, bytes] | None = None, step: int = 100, **changes: Any
    ) -> tuple[Path, Seal]:
        """Stage one shard; return the directory of its save, and the seal."""
        writer = self.writer(step, **changes)
        for path, data in (SMALL if files is None else files).items():
            with writer.open(path) as file:
                file.write(data)
        return writer.directory.parent, writer.seal()

    def admitted(self, files: Mapping[str, bytes] | None = None, **changes: Any) -> SaveRow:
        directory, seal = self.stage(files, **changes)
        assert admit(self.journal, directory, 5.0, check_digests=True) is Admission.TAKEN
        return self.find(seal.save_id)

    def find(self, save_id: str) -> SaveRow:
        row = self.journal.find(str(URL), save_id)
        assert row is not None
        return row

    def upload(self, row: SaveRow) -> SaveRow:
        return upload(self.journal, self.session, row, self.clock.now)

    def verify(self, row: SaveRow) -> SaveRow:
        return verify(self.journal, self.session, row, self.clock.now)

    def publish(self, row: SaveRow) -> SaveRow:
        return publish(self.journal, self.session, row)

    def commit(self, row: SaveRow) -> SaveRow | None:
        return commit(self.journal, self.session, row, self.clock.now)

    def settle(self, row: SaveRow) -> SaveRow:
        return settle(self.journal, self.session, row)

    def verified(self, files: Mapping[str, bytes] | None = None, **changes: Any) -> SaveRow:
        return self.verify(self.upload(self.admitted(files, **changes)))

    def durable(self, files: Mapping[str, bytes] | None = None, **changes: Any) -> SaveRow:
        row = self.commit(self.publish(self.verified(files, **changes)))
        assert row is not None
        return row

    # --- what is there ---------------------------------------------------------------------------

    def stored(self, prefix: str = "") -> list[str]:
        return [info.key for info in self.memory.list(prefix)]

    def read(self, key: str) -> bytes:
        return b"".join(self.memory.get(key))

    def damage(self, key: str, at: int = 0) -> None:
        """Flip a bit of an object where it rests."""
        full = URL.prefix + key
        data = bytearray(self.bucket.objects[full].data)
        data[at] ^= 1
        self.bucket.objects[full] = replace(self.bucket.objects[full], data=bytes(data))

    def events(self, kind: str | None = None) -> list[dict[str, Any]]:
        records = [record for _, record in self.journal.events_after(0)]
        return [r for r in records if kind is None or r["kind"] == kind]


@contextmanager
def world(root: Path, **options: Any) -> Iterator[World]:
    """A node that is taken down afterwards. Its disk need not survive a power cut."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        node = World(root, **options)
        try:
            yield node
        finally:
            node.close()
