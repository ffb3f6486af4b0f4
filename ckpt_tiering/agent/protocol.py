"""What trainer and agent say to each other over the Unix socket, and what the status page holds.

Frames are a length (four bytes, big-endian) and JSON of that length. Every message is validated;
no pickles. The socket lies in the staging directory, which only its owner can enter.
"""

from __future__ import annotations

import os
import socket
import struct
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from ckpt_tiering.errors import AgentError, FormatError
from ckpt_tiering.model.extent import PAGE_BYTES
from ckpt_tiering.model.ids import SaveId
from ckpt_tiering.model.layout import StoreUrl
from ckpt_tiering.model.seal import ShardHeader

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from ckpt_tiering.model.extent import Extent

__all__ = [
    "AgentSettings",
    "Drop",
    "Hello",
    "Pin",
    "Reply",
    "Request",
    "RunStatus",
    "SaveStatus",
    "Sealed",
    "Snapshot",
    "SnapshotFile",
    "Staged",
    "Status",
    "Stop",
    "parse_request",
    "receive",
    "receive_with_descriptor",
    "send",
    "socket_address",
]

PROTOCOL_VERSION = 1
MAX_FRAME_BYTES = 16 << 20
_LENGTH = struct.Struct(">I")


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class AgentSettings(_Message):
    """What the agent takes from a trainer's configuration; see `TieringConfig`."""

    concurrency: int = 4
    max_bandwidth: int | None = None
    nvme_budget: int | None = None
    linger: float = 3600.0


class Hello(_Message):
    """First message of a trainer.

    Attributes:
        protocol: Version of this protocol.
        release: Version of the package.
        run: URL of the run's root.
        incarnation: Token of this start of the job.
        settings: The part of the configuration that concerns the agent; the newest trainer's holds.
        environment: The trainer's ``AWS_*`` variables: an agent that an earlier job started would
            go on with that job's credentials. Kept in memory only.
    """

    kind: Literal["hello"] = "hello"
    protocol: int = PROTOCOL_VERSION
    release: str
    run: str
    incarnation: str
    settings: AgentSettings
    environment: dict[str, str] = Field(default_factory=dict, repr=False)


class Sealed(_Message):
    """There is a sealed shard in this directory of a save."""

    kind: Literal["sealed"] = "sealed"
    directory: str


class SnapshotFile(_Message):
    """A whole file in a snapshot's memory; see `Extent`."""

    path: str
    offset: Annotated[int, Field(ge=0, multiple_of=PAGE_BYTES)]
    size_bytes: Annotated[int, Field(ge=0)]


class Snapshot(_Message):
    """Whole files lie in memory: write them to NVMe and seal them. The descriptor comes along.

    The fields are those of `Seal`, and ``generation`` that of the memory (`model.extent`).
    Answered by `Staged` when the memory is free again.
    """

    kind: Literal["snapshot"] = "snapshot"
    run: str
    store_options: dict[str, str | None]
    save_id: str
    name: str | None
    metadata: dict[str, str | int | float | bool | None]
    snapshot_at: float
    rank: int
    ranks_on_node: int
    node_rank: int
    num_nodes: int
    part_bytes: int
    generation: int
    files: tuple[SnapshotFile, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.size_bytes for file in self.files)

    @classmethod
    def of(
        cls, header: ShardHeader, snapshot_at: float, generation: int, extents: Iterable[Extent]
    ) -> Self:
        """Make the message for a shard."""
        return cls(
            run=str(header.url),
            store_options=header.store_options,
            save_id=str(header.save_id),
            name=header.name,
            metadata=header.metadata,
            snapshot_at=snapshot_at,
            rank=header.rank,
            ranks_on_node=header.ranks_on_node,
            node_rank=header.node_rank,
            num_nodes=header.num_nodes,
            part_bytes=header.part_bytes,
            generation=generation,
            files=tuple(
                SnapshotFile(path=e.path, offset=e.offset, size_bytes=e.size_bytes) for e in extents
            ),
        )

    def header(self) -> ShardHeader:
        """Return what the shard is."""
        return ShardHeader(
            url=StoreUrl.parse(self.run),
            store_options=self.store_options,
            save_id=SaveId.parse(self.save_id),
            name=self.name,
            metadata=self.metadata,
            rank=self.rank,
            ranks_on_node=self.ranks_on_node,
            node_rank=self.node_rank,
            num_nodes=self.num_nodes,
            part_bytes=self.part_bytes,
        )


class Staged(_Message):
    """From the agent: what `Snapshot` handed over is on NVMe, or can't be, and why."""

    save_id: str
    error: str | None = None


class Drop(_Message):
    """Somebody wants a save, or all saves of a name, to go; fields as of `journal.rows.Removal`."""

    kind: Literal["drop"] = "drop"
    run: str
    store_options: str
    save_id: str = ""
    name: str = ""
    not_of: str = ""

    @model_validator(mode="after")
    def _names_something(self) -> Self:
        if bool(self.save_id) == bool(self.name):
            raise ValueError("a removal is of a save or of a name")
        if self.save_id:
            SaveId.parse(self.save_id)
        return self


