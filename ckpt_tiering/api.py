"""The facade: save, resolve, restore, wait, look. Everything else is behind it.

Saving needs the agent and no store; reading needs the store and no agent. Nothing is opened before
it is used.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from ckpt_tiering.agent.ledger import DurableSave, Status
from ckpt_tiering.agent.saver import STATE_FILE, Saver
from ckpt_tiering.errors import ConfigError, WaitTimeoutError
from ckpt_tiering.model.catalog import SaveInfo
from ckpt_tiering.model.layout import SEAL_NAME
from ckpt_tiering.pipeline.stage import SavedState, StagedSave
from ckpt_tiering.pipeline.staged import verified_copy
from ckpt_tiering.reader import Reader

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckpt_tiering.dcp.sharded import ShardedSaver

__all__ = [
    "DurableSave",
    "SaveInfo",
    "SavedState",
    "StagedSave",
    "Status",
    "TieredCheckpointer",
]

_log = logging.getLogger(__name__)


class TieredCheckpointer(Saver):
    """Checkpoints from this process to NVMe to the store, and back.

    Arguments and errors of the constructor are those of `Saver`.
    """

    @cached_property
    def _reader(self) -> Reader:
        return Reader(
            self._url,
            self.config.store_options,
            layout=self._layout,
            concurrency=self.config.concurrency,
            clock=self._clock,
        )

    @cached_property
    def _sharded(self) -> ShardedSaver:
        from ckpt_tiering.dcp.sharded import ShardedSaver  # torch only if needed

        return ShardedSaver(self)

    # --- saving ------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        state: Mapping[str, Any] | str | Path,
        *,
        sharded: bool | None = None,
        **options: Any,
    ) -> str:
        """Save a state dict or a directory of files.

        A state whose tensors are spread over ranks becomes a DCP checkpoint, which all ranks save
        together; see `ckpt_tiering.dcp.ShardedSaver`. Any other becomes a ``torch.save`` file,
        ``state.pt``, of this process alone.

        Args:
            step: Training step.
            state: What to save.
            sharded: Whether all ranks save together; by default, if the state has sharded tensors.
            **options: ``name`` and ``metadata`` of `stage`; of a sharded save also ``extra`` and
                ``directory``.

        Returns:
            The save id.

        Raises:
            CkptTieringError: As of `stage`, and of `ckpt_tiering.dcp.ShardedSaver.save`.
        """
        if isinstance(state, Mapping) and (_is_sharded(state) if sharded is None else sharded):
            return self._sharded.save(step, state, **options)
        return super().save(step, state, **options)

    # --- reading -----------------------------------------------------------------------------

    def latest(self) -> SaveInfo | None:
        """Return the newest durable save, as the store says; None if there is none."""
        return self._reader.latest()

    def saves(self) -> list[SaveInfo]:
        """Return all durable saves, newest first."""
        return self._reader.saves()

    def resolve(self, reference: str) -> SaveInfo:
        """Find a durable save.

        Args:
            reference: ``latest``; a save id; ``tier://latest`` or ``tier://<save id>``; the URL of
                a root, a commit, a save or one of its objects, of this run or another; or a name
                given at `stage` (the longest common tail of path components decides).

        Raises:
            NotFoundError: There is no such save; says what was looked for and where.
        """
        return self._reader.resolve(reference)

    def fetch(self, save: SaveInfo, path: str | None = None) -> Path:
        """Bring a save to this node's staging disk, once for all its ranks.

        Args:
            save: The save.
            path: One file of it; None for all.

        Returns:
            The file, or the directory of all files. Every byte was verified. Not to be written to.

        Raises:
            IntegrityError: No tier has a good copy.
            NotFoundError: The save has no such file.
        """
        return self._reader.fetch(save, path)

    def staged_copy(self, link: str | Path) -> Path:
        """Return the staged file that a path is or leads to, after comparing it with its seal.

        For saves that are not durable yet; the others are fetched.

        Raises:
            NotFoundError: It is not staged on this node.
            IntegrityError: It is not what was sealed.
        """
        return verified_copy(Path(link))

    def restore(
        self,
        into: str | Path | dict[str, Any],
        save: SaveInfo | str = "latest",
        *,
        progress: Callable[[int], None] = lambda _: None,
    ) -> SaveInfo:
        """Bring a save back; every byte is verified.

        Args:
            into: A directory of the user's, which gets all files; or a state dict, into which a
                sharded save is loaded in place. All ranks do that together, each its own part.
            save: The save. When ranks load together, what it means on rank 0.
            progress: Called with the number of bytes that came into a directory.

        Raises:
            CkptTieringError: As of `resolve` and `fetch`.
        """
        if isinstance(into, dict):
            from ckpt_tiering.dcp.loading import load_into  # torch only if needed

            def wanted() -> SaveInfo:
                return self.resolve(save) if isinstance(save, str) else save

            return load_into(into, wanted, self._reader, self._sharded.exchange)
        info = self.resolve(save) if isinstance(save, str) else save
        self._reader.restore(info, Path(into), progress=progress)
        return info

    def load(
        self,
        save: SaveInfo | str = "latest",
        *,
        map_location: Any = "cpu",
        weights_only: bool = True,
    ) -> Any:
        """Return the state that `save` was given; arguments as of ``torch.load``.

        Raises:
            ConfigError: The save is sharded.
        """
        from ckpt_tiering.snapshot.torch_file import read_state  # torch only if needed

        info = self.resolve(save) if isinstance(save, str) else save
        if info.metadata.get("format") == "dcp":
            raise ConfigError(
                f"save {info.save_id} is a sharded one, which is loaded into a state that is there",
                hint="call restore(into=state) on all ranks",
            )
        path = self.fetch(info, STATE_FILE)
        return read_state(path, map_location=map_location, weights_only=weights_only)

    # --- waiting and looking -----------------------------------------------------------------

    def settle_pending(self, timeout: float | None = None) -> bool:
        """Have the agent finish what is staged for this run on this node.

        Args:
            timeout: Seconds to wait; ``resume_wait`` by default.

        Returns:
            Whether nothing is pending any more.
        """
        seals = (self._layout.run_dir(self._url) / "saves").glob(f"*/*/{SEAL_NAME}")
        here = self.status().agent_alive or self._ledger.pending() or any(seals)
        if not here:
            return True
        self.start()
        try:
            self._ledger.wait(
                self.config.resume_wait if timeout is None else timeout,
                not_before=self._clock.monotonic(),
            )
        except WaitTimeoutError as error:
            _log.warning("%s", error)
            return False
        return True

    def wait(self, timeout: float | None = None) -> None:
        """Wait until everything that is staged here is durable.

        Args:
            timeout: Seconds; None for no bound.

        Raises:
            WaitTimeoutError: Something is still pending; says what, and why.
            SaveFailedError: A save failed for good; raised once for each.
        """
        self._ledger.wait(timeout)
        self._ledger.raise_failed(quiet=False)

    def status(self) -> Status:
        """Return what this node knows of its run. Reads one small local file."""
        return self._ledger.status()

    def metrics(self, step: int) -> dict[str, float]:
        """Return the metrics of `ckpt_tiering.model.events.METRICS`. Reads one small local file.

        Args:
            step: Current training step.
        """
        return self._ledger.metrics(step)

    def new_durable(self) -> list[DurableSave]:
        """Return the saves of this node that became durable since the last call, oldest first."""
        return self._ledger.new_durable()

    def close(self, timeout: float | None = None) -> None:
        """Wait for what is staged, then leave the agent. What is still pending goes on in it.

        Args:
            timeout: Seconds to wait; ``drain_timeout`` by default.
        """
        try:
            self._memory.wait_free()  # from here on the disk has it, whatever becomes of us
            self._ledger.wait(self.config.drain_timeout if timeout is None else timeout)
            self._ledger.raise_failed(quiet=True)
        except WaitTimeoutError as error:
            _log.warning("%s", error)
        finally:
            self._agent.close()
            self._memory.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# Where the kinds of sharded tensors live. What was never imported is not in any state.
_SHARDED_KINDS = {
    "torch.distributed.tensor": "DTensor",
    "torch.distributed._shard.sharded_tensor": "ShardedTensor",
}


def _is_sharded(state: Mapping[str, Any]) -> bool:
    loaded = [(sys.modules.get(module), name) for module, name in _SHARDED_KINDS.items()]
    kinds = tuple(kind for module, name in loaded if (kind := getattr(module, name, None)))
    return bool(kinds) and _holds(state, kinds)


def _holds(value: Any, kinds: tuple[type, ...]) -> bool:
    if isinstance(value, Mapping):
        return any(_holds(part, kinds) for part in value.values())
    if isinstance(value, list):
        return any(_holds(part, kinds) for part in value)
    return isinstance(value, kinds)
