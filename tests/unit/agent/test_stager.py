from __future__ import annotations

import mmap
import os
import sqlite3
import threading
from typing import TYPE_CHECKING, Any

import pytest

from ckpt_tiering import __version__
from ckpt_tiering.agent.loop import Agent
from ckpt_tiering.agent.protocol import AgentSettings, Hello, Snapshot, Staged
from ckpt_tiering.agent.stager import Stager
from ckpt_tiering.clock import SystemClock
from ckpt_tiering.fsio import digest_file
from ckpt_tiering.model.digest import crc64
from ckpt_tiering.model.extent import GENERATION, HEADER_BYTES
from ckpt_tiering.model.layout import SEAL_NAME, StagingLayout, StoreUrl
from ckpt_tiering.model.seal import decode_seal
from ckpt_tiering.stores.body import FilePiece
from ckpt_tiering.stores.hot import HotFiles, HotMemory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

RUN = "memory://bucket/run"
WAIT_S = 30.0


def snapshot(
    save_id: str = "000000000007-abcd",
    size_bytes: int = 10,
    path: str = "state.pt",
    **fields: object,
) -> Snapshot:
    values: dict[str, object] = {
        "run": RUN,
        "store_options": {},
        "save_id": save_id,
        "name": None,
        "metadata": {},
        "snapshot_at": 5.0,
        "rank": 0,
        "ranks_on_node": 1,
        "node_rank": 0,
        "num_nodes": 1,
        "part_bytes": 4096,
        "generation": 1,
        "files": [{"path": path, "offset": 0, "size_bytes": size_bytes}],
    }
    return Snapshot.model_validate(values | fields)


