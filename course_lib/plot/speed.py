"""Pictures of speed: bandwidth ladders, durations, the roofline, what happened when."""

import numpy as np
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from .picture import INK, LIMIT, OURS, PAPER, PEER, Picture, caption, ink_on

_MARKS = "ovs^DP*X"  # told apart without colour


def ladder(rows, copy_gbps, *, limit="a copy", title="", device="", date="", alt=None):
    """Draw one bar of GB/s per rung and per peer, with the copy's bandwidth as the limit.

    Args:
        rows: list of dicts with `label`, `kind` (`"ours"` or `"peer"`), `gbps`, and where known
            `microseconds` with `quartiles` (two numbers), drawn as a whisker; a `note`, a few words
            on what is new on this rung, stands under its label.
        copy_gbps: bandwidth of an equally large copy on the same device, in GB/s.
        limit: what was measured as the limit, where it is not a copy: "reading alone".
        title: heading of the picture.
        device, date: where and when this was measured, for the line underneath.
        alt: alternative text; by default all labels with their numbers.

    Raises:
        ValueError: no rows, a limit that is not positive, or an unknown kind.
    """
    rows = _rows(rows, "ladder")
    if not copy_gbps > 0:
        raise ValueError(f"copy_gbps must be positive, not {copy_gbps}")
    alt = alt or f"Bandwidth, where {limit} reaches {copy_gbps:,.0f} GB/s: " + ", ".join(
        f"{row['label']} {row['gbps']:,.0f} GB/s" for row in rows
    )
    figure = Picture((0.5 if any(row.get("note") for row in rows) else 0.42) * len(rows) + 1.8, alt)
    axes = figure.subplots()
    widest = 0.0  # of the whiskers, in GB/s
    for place, row in enumerate(rows):
        axes.barh(place, row["gbps"], height=0.7, **_bar_style(row))
        end = row["gbps"]
        if row.get("quartiles") and row.get("microseconds"):
            whisker = [row["gbps"] * row["microseconds"] / time for time in row["quartiles"]]
            axes.plot(whisker, [place, place], color=INK, linewidth=1.5, marker="|")
            end = max(end, *whisker)
            widest = max(widest, abs(whisker[0] - whisker[1]))
        value = f"{row['gbps']:,.0f} ({row['gbps'] / copy_gbps:.0%})"
        axes.text(end + copy_gbps * 0.012, place, value, va="center",
                  bbox={"facecolor": PAPER, "edgecolor": "none", "pad": 1})
    axes.axvline(copy_gbps, color=LIMIT, linestyle="--", linewidth=2, zorder=0.5)
    axes.set_xlim(0, 1.22 * max(copy_gbps, *(row["gbps"] for row in rows)))
    axes.set_xlabel("useful bytes per second (GB/s; in brackets: share of the limit)")
    _name_bars(axes, rows, title)
    line = Line2D([], [], color=LIMIT, linestyle="--", linewidth=2)
    more = [(line, f"limit: {limit}, {copy_gbps:,.0f} GB/s")]
    if widest > 0.004 * axes.get_xlim()[1]:  # else it is a dot, of which nobody asks
        whisker = Line2D([], [], color=INK, linewidth=1.5, marker="|")
        more.append((whisker, "the middle half of all measurements"))
    _legend_of_kinds(figure, rows, more)
    caption(axes, device, date)
    return figure


