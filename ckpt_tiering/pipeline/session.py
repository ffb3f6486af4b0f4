"""What a stage needs to talk to a store: the store, what it can do, retries, and parallelism."""

from __future__ import annotations

from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from ckpt_tiering.stores.hot import HotFiles

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ckpt_tiering.flow.meter import Meter
    from ckpt_tiering.flow.retry import Retrier
    from ckpt_tiering.stores.base import Capabilities, ObjectStore

__all__ = ["Session"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """One run's store, as the stages of an agent or a restore use it.

    Attributes:
        store: The store, opened at the root of the run.
        capabilities: What it was seen to do.
        retrier: The one retry policy; every request goes through `call`.
        pool: Threads for requests.
        concurrency: Number of requests to keep in flight.
        meter: Counts what is moved.
        hot: Staged files that are still in memory.
        on_send: Called with the number of bytes about to leave; throttles.
    """

    store: ObjectStore
    capabilities: Capabilities
    retrier: Retrier
    pool: ThreadPoolExecutor
    concurrency: int
    meter: Meter
    hot: HotFiles = field(default_factory=HotFiles)
    on_send: Callable[[int], None] | None = None

    def call(self, request: Callable[[], T]) -> T:
        """Send a request, again after transient errors."""
        return self.retrier.call(request)

    def run_all(self, tasks: Iterable[Callable[[], Any]]) -> None:
        """Run tasks in parallel, starting each only when there is room.

        Raises:
            CkptTieringError: The first error, after the tasks in flight have ended; no further
                task is started after it.
        """
        flying: set[Future[Any]] = set()
        try:
            for task in tasks:
                flying.add(self.pool.submit(task))
                if len(flying) >= self.concurrency:
                    done, flying = wait(flying, return_when=FIRST_COMPLETED)
                    for future in done:
                        future.result()
        finally:
            wait(flying)
        for future in flying:
            future.result()
