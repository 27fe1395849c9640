"""Pictures of squeeze and excitation: ratios over sizes, a step before and after, bytes moved."""

import numpy as np
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from .picture import INK, LIMIT, OURS, PAPER, PEER, Picture, caption, ink_on, require_dict

_SHADES = (OURS, "#8db8de", "#e3eef8", PEER)  # dark to light; hatches tell them apart as well
_HATCHES = ("", "///", "...", "xx")
_GROUP_SHADES = ("#a3aebb", "#e3e7ec", "#c3cbd5", "#f7f8fa", "#8a97a6")
_GROUP_HATCHES = ("", "..", "\\\\", "", "--")


def speedups(sizes, series, *, goal=None, ylabel="times as fast as PyTorch", title="", device="",
             date="", alt=None):
    """Draw how many times as fast something is at each of several sizes: a group of bars for each.

    Args:
        sizes: what stands under each group.
        series: dict from a label to a list as long as `sizes`, with None where nothing is known;
            four series at most.
        goal: a number to reach, drawn as a line.
        ylabel, title, device, date: what is shown, a heading, where and when it was measured.
        alt: alternative text; by default every number.

    Raises:
        ValueError: no sizes, no series or too many, one of another length, a number that is not
            positive.
    """
    require_dict("series", series)
    sizes = [str(size) for size in sizes]
    if not sizes or not 0 < len(series) <= len(_SHADES):
        raise ValueError(f"speedups needs sizes and 1 to {len(_SHADES)} series, not {len(sizes)} "
                         f"and {len(series)}")
    for label, values in series.items():
        known = [value for value in values if value is not None]
        if len(values) != len(sizes) or not known or not min(known) > 0:
            raise ValueError(f"{label!r} must have a positive number for each of {len(sizes)} "
                             f"sizes, or None, not {values}")
    alt = alt or f"{ylabel}: " + "; ".join(
        f"{label}: " + ", ".join(
            f"{value:.2f} at {size.replace(chr(10), ' ')}"
            for size, value in zip(sizes, values, strict=True) if value is not None)
        for label, values in series.items()
    )
    figure = Picture(4.6, alt)
    axes = figure.subplots()
    width = 0.84 / len(series)
    highest = max(value for values in series.values() for value in values if value is not None)
    for number, (label, values) in enumerate(series.items()):
        places = np.arange(len(sizes)) - 0.42 + (number + 0.5) * width
        heights = [0 if value is None else value for value in values]
        axes.bar(places, heights, width=width, edgecolor=INK, linewidth=0.8, label=label,
                 facecolor=_SHADES[number], hatch=_HATCHES[number])
        for place, value in zip(places, values, strict=True):
            if value is not None:
                axes.text(place, value + 0.012 * highest, f"{value:.1f}", ha="center", va="bottom",
                          fontsize=7.5, rotation=90 if len(sizes) * len(series) > 18 else 0)
    axes.axhline(1, color=INK, linewidth=1)
    if goal is not None:
        axes.axhline(goal, color=LIMIT, linestyle="--", linewidth=2, label=f"goal: {goal:g}")
    axes.set_xticks(range(len(sizes)), sizes, fontsize=8.5)
    axes.set(ylabel=ylabel, ylim=(0, 1.15 * max(highest, goal or 0)), xlim=(-0.6, len(sizes) - 0.4))
    axes.set_xlabel("channels, and height and width of an image (pixels)")
    axes.set_title(title, loc="left", fontweight="bold")
    figure.legend(loc="outside lower center", ncols=len(series) + 1, frameon=False)
    caption(axes, device, date)
    return figure


