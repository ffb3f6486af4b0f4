from __future__ import annotations

import json
import socket
import struct
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tiering.agent.protocol import (
    MAX_FRAME_BYTES,
    AgentSettings,
    Drop,
    Hello,
    Pin,
    Reply,
    Request,
    RunStatus,
    Sealed,
    Status,
    Stop,
    parse_request,
    receive,
    send,
    socket_address,
)
from ckpt_tiering.errors import AgentError, FormatError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

HELLO = Hello(release="1", run="s3://b/r", incarnation="abcd", settings=AgentSettings())
MESSAGES: list[Request] = [
    HELLO,
    Sealed(directory="/nvme/\u00e4\n"),
    Drop(run="s3://b/r", store_options="{}", save_id="000000000001-abcd"),
    Drop(run="s3://b/r", store_options="{}", name="last", not_of="abcd"),
    Pin(run="s3://b/r", save_ids=("000000000001-abcd",)),
    Pin(run="s3://b/r", save_ids=()),
    Stop(),
]


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a connection."""
    one, other = socket.socketpair()
    with one, other:
        one.settimeout(10)
        other.settimeout(10)
        yield one, other


@pytest.mark.parametrize("message", MESSAGES, ids=repr)
def test_messages_arrive_as_they_were_sent(
    ends: tuple[socket.socket, socket.socket], message: Request
) -> None:
    send(ends[0], message)
    send(ends[0], Stop())
    assert parse_request(receive(ends[1])) == message
    assert parse_request(receive(ends[1])) == Stop()


@pytest.mark.parametrize(
    "bend",
    [
        {"kind": "pickle"},
        {"kind": None},
        {"extra": 1},
        {"incarnation": 3},
        {"settings": {"concurrency": "many"}},
        {"settings": {"unknown": 1}},
        {"run": None},
    ],
    ids=str,
)
def test_p12_bent_messages_are_refused(bend: dict[str, Any]) -> None:
    with pytest.raises(FormatError, match="not a message"):
        parse_request(json.dumps(json.loads(HELLO.model_dump_json()) | bend).encode())


@given(st.binary(max_size=60))
def test_p12_other_bytes_are_no_message(data: bytes) -> None:
    with pytest.raises(FormatError):
        parse_request(data)


def test_p12_a_frame_that_is_too_long_is_refused_unread(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    ends[0].sendall(struct.pack(">I", MAX_FRAME_BYTES + 1))
    with pytest.raises(FormatError, match="no message of ours"):
        receive(ends[1])


@pytest.mark.parametrize("length", [0, 2, 4, 8])
def test_p5_a_side_that_hangs_up_is_noticed(
    ends: tuple[socket.socket, socket.socket], length: int
) -> None:
    ends[0].sendall((struct.pack(">I", 100) + b"part of it")[:length])
    ends[0].close()
    with pytest.raises(AgentError, match="closed the connection"):
        receive(ends[1])


@given(st.lists(st.binary(min_size=1, max_size=5), max_size=10))
def test_a_frame_arrives_whole_however_it_is_cut(chunks: list[bytes]) -> None:
    payload = b"".join(chunks)
    one, other = socket.socketpair()
    with one, other:
        for piece in [struct.pack(">I", len(payload)), *chunks]:
            one.sendall(piece)
        assert receive(other) == payload


def test_a_socket_may_lie_deeper_than_its_address_is_long(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 100) / ("e" * 100)
    deep.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
        with socket_address(deep) as address:
            server.bind(address)
        server.listen()
        with socket_address(deep) as address:
            client.connect(address)
    assert [p.name for p in deep.iterdir()] == ["agent.sock"]


def test_an_answer_is_read_back() -> None:
    reply = Reply(ok=False, error="no \U0001f600", release="1")
    assert Reply.model_validate_json(reply.model_dump_json()) == reply


def test_a_run_that_was_never_here_has_an_empty_status() -> None:
    status = Status(release="1", pid=1, boot_id="b", heartbeat=1.0)
    assert status.run("s3://b/r") == RunStatus(run="s3://b/r", pending=(), failed=(), durable=())
    assert Status.model_validate_json(status.model_dump_json()) == status


@pytest.mark.parametrize("wish", [{"save_id": "latest"}, {}], ids=["no id", "neither"])
def test_p6_a_wish_that_names_no_save_is_refused(wish: dict[str, str]) -> None:
    data = {"kind": "drop", "run": "s3://b/r", "store_options": "{}", **wish}
    with pytest.raises(FormatError):
        parse_request(json.dumps(data).encode())
