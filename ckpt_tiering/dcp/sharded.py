"""The fast path for sharded states: plan once, then each rank copies its part and goes on.

After the first save of a layout no rank talks to another at a save. What the others know of a
rank's part, where each item lies in its file, does not change while the layout stands.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ckpt_tiering.dcp.exchange import TIMEOUT_S, Exchange
from ckpt_tiering.dcp.plan import (
    METADATA_FILE,
    FlatState,
    Share,
    data_file,
    fill_metadata,
    kept,
)
from ckpt_tiering.dcp.topology import Place, RankFacts, places
from ckpt_tiering.model.ids import new_incarnation
from ckpt_tiering.model.layout import check_relative_path
from ckpt_tiering.snapshot.distcp import DistcpFiles, DistcpLayout
from ckpt_tiering.snapshot.garbage import no_collection

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch.distributed as dist
    from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
    from torch.distributed.checkpoint.planner import SavePlan, WriteItem

    from ckpt_tiering.agent.saver import Saver
    from ckpt_tiering.snapshot.walk import Walk

__all__ = ["DCP_FORMAT", "ShardedSaver"]

DCP_FORMAT = {"format": "dcp"}


@dataclass(slots=True, kw_only=True)
class _Planned:
    """A layout that the ranks agreed on, and this rank's part of it.

    On rank 0 there is also what all ranks' parts make together.
    """

    signature: list[Any]
    share: Share
    layout: DistcpLayout
    metadata: Metadata | None = None
    others: dict[MetadataIndex, tuple[str, int, int]] = field(default_factory=dict)
    metadata_file: bytes | None = None


class ShardedSaver:
    """Saves states whose tensors are spread over ranks, as DCP checkpoints.

    All ranks of the group save together: the same steps, in the same order. The first save, and
    each one after the layout changed (keys, shapes, dtypes, placements), is planned by DCP's own
    planner, which takes an agreement of all ranks; see `Exchange`. All others take a copy of this
    rank's part, and nothing else.

    Args:
        saver: Of this process. At the first save it takes this rank's place among the others.
        process_group: The ranks; all of the job by default. Nothing is sent over it.
        timeout_s: Bound in seconds of each wait for other ranks.
    """

    def __init__(
        self,
        saver: Saver,
        *,
        process_group: dist.ProcessGroup | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self._saver = saver
        self._exchange = Exchange(process_group, timeout_s=timeout_s)
        self._incarnation: str | None = None
        self._planned: _Planned | None = None
        self._joined = self._exchange.size == 1

    @property
    def exchange(self) -> Exchange:
        """How these ranks agree."""
        return self._exchange

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        *,
        name: str | None = None,
        metadata: Mapping[str, str | int | float | bool | None] | None = None,
        extra: Mapping[str, bytes] | None = None,
        directory: str = "",
    ) -> str:
        """Save a state dict; all ranks call it. Returns when this rank's part is copied.

        Args:
            step: Training step.
            state: Nested dictionaries and lists of tensors (DTensor, ShardedTensor, plain) and
                Python objects, as for ``dcp.save``.
            name: As of `Saver.stage`; the same on all ranks.
            metadata: Likewise; ``format`` is ours.
            extra: Further small files of this rank, by path. No two ranks have the same path.
            directory: Put all files in a directory of this name.

        Returns:
            The save id, the same on all ranks.

        Raises:
            WaitTimeoutError: The layout changed, and some ranks did not come to plan it.
            ConfigError: The ranks were configured differently; raised on all.
            CkptTieringError: As of `Saver.save_source`. A save that failed on one rank never
                becomes durable.
        """
        prefix = f"{directory}/" if directory else ""
        others = {f"{prefix}{path}": data for path, data in (extra or {}).items()}
        repeat: int | None = None
        try:
            for path in others:
                check_relative_path(path)
            with no_collection():
                source = self._source(state, prefix, others)
            repeat = self._saver.reserve(step)
            facts = {**(metadata or {}), **DCP_FORMAT}
            return self._saver.save_source(step, source, repeat=repeat, name=name, metadata=facts)
        except BaseException:
            if self._joined:
                # The other ranks may have saved: this attempt counts, so that a later one of the
                # same step is not taken for its missing part.
                self._saver.abandon(step, self._saver.reserve(step) if repeat is None else repeat)
            raise

    def _source(
        self, state: Mapping[str, Any], prefix: str, others: dict[str, bytes]
    ) -> DistcpFiles:
        rank = self._exchange.rank
        flat = FlatState.of(state, is_coordinator=rank == 0)
        planned = self._planned
        if planned is None or planned.signature != flat.signature:
            planned = self._plan(flat)
        objects = planned.share.pickles(flat.values)
        tensors = planned.share.memory(flat.values)
        if not planned.layout.holds(objects, tensors):
            if rank:  # rank 0 knows where everything is: it has to be told
                planned = self._plan(flat)
            else:
                planned.layout = DistcpLayout(objects, tensors)
                planned.metadata_file = None
        if rank == 0:
            others = {**others, f"{prefix}{METADATA_FILE}": self._metadata_file(planned, objects)}
        path = f"{prefix}{data_file(rank)}"
        return DistcpFiles(path, planned.layout, objects, tensors, others)

    def _metadata_file(self, planned: _Planned, objects: list[Walk]) -> bytes:
        if planned.metadata_file is None:
            assert planned.metadata is not None
            there = planned.layout.places(objects)
            index = planned.others | _index(0, planned.share.items, there)
            run = str(self._saver.config.url)
            planned.metadata_file = fill_metadata(planned.metadata, index, run)
        return planned.metadata_file

    # --- planning ----------------------------------------------------------------------------

    def _plan(self, flat: FlatState) -> _Planned:
        """Plan a layout with all ranks. Blocks until they came, with a bound.

        Raises:
            WaitTimeoutError: Some did not.
            CkptTieringError: Planning failed on some rank; raised on all.
        """
        leader = _Leader(self, flat)
        meeting = self._exchange.meet()
        local: list[SavePlan] = []

        def propose() -> tuple[RankFacts, SavePlan]:
            local.append(flat.planner.create_local_plan())
            return RankFacts.of(self._saver, world_size=self._exchange.size), local[0]

        place, chosen = meeting.agree(propose, leader.decide)
        parts: list[_Planned] = []

        def lay_out() -> list[tuple[int, int]]:
            items = [local[0].items[n] for n in chosen]
            share = Share.of(items, flat.values)
            objects, tensors = share.pickles(flat.values), share.memory(flat.values)
            layout = DistcpLayout(objects, tensors)
            parts.append(_Planned(signature=flat.signature, share=share, layout=layout))
            there = layout.places(objects)
            order = {item.index: at for item, at in zip(share.items, there, strict=True)}
            return [order[item.index] for item in items]

        # From here on some ranks may hold the new plan and some not: better none than the old one.
        self._planned = None
        meeting.agree(lay_out, leader.collect)
        if self._exchange.size > 1:
            place.apply(self._saver)
        self._joined = True
        planned = parts[0]
        planned.metadata, planned.others = leader.metadata, leader.index
        self._planned = planned
        return planned

    def incarnation(self) -> str:
        """Return the token of this start of the job; called on rank 0, which makes it."""
        if self._incarnation is None:
            self._incarnation = new_incarnation(self._exchange.clock.now())
        return self._incarnation


class _Leader:
    """What rank 0 does for all of them while a layout is planned."""

    def __init__(self, saver: ShardedSaver, flat: FlatState) -> None:
        self._saver = saver
        self._planner = flat.planner
        self._chosen: list[list[WriteItem]] = []
        self.metadata: Metadata | None = None
        self.index: dict[MetadataIndex, tuple[str, int, int]] = {}

    def decide(self, proposed: list[tuple[RankFacts, SavePlan]]) -> list[tuple[Place, list[int]]]:
        """Make one plan of all ranks' plans; return each rank's place, and which items it saves."""
        facts = {rank: fact for rank, (fact, _) in enumerate(proposed)}
        there = places(facts, self._saver.incarnation())
        local = [plan for _, plan in proposed]
        final, self.metadata = self._planner.create_global_plan(local)
        answers = []
        for place, plan, whole in zip(there, local, final, strict=True):
            numbers = kept(plan, whole.items)
            self._chosen.append([plan.items[n] for n in numbers])
            answers.append((place, numbers))
        return answers

    def collect(self, laid_out: list[list[tuple[int, int]]]) -> list[None]:
        """Note where the other ranks' items are."""
        for rank, (items, there) in enumerate(zip(self._chosen, laid_out, strict=True)):
            if rank:
                self.index |= _index(rank, items, there)
        return [None] * len(laid_out)


def _index(
    rank: int, items: list[WriteItem] | tuple[WriteItem, ...], there: list[tuple[int, int]]
) -> dict[MetadataIndex, tuple[str, int, int]]:
    file = data_file(rank)
    return {item.index: (file, *at) for item, at in zip(items, there, strict=True)}