def step_times(bars, *, highlight, unit="ms", title="", device="", date="", alt=None):
    """Draw what each of several steps takes: a bar as long as its time, made up of groups.

    Args:
        bars: dict from a label to a dict from a group to its time in `unit`; none negative.
        highlight: the group that the picture is about, drawn dark.
        unit, title, device, date: of the times; a heading; where and when it was measured.
        alt: alternative text; by default every time.

    Raises:
        ValueError: nothing to draw, or a negative time.
    """
    require_dict("bars", bars)
    if not bars or not all(bars.values()):
        raise ValueError("step_times needs at least one bar, and a group in each")
    if min(time for groups in bars.values() for time in groups.values()) < 0:
        raise ValueError(f"no time may be negative: {bars}")
    totals = {label: sum(groups.values()) for label, groups in bars.items()}
    alt = alt or "; ".join(
        f"{label}: {totals[label]:.3g} {unit}, of which " + ", ".join(
            f"{name} {time:.3g}" for name, time in groups.items())
        for label, groups in bars.items()
    )
    names = list(dict.fromkeys(name for groups in bars.values() for name in groups))
    styles = {
        name: {"facecolor": shade, "hatch": hatch}
        for name, shade, hatch in zip(
            [name for name in names if name != highlight],
            _GROUP_SHADES * len(names), _GROUP_HATCHES * len(names), strict=False)
    } | {highlight: {"facecolor": OURS, "hatch": ""}}
    figure = Picture(0.7 * len(bars) + 1.8, alt)
    axes = figure.subplots()
    longest = max(totals.values())
    for place, (label, groups) in enumerate(bars.items()):
        left = 0.0
        for name, time in groups.items():
            axes.barh(place, time, left=left, height=0.62, edgecolor=INK, **styles[name])
            if time > 0.045 * longest:
                shade = styles[name]["facecolor"]
                axes.text(left + time / 2, place, f"{time:.3g}", ha="center", va="center",
                          fontsize=9.5, color=ink_on(shade),
                          bbox={"facecolor": shade, "edgecolor": "none", "pad": 1})
            left += time
        axes.text(left + 0.01 * longest, place, f"{totals[label]:.3g}", va="center",
                  fontweight="bold")
    axes.set_yticks(range(len(bars)), list(bars))
    axes.set(ylim=(len(bars) - 0.45, -0.55), xlim=(0, 1.1 * longest),
             xlabel=f"time on the device ({unit})")
    axes.set_title(title, loc="left", fontweight="bold")
    marks = [Rectangle((0, 0), 1, 1, edgecolor=INK, **styles[name]) for name in names]
    figure.legend(marks, names, loc="outside lower center", ncols=3, frameon=False)
    caption(axes, device, date)
    return figure


def bytes_moved(rows, *, goal=None, title="", device="", date="", alt=None):
    """Draw what each kernel reads from and writes to the device's memory, in sizes of the image.

    Args:
        rows: list of dicts with `label`, `read` and `written`, in sizes of x.
        goal: what the total should not exceed, drawn as a line; the least, 2, is drawn always.
        title, device, date: as in `speedups`.
        alt: alternative text; by default every number.

    Raises:
        ValueError: no rows, or one that moves nothing or less.
    """
    rows = list(rows)
    if not rows or not min(row[key] for row in rows for key in ("read", "written")) > 0:
        raise ValueError(f"bytes_moved needs rows that read and write something, not {rows}")
    alt = alt or "Read and written, in sizes of x: " + "; ".join(
        f"{row['label']} {row['read']:.2f} + {row['written']:.2f} = "
        f"{row['read'] + row['written']:.2f}" for row in rows
    )
    styles = {"read": {"facecolor": "#cfe3f5"}, "written": {"facecolor": PEER, "hatch": "///"}}
    figure = Picture(0.5 * len(rows) + 1.8, alt)
    axes = figure.subplots()
    most = max(row["read"] + row["written"] for row in rows)
    for place, row in enumerate(rows):
        left = 0.0
        for key, style in styles.items():
            axes.barh(place, row[key], left=left, height=0.66, edgecolor=INK, **style)
            axes.text(left + row[key] / 2, place, f"{row[key]:.2f}", ha="center", va="center",
                      fontsize=9.5, bbox={"facecolor": PAPER, "edgecolor": "none", "pad": 1.2})
            left += row[key]
        axes.text(left + 0.015 * most, place, f"{left:.2f}", va="center", fontweight="bold",
                  bbox={"facecolor": PAPER, "edgecolor": "none", "pad": 1})
    lines = [("the least: read once, write once", 2, "--")]
    if goal is not None:
        lines.append((f"goal: {goal:g}", goal, ":"))
    marks = [Rectangle((0, 0), 1, 1, edgecolor=INK, **style) for style in styles.values()]
    for _, place, style in lines:
        axes.axvline(place, color=LIMIT, linestyle=style, linewidth=2, zorder=0.5)
        marks.append(Line2D([], [], color=LIMIT, linestyle=style, linewidth=2))
    axes.set_yticks(range(len(rows)), [row["label"] for row in rows])
    axes.set(ylim=(len(rows) - 0.4, -0.6), xlim=(0, 1.12 * max(most, goal or 2)),
             xlabel="bytes read from and written to device memory (sizes of x)")
    axes.set_title(title, loc="left", fontweight="bold")
    names = [*styles, *(label for label, *_ in lines)]
    figure.legend(marks, names, loc="outside lower center", ncols=4, frameon=False)
    caption(axes, device, date)
    return figure
