"""How commands print: JSON or tables to stdout, everything else to stderr, nothing unescaped.

Names, errors and whole files may come from a bucket that others write to. What is printed holds no
control characters, and nothing of it is taken for markup.
"""

from __future__ import annotations

import json
import logging
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from ckpt_tiering.observe.redact import redact
from ckpt_tiering.units import format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ckpt_tiering.errors import CkptTieringError

__all__ = [
    "EXIT_ERROR",
    "EXIT_FINDING",
    "Meter",
    "log_to_stderr",
    "plain",
    "print_error",
    "print_json",
    "print_note",
    "print_table",
    "print_text",
    "progress_bar",
    "show_age",
    "show_name",
    "show_time",
]

EXIT_FINDING = 1
EXIT_ERROR = 2
_WIDE = 100_000  # a table in a pipe is never cut or folded
_DAY_S = 86_400


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def plain(text: str) -> str:
    """Return a sentence with everything escaped that is not printable; lines stay lines."""
    return "".join(c if c.isprintable() or c == "\n" else _escape(c) for c in text)


def show_name(name: str | None) -> str:
    """Return a name so that no two names look the same: the backslash is escaped, too."""
    if name is None:
        return "-"
    return "".join(c if c.isprintable() and c != "\\" else _escape(c) for c in name)


def show_time(at: float | None) -> str:
    """Return a time, given in seconds since the epoch, in UTC."""
    if at is None:
        return "-"
    try:
        return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
    except (ValueError, OverflowError, OSError):
        return "out of range"  # a manifest may say anything


def show_age(seconds: float) -> str:
    """Return how long ago something was, in one unit or two."""
    if seconds < 0:
        return "in the future"
    if seconds < 2 * 3600:
        return format_seconds(seconds)
    if seconds < 2 * _DAY_S:
        return f"{seconds / 3600:.0f} h"
    return f"{seconds / _DAY_S:.0f} d"


def print_json(value: Any) -> None:
    """Print the answer of a command as JSON: ASCII only, so a terminal takes no harm."""
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


def print_text(text: str = "") -> None:
    """Print lines of the answer of a command."""
    sys.stdout.write(plain(text) + "\n")


def print_note(text: str) -> None:
    """Print something for a person beside the answer."""
    sys.stderr.write(plain(redact(text)) + "\n")


def print_error(error: CkptTieringError) -> None:
    """Print an error of ours without a traceback: it says what happened, and what to do."""
    print_note(f"error: {error.message}")
    if error.hint:
        print_note(f"hint: {error.hint}")


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table; headings that start with ``>`` are those of right-aligned columns."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    is_terminal = sys.stdout.isatty()
    table = Table(box=box.SIMPLE_HEAD if is_terminal else None, pad_edge=False)
    for heading in headings:
        table.add_column(
            Text(heading.removeprefix(">")),
            justify="right" if heading.startswith(">") else "left",
            overflow="fold",
            no_wrap=heading == "save",  # an id is there to be copied
        )
    for row in rows:
        table.add_row(*(Text(plain(cell)) for cell in row))
    console = Console(file=sys.stdout, markup=False, width=None if is_terminal else _WIDE)
    if is_terminal:
        console.print(table)
        return
    with console.capture() as captured:
        console.print(table)
    for line in captured.get().splitlines():
        sys.stdout.write(line.rstrip() + "\n")


@dataclass(frozen=True, slots=True)
class Meter:
    """A progress bar, or the lack of one. Both calls may come from any thread.

    Attributes:
        expect: Takes the number of bytes that there are more to come than was known.
        advance: Takes the number of bytes that were done.
    """

    expect: Callable[[int], None] = lambda _: None
    advance: Callable[[int], None] = lambda _: None


@contextmanager
def progress_bar(what: str) -> Iterator[Meter]:
    """Show a progress bar on stderr, if that is a terminal."""
    if not sys.stderr.isatty():
        yield Meter()
        return
    from rich import progress
    from rich.console import Console

    columns = (
        progress.TextColumn("{task.description}", markup=False),
        progress.BarColumn(),
        progress.DownloadColumn(binary_units=True),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    )
    total = 0
    console = Console(stderr=True)
    with progress.Progress(*columns, console=console, redirect_stdout=False) as bars:
        task = bars.add_task(plain(what), total=None)

        def expect(num_bytes: int) -> None:
            nonlocal total
            total += num_bytes
            bars.update(task, total=total)

        yield Meter(expect, lambda num_bytes: bars.advance(task, num_bytes))


class _StderrHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        print_note(f"{record.levelname.lower()}: {record.getMessage()}")


def log_to_stderr() -> None:
    """Show what the package logs: warnings, and each time that a request is sent again."""
    logger = logging.getLogger("ckpt_tiering")
    logger.addHandler(_StderrHandler())
    logger.propagate = False
    logging.getLogger("ckpt_tiering.reader").setLevel(logging.INFO)
