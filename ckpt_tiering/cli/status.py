"""``ckpt-tiering status``: what a staging directory holds, and whether its agent lives.

Asks nobody: it reads the status page, and the journal without writing to it, so it works with the
agent dead, and does not disturb one that lives.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckpt_tiering.cli.options import AsJson, staging_path
from ckpt_tiering.cli.render import (
    EXIT_FINDING,
    print_json,
    print_table,
    print_text,
    show_age,
    show_name,
    show_time,
)
from ckpt_tiering.clock import SystemClock
from ckpt_tiering.errors import ConfigError
from ckpt_tiering.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from ckpt_tiering.agent.view import AgentView, SaveView, StagingView

__all__ = ["status"]

StagingArgument = Annotated[
    Path,
    typer.Argument(
        metavar="STAGING_DIR",
        envvar="CKPT_TIERING_STAGING",
        help="Staging directory of this node.",
        show_default=False,
    ),
]
NumEvents = Annotated[
    int, typer.Option("--events", metavar="N", min=0, help="Also the last N events.")
]


def status(staging: StagingArgument, events: NumEvents = 0, as_json: AsJson = False) -> None:
    """Show whether the agent of this node lives, and what is staged, failed and durable.

    Exit code 1 if a save failed or can't go on, or if saves are pending and no agent works on them.
    """
    from ckpt_tiering.agent.view import last_events, view
    from ckpt_tiering.model.layout import StagingLayout

    layout = StagingLayout(staging_path(staging))
    if not layout.staging.is_dir():
        raise ConfigError(
            f"there is no directory {layout.staging}",
            hint="give the staging directory that the job on this node was configured with",
        )
    seen = view(layout, SystemClock())
    happened = last_events(layout, events)
    if as_json:
        answer = seen.as_json()
        if events:
            answer["events"] = happened
        print_json(answer)
    else:
        _print_agent(seen.agent)
        _print_saves(seen)
        _print_wishes(seen)
        _print_events(happened)
        for finding in seen.findings:
            print_text(f"! {finding.message}")
    if seen.findings:
        raise typer.Exit(EXIT_FINDING)


def _print_agent(agent: AgentView) -> None:
    if agent.state == "none":
        print_text("agent      never ran here")
        return
    age = "before this boot" if agent.heartbeat_age_s is None else _ago(agent.heartbeat_age_s)
    print_text(f"agent      {agent.state}: pid {agent.pid}, last sign {age}")
    print_text(
        f"           sent {format_bytes(agent.sent_bytes or 0)}, {agent.retries} retries, "
        f"throttled for {format_seconds(agent.throttled_s or 0.0)}"
    )


def _ago(seconds: float) -> str:
    return f"{format_seconds(max(0.0, seconds))} ago"


def _print_saves(seen: StagingView) -> None:
    for run in seen.runs:
        print_text(f"\nrun        {run.run}")
        newest = run.durable[0] if run.durable else None
        if newest is None:
            print_text("durable    nothing yet")
        else:
            print_text(
                f"durable    step {newest.step}, save {newest.save_id}, "
                f"since {show_time(newest.durable_at)}"
            )
        if run.pending or run.failed:
            print_table(
                ("save", ">step", "name", "state", ">sent", ">of", ">staged for", "error"),
                [_row(save, seen.now) for save in (*run.pending, *run.failed)],
            )


def _row(save: SaveView, now: float) -> tuple[str, ...]:
    return (
        save.save_id,
        str(save.step),
        show_name(save.name),
        save.state,
        format_bytes(save.sent_bytes) if save.sent_bytes is not None else "-",
        format_bytes(save.total_bytes),
        show_age(now - save.staged_at),
        (save.error or "").partition("\n")[0],
    )


def _print_wishes(seen: StagingView) -> None:
    if seen.removals:
        print_text("\nto be removed, once something newer is durable:")
    for wish in seen.removals:
        what = f"save {wish.save_id}" if wish.save_id else f"saves named {show_name(wish.name)}"
        pinned = " (pinned: the run was resumed from it)" if wish.pinned else ""
        print_text(f"  {what} of {wish.run}{pinned}")


def _print_events(events: list[dict[str, Any]]) -> None:
    if events:
        print_text("\nevents:")
    for event in events:
        known = ("at", "kind", "seq")
        rest = "  ".join(f"{k}={show_name(str(v))}" for k, v in event.items() if k not in known)
        at = event.get("at")
        time = show_time(at if isinstance(at, int | float) else None)
        print_text(f"  {time}  {event.get('kind', '?')}  {rest}")
