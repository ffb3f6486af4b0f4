"""Draws the demo: what became of each checkpoint, and how far durability trailed training."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes

    from ckpt_tiering.agent.protocol import SaveStatus
    from examples.quickstart.node import Record
    from examples.quickstart.story import Tale

__all__ = ["draw"]

INK, FAINT = "#1f2933", "#9aa5b1"
STAGE, WAIT, UPLOAD, COMMIT = "#f5a623", "#dfe5ec", "#3b82c4", "#2f9e63"
_NODES = ("#f7f9fb", "#eef4fa")
BAD, GOOD = "#d64545", "#2f9e63"
HALO = [withStroke(linewidth=3, foreground=_NODES[0])]  # keeps text legible across lines
_BAR = 0.56


@dataclass(frozen=True, slots=True)
class _Row:
    """A save as the drawing shows it; times in seconds since the beginning."""

    label: str
    save: SaveStatus
    end: float  # when its node was lost, or its bar ends anyhow
    y: float


def draw(tale: Tale, path: Path) -> None:
    """Draw the timeline of a tale into a PNG file."""
    assert tale.first is not None
    assert tale.second is not None
    origin = min(loss.at for loss in tale.first.losses[0].values())
    figure = Figure(figsize=(12, 7.8), dpi=130, facecolor="white")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(
        2, 1, sharex=True, gridspec_kw={"height_ratios": [1.4, 1], "hspace": 0.08}
    )
    end = (max(s.durable_at or 0.0 for s in tale.second.saves.values()) - origin) * 1.17
    for axes in (above, below):
        _dress(axes, tale, origin, end)
    _draw_saves(above, tale, origin)
    _name_moments(above, tale, origin, end)
    _draw_lag(below, tale, origin)
    title = "Every checkpoint on its way into the bucket"
    above.set_title(title, loc="left", color=INK, fontsize=15, pad=52)
    _explain(above)
    figure.savefig(path, bbox_inches="tight", pad_inches=0.25)


def _dress(axes: Axes, tale: Tale, origin: float, end: float) -> None:
    """Give an axis the background that both share: the nodes, and the moments of disaster."""
    lost = tale.lost_at - origin
    killed, restarted = tale.killed_at - origin, tale.restarted_at - origin
    axes.set_xlim(-0.6, end)
    axes.axvspan(-0.6, lost, color=_NODES[0], zorder=0, lw=0)
    axes.axvspan(lost, end, color=_NODES[1], zorder=0, lw=0)
    axes.axvspan(killed, restarted, color=BAD, alpha=0.10, zorder=1, lw=0)
    for at, color in ((killed, BAD), (restarted, GOOD), (lost, BAD)):
        axes.axvline(at, color=color, lw=1.4, zorder=2.5, ls=(0, (4, 2)))
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)
    axes.tick_params(colors=INK, length=0)
    axes.grid(axis="x", color="white", lw=1.2, zorder=1)


def _name_moments(axes: Axes, tale: Tale, origin: float, end: float) -> None:
    moments = [
        ("agent killed", tale.killed_at, BAD, "right"),
        ("restarted", tale.restarted_at, GOOD, "left"),
        ("node lost", tale.lost_at, BAD, "left"),
    ]
    for text, at, color, side in moments:
        axes.annotate(
            text, (at - origin, 1), xycoords=axes.get_xaxis_transform(), color=color, ha=side,
            xytext=(-3 if side == "right" else 3, 4), textcoords="offset points",
            fontsize=10, fontweight="bold",
        )  # fmt: skip
    lost = tale.lost_at - origin
    for text, at, height, up in (
        ("node-1", lost, 0, "bottom"),
        ("node-2, an empty disk", end, 1, "top"),
    ):
        axes.annotate(
            text, (at, height), xycoords=axes.get_xaxis_transform(), color=FAINT, ha="right",
            va=up, xytext=(-6, 6 - 12 * height), textcoords="offset points", fontsize=12,
        )  # fmt: skip


def _draw_saves(axes: Axes, tale: Tale, origin: float) -> None:
    rows = _rows(tale)
    for row in rows:
        _draw_save(axes, row, tale, origin)
    axes.set_yticks([row.y for row in rows], [row.label for row in rows])
    axes.set_ylim(max(row.y for row in rows) + 0.7, -0.75)


def _rows(tale: Tale) -> list[_Row]:
    rows: list[_Row] = []
    for record, end in ((tale.first, tale.lost_at), (tale.second, float("inf"))):
        assert record is not None
        for save in record.saves.values():
            gap = 0.35 if record is tale.second else 0.0
            rows.append(_Row(f"step {save.step}", save, end, len(rows) + gap))
    return rows


def _draw_save(axes: Axes, row: _Row, tale: Tale, origin: float) -> None:
    save = row.save
    times = [save.snapshot_at, save.staged_at, save.started_at, save.uploaded_at, save.durable_at]
    for (start, stop), color in zip(
        itertools.pairwise(times), (STAGE, WAIT, UPLOAD, COMMIT), strict=True
    ):
        if start is not None:
            until = row.end if stop is None else stop
            axes.barh(row.y, until - start, _BAR, left=start - origin, color=color, zorder=3, lw=0)
    if save.step == tale.killed_step and save.started_at is not None:
        axes.barh(
            row.y, tale.restarted_at - tale.killed_at, _BAR, left=tale.killed_at - origin,
            facecolor="white", edgecolor=BAD, hatch="////", lw=0, zorder=3.5, alpha=0.85,
        )  # fmt: skip
    last = times[-1]
    at = (row.end if last is None else last) - origin
    if last is None:
        axes.plot(at, row.y, "X", color=BAD, ms=10, mec="white", zorder=5)
        label, color = "lost with the node", BAD
    else:
        axes.plot(at, row.y, "o", color=COMMIT, ms=9, mec="white", mew=1.2, zorder=5)
        label, color = f"durable after {last - save.snapshot_at:.1f} s", INK
    axes.annotate(
        label, (at, row.y), xytext=(9, 0), textcoords="offset points", va="center", color=color,
        fontsize=9, zorder=6, path_effects=HALO,
    )  # fmt: skip


def _draw_lag(axes: Axes, tale: Tale, origin: float) -> None:
    """Draw the step that training is at, the newest durable step, and the gap between them."""
    restored = 0
    for record, end in ((tale.first, tale.lost_at), (tale.second, None)):
        assert record is not None
        _draw_lag_of(axes, record, origin, end, restored)
        restored = tale.resumed_step
    _draw_cost(axes, tale, origin)
    axes.set_ylabel("training step", color=INK, fontsize=10)
    axes.set_ylim(-2, None)
    axes.set_xlabel("seconds since the first training step on node-1", color=INK, fontsize=10)
    axes.legend(
        handles=[
            Line2D([], [], color=INK, lw=2, label="step of training"),
            Line2D([], [], color=COMMIT, lw=2, label="newest durable step"),
            Patch(color=UPLOAD, alpha=0.16, label="durable lag: what a loss would cost"),
        ],
        loc="lower right", frameon=False, fontsize=9.5, labelcolor=INK,
    )  # fmt: skip


def _draw_cost(axes: Axes, tale: Tale, origin: float) -> None:
    """Say how much training the loss of the node cost."""
    assert tale.first is not None
    trained = max(tale.first.losses[0]) + 1
    at = tale.lost_at - origin
    middle = (trained + tale.resumed_step) / 2
    axes.vlines(at, tale.resumed_step, trained, color=BAD, lw=5, zorder=4)
    axes.annotate(
        f"{trained - tale.resumed_step} steps are\ntrained again", (at, middle), xytext=(9, 0),
        textcoords="offset points", color=BAD, va="center", fontsize=9.5,
    )  # fmt: skip


def _draw_lag_of(
    axes: Axes, record: Record, origin: float, end: float | None, durable: int
) -> None:
    moments = [(loss.at, step + 1, 0) for step, loss in record.losses[0].items()]
    moments += [(s.durable_at, 0, s.step) for s in record.saves.values() if s.durable_at]
    moments.sort()
    first = min(record.losses[0])
    at, trained, safe = [moments[0][0] - origin], [first], [durable]
    for when, step, saved in moments:
        at.append(when - origin)
        trained.append(max(trained[-1], step))
        safe.append(max(safe[-1], saved))
    if end is not None:
        at.append(end - origin)
        trained.append(trained[-1])
        safe.append(safe[-1])
    axes.fill_between(at, trained, safe, step="post", color=UPLOAD, alpha=0.16, lw=0, zorder=2)
    axes.step(at, trained, where="post", color=INK, lw=2, zorder=3)
    axes.step(at, safe, where="post", color=COMMIT, lw=2, zorder=3)


def _explain(axes: Axes) -> None:
    handles = [
        Patch(color=STAGE, label="snapshot and staging on NVMe: training waits"),
        Patch(color=WAIT, label="staged, waiting its turn"),
        Patch(color=UPLOAD, label="upload"),
        Patch(facecolor="white", edgecolor=BAD, hatch="////", lw=0, label="no agent"),
        Patch(color=COMMIT, label="verify and commit"),
    ]
    axes.legend(
        handles=handles, loc="lower left", bbox_to_anchor=(-0.005, 1.085), ncols=5, frameon=False,
        fontsize=9.5, labelcolor=INK, handlelength=1.4, columnspacing=1.6, borderaxespad=0,
    )  # fmt: skip
