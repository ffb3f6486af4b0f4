"""The ways to save that are compared: what each must do, and ours and the plain ones."""

from __future__ import annotations

import inspect
import os
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from benchmarks.sizes import GB
from ckpt_tiering.agent.client import read_status
from ckpt_tiering.api import TieredCheckpointer
from ckpt_tiering.clock import SystemClock
from ckpt_tiering.model.layout import StagingLayout
from ckpt_tiering.units import GIB

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from benchmarks.states import State

__all__ = ["Done", "InThread", "Pending", "Setup", "UnavailableError", "Variant"]

CLOCK = SystemClock()
LINGER_S = 5.0


class UnavailableError(Exception):
    """A variant can't be measured here; the message is the reason that is printed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Where a variant may write.

    Attributes:
        home: An empty directory on a local disk, of this process alone.
        bucket: Name of the bucket.
        prefix: Prefix in it, of this process alone; no slash at its end.
        region: What clients are to call the region of the server.
    """

    home: Path
    bucket: str
    prefix: str
    region: str

    @property
    def url(self) -> str:
        """The root in the store."""
        return f"s3://{self.bucket}/{self.prefix}"


class Pending(Protocol):
    """A save that is on its way."""

    def poll(self) -> float | None:
        """Return the monotonic time at which it was durable; None if it is not yet.

        Called after each step, as part of it. Raises what went wrong.
        """
        ...


class Variant(Protocol):
    """A way to save. One process has one of it, and uses it from one thread."""

    def open(self, num_bytes: int) -> None:
        """Do what a user can do before the model is there. Raise `UnavailableError` if need be."""
        ...

    def save(self, step: int, state: State) -> Pending:
        """Save; what is measured as the stall is this call."""
        ...

    def agents(self) -> set[int]:
        """Return processes that work for it and may not be children of this one."""
        ...

    def phases(self) -> Mapping[str, float]:
        """Return wall times of what happened to the newest save, by name, if they are known."""
        ...

    def close(self) -> None:
        """End everything that was started."""
        ...


class Done:
    """A save that was durable when the call returned."""

    def __init__(self) -> None:
        self._at = CLOCK.monotonic()

    def poll(self) -> float | None:
        """See `Pending.poll`."""
        return self._at


class InThread:
    """A save whose end is waited for by a thread."""

    def __init__(self, wait: Callable[[], object]) -> None:
        self._wait = wait
        self._at: float | None = None
        self._error: BaseException | None = None
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        try:
            self._wait()
        except BaseException as error:  # noqa: BLE001  raised again by poll
            self._error = error
        self._at = CLOCK.monotonic()

    def poll(self) -> float | None:
        """See `Pending.poll`."""
        if self._at is not None and self._error is not None:
            raise self._error
        return self._at


class Plain:
    """What most variants have in common: nothing to open, nothing beside the process."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup

    def open(self, num_bytes: int) -> None:
        """See `Variant.open`."""

    def agents(self) -> set[int]:
        """See `Variant.agents`."""
        return set()

    def phases(self) -> Mapping[str, float]:
        """See `Variant.phases`."""
        return {}

    def close(self) -> None:
        """See `Variant.close`."""


class Memcpy(Plain):
    """Every storage into memory that is there: what no snapshot can do without."""

    def open(self, num_bytes: int) -> None:
        """Take the memory, and touch all of it."""
        self._copy = torch.zeros(num_bytes // 4 + GIB // 1024).fill_(1.0)

    def save(self, step: int, state: State) -> Pending:
        """Copy."""
        offset = 0
        for group in state.tensors.values():
            for tensor in group.values():
                end = offset + tensor.numel()
                self._copy[offset:end].copy_(tensor.view(-1))
                offset = end
        return Done()


class TorchSave(Plain):
    """``torch.save`` to the local disk, then fsync, which a node's loss takes away."""

    def save(self, step: int, state: State) -> Pending:
        """Write, and wait for the disk."""
        with (self.setup.home / f"{step}.pt").open("wb") as file:
            torch.save(state.tree(step), file)
            file.flush()
            os.fsync(file.fileno())
        return Done()

    def close(self) -> None:
        """Leave the files to the runner."""


class Ours(Plain):
    """`TieredCheckpointer.save`; durable is compared with the store and committed."""

    options: Mapping[str, Any] = {}

    def open(self, num_bytes: int) -> None:
        """Start the agent and take the memory, as the Lightning companion does at setup."""
        setup = self.setup
        self._checkpointer = TieredCheckpointer(
            setup.url, staging=setup.home / "nvme", linger=LINGER_S
        )
        self._layout = StagingLayout(self._checkpointer.config.staging)
        self._checkpointer.start()
        self._checkpointer.prepare(num_bytes + GB // 100)

    def save(self, step: int, state: State) -> Pending:
        """Save."""
        self._checkpointer.save(step, state.tree(step), **self.options)
        return InThread(self._checkpointer.wait)

    def agents(self) -> set[int]:
        """Return the agent, which has a session of its own."""
        page = read_status(self._layout)
        return {page.pid} if page else set()

    def phases(self) -> Mapping[str, float]:
        """Return what the agent notes of the newest durable save."""
        durable = self._checkpointer.status().last_durable
        names = ("snapshot_at", "staged_at", "started_at", "uploaded_at", "durable_at")
        return {name: at for name in names if (at := getattr(durable, name, None)) is not None}

    def close(self) -> None:
        """Leave the agent, and wait until it is gone: its files are about to be deleted."""
        agents = self.agents()
        self._checkpointer.close()
        deadline = CLOCK.monotonic() + 6 * LINGER_S
        while any(_is_running(pid) for pid in agents) and CLOCK.monotonic() < deadline:
            CLOCK.sleep(0.05)


class OursSharded(Ours):
    """`TieredCheckpointer.save` of a DCP checkpoint."""

    options: Mapping[str, Any] = {"sharded": True}

    def open(self, num_bytes: int) -> None:
        """See `Ours.open`."""
        if "sharded" not in inspect.signature(TieredCheckpointer.save).parameters:
            raise UnavailableError("TieredCheckpointer.save has no argument 'sharded' yet")
        super().open(num_bytes)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
