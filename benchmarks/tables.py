"""The tables on the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

from benchmarks.verdicts import by_size

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import Console

    from benchmarks.summary import Summary
    from benchmarks.verdicts import Verdict

__all__ = ["COLUMNS", "cells", "print_tables"]

COLUMNS = (
    "variant", "n", "first stall s", "stall s [min-max]", "lost s", "durable s [min-max]",
    "steps", "p99", "CPU s/GB", "peak x", "fds", "foreign", "server",
)  # fmt: skip


def cells(summary: Summary) -> tuple[str, ...]:
    """Return the figures of a row, as text."""
    stall, durable = summary.stall_s, summary.durable_s
    inflation = "-" if summary.inflation is None else f"{summary.inflation:+.0%}"
    p99 = "-" if summary.p99_ms is None else f"{summary.p99_ms / summary.baseline_p99_ms:.2f} x"
    return (
        summary.variant,
        f"{summary.num_saves}/{summary.num_processes}",
        f"{summary.first_stall_s:.3f}",
        f"{stall.median:.3f} [{stall.least:.3f}-{stall.most:.3f}]",
        f"{summary.lost_s:.3f}",
        f"{durable.median:.2f} [{durable.least:.2f}-{durable.most:.2f}]",
        inflation,
        p99,
        f"{summary.cpu_s_per_gb:.2f}",
        f"{summary.peak_bytes / summary.state_bytes:.2f}",
        str(summary.fds),
        f"{summary.foreign_cpus:.2f}",
        f"{summary.server_cpu_s_per_gb:.2f}",
    )


def print_tables(console: Console, found: Iterable[Summary], checked: Iterable[Verdict]) -> None:
    """Print a table of figures for each size, and one of verdicts."""
    for size, group in by_size(found).items():
        table = Table(title=f"{size}: medians of saves after the first")
        for column in COLUMNS:
            table.add_column(column, justify="left" if column == "variant" else "right")
        for summary in sorted(group.values(), key=lambda s: s.lost_s):
            table.add_row(*cells(summary))
        console.print(table)
    table = Table(title="Bounds")
    for column in ("size", "variant", "bound", "measured", "limit", "ratio", "verdict"):
        table.add_column(column)
    for verdict in checked:
        limit = "-" if verdict.limit is None else f"{verdict.limit:.3f}"
        table.add_row(
            verdict.size, verdict.variant, verdict.bound, f"{verdict.value:.3f}", limit,
            verdict.note, verdict.answer,
        )  # fmt: skip
    if table.row_count:
        console.print(table)
