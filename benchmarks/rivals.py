"""The rivals, each as its own documents say to use it for speed.

Their packages are in the dependency group ``bench`` and are imported at use. What can't be imported
is `UnavailableError`, which the runner prints.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.variants import CLOCK, Done, Pending, Plain, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.states import State

__all__ = [
    "DcpProcess",
    "DcpSync",
    "DcpThread",
    "LightningAsync",
    "NvrxFork",
    "S3Writer",
]


def imported(name: str) -> Any:
    """Import a module that need not be there.

    Raises:
        UnavailableError: It isn't, or does not work with what else is installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UnavailableError(f"{name} can't be imported: {error}") from error


class OfFuture:
    """A save that ends with a future."""

    def __init__(self, future: Any) -> None:
        self._future = future
        self._at: float | None = None
        future.add_done_callback(self._done)

    def _done(self, _: Any) -> None:
        self._at = CLOCK.monotonic()

    def poll(self) -> float | None:
        """See `Pending.poll`."""
        if self._at is not None:
            self._future.result()
        return self._at


# --- s3torchconnector ------------------------------------------------------------------------


def s3_config() -> Any:
    """Return s3torchconnector's settings: its own, but for servers without a name a bucket."""
    return imported("s3torchconnector").S3ClientConfig(force_path_style=True)


class S3Writer(Plain):
    """``torch.save`` into s3torchconnector's ``S3Checkpoint`` writer."""

    def open(self, num_bytes: int) -> None:
        """Make the client; it finds the server in the environment."""
        checkpoint = imported("s3torchconnector").S3Checkpoint
        self._checkpoint = checkpoint(region=self.setup.region, s3client_config=s3_config())

    def save(self, step: int, state: State) -> Pending:
        """Write."""
        with self._checkpoint.writer(f"{self.setup.url}/{step}.pt") as writer:
            torch.save(state.tree(step), writer)
        return Done()


class Dcp(Plain):
    """What the DCP variants share: one process group, and a writer for each save."""

    def open(self, num_bytes: int) -> None:
        """Join a group of one, as any job that uses DCP has one."""
        self._dcp = imported("torch.distributed.checkpoint")
        self._staging = imported("torch.distributed.checkpoint.staging")
        self._saver = imported("torch.distributed.checkpoint.state_dict_saver")
        self._writer = imported("s3torchconnector.dcp").S3StorageWriter
        self._dist = imported("torch.distributed")
        self._dist.init_process_group("gloo", store=self._dist.HashStore(), rank=0, world_size=1)

    def writer(self, step: int) -> Any:
        """Return the writer of a save."""
        return self._writer(
            region=self.setup.region,
            path=f"{self.setup.url}/{step}/",
            s3client_config=s3_config(),
        )

    def close(self) -> None:
        """Leave the group."""
        self._dist.destroy_process_group()


class DcpSync(Dcp):
    """``dcp.save`` to s3torchconnector's ``S3StorageWriter``."""

    def save(self, step: int, state: State) -> Pending:
        """Write."""
        self._dcp.save(state.tree(step), storage_writer=self.writer(step))
        return Done()


class DcpThread(Dcp):
    """``dcp.async_save`` in a thread, with a stager in shared memory that the user keeps."""

    executor = "THREAD"

    def open(self, num_bytes: int) -> None:
        """Make the stager: memory is not pinned, but shared; staging is in the call."""
        super().open(num_bytes)
        options = self._staging.StagingOptions(False, True, False, False)
        self._stager = self._staging.DefaultStager(options)

    def save(self, step: int, state: State) -> Pending:
        """Stage, and hand over."""
        response = self._dcp.async_save(
            state.tree(step),
            storage_writer=self.writer(step),
            async_checkpointer_type=self._saver.AsyncCheckpointerType[self.executor],
            async_stager=self._stager,
        )
        return OfFuture(getattr(response, "upload_completion", response))

    def close(self) -> None:
        """Let go of the stager, too."""
        self._stager.close()
        super().close()


class DcpProcess(DcpThread):
    """The same in a process: the best rival that delivers to S3."""

    executor = "PROCESS"


# --- Lightning -------------------------------------------------------------------------------


class Told:
    """Lightning's checkpoint plugin that tells when it has written: it has no future to ask."""

    def __init__(self, plugin: Any) -> None:
        self._plugin = plugin
        self.written: dict[str, float] = {}
        self.error: BaseException | None = None

    def save_checkpoint(self, checkpoint: Any, path: str, storage_options: Any = None) -> None:
        """Write, and note when."""
        try:
            self._plugin.save_checkpoint(checkpoint, path, storage_options)
        except BaseException as error:
            self.error = error
            raise
        self.written[path] = CLOCK.monotonic()


class Polled:
    """A save that is asked for after each step."""

    def __init__(self, ask: Callable[[], float | None]) -> None:
        self._ask = ask
        self._at: float | None = None

    def poll(self) -> float | None:
        """See `Pending.poll`."""
        if self._at is None:
            self._at = self._ask()
        return self._at


class LightningAsync(Plain):
    """Lightning's ``AsyncCheckpointIO`` around its own plugin, to S3 by s3fs."""

    def open(self, num_bytes: int) -> None:
        """Make the plugin."""
        imported("s3fs")
        io = imported("lightning.pytorch.plugins.io")
        self._told = Told(io.TorchCheckpointIO())
        self._plugin = io.AsyncCheckpointIO(self._told)

    def save(self, step: int, state: State) -> Pending:
        """Clone, and hand over."""
        path = f"{self.setup.url}/{step}.ckpt"
        self._plugin.save_checkpoint(state.tree(step), path)
        return Polled(lambda: self._when(path))

    def _when(self, path: str) -> float | None:
        if self._told.error is not None:
            raise self._told.error
        return self._told.written.get(path)

    def close(self) -> None:
        """Join its thread."""
        self._plugin.teardown()


# --- nvidia-resiliency-ext -------------------------------------------------------------------


class NvrxFork(Plain):
    """``TorchAsyncCheckpoint`` in fork mode: ``torch.save`` in a forked child, to the local disk.

    It calls ``torch.cuda`` even for tensors on the CPU; on machines without a GPU two functions are
    replaced by ones that do nothing. Its file is not fsynced: durable means that the child ended.
    """

    def open(self, num_bytes: int) -> None:
        """Make the queue, and a group of one, of which it asks the rank."""
        module = imported("nvidia_resiliency_ext.checkpointing.async_ckpt.torch_ckpt")
        if not torch.cuda.is_available():
            vars(torch.cuda).update(synchronize=lambda: None, current_device=lambda: "cpu")
        dist = imported("torch.distributed")
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        self._queue = module.TorchAsyncCheckpoint(persistent_queue=False)
        self._num_bytes = num_bytes

    def save(self, step: int, state: State) -> Pending:
        """Fork."""
        path = self.setup.home / f"{step}.pt"
        self._queue.async_save(state.tree(step), str(path))

        def ask() -> float | None:
            self._queue.finalize_async_save(blocking=False, no_dist=True)
            if self._queue._async_calls_queue.get_num_unfinalized_calls():  # noqa: SLF001
                return None
            if path.stat().st_size < state.num_bytes:
                raise RuntimeError("the forked child did not write its file")
            return CLOCK.monotonic()

        return Polled(ask)

    def close(self) -> None:
        """Finish what is under way, and leave the group."""
        self._queue.finalize_async_save(blocking=True, no_dist=True, terminate=True)
        imported("torch.distributed").destroy_process_group()
