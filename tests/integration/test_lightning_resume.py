"""Lightning on one device: what was saved is found again, from anywhere, or it is an error."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from lightning.pytorch.callbacks import OnExceptionCheckpoint

from ckpt_tiering.errors import (
    CredentialError,
    ErrorKind,
    NotFoundError,
    TransientError,
    WaitTimeoutError,
)
from ckpt_tiering_lightning import TieredCheckpointIO
from tests.integration.lightning_job import (
    Losses,
    Node,
    TinyModel,
    every,
    losses,
    resume,
    tiered,
    trainer,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.servers import WeedServer

ROOT = Path(__file__).parent.parent.parent

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:lightning"),
    pytest.mark.filterwarnings("ignore::FutureWarning:lightning"),
]


class Trained:
    """A run of 20 steps, saved every 5, and the losses of one that went on to 40."""

    def __init__(self, store: str, directory: Path) -> None:
        self.store = store
        self.node = Node(directory / "first")
        self.saved = losses(store, self.node, max_steps=20)
        self.reference = losses(None, Node(directory / "reference"), max_steps=40)
        self.newest = tiered(store, self.node).checkpointer.resolve("latest")
        self.old_path = self.node.root / "checkpoints" / "epoch=0-step=20.ckpt"

    def after(self, step: int) -> Losses:
        return {s: loss for s, loss in self.reference.items() if s >= step}


@pytest.fixture(scope="module")
def trained(weed: WeedServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in weed.env().items():
            patch.setenv(name, value)
        yield Trained(weed.new_root(), tmp_path_factory.mktemp("trained"))


@pytest.fixture
def fresh(tmp_path: Path) -> Node:
    """A node that has never seen the run."""
    return Node(tmp_path / "fresh")


def test_training_is_the_same_with_and_without_tiering(trained: Trained) -> None:
    assert trained.saved == {s: trained.reference[s] for s in range(20)}


@pytest.mark.parametrize(
    "reference",
    ["last", "tier://latest", "tier://{save}", "{store}", "{store}/saves/{save}", "{commit}"],
)
def test_resume_on_a_fresh_node_is_bit_exact(trained: Trained, fresh: Node, reference: str) -> None:
    asked = reference.format(
        save=trained.newest.save_id, store=trained.store, commit=trained.newest.url
    )
    assert resume(trained.store, fresh, asked) == trained.after(20)


def test_resume_by_the_path_it_had_on_another_node(trained: Trained, fresh: Node) -> None:
    elsewhere = Path("/gone/with/the/node/project/checkpoints/epoch=0-step=15.ckpt")
    assert resume(trained.store, fresh, elsewhere) == trained.after(15)


def test_resume_by_the_url_of_an_object(trained: Trained, fresh: Node, weed: WeedServer) -> None:
    bucket, _, prefix = trained.store.removeprefix("s3://").partition("/")
    listing = weed.client().list_objects_v2(Bucket=bucket, Prefix=f"{prefix}/saves/")
    key = next(o["Key"] for o in listing["Contents"] if trained.newest.save_id in o["Key"])
    assert resume(trained.store, fresh, f"s3://{bucket}/{key}") == trained.after(20)


def test_resume_from_another_run(trained: Trained, fresh: Node) -> None:
    other = trained.store.replace("/run", "/fine-tuned")
    assert resume(other, fresh, trained.newest.url) == trained.after(20)


def test_resume_on_the_node_that_saved(trained: Trained) -> None:
    assert resume(trained.store, trained.node, trained.old_path) == trained.after(20)


def test_a_model_that_did_not_resume_is_told_apart(trained: Trained, fresh: Node) -> None:
    """Negative control: the comparison of losses can fail."""
    assert resume(trained.store, fresh, None) != trained.reference
    earlier = resume(trained.store, fresh, "epoch=0-step=10.ckpt")
    assert earlier == trained.after(10) != trained.after(20)


def test_last_with_nothing_saved_starts_from_scratch_and_says_so(
    trained: Trained, fresh: Node, caplog: pytest.LogCaptureFixture
) -> None:
    empty = trained.store.replace("/run", "/empty")
    model = TinyModel()
    trainer(fresh, tiered(empty, fresh), max_steps=3).fit(model, ckpt_path="last")
    assert model.losses == {s: trained.reference[s] for s in range(3)}
    (line,) = [m for m in caplog.messages if "from scratch" in m]
    assert empty in line
    assert str(fresh.staging) in line


def test_last_takes_a_checkpoint_from_before_the_plugin(
    trained: Trained, fresh: Node, caplog: pytest.LogCaptureFixture
) -> None:
    losses_before = losses(None, fresh, max_steps=10)
    model = TinyModel()
    trainer(fresh, None, max_steps=10, callbacks=[every(5, save_last=True)]).fit(model)
    assert model.losses == losses_before
    empty = trained.store.replace("/run", "/converted")
    again = TinyModel(seed=2)
    callbacks = [every(5, save_last=True)]
    io = tiered(empty, fresh)
    trainer(fresh, io, max_steps=20, callbacks=callbacks).fit(again, ckpt_path="last")
    assert again.losses == {s: trained.reference[s] for s in range(10, 20)}
    (line,) = [m for m in caplog.messages if "not saved by ckpt-tiering" in m]
    assert "last.ckpt" in line


def test_last_passes_over_weights_without_a_training_state(trained: Trained, fresh: Node) -> None:
    store = trained.store.replace("/run", "/weights")
    callbacks = [every(5), every(1, save_weights_only=True, filename="weights-{step}")]
    trainer(fresh, tiered(store, fresh), max_steps=7, callbacks=callbacks).fit(TinyModel())
    assert resume(store, Node(fresh.path / "other"), "last") == trained.after(5)


def test_on_exception_checkpoint_is_resumed_without_being_asked(
    trained: Trained, fresh: Node
) -> None:
    """Lightning itself takes ``ckpt_path=None`` for "last" then, and looks on this disk only."""
    store = trained.store.replace("/run", "/excepted")

    class Fails(TinyModel):
        def on_train_batch_end(self, *_: object) -> None:
            if self.global_step == 8:
                raise ValueError("as planned")

    def again(node: Node) -> OnExceptionCheckpoint:
        return OnExceptionCheckpoint(node.root / "checkpoints")

    with pytest.raises(ValueError, match="as planned"):
        trainer(fresh, tiered(store, fresh), max_steps=20, callbacks=[again(fresh)]).fit(Fails())
    other = Node(fresh.path / "other")
    assert resume(store, other, None, callbacks=[again(other)]) == trained.after(8)


def test_the_example_goes_on_where_it_stopped(bucket_url: str, tmp_path: Path) -> None:
    def run(node: str, max_steps: int) -> str:
        example = ROOT / "examples" / "lightning_minimal.py"
        (tmp_path / node).mkdir()
        done = subprocess.run(
            [sys.executable, example, bucket_url, tmp_path / node / "nvme", str(max_steps)],
            cwd=tmp_path / node,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=True,
        )
        return done.stdout

    assert "starting from scratch" in run("first", 20)
    output = run("second", 40)
    assert "Restored all states from the checkpoint at tier://000000000020-" in output


# --- what is not there is an error -------------------------------------------------------------


@pytest.mark.parametrize(
    ("reference", "says"),
    [
        ("nowhere/different=3.ckpt", "nowhere/different=3.ckpt"),
        ("tier://000000000099-01jdabcdefgh", "000000000099-01jdabcdefgh"),
        ("{store}/saves/000000000099-01jdabcdefgh/", "000000000099-01jdabcdefgh"),
        ("{store}-other", "-other"),
    ],
)
def test_an_explicit_checkpoint_that_is_not_there_is_an_error(
    trained: Trained, fresh: Node, reference: str, says: str
) -> None:
    with pytest.raises(NotFoundError, match=says) as raised:
        resume(trained.store, fresh, reference.format(store=trained.store))
    assert raised.value.kind is ErrorKind.NOT_FOUND


def test_latest_of_an_empty_run_is_an_error(trained: Trained, fresh: Node) -> None:
    with pytest.raises(NotFoundError, match="no checkpoint is durable"):
        resume(trained.store.replace("/run", "/empty"), fresh, "tier://latest")


@pytest.mark.parametrize("reference", ["last", "tier://latest", "checkpoints/a.ckpt"])
def test_p5_a_store_that_cannot_be_asked_is_an_error(
    trained: Trained, fresh: Node, reference: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never a silent start from step 0."""
    with pytest.raises(NotFoundError) as no_bucket:
        resume("s3://no-such-bucket-here/run", fresh, reference)
    assert no_bucket.value.kind is ErrorKind.NO_SUCH_BUCKET
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "of somebody else")
    with pytest.raises(CredentialError):
        resume(trained.store, fresh, reference)
    monkeypatch.setattr("ckpt_tiering.reader.GIVE_UP_AFTER_S", 0.1)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # and nobody listens
        endpoint = f"http://127.0.0.1:{unused.getsockname()[1]}"
        io = TieredCheckpointIO(trained.store, staging=fresh.staging, endpoint_url=endpoint)
        with pytest.raises(TransientError):
            trainer(fresh, io, max_steps=1).fit(TinyModel(), ckpt_path=reference)