def sweep(x, rows, *, xlabel, ylabel="share of a copy's bandwidth (%)", title="", device="",
          date="", alt=None):
    """Draw how each rung and each peer fares as a size grows: a line each, over a logarithmic axis.

    Args:
        x: the sizes, positive and rising.
        rows: list of dicts with `label`, `kind` (`"ours"` or `"peer"`) and `percent`, a list as
            long as `x`, with None where nothing was measured. 100 is drawn as the limit.
        xlabel, ylabel: what the axes mean.
        title, device, date, alt: as in `ladder`.

    Raises:
        ValueError: no rows, an unknown kind, a list of another length than `x`, or sizes that are
            not positive and rising.
    """
    x, rows = list(x), _rows(rows, "sweep")
    if not x or x[0] <= 0 or any(a >= b for a, b in zip(x, x[1:], strict=False)):
        raise ValueError(f"sizes must be positive and rising, not {x}")
    for row in rows:
        if len(row["percent"]) != len(x):
            raise ValueError(
                f"{row['label']!r} has {len(row['percent'])} numbers for {len(x)} sizes"
            )
    alt = alt or f"{ylabel} over {xlabel}: " + "; ".join(
        f"{row['label']} " + ", ".join(
            f"{y:.0f} at {size:,}" for size, y in zip(x, row["percent"], strict=True)
            if y is not None)
        for row in rows
    )
    figure = Picture(4.6, alt)
    axes = figure.subplots()
    axes.axhline(100, color=LIMIT, linestyle="--", linewidth=2, zorder=0.5)
    counts = {"ours": 0, "peer": 0}
    for row in rows:
        kind = row.get("kind", "ours")
        mark = _MARKS[counts[kind] % len(_MARKS)]
        counts[kind] += 1
        y = [np.nan if value is None else value for value in row["percent"]]
        if kind == "peer":  # light, dashed and hollow, whatever its colour
            style = {"color": "#b06a00", "linestyle": "--", "markerfacecolor": PAPER}
        else:
            style = {"color": OURS, "linestyle": "-"}
        axes.plot(x, y, marker=mark, markersize=8, linewidth=1.8, label=row["label"], **style)
    axes.set_xscale("log", base=2)
    axes.set_xticks(x, [f"{size:,}" for size in x], rotation=30 if len(x) > 6 else 0)
    axes.minorticks_off()
    axes.set(xlabel=xlabel, ylabel=ylabel, ylim=(0, None))
    axes.set_title(title, loc="left", fontweight="bold")
    axes.grid(alpha=0.25)
    figure.legend(loc="outside right center", frameon=False)
    caption(axes, device, date)
    return figure


def durations(rows, *, title="", device="", date="", alt=None):
    """Draw how long things take, on a logarithmic axis: for times that differ a thousandfold.

    Each is a point and no bar: an axis without a 0 has no lengths to compare.

    Args:
        rows: list of dicts with `label`, `microseconds` and, where peers are among them, `kind`
            (`"ours"` or `"peer"`).
        title, device, date, alt: as in `ladder`.

    Raises:
        ValueError: no rows, a time that is not positive, or an unknown kind.
    """
    rows = _rows(rows, "durations")
    times = [row["microseconds"] for row in rows]
    if not min(times) > 0:
        raise ValueError("every duration must be positive")
    alt = alt or "Times: " + ", ".join(
        f"{row['label']} {_time_text(row['microseconds'])}" for row in rows
    )
    figure = Picture(0.42 * len(rows) + 1.5, alt)
    axes = figure.subplots()
    for place, row in enumerate(rows):
        axes.axhline(place, color="0.85", linewidth=1, zorder=0.5)
        axes.plot(row["microseconds"], place, **_point_style(row))
        axes.text(row["microseconds"] * 1.25, place, _time_text(row["microseconds"]), va="center",
                  bbox={"facecolor": PAPER, "edgecolor": "none", "pad": 1})
    axes.set(xscale="log", xlim=(min(times) / 5, max(times) * 12),
             xlabel="time (µs; each mark is ten times the one before)")
    axes.grid(axis="x", alpha=0.3)
    _name_bars(axes, rows, title)
    if any(row.get("kind") == "peer" for row in rows):
        _legend_of_points(figure)
    caption(axes, device, date)
    return figure


def roofline(points, peak_gbps, peak_tflops, *, zoom=False, title="", device="", date="",
             alt=None):
    """Draw kernels under the roof that bandwidth and arithmetic put over them.

    Args:
        points: list of dicts with `label`, `intensity` (FLOP per byte moved), `tflops` (reached)
            and `kind` (`"ours"` or `"peer"`).
        peak_gbps, peak_tflops: the device's limits, in GB/s and in TFLOP/s.
        zoom: draw beside the whole roof what lies around the points, and name them only there:
            for points that crowd in a corner.
        title, device, date, alt: as in `ladder`.

    Raises:
        ValueError: no points, a number that is not positive, or an unknown kind.
    """
    points = _rows(points, "roofline")
    numbers = [peak_gbps, peak_tflops]
    numbers += [point[key] for point in points for key in ("intensity", "tflops")]
    if not min(numbers) > 0:
        raise ValueError("a roofline's axes are logarithmic: every number must be positive")
    ridge = peak_tflops * 1000 / peak_gbps  # the intensity from which arithmetic is the limit
    alt = alt or f"Roofline with its ridge at {ridge:.3g} FLOP per byte: " + ", ".join(
        f"{point['label']} {point['tflops']:.3g} TFLOP/s at {point['intensity']:.3g} FLOP per byte"
        for point in points
    )
    figure = Picture(4.8, alt)
    panels = figure.subplots(1, 2 if zoom else 1, squeeze=False)[0]
    for axes in panels:
        _roof(axes, points, peak_gbps, peak_tflops, ridge, narrow=zoom)
        axes.set(xlabel="arithmetic intensity (FLOP per byte moved)", ylabel="speed (TFLOP/s)")
        axes.grid(alpha=0.3)
    if zoom:
        _zoom(panels[1], points, peak_gbps)
        panels[0].set_title("the whole roof", fontsize=11)
        figure.suptitle(title, fontweight="bold")
    else:
        _name_points(panels[0], points)
        panels[0].set_title(title, loc="left", fontweight="bold")
    if any(point.get("kind") == "peer" for point in points):
        _legend_of_points(figure)
    caption(panels[0], device, date)
    return figure


