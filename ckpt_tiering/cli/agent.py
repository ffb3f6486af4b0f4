"""``ckpt-tiering agent``: the agent of a node in the foreground, for systemd and for sidecars."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ckpt_tiering.cli.options import AsJson, staging_path
from ckpt_tiering.cli.render import EXIT_FINDING, print_json, print_note, print_text
from ckpt_tiering.errors import AgentError

if TYPE_CHECKING:
    from ckpt_tiering.journal.rows import SaveRow
    from ckpt_tiering.model.layout import StagingLayout

__all__ = ["agent"]

Staging = Annotated[
    Path,
    typer.Option(
        "--staging",
        envvar="CKPT_TIERING_STAGING",
        help="Staging directory to serve.",
        show_default=False,
    ),
]
UntilIdle = Annotated[
    bool, typer.Option("--until-idle", help="Ship what is staged, then exit; do not stay.")
]


def agent(staging: Staging, until_idle: UntilIdle = False, as_json: AsJson = False) -> None:
    """Run the agent of a staging directory until a signal comes, or until it is done.

    A signal ends it after the parts in hand; the next agent goes on from there. Exit code 1 if
    saves that are staged here are not durable at the end.
    """
    from ckpt_tiering.agent.__main__ import lock_staging, serve, yield_to_training
    from ckpt_tiering.agent.loop import Agent
    from ckpt_tiering.model.layout import StagingLayout

    layout = StagingLayout(staging_path(staging))
    lock = lock_staging(layout)
    if lock is None:
        raise AgentError(
            f"an agent serves {layout.staging} already",
            hint=f"`ckpt-tiering status {layout.staging}` shows what it does",
        )
    try:
        yield_to_training()
        print_note(f"agent {os.getpid()} serves {layout.staging}; ^C ends it after parts in hand")
        serve(Agent(layout, until="idle" if until_idle else "stopped"), background=False)
        pending, failed = _left(layout)
    finally:
        os.close(lock)
    if as_json:
        print_json(
            {
                "staging": str(layout.staging),
                "pending": [s.save_id for s in pending],
                "failed": [s.save_id for s in failed],
            }
        )
    else:
        for save in (*pending, *failed):
            print_text(f"{save.save_id} {save.state}: {save.error or 'not durable yet'}")
    if pending or failed:
        raise typer.Exit(EXIT_FINDING)


def _left(layout: StagingLayout) -> tuple[list[SaveRow], list[SaveRow]]:
    """Return the saves that are pending, and those that failed."""
    from ckpt_tiering.agent.statuspage import PENDING_STATES
    from ckpt_tiering.journal.journal import Journal
    from ckpt_tiering.model.lifecycle import SaveState

    journal = Journal(layout.journal, read_only=True)
    try:
        return journal.saves(states=PENDING_STATES), journal.saves(states=(SaveState.FAILED,))
    finally:
        journal.close()
