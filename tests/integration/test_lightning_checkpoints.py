"""What Lightning's checkpoint callbacks, tuner and Fabric do with files, done through tiering."""

from __future__ import annotations

import os
import socket
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.tuner.tuning import Tuner

from ckpt_tiering.errors import ConfigError, IntegrityError
from ckpt_tiering_lightning.companion import TieringCompanion
from tests.integration.lightning_job import Node, TinyModel, every, resume, tiered, trainer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckpt_tiering_lightning import TieredCheckpointIO

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:lightning"),
    pytest.mark.filterwarnings("ignore::FutureWarning:lightning"),
]


WEIGHT = "net.0.weight"


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path / "node")


@pytest.fixture
def nobody_listens() -> Iterator[str]:
    """An endpoint whose port is taken, and refuses connections."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{unused.getsockname()[1]}"


def fit(io: TieredCheckpointIO, node: Node, *, max_steps: int, **more: Any) -> pl.Trainer:
    """Train with what ``more`` says; return the trainer, drained."""
    by = trainer(node, io, max_steps=max_steps, **more)
    by.fit(TinyModel())
    return by


def durable_files(io: TieredCheckpointIO) -> list[str]:
    """Return the file of every durable save, newest first."""
    return [str(save.metadata["file"]) for save in io.checkpointer.saves()]


def weight(model: torch.nn.Module) -> torch.Tensor:
    return model.get_parameter(WEIGHT).data


def settles(io: TieredCheckpointIO, expected: list[str]) -> bool:
    """Return whether these are the durable files, as soon as the agent has removed the others."""
    deadline = time.monotonic() + 30
    while durable_files(io) != expected and time.monotonic() < deadline:
        threading.Event().wait(0.05)
    return durable_files(io) == expected


# --- links: read what was written ---------------------------------------------------------------


def test_a_saved_path_reads_like_a_file(bucket_url: str, node: Node) -> None:
    by = fit(tiered(bucket_url, node), node, max_steps=4, callbacks=[every(2)])
    path = Path(by.checkpoint_callback.best_model_path)  # type: ignore[union-attr]
    assert path.is_symlink()
    assert path.resolve().is_relative_to(node.staging.resolve())
    assert torch.load(path, weights_only=True)["global_step"] == 4
    assert not list(path.parent.glob(".*"))
    model = TinyModel.load_from_checkpoint(path, seed=9)
    assert torch.equal(weight(model), weight(by.lightning_module))


def test_a_checkpoint_has_the_same_contents_as_without_tiering(
    bucket_url: str, node: Node, tmp_path: Path
) -> None:
    """The companion leaves no trace in it, so it can be loaded where we are not installed."""
    plain = Node(tmp_path / "plain")
    fit(tiered(bucket_url, node), node, max_steps=2, callbacks=[every(2)])
    trainer(plain, None, max_steps=2, callbacks=[every(2)]).fit(TinyModel())
    ours, stock = (
        torch.load(n.root / "checkpoints" / "epoch=0-step=2.ckpt", weights_only=True)
        for n in (node, plain)
    )
    assert ours.keys() == stock.keys()
    assert ours["callbacks"].keys() == stock["callbacks"].keys()


def test_a_file_that_was_there_is_replaced_as_ever(bucket_url: str, node: Node) -> None:
    by = fit(tiered(bucket_url, node), node, max_steps=1)
    target = node.root / "mine.ckpt"
    node.root.mkdir()
    target.write_text("something else")
    by.save_checkpoint(target)
    assert torch.load(target, weights_only=True)["global_step"] == 1


def test_a_checkpoint_that_is_not_ours_is_loaded_and_removed_as_ever(
    bucket_url: str, node: Node, tmp_path: Path
) -> None:
    foreign = Node(tmp_path / "foreign")
    trainer(foreign, None, max_steps=3, callbacks=[every(3)]).fit(TinyModel())
    path = foreign.root / "checkpoints" / "epoch=0-step=3.ckpt"
    assert min(resume(bucket_url, node, path)) == 3
    tiered(bucket_url, node).remove_checkpoint(path)
    assert not path.exists()


def test_what_was_just_saved_is_what_is_loaded(bucket_url: str, node: Node) -> None:
    """Whether it is durable by then or not, and whatever the store has under that name."""
    io = tiered(bucket_url, node, resume_wait=0)
    by = fit(io, node, max_steps=1)
    path = node.root / "now.ckpt"
    for _ in range(3):
        by.save_checkpoint(path)
        saved = weight(by.lightning_module).clone()
        weight(by.lightning_module).add_(1.0)
        assert torch.equal(io.load_checkpoint(path)["state_dict"][WEIGHT], saved)
    io.teardown()


def test_p9_a_staged_copy_is_verified_before_it_is_durable(
    bucket_url: str, node: Node, nobody_listens: str
) -> None:
    by = fit(
        tiered(bucket_url, node, endpoint_url=nobody_listens, drain_timeout=0), node, max_steps=1
    )
    path = node.root / "staged.ckpt"
    by.save_checkpoint(path)
    by.strategy.checkpoint_io.teardown()
    io = tiered(bucket_url, node, resume_wait=0)
    assert io.load_checkpoint(path)["global_step"] == 1
    staged = path.resolve()
    contents = bytearray(staged.read_bytes())
    contents[len(contents) // 2] ^= 1
    staged.write_bytes(contents)
    with pytest.raises(IntegrityError, match="not what was staged"):
        io.load_checkpoint(path)


# --- the options of ModelCheckpoint -------------------------------------------------------------


@pytest.mark.parametrize("save_last", [True, "link"])
def test_save_last(bucket_url: str, node: Node, tmp_path: Path, save_last: Any) -> None:
    io = tiered(bucket_url, node)
    fit(io, node, max_steps=6, callbacks=[every(2, save_last=save_last)])
    last = node.root / "checkpoints" / "last.ckpt"
    assert torch.load(last, weights_only=True)["global_step"] == 6
    assert min(resume(bucket_url, Node(tmp_path / "other"), last)) == 6
    # Each `last.ckpt` replaces the one before, in the store as on disk.
    each = [f"epoch=0-step={step}.ckpt" for step in (6, 4, 2)]
    assert settles(io, ["last.ckpt", *each] if save_last is True else each)


def test_save_top_k_keeps_the_best(bucket_url: str, node: Node) -> None:
    io = tiered(bucket_url, node)
    best = every(None, monitor="val/loss", save_top_k=2, every_n_epochs=1)  # type: ignore[arg-type]
    options = {"limit_val_batches": 1, "val_check_interval": 2, "check_val_every_n_epoch": None}
    fit(io, node, max_steps=12, callbacks=[best], **options)
    kept = sorted((Path(path).name for path in best.best_k_models), key=len)
    assert len(kept) == 2
    assert sorted(path.name for path in (node.root / "checkpoints").iterdir()) == kept
    assert settles(io, kept[::-1])


def test_p11_names_with_slashes_and_equals_signs(
    bucket_url: str, node: Node, tmp_path: Path
) -> None:
    io = tiered(bucket_url, node)
    named = every(None, monitor="val/loss", filename="{step}-{val/loss:.1f}", every_n_epochs=1)  # type: ignore[arg-type]
    options = {"limit_val_batches": 1, "val_check_interval": 3, "check_val_every_n_epoch": None}
    fit(io, node, max_steps=3, callbacks=[named], **options)
    (file,) = durable_files(io)
    assert file.startswith("step=3-val/loss=")
    path = Path(named.best_model_path)
    assert path.is_symlink()
    assert path == node.root / "checkpoints" / file
    assert min(resume(bucket_url, Node(tmp_path / "other"), path)) == 3


def test_save_on_exception(bucket_url: str, node: Node, tmp_path: Path) -> None:
    """What is saved then is drained, too; and the user sees the first exception."""

    class Fails(TinyModel):
        def on_train_batch_end(self, *_: object) -> None:
            if self.global_step == 7:
                raise ValueError("as planned")

    io = tiered(bucket_url, node)
    by = trainer(node, io, max_steps=20, callbacks=[every(5, save_on_exception=True)])
    with pytest.raises(ValueError, match="as planned"):
        by.fit(Fails())
    assert durable_files(io)[0] == "epoch=0-step=7.ckpt"
    assert min(resume(bucket_url, Node(tmp_path / "other"), "last")) == 7


def test_one_io_serves_one_fit_after_another(bucket_url: str, node: Node) -> None:
    io = tiered(bucket_url, node)
    by = fit(io, node, max_steps=2, callbacks=[every(2)])
    by.validate(TinyModel(), ckpt_path="best", verbose=False)
    by.save_checkpoint(node.root / "between.ckpt")
    fit(io, node, max_steps=4, callbacks=[every(4)])
    assert durable_files(io) == ["epoch=0-step=4.ckpt", "between.ckpt", "epoch=0-step=2.ckpt"]


# --- removal is a request -----------------------------------------------------------------------


def test_p6_an_older_checkpoint_goes_when_a_newer_one_is_durable(
    bucket_url: str, node: Node
) -> None:
    io = tiered(bucket_url, node)
    fit(io, node, max_steps=6, callbacks=[every(2, save_top_k=1)])
    assert settles(io, ["epoch=0-step=6.ckpt"])
    assert [p.name for p in (node.root / "checkpoints").iterdir()] == ["epoch=0-step=6.ckpt"]


def test_p6_the_only_checkpoint_stays_whoever_asks(bucket_url: str, node: Node) -> None:
    io = tiered(bucket_url, node)
    by = fit(io, node, max_steps=2, callbacks=[every(2)])
    path = node.root / "checkpoints" / "epoch=0-step=2.ckpt"
    by.strategy.remove_checkpoint(path)
    assert not path.is_symlink()
    io.teardown()
    assert durable_files(io) == ["epoch=0-step=2.ckpt"]


def test_p6_what_was_resumed_from_is_never_removed(
    bucket_url: str, node: Node, tmp_path: Path
) -> None:
    fit(tiered(bucket_url, node), node, max_steps=2, callbacks=[every(2)])
    other = Node(tmp_path / "other")
    io = tiered(bucket_url, other)

    class Removes(pl.Callback):
        def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            for step in (2, 4):
                trainer.strategy.remove_checkpoint(
                    other.root / "checkpoints" / f"epoch=0-step={step}.ckpt"
                )

    by = trainer(other, io, max_steps=6, callbacks=[every(2), Removes()])
    by.fit(TinyModel(seed=2), ckpt_path="last")
    assert settles(io, ["epoch=0-step=6.ckpt", "epoch=0-step=2.ckpt"])


# --- scratch files stay local -------------------------------------------------------------------


def test_the_tuner_leaves_nothing_in_the_store(bucket_url: str, node: Node) -> None:
    io = tiered(bucket_url, node)
    by = trainer(node, io, max_steps=30)
    tuner = Tuner(by)
    model = TinyModel()
    tuner.lr_find(model, num_training=10, attr_name="lr")
    tuner.scale_batch_size(model, max_trials=2, batch_arg_name="batch_size")
    assert io.checkpointer.saves() == []
    assert not list(node.root.glob("**/*.ckpt"))


def test_spawned_ranks_bring_their_weights_back(bucket_url: str, node: Node) -> None:
    """The launcher's own file passes between processes; the checkpoint is tiered in one of them."""
    io = tiered(bucket_url, node)
    by = trainer(node, io, max_steps=2, callbacks=[every(2)], strategy="ddp_spawn", devices=2)
    model = TinyModel()
    before = weight(model).clone()
    by.fit(model)
    assert not torch.equal(weight(model), before)
    assert durable_files(io) == ["epoch=0-step=2.ckpt"]


