"""The saving half of the facade: states and files to NVMe, then the agent's. Reaches no store."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_tiering import __version__
from ckpt_tiering.agent.client import AgentClient
from ckpt_tiering.agent.ledger import Ledger
from ckpt_tiering.agent.memory import SnapshotMemory
from ckpt_tiering.agent.protocol import (
    AgentSettings,
    Drop,
    Hello,
    Pin,
    Sealed,
    Snapshot,
    Staged,
)
from ckpt_tiering.clock import Clock, SystemClock
from ckpt_tiering.config import TieringConfig, load_config
from ckpt_tiering.errors import ConfigError
from ckpt_tiering.model.ids import SaveId, new_incarnation
from ckpt_tiering.model.layout import FILES_NAME, StagingLayout, check_relative_path
from ckpt_tiering.model.seal import ShardHeader
from ckpt_tiering.pipeline.stage import SavedState, ShardWriter, StagedSave

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ckpt_tiering.model.catalog import SaveInfo
    from ckpt_tiering.snapshot.image import TorchImage
    from ckpt_tiering.snapshot.source import Source

__all__ = ["STATE_FILE", "Saver"]

STATE_FILE = "state.pt"
FREE_WITHIN_S = 600.0


class Saver:
    """Checkpoints from this process to NVMe, and into the hands of the agent.

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
        self._has_saved = False
        self._names: dict[str, str] = {}
        self._resumed: SaveInfo | None = None
        self._image: TorchImage | None = None
        self._ledger = Ledger(self._layout, str(self._url), self._incarnation, self._clock)
        self._memory = SnapshotMemory(self.config.staging_mode, FREE_WITHIN_S)
        self._agent = AgentClient(self._layout, self._hello(), self._clock, self._on_staged)

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

    def join(
        self, *, rank: int, ranks_on_node: int, node_rank: int, num_nodes: int, incarnation: str
    ) -> None:
        """Take a place among the ranks of a job, of which each saves its own shard.

        For what is known only when all ranks first meet; arguments as of the constructor. To be
        called before this process's first save.

        Raises:
            ConfigError: It has saved already, in another place.
        """
        shape = {"ranks_on_node": ranks_on_node, "node_rank": node_rank, "num_nodes": num_nodes}
        if (rank, shape, incarnation) == (self._rank, self._shape, self._incarnation):
            return
        if self._has_saved:
            raise ConfigError(
                f"rank {rank} has saved by itself before all ranks saved together",
                hint="use one checkpointer for saves of one rank and another for those of all",
            )
        self._rank, self._shape, self._incarnation = rank, shape, incarnation
        self._ledger.rename(incarnation)
        self._agent.rename(self._hello())

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
        repeat: int | None = None,
    ) -> Iterator[StagedSave]:
        """Stage a save: write its files inside the ``with`` block, which ends when it is sealed.

        Blocks while NVMe takes the bytes. An exception in the block discards the save.

        Args:
            step: Training step.
            name: A name to find the save by; saving a name again asks for the removal of the
                older save of that name.
            metadata: Facts to keep with the save.
            repeat: What `reserve` returned for it.

        Raises:
            AgentError: The agent could not be started.
            CapacityError: The staging disk is full.
            FormatError: A path is not legal.
            SaveFailedError: An earlier save failed for good (``on_failure="raise"``).
        """
        begin = self._begin_save(step)
        save_id = self._next_id(step, repeat)
        writer = ShardWriter(self._layout, self._header(save_id, name, metadata), self._clock)
        staged = StagedSave(save_id, writer)
        try:
            yield staged
            seal = writer.seal()
        except BaseException:
            writer.discard()
            raise
        # The seal is what counts: an agent that does not hear this finds it by itself.
        self._agent.tell(Sealed(directory=str(writer.directory.parent)))
        self._replace_name(name, staged.save_id)
        staged.stall_seconds = self._clock.monotonic() - begin
        num_bytes = sum(f.size_bytes for f in seal.files)
        self._ledger.handed_over(staged.save_id, num_bytes, staged.stall_seconds)

    def _begin_save(self, step: int) -> float:
        self._ledger.raise_failed(quiet=self.config.on_failure == "warn")
        self.start()
        self._ledger.began(step)
        return self._clock.monotonic()

    def reserve(self, step: int) -> int:
        """Count a save of a step before it is made, and whatever becomes of it.

        Ranks that save together agree on the save's id without talking: each counts every attempt,
        so that what one rank failed to add to a save is never added by a later attempt.
        """
        repeat = self._repeats.get(step, 0)
        self._repeats[step] = repeat + 1
        return repeat

    def _next_id(self, step: int, repeat: int | None = None) -> SaveId:
        self._has_saved = True
        return SaveId(step, self._incarnation, self.reserve(step) if repeat is None else repeat)

    def abandon(self, step: int, repeat: int) -> None:
        """Ask that what there is of an attempt goes: a rank failed, so it can't become whole."""
        save_id = str(SaveId(step, self._incarnation, repeat))
        options = self.config.store_options.model_dump_json()
        self._ledger.unwanted(save_id)
        self._agent.tell(Drop(run=str(self._url), store_options=options, save_id=save_id))

    def _header(
        self,
        save_id: SaveId,
        name: str | None = None,
        metadata: Mapping[str, Any] | None = None,
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

    def _replace_name(self, name: str | None, save_id: str) -> None:
        if name is not None:
            self.request_removal(name)
            self._names[name] = save_id

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
        if not isinstance(state, str | Path):
            return self.save_state(step, state, **options).save_id
        with self.stage(step, **options) as staged:
            staged.add_tree(state)
        return staged.save_id

    def save_state(
        self, step: int, state: Mapping[str, Any], *, file: str = STATE_FILE, **options: Any
    ) -> SavedState:
        """Save a state dict as one ``torch.save`` file.

        With room in memory (``staging_mode``) this blocks for one copy of the state, and the agent
        writes the file; otherwise the file is written before it returns. In both cases the save is
        of the state at the call.

        Args:
            step: Training step.
            state: What to save.
            file: Path of the file within the checkpoint.
            **options: ``name`` and ``metadata`` of `stage`.

        Raises:
            WaitTimeoutError: The save before is still in memory, as the disk takes nothing.
            CkptTieringError: As of `stage`.
        """
        from ckpt_tiering.snapshot.image import TorchImage  # torch only if needed
        from ckpt_tiering.snapshot.torch_file import StateFile

        check_relative_path(file)
        if self._image is None:
            self._image = TorchImage()
        save_id = self.save_source(step, StateFile(file, state, self._image), **options)
        return SavedState(save_id, self.local_path(save_id, file))

    def save_source(
        self, step: int, source: Source, *, repeat: int | None = None, **options: Any
    ) -> str:
        """Save the files of a source: in memory if there is room, otherwise on disk.

        Args:
            step: Training step.
            source: The files.
            repeat: What `reserve` returned for it.
            **options: ``name`` and ``metadata`` of `stage`.

        Returns:
            The save id.

        Raises:
            CkptTieringError: As of `save_state`.
        """
        begin = self._begin_save(step)
        captured_at = self._clock.now()
        captured = self._memory.capture(source)
        if captured is None:
            with self.stage(step, repeat=repeat, **options) as staged:
                source.write(staged.open)
            return staged.save_id
        header = self._header(self._next_id(step, repeat), **options)
        header.seal((), captured_at, captured_at)  # refuses what can't be written down, now
        save_id = str(header.save_id)
        snapshot = Snapshot.of(header, captured_at, captured.generation, captured.extents)
        self._memory.take(save_id)
        self._ledger.handed_over(save_id, captured.size_bytes, self._clock.monotonic() - begin)
        self._agent.hand_over(snapshot, captured.descriptor)
        self._replace_name(header.name, save_id)
        return save_id

    def local_path(self, save_id: str, file: str) -> Path:
        """Return where a file of this rank lies on NVMe, or will as soon as it was staged."""
        directory = self._layout.rank_dir(self._url, SaveId.parse(save_id), self._rank)
        return directory / FILES_NAME / file

    def prepare(self, num_bytes: int) -> None:
        """Take the memory for snapshots ahead of the first save. Does not block.

        Args:
            num_bytes: Expected size of a state; too little or too much is no harm.
        """
        self._memory.prepare(num_bytes)

    def wait_staged(self) -> None:
        """Wait until what was saved is on NVMe. Blocks on the disk.

        Raises:
            WaitTimeoutError: It is not within ten minutes.
            SaveFailedError: A save could not be written there.
        """
        self._memory.wait_free()
        self._ledger.raise_not_staged()

    def _on_staged(self, staged: Staged) -> None:
        if staged.error is not None:
            self._ledger.not_staged(staged.save_id, staged.error)
        self._memory.release(staged.save_id)

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

    def mark_resumed(self, save: SaveInfo) -> None:
        """Say which save training went on from: it is protected, and the lag counts from it."""
        self._resumed = save
        self._ledger.resumed(save)
        self._pin()

    def _pin(self) -> None:
        if self._resumed is not None and self._resumed.run == str(self._url):
            self._agent.tell(Pin(run=self._resumed.run, save_ids=(self._resumed.save_id,)))