def memory_of(data: bytes) -> int:
    descriptor = os.memfd_create("test")
    os.truncate(descriptor, HEADER_BYTES + -(-max(1, len(data)) // 4096) * 4096)
    with mmap.mmap(descriptor, 0) as mapping:
        mapping[:HEADER_BYTES] = GENERATION.pack(1).ljust(HEADER_BYTES, b"\0")
        mapping[HEADER_BYTES : HEADER_BYTES + len(data)] = data
    return descriptor


class Desk:
    """A stager and what it said."""

    def __init__(self, layout: StagingLayout) -> None:
        self.layout = layout
        self.taken: list[Path] = []
        self.refused: list[str] = []
        self.answers: list[Staged] = []
        self._answered = threading.Semaphore(0)
        self.hot = HotFiles()
        self.stager = Stager(
            layout,
            SystemClock(),
            self.hot,
            self.taken.append,
            lambda _, why: self.refused.append(why),
        )

    def put(self, message: Snapshot, data: bytes, memory: int | None = None) -> Staged:
        def answer(staged: Staged) -> None:
            self.answers.append(staged)
            self._answered.release()

        self.stager.put(message, memory_of(data) if memory is None else memory, answer)
        assert self._answered.acquire(timeout=WAIT_S)
        return self.answers[-1]

    def shard(self, save_id: str) -> Path:
        return self.layout.run_dir(StoreUrl.parse(RUN)) / "saves" / save_id / "r000000"


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    made = Desk(StagingLayout(tmp_path / "nvme"))
    made.stager.start()
    yield made
    made.stager.close()


@pytest.mark.parametrize("size", [1, 4095, 4096, 4097, 100_000])
def test_p3_file_and_digest_are_those_of_the_memory(desk: Desk, size: int) -> None:
    data = os.urandom(size)
    assert desk.put(snapshot(size_bytes=size), data).error is None
    shard = desk.shard("000000000007-abcd")
    assert (shard / "f" / "state.pt").read_bytes() == data
    seal = decode_seal((shard / SEAL_NAME).read_bytes(), "seal")
    (entry,) = seal.files
    assert int(entry.crc64nvme, 16) == crc64(data)
    assert digest_file(shard / "f" / "state.pt", 4096).size_bytes == size
    assert seal.snapshot_at == 5.0
    assert desk.taken == [shard.parent]
    assert desk.stager.held == ()


def test_p7_the_memory_is_read_only_while_it_holds_the_snapshot(desk: Desk) -> None:
    descriptor = memory_of(b"0123456789")
    assert desk.put(snapshot(), b"0123456789", os.dup(descriptor)).error is None
    file = desk.shard("000000000007-abcd") / "f" / "state.pt"
    hot = desk.hot.find(file)
    piece = FilePiece(file, 2, 5, hot)
    assert hot is not None
    assert hot.read(0, 10) == b"0123456789"
    os.pwrite(descriptor, b"xxxxxxxxxx", HEADER_BYTES)  # no trainer does, without saying so
    assert piece.read(0, 9) == b"xxxxx"
    os.pwrite(descriptor, GENERATION.pack(2), 0)
    assert hot.read(0, 10) is None
    assert piece.read(0, 9) == b"23456"
    desk.hot.put(HotMemory(descriptor, 2), {})
    assert desk.hot.find(file) is None


def test_p1_what_a_dead_agent_began_is_written_anew(desk: Desk) -> None:
    half = desk.shard("000000000007-abcd") / "f" / "state.pt"
    half.parent.mkdir(parents=True)
    half.write_bytes(b"half")
    assert desk.put(snapshot(), b"0123456789").error is None
    assert half.read_bytes() == b"0123456789"


def test_p1_what_a_dead_agent_sealed_stays(desk: Desk) -> None:
    desk.put(snapshot(), b"0123456789")
    assert desk.put(snapshot(), b"other bytes").error is None
    file = desk.shard("000000000007-abcd") / "f" / "state.pt"
    assert file.read_bytes() == b"0123456789"
    assert len(desk.taken) == 2


@pytest.mark.parametrize(
    "fields",
    [{"path": "../outside"}, {"save_id": "latest"}, {"size_bytes": 1 << 40}, {"run": "ftp://x"}],
    ids=["path", "id", "length", "store"],
)
def test_p5_a_bad_snapshot_is_refused_and_the_next_one_is_staged(
    desk: Desk, fields: dict[str, Any], tmp_path: Path
) -> None:
    refused = desk.put(snapshot(**fields), b"0123456789")
    assert refused.error
    assert desk.refused == [refused.error]
    assert not (tmp_path / "outside").exists()
    assert desk.put(snapshot("000000000008-abcd"), b"0123456789").error is None


def test_p1_a_greeting_leaves_what_the_agent_has_in_hand(tmp_path: Path) -> None:
    """Its trainer is gone, and the next one says hello while the file is being written."""
    layout = StagingLayout(tmp_path / "nvme")
    layout.agent_dir.mkdir(parents=True)
    agent = Agent(layout)
    saves = layout.run_dir(StoreUrl.parse(RUN)) / "saves"
    in_hand, torn = saves / "000000000007-abcd", saves / "000000000008-abcd"
    for directory in (in_hand, torn):
        (directory / "r000000").mkdir(parents=True)
    answer: Callable[[object], None] = lambda _: None  # noqa: E731
    agent._handle(snapshot(), memory_of(b"0123456789"), answer)
    hello = Hello(release=__version__, run=RUN, incarnation="wxyz", settings=AgentSettings())
    agent._handle(hello, None, answer)
    agent._journal.close()
    assert in_hand.exists()
    assert not torn.exists()


def test_p5_saying_that_a_snapshot_is_bad_never_ends_the_stager(tmp_path: Path) -> None:
    layout = StagingLayout(tmp_path / "nvme")
    layout.agent_dir.mkdir(parents=True)
    agent = Agent(layout)
    agent._refuse(snapshot(save_id="latest"), "its id is none")
    ((_, event),) = agent._journal.events_after(0)
    assert (event["kind"], event["save_id"], event["error"]) == (
        "failed",
        "latest",
        "its id is none",
    )
    agent._journal.close()
    with pytest.raises(sqlite3.Error):
        agent._journal.events_after(0)
    agent._refuse(snapshot(), "and the journal is gone")
