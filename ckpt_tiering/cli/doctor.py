"""``ckpt-tiering doctor``: can this store, and this node, do what is needed?"""

from __future__ import annotations

import os
import tempfile
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ckpt_tiering.cli.options import (
    AsJson,
    EndpointUrl,
    Profile,
    Region,
    StoreArgument,
    open_target,
    staging_path,
    store_options,
)
from ckpt_tiering.cli.render import EXIT_FINDING, print_json, print_table, print_text
from ckpt_tiering.clock import SystemClock
from ckpt_tiering.errors import ConfigError, CredentialError, NotFoundError, TransientError
from ckpt_tiering.observe.redact import redact
from ckpt_tiering.units import GIB, format_bytes

if TYPE_CHECKING:
    from ckpt_tiering.config import StoreOptions
    from ckpt_tiering.errors import CkptTieringError
    from ckpt_tiering.model.layout import StoreUrl
    from ckpt_tiering.stores.base import Capabilities

__all__ = ["doctor"]

TRIES = 3
AGREES_WITHIN_S = 2.0  # the store says whole seconds, and its answer takes a while
MAX_CLOCK_OFFSET_S = 60.0  # Amazon refuses requests from 15 minutes on
MIN_FREE_BYTES = GIB

Staging = Annotated[
    Path | None,
    typer.Option(
        "--staging", help="Also check a staging directory of this node.", show_default=False
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Check:
    """One line of the answer; ``lost`` says what does not work if it is not ok."""

    check: str
    ok: bool
    needed: bool
    detail: str
    lost: str = ""


def doctor(
    url: StoreArgument,
    staging: Staging = None,
    endpoint_url: EndpointUrl = None,
    region: Region = None,
    profile: Profile = None,
    as_json: AsJson = False,
) -> None:
    """Find out what a store really does, with throw-away keys that are deleted afterwards.

    Exit code 1 if checkpoints can't be stored and restored there.
    """
    options = store_options(endpoint_url, region, profile)
    root = open_target(url, options).root
    checks, capabilities = _check_store(root, options)
    if staging is not None:
        checks += _check_staging(staging_path(staging))
    durability = None
    if capabilities is not None:
        durability = "checksum" if capabilities.checks_crc64nvme else "read-back"
    ok = all(check.ok for check in checks if check.needed)
    if as_json:
        print_json(
            {
                "url": str(root),
                "ok": ok,
                "durability": durability,
                "capabilities": None if capabilities is None else asdict(capabilities),
                "checks": [{**asdict(c), "detail": redact(c.detail)} for c in checks],
            }
        )
    else:
        _print(root, checks, durability, ok=ok)
    if not ok:
        raise typer.Exit(EXIT_FINDING)


def _check_store(root: StoreUrl, options: StoreOptions) -> tuple[list[_Check], Capabilities | None]:
    from ckpt_tiering.model.ids import new_incarnation
    from ckpt_tiering.stores.opening import open_store
    from ckpt_tiering.stores.probe import NEEDED, probe

    clock = SystemClock()
    for tries_left in reversed(range(TRIES)):
        try:
            with closing(open_store(root, options)) as store:
                report = probe(store, new_incarnation(clock.now()))
        except TransientError as error:
            if not tries_left:
                return [_unreachable(error)], None
        except (CredentialError, NotFoundError, ConfigError) as error:
            return [_unreachable(error), *_check_clock(root, options)], None
        else:
            checks = [
                _Check(
                    check=f.check, ok=f.ok, needed=f.check in NEEDED, detail=f.detail, lost=f.lost
                )
                for f in report.findings
            ]
            return checks + _check_clock(root, options), (
                report.capabilities if report.usable else None
            )
    raise AssertionError("the last try returns")


def _unreachable(error: CkptTieringError) -> _Check:
    detail = error.message + (f"; {error.hint}" if error.hint else "")
    return _Check(check="reach", ok=False, needed=True, detail=detail, lost="nothing works")


def _check_clock(root: StoreUrl, options: StoreOptions) -> list[_Check]:
    if root.scheme != "s3":
        return []
    from ckpt_tiering.stores.server_clock import clock_offset

    offset_s = clock_offset(root, options, SystemClock())
    if offset_s is None:
        return []
    ok = abs(offset_s) <= MAX_CLOCK_OFFSET_S
    return [
        _Check(
            check="clock",
            ok=ok,
            needed=False,
            detail="agrees with the store's"
            if abs(offset_s) < AGREES_WITHIN_S
            else f"{offset_s:+.0f} s against the store's",
            lost="" if ok else "requests are refused when clocks are 15 minutes apart",
        )
    ]


def _check_staging(staging: Path) -> list[_Check]:
    from ckpt_tiering.fsio import ensure_local_filesystem, free_bytes

    where = staging
    while not where.exists():
        where = where.parent
    note = "" if where == staging else f" (it is not there yet; checked {where})"
    checks = []
    try:
        ensure_local_filesystem(where)
        local, why = True, f"a local file system{note}"
    except ConfigError as error:
        local, why = False, error.message
    lost = "no agent starts: its journal needs a disk of the node"
    checks.append(_staging_check("staging_local", why, lost, ok=local))
    writable, why = _try_to_write(where)
    checks.append(
        _staging_check("staging_writable", why + note, "nothing can be staged", ok=writable)
    )
    free = free_bytes(where)
    lost = f"less than {format_bytes(MIN_FREE_BYTES)}: checkpoints may not fit"
    checks.append(
        _staging_check(
            "staging_free",
            format_bytes(free),
            lost,
            ok=free >= MIN_FREE_BYTES,
            needed=False,
        )
    )
    if where == staging and staging.is_dir():
        status = staging.stat()
        mine = status.st_uid == os.geteuid()
        private = mine and not status.st_mode & 0o077
        why = f"mode {status.st_mode & 0o777:03o}" + ("" if mine else ", owned by somebody else")
        lost = "others on this node can get at staged checkpoints"
        checks.append(_staging_check("staging_private", why, lost, ok=private, needed=False))
    return checks


def _staging_check(check: str, detail: str, lost: str, *, ok: bool, needed: bool = True) -> _Check:
    return _Check(check=check, ok=ok, needed=needed, detail=detail, lost="" if ok else lost)


def _try_to_write(directory: Path) -> tuple[bool, str]:
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(b"ckpt-tiering")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return False, error.strerror or str(error)
    return True, "takes a file"


def _print(root: StoreUrl, checks: list[_Check], durability: str | None, *, ok: bool) -> None:
    print_table(
        ("check", "", "seen", "lost"),
        [
            (
                c.check,
                "ok" if c.ok else ("MISSING" if c.needed else "no"),
                redact(c.detail),
                c.lost,
            )
            for c in checks
        ],
    )
    print_text()
    if not ok:
        print_text(f"{root} can't be used: see what is MISSING")
    elif durability is not None:
        print_text(f"{root} can be used; durable means compared by: {durability}")
