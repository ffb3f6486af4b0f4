"""The agent's ear: a Unix socket, one thread a trainer process."""

from __future__ import annotations

import os
import socket
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

from ckpt_tiering import __version__
from ckpt_tiering.agent.protocol import (
    Hello,
    Reply,
    Request,
    Stop,
    parse_request,
    receive_with_descriptor,
    send,
    socket_address,
)
from ckpt_tiering.errors import AgentError, CkptTieringError, FormatError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pydantic import BaseModel

    Handler = Callable[[Request, int | None, Callable[[BaseModel], None]], None]

__all__ = ["Server"]


class Server:
    """Answers trainers.

    A trainer's connection lasts as long as the trainer does, so the number of connections says
    whether anybody still trains.

    Args:
        agent_dir: Where the socket goes.
        handle: Called with each message, the descriptor that came along (the handler's to close)
            and a function that sends a message back at any time, from the connection's thread.
        on_change: Called when a trainer came or went.
    """

    def __init__(self, agent_dir: Path, handle: Handler, on_change: Callable[[], None]) -> None:
        self._agent_dir = agent_dir
        self._handle = handle
        self._on_change = on_change
        self._lock = threading.Lock()
        self._trainers = 0
        self._ever = False
        self._socket: socket.socket | None = None

    @property
    def trainers(self) -> int:
        """Number of trainer processes that are connected."""
        return self._trainers

    @property
    def ever_had_trainers(self) -> bool:
        """Whether any trainer was connected since the start."""
        return self._ever

    def start(self) -> None:
        """Listen. The caller holds the lock of the directory, so an old socket is a dead one's."""
        (self._agent_dir / "agent.sock").unlink(missing_ok=True)
        listening = self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with socket_address(self._agent_dir) as address:
            listening.bind(address)
        (self._agent_dir / "agent.sock").chmod(0o600)
        listening.listen(128)
        threading.Thread(target=self._accept, args=(listening,), name="accept", daemon=True).start()

    def close(self) -> None:
        """Stop listening."""
        if self._socket is not None:
            self._socket.close()
        (self._agent_dir / "agent.sock").unlink(missing_ok=True)

    def _accept(self, listening: socket.socket) -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _count(self, change: int) -> None:
        with self._lock:
            self._trainers += change
            self._ever = True
        self._on_change()

    def _serve(self, connection: socket.socket) -> None:
        self._count(1)
        lock = threading.Lock()

        def push(message: BaseModel) -> None:
            with lock, suppress(OSError):  # a trainer that is gone needs no answer
                send(connection, message)

        try:
            with connection:
                while True:
                    data, descriptor = receive_with_descriptor(connection)
                    reply = self._answer(data, descriptor, push)
                    if reply is not None:
                        push(reply)
        except (OSError, AgentError, FormatError):
            return  # the trainer is gone, or is none
        finally:
            self._count(-1)

    def _answer(
        self, data: bytes, descriptor: int | None, push: Callable[[BaseModel], None]
    ) -> Reply | None:
        """Handle a message; only greetings and orders to stop are answered at once."""
        try:
            request = parse_request(data)
        except CkptTieringError as error:
            if descriptor is not None:
                os.close(descriptor)
            return Reply(ok=False, error=str(error), release=__version__)
        try:
            self._handle(request, descriptor, push)
        except CkptTieringError as error:
            reply = Reply(ok=False, error=str(error), release=__version__)
        else:
            reply = Reply(ok=True, release=__version__)
        return reply if isinstance(request, Hello | Stop) else None
