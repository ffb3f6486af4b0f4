"""`TieredStorageWriter`: DCP's own ``save`` and ``async_save``, by way of memory and NVMe."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from ckpt_tiering.agent.saver import Saver
from ckpt_tiering.clock import SystemClock
from ckpt_tiering.config import load_config
from ckpt_tiering.dcp.plan import METADATA_FILE, data_file, fill_metadata, settled
from ckpt_tiering.dcp.sharded import DCP_FORMAT
from ckpt_tiering.dcp.topology import Place, RankFacts, places
from ckpt_tiering.errors import ConfigError, SaveFailedError
from ckpt_tiering.model.ids import new_incarnation
from ckpt_tiering.snapshot.archives import pickle_object
from ckpt_tiering.snapshot.distcp import DistcpFiles, DistcpLayout, is_plain

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from ckpt_tiering.snapshot.walk import Walk

__all__ = ["TieredStorageWriter"]


class _SharedSaver(Saver):
    """The saver of all writers of a run in this process, and what they know of one another.

    Memory and the connection to the agent are kept from save to save.

    Attributes:
        facts: What each rank said of itself; on the coordinator.
        incarnation: Token of this start of the job; made by the coordinator.
        layout: The layout of the last save, for the next one of the kind.
        unfinished: Step and attempt of a save of the coordinator's that did not come to its end.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.facts: dict[int, RankFacts] = {}
        self.incarnation = new_incarnation(SystemClock().now())
        self.layout: DistcpLayout | None = None
        self.unfinished: tuple[int, int] | None = None

    def wait(self, timeout: float | None) -> None:
        self.start()  # what is staged needs an agent, and only a live one says what is pending
        self._ledger.wait(timeout, not_before=self._clock.monotonic())
        self._ledger.raise_failed(quiet=False)

    def close(self) -> None:
        self._memory.wait_free()
        self._agent.close()
        self._memory.close()


_shared: dict[tuple[int, str, str], _SharedSaver] = {}


