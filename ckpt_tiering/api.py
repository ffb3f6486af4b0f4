"""The facade: save, resolve, restore, wait, look. Everything else is behind it.

Saving needs the agent and no store; reading needs the store and no agent. Nothing is opened before
it is used.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from ckpt_tiering import __version__
from ckpt_tiering.agent.client import AgentClient
from ckpt_tiering.agent.ledger import DurableSave, Ledger, Status
from ckpt_tiering.agent.protocol import AgentSettings, Drop, Hello, Pin, Sealed
from ckpt_tiering.clock import Clock, SystemClock
from ckpt_tiering.config import TieringConfig, load_config
from ckpt_tiering.errors import ConfigError, WaitTimeoutError
from ckpt_tiering.model.catalog import SaveInfo
from ckpt_tiering.model.ids import SaveId, new_incarnation
from ckpt_tiering.model.layout import SEAL_NAME, StagingLayout
from ckpt_tiering.pipeline.stage import ShardHeader, ShardWriter, StagedSave
from ckpt_tiering.pipeline.staged import verified_copy
from ckpt_tiering.reader import Reader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

__all__ = ["DurableSave", "SaveInfo", "StagedSave", "Status", "TieredCheckpointer"]

_log = logging.getLogger(__name__)

STATE_FILE = "state.pt"


class TieredCheckpointer:
    """Checkpoints from this process to NVMe to the store, and back.

    Args:
        store: Root of the run, ``s3://bucket/path``.
        staging: Directory on a node-local disk.
        rank: Global rank of this process.
        ranks_on_node: Number of ranks of this node that save.
        node_rank: Rank of this node.
        num_nodes: Number of nodes that save.
        incarnation: Token of this start of the job, equal on all ranks; made here when only one
            process saves.
        clock: Where time comes from.
        **options: More fields of `TieringConfig`.

    Raises:
        ConfigError: The configuration is not valid.
    """

    def __init__(  # noqa: PLR0913  the shape of the job has four numbers
        self,
        store: str | None = None,
        *,
        staging: str | Path | None = None,
        rank: int = 0,
        ranks_on_node: int = 1,
        node_rank: int = 0,
        num_nodes: int = 1,
        incarnation: str | None = None,
        clock: Clock | None = None,
        **options: Any,
    ) -> None:
        self.config: TieringConfig = load_config(store=store, staging=staging, **options)
        if incarnation is None and (ranks_on_node > 1 or num_nodes > 1):
            raise ConfigError(
                "several ranks save, but no incarnation was given",
                hint="make one with ckpt_tiering.model.ids.new_incarnation on rank 0, broadcast it",
            )
        self._clock = clock or SystemClock()
        self._layout = StagingLayout(self.config.staging)
        self._url = self.config.url
        self._incarnation = incarnation or new_incarnation(self._clock.now())
        self._rank = rank
        self._shape = {
            "ranks_on_node": ranks_on_node,
            "node_rank": node_rank,
            "num_nodes": num_nodes,
        }
        self._repeats: dict[int, int] = {}
        self._names: dict[str, str] = {}
        self._resumed: SaveInfo | None = None
        self._ledger = Ledger(self._layout, str(self._url), self._incarnation, self._clock)
        self._reader = Reader(
            self._url,
            self.config.store_options,
            layout=self._layout,
            concurrency=self.config.concurrency,
            clock=self._clock,
        )
        self._agent = AgentClient(self._layout, self._hello(), self._clock)

    def _hello(self) -> Hello:
        config = self.config
        return Hello(
            release=__version__,
            run=str(self._url),
            incarnation=self._incarnation,
            settings=AgentSettings(
                concurrency=config.concurrency,
                max_bandwidth=config.max_bandwidth,
                nvme_budget=config.nvme_budget,
                linger=config.linger,
            ),
        )

    # --- saving ------------------------------------------------------------------------------

    def start(self) -> None:
        """Make sure that this node's agent runs. Blocks until it answers; no-op afterwards.

        Raises:
            AgentError: It could not be started.
        """
        if not self._agent.is_connected:
            self._agent.start()
            self._pin()

    @contextmanager
    def stage(
        self,
        step: int,
        *,
        name: str | None = None,
        metadata: Mapping[str, str | int | float | bool | None] | None = None,
    ) -> Iterator[StagedSave]:
        """Stage a save: write its files inside the ``with`` block, which ends when it is sealed.

        Blocks while NVMe takes the bytes. An exception in the block discards the save.

        Args:
            step: Training step.
            name: A name to find the save by; saving a name again asks for the removal of the
                older save of that name.
            metadata: Facts to keep with the save.

        Raises:
            AgentError: The agent could not be started.
            CapacityError: The staging disk is full.
            FormatError: A path is not legal.
            SaveFailedError: An earlier save failed for good (``on_failure="raise"``).
        """
        self._ledger.raise_failed(quiet=self.config.on_failure == "warn")
        self.start()
        begin = self._clock.monotonic()
        self._ledger.began(step)
        repeat = self._repeats.get(step, 0)
        save_id = SaveId(step, self._incarnation, repeat)
        writer = ShardWriter(self._layout, self._header(save_id, name, metadata), self._clock)
        self._repeats[step] = repeat + 1
        staged = StagedSave(save_id, writer)
        try:
            yield staged
            seal = writer.seal()
        except BaseException:
            writer.discard()
            raise
        self._hand_over(staged, writer.directory.parent, name)
        staged.stall_seconds = self._clock.monotonic() - begin
        num_bytes = sum(f.size_bytes for f in seal.files)
        self._ledger.handed_over(staged.save_id, num_bytes, staged.stall_seconds)

    def _header(
        self, save_id: SaveId, name: str | None, metadata: Mapping[str, Any] | None
    ) -> ShardHeader:
        return ShardHeader(
            url=self._url,
            store_options=self.config.store_options.model_dump(),
            save_id=save_id,
            name=name,
            metadata=dict(metadata or {}),
            rank=self._rank,
            part_bytes=self.config.part_bytes,
            **self._shape,
        )

    def _hand_over(self, staged: StagedSave, directory: Path, name: str | None) -> None:
        # The seal is what counts: an agent that does not hear this finds it by itself.
        self._agent.tell(Sealed(directory=str(directory)))
        if name is not None:
            self.request_removal(name)
            self._names[name] = staged.save_id

    def save(self, step: int, state: Mapping[str, Any] | str | Path, **options: Any) -> str:
        """Save a state dict (as a ``torch.save`` file, ``state.pt``) or a directory of files.

        Args:
            step: Training step.
            state: What to save.
            **options: ``name`` and ``metadata`` of `stage`.

        Returns:
            The save id.

        Raises:
            CkptTieringError: As of `stage`.
        """
        with self.stage(step, **options) as staged:
            if isinstance(state, str | Path):
                staged.add_tree(state)
            else:
                from ckpt_tiering.snapshot.torch_file import write_state  # torch only if needed

                with staged.open(STATE_FILE) as stream:
                    write_state(state, stream)
        return staged.save_id

    def request_removal(self, name: str) -> None:
        """Ask that all saves made so far under a name go.

        A request: it is granted once something newer is durable, and never for the save that the
        run was resumed from. Does not block on the store.
        """
        options = self.config.store_options.model_dump_json()
        run = str(self._url)
        save_id = self._names.pop(name, None)
        if save_id is not None:
            self._ledger.unwanted(save_id)
            self._agent.tell(Drop(run=run, store_options=options, save_id=save_id))
        self._agent.tell(Drop(run=run, store_options=options, name=name, not_of=self._incarnation))

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
        into: str | Path,
        save: SaveInfo | str = "latest",
        *,
        progress: Callable[[int], None] = lambda _: None,
    ) -> SaveInfo:
        """Bring all files of a save into a directory of the user's; every byte is verified.

        Raises:
            CkptTieringError: As of `resolve` and `fetch`.
        """
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
        """Return the state that `save` was given; arguments as of ``torch.load``."""
        from ckpt_tiering.snapshot.torch_file import read_state  # torch only if needed

        info = self.resolve(save) if isinstance(save, str) else save
        path = self.fetch(info, STATE_FILE)
        return read_state(path, map_location=map_location, weights_only=weights_only)

    def mark_resumed(self, save: SaveInfo) -> None:
        """Say which save training went on from: it is protected, and the lag counts from it."""
        self._resumed = save
        self._ledger.resumed(save)
        self._pin()

    def _pin(self) -> None:
        if self._resumed is not None and self._resumed.run == str(self._url):
            self._agent.tell(Pin(run=self._resumed.run, save_ids=(self._resumed.save_id,)))

    # --- waiting and looking -----------------------------------------------------------------

    def settle_pending(self, timeout: float | None = None) -> bool:
        """Have the agent finish what is staged for this run on this node.

        Args:
            timeout: Seconds to wait; ``resume_wait`` by default.

        Returns:
            Whether nothing is pending any more.
        """
        if not any((self._layout.run_dir(self._url) / "saves").glob(f"*/*/{SEAL_NAME}")):
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
            self._ledger.wait(self.config.drain_timeout if timeout is None else timeout)
            self._ledger.raise_failed(quiet=True)
        except WaitTimeoutError as error:
            _log.warning("%s", error)
        finally:
            self._agent.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
