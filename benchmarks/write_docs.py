"""Writes ``docs/benchmarks.md`` from results."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks.registry import VARIANTS
from benchmarks.tables import COLUMNS, cells
from benchmarks.verdicts import BEST_RIVAL, FLOOR, by_size, losses
from ckpt_tiering.units import GIB

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from benchmarks.summary import Summary
    from benchmarks.verdicts import Verdict

__all__ = ["write_docs"]

HEAD = """# Benchmarks

Written by `make bench ARGS="--report <results> --write-docs"`; do not edit. How it is measured:
[benchmarks/README.md](../benchmarks/README.md).
"""
NOISY_CPUS = 0.3
MOST_LOSSES = 40


def write_docs(
    document: Path,
    lines: Sequence[dict[str, Any]],
    found: Sequence[Summary],
    checked: Sequence[Verdict],
) -> None:
    """Write the document anew."""
    parts = [HEAD, _machine(lines), _bounds(checked)]
    parts += [_size(size, list(group.values())) for size, group in by_size(found).items()]
    parts += [_where_we_lose(found, checked), _not_measured(lines), _variants(found)]
    document.write_text("\n".join(parts))


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    return "\n".join([*head, *(f"| {' | '.join(row)} |" for row in rows)]) + "\n"


def _machine(lines: Sequence[dict[str, Any]]) -> str:
    run = next(line for line in lines if line["kind"] == "run")
    processes = [line for line in lines if line["kind"] == "process"]
    versions = processes[0]["versions"] if processes else {}
    rate = run["rate_bytes_per_s"]
    link = "not limited" if rate is None else f"of {rate / 1e6:.0f} MB/s"
    hardware = f"{run['cores']} x {run['cpu']}, {run['memory_bytes'] / GIB:.0f} GiB"
    return f"""- Date: {run["date"]}
- Machine: {hardware}, {run["disk"]}, Linux {run["kernel"]}; no GPU used
- Versions: {", ".join(f"{name} {version}" for name, version in versions.items())}
- Run: {run["repeats"]} processes of each variant and size, each with a first save and
  {run["saves"]} more; order shuffled with seed {run["seed"]}; link {link}
"""


def _bounds(checked: Sequence[Verdict]) -> str:
    rows = [
        (v.size, f"`{v.variant}`", v.bound, f"{v.value:.3f}",
         "-" if v.limit is None else f"{v.limit:.3f}", v.note, v.answer)
        for v in checked
    ]  # fmt: skip
    columns = ("state", "variant", "bound", "measured", "limit", "ratio", "verdict")
    return "## Bounds\n\n" + _table(columns, rows)


def _size(size: str, group: list[Summary]) -> str:
    ordered = sorted(group, key=lambda s: s.lost_s)
    text = f"## {size}\n\n{_table(COLUMNS, [cells(s) for s in ordered])}"
    for base in (FLOOR, BEST_RIVAL):
        other = next((s for s in group if s.variant == base), None)
        if other is not None:
            text += f"\nAs multiples of `{base}`:\n\n{_multiples(ordered, other)}"
    return text


def _multiples(group: list[Summary], other: Summary) -> str:
    def of(mine: float, theirs: float) -> str:
        return f"{mine / theirs:.2f} x" if theirs > 0 else "-"

    rows = [
        (
            s.variant,
            of(s.first_stall_s, other.first_stall_s),
            of(s.stall_s.median, other.stall_s.median),
            of(s.lost_s, other.lost_s),
            of(s.durable_s.median, other.durable_s.median),
            of(s.cpu_s_per_gb, other.cpu_s_per_gb),
            of(s.peak_bytes, other.peak_bytes),
        )
        for s in group
    ]
    return _table(("variant", "first stall", "stall", "lost", "durable", "CPU", "peak"), rows)


def _where_we_lose(found: Sequence[Summary], checked: Sequence[Verdict]) -> str:
    failed = [
        f"- {v.size}, `{v.variant}`: {v.bound}: measured {v.value:.3f}, limit {v.limit:.3f}"
        for v in checked
        if v.limit is not None and v.answer != "pass"
    ]
    lost = losses(found)
    rows = [
        (
            loss.size, f"`{loss.rival}`", VARIANTS[loss.rival].to, loss.what,
            f"{loss.ours:.3f}", f"{loss.theirs:.3f}", f"{loss.ratio:.2f} x",
        )
        for loss in lost[:MOST_LOSSES]
    ]  # fmt: skip
    noisy = [f"{s.size} {s.variant}" for s in found if s.foreign_cpus >= NOISY_CPUS]
    parts = ["## Where we lose\n", *(["Bounds that are not met:\n", *failed, ""] if failed else [])]
    if rows:
        columns = ("state", "rival", "delivers to", "figure", "ours", "theirs", "ours / theirs")
        more = f", the worst {MOST_LOSSES} of {len(lost)}" if len(lost) > MOST_LOSSES else ""
        parts.append(
            f"Figures of rivals that are better than ours by more than 3 %{more}. What is on a "
            "local disk only is gone with its node.\n"
        )
        parts.append(_table(columns, rows))
    else:
        parts.append("Nowhere in these results.\n")
    if noisy:
        parts.append(f"Rows with {NOISY_CPUS} or more foreign cores: {', '.join(noisy)}.\n")
    return "\n".join(parts)


def _not_measured(lines: Sequence[dict[str, Any]]) -> str:
    kinds = {"skipped", "failed"}
    rows = sorted(
        {
            (f"`{line['variant']}`", line["size"] if line["kind"] == "failed" else "all",
             line["kind"], line["reason"].replace("|", "/"))
            for line in lines
            if line["kind"] in kinds
        }
    )  # fmt: skip
    if not rows:
        return "## Not measured\n\nNothing that was asked for.\n"
    return "## Not measured\n\n" + _table(("variant", "state", "what", "why"), rows)


def _variants(found: Sequence[Summary]) -> str:
    seen = dict.fromkeys(summary.variant for summary in found)
    rows = [(f"`{name}`", VARIANTS[name].to, VARIANTS[name].what) for name in seen]
    return "## Variants\n\n" + _table(("name", "delivers to", "what"), rows)
