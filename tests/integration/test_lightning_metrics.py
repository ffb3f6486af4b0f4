"""P10: the durable lag in the user's tracker, which stays the user's."""

from __future__ import annotations

import csv
import json
import logging
import struct
import threading
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import pytest
import wandb
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger, WandbLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto import wandb_internal_pb2

from ckpt_tiering.model.events import METRICS
from tests.integration.lightning_job import Node, TinyModel, every, tiered, trainer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:lightning"),
    pytest.mark.filterwarnings("ignore::FutureWarning:lightning"),
]

STEPS = 20
SAVED = [5.0, 10.0, 15.0, 20.0]
# What has a value in every run; the others come with the first durable save or the first retry.
ALWAYS = {
    "ckpt/durable_lag_steps",
    "ckpt/durable_lag_seconds",
    "ckpt/backlog_bytes",
    "ckpt/staged",
    "ckpt/retries",
    "ckpt/throttled_seconds",
    "ckpt/agent_heartbeat_age",
}
POINT = {f"ckpt/durable/{n}" for n in ("wall_time", "lag_seconds", "upload_seconds", "bytes")}


@pytest.fixture
def node(tmp_path: Path) -> Node:
    (tmp_path / "node").mkdir()
    return Node(tmp_path / "node")


def fit(
    store: str | None, node: Node, loggers: Any, model: TinyModel | None = None, interval: int = 2
) -> None:
    by = trainer(
        node,
        tiered(store, node) if store else None,
        max_steps=STEPS,
        callbacks=[every(5)],
        logger=loggers,
        log_every_n_steps=interval,
    )
    by.fit(model or TinyModel())


# --- CSV ----------------------------------------------------------------------------------------


def test_csv(bucket_url: str, node: Node, tmp_path: Path) -> None:
    def rows(store: str | None, directory: Path) -> list[dict[str, str]]:
        fit(store, node, CSVLogger(directory))
        with (directory / "lightning_logs" / "version_0" / "metrics.csv").open() as file:
            return list(csv.DictReader(file))

    theirs, all_rows = rows(None, tmp_path / "plain"), rows(bucket_url, tmp_path / "tiered")
    lag = [row for row in all_rows if row["ckpt/durable_lag_steps"]]
    assert [int(row["step"]) for row in lag[:10]] == list(range(2, STEPS + 1, 2))
    assert {name for name, value in lag[-1].items() if value and "ckpt/" in name} <= set(METRICS)
    assert {name for name, value in lag[-1].items() if value} >= ALWAYS
    assert float(lag[-1]["ckpt/durable_lag_steps"]) == 0
    points = [row for row in all_rows if row["ckpt/durable/step"]]
    assert [float(row["ckpt/durable/step"]) for row in points] == SAVED
    assert all(row[name] for row in points for name in POINT)
    steps = [int(row["step"]) for row in all_rows]
    assert steps[-1] == max(steps)
    # The user's own rows are all there, as they were.
    user = [{n: row[n] for n in theirs[0]} for row in all_rows if row["train/loss"]]
    assert user == theirs


# --- TensorBoard --------------------------------------------------------------------------------


def test_tensorboard(bucket_url: str, node: Node, tmp_path: Path) -> None:
    fit(bucket_url, node, TensorBoardLogger(tmp_path, name="tb", version=0))
    events = EventAccumulator(str(tmp_path / "tb" / "version_0"))
    events.Reload()
    assert [e.step for e in events.Scalars("train/loss")] == list(range(1, STEPS, 2))
    assert [e.step for e in events.Scalars("ckpt/durable_lag_steps")][:10] == list(
        range(2, STEPS + 1, 2)
    )
    assert set(events.Tags()["scalars"]) >= ALWAYS | POINT
    for tag in POINT:  # at the step and the time that the point is about
        points = events.Scalars(tag)
        assert [e.step for e in points] == SAVED
        times = [e.value for e in events.Scalars("ckpt/durable/wall_time")]
        assert [e.wall_time for e in points] == pytest.approx(times, abs=300)  # float32 of 1.7e9


# --- Weights & Biases ---------------------------------------------------------------------------


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_MODE", "offline")
    yield tmp_path / "wandb"
    wandb.finish()


