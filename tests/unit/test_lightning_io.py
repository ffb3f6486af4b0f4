"""What the plugin promises before it has trained anything: no store, no agent, no trace."""

from __future__ import annotations

import pickle
import subprocess
import sys
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector

from ckpt_tiering.errors import ConfigError
from ckpt_tiering_lightning import TieredCheckpointIO, resume
from ckpt_tiering_lightning.companion import TieringCompanion, companion_factory
from ckpt_tiering_lightning.names import Places
from tests.integration.lightning_job import TinyModel

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:lightning"),
    pytest.mark.filterwarnings("ignore::FutureWarning:lightning"),
]

STORE = "s3://no-such-bucket-here/run"


@pytest.fixture
def io(tmp_path: Path) -> TieredCheckpointIO:
    return TieredCheckpointIO(STORE, staging=tmp_path / "nvme")


def quiet_trainer(tmp_path: Path, **options: Any) -> pl.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return pl.Trainer(
        accelerator="cpu", devices=1, default_root_dir=tmp_path / "project", **(quiet | options)
    )


# --- the plugin ---------------------------------------------------------------------------------


def test_making_one_touches_nothing(io: TieredCheckpointIO, tmp_path: Path) -> None:
    assert io.checkpointer.config.store == STORE
    io.teardown()
    assert list(tmp_path.iterdir()) == []


def test_options_are_checked_when_it_is_made(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'concurency'") as unknown:
        TieredCheckpointIO(STORE, staging=tmp_path, concurency=3)
    assert "did you mean 'concurrency'" in str(unknown.value)
    with pytest.raises(ConfigError, match="bucket"):
        TieredCheckpointIO("/local/path", staging=tmp_path)


def test_it_goes_through_pickle(tmp_path: Path) -> None:
    """`ddp_spawn` sends it to its ranks, with the trainer."""
    io = TieredCheckpointIO(STORE, staging=tmp_path / "nvme", concurrency=7)
    io.places = Places(root="/project", dirpaths=("/project/checkpoints",))
    again = pickle.loads(pickle.dumps(io))  # noqa: TID251  our own bytes
    assert again.checkpointer.config == io.checkpointer.config
    assert again.places == io.places
    companion = pickle.loads(pickle.dumps(TieringCompanion()))  # noqa: TID251
    assert isinstance(companion, TieringCompanion)


def test_storage_options_are_refused_as_by_lightnings_own(
    io: TieredCheckpointIO, tmp_path: Path
) -> None:
    with pytest.raises(TypeError, match="storage_options"):
        io.save_checkpoint({}, tmp_path / "a.ckpt", storage_options={})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", [".temp.ckpt", ".lr_find_1.ckpt", ".scale_batch_size_1.ckpt"])
def test_scratch_files_are_ordinary_files(
    io: TieredCheckpointIO, tmp_path: Path, name: str
) -> None:
    path = tmp_path / "project" / name
    io.save_checkpoint({"weight": torch.ones(2)}, path)  # of `ddp_spawn`: no step, no epoch
    assert path.is_file()
    assert not path.is_symlink()
    assert torch.equal(io.load_checkpoint(path)["weight"], torch.ones(2))
    io.remove_checkpoint(path)
    assert not path.exists()
    assert not (tmp_path / "nvme").exists()


def test_a_missing_extra_is_named() -> None:
    script = "import sys; sys.modules['lightning'] = None; import ckpt_tiering_lightning"
    done = subprocess.run([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True)
    assert "ModuleNotFoundError" in done.stderr
    assert "pip install 'ckpt-tiering[lightning]'" in done.stderr


# --- the choice of ckpt_path --------------------------------------------------------------------


def test_lightnings_choice_is_wrapped_once(io: TieredCheckpointIO) -> None:
    once = _CheckpointConnector._parse_ckpt_path
    resume.install(type(io))
    assert _CheckpointConnector._parse_ckpt_path is once


def test_a_lightning_of_another_kind_is_left_alone_and_it_is_said(
    io: TieredCheckpointIO, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def other(self: Any, path: str) -> str:
        return path

    monkeypatch.setattr(_CheckpointConnector, "_parse_ckpt_path", other)
    resume.install(type(io))
    assert vars(_CheckpointConnector)["_parse_ckpt_path"] is other
    assert "tier://latest" in caplog.text


def test_last_means_what_it_meant_in_trainers_without_us(
    io: TieredCheckpointIO, tmp_path: Path
) -> None:
    trainer = quiet_trainer(tmp_path, max_steps=1, limit_val_batches=0)
    with pytest.warns(UserWarning, match="no last checkpoint available"):
        trainer.fit(TinyModel(), ckpt_path="last")


# --- the companion ------------------------------------------------------------------------------


def test_lightning_finds_the_companion_by_itself(tmp_path: Path) -> None:
    (point,) = (
        e for e in entry_points(group="lightning.pytorch.callbacks_factory")
        if e.name == "ckpt_tiering"
    )  # fmt: skip
    assert point.load() is companion_factory
    trainer = quiet_trainer(tmp_path)
    assert [type(c) for c in trainer.callbacks].count(TieringCompanion) == 1  # type: ignore[attr-defined]


def test_the_companion_leaves_other_trainers_as_they_are(tmp_path: Path) -> None:
    seen: list[list[str]] = []

    class Looks(Callback):
        def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            seen.append([type(c).__name__ for c in trainer.callbacks])  # type: ignore[attr-defined]

    trainer = quiet_trainer(
        tmp_path, callbacks=[Looks()], max_steps=1, limit_val_batches=0, enable_checkpointing=False
    )
    names = [type(c).__name__ for c in trainer.callbacks]  # type: ignore[attr-defined]
    trainer.fit(TinyModel())
    assert seen == [names]
    assert TieringCompanion().state_dict() == {}
    assert TieringCompanion().state_key == "TieringCompanion"


def test_an_io_inside_another_is_refused(io: TieredCheckpointIO, tmp_path: Path) -> None:
    trainer = quiet_trainer(tmp_path, max_steps=1, plugins=[AsyncCheckpointIO(io)])
    with pytest.raises(ConfigError, match="AsyncCheckpointIO"):
        trainer.fit(TinyModel())
