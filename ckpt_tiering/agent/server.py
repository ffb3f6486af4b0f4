"""The agent's ear: a Unix socket, one thread a trainer process."""

from __future__ import annotations

import socket
import threading
from typing import TYPE_CHECKING

from ckpt_tiering import __version__
from ckpt_tiering.agent.protocol import (
    Hello,
    Reply,
    Request,
    Stop,
    parse_request,
    receive,
    send,
    socket_address,
)
from ckpt_tiering.errors import AgentError, CkptTieringError, FormatError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["Server"]


class Server:
    """Answers trainers.

    A trainer's connection lasts as long as the trainer does, so the number of connections says
    whether anybody still trains.

    Args:
        agent_dir: Where the socket goes.
        handle: Called with each message, from the connection's thread; what it raises is sent back.
        on_change: Called when a trainer came or went.
    """

    def __init__(
        self, agent_dir: Path, handle: Callable[[Request], None], on_change: Callable[[], None]
    ) -> None:
        self._agent_dir = agent_dir
        self._handle = handle
        self._on_change = on_change
        self._lock = threading.Lock()
        self._trainers = 0
        self._ever = False
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)

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
        with socket_address(self._agent_dir) as address:
            self._socket.bind(address)
        (self._agent_dir / "agent.sock").chmod(0o600)
        self._socket.listen(128)
        threading.Thread(target=self._accept, name="accept", daemon=True).start()

    def close(self) -> None:
        """Stop listening."""
        self._socket.close()
        (self._agent_dir / "agent.sock").unlink(missing_ok=True)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
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
        try:
            with connection:
                while True:
                    reply = self._answer(receive(connection))
                    if reply is not None:
                        send(connection, reply)
        except (OSError, AgentError, FormatError):
            return  # the trainer is gone, or is none
        finally:
            self._count(-1)

    def _answer(self, data: bytes) -> Reply | None:
        """Handle a message; only greetings and orders to stop are answered."""
        try:
            request = parse_request(data)
        except CkptTieringError as error:
            return Reply(ok=False, error=str(error), release=__version__)
        try:
            self._handle(request)
        except CkptTieringError as error:
            reply = Reply(ok=False, error=str(error), release=__version__)
        else:
            reply = Reply(ok=True, release=__version__)
        return reply if isinstance(request, Hello | Stop) else None
