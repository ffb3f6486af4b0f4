"""``ckpt-tiering verify``: is what the store has still what was committed?"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from ckpt_tiering.cli.options import (
    AsJson,
    EndpointUrl,
    Profile,
    Region,
    SaveName,
    StoreArgument,
    Target,
    open_target,
    store_options,
)
from ckpt_tiering.cli.render import (
    EXIT_FINDING,
    print_json,
    print_note,
    print_text,
    progress_bar,
)
from ckpt_tiering.errors import ConfigError, ErrorKind, NotFoundError
from ckpt_tiering.model.findings import CheckedBy
from ckpt_tiering.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from ckpt_tiering.cli.render import Meter
    from ckpt_tiering.model.findings import Finding, SaveCheck
    from ckpt_tiering.model.ids import SaveId

__all__ = ["verify"]

Deep = Annotated[
    bool,
    typer.Option("--deep", help="Download and digest every byte, instead of asking the store."),
]
AllSaves = Annotated[
    bool, typer.Option("--all", help="All saves of the run, and whatever else lies beside them.")
]


def verify(  # noqa: PLR0913  an option is a parameter
    url: StoreArgument,
    save: SaveName = None,
    all_saves: AllSaves = False,
    deep: Deep = False,
    endpoint_url: EndpointUrl = None,
    region: Region = None,
    profile: Profile = None,
    as_json: AsJson = False,
) -> None:
    """Compare every object of a save with its manifest; the newest one of a run by default.

    The store is asked for sizes and, where they can be trusted, checksums. Exit code 1 if anything
    is wrong.
    """
    target = open_target(url, store_options(endpoint_url, region, profile), save=save)
    if all_saves and (save is not None or target.save_id is not None):
        raise ConfigError("--all takes the root of a run", hint=f"give {target.root} alone")
    with target.reader.keep_open(), progress_bar("verifying") as meter:
        checks, foreign = _check(target, save, all_saves=all_saves, deep=deep, meter=meter)
    findings = [f for check in checks for f in check.findings] + foreign
    if as_json:
        print_json(
            {
                "run": str(target.root),
                "deep": deep,
                "ok": not findings,
                "saves": [
                    {
                        "save_id": check.save_id,
                        "ok": not check.findings,
                        "num_objects": check.num_objects,
                        "total_bytes": check.total_bytes,
                        "checked_by": {how: check.checked_by.get(how, 0) for how in CheckedBy},
                    }
                    for check in checks
                ],
                "findings": [asdict(f) for f in findings],
            }
        )
    else:
        _print(checks, foreign)
    if findings:
        raise typer.Exit(EXIT_FINDING)


def _check(
    target: Target, save: str | None, *, all_saves: bool, deep: bool, meter: Meter
) -> tuple[list[SaveCheck], list[Finding]]:
    def look(save_id: SaveId) -> SaveCheck:
        return target.reader.verify(save_id, deep=deep, expect=meter.expect, progress=meter.advance)

    if target.save_id is not None or save not in (None, "latest"):
        save_id = target.save_id
        return [look(save_id if save_id and not save else target.pick(save).id)], []
    ids, foreign = target.reader.commits()
    checks = _each(ids, look, until_readable=not all_saves)
    if not checks and not all_saves:
        raise NotFoundError(f"no durable save below {target.root}/commits/")
    return checks, foreign if all_saves else []


def _each(
    ids: Iterable[SaveId], look: Callable[[SaveId], SaveCheck], *, until_readable: bool
) -> list[SaveCheck]:
    """Check saves in turn; ``until_readable`` ends at the one that a resume would take."""
    checks = []
    for save_id in ids:
        try:
            check = look(save_id)
        except NotFoundError as error:
            if error.kind is ErrorKind.NO_SUCH_BUCKET:
                raise
            print_note(f"save {save_id} was deleted meanwhile")
            continue
        checks.append(check)
        if until_readable and check.readable:
            break
    return checks


_HOW = {
    CheckedBy.CHECKSUM: "by the store's checksum",
    CheckedBy.READ: "by reading every byte",
    CheckedBy.SIZE: "by size only: the store's checksums can't be trusted, use --deep",
}


def _print(checks: list[SaveCheck], foreign: list[Finding]) -> None:
    for check in checks:
        if not check.readable:
            print_text(f"{check.save_id}  UNUSABLE")
            _print_findings(check.findings)
            continue
        how = "; ".join(
            f"{check.checked_by[key]} {text}"
            for key, text in _HOW.items()
            if check.checked_by.get(key)
        )
        verdict = f"{len(check.findings)} FINDINGS" if check.findings else "ok"
        size = format_bytes(check.total_bytes)
        print_text(f"{check.save_id}  {verdict}  {check.num_objects} objects, {size}")
        print_text(f"  good: {how or 'none'}")
        _print_findings(check.findings)
    _print_findings(foreign)


def _print_findings(findings: Sequence[Finding]) -> None:
    for finding in findings:
        print_text(f"  {finding.problem}: {finding.message}")
        if finding.expected is not None:
            print_text(f"    expected {finding.expected}, found {finding.found or 'nothing'}")
