"""The trainer's side of the agent: starts it, talks to it, notices within moments when it is gone.

Reaches no store and no SDK. Nothing here is needed for a staged save to be safe: the seal on NVMe
is, and the next agent finds it.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import subprocess
import sys
import threading
from collections import deque
from typing import TYPE_CHECKING

from pydantic import ValidationError

from ckpt_tiering.agent.protocol import (
    Hello,
    Reply,
    Request,
    Sealed,
    Snapshot,
    Staged,
    Status,
    Stop,
    receive,
    send,
    socket_address,
)
from ckpt_tiering.errors import AgentError, ConfigError
from ckpt_tiering.fsio import boot_id, make_private
from ckpt_tiering.model.events import EventKind
from ckpt_tiering.observe.bus import append_line

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ckpt_tiering.clock import Clock
    from ckpt_tiering.model.layout import StagingLayout

__all__ = ["AgentClient", "heartbeat_age", "read_status"]

_log = logging.getLogger(__name__)

START_WITHIN_S = 30.0
REPLY_WITHIN_S = 30.0
TELL_WITHIN_S = 0.5
REMEMBERED = 256
RESTART_INTERVAL_S = 5.0
_POLL_S = 0.02
_EXIT_ALREADY_RUNNING = 3


def read_status(layout: StagingLayout) -> Status | None:
    """Return the agent's status page; None if there is none. Never blocks on the agent."""
    try:
        return Status.model_validate_json(layout.status.read_bytes())
    except (OSError, ValidationError):
        return None


def heartbeat_age(status: Status, clock: Clock) -> float | None:
    """Return the seconds since the agent's last sign of life; None if that was before a reboot."""
    return clock.monotonic() - status.heartbeat if status.boot_id == boot_id() else None


