"""``ckpt-tiering ls``: which durable saves there are."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ckpt_tiering.cli.options import (
    AsJson,
    EndpointUrl,
    Profile,
    Region,
    StoreArgument,
    open_target,
    store_options,
)
from ckpt_tiering.cli.render import (
    print_json,
    print_note,
    print_table,
    show_age,
    show_name,
    show_time,
)
from ckpt_tiering.clock import SystemClock
from ckpt_tiering.units import format_bytes

if TYPE_CHECKING:
    from ckpt_tiering.model.catalog import SaveInfo

__all__ = ["ls", "save_fields"]


def save_fields(save: SaveInfo) -> dict[str, Any]:
    """Return what ``--json`` says of a save."""
    return {**asdict(save), "url": save.url}


def ls(
    url: StoreArgument,
    endpoint_url: EndpointUrl = None,
    region: Region = None,
    profile: Profile = None,
    as_json: AsJson = False,
) -> None:
    """List all durable saves of a run, newest first."""
    target = open_target(url, store_options(endpoint_url, region, profile))
    catalog = target.reader.catalog()
    for finding in catalog.unusable:
        print_note(f"warning: {finding.message}")
    if as_json:
        print_json(
            {
                "run": str(target.root),
                "saves": [save_fields(s) for s in catalog.saves],
                "unusable": [
                    {"problem": f.problem, "key": f.key, "save_id": f.save_id, "message": f.message}
                    for f in catalog.unusable
                ],
            }
        )
        return
    if not catalog.saves:
        print_note(f"no durable saves below {target.root}/commits/")
        return
    now = SystemClock().now()
    print_table(
        ("save", ">step", "name", ">age", "date", ">size", ">files", ">nodes", "verified"),
        [
            (
                s.save_id,
                str(s.step),
                show_name(s.name),
                show_age(now - s.snapshot_at),
                show_time(s.snapshot_at),
                format_bytes(s.total_bytes),
                str(s.num_files),
                str(s.num_nodes),
                s.verified,
            )
            for s in catalog.saves
        ],
    )
