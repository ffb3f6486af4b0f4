"""Ranks come to an agreement through the job's key-value store: no collective, no process group.

The store is the one that ``torch.distributed`` was initialised with. Unlike a collective, waiting
in it disturbs no other communication, has a bound, and can say who did not come. Used when a layout
is planned and when a restore begins; never while training goes on as before.
"""

from __future__ import annotations

import pickle
import secrets
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist
from torch.distributed import distributed_c10d

from ckpt_tiering.clock import Clock, SystemClock
from ckpt_tiering.errors import CkptTieringError, SaveFailedError, WaitTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["TIMEOUT_S", "Exchange", "Meeting"]

T = TypeVar("T")
R = TypeVar("R")

TIMEOUT_S = 60.0
CHUNK_BYTES = 4 << 20  # TCPStore takes no values above 8 MiB
FIRST_POLL_S = 0.0005
LAST_POLL_S = 0.02

_made: dict[tuple[int, ...], int] = {}  # how many exchanges these ranks have had


class Exchange:
    """What the ranks of a group use to agree; without ``torch.distributed`` there is one rank.

    All ranks make theirs in the same order.

    Args:
        process_group: Whose ranks they are; all ranks' of the job by default. Not communicated on.
        timeout_s: Bound in seconds of each wait for other ranks.

    Attributes:
        rank: Of this process in the group.
        size: Number of ranks.
        ranks: The same ranks as the job counts them.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        timeout_s: float = TIMEOUT_S,
        clock: Clock | None = None,
    ) -> None:
        self.rank, self.size, self.ranks = 0, 1, [0]
        self.timeout_s = timeout_s
        self.clock = clock or SystemClock()
        self.store: Any = None
        if not (dist.is_available() and dist.is_initialized()):
            return
        self.rank = dist.get_rank(process_group)
        self.size = dist.get_world_size(process_group)
        if self.size > 1:
            self.ranks = dist.get_process_group_ranks(process_group)
            ranks = tuple(self.ranks)
            ordinal = _made[ranks] = _made.get(ranks, 0) + 1
            name = f"ckpt_tiering/{'-'.join(map(str, ranks))}/{ordinal}"
            store = distributed_c10d._get_default_store()  # noqa: SLF001  there is no other way
            self.store = distributed_c10d.PrefixStore(name, store)

    def meet(self) -> Meeting:
        """Begin an agreement; every rank does."""
        return Meeting(self)

    def agree(self, produce: Callable[[], T], decide: Callable[[list[T]], Sequence[R]]) -> R:
        """Come to one agreement; see `Meeting.agree`."""
        return self.meet().agree(produce, decide)


class _Failure:
    """An exception on its way to other ranks."""

    def __init__(self, rank: int, error: Exception) -> None:
        if not isinstance(error, CkptTieringError):
            error = SaveFailedError(f"{type(error).__name__}: {error}")
        self.rank = rank
        self.error = error

    def as_error(self, size: int) -> CkptTieringError:
        kind, message, code, hint, context = self.error.__reduce__()[1]
        if size > 1:
            message = f"rank {self.rank}: {message}"
        made: CkptTieringError = kind(message, kind=code, hint=hint, **context)
        return made


def _attempt(rank: int, call: Callable[[], T]) -> T | _Failure:
    try:
        return call()
    except Exception as error:  # noqa: BLE001  it is raised on all ranks
        return _Failure(rank, error)


class Meeting:
    """One or more agreements in a row, of all ranks or of none."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._store = exchange.store
        self._rank = exchange.rank
        self._stage = 0
        # Answers of an earlier meeting that was given up can't be taken for this one's.
        self._tokens = {exchange.rank: secrets.token_hex(8)}

    def agree(self, produce: Callable[[], T], decide: Callable[[list[T]], Sequence[R]]) -> R:
        """Collect a value of each rank on rank 0, and give each rank what was made of them.

        Args:
            produce: Makes this rank's value.
            decide: Makes each rank's result of all ranks' values; runs on rank 0.

        Raises:
            WaitTimeoutError: Some ranks did not come within the bound; says which.
            CkptTieringError: ``produce`` failed on some rank, or ``decide`` did; on all ranks.
        """
        stage, self._stage = self._stage, self._stage + 1
        mine = _attempt(self._rank, produce)
        if self._rank:
            result: Any = self._follow(stage, mine)
        else:
            results = self._lead(stage, mine, decide)
            for rank in range(1, self._exchange.size):
                if rank in self._tokens:
                    self._put(f"{self._tokens[rank]}/{stage}/answer", results[rank])
            result = results[0]
        if isinstance(result, _Failure):
            raise result.as_error(self._exchange.size)
        return result  # type: ignore[no-any-return]  # of `decide`

    def _lead(self, stage: int, mine: Any, decide: Callable[[list[Any]], Sequence[Any]]) -> Any:
        values: list[Any] = [mine]
        size = self._exchange.size
        missing: list[int] = []
        if size > 1:
            missing = self._collect(stage, values)
        if missing:
            late = WaitTimeoutError(self._did_not_come(missing), hint=_HINT)
            return [_Failure(0, late)] * size
        results: Any = next((value for value in values if isinstance(value, _Failure)), None)
        if results is None:
            results = _attempt(0, lambda: decide(values))
        return [results] * size if isinstance(results, _Failure) else results

    def _collect(self, stage: int, values: list[Any]) -> list[int]:
        """Append the other ranks' values; return the ranks that did not come in time."""
        if not stage:
            self._store.set("here/0", "")
        deadline = self._exchange.clock.monotonic() + self._exchange.timeout_s
        missing = []
        for rank in range(1, self._exchange.size):
            here = f"here/{rank}"
            if not stage:
                if not self._wait(here, deadline):
                    missing.append(rank)
                    continue
                self._tokens[rank] = self._store.get(here).decode()
                self._store.delete_key(here)
            key = f"{self._tokens[rank]}/{stage}"
            if self._wait(key, deadline):
                values.append(self._take(key))
            else:
                missing.append(rank)
        if not stage:
            self._store.delete_key("here/0")
        return missing

    def _follow(self, stage: int, mine: Any) -> Any:
        token = self._tokens[self._rank]
        self._put(f"{token}/{stage}", mine)
        here = f"here/{self._rank}"
        if not stage:
            self._store.set(here, token)
        answer = f"{token}/{stage}/answer"
        bound = self._exchange.timeout_s
        now = self._exchange.clock.monotonic
        if not self._wait(answer, now() + bound):
            # Rank 0 may have come later than this one, and waits for others: it knows for whom.
            waiting = stage or self._store.check(["here/0"]) or not self._store.check([here])
            if not (waiting and self._wait(answer, now() + bound)):
                ranks = range(self._exchange.size) if not stage else [0]
                missing = [rank for rank in ranks if not self._store.check([f"here/{rank}"])]
                self._store.delete_key(here)
                raise WaitTimeoutError(self._did_not_come(missing or [0]), hint=_HINT)
        return self._take(answer)

    def _did_not_come(self, ranks: list[int]) -> str:
        names = ", ".join(map(str, ranks[:20])) + (", ..." if len(ranks) > 20 else "")  # noqa: PLR2004
        return (
            f"rank {names} did not come to plan the layout of a save within "
            f"{self._exchange.timeout_s:g} s, as rank {self._rank} did"
        )

    # --- the store ---------------------------------------------------------------------------

    def _wait(self, key: str, deadline: float) -> bool:
        # Not the store's own wait: it would block this process's other users of the store.
        pause = FIRST_POLL_S
        clock = self._exchange.clock
        while not self._store.check([key]):
            if clock.monotonic() >= deadline:
                return False
            clock.sleep(pause)
            pause = min(LAST_POLL_S, 1.5 * pause)
        return True

    def _put(self, key: str, value: Any) -> None:
        data = pickle.dumps(value)
        starts = range(0, len(data), CHUNK_BYTES)
        for index, start in enumerate(starts):
            self._store.set(f"{key}/{index}", data[start : start + CHUNK_BYTES])
        self._store.set(key, str(len(starts)))

    def _take(self, key: str) -> Any:
        parts = [f"{key}/{index}" for index in range(int(self._store.get(key)))]
        data = b"".join(self._store.get(part) for part in parts)
        for part in (*parts, key):
            self._store.delete_key(part)
        return pickle.loads(data)  # noqa: S301, TID251  from ranks of this very job


_HINT = (
    "the layout of the state (keys, shapes, dtypes, placements) must change on all ranks at the "
    "same save, and every rank must save"
)
