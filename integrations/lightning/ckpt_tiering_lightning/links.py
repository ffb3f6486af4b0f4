"""A checkpoint's path on disk: a link to what is staged, or a directory of such links.

A sharded checkpoint is a directory to which every rank of a node adds the links of its own files,
so what is here is safe to do on all of them at the same time.
"""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_tiering_lightning.names import is_link_into, place_link

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["add_links", "is_staged", "staged_files", "unlink_staged"]

log = logging.getLogger(__name__)


def is_staged(path: str, staging: Path) -> bool:
    """Return whether ``path`` leads to a staged file, or to a directory of links to such files."""
    return is_link_into(path, staging) or bool(staged_files(path, staging))


def staged_files(path: str, staging: Path) -> list[str]:
    """Return the names of the links to staged files in a directory; none if it is no directory."""
    directory = Path(path)
    if not directory.is_dir():
        return []
    return sorted(entry.name for entry in directory.iterdir() if is_link_into(str(entry), staging))


def add_links(path: str, targets: Mapping[str, Path]) -> None:
    """Make ``path`` a directory that has a link to each target, by name.

    What is not possible is only logged: the checkpoint itself is safe, and more than what depends
    on its path is at stake.
    """
    directory = Path(path).absolute()
    try:
        if directory.is_symlink() or directory.is_file():
            # A link to another checkpoint, or a file of an earlier run. Another rank of this node
            # may have seen the same and be done, and a directory is not unlinked.
            with contextlib.suppress(OSError):
                directory.unlink()
        directory.mkdir(parents=True, exist_ok=True)
        for name, target in targets.items():
            place_link(str(directory / name), target)
    except OSError as error:
        log.warning("%s can't have links to the staged checkpoint: %s", path, error)


def unlink_staged(
    path: str, staging: Path, *, wanted: Callable[[str], bool] = lambda _: True
) -> None:
    """Remove a link to a staged file, or such links from a directory; the directory, once empty.

    Args:
        path: The link or the directory. It may be gone already.
        staging: Directory that the links lead to.
        wanted: Tells by name which of a directory's links to remove.
    """
    place = Path(path)
    if place.is_symlink():
        place.unlink(missing_ok=True)
        return
    names = [name for name in staged_files(path, staging) if wanted(name)]
    for name in names:
        (place / name).unlink(missing_ok=True)
    if names:
        with contextlib.suppress(OSError):  # other files are in there, or it is gone already
            place.rmdir()
