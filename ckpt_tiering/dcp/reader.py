"""`TieredStorageReader`: DCP's own ``load``, from NVMe where there is a good copy, or the store."""

from __future__ import annotations

import io
import os
import threading
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Self

from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from ckpt_tiering.config import load_config
from ckpt_tiering.dcp.metadata import load_metadata
from ckpt_tiering.dcp.objects import harmless_object, read_tensor
from ckpt_tiering.errors import CkptTieringError, ConfigError, FormatError, NotFoundError
from ckpt_tiering.model.layout import StagingLayout, StoreUrl
from ckpt_tiering.model.ranges import ByteRange
from ckpt_tiering.reader import Reader

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch

    from ckpt_tiering.model.catalog import SaveInfo
    from ckpt_tiering.pipeline.ranges import RangesReport
    from ckpt_tiering.pipeline.resolve import WholeSave

__all__ = ["TieredStorageReader"]

METADATA_FILE = ".metadata"


class TieredStorageReader(StorageReader):
    """Reads DCP checkpoints: ``dcp.load(state, storage_reader=TieredStorageReader(url))``.

    Every rank has its own, made with the same arguments, reads the ranges that it needs, and
    verifies them. A save is found anew by each ``dcp.load``; if the ranks find different ones,
    which a reference such as ``latest`` allows while saves become durable, all of them raise.

    Args:
        store: Root of the run, ``s3://bucket/path``, or the URL of a save or a commit in it.
        save: Which save; see `TieredCheckpointer.resolve`.
        staging: Staging directory of this node, whose copies are used first; None for none.
        prefix: Directory of the save that holds ``.metadata``; None if there is but one. Empty
            for the save's own root.
        allow_pickle: Unpickle Python objects of any kind, which runs code that they bring along.
            Without, they may consist of plain values, tensors, numpy arrays, and the classes that
            were named to ``torch.serialization.add_safe_globals``.
        **options: ``endpoint_url``, ``region``, ``profile``, ``concurrency`` and the other fields
            of `TieringConfig`.

    Attributes:
        report: What the last load took; None before the first.

    Raises:
        ConfigError: An argument is not valid.
    """

    def __init__(
        self,
        store: str,
        save: str = "latest",
        staging: str | Path | None = None,
        *,
        prefix: str | None = None,
        allow_pickle: bool = False,
        **options: Any,
    ) -> None:
        root, save_id = StoreUrl.parse(store).split_save()
        if save_id is not None:
            if save != "latest":
                raise ConfigError(
                    f"the URL names save {save_id} already, and save={save!r} another",
                    hint=f"give the root {root}, or leave save out",
                )
            save = str(save_id)
        # A staging directory is a must for what saves; without one, only the store is read.
        config = load_config(store=str(root), staging=staging or os.devnull, **options)
        layout = StagingLayout(config.staging) if staging else None
        reader = Reader(root, config.store_options, layout=layout, concurrency=config.concurrency)
        self._begin(reader, save, prefix, allow_pickle=allow_pickle)

    @classmethod
    def of(
        cls,
        reader: Reader,
        save: SaveInfo,
        *,
        prefix: str | None = None,
        allow_pickle: bool = False,
    ) -> Self:
        """Make a reader of a save that was found already.

        Args:
            reader: Reads the run.
            save: The save.
            prefix: As of the constructor.
            allow_pickle: Likewise.
        """
        made = cls.__new__(cls)
        made._begin(reader, save, prefix, allow_pickle=allow_pickle)  # noqa: SLF001  its own
        return made

    def _begin(
        self, reader: Reader, save: str | SaveInfo, prefix: str | None, *, allow_pickle: bool
    ) -> None:
        self.report: RangesReport | None = None
        self._reader = reader
        self._save = save
        self._given_prefix = prefix
        self._allow_pickle = allow_pickle
        self._lock = threading.Lock()
        self._whole: WholeSave | None = None
        self._metadata = Metadata({})
        self._directory = ""

    # --- what DCP asks, in this order --------------------------------------------------------

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Tell whether a checkpoint of this name could be read: it is a URL."""
        return "://" in str(checkpoint_id)

    @property
    def checkpoint_id(self) -> str:
        """What is read: the save, once it was found."""
        if self._whole is not None:
            return self._whole.info.url
        return self._save if isinstance(self._save, str) else self._save.url

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a load; ``checkpoint_id`` is another reference to a save, as of ``save``."""
        self._whole = None
        if checkpoint_id is not None:
            self._save = str(checkpoint_id)

    # DCP looks at the names of parameters: were there `kwargs`, it would ask again after an
    # error, for metadata of this rank alone, and hide the error in the text of another.
    def read_metadata(self, *_arguments: Any, **options: Any) -> Metadata:
        """Find the save, and read its index. Blocks on the store.

        Raises:
            NotFoundError: There is no such save, or it is not a DCP checkpoint.
            FormatError: The index is not one that DCP wrote.
            CkptTieringError: As of `Reader.resolve` and `Reader.read_ranges`.
            FileNotFoundError: Asked for the index of one rank (``rank=``).
        """
        if options.get("rank") is not None:
            raise FileNotFoundError("indexes of single ranks are not supported")
        with self._reader.keep_open():
            info = self._reader.resolve(self._save) if isinstance(self._save, str) else self._save
            whole = self._reader.load(info)
            self._directory = _find_directory(whole, self._given_prefix)
            path = self._path(METADATA_FILE)
            files = {
                entry.path: entry.size_bytes
                for node in whole.nodes
                for entry in node.files
                if entry.kind == "file"
            }
            found: list[memoryview] = []
            self._reader.read_ranges(
                whole, [ByteRange(path, 0, files[path])], lambda _, data: found.append(data)
            )
        try:
            beside = _beside(self._directory, files)
            self._metadata = load_metadata(found[0], beside)
        except FormatError as error:
            where = f"{path!r} of save {info.save_id} of {info.run}"
            raise FormatError(f"{where}: {error.message}", hint=error.hint, key=path) from error
        self._whole = whole
        if self._metadata.storage_meta is None:
            self._metadata.storage_meta = StorageMeta()
        self._metadata.storage_meta.load_id = info.save_id
        return self._metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *_arguments: Any, **_options: Any
    ) -> None:
        """Take the index that `read_metadata` returned, or what was made of it."""
        self._metadata = metadata

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Note in this rank's plan which save it is of."""
        return replace(plan, storage_data=self.checkpoint_id)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Compare the saves that the ranks found.

        Raises:
            ConfigError: They are different ones; DCP raises it on all ranks.
        """
        found = {plan.storage_data: rank for rank, plan in reversed(list(enumerate(plans)))}
        found.pop(None, None)  # a planner made that plan, and took nothing over
        if len(found) > 1:
            (first, one), (second, other) = list(found.items())[:2]
            raise ConfigError(
                f"the ranks found different saves: rank {one} {first}, rank {other} {second}",
                hint="name one: save=<its id> on all ranks",
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what a plan says into the tensors and objects that its planner knows.

        Blocks until all is there. ``planner`` is called from several threads, one at a time.

        Raises:
            IntegrityError: No tier has a good copy of something; names the object and its bytes.
            FormatError: An item is not what the index says, or an object could run code.
            CkptTieringError: As of `Reader.read_ranges`.
        """
        assert self._whole is not None, "read_metadata comes first"
        groups: dict[ByteRange, list[ReadItem]] = {}
        for item in plan.items:
            groups.setdefault(self._range_of(item), []).append(item)
        items = list(groups.values())

        def take(number: int, data: memoryview) -> None:
            self._take(items[number], data, planner)

        self.report = self._reader.read_ranges(self._whole, list(groups), take)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    # --- items -------------------------------------------------------------------------------

    def _path(self, name: str) -> str:
        return f"{self._directory}/{name}" if self._directory else name

    def _range_of(self, item: ReadItem) -> ByteRange:
        place = self._metadata.storage_data.get(item.storage_index)
        if place is None:
            index = item.storage_index
            where = f" at {tuple(index.offset)}" if index.offset is not None else ""
            raise FormatError(f"the index of {self.checkpoint_id} has no {index.fqn!r}{where}")
        start = place.offset
        return ByteRange(self._path(place.relative_path), start, start + place.length)

    def _take(self, items: Sequence[ReadItem], data: memoryview, planner: LoadPlanner) -> None:
        """Take the bytes of an item of the checkpoint, which several items of the plan may want."""
        tensor: torch.Tensor | None = None
        for item in items:
            name = item.storage_index.fqn
            if item.type is LoadItemType.BYTE_IO:
                whole = self._allow_pickle
                value = io.BytesIO(data) if whole else harmless_object(data, name)
                with self._lock:
                    planner.load_bytes(item, value)
            else:
                tensor = read_tensor(data, name) if tensor is None else tensor
                self._copy(item, tensor, planner)

    def _copy(self, item: ReadItem, stored: torch.Tensor, planner: LoadPlanner) -> None:
        name, sizes = item.storage_index.fqn, tuple(stored.size())
        wanted = list(zip(item.storage_offsets, item.lengths, strict=True))
        if len(wanted) != len(sizes) or any(
            offset < 0 or length < 0 or offset + length > size
            for (offset, length), size in zip(wanted, sizes, strict=False)
        ):
            raise FormatError(
                f"{name!r} is stored as a tensor of {sizes}, which is not what the index says"
            )
        piece = narrow_tensor_by_index(stored, item.storage_offsets, item.lengths)
        with self._lock:
            target = planner.resolve_tensor(item).detach()
        if target.size() != piece.size():
            raise CkptTieringError(
                f"{name!r}: {tuple(piece.size())} should go into {tuple(target.size())}"
            )
        target.copy_(piece)
        with self._lock:
            planner.commit_tensor(item, target)


