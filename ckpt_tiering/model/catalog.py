"""What a store has: one value per durable save, and how a reference picks one of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckpt_tiering.model.ids import SaveId
from ckpt_tiering.model.layout import StoreUrl, commit_key

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ckpt_tiering.model.manifest import Manifest, Metadata

__all__ = ["SaveInfo", "newest_named"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveInfo:
    """A durable save.

    Attributes:
        run: URL of the root of its run.
        save_id: Text of its id.
        step: Training step.
        name: The user's name for it; None if none was given.
        metadata: The user's own facts about it.
        snapshot_at: When its state was captured, seconds since the epoch.
        total_bytes: Bytes of all its objects.
        num_files: Number of its files.
        num_nodes: Number of nodes that contributed.
        verified: ``checksum`` or ``read-back``: how the store's copies were verified.
    """

    run: str
    save_id: str
    step: int
    name: str | None
    metadata: Metadata
    snapshot_at: float
    total_bytes: int
    num_files: int
    num_nodes: int
    verified: str

    @property
    def id(self) -> SaveId:
        """The id, parsed."""
        return SaveId.parse(self.save_id)

    @property
    def url(self) -> str:
        """URL of the commit point."""
        return f"{self.run}/{commit_key(self.id)}"

    @classmethod
    def of(cls, url: StoreUrl, manifest: Manifest) -> SaveInfo:
        """Describe a save by its manifest."""
        return cls(
            run=str(url),
            save_id=manifest.save_id,
            step=manifest.step,
            name=manifest.name,
            metadata=manifest.metadata,
            snapshot_at=manifest.snapshot_at,
            total_bytes=manifest.total_bytes,
            num_files=manifest.num_files,
            num_nodes=manifest.num_nodes,
            verified=manifest.verified,
        )


def _common_tail(name: str, wanted: str) -> int:
    """Return how many last components are equal; 0 if that is no more than a file name by chance.

    One component counts only if it is all that one of the two has.
    """
    ours, theirs = name.split("/"), wanted.strip("/").split("/")
    count = 0
    for a, b in zip(reversed(ours), reversed(theirs), strict=False):
        if a != b:
            break
        count += 1
    return count if count > 1 or count == min(len(ours), len(theirs)) else 0


def newest_named(saves: Iterable[SaveInfo], name: str) -> SaveInfo | None:
    """Pick the newest save of a name.

    An exact match wins. Otherwise the longest common tail of path components decides: a name that
    was a path on another node, or in another version folder, is still found.
    """
    candidates: Sequence[SaveInfo] = [s for s in saves if s.name is not None]
    exact = [s for s in candidates if s.name == name]
    if exact:
        return max(exact, key=lambda s: s.id)
    ranked = [(tail, s.id, s) for s in candidates if (tail := _common_tail(s.name or "", name))]
    return max(ranked, key=lambda item: item[:2])[2] if ranked else None
