"""The plot: stall, lost seconds and time to durable of each variant."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from benchmarks.verdicts import by_size

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from benchmarks.summary import Summary

__all__ = ["draw"]

OURS, OTHERS = "#d1495b", "#30638e"
ROW_INCHES = 3.2


def draw(found: Iterable[Summary], path: Path) -> None:
    """Draw a row of three charts for each size into a PNG file."""
    groups = by_size(found)
    if not groups:
        return
    importlib.import_module("matplotlib").use("Agg")
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    figure, axes = pyplot.subplots(
        len(groups), 3, figsize=(13, ROW_INCHES * len(groups)), squeeze=False, layout="constrained"
    )
    for row, (size, group) in zip(axes, groups.items(), strict=True):
        ordered = sorted(group.values(), key=lambda s: s.lost_s, reverse=True)
        charts = (
            ("stall, s", [s.stall_s.median for s in ordered]),
            ("lost per save, s", [s.lost_s for s in ordered]),
            ("time to durable, s", [s.durable_s.median for s in ordered]),
        )
        for axis, (title, values) in zip(row, charts, strict=True):
            colours = [OURS if s.variant.startswith("ours") else OTHERS for s in ordered]
            bars = axis.barh([s.variant for s in ordered], values, color=colours)
            axis.bar_label(bars, fmt="%.3f", padding=3, fontsize=8)
            axis.set_title(f"{size}: {title}", fontsize=10)
            axis.margins(x=0.18)
            axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
