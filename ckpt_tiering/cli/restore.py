"""``ckpt-tiering restore`` and ``pull``: a save, or some of its files, into a directory."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ckpt_tiering.cli.ls import save_fields
from ckpt_tiering.cli.options import (
    AsJson,
    EndpointUrl,
    Profile,
    Region,
    SaveName,
    StoreArgument,
    open_target,
    store_options,
)
from ckpt_tiering.cli.render import print_json, print_text, progress_bar, show_name
from ckpt_tiering.errors import CapacityError, CkptTieringError, ConfigError, NotFoundError
from ckpt_tiering.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckpt_tiering.pipeline.resolve import WholeSave

__all__ = ["restore"]

Directory = Annotated[
    Path, typer.Argument(metavar="DIR", help="Where the files go.", show_default=False)
]
Paths = Annotated[
    list[str] | None,
    typer.Option(
        "--path", help="Only this file, or what is below this directory; may be repeated."
    ),
]
Force = Annotated[
    bool,
    typer.Option("--force", help="DIR may have files; those of the same names are replaced."),
]
Staging = Annotated[
    Path | None,
    typer.Option(
        "--staging",
        help="Staging directory of this node: good copies in it are not downloaded.",
        show_default=False,
    ),
]


def restore(  # noqa: PLR0913  an option is a parameter
    url: StoreArgument,
    directory: Directory,
    save: SaveName = None,
    path: Paths = None,
    force: Force = False,
    staging: Staging = None,
    endpoint_url: EndpointUrl = None,
    region: Region = None,
    profile: Profile = None,
    as_json: AsJson = False,
) -> None:
    """Bring the files of a save into a directory; the newest save of a run by default.

    Every byte is compared with the digests taken when it was saved.
    """
    options = store_options(endpoint_url, region, profile)
    target = open_target(url, options, save=save, staging=staging)
    _check_directory(directory, force=force)
    wanted = _Wanted(path or ())
    with target.reader.keep_open():
        info = target.pick(save)
        size_bytes = wanted.check(target.reader.load(info))
        try:
            with progress_bar("restoring") as meter:
                meter.expect(size_bytes)
                report = target.reader.restore(
                    info, directory.absolute(), wanted=wanted, progress=meter.advance
                )
        except OSError as error:
            if isinstance(error, CkptTieringError):
                raise
            raise _disk_error(error, directory) from error
    num_files = report.from_nvme + report.from_store
    if as_json:
        print_json(
            {
                "save": save_fields(info),
                "directory": str(directory.absolute()),
                "num_files": num_files,
                "total_bytes": size_bytes,
                "from_nvme": report.from_nvme,
                "from_store": report.from_store,
                "downloaded_bytes": report.downloaded_bytes,
                "quarantined": report.quarantined,
            }
        )
        return
    print_text(
        f"restored save {info.save_id} (step {info.step}) into {show_name(str(directory))}: "
        f"{format_bytes(size_bytes)} in {num_files} files, {report.from_nvme} of them from NVMe"
    )
    for copy in report.quarantined:
        print_text(f"  a bad copy was set aside: {show_name(copy)}")


class _Wanted:
    """Tells which paths are wanted: all if none were named."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = [p.rstrip("/") for p in paths]

    def __call__(self, path: str) -> bool:
        return not self._paths or any(_is_in(path, p) for p in self._paths)

    def check(self, whole: WholeSave) -> int:
        """Return the bytes of what is wanted.

        Raises:
            NotFoundError: The save has nothing of a name that was given.
        """
        entries = [f for node in whole.nodes for f in node.files]
        for path in self._paths:
            if not any(_is_in(f.path, path) for f in entries):
                raise NotFoundError(
                    f"save {whole.info.save_id} has no {path!r}",
                    hint=f"`ckpt-tiering show --files {whole.info.url}` lists what it has",
                )
        return sum(f.size_bytes for f in entries if self(f.path))


def _is_in(path: str, directory: str) -> bool:
    return path == directory or path.startswith(directory + "/")


def _check_directory(directory: Path, *, force: bool) -> None:
    try:
        if any(directory.iterdir()) and not force:
            raise ConfigError(
                f"{directory} is not empty",
                hint="give another directory, or --force to replace files of the same names",
            )
    except FileNotFoundError:
        return
    except OSError as error:
        if isinstance(error, CkptTieringError):
            raise
        raise _disk_error(error, directory) from error


def _disk_error(error: OSError, directory: Path) -> CkptTieringError:
    message = f"{error.filename or directory}: {error.strerror or error}"
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return CapacityError(message, hint="free space, or restore somewhere else")
    return ConfigError(message, hint="give a directory that can be written to")
