"""Which checkpoint a reference means. Asked on rank 0 only; all ranks take its answer."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from ckpt_tiering.errors import ErrorKind, NotFoundError, WaitTimeoutError
from ckpt_tiering_lightning.links import is_staged
from ckpt_tiering_lightning.names import is_last, is_remote

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckpt_tiering.api import SaveInfo, TieredCheckpointer
    from ckpt_tiering_lightning.names import Places

__all__ = ["LATEST", "Found", "OrdinaryFile", "StagedLink", "locate", "newest", "reference_to"]

LATEST = "tier://latest"
_SCHEME = "tier://"
_OURS = "s3://"
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OrdinaryFile:
    """A file that Lightning can load by itself.

    Attributes:
        path: Where it is, as it was asked for.
    """

    path: str


@dataclass(frozen=True, slots=True)
class StagedLink:
    """A link to a file, or a directory of links, that is staged here and not durable yet.

    Attributes:
        path: The link, or the directory.
        is_directory: Which of them it is, on rank 0.
    """

    path: str
    is_directory: bool = False


Found: TypeAlias = "SaveInfo | StagedLink | OrdinaryFile"


def reference_to(save: SaveInfo) -> str:
    """Return the text by which `locate` finds the save, on any node."""
    return f"{_SCHEME}{save.save_id}"


def locate(
    checkpointer: TieredCheckpointer,
    reference: str,
    places: Places,
    staged: Mapping[str, str],
) -> Found:
    """Find the checkpoint that ``reference`` means.

    Blocks on the store, and up to `resume_wait` while the agent finishes what is staged here.

    Args:
        checkpointer: Whose saves to look among.
        reference: ``tier://latest``, ``tier://<save id>``, an ``s3://`` URL, or a path that a
            checkpoint was or would have been saved to.
        places: What paths are relative to.
        staged: Save ids of what this process has staged, by name.

    Raises:
        NotFoundError: There is no such checkpoint; says what was looked for and where.
        CkptTieringError: The store can't be asked.
    """
    if reference == LATEST:
        found = newest(checkpointer)
        if found is None:
            raise NotFoundError(
                f"no checkpoint is durable in {checkpointer.config.store}",
                hint="leave ckpt_path away to start from scratch",
            )
        return found
    if reference.startswith(_SCHEME):
        return checkpointer.resolve(reference)
    if is_remote(reference):
        return _locate_url(checkpointer, reference, places)
    return _locate_path(checkpointer, reference, places, staged)


def newest(checkpointer: TieredCheckpointer) -> SaveInfo | None:
    """Return the newest durable save that training can go on from; None if there is none.

    A save of weights only is passed over as long as there is one with the whole state.

    Raises:
        WaitTimeoutError: Nothing is durable yet, but something is staged here and did not become
            durable in time. Starting from scratch now would lose it.
    """
    settled = checkpointer.settle_pending()
    latest = checkpointer.latest()
    if latest is None and not settled:
        raise WaitTimeoutError(
            f"{_pending(checkpointer)} staged in {checkpointer.config.staging} and not durable yet,"
            f" and {checkpointer.config.store} holds no checkpoint to resume from instead",
            hint="raise resume_wait, or look at `ckpt-tiering status` for what keeps the agent",
        )
    if latest is not None and not settled:
        log.warning(
            "resuming from step %d, the newest durable checkpoint; %s still on their way",
            latest.step,
            _pending(checkpointer),
        )
    if latest is not None and latest.metadata.get("weights_only"):
        whole = (s for s in checkpointer.saves() if not s.metadata.get("weights_only"))
        return next(whole, latest)
    return latest


def _pending(checkpointer: TieredCheckpointer) -> str:
    ids = [str(save.save_id) for save in checkpointer.status().pending]
    return f"{len(ids)} saves ({', '.join(ids)}) are"


def _resolve(checkpointer: TieredCheckpointer, reference: str) -> SaveInfo | None:
    try:
        return checkpointer.resolve(reference)
    except NotFoundError as error:
        if error.kind is not ErrorKind.NOT_FOUND:
            raise  # there is no such bucket: nothing was looked for
        return None


def _locate_url(checkpointer: TieredCheckpointer, url: str, places: Places) -> Found:
    if url.startswith(_OURS) and (found := _resolve(checkpointer, url)):
        return found
    # The `dirpath` of a ModelCheckpoint can be a URL: its saves are in our store, by that name.
    checkpointer.settle_pending()
    found = _resolve(checkpointer, places.name_of(url).name)
    if found is None and url.startswith(_OURS):
        raise NotFoundError(
            f"{url} is neither a run nor a save in a store,"
            f" nor the name of a save in {checkpointer.config.store}",
            hint=f"`ckpt-tiering ls {url}` shows what is there",
        )
    return found or OrdinaryFile(url)


def _locate_path(
    checkpointer: TieredCheckpointer, path: str, places: Places, staged: Mapping[str, str]
) -> Found:
    config = checkpointer.config
    there = Path(path).exists()
    if there and not is_staged(path, config.staging):
        return OrdinaryFile(path)
    name = places.name_of(path).name
    checkpointer.settle_pending()
    found = _resolve(checkpointer, name)
    if found is None and not Path(path).is_absolute():
        # Not below this process's directory, but perhaps the end of the path it was saved under.
        found = _resolve(checkpointer, path)
    newest_staged = staged.get(name) if there else None
    if found and found.name == name and newest_staged in {None, found.save_id}:
        return found
    if there:
        log.warning("%s is staged but not durable: loading the staged copy", path)
        return StagedLink(path, Path(path).is_dir())
    if found is None and is_last(path):
        # `save_last="link"` makes a link to the newest checkpoint, which is no save of its own.
        found = newest(checkpointer)
    if found is None:
        raise NotFoundError(
            f"checkpoint {path} is neither on this disk, nor in {config.staging},"
            f" nor as {name!r} in {config.store}",
            hint=f"`ckpt-tiering ls {config.store}` shows what is there",
        )
    log.warning("%s is not on this node: taking %s, saved as %s", path, found.url, found.name)
    return found