def records(directory: Path) -> Iterator[Any]:
    """Read the file of an offline run: LevelDB's log format, behind a header of 7 bytes."""
    (file,) = directory.glob("offline-run-*/*.wandb")
    data, at, whole = file.read_bytes(), 7, b""
    block, full, last = 32768, 1, 4
    while at + 7 <= len(data):
        if block - at % block < 7:
            at += block - at % block
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (full, last):
            record = wandb_internal_pb2.Record()  # type: ignore[attr-defined]
            record.ParseFromString(whole)
            whole = b""
            yield record


def history(directory: Path) -> list[dict[str, Any]]:
    """End the run and return the rows of its history."""
    wandb.finish()
    deadline = time.monotonic() + 30
    while not any(record.HasField("exit") for record in records(directory)):
        assert time.monotonic() < deadline, "the run's file is not complete"
        threading.Event().wait(0.05)  # W&B's own process writes the file, after `finish`
    return [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in row}
        for row in (r.history.item for r in records(directory) if r.HasField("history"))
    ]


class LogsByItself(TinyModel):
    """Does what W&B advises against and users do: gives ``step=`` to ``run.log``."""

    def on_train_batch_end(self, *_: object) -> None:
        assert isinstance(self.logger, WandbLogger)
        self.logger.experiment.log({"mine": self.global_step}, step=self.global_step)


def test_wandb(bucket_url: str, node: Node, offline: Path) -> None:
    fit(bucket_url, node, WandbLogger(save_dir=offline.parent, offline=True))
    rows = history(offline)
    assert [row["trainer/global_step"] for row in rows if "train/loss" in row] == list(
        range(1, STEPS, 2)
    )
    lag = [row for row in rows if "ckpt/durable_lag_steps" in row]
    assert len(lag) >= STEPS // 2
    assert all(row.keys() >= ALWAYS for row in lag)
    points = [row for row in rows if "ckpt/durable/step" in row]
    assert [row["ckpt/durable/step"] for row in points] == SAVED
    assert all(row.keys() >= POINT for row in points)
    axes: dict[str, str] = defaultdict(str)
    for record in records(offline):
        if record.HasField("metric") and record.metric.name:
            axes[record.metric.name] = record.metric.step_metric
    assert {axes[name] for name in POINT} == {"ckpt/durable/step"}


def test_wandb_loses_none_of_the_users_points(bucket_url: str, node: Node, offline: Path) -> None:
    """A guest that ended a row would move the run's counter past the user's next step."""
    logger = WandbLogger(save_dir=offline.parent, offline=True)
    # Lightning ends a row at each step already: one more, and every second point would be lost.
    fit(bucket_url, node, logger, LogsByItself(), interval=1)
    logger.experiment.log({"mine": "after"}, step=STEPS + 1 + len(SAVED))
    rows = history(offline)
    mine = [row["mine"] for row in rows if "mine" in row]
    assert mine == [*range(1, STEPS + 1), "after"]
    assert [row["ckpt/durable/step"] for row in rows if "ckpt/durable/step" in row] == SAVED


# --- telemetry that fails -----------------------------------------------------------------------


class Refuses(Logger):
    """A tracker that is down."""

    name = "refuses"
    version = 0

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if any(name.startswith("ckpt/") for name in metrics):
            raise ConnectionError("the tracker is down")

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        pass


def test_p10_a_tracker_that_fails_stops_nothing_and_is_reported_once(
    bucket_url: str, node: Node, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = TinyModel()
    fit(bucket_url, node, [Refuses(), CSVLogger(tmp_path)], model)
    assert len(model.losses) == STEPS
    failures = [r for r in caplog.records if r.levelno >= logging.ERROR]
    assert [("Refuses" in r.getMessage(), bool(r.exc_info)) for r in failures] == [(True, True)]
    text = (tmp_path / "lightning_logs" / "version_0" / "metrics.csv").read_text()
    assert "ckpt/durable_lag_steps" in text  # the other logger has everything


def test_p10_the_companion_sleeps_in_trainers_that_are_not_ours(node: Node, tmp_path: Path) -> None:
    fit(None, node, CSVLogger(tmp_path))
    text = (tmp_path / "lightning_logs" / "version_0" / "metrics.csv").read_text()
    assert "ckpt/" not in text
    assert not node.staging.exists()


def test_p10_no_metrics_from_validation(bucket_url: str, node: Node, tmp_path: Path) -> None:
    io = tiered(bucket_url, node)
    by = trainer(node, io, max_steps=1, logger=CSVLogger(tmp_path), limit_val_batches=1)
    by.validate(TinyModel(), verbose=False)
    assert not node.staging.exists()  # and no agent either
    assert isinstance(by, pl.Trainer)
