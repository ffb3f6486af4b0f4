"""Durable lag and durable checkpoints in the trainer's loggers. A guest there (P10)."""

from __future__ import annotations

import functools
import logging
from collections import deque
from typing import TYPE_CHECKING, Any

from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from lightning.pytorch import Trainer
    from lightning.pytorch.loggers import Logger

    from ckpt_tiering.api import DurableSave, TieredCheckpointer

__all__ = ["Telemetry"]

_PREFIX = "ckpt/durable/"
_AXIS = _PREFIX + "step"
log = logging.getLogger(__name__)


class Telemetry:
    """Hands metrics to loggers. What goes wrong is reported once per place, and never raised."""

    def __init__(self) -> None:
        self._reported: set[str] = set()
        self._rows: dict[int, _WandbRows] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {}  # runs of trackers belong to their process

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]

    def report(self, trainer: Trainer, checkpointer: TieredCheckpointer) -> None:
        """Log the metrics as of now, and every save that became durable since the last call.

        Reads a small local file; waits for no store.
        """
        metrics: dict[str, float] = {}
        saves: list[DurableSave] = []
        step = trainer.global_step

        def read() -> None:
            metrics.update(checkpointer.metrics(step))
            saves.extend(checkpointer.new_durable())

        self._guard("the state of the agent", read)
        for logger in trainer.loggers:
            log_them = functools.partial(self._log, logger, metrics, saves, step)
            self._guard(type(logger).__name__, log_them)

    def finish(self, loggers: Sequence[Logger]) -> None:
        """Log what was held back until now."""
        for logger in loggers:
            rows = self._rows.get(id(logger))
            if rows is not None:
                self._guard(type(logger).__name__, rows.finish)

    def _guard(self, place: str, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception:
            # Whatever a tracker or its plugins can raise: training is worth more than a point.
            if place not in self._reported:
                self._reported.add(place)
                log.exception("checkpoint metrics are missing from %s; training goes on", place)

    def _log(
        self, logger: Logger, metrics: Mapping[str, float], saves: Sequence[DurableSave], step: int
    ) -> None:
        if isinstance(logger, WandbLogger):
            rows = self._rows.setdefault(id(logger), _WandbRows(logger))
            rows.log(metrics, saves, step)
            return
        if metrics:
            logger.log_metrics(dict(metrics), step=step)
        for save in saves:
            if isinstance(logger, TensorBoardLogger):
                for name, value in _point(save).items():
                    logger.experiment.add_scalar(
                        name, value, global_step=save.step, walltime=save.durable_at
                    )
            else:
                # Rows of most trackers are in the order of training; the step that the point is
                # about is a column of its own.
                logger.log_metrics(_point(save), step=step)


def _point(save: DurableSave) -> dict[str, float]:
    return {
        _AXIS: float(save.step),
        _PREFIX + "wall_time": save.durable_at,
        _PREFIX + "lag_seconds": save.durable_at - save.snapshot_at,
        _PREFIX + "upload_seconds": save.upload_seconds,
        _PREFIX + "bytes": float(save.total_bytes),
    }


class _WandbRows:
    """Adds our values to the row that a W&B run is about to write, and never ends that row.

    A run has one step counter. A call to `log` without ``step`` ends the row and moves the counter
    on, and then a user's ``run.log(..., step=trainer.global_step)`` can find itself in the past and
    be dropped. So ours go into the open row with ``commit=False``: into the very row that
    Lightning or the user writes next. One durable save fits into a row; further ones wait for the
    next.
    """

    def __init__(self, logger: WandbLogger) -> None:
        self._run: Any = logger.experiment
        self._waiting: deque[DurableSave] = deque()
        self._used: object = self  # counter of the row that holds a durable save; none yet
        self._run.define_metric(_AXIS)
        for name in ("wall_time", "lag_seconds", "upload_seconds", "bytes"):
            self._run.define_metric(_PREFIX + name, step_metric=_AXIS)

    def log(self, metrics: Mapping[str, float], saves: Sequence[DurableSave], step: int) -> None:
        """Log metrics as of ``step``, and the oldest durable save that was not logged yet."""
        self._waiting.extend(saves)
        values: dict[str, float] = dict(metrics)
        if values:
            values["trainer/global_step"] = step  # the axis that WandbLogger gives everything
        if self._waiting and self._row() != self._used:
            values |= _point(self._waiting.popleft())
            self._used = self._row()
        if values:
            self._run.log(values, commit=False)

    def finish(self) -> None:
        """Log the durable saves that still wait. Rows are ended here, but for the last."""
        while self._waiting:
            if self._row() == self._used:
                self._run.log({}, commit=True)
            self._run.log(_point(self._waiting.popleft()), commit=False)
            self._used = self._row()

    def _row(self) -> object:
        # The run's own copy of the counter: the public property asks another process. Where there
        # is none, each row is taken for a new one.
        return getattr(self._run, "_local_step", object())
