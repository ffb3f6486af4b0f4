"""The entry point of ``ckpt-tiering``: one command a file, errors without tracebacks."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from ckpt_tiering import __version__
from ckpt_tiering.cli import agent, doctor, ls, restore, show, status, verify
from ckpt_tiering.cli.render import EXIT_ERROR, log_to_stderr, print_error
from ckpt_tiering.errors import CkptTieringError

__all__ = ["app", "main"]


class _Commands(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        """Run a command. Errors of ours are answers; others keep their traceback."""
        try:
            return super().invoke(ctx)
        except CkptTieringError as error:
            print_error(error)
            raise typer.Exit(EXIT_ERROR) from error


app = typer.Typer(
    name="ckpt-tiering",
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("ls")(ls.ls)
app.command("show")(show.show)
app.command("verify")(verify.verify)
app.command("restore")(restore.restore)
app.command("pull", help="The same as restore.")(restore.restore)
app.command("status")(status.status)
app.command("doctor")(doctor.doctor)
app.command("agent")(agent.agent)


def _print_version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"ckpt-tiering {__version__}\n")
        raise typer.Exit


@app.callback()
def ckpt_tiering(
    version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_print_version, help="Print the version."
        ),
    ] = False,
) -> None:
    """Look at, verify and restore checkpoints of ckpt-tiering, and the agent that ships them.

    Exit code: 0 all is well, 1 something was found to be wrong, 2 wrong usage or an error.
    """


def main() -> None:
    """Run the command line."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    log_to_stderr()
    app()
