"""Pictures of a kernel at the limit: loads in flight, why warps wait, blocks that share a row."""

import numpy as np
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.lines import Line2D
from matplotlib.patches import FancyArrowPatch, Rectangle

from .picture import INK, LIMIT, OURS, PAPER, PEER, Picture, caption, ink_on, require_dict

WAIT, WORK = "#cfe3f5", "#1f5f99"
#: One style for each size and number of loads: told apart by shape and fill as well as by colour.
MARKS = (
    ("o", PAPER), ("s", "#cfe3f5"), ("^", "#6ba3d0"), ("D", OURS), ("v", INK),
)  # fmt: skip
SIZES = LinearSegmentedColormap.from_list("sizes", [PAPER, "#6ba3d0", "#0f3557"])
BELOW = LinearSegmentedColormap.from_list("below", [PAPER, "#f0a860", "#8f3d0b"])  # zero
HATCHES = ("", "///", "...", "\\\\\\", "xx", "")
SHADES = (OURS, "#f3c581", "#cfe3f5", "#e7b0a8", "#d7d9dc", PAPER)


def loads_in_time(batches, n_loads, *, latency, work, unit="ns", title="", alt=None):
    """Draw when the loads of one thread are under way, for several ways to ask.

    Args:
        batches: dict from a title to how many loads the thread asks for before it waits.
        n_loads: loads in all; a multiple of every batch.
        latency, work: how long a load is under way, and what is then done with its answer.
        unit: unit of the two.
        title: heading of the whole.
        alt: alternative text; by default how long each way takes.

    Raises:
        ValueError: no batches, or one that does not divide `n_loads`.
    """
    require_dict("batches", batches)
    if not batches or any(batch < 1 or n_loads % batch for batch in batches.values()):
        raise ValueError(f"loads_in_time needs batches that divide {n_loads}, not {batches}")
    ends = {name: n_loads // b * latency + n_loads * work for name, b in batches.items()}
    alt = alt or f"{n_loads} loads of {latency} {unit} each. " + "; ".join(
        f"{name}: done after {end} {unit}" for name, end in ends.items()
    )
    figure = Picture(0.16 * n_loads * len(batches) + 0.5 * len(batches) + 0.9, alt)
    panels = figure.subplots(len(batches), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (name, batch) in zip(panels, batches.items(), strict=True):
        now = 0
        for load in range(n_loads):
            if load % batch == 0:
                asked, now = now, now + latency
            axes.barh(load, latency, left=asked, height=0.8, color=WAIT, edgecolor=INK,
                      linewidth=0.6)
            axes.barh(load, work, left=now, height=0.8, color=WORK, edgecolor=INK, linewidth=0.6)
            now += work
        axes.set_title(f"{name}: {ends[name]:,} {unit}", loc="left", fontsize=11)
        axes.set(ylim=(n_loads - 0.4, -0.6), ylabel="load", yticks=range(0, n_loads, 2))
        axes.tick_params(labelsize=8)
    panels[-1].set_xlabel(f"time ({unit}); pale: the load is under way, dark: the thread computes")
    panels[-1].set_xlim(0, 1.02 * max(ends.values()))
    if title:
        figure.suptitle(title, fontweight="bold")
    return figure


def in_flight(points, latency_ns, peak_gbps, n_multiprocessors, *, title="", device="", date="",
              alt=None):
    """Draw bandwidth over bytes in flight, beside what Little's law allows.

    Args:
        points: list of dicts with `in_flight` (bytes per multiprocessor), `gbps`, `loads` and
            `load_bytes` (how many a thread has under way, and of what size).
        latency_ns: latency of a load, in nanoseconds.
        peak_gbps: what the memory delivers at most, in GB/s.
        n_multiprocessors: multiprocessors of the device.
        title, device, date, alt: as in `ladder`.

    Raises:
        ValueError: no points, a number that is not positive, or more than five kinds of load.
    """
    points = list(points)
    if not points:
        raise ValueError("in_flight needs at least one point")
    numbers = [latency_ns, peak_gbps, n_multiprocessors]
    numbers += [point[key] for point in points for key in ("in_flight", "gbps")]
    if not min(numbers) > 0:
        raise ValueError("the axes are logarithmic: every number must be positive")
    kinds = list(dict.fromkeys((point["loads"], point["load_bytes"]) for point in points))
    if len(kinds) > len(MARKS):
        raise ValueError(f"{len(kinds)} kinds of load are too many to tell apart: {len(MARKS)}")
    needed = peak_gbps * latency_ns / n_multiprocessors
    alt = alt or (
        f"Bandwidth grows with the bytes in flight up to {needed / 1024:.0f} KB per "
        f"multiprocessor, then stays at {peak_gbps:,.0f} GB/s: "
        + ", ".join(f"{p['in_flight'] / 1024:g} KB {p['gbps']:,.0f} GB/s" for p in points)
    )
    figure = Picture(4.8, alt)
    axes = figure.subplots()
    seen = [point["in_flight"] for point in points]
    x = np.geomspace(min(seen) / 1.5, max(*seen, needed) * 1.5, 200)
    line = np.minimum(x * n_multiprocessors / latency_ns, peak_gbps)
    axes.plot(x, line, color=LIMIT, linewidth=2.5, zorder=1)
    axes.axvline(needed, color=INK, linestyle=":", linewidth=1)
    axes.annotate(f"needed: {needed / 1024:.0f} KB", (needed, peak_gbps / 12), xytext=(6, 0),
                  textcoords="offset points")
    for kind, (marker, fill) in zip(kinds, MARKS, strict=False):
        own = [point for point in points if (point["loads"], point["load_bytes"]) == kind]
        axes.plot([p["in_flight"] for p in own], [p["gbps"] for p in own], marker, markersize=9,
                  markerfacecolor=fill, markeredgecolor=INK, linestyle="none", zorder=2,
                  label=f"{kind[0]} × {kind[1]} bytes per thread")
    axes.set(xscale="log", yscale="log", ylabel="bandwidth of reading (GB/s)",
             xlabel="bytes in flight per multiprocessor (KB)")
    ticks = [2.0**k for k in range(int(np.log2(x[0])), int(np.log2(x[-1])) + 1)]
    axes.set_xticks(ticks, [f"{tick / 1024:g}" for tick in ticks])
    axes.minorticks_off()
    heights = [h for h in (100, 200, 500, 1000, 2000, 5000) if line[0] / 2 < h < 2 * peak_gbps]
    axes.set_yticks(heights, [f"{height:,}" for height in heights])
    axes.grid(alpha=0.3)
    axes.set_title(title, loc="left", fontweight="bold")
    handles, labels = axes.get_legend_handles_labels()
    handles.append(Line2D([], [], color=LIMIT, linewidth=2.5))
    labels.append("Little's law, up to the peak")
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    caption(axes, device, date)
    return figure


def stalls(rows, reasons, *, title="", device="", date="", alt=None):
    """Draw, for each kernel, how long a warp waits between two instructions, and for what.

    Args:
        rows: list of dicts with `label` and a number of cycles for each reason.
        reasons: dict from what a reason is called in the picture to the fields whose sum it is;
            six at most.
        title, device, date, alt: as in `ladder`.

    Raises:
        ValueError: no rows, or no reasons, or more than six.
    """
    require_dict("reasons", reasons)
    rows = list(rows)
    if not rows or not 0 < len(reasons) <= len(SHADES):
        raise ValueError(f"stalls needs rows, and one to {len(SHADES)} reasons")
    cycles = np.array([[sum(row[f] for f in fields) for fields in reasons.values()]
                       for row in rows])
    alt = alt or "Cycles between two instructions of a warp: " + "; ".join(
        f"{row['label']} " + ", ".join(f"{name} {value:.1f}" for name, value
                                       in zip(reasons, own, strict=True))
        for row, own in zip(rows, cycles, strict=True)
    )
    figure = Picture(0.46 * len(rows) + 1.9, alt)
    axes = figure.subplots()
    starts = np.cumsum(cycles, axis=1) - cycles
    widest = cycles.sum(axis=1).max()
    for k, name in enumerate(reasons):
        axes.barh(range(len(rows)), cycles[:, k], left=starts[:, k], height=0.7, label=name,
                  facecolor=SHADES[k], hatch=HATCHES[k], edgecolor=INK)
        for place, (start, value) in enumerate(zip(starts[:, k], cycles[:, k], strict=True)):
            if value > 0.06 * widest:
                axes.text(start + value / 2, place, f"{value:.1f}", ha="center", va="center",
                          fontsize=9, color=ink_on(SHADES[k]),
                          bbox={"facecolor": SHADES[k], "edgecolor": "none", "pad": 1})
    axes.set_yticks(range(len(rows)), [row["label"] for row in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlabel("cycles between two instructions of a warp")
    axes.set_title(title, loc="left", fontweight="bold")
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    caption(axes, device, date)
    return figure


def times(rows, *, xlabel="time (µs)", title="", device="", date="", alt=None):
    """Draw how long things take, on an axis that begins at 0: for times that can be added.

    Args:
        rows: list of dicts with `label`, `microseconds` and, where known, `kind` (`"ours"` or
            `"peer"`). What is the difference of two measurements may fall below 0 by chance.
        xlabel: what is measured, with its unit.
        title, device, date, alt: as in `ladder`.

    Raises:
        ValueError: no rows, or an unknown kind.
    """
    rows = list(rows)
    if not rows:
        raise ValueError("times needs at least one row")
    if unknown := {row.get("kind", "ours") for row in rows} - {"ours", "peer"}:
        raise ValueError(f"kinds are 'ours' and 'peer' only, not {sorted(unknown)}")
    texts = [f"{t:,.0f}" if t >= 1000 else f"{t:.3g}" for t in (r["microseconds"] for r in rows)]
    alt = alt or f"{xlabel}: " + ", ".join(
        f"{row['label']} {text}" for row, text in zip(rows, texts, strict=True)
    )
    figure = Picture(0.42 * len(rows) + 1.4, alt)
    axes = figure.subplots()
    most = max(row["microseconds"] for row in rows)
    for place, row in enumerate(rows):
        peer = row.get("kind") == "peer"
        axes.barh(place, row["microseconds"], height=0.7, facecolor=PEER if peer else OURS,
                  hatch="///" if peer else None, edgecolor=INK)
        axes.text(max(row["microseconds"], 0) + 0.012 * most, place, texts[place], va="center")
    axes.set_yticks(range(len(rows)), [row["label"] for row in rows])
    least = min(0, *(row["microseconds"] for row in rows))
    axes.set(ylim=(len(rows) - 0.4, -0.6), xlim=(1.1 * least, 1.12 * most), xlabel=xlabel)
    axes.set_title(title, loc="left", fontweight="bold")
    caption(axes, device, date)
    return figure


def tables(numbers, titles, *, xlabel="column", ylabel="row", rows=None, columns=None, title="",
           alt=None):
    """Draw small tables of numbers side by side, dark where a number is large, orange below 0.

    Args:
        numbers: list of arrays `(n_rows, n_cols)` of one shape, 12 columns at most; integers are
            written as such, others with two decimals.
        titles: one heading per table.
        xlabel, ylabel: what columns and rows are.
        rows, columns: a word for each row and for each column; by default their numbers.
        title: heading of the whole.
        alt: alternative text; by default the numbers, after the row's word if there is one.

    Raises:
        ValueError: no tables, tables of different or wrong shapes, or as many titles or words.
    """
    numbers = [np.asarray(each) for each in numbers]
    shapes = {each.shape for each in numbers}
    if len(shapes) != 1 or len(next(iter(shapes))) != 2 or not 0 < next(iter(shapes))[1] <= 12:
        raise ValueError(f"tables needs arrays (n_rows, 1 to 12) of one shape, not {shapes or ''}")
    if len(titles) != len(numbers):
        raise ValueError(f"{len(numbers)} tables but {len(titles)} titles")
    n_rows, n_cols = numbers[0].shape
    for words, length in ((rows, n_rows), (columns, n_cols)):
        if words is not None and len(words) != length:
            raise ValueError(f"{len(words)} words for {length} rows or columns: {words}")

    def written(value):
        return str(value) if isinstance(value, np.integer) else f"{value:.2f}"

    names = [f"{word} " for word in rows] if rows is not None else [""] * n_rows
    alt = alt or "; ".join(
        f"{name}: " + ", ".join(
            word + " ".join(map(written, row)) for word, row in zip(names, each, strict=True)
        )
        for name, each in zip(titles, numbers, strict=True)
    )
    height = 0.42 * n_rows + 1.3 + 0.3 * bool(title) + 0.4 * (columns is not None)
    figure = Picture(height, alt)
    panels = figure.subplots(1, len(numbers), squeeze=False)[0]
    most = max(np.abs(each).max() for each in numbers) or 1.0
    for axes, each, name in zip(panels, numbers, titles, strict=True):
        for (row, col), value in np.ndenumerate(each):
            # The shade tells a number's size; blue is above 0, orange below.
            shade = (BELOW if value < 0 else SIZES)(abs(value) / most)
            axes.add_patch(Rectangle((col - 0.5, row - 0.5), 1, 1, facecolor=shade, edgecolor=INK))
            axes.text(col, row, written(value), ha="center", va="center", fontsize=10,
                      color=ink_on(shade))
        axes.set(xlim=(-0.5, n_cols - 0.5), ylim=(n_rows - 0.5, -0.5), xlabel=xlabel,
                 ylabel=ylabel, xticks=range(n_cols), yticks=range(n_rows))
        axes.tick_params(length=0)
        if columns is not None:
            axes.set_xticks(range(n_cols), columns, rotation=40, ha="right", rotation_mode="anchor")
        if rows is not None:
            axes.set_yticks(range(n_rows), rows)
        axes.set_title(name, fontsize=11)
    if title:
        figure.suptitle(title, fontweight="bold")
    return figure


def shared_row(parts, *, title="", alt=None):
    """Draw a long row that several blocks share: what each holds, and what they exchange.

    Args:
        parts: list of pairs of numbers for each block's part: its maximum, and its sum of
            exponentials seen from that maximum.
        title: heading of the picture.
        alt: alternative text; by default the steps in words.

    Raises:
        ValueError: fewer than two parts, or more than eight.
    """
    if not 2 <= len(parts) <= 8:
        raise ValueError(f"shared_row draws two to eight parts, not {len(parts)}")
    m = max(part[0] for part in parts)
    s = sum(own * np.exp(largest - m) for largest, own in parts)
    alt = alt or f"A row in {len(parts)} parts, a block for each. " + " ".join(
        f"Block {k} finds maximum {largest:.3g} and sum {own:.3g}."
        for k, (largest, own) in enumerate(parts)
    ) + f" Each merges all of them to maximum {m:.3g} and sum {s:.3g}, and writes its part."
    figure = Picture(4.0, alt)
    axes = figure.subplots()
    for k, (largest, own) in enumerate(parts):
        shade = ("#cfe3f5", "#f3c581")[k % 2]
        _box(axes, k, 0, f"part {k} of the row\nin device memory", shade)
        _box(axes, k, 1.5, f"block {k} holds part {k}\nm = {largest:.3g}, s = {own:.3g}", shade)
        _box(axes, k, 4, f"m = {m:.3g}, s = {s:.3g}\nwrites its part", shade)
        for y in (0.5, 2.0, 3.15):
            _arrow(axes, (k, y), (k, y + 0.37))
    axes.add_patch(Rectangle((-0.46, 2.39), len(parts) - 0.08, 0.76, facecolor=PAPER,
                             edgecolor=INK, linestyle="--"))
    axes.text((len(parts) - 1) / 2, 2.77, "a barrier for all blocks of the cluster; then each "
              "reads the m and s of the others, and merges", ha="center", va="center", fontsize=10)
    axes.set(xlim=(-0.55, len(parts) - 0.45), ylim=(4.6, -0.55))
    axes.set_axis_off()
    axes.set_title(title, loc="left", fontweight="bold")
    return figure


def _box(axes, x, y, text, colour):
    axes.add_patch(Rectangle((x - 0.46, y - 0.45), 0.92, 0.93, facecolor=colour, edgecolor=INK))
    axes.text(x, y, text, ha="center", va="center", fontsize=9.5, color=ink_on(colour))


def _arrow(axes, tail, head):
    axes.add_patch(FancyArrowPatch(tail, head, arrowstyle="-|>", mutation_scale=12, color=INK,
                                   linewidth=1.4, shrinkA=0, shrinkB=0))
