"""Which ranks share a node's agent, and whether all of them were told the same."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from ckpt_tiering.errors import ConfigError
from ckpt_tiering.fsio import boot_id, make_private

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckpt_tiering.agent.saver import Saver

__all__ = ["Place", "RankFacts", "places"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFacts:
    """What a rank says of itself; all but the node must be equal on all ranks.

    Attributes:
        node: Identity of its staging directory: ranks of the same one share an agent.
        run: URL of the run's root.
        world_size: Number of ranks that it saves with, where it is known.
        part_bytes: As of `TieringConfig`.
        staging_mode: Likewise.
        step: Training step of the save, where it is known.
        attempt: How often this step was saved before, likewise.
    """

    node: str
    run: str
    world_size: int | None
    part_bytes: int
    staging_mode: str
    step: int | None = None
    attempt: int | None = None

    @classmethod
    def of(
        cls,
        saver: Saver,
        *,
        world_size: int | None = None,
        step: int | None = None,
        attempt: int | None = None,
    ) -> RankFacts:
        """Collect the facts of this process; makes the staging directory."""
        config = saver.config
        make_private(config.staging)
        there = config.staging.stat()
        return cls(
            # Two containers of one host may call different directories the same, or the reverse.
            node=f"{boot_id()}/{there.st_dev}/{there.st_ino}",
            run=str(config.url),
            world_size=world_size,
            part_bytes=config.part_bytes,
            staging_mode=config.staging_mode,
            step=step,
            attempt=attempt,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a rank stands among those that save together; arguments of `Saver.join`.

    Attributes:
        rank: Its rank.
        ranks_on_node: Number of ranks that share its agent.
        node_rank: Rank of its node: nodes are counted by their lowest ranks.
        num_nodes: Number of nodes.
        incarnation: Token of this start of the job.
    """

    rank: int
    ranks_on_node: int
    node_rank: int
    num_nodes: int
    incarnation: str

    def apply(self, saver: Saver) -> None:
        """Have a saver take this place."""
        saver.join(
            rank=self.rank,
            ranks_on_node=self.ranks_on_node,
            node_rank=self.node_rank,
            num_nodes=self.num_nodes,
            incarnation=self.incarnation,
        )


def places(facts: Mapping[int, RankFacts], incarnation: str) -> list[Place]:
    """Return the place of each rank.

    Raises:
        ConfigError: The ranks were told different things; names a rank and both values.
    """
    ordered = [facts[rank] for rank in range(len(facts))]
    _check(ordered)
    ranks_on = Counter(fact.node for fact in ordered)
    node_ranks = {node: index for index, node in enumerate(ranks_on)}  # by first, lowest ranks
    return [
        Place(
            rank=rank,
            ranks_on_node=ranks_on[fact.node],
            node_rank=node_ranks[fact.node],
            num_nodes=len(ranks_on),
            incarnation=incarnation,
        )
        for rank, fact in enumerate(ordered)
    ]


def _check(facts: Sequence[RankFacts]) -> None:
    first = facts[0]
    for field in fields(RankFacts):
        for rank, fact in enumerate(facts):
            ours, theirs = getattr(first, field.name), getattr(fact, field.name)
            if field.name != "node" and ours != theirs:
                raise ConfigError(
                    f"rank {rank} has {field.name}={theirs!r} where rank 0 has {ours!r}",
                    hint="give all ranks the same configuration and call",
                )
    if first.world_size not in {None, len(facts)}:
        raise ConfigError(f"{first.world_size} ranks save, and {len(facts)} of them came")
