"""The agent's share of staging: a trainer's memory to NVMe, with the digest in the stream.

The memory is the trainer's arena, by descriptor: it stays as long as this process holds it, so a
trainer that dies after the hand-over loses nothing.
"""

from __future__ import annotations

import mmap
import queue
import threading
from typing import TYPE_CHECKING

from ckpt_tiering.agent.protocol import Staged
from ckpt_tiering.errors import CkptTieringError
from ckpt_tiering.fsio import remove_tree
from ckpt_tiering.model.extent import HEADER_BYTES
from ckpt_tiering.model.layout import FILES_NAME, SEAL_NAME
from ckpt_tiering.pipeline.stage import ShardWriter
from ckpt_tiering.stores.hot import HotMemory

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ckpt_tiering.agent.protocol import Snapshot, SnapshotFile
    from ckpt_tiering.clock import Clock
    from ckpt_tiering.model.layout import StagingLayout
    from ckpt_tiering.stores.hot import HotFiles

__all__ = ["Stager"]


class Stager:
    """Stages snapshots one after the other, on a thread of its own.

    Args:
        layout: The staging directory.
        clock: For the times in seals.
        hot: Learns which files are still in memory after they were staged.
        take_in: Called with the directory of a save that was sealed.
        refused: Called with a snapshot that can't be staged, and why.
    """

    def __init__(
        self,
        layout: StagingLayout,
        clock: Clock,
        hot: HotFiles,
        take_in: Callable[[Path], None],
        refused: Callable[[Snapshot, str], None],
    ) -> None:
        self._layout = layout
        self._clock = clock
        self._hot = hot
        self._take_in = take_in
        self._refused = refused
        self._queue: queue.SimpleQueue[tuple[Snapshot, int, Callable[[Staged], None]] | None] = (
            queue.SimpleQueue()
        )
        self._lock = threading.Lock()
        self._held: tuple[tuple[str, str], ...] = ()
        self._thread = threading.Thread(target=self._work, name="stager")

    @property
    def held(self) -> tuple[tuple[str, str], ...]:
        """Run and save id of each snapshot that is in memory only, oldest first."""
        return self._held

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def put(self, snapshot: Snapshot, descriptor: int, answer: Callable[[Staged], None]) -> None:
        """Stage a snapshot soon.

        Args:
            snapshot: What it is.
            descriptor: The memory; this object's to close from now on.
            answer: Called from the thread when the memory is free again.
        """
        with self._lock:
            self._held = (*self._held, (snapshot.run, snapshot.save_id))
        self._queue.put((snapshot, descriptor, answer))

    def close(self) -> None:
        """Write what was put, then end the thread. Blocks."""
        self._queue.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            snapshot, descriptor, answer = item
            error = None
            memory = HotMemory(descriptor, snapshot.generation)
            try:
                directory = self._write(snapshot, descriptor)
                files = directory / FILES_NAME
                self._hot.put(memory, {files / f.path: f.offset for f in snapshot.files})
                self._take_in(directory.parent)
            except Exception as caught:  # noqa: BLE001  one snapshot must not stop the next ones
                known = isinstance(caught, CkptTieringError | OSError)
                error = str(caught) if known else f"{type(caught).__name__}: {caught}"
                self._refused(snapshot, error)
            del memory  # closed here, unless the upload is to read it
            answer(Staged(save_id=snapshot.save_id, error=error))
            with self._lock:
                self._held = self._held[1:]

    def _write(self, snapshot: Snapshot, descriptor: int) -> Path:
        header = snapshot.header()
        directory = self._layout.rank_dir(header.url, header.save_id, header.rank)
        if (directory / SEAL_NAME).exists():
            return directory  # an agent before this one got so far
        remove_tree(directory, inside=self._layout.staging)
        writer = ShardWriter(self._layout, header, self._clock, snapshot_at=snapshot.snapshot_at)
        try:
            for file in snapshot.files:
                _write_file(writer, file, descriptor)
            writer.seal()
        except BaseException:
            writer.discard()
            raise
        return directory


def _write_file(writer: ShardWriter, file: SnapshotFile, descriptor: int) -> None:
    if not file.size_bytes:
        writer.write_image(file.path, memoryview(b""))
        return
    start = HEADER_BYTES + file.offset
    with (
        mmap.mmap(descriptor, file.size_bytes, prot=mmap.PROT_READ, offset=start) as memory,
        memoryview(memory) as image,
    ):
        writer.write_image(file.path, image)
