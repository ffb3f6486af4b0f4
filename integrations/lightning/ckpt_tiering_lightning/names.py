"""What a checkpoint's path means: its name in the store, its file in the save, its link on disk."""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass
from pathlib import Path, PurePath, PurePosixPath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "Places",
    "SaveName",
    "is_last",
    "is_link_into",
    "is_remote",
    "is_scratch",
    "place_link",
    "tidy",
]

# Files that Lightning writes, reads back and deletes within one call: state that travels between
# processes (`ddp_spawn`) or around a trial of the tuner. They are no checkpoints.
_SCRATCH = re.compile(r"\.temp\.ckpt|\.(lr_find|scale_batch_size)_.*\.ckpt")
_LAST = re.compile(r"last(-v\d+)?\.ckpt")
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_COLLAPSED = re.compile(r"^(tier|s3):/(?=[^/])")
_MAX_LINK_NAME = 200  # of 255 bytes, so that the temporary name has room for its suffix


def is_scratch(path: str | Path) -> bool:
    """Return whether Lightning uses the file only for itself, so that it stays a local file."""
    return _SCRATCH.fullmatch(PurePosixPath(path).name) is not None


def is_last(path: str) -> bool:
    """Return whether the path is one that ``ModelCheckpoint(save_last=...)`` uses."""
    return _LAST.fullmatch(PurePosixPath(path).name) is not None


def is_remote(path: str) -> bool:
    """Return whether the path is a URL."""
    return _SCHEME.match(path) is not None


def tidy(path: str | Path) -> str:
    """Return the path as text; a URL that went through `pathlib.Path` gets its slash back."""
    return _COLLAPSED.sub(r"\1://", str(path))


@dataclass(frozen=True, slots=True)
class SaveName:
    """What a path is called in the store.

    Attributes:
        name: Name of the save, by which the path is found again on another node.
        file: Path of the file within the save.
    """

    name: str
    file: str


@dataclass(frozen=True, slots=True)
class Places:
    """Directories that a run's checkpoint paths are relative to.

    Attributes:
        root: The trainer's ``default_root_dir``; None for the current directory.
        dirpaths: Directories of the checkpoint callbacks.
    """

    root: str | None = None
    dirpaths: tuple[str, ...] = ()

    def name_of(self, path: str) -> SaveName:
        """Return what ``path`` is called in the store.

        The name is the path relative to the root if it lies there, so that it does not depend on
        where a node keeps the run; otherwise the whole path without its leading slash. The file is
        the path relative to the callback's directory, so that names with ``/`` keep their form;
        otherwise its last component.
        """
        place = _place_of(path)
        directories = [_directory(d) for d in self.dirpaths if is_remote(d) == is_remote(path)]
        roots = [] if is_remote(path) else [_directory(self.root or ".")]
        return SaveName(
            name=_below_nearest(place, roots) or str(place).lstrip("/"),
            file=_below_nearest(place, directories) or place.name,
        )


def _place_of(path: str) -> PurePath:
    if is_remote(path):
        return PurePosixPath("/", path.split("://", 1)[1])
    # The directory may be reached through links, but the last component can be a link of ours.
    absolute = Path(path).absolute()
    return absolute.parent.resolve() / absolute.name


def _directory(path: str) -> PurePath:
    return _place_of(path) if is_remote(path) else Path(path).resolve()


def _below_nearest(path: PurePath, directories: Iterable[PurePath]) -> str | None:
    found = [str(path.relative_to(d)) for d in directories if path.is_relative_to(d)]
    return min(found, key=len, default=None)


def is_link_into(path: str, staging: Path) -> bool:
    """Return whether ``path`` is a link, or a link to a link, to a staged file, there or not."""
    link = Path(path)
    return link.is_symlink() and link.resolve().is_relative_to(staging.resolve())


def place_link(path: str, target: Path) -> None:
    """Make ``path`` a link to ``target`` in one step, replacing the file that is there.

    Raises:
        OSError: The directory can't be written, or ``path`` is a directory.
    """
    link = Path(path).absolute()
    link.parent.mkdir(parents=True, exist_ok=True)
    short = link.name.encode()[:_MAX_LINK_NAME].decode(errors="ignore")
    temporary = link.with_name(f".{short}.{uuid.uuid4().hex[:8]}.link")
    temporary.symlink_to(target)
    try:
        temporary.replace(link)
    except OSError:
        temporary.unlink()
        raise
