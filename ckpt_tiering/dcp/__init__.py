"""DCP (``torch.distributed.checkpoint``) by way of memory, NVMe and object storage."""

from __future__ import annotations

from ckpt_tiering.dcp.reader import TieredStorageReader
from ckpt_tiering.dcp.sharded import ShardedSaver
from ckpt_tiering.dcp.writer import TieredStorageWriter

__all__ = ["ShardedSaver", "TieredStorageReader", "TieredStorageWriter"]
