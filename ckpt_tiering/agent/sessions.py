"""One open store a run, opened when first needed and probed once."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict
from typing import TYPE_CHECKING

from ckpt_tiering.agent.protocol import AgentSettings
from ckpt_tiering.config import StoreOptions
from ckpt_tiering.errors import ThrottledError, TransientError
from ckpt_tiering.flow.bucket import TokenBucket
from ckpt_tiering.flow.retry import Retrier
from ckpt_tiering.model.ids import new_incarnation
from ckpt_tiering.model.layout import StoreUrl
from ckpt_tiering.pipeline.session import Session
from ckpt_tiering.stores.base import Capabilities, ObjectStore
from ckpt_tiering.stores.hot import HotFiles
from ckpt_tiering.stores.opening import open_store
from ckpt_tiering.stores.probe import probe

if TYPE_CHECKING:
    import threading

    from ckpt_tiering.clock import Clock
    from ckpt_tiering.flow.meter import Meter
    from ckpt_tiering.journal.journal import Journal

__all__ = ["Sessions", "StoreOpener"]

MAX_WAIT_S = 20.0
GIVE_UP_AFTER_S = 60.0  # then the save is put back, and another one gets its turn

StoreOpener = Callable[..., ObjectStore]


class Sessions:
    """The agent's sessions, by run. Used by the agent's one worker thread.

    Args:
        journal: Keeps what stores were seen to do.
        clock: For retries and bandwidth.
        stop: Ends all waiting.
        meter: Counts what is moved.
        hot: Staged files that are still in memory.
        opener: `open_store`, or what tests put in front of it.
    """

    def __init__(
        self,
        journal: Journal,
        clock: Clock,
        stop: threading.Event,
        meter: Meter,
        *,
        hot: HotFiles | None = None,
        opener: StoreOpener = open_store,
    ) -> None:
        self._journal = journal
        self._clock = clock
        self._meter = meter
        self._hot = hot or HotFiles()
        self._opener = opener
        self._stop = stop
        self._settings = AgentSettings()
        self._sessions: dict[str, Session] = {}
        self._pool: ThreadPoolExecutor | None = None
        self._bucket = TokenBucket(None, clock)
        self._retrier = Retrier(
            clock,
            stop,
            max_wait_s=MAX_WAIT_S,
            give_up_after_s=GIVE_UP_AFTER_S,
            on_retry=self._on_retry,
        )

    def configure(self, settings: AgentSettings) -> None:
        """Take over new settings; sessions are opened anew if they need it."""
        if settings.concurrency != self._settings.concurrency:
            self.close()
        self._settings = settings
        self.limit(settings.max_bandwidth)

    def limit(self, max_bandwidth: int | None) -> None:
        """Set the bandwidth in bytes per second; holds at once, also for parts on their way."""
        self._bucket.set_rate(max_bandwidth)

    def close(self) -> None:
        """Forget all sessions, so that the next use reads credentials and settings anew."""
        for session in self._sessions.values():
            session.store.close()
        self._sessions.clear()
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def get(self, run: str, store_options: str) -> Session:
        """Return the session of a run. Probes the store if that was never done from here.

        Raises:
            CkptTieringError: As of `ObjectStore`; the store can't be reached or used.
        """
        if run in self._sessions:
            return self._sessions[run]
        url, options = StoreUrl.parse(run), StoreOptions.model_validate_json(store_options)
        known = self._journal.capabilities(run)
        if known is None:
            capabilities = self._probe(url, options)
            self._journal.set_capabilities(run, json.dumps(asdict(capabilities)))
        else:
            capabilities = Capabilities(**json.loads(known))
        concurrency = self._settings.concurrency
        if self._pool is None:
            self._pool = ThreadPoolExecutor(concurrency, thread_name_prefix="request")
        session = Session(
            store=self._opener(url, options, concurrency=concurrency, capabilities=capabilities),
            capabilities=capabilities,
            retrier=self._retrier,
            pool=self._pool,
            concurrency=concurrency,
            meter=self._meter,
            hot=self._hot,
            on_send=self._throttle,
        )
        self._sessions[run] = session
        return session

    def _probe(self, url: StoreUrl, options: StoreOptions) -> Capabilities:
        with closing(open_store(url, options)) as store:
            return probe(store, new_incarnation(self._clock.now())).capabilities

    def _throttle(self, num_bytes: int) -> None:
        if self._stop.is_set():
            raise TransientError("the agent is stopping; the part is sent again by the next one")
        if self._bucket.rate_bytes_per_s is None:
            return
        start = self._clock.monotonic()
        self._bucket.take(num_bytes)
        self._meter.throttled(self._clock.monotonic() - start)

    def _on_retry(self, error: TransientError, _attempts: int, wait_s: float) -> None:
        self._meter.retried()
        if isinstance(error, ThrottledError):
            self._meter.throttled(wait_s)
