"""From the URL of a root to the store that holds it."""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING

from ckpt_tiering.errors import ConfigError
from ckpt_tiering.stores.memory import MemoryBucket, MemoryStore

if TYPE_CHECKING:
    from ckpt_tiering.config import StoreOptions
    from ckpt_tiering.model.layout import StoreUrl
    from ckpt_tiering.stores.base import Capabilities, ObjectStore

__all__ = ["open_store"]

# A `memory://` bucket lives as long as the process, as a real one outlives the store objects.
_buckets: dict[str, MemoryBucket] = {}
_buckets_lock = threading.Lock()


def open_store(
    url: StoreUrl,
    options: StoreOptions,
    *,
    concurrency: int = 4,
    capabilities: Capabilities | None = None,
) -> ObjectStore:
    """Open the store of a root. Makes no request; imports boto3 only for ``s3://``.

    Args:
        url: Root of the run. All ``memory://`` roots of a process with the same bucket name are
            one bucket.
        options: How to reach the store.
        concurrency: Number of threads that will use the store at once.
        capabilities: What a probe found the store to do; None assumes everything.

    Raises:
        ConfigError: The scheme is not supported.
    """
    if url.scheme == "memory":
        with _buckets_lock:
            bucket = _buckets.setdefault(url.bucket, MemoryBucket())
        return MemoryStore(url, bucket=bucket)
    if url.scheme == "s3":
        from ckpt_tiering.stores import s3, s3_client  # boto3 takes 0.2 s to import

        return s3.S3Store(
            url, partial(s3_client.connect, options, concurrency), capabilities=capabilities
        )
    raise ConfigError(f"no store speaks {url.scheme}://", hint="write s3://bucket/path")