def test_p6_last_does_not_start_over_while_the_only_checkpoint_is_on_its_way(
    trained: Trained, fresh: Node
) -> None:
    """Staged here, not durable yet, and the store has nothing else."""
    store = trained.store.replace("/run", "/slow")
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{unused.getsockname()[1]}"
        broken = tiered(store, fresh, endpoint_url=endpoint, drain_timeout=0)
        trainer(fresh, broken, max_steps=5, callbacks=[every(5)]).fit(TinyModel())
        again = trainer(fresh, tiered(store, fresh, resume_wait=0.2), max_steps=9)
        with pytest.raises(WaitTimeoutError, match="not durable yet"):
            again.fit(TinyModel(), ckpt_path="last")


# --- validate and test --------------------------------------------------------------------------


@pytest.mark.parametrize("reference", ["last", "tier://latest", "{path}"])
def test_validate_and_test_load_what_they_are_told(
    trained: Trained, fresh: Node, reference: str
) -> None:
    def score(model: TinyModel, path: str | None) -> float:
        by = trainer(fresh, tiered(trained.store, fresh), max_steps=1, limit_val_batches=1)
        (metrics,) = by.validate(model, ckpt_path=path, verbose=False)
        return float(metrics["val/loss"])

    expected = TinyModel()
    trainer(fresh, None, max_steps=20).fit(expected)
    found = score(TinyModel(seed=3), reference.format(path=trained.old_path))
    assert found == score(expected, None) != score(TinyModel(seed=3), None)