def _beside(directory: str, files: dict[str, int]) -> dict[str, int]:
    """Return names and lengths of the files that lie in a directory itself."""
    prefix = f"{directory}/" if directory else ""
    return {
        path.removeprefix(prefix): size
        for path, size in files.items()
        if path.startswith(prefix) and "/" not in path.removeprefix(prefix)
    }


def _find_directory(whole: WholeSave, given: str | None) -> str:
    """Find the directory of a save that is a DCP checkpoint.

    Raises:
        NotFoundError: There is none, or it is not the one that was given.
        ConfigError: There are several.
    """
    info = whole.info
    files = [f for node in whole.nodes for f in node.files if f.kind == "file"]
    found = sorted(_directories(f.path for f in files))
    shown = ", ".join(repr(directory) for directory in found[:10]) or "none"
    if given is not None:
        if given.strip("/") in found:
            return given.strip("/")
        raise NotFoundError(
            f"save {info.save_id} of {info.run} has no {METADATA_FILE} in {given!r}; those that "
            f"have one: {shown}"
        )
    if not found:
        paths = ", ".join(repr(f.path) for node in whole.nodes for f in node.files[:5])
        raise NotFoundError(
            f"save {info.save_id} of {info.run} is not a DCP checkpoint: it has no "
            f"{METADATA_FILE}; it has {paths}"
        )
    if len(found) > 1:
        raise ConfigError(
            f"save {info.save_id} of {info.run} has several DCP checkpoints: {shown}",
            hint="say which one: prefix=",
        )
    return found[0]


def _directories(paths: Iterable[str]) -> set[str]:
    indexes = [PurePosixPath(path) for path in paths if path.rpartition("/")[2] == METADATA_FILE]
    return {"" if path.parent == PurePosixPath() else str(path.parent) for path in indexes}
