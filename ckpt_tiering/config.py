"""One validated configuration. Constructor arguments beat `CKPT_TIERING_*`, which beat a file."""

from __future__ import annotations

import difflib
import os
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from ckpt_tiering.errors import ConfigError
from ckpt_tiering.model.layout import StoreUrl
from ckpt_tiering.model.parts import MAX_PART_BYTES, MIN_PART_BYTES
from ckpt_tiering.units import MIB, parse_bytes, parse_seconds

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pydantic_core import ErrorDetails

__all__ = ["StagingMode", "StoreOptions", "TieringConfig", "load_config"]

ENV_PREFIX = "CKPT_TIERING_"
ENV_FILE = ENV_PREFIX + "CONFIG"

Bytes = Annotated[int, BeforeValidator(parse_bytes)]
Seconds = Annotated[float, BeforeValidator(parse_seconds)]


def _absolute(path: Any) -> Any:
    if path == "":
        raise ValueError("staging is empty; give a directory on a node-local disk")
    return Path(path).expanduser().absolute() if isinstance(path, str | Path) else path


def _without_secret(address: str | None) -> str | None:
    if address and "@" in address:
        raise ValueError("endpoint_url holds credentials; give them as AWS_* variables")
    return address


def _store_url(url: str) -> str:
    StoreUrl.parse(url)
    return url


StagingMode = Literal["auto", "memory", "disk"]


class StoreOptions(BaseModel):
    """How to reach a store: what boto3 calls by the same names. Never holds a secret.

    Attributes:
        endpoint_url: Address of an S3-compatible server; None for Amazon's.
        region: Region of the bucket; None for boto3's own search.
        profile: Profile of the shared credentials file; None for boto3's own search.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    endpoint_url: Annotated[str | None, AfterValidator(_without_secret)] = None
    region: str | None = None
    profile: str | None = None


class TieringConfig(StoreOptions):
    """Everything that can be configured.

    Attributes:
        store: Root of the run, ``s3://bucket/path``.
        staging: Directory on a node-local disk (NVMe). Shared by the ranks of a node, and by runs
            that follow one another.
        staging_mode: ``memory``: the step loop pays one copy of the state into shared memory, and
            the agent writes it to NVMe. ``disk``: it is written in the step loop. ``auto``: memory
            where there is room for it.
        part_bytes: Length of the parts of multipart uploads; raised by itself for huge files.
        concurrency: Number of requests that the agent keeps in flight. The upload holds at most
            this many windows of 1 MiB in memory.
        max_bandwidth: Bytes per second that the uploads of this node may use; None for no limit.
        nvme_budget: Bytes that staged checkpoints may take. Durable ones are evicted first, oldest
            first. None for 80 % of what is free at start.
        drain_timeout: Seconds that the end of training waits for staged saves to become durable.
            What is staged goes on in the agent afterwards.
        linger: Seconds that the agent goes on with staged saves after its last trainer is gone.
        resume_wait: Seconds that a resume waits for saves that are staged on this node but not
            yet durable, before it takes the newest durable one.
        on_failure: ``raise`` raises at the next save when an earlier one failed for good; ``warn``
            logs it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    store: Annotated[str, AfterValidator(_store_url)]
    staging: Annotated[Path, BeforeValidator(_absolute)]
    staging_mode: StagingMode = "auto"
    part_bytes: Bytes = Field(default=128 * MIB, ge=MIN_PART_BYTES, le=MAX_PART_BYTES)
    concurrency: int = Field(default=4, ge=1, le=64)
    max_bandwidth: Bytes | None = Field(default=None, ge=MIB)
    nvme_budget: Bytes | None = Field(default=None, ge=MIB)
    drain_timeout: Seconds = Field(default=600.0, ge=0)
    linger: Seconds = Field(default=3600.0, ge=0)
    resume_wait: Seconds = Field(default=60.0, ge=0)
    on_failure: Literal["warn", "raise"] = "warn"

    @model_validator(mode="after")
    def _agrees(self) -> TieringConfig:
        if self.endpoint_url and self.url.scheme != "s3":
            raise ValueError(f"endpoint_url has no effect on a {self.url.scheme}:// store")
        return self

    @property
    def url(self) -> StoreUrl:
        """Root of the run, parsed."""
        return StoreUrl.parse(self.store)

    @property
    def store_options(self) -> StoreOptions:
        """The part of the configuration that a store needs."""
        return StoreOptions(
            endpoint_url=self.endpoint_url, region=self.region, profile=self.profile
        )


def _unknown(name: str, where: str) -> str:
    near = difflib.get_close_matches(name, TieringConfig.model_fields, n=1)
    known = ", ".join(TieringConfig.model_fields)
    advice = f"did you mean {near[0]!r}?" if near else f"the options are {known}"
    return f"unknown option {name!r} {where}: {advice}"


def _from_file(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"configuration file {path} can't be read: {why}") from error
    try:
        values = tomllib.loads(text) if path.suffix == ".toml" else yaml.safe_load(text)
    except (tomllib.TOMLDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"configuration file {path} is not valid: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"configuration file {path} holds no options")
    section = values.get("ckpt_tiering", values)
    if not isinstance(section, dict):
        raise ConfigError(f"section 'ckpt_tiering' of {path} holds no options")
    return section


def _from_environment(environ: Mapping[str, str]) -> dict[str, str]:
    return {
        variable.removeprefix(ENV_PREFIX).lower(): value
        for variable, value in environ.items()
        if variable.startswith(ENV_PREFIX) and variable != ENV_FILE
    }


def load_config(environ: Mapping[str, str] | None = None, **arguments: Any) -> TieringConfig:
    """Build the configuration from arguments, environment and file, in this order of precedence.

    Args:
        environ: Environment to read ``CKPT_TIERING_*`` from; the process's own by default.
            ``CKPT_TIERING_CONFIG`` names a YAML or TOML file, whose section ``ckpt_tiering`` is
            used if it has one.
        **arguments: Fields of `TieringConfig`; None means not given.

    Raises:
        ConfigError: An option is unknown, has a bad value, or contradicts another; the message
            lists all of them.
    """
    environ = os.environ if environ is None else environ
    file = environ.get(ENV_FILE)
    sources: list[tuple[str, dict[str, Any]]] = [
        (f"in {file}", _from_file(Path(file)) if file else {}),
        ("in the environment", _from_environment(environ)),
        ("as an argument", {k: v for k, v in arguments.items() if v is not None}),
    ]
    values: dict[str, Any] = {}
    problems = []
    for where, options in sources:
        problems += [_unknown(n, where) for n in options if n not in TieringConfig.model_fields]
        values |= {n: v for n, v in options.items() if n in TieringConfig.model_fields}
    try:
        config = TieringConfig(**values)
    except ValidationError as error:
        problems += map(_problem, error.errors())
        raise _invalid(problems) from error
    if problems:
        raise _invalid(problems)
    return config


def _problem(details: ErrorDetails) -> str:
    where = ".".join(map(str, details["loc"])) or "configuration"
    message = details["msg"].removeprefix("Value error, ").replace("\n  hint: ", "; ")
    # What our own checks refuse may hold a secret; they say themselves what they saw.
    own = details["type"] in {"missing", "value_error"}
    return f"{where}: {message}" + ("" if own else f" (got {details['input']!r})")


def _invalid(problems: list[str]) -> ConfigError:
    return ConfigError(f"the configuration is not valid: {'; '.join(problems)}")