class AgentClient:
    """Connection of one trainer process to its node's agent. Safe to use from several threads.

    Args:
        layout: The staging directory.
        hello: How to introduce this trainer.
        clock: For waiting.
        on_staged: Called when the agent is through with a snapshot, from a thread of this client.
    """

    def __init__(
        self,
        layout: StagingLayout,
        hello: Hello,
        clock: Clock,
        on_staged: Callable[[Staged], None] = lambda _: None,
    ) -> None:
        self._layout = layout
        self._hello = hello
        self._clock = clock
        self._lock = threading.RLock()
        self._connection: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._pid = os.getpid()
        self._closed = False
        self._last_start: float | None = None
        self._told: deque[Request] = deque(maxlen=REMEMBERED)
        self._on_staged = on_staged
        self._snapshots: dict[str, tuple[Snapshot, int]] = {}  # not on NVMe yet, by save id

    @property
    def is_connected(self) -> bool:
        """Whether an agent is at the other end, as far as is known."""
        return self._connection is not None and self._pid == os.getpid()

    def start(self) -> None:
        """Connect to the agent, starting one if none runs. Blocks until it answers.

        Raises:
            AgentError: No agent could be started; the message has the end of its log.
        """
        with self._lock:
            if self.is_connected:
                return
            self._pid = os.getpid()
            self._closed = False
            make_private(self._layout.staging)
            make_private(self._layout.agent_dir)
            connection = self._introduce()
            connection.settimeout(TELL_WITHIN_S)
            self._connection = connection
            watcher = threading.Thread(
                target=self._watch, args=(connection,), name="agent-watch", daemon=True
            )
            watcher.start()
            for message in list(self._told):
                self._send(message)
            for snapshot, descriptor in list(self._snapshots.values()):
                self._send(snapshot, descriptor)

    def rename(self, hello: Hello) -> None:
        """Introduce this trainer in another way from now on."""
        with self._lock:
            self._hello = hello
            if self.is_connected:
                before, self._connection = self._connection, None
                self.start()  # first: an agent that nobody listens to may end
                if before is not None:
                    before.shutdown(socket.SHUT_RDWR)
                    before.close()

    def _introduce(self) -> socket.socket:
        """Connect and say hello; an agent that is just ending is not waited for but followed."""
        deadline = self._clock.monotonic() + START_WITHIN_S
        while True:
            running = self._connect()
            connection = running or self._spawn()
            if connection is None:
                if self._clock.monotonic() >= deadline:
                    raise AgentError(
                        f"the agent of {self._layout.staging} neither listens nor ends"
                    )
                self._clock.sleep(_POLL_S)
                continue
            try:
                reply = self._exchange(connection, self._greeting())
                if reply.ok:
                    return connection
                if running is None:
                    connection.close()
                    raise ConfigError(f"the agent refused its own trainer: {reply.error}")
                _log.info("replacing the agent of %s: %s", self._layout.staging, reply.error)
                self._dismiss(connection)
            except (OSError, AgentError):
                if self._clock.monotonic() >= deadline:
                    raise
            connection.close()
            self._clock.sleep(_POLL_S)

    def _greeting(self) -> Hello:
        environment = {k: v for k, v in os.environ.items() if k.startswith("AWS_")}
        return self._hello.model_copy(update={"environment": environment})

    def tell(self, message: Request) -> None:
        """Tell the agent something, without waiting for it to listen: it may be starved or gone.

        A seal that it does not hear of is found by the next agent's start-up scan; everything else
        is told again to the next agent, for which hearing it twice is no harm.
        """
        if not isinstance(message, Sealed):
            self._told.append(message)
        self._send(message)

    def hand_over(self, snapshot: Snapshot, descriptor: int) -> None:
        """Give a snapshot in memory to the agent, and to the next one should this one die.

        The memory must not change until `on_staged` was called with its save id. Does not wait.
        """
        with self._lock:
            self._snapshots[snapshot.save_id] = (snapshot, descriptor)
            self._send(snapshot, descriptor)

    def _send(self, message: Request, descriptor: int | None = None) -> None:
        with self._lock:
            if not self.is_connected:
                return
            assert self._connection is not None
            try:
                send(self._connection, message, descriptor)
            except OSError as error:
                _log.warning("the agent of %s does not listen: %s", self._layout.staging, error)

    def close(self) -> None:
        """Leave; the agent goes on with what is staged."""
        with self._lock:
            self._closed = True
            if self._connection is not None and self._pid == os.getpid():
                self._connection.shutdown(socket.SHUT_RDWR)
                self._connection.close()
            self._connection = None

    def _connect(self) -> socket.socket | None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(REPLY_WITHIN_S)
        try:
            with socket_address(self._layout.agent_dir) as address:
                connection.connect(address)
        except (FileNotFoundError, ConnectionRefusedError):
            connection.close()
            return None
        return connection

    def _spawn(self) -> socket.socket | None:
        self._last_start = self._clock.monotonic()
        command = [sys.executable, "-P", "-m", "ckpt_tiering.agent"]
        with self._layout.log.open("ab") as log:
            # A session of its own, and never multiprocessing: that would import the training
            # script again, and end with it.
            self._process = subprocess.Popen(
                [*command, "--staging", str(self._layout.staging)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        # It may outlive this client: somebody has to collect its exit status when it ends.
        threading.Thread(target=self._process.wait, name="agent-reap", daemon=True).start()
        deadline = self._last_start + START_WITHIN_S
        while self._clock.monotonic() < deadline:
            connection = self._connect()
            if connection is not None:
                return connection
            code = self._process.poll()
            if code == _EXIT_ALREADY_RUNNING:
                # An agent that ends keeps its lock after it stopped listening.
                return self._connect()
            if code is not None:
                break
            self._clock.sleep(_POLL_S)
        raise AgentError(
            f"the agent of {self._layout.staging} did not start (exit code "
            f"{self._process.poll()}); its log ends with: {_tail(self._layout.log)}",
            hint=f"run `ckpt-tiering agent --staging {self._layout.staging}` to see why",
        )

    def _dismiss(self, connection: socket.socket) -> None:
        """Have an agent of another release step aside."""
        self._exchange(connection, Stop())
        hung_up = select.poll()
        hung_up.register(connection, select.POLLRDHUP)
        if not hung_up.poll(START_WITHIN_S * 1000):
            raise AgentError(
                f"the agent of {self._layout.staging} is of another release and does not stop",
                hint="kill it; what is staged is safe, and the next agent goes on with it",
            )

    @staticmethod
    def _exchange(connection: socket.socket, message: Request) -> Reply:
        send(connection, message)
        return Reply.model_validate_json(receive(connection))

    def _watch(self, connection: socket.socket) -> None:
        """Hear the agent until it hangs up; then report it and start another agent."""
        waiting = select.poll()
        waiting.register(connection, select.POLLIN)
        try:
            while waiting.poll():
                staged = Staged.model_validate_json(receive(connection))
                self._snapshots.pop(staged.save_id, None)
                self._on_staged(staged)
        except (OSError, ValueError, AgentError):
            pass  # it is gone, or is closed here, or says what no agent of ours says
        with self._lock:
            if self._closed or self._connection is not connection:
                return
            self._connection = None
            connection.close()
        ended = self._how_it_ended()
        _log.error("the agent of %s is gone (%s); starting another", self._layout.staging, ended)
        self._report(EventKind.AGENT_LOST, error=ended)
        self._restart()

    def _how_it_ended(self) -> str:
        if self._process is None:
            return "it was started by another process"
        try:
            code = self._process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            return "it closed its socket but still runs"
        return f"killed by signal {-code}" if code < 0 else f"exit code {code}"

    def _restart(self) -> None:
        while not self._closed:
            last = self._last_start
            now = self._clock.monotonic()
            if last is not None and now - last < RESTART_INTERVAL_S:
                self._clock.sleep(RESTART_INTERVAL_S - (now - last))
            try:
                if not self._closed:
                    self.start()
            except (OSError, AgentError) as error:
                _log.error("the agent of %s can't be started: %s", self._layout.staging, error)
                self._last_start = self._clock.monotonic()
                continue
            self._report(EventKind.AGENT_RESTARTED)
            return

    def _report(self, kind: EventKind, **fields: str) -> None:
        record = {"kind": kind, "at": self._clock.now(), "run": self._hello.run, **fields}
        try:
            append_line(self._layout.events, record)
        except OSError as error:
            _log.warning("event %s can't be logged: %s", kind, error)


def _tail(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")[-800:].strip() or "(nothing)"
    except OSError:
        return "(no log)"