def _roof(axes, points, peak_gbps, peak_tflops, ridge, *, narrow):
    """The roof, its ridge and the points under it, without their names."""
    reach = [point["intensity"] for point in points] + [ridge]
    x = np.geomspace(min(reach) / 4, max(reach) * 6, 200)
    axes.plot(x, np.minimum(x * peak_gbps / 1000, peak_tflops), color=LIMIT, linewidth=2.5)
    axes.axvline(ridge, color=INK, linestyle=":", linewidth=1)
    for point in points:
        axes.plot(point["intensity"], point["tflops"], **_point_style(point))
    axes.annotate(f"memory:\n{peak_gbps:,.0f} GB/s" if narrow else f"memory: {peak_gbps:,.0f} GB/s",
                  (x[60], x[60] * peak_gbps / 1000), color=LIMIT, xytext=(-10, 4), ha="right",
                  textcoords="offset points")
    axes.text(x[-1], peak_tflops * 1.15, f"arithmetic: {peak_tflops:,.3g} TFLOP/s", color=LIMIT,
              ha="right")
    axes.set(xscale="log", yscale="log", ylim=(None, peak_tflops * 4))


def _zoom(axes, points, peak_gbps):
    """What lies around the points: under the slope of the roof, with their names at its side."""
    x, y = ([point[key] for point in points] for key in ("intensity", "tflops"))
    for text in list(axes.texts):
        text.remove()
    axes.set(xlim=(min(x) / 1.5, max(x) * 1.5), title="around the kernels",
             ylim=(min(y) / 1.6, 1.6 * max(*y, max(x) * peak_gbps / 1000)))
    axes.title.set_fontsize(11)
    for axis, (low, high) in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
        ticks = [m * 10.0**e for e in range(-6, 7) for m in (1, 2, 5) if low <= m * 10.0**e <= high]
        axis.set_ticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.set_ticks([], minor=True)
    # Names in a column at the right, in the points' order and clear of each other.
    low, high = np.log(axes.get_ylim())
    order = sorted(points, key=lambda point: point["tflops"])
    places = []
    for point in order:
        own = (np.log(point["tflops"]) - low) / (high - low)
        places.append(max(own, places[-1] + 0.065) if places else own)
    over = max(0.0, places[-1] - 0.97)
    for point, place in zip(order, places, strict=True):
        axes.annotate(point["label"], (point["intensity"], point["tflops"]),
                      xytext=(1.04, place - over), textcoords="axes fraction", va="center",
                      arrowprops={"arrowstyle": "-", "color": "0.6", "shrinkB": 5})


def _name_points(axes, points):
    """Write each point's label to its right, moved down where another's is in the way."""
    height, room = axes.get_window_extent().height, 15  # pixels
    low, high = np.log(axes.get_ylim())
    last = np.inf
    for point in sorted(points, key=lambda point: -point["tflops"]):
        own = (np.log(point["tflops"]) - low) / (high - low) * height
        last = min(own, last - room)
        moved = own - last > 1
        axes.annotate(point["label"], (point["intensity"], point["tflops"]),
                      xytext=(34 if moved else 9, (last - own) * 72 / axes.figure.dpi - 4),
                      textcoords="offset points",
                      bbox={"facecolor": PAPER, "edgecolor": "none", "pad": 0.5, "alpha": 0.85},
                      arrowprops={"arrowstyle": "-", "color": "0.6"} if moved else None)


