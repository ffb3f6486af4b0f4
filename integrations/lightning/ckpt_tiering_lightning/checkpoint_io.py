"""Lightning's ``CheckpointIO``, on the three-stage path: memory, NVMe, store."""

from __future__ import annotations

import logging
import operator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

from ckpt_tiering.api import TieredCheckpointer
from ckpt_tiering.errors import FormatError
from ckpt_tiering_lightning import resume
from ckpt_tiering_lightning.agreement import decided_by_rank_zero, succeed_together
from ckpt_tiering_lightning.links import is_staged, unlink_staged
from ckpt_tiering_lightning.locate import OrdinaryFile, StagedLink, locate
from ckpt_tiering_lightning.names import Places, is_remote, is_scratch, place_link, tidy

if TYPE_CHECKING:
    from ckpt_tiering.api import SaveInfo
    from ckpt_tiering_lightning.locate import Found
    from ckpt_tiering_lightning.names import SaveName

__all__ = ["TieredCheckpointIO", "file_of", "is_sharded"]

log = logging.getLogger(__name__)
# Where a training loop of Fabric's may keep its step; Lightning's own checkpoints have the first.
_STEP_KEYS = ("global_step", "step", "iteration", "iter_num", "step_count")


def _on_cpu(storage: Any, _location: str) -> Any:
    """Load tensors to the CPU, as Lightning's own ``CheckpointIO`` does by default."""
    return storage