class TieredStorageWriter(StorageWriter):
    """Writes one checkpoint of ``dcp.save`` or ``dcp.async_save``; every rank has its own.

    When DCP is done, each rank's part is in memory (or on NVMe) and in the hands of its node's
    agent, so it survives the end of this process. It is *durable* later; `wait` waits for that.
    Writers of the same run in one process share memory and agent; `close` ends that.

    Args:
        store: Root of the run, ``s3://bucket/path``.
        step: Training step, the same on all ranks.
        staging: Directory on a node-local disk.
        name: A name to find the save by; ``dcp.save(checkpoint_id=...)`` overrides it.
        metadata: Facts to keep with the save.
        **options: More fields of `TieringConfig`. Those of a run's first writer hold.

    Raises:
        ConfigError: The configuration is not valid.
    """

    def __init__(
        self,
        store: str | None = None,
        *,
        step: int,
        staging: str | Path | None = None,
        name: str | None = None,
        metadata: Mapping[str, str | int | float | bool | None] | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.step = step
        self._config = load_config(store=store, staging=staging, **options)
        self._name = name
        self._metadata = {**(metadata or {}), **DCP_FORMAT}
        self._is_coordinator = False
        self._attempt = 0
        self._captured: tuple[str, DistcpLayout, list[Walk | bytes], list[Any]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        # `async_save` sends it to a process that has a saver of its own.
        return {**self.__dict__, "_captured": None}

    @property
    def saver(self) -> _SharedSaver:
        """The saver of this run in this process."""
        config = self._config
        key = (os.getpid(), str(config.url), str(config.staging))
        if key not in _shared:
            _shared[key] = _SharedSaver(**config.model_dump())
        return _shared[key]

    def wait(self, timeout: float | None = None) -> None:
        """Wait until everything that is staged on this node is durable.

        Args:
            timeout: Seconds; None for no bound.

        Raises:
            WaitTimeoutError: Something is still pending; says what, and why.
            SaveFailedError: A save failed for good.
        """
        self.saver.wait(timeout)

    def close(self) -> None:
        """Leave the agent and give memory back, for all writers of this run in this process."""
        key = (os.getpid(), str(self._config.url), str(self._config.staging))
        saver = _shared.pop(key, None)
        if saver is not None:
            saver.close()

    # --- what DCP calls, in this order -------------------------------------------------------

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new checkpoint, with a name."""
        if checkpoint_id is not None:
            self._name = os.fspath(checkpoint_id)
        self._captured = None

    def storage_meta(self) -> StorageMeta:
        """Return what DCP's planners may want to know."""
        return StorageMeta(checkpoint_id=str(self._config.url))

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Begin a save on this rank.

        Raises:
            ConfigError: Each rank was to save for itself.
        """
        del args
        if not kwargs.get("use_collectives", True):
            raise ConfigError(
                "use_collectives=False would write a checkpoint that no other number of ranks "
                "can load",
                hint="leave it out; or use TieredCheckpointer.save, which needs no collectives",
            )
        self._is_coordinator = is_coordinator
        saver = self.saver
        if saver.unfinished is not None:
            saver.abandon(*saver.unfinished)
            saver.unfinished = None
        self._attempt = saver.reserve(self.step)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Say where this rank runs."""
        facts = RankFacts.of(self.saver, step=self.step, attempt=self._attempt)
        return replace(plan, storage_data=facts)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Give each rank its place. Equal for all saves: DCP may keep a plan for later ones.

        Raises:
            ConfigError: The ranks were told different things.
        """
        saver = self.saver
        said = {
            rank: plan.storage_data
            for rank, plan in enumerate(plans)
            if isinstance(plan.storage_data, RankFacts)  # not of a plan that DCP has kept
        }
        first = next(iter(said.values()), None)
        for rank in range(len(plans)):
            facts = said.get(rank) or saver.facts.get(rank)
            if facts is None:
                raise ConfigError(f"rank {rank} came with a plan of another writer")
            if rank not in said and first is not None:
                facts = replace(facts, step=first.step, attempt=first.attempt)
            saver.facts[rank] = facts
        there = places({r: saver.facts[r] for r in range(len(plans))}, saver.incarnation)
        return [replace(plan, storage_data=place) for plan, place in zip(plans, there, strict=True)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Copy this rank's part; the coordinator's follows in `finish`, with the metadata."""
        place = plan.storage_data
        if not isinstance(place, Place):
            raise ConfigError("the plan was not made by this kind of writer")
        saver = self.saver
        place.apply(saver)
        if self._is_coordinator:
            saver.unfinished = (self.step, self._attempt)
        objects: dict[MetadataIndex, Walk | bytes] = {}
        tensors: dict[MetadataIndex, Any] = {}
        for item in plan.items:
            value = planner.resolve_data(item)
            if item.type is WriteItemType.BYTE_IO:
                objects[item.index] = value.getvalue()  # type: ignore[union-attr]  # BytesIO
            elif is_plain(settled(value)):
                tensors[item.index] = settled(value)
            else:
                objects[item.index] = pickle_object(value.detach())
        values, memory = list(objects.values()), list(tensors.values())
        layout = saver.layout
        if layout is None or not layout.holds(values, memory):
            layout = saver.layout = DistcpLayout(values, memory)
        file = data_file(place.rank)
        self._captured = (file, layout, values, memory)
        if not self._is_coordinator:
            self._hand_over({})
        done: Future[list[WriteResult]] = Future()
        done.set_result(
            [
                WriteResult(index, length, _StorageInfo(file, offset, length))
                for index, (offset, length) in zip(
                    (*objects, *tensors), layout.places(values), strict=True
                )
            ]
        )
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Complete the checkpoint: the coordinator's part, with ``.metadata``.

        Raises:
            SaveFailedError: Some item was written by no rank.
        """
        written = {result.index: result.storage_data for part in results for result in part}
        _refuse_holes(metadata, written)
        index = {
            item: (info.relative_path, info.offset, info.length) for item, info in written.items()
        }
        data = fill_metadata(metadata, index, str(self._config.url))
        self._hand_over({METADATA_FILE: data})
        self.saver.unfinished = None

    def _hand_over(self, others: Mapping[str, bytes]) -> None:
        assert self._captured is not None
        source = DistcpFiles(*self._captured, others)
        self._captured = None
        saver = self.saver
        try:
            saver.save_source(
                self.step,
                source,
                repeat=self._attempt,
                name=self._name,
                metadata=self._metadata,
            )
        except BaseException:
            saver.abandon(self.step, self._attempt)
            saver.unfinished = None
            raise

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Tell whether an id may be a name; DCP asks only where it has to find a writer itself."""
        return bool(os.fspath(checkpoint_id))


def _refuse_holes(metadata: Metadata, written: Mapping[MetadataIndex, Any]) -> None:
    """DCP's own writer can lose what a thread failed to write; nobody else would notice."""
    expected: list[MetadataIndex] = []
    for key, value in metadata.state_dict_metadata.items():
        if isinstance(value, BytesStorageMetadata):
            expected.append(MetadataIndex(key))
        else:
            expected += [MetadataIndex(key, chunk.offsets) for chunk in value.chunks]
    missing: Sequence[str] = [item.fqn for item in expected if item not in written]
    if missing:
        raise SaveFailedError(
            f"{len(missing)} items were written by no rank, the first is {missing[0]!r}"
        )
