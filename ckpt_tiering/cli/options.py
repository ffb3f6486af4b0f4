"""Arguments and options that several commands share, and what they become."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ckpt_tiering.errors import ConfigError

if TYPE_CHECKING:
    from ckpt_tiering.config import StoreOptions
    from ckpt_tiering.model.catalog import SaveInfo
    from ckpt_tiering.model.ids import SaveId
    from ckpt_tiering.model.layout import StoreUrl
    from ckpt_tiering.reader import Reader

__all__ = [
    "AsJson",
    "EndpointUrl",
    "Profile",
    "Region",
    "SaveName",
    "StoreArgument",
    "Target",
    "open_target",
    "staging_path",
    "store_options",
]

StoreArgument = Annotated[
    str,
    typer.Argument(
        metavar="URL",
        help="s3://bucket/run: the root of a run; or a save in it, .../commits/<id>.json.",
        show_default=False,
    ),
]
EndpointUrl = Annotated[
    str | None,
    typer.Option(
        "--endpoint-url",
        envvar="CKPT_TIERING_ENDPOINT_URL",
        help="Address of an S3-compatible server; AWS_ENDPOINT_URL works as well.",
        show_default=False,
    ),
]
Region = Annotated[
    str | None,
    typer.Option(
        "--region",
        envvar="CKPT_TIERING_REGION",
        help="Region of the bucket; AWS_DEFAULT_REGION and profiles work as well.",
        show_default=False,
    ),
]
Profile = Annotated[
    str | None,
    typer.Option(
        "--profile",
        envvar="CKPT_TIERING_PROFILE",
        help="Profile of the shared credentials file; AWS_PROFILE works as well.",
        show_default=False,
    ),
]
SaveName = Annotated[
    str | None,
    typer.Option(
        "--save",
        metavar="latest|ID|NAME",
        help="Which save of the run; the newest by default.",
        show_default=False,
    ),
]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print JSON to stdout; docs/cli-json.md has the fields.")
]


def store_options(
    endpoint_url: str | None, region: str | None, profile: str | None
) -> StoreOptions:
    """Check how to reach the store.

    Raises:
        ConfigError: An option is not valid.
    """
    from pydantic import ValidationError

    from ckpt_tiering.config import StoreOptions

    try:
        return StoreOptions(endpoint_url=endpoint_url, region=region, profile=profile)
    except ValidationError as error:
        why = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise ConfigError(why) from error


def staging_path(staging: Path) -> Path:
    """Return a staging directory as the agent and the trainers know it."""
    return staging.expanduser().absolute()


@dataclass(frozen=True, slots=True)
class Target:
    """What a URL on the command line points to.

    Attributes:
        root: Root of the run.
        save_id: The save that the URL names; None if it names the run.
        reader: Reads the run.
    """

    root: StoreUrl
    save_id: SaveId | None
    reader: Reader

    def pick(self, name: str | None) -> SaveInfo:
        """Find one save: the URL's own, the one of a name or id, or the newest.

        Raises:
            ConfigError: The URL names a save already.
            NotFoundError: There is no such save.
        """
        if self.save_id is None:
            return self.reader.resolve(name or "latest")
        if name is not None:
            raise ConfigError(
                f"the URL names save {self.save_id} already, and --save another",
                hint=f"give the root {self.root}, or leave --save out",
            )
        return self.reader.resolve(str(self.save_id))


def open_target(
    url: str, options: StoreOptions, *, save: str | None = None, staging: Path | None = None
) -> Target:
    """Read a URL of the command line. Makes no request.

    Args:
        url: Root of a run, or something of a save in it.
        options: How to reach the store.
        save: What ``--save`` said.
        staging: Staging directory whose copies are used; None for none.

    Raises:
        ConfigError: The URL is not one that can be read.
    """
    from ckpt_tiering.model.layout import StagingLayout, StoreUrl
    from ckpt_tiering.reader import Reader

    for text in (url, save or ""):
        if text.startswith("tier://"):
            raise ConfigError(
                f"{text!r} names a save of the store that a job is configured with; there is no "
                "job here",
                hint="give the store, s3://bucket/run, and --save unless you want the newest",
            )
    if save and "://" in save:
        raise ConfigError("--save takes an id or a name", hint="give a URL as the argument")
    root, save_id = StoreUrl.parse(url).split_save()
    layout = None if staging is None else StagingLayout(staging_path(staging))
    return Target(root, save_id, Reader(root, options, layout=layout))