# --- strategies that would save past us ---------------------------------------------------------


def test_deepspeed_is_refused_at_setup_until_its_engine_is_there(
    bucket_url: str, node: Node
) -> None:
    io = tiered(bucket_url, node)
    by: Any = trainer(node, io, max_steps=1)
    # It can't be made without the package.
    strategy: Any = DeepSpeedStrategy.__new__(DeepSpeedStrategy)
    strategy._checkpoint_io = io
    by._accelerator_connector.strategy = strategy
    with pytest.raises(ConfigError, match="DeepSpeed") as raised:
        TieringCompanion().setup(by, TinyModel(), "fit")
    assert "DDP" in str(raised.value.hint)


# --- Fabric -------------------------------------------------------------------------------------


def fabric_state(seed: int) -> tuple[dict[str, Any], torch.nn.Linear]:
    torch.manual_seed(seed)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    return {"model": model, "optimizer": optimizer, "step": 12}, model


def test_fabric_saves_and_loads(bucket_url: str, node: Node, tmp_path: Path) -> None:
    io = tiered(bucket_url, node)
    fabric = Fabric(accelerator="cpu", devices=1, plugins=[io])
    state, model = fabric_state(1)
    fabric.save(node.root / "state.ckpt", state)
    io.teardown()
    assert io.checkpointer.latest().step == 12  # type: ignore[union-attr]

    other = Node(tmp_path / "other")
    fabric = Fabric(accelerator="cpu", devices=1, plugins=[tiered(bucket_url, other)])
    state, again = fabric_state(2)
    state["step"] = 0
    fabric.load("tier://latest", state)
    assert state["step"] == 12
    assert torch.equal(again.weight, model.weight)


def test_fabric_states_without_a_step_are_counted_on(
    bucket_url: str, node: Node, tmp_path: Path
) -> None:
    """Counting from 0 after a restart would make the new ones older than the old ones."""
    for process in range(2):
        io = tiered(bucket_url, Node(tmp_path / str(process)))
        fabric = Fabric(accelerator="cpu", devices=1, plugins=[io])
        for _ in range(2):
            fabric.save(node.root / "state.ckpt", {"weights": torch.zeros(2)})
        io.teardown()
        newest = io.checkpointer.latest()
        assert newest is not None
        assert newest.step == 2 * process + 1


def test_links_are_made_relative_to_no_directory(
    bucket_url: str, node: Node, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A relative path is saved where it would have been saved, and found there again."""
    monkeypatch.chdir(tmp_path)
    io = tiered(bucket_url, node)
    Fabric(accelerator="cpu", devices=1, plugins=[io]).save("here.ckpt", {"step": 1})
    io.teardown()
    assert os.path.islink("here.ckpt")  # noqa: PTH114  a relative path is the point
    assert torch.load("here.ckpt", weights_only=True) == {"step": 1}
    assert io.load_checkpoint("here.ckpt") == {"step": 1}
