"""The seal: what a rank writes last, to say that its shard of a save is staged and whole.

It is the only thing that passes from a trainer to the agent. A message over the socket merely says
that there is one; an agent that was not running finds it by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ckpt_tiering.errors import ConfigError, FormatError
from ckpt_tiering.model.ids import SaveId
from ckpt_tiering.model.manifest import FileEntry, Metadata

if TYPE_CHECKING:
    from ckpt_tiering.model.layout import StoreUrl

__all__ = ["Seal", "ShardHeader", "decode_seal"]


class Seal(BaseModel):
    """One rank's staged shard.

    Attributes:
        run: URL of the run's root.
        store_options: How to reach the store (no secrets), as given to the trainer.
        save_id: The save.
        name: The user's name for the save; None if none was given.
        metadata: The user's own facts about the save.
        snapshot_at: When the state was captured, seconds since the epoch.
        staged_at: When the shard was complete on NVMe.
        rank: Global rank.
        ranks_on_node: Number of ranks of this node that seal a shard of this save.
        node_rank: Rank of this node.
        num_nodes: Number of nodes that seal shards of this save.
        part_bytes: Length of the parts of multipart uploads; digests are of pieces that divide it.
        files: Files, links and directories, with digests; objects are assigned later.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    version: Literal[1] = 1
    run: str
    store_options: dict[str, str | None]
    save_id: str
    name: str | None
    metadata: Metadata
    snapshot_at: float
    staged_at: float
    rank: Annotated[int, Field(ge=0)]
    ranks_on_node: Annotated[int, Field(ge=1)]
    node_rank: Annotated[int, Field(ge=0)]
    num_nodes: Annotated[int, Field(ge=1)]
    part_bytes: Annotated[int, Field(ge=1)]
    files: tuple[FileEntry, ...]

    @model_validator(mode="after")
    def _consistent(self) -> Seal:
        SaveId.parse(self.save_id)
        if any(file.rank != self.rank for file in self.files):
            raise ValueError(f"holds files of other ranks than {self.rank}")
        return self

    def agrees_with(self, other: Seal) -> str | None:
        """Return the name of the first field in which shards of one save must agree but don't."""
        shared = ("run", "save_id", "name", "ranks_on_node", "node_rank", "num_nodes", "part_bytes")
        return next((f for f in shared if getattr(self, f) != getattr(other, f)), None)

    def encode(self) -> bytes:
        """Write the seal as JSON."""
        return self.model_dump_json().encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardHeader:
    """What is known of a shard before its first byte; see `Seal` for the fields."""

    url: StoreUrl
    store_options: dict[str, str | None]
    save_id: SaveId
    name: str | None
    metadata: Metadata
    rank: int
    ranks_on_node: int
    node_rank: int
    num_nodes: int
    part_bytes: int

    def seal(self, files: tuple[FileEntry, ...], snapshot_at: float, staged_at: float) -> Seal:
        """Make the seal of the shard.

        Raises:
            ConfigError: The name or the metadata is not what a seal can hold.
        """
        try:
            return Seal(
                run=str(self.url),
                store_options=self.store_options,
                save_id=str(self.save_id),
                name=self.name,
                metadata=self.metadata,
                snapshot_at=snapshot_at,
                staged_at=staged_at,
                rank=self.rank,
                ranks_on_node=self.ranks_on_node,
                node_rank=self.node_rank,
                num_nodes=self.num_nodes,
                part_bytes=self.part_bytes,
                files=files,
            )
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise ConfigError(
                f"save {self.save_id} can't be described: {where}: {first['msg']}",
                hint="names are text; metadata is text, numbers, booleans and None",
            ) from error


def decode_seal(data: bytes, name: str) -> Seal:
    """Read a seal.

    Raises:
        FormatError: The bytes are no seal: torn by a power cut, or of another version.
    """
    try:
        return Seal.model_validate_json(data)
    except ValidationError as error:
        first: Any = error.errors()[0]
        raise FormatError(f"{name} is not a seal: {first['msg']}", key=name) from error