def timeline(spans, *, unit="µs", by_actor=False, title="", device="", date="", alt=None):
    """Draw what happened when: one line per actor, one box per span of work.

    Args:
        spans: list of `(actor, start, end, label)` with times in `unit`; actors are drawn from top
            to bottom in the order in which they first appear.
        unit: unit of the times.
        by_actor: give all spans of an actor one colour, and the next actor the other; else the
            spans take turns.
        title, device, date, alt: as in `ladder`.

    Raises:
        ValueError: no spans, or one that ends before it starts.
    """
    spans = list(spans)
    if not spans:
        raise ValueError("timeline needs at least one span")
    for actor, start, end, label in spans:
        if end < start:
            raise ValueError(f"span {label!r} of {actor!r} ends before it starts")
    actors = list(dict.fromkeys(actor for actor, *_ in spans))
    alt = alt or "Timeline: " + "; ".join(
        f"{actor} {label} from {start:g} to {end:g} {unit}" for actor, start, end, label in spans
    )
    figure = Picture(0.75 * len(actors) + 1.1, alt)
    axes = figure.subplots()
    shades = ("#cfe3f5", "#f3c581")
    for number, (actor, start, end, label) in enumerate(spans):
        place = actors.index(actor)
        shade = shades[(place if by_actor else number) % 2]
        axes.barh(place, end - start, left=start, height=0.6, color=shade, edgecolor=INK)
        axes.text((start + end) / 2, place, label, ha="center", va="center", fontsize=9.5,
                  color=ink_on(shade))
    axes.set_yticks(range(len(actors)), actors)
    axes.set_ylim(len(actors) - 0.5, -0.5)
    first, last = min(start for _, start, *_ in spans), max(end for _, _, end, _ in spans)
    if 0 < first <= last - first:  # what came before the first span is part of what happened
        axes.set_xlim(left=0)
    axes.set_xlabel(f"time ({unit})")
    axes.set_title(title, loc="left", fontweight="bold")
    caption(axes, device, date)
    return figure


def _rows(rows, name):
    """The rows as a list, refused when empty or of a kind that has no style."""
    rows = list(rows)
    if not rows:
        raise ValueError(f"{name} needs at least one row")
    for row in rows:
        if row.get("kind", "ours") not in ("ours", "peer"):
            raise ValueError(f"{row['label']!r} is of kind {row['kind']!r}: 'ours' or 'peer' only")
    return rows


def _bar_style(row):
    """Ours dark and plain, peers light and hatched: told apart without colour."""
    if row.get("kind") == "peer":
        return {"facecolor": PEER, "hatch": "///", "edgecolor": INK}
    return {"facecolor": OURS, "edgecolor": INK}


def _point_style(row):
    """A point: ours round, peers square."""
    peer = row.get("kind") == "peer"
    return {"marker": "s" if peer else "o", "markersize": 9, "color": PEER if peer else OURS,
            "markeredgecolor": INK, "linestyle": "none"}


def _legend_of_points(figure):
    marks = [Line2D([], [], **_point_style({"kind": kind})) for kind in ("ours", "peer")]
    figure.legend(marks, ["our kernel", "a library to compare with"],
                  loc="outside lower center", ncols=2, frameon=False)


def _name_bars(axes, rows, title):
    axes.set_yticks(range(len(rows)), [row["label"] for row in rows])
    for place, (row, name) in enumerate(zip(rows, axes.get_yticklabels(), strict=True)):
        if row.get("note"):
            name.set_verticalalignment("bottom")
            axes.annotate(row["note"], (0, place), (-8, -2), textcoords="offset points",
                          ha="right", va="top", fontsize=9, xycoords=axes.get_yaxis_transform())
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_title(title, loc="left", fontweight="bold")


def _legend_of_kinds(figure, rows, more):
    """Say underneath what dark, hatched and dashed mean, as far as they occur."""
    kinds = {row.get("kind", "ours") for row in rows}
    entries = [
        (Rectangle((0, 0), 1, 1, **_bar_style({"kind": kind})), label)
        for kind, label in (("ours", "our kernel"), ("peer", "a library to compare with"))
        if kind in kinds
    ] + more
    handles, labels = zip(*entries, strict=True)
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 3),
                  frameon=False)


def _time_text(microseconds):
    """A time in the unit that keeps it short: 850 ns, 12 µs, 3.4 ms, 1.2 s."""
    for unit, size in (("s", 1e6), ("ms", 1e3), ("µs", 1.0)):
        if microseconds >= size:
            return f"{microseconds / size:.3g} {unit}"
    return f"{microseconds * 1e3:.3g} ns"