class TieredCheckpointIO(CheckpointIO):
    """Saves checkpoints to NVMe and returns; an agent beside training ships them to the store.

    ``Trainer(plugins=[TieredCheckpointIO("s3://bucket/run-42", staging="/nvme/ckpt")])`` is all
    that a script needs; for single device, DDP, FSDP and ``ModelParallelStrategy``. Fabric takes
    it in the same way for the first two; see `attach` for the others. Paths keep their meaning: a
    saved path becomes a link to the staged file (sharded: a directory of links), so
    `best_model_path` and ``load_from_checkpoint`` work while the copy on NVMe is there, and loading
    it through a trainer works anywhere, also on a node that has never seen it.

    Cheap to construct, and picklable: neither starts an agent nor reaches a store. Fabric never
    says when training is over: end with ``io.close()``, or leave what is staged to the agent.

    Args:
        store: Root of the run, ``s3://bucket/path``.
        staging: Directory on a node-local disk; None to take it from ``CKPT_TIERING_STAGING`` or
            the configuration file.
        **options: Fields of `ckpt_tiering.config.TieringConfig`.

    Attributes:
        in_background: Whether nobody looks at the file right after a save.
        every_rank_saves: Whether checkpoints are sharded, so that each rank has a part to save.
        weights_only: What the trainer was told when it was asked to load; strategies that shard
            are not told.

    Raises:
        ConfigError: An option is unknown, has a bad value, or contradicts another.
    """

    def __init__(self, store: str, *, staging: str | Path | None = None, **options: Any) -> None:
        self._arguments: dict[str, Any] = {"store": store, "staging": staging, **options}
        self._begin()

    def _begin(self) -> None:
        self._checkpointer = TieredCheckpointer(**self._arguments)
        self._in_use = False
        self.in_background = False
        self.every_rank_saves = False
        self.weights_only: bool | None = None
        self._places = Places()
        self._staged: dict[str, str] = {}  # save ids by name
        self._loaded: SaveInfo | None = None
        self._marked = False
        self._counter: int | None = None
        resume.install(type(self))

    def __getstate__(self) -> dict[str, Any]:
        return {"arguments": self._arguments, "places": self._places}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._arguments = state["arguments"]
        self._begin()
        self._places = state["places"]

    @property
    def checkpointer(self) -> TieredCheckpointer:
        """What saves and loads, for `wait`, `status` and the like."""
        return self._checkpointer

    @property
    def places(self) -> Places:
        """Directories that checkpoint paths are relative to; the companion callback sets them."""
        return self._places

    @places.setter
    def places(self, places: Places) -> None:
        self._places = places

    def start(self) -> None:
        """Make sure that this node's agent runs. Only for ranks that save."""
        self._in_use = True
        self._checkpointer.start()

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None
    ) -> None:
        """Capture a checkpoint, or write it to NVMe, and hand it over to the agent.

        While the trainer trains, and there is room for a copy in memory, it blocks for that copy
        only, and the link at ``path`` leads to a file that the agent is about to write. Otherwise
        the file is there when it returns.

        The step is taken from the checkpoint: ``global_step``, or with Fabric also ``step``,
        ``iteration``, ``iter_num`` or ``step_count``. A state with none of them is counted on from
        the newest checkpoint of the run.

        Raises:
            TypeError: ``storage_options`` are given.
            SaveFailedError: An earlier save failed for good, and the policy is to raise.
            CapacityError: The staging disk is full.
        """
        if storage_options is not None:
            raise TypeError(
                "`Trainer.save_checkpoint(..., storage_options=...)` with `storage_options` arg"
                f" is not supported for `{type(self).__name__}`: give options to its constructor"
            )
        reference = tidy(path)
        if is_scratch(reference):
            TorchCheckpointIO().save_checkpoint(checkpoint, path)
            return
        self.start()
        self.mark_resumed()
        step, name, metadata = self.describe(checkpoint, reference)
        saved = self._checkpointer.save_state(
            step, checkpoint, file=name.file, name=name.name, metadata=metadata
        )
        self.saved(name.name, saved.save_id)
        if not is_remote(reference):
            _link(reference, saved.local_path)

    def describe(
        self, checkpoint: dict[str, Any], reference: str
    ) -> tuple[int, SaveName, dict[str, Any]]:
        """Return a checkpoint's step, what it is called in the store, and facts to keep with it."""
        name = self._places.name_of(reference)
        return self._step_of(checkpoint), name, _metadata(checkpoint) | {"file": name.file}

    def saved(self, name: str, save_id: str) -> None:
        """Note a save; unless in the background, wait until this rank's files are on NVMe."""
        if not self.in_background:
            self._checkpointer.wait_staged()
        self._staged[name] = save_id

    def load_checkpoint(
        self,
        path: str | Path,
        map_location: Any = _on_cpu,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Load a checkpoint from NVMe or the store; every byte of it was verified.

        A collective when training is distributed: all ranks load what rank 0 chose. Blocks on the
        store, and up to `resume_wait` while the agent finishes what is staged here.

        Args:
            path: ``tier://latest``, ``tier://<save id>``, an ``s3://`` URL of a run, a save or an
                object of a save, or a path. A file that is there and not ours is loaded as ever.
            map_location: As for ``torch.load``.
            weights_only: As for ``torch.load``.

        Raises:
            NotFoundError: There is no such checkpoint.
            IntegrityError: No copy of it is whole.
            CkptTieringError: The store can't be reached.
        """
        reference = tidy(path)
        if is_scratch(reference):
            return _torch_load(path, map_location, weights_only)
        found = self.find(reference)
        if isinstance(found, OrdinaryFile):
            return _torch_load(found.path, map_location, weights_only)
        file = succeed_together(lambda: self.bring(found))
        checkpoint = _torch_load(file, map_location, weights_only)
        self.loaded(found)
        return checkpoint

    def find(self, reference: str) -> Found:
        """Find what a reference means on rank 0. A collective; errors as of `load_checkpoint`."""
        return decided_by_rank_zero(
            lambda: locate(self._checkpointer, reference, self._places, self._staged)
        )

    def bring(self, found: SaveInfo | StagedLink) -> Path:
        """Bring the file that a checkpoint consists of to this node.

        Raises:
            FormatError: It does not consist of one file, or is not Lightning's.
            CkptTieringError: As of `load_checkpoint`.
        """
        if isinstance(found, StagedLink):
            _refuse_shards(found.path, found.is_directory)
            return self._checkpointer.staged_copy(found.path)
        _refuse_shards(found.url, is_sharded(found))
        return self._checkpointer.fetch(found, file_of(found))

    def loaded(self, found: Found) -> None:
        """Note that the state is what was found: training may go on from it."""
        if not isinstance(found, StagedLink | OrdinaryFile):
            self._loaded, self._marked = found, False

    def remove_checkpoint(self, path: str | Path) -> None:
        """Ask for a checkpoint to be removed; does not block.

        The link at ``path`` goes at once; the save goes when something newer is durable, and never
        if training was resumed from it. A file that is not ours is deleted as ever.
        """
        reference = tidy(path)
        if is_scratch(reference) or self._is_ordinary(reference):
            TorchCheckpointIO().remove_checkpoint(path)
            return
        if not is_remote(reference):
            unlink_staged(reference, self._checkpointer.config.staging)
        self.start()  # a request needs somebody to hear it
        self._checkpointer.request_removal(self._places.name_of(reference).name)

    def _is_ordinary(self, path: str) -> bool:
        if is_remote(path):
            return False
        return Path(path).exists() and not is_staged(path, self._checkpointer.config.staging)

    def teardown(self) -> None:
        """Wait until what is staged is durable, at most `drain_timeout`, and let go of the agent.

        What is not durable by then goes on in the agent. No collective, and nothing to wait for on
        ranks that never saved. The next save takes up the agent again.
        """
        self.close()

    def close(self, timeout: float | None = None) -> None:
        """Like `teardown`, with a bound of its own in seconds."""
        if self._in_use:
            self._in_use = False
            self._checkpointer.close(timeout)

    def forget_loaded(self) -> None:
        """Forget what was loaded: what comes is no continuation of it."""
        self._loaded, self._marked = None, False

    def mark_resumed(self) -> None:
        """Protect the checkpoint that training goes on from. Only for ranks that save."""
        if self._loaded is not None and not self._marked:
            self._marked = True
            self._checkpointer.mark_resumed(self._loaded)

    def _step_of(self, checkpoint: dict[str, Any]) -> int:
        for key in _STEP_KEYS:
            step = _as_step(checkpoint.get(key))
            if step is not None:
                return step
        if self._counter is None:
            # Counting from 0 after a restart would make the new saves older than the old ones.
            known = (self._loaded, self._checkpointer.latest())
            self._counter = max((save.step for save in known if save), default=-1)
        self._counter += 1
        return self._counter


def _as_step(value: Any) -> int | None:
    if value is None or isinstance(value, bool):
        return None
    try:
        step = operator.index(value)
    except TypeError:
        return None
    return step if step >= 0 else None


def _metadata(checkpoint: dict[str, Any]) -> dict[str, Any]:
    facts: dict[str, Any] = {"framework": "lightning"}
    epoch = _as_step(checkpoint.get("epoch"))
    if epoch is not None:
        facts["epoch"] = epoch
    if "pytorch-lightning_version" in checkpoint and "optimizer_states" not in checkpoint:
        facts["weights_only"] = True
    return facts


def is_sharded(save: SaveInfo) -> bool:
    """Return whether a save has a part of each rank."""
    return bool(save.metadata.get("sharded"))


def _refuse_shards(place: str, sharded: bool) -> None:
    if sharded:
        raise FormatError(
            f"{place} is a sharded checkpoint, which only strategies that shard can load",
            hint="load it with ModelParallelStrategy or FSDPStrategy; or restore it to a directory"
            " and make one file of it with `lightning.pytorch.utilities.consolidate_checkpoint`",
        )


def file_of(save: SaveInfo) -> str:
    """Return the path, within a save of Lightning's, of its file or of the directory of its shards.

    Raises:
        FormatError: It is no save of Lightning's.
    """
    file = save.metadata.get("file")
    if save.metadata.get("framework") != "lightning" or not isinstance(file, str):
        raise FormatError(
            f"{save.url} is not a checkpoint of Lightning's",
            hint=f"`ckpt-tiering show {save.url}` says what it is",
        )
    return file


def _torch_load(path: str | Path, map_location: Any, weights_only: bool | None) -> dict[str, Any]:
    # Before 2.6 there is no such argument.
    more = {} if weights_only is None else {"weights_only": weights_only}
    return TorchCheckpointIO().load_checkpoint(path, map_location=map_location, **more)


def _link(path: str, target: Path) -> None:
    try:
        place_link(path, target)
    except OSError as error:
        # The checkpoint itself is safe, and more than what depends on its path is at stake.
        log.warning("%s can't be made a link to the staged checkpoint: %s", path, error)
