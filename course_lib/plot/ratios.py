"""The picture of all results: how many times as long as the fastest peer, case by case."""

import numpy as np
from matplotlib.lines import Line2D

from .picture import INK, LIMIT, OURS, PEER, Picture, caption

_GOLDEN = 0.6180339887  # steps of it fill a row evenly, without chance
_TICKS = [0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50]


def ratios(groups, *, title="", device="", date="", alt=None):
    """Draw every case as a dot: our time ÷ the fastest peer's, on a logarithmic axis.

    What is slower than the peer lies right of the line at 1, as a light diamond; what is faster is
    a dark circle. At the end of each row stands how many are slower, and the worst.

    Args:
        groups: {label: the ratios of its cases}, drawn from top to bottom.
        title: heading of the picture.
        device, date: where and when this was measured, for the line underneath.
        alt: alternative text; by default the range of every row.

    Raises:
        ValueError: no rows, an empty row, or a ratio that is not positive.
    """
    if not groups or not all(len(row) and min(row) > 0 for row in groups.values()):
        raise ValueError("every row needs ratios, all of them positive")
    alt = alt or "Our time in times of the fastest peer's: " + "; ".join(
        f"{label} {min(row):.2f} to {max(row):.2f}, {sum(r > 1 for r in row)} of {len(row)} slower"
        for label, row in groups.items()
    )
    figure = Picture(0.29 * len(groups) + 1.5, alt)
    axes = figure.subplots()
    for place, row in enumerate(groups.values()):
        if place % 2:
            axes.axhspan(place - 0.5, place + 0.5, color="0.96", zorder=0)
        _dots(axes, place, np.sort(np.asarray(row, dtype=float)))
    axes.axvline(1, color=LIMIT, linewidth=1.6, zorder=1)
    every = [ratio for row in groups.values() for ratio in row]
    low, high = min(0.8, *every) / 1.25, max(1.25, *every) * 1.25
    ticks = [tick for tick in _TICKS if low <= tick <= high]
    axes.set(xscale="log", xlim=(low, high), ylim=(len(groups) - 0.4, -0.6),
             xlabel="our time ÷ the fastest peer's, on a logarithmic axis")
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.grid(axis="x", alpha=0.35)
    axes.set_yticks(range(len(groups)), groups)
    axes.tick_params(axis="y", length=0)
    ends = axes.twinx()
    ends.set(ylim=axes.get_ylim())
    ends.set_yticks(range(len(groups)), [_end(row) for row in groups.values()])
    ends.tick_params(axis="y", length=0)
    for side in ("top", "left", "right"):
        axes.spines[side].set_visible(False)
        ends.spines[side].set_visible(False)
    axes.set_title(title, loc="left", fontweight="bold")
    marks = [
        Line2D([], [], marker="o", color=OURS, linestyle="none", markersize=6),
        Line2D([], [], marker="D", color=PEER, markeredgecolor=INK, linestyle="none", markersize=6),
        Line2D([], [], color=LIMIT, linewidth=1.6),
    ]
    figure.legend(marks, ["ours is faster", "ours is slower", "as fast as the fastest peer"],
                  loc="outside upper right", ncols=3, frameon=False)
    caption(axes, device, date)
    return figure


def _dots(axes, place, row):
    """The cases of one row, spread over its height so that all are seen."""
    y = place + (np.arange(len(row)) * _GOLDEN % 1 - 0.5) * (0.66 if len(row) > 3 else 0)
    won = row <= 1
    axes.scatter(row[won], y[won], s=16, color=OURS, alpha=0.55, linewidths=0, zorder=2)
    axes.scatter(row[~won], y[~won], s=24, marker="D", facecolor=PEER, edgecolor=INK,
                 linewidths=0.8, zorder=3)


def _end(row):
    slower = sum(ratio > 1 for ratio in row)
    if not slower:
        return f"none of {len(row)} slower"
    return f"{slower} of {len(row)} slower, at worst {max(row):.2f}×"