class Pin(_Message):
    """These saves of a run must not go; replaces what was said before."""

    kind: Literal["pin"] = "pin"
    run: str
    save_ids: tuple[str, ...]


class Stop(_Message):
    """Give up the parts in hand and exit; the journal keeps what the store has of them."""

    kind: Literal["stop"] = "stop"


class Reply(_Message):
    """Answer to any message."""

    ok: bool
    error: str | None = None
    release: str = ""


Request = Annotated[Hello | Sealed | Snapshot | Drop | Pin | Stop, Field(discriminator="kind")]
_requests: TypeAdapter[Request] = TypeAdapter(Request)


class SaveStatus(_Message):
    """One save on the status page; times are seconds since the epoch."""

    save_id: str
    step: int
    name: str | None
    state: str
    total_bytes: int
    snapshot_at: float
    staged_at: float
    started_at: float | None
    uploaded_at: float | None
    durable_at: float | None
    error: str | None


class RunStatus(_Message):
    """One run on the status page.

    Attributes:
        run: URL of its root.
        pending: Saves that are staged and not durable yet, oldest first.
        incomplete: Ids of saves that lie in memory, or that some rank of this node has sealed and
            another one not yet.
        failed: Saves that can't become durable.
        durable: The newest durable saves that passed this node, newest first.
    """

    run: str
    pending: tuple[SaveStatus, ...]
    incomplete: tuple[str, ...] = ()
    failed: tuple[SaveStatus, ...]
    durable: tuple[SaveStatus, ...]


class Status(_Message):
    """The status page: a file that the agent replaces as a whole, twice a second.

    Attributes:
        release: Version of the agent's package.
        pid: Its process.
        boot_id: The boot that ``pid`` and ``heartbeat`` belong to.
        heartbeat: Monotonic seconds of its last turn.
        sent_bytes: Bytes handed to stores since it started.
        retries: Requests that were repeated since it started.
        throttled_s: Seconds that requests waited on purpose since it started.
        runs: All runs that are staged here.
    """

    release: str
    pid: int
    boot_id: str
    heartbeat: float
    sent_bytes: int = 0
    retries: int = 0
    throttled_s: float = 0.0
    runs: tuple[RunStatus, ...] = ()

    def run(self, url: str) -> RunStatus:
        """Return the status of a run; an empty one if nothing of it was ever staged here."""
        empty = RunStatus(run=url, pending=(), failed=(), durable=())
        return next((r for r in self.runs if r.run == url), empty)


def parse_request(data: bytes) -> Request:
    """Read a trainer's message.

    Raises:
        FormatError: It is none.
    """
    try:
        return _requests.validate_json(data)
    except ValidationError as error:
        # Without the input, which may hold credentials; for the same reason not `from error`.
        why = "; ".join(e["msg"] for e in error.errors(include_input=False, include_url=False))
        raise FormatError(f"not a message of protocol {PROTOCOL_VERSION}: {why}") from None


def send(connection: socket.socket, message: BaseModel, descriptor: int | None = None) -> None:
    """Send one message, and a descriptor with it. Blocks as long as the socket's timeout allows."""
    data = message.model_dump_json().encode()
    frame = _LENGTH.pack(len(data)) + data
    if descriptor is None:
        connection.sendall(frame)
        return
    # The descriptor travels with the first byte; a full buffer may take only some of the others.
    sent = socket.send_fds(connection, [frame], [descriptor])
    connection.sendall(frame[sent:])


def _exactly(connection: socket.socket, num_bytes: int) -> bytes:
    data = bytearray()
    while len(data) < num_bytes:
        chunk = connection.recv(num_bytes - len(data))
        if not chunk:
            raise AgentError("the other side of the agent's socket closed the connection")
        data += chunk
    return bytes(data)


def receive(connection: socket.socket) -> bytes:
    """Return the payload of one frame; a descriptor that came along is closed.

    Blocks for as long as the socket's timeout allows.

    Raises:
        AgentError: The other side closed the connection.
        FormatError: The frame is too long to be one of ours.
    """
    data, descriptor = receive_with_descriptor(connection)
    if descriptor is not None:
        os.close(descriptor)
    return data


def receive_with_descriptor(connection: socket.socket) -> tuple[bytes, int | None]:
    """Return the payload of one frame and the descriptor that came with it, now the caller's.

    Raises:
        AgentError: The other side closed the connection.
        FormatError: The frame is too long to be one of ours.
    """
    head, descriptors, _, _ = socket.recv_fds(connection, _LENGTH.size, 1)
    if not head:
        raise AgentError("the other side of the agent's socket closed the connection")
    head += _exactly(connection, _LENGTH.size - len(head))
    (length,) = _LENGTH.unpack(head)
    if length > MAX_FRAME_BYTES:
        raise FormatError(f"a frame of {length} bytes is no message of ours")
    return _exactly(connection, length), descriptors[0] if descriptors else None


@contextmanager
def socket_address(agent_dir: Path) -> Iterator[str]:
    """Yield an address of the agent's socket that fits the kernel's limit of 108 bytes.

    The path is taken relative to a descriptor of its directory, so that a staging directory may
    lie as deep as it likes.
    """
    descriptor = os.open(agent_dir, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/agent.sock"
    finally:
        os.close(descriptor)
