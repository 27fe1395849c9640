"""Pictures of softmax: rows of probabilities, passes over memory, lanes that exchange, one pass."""

import numpy as np
from matplotlib.colors import LinearSegmentedColormap, to_rgb
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from .picture import INK, LIMIT, OURS, PAPER, PEER, Picture, ink_on, require_dict

MAX_LANES = 16  # more in a line are too narrow for their numbers
MAX_STEPS = 12
_SHADES = LinearSegmentedColormap.from_list("shades", ["#eef4fa", "#6ba3d0", "#0f3557"])
_NAN_FILL = "#fbdedb"


def probabilities(tables, titles, *, labels, xlabel, ylabel, vmax=None, title="", alt=None):
    """Draw tables of probabilities side by side, light to dark, with every NaN marked.

    Args:
        tables: list of arrays `(n_rows, n_cols)`, all of one shape; 0 or more, or NaN.
        titles: one heading per table.
        labels: `(n_rows,)` what stands beside each row.
        xlabel, ylabel: what columns and rows are.
        vmax: the number from which on all are equally dark; by default the largest.
        title: heading of the whole.
        alt: alternative text; by default how many rows of each table have a NaN.

    Raises:
        ValueError: no tables, tables of different or wrong shapes, or labels that do not fit.
    """
    tables = [np.asarray(table, dtype=np.float64) for table in tables]
    shapes = {table.shape for table in tables}
    if len(shapes) != 1 or len(next(iter(shapes))) != 2 or 0 in next(iter(shapes)):
        raise ValueError(
            f"probabilities needs tables (n_rows, n_cols) of one shape, not {shapes or '{}'}"
        )
    n_rows, n_cols = tables[0].shape
    if len(titles) != len(tables) or len(labels) != n_rows:
        raise ValueError(
            f"{len(tables)} tables of {n_rows} rows need as many titles and labels, not "
            f"{len(titles)} and {len(labels)}"
        )
    broken = [int(np.isnan(table).any(axis=1).sum()) for table in tables]
    alt = alt or f"{n_rows} rows each. " + "; ".join(
        f"{name}: {count} rows are not a number" for name, count in zip(titles, broken, strict=True)
    )
    figure = Picture(0.16 * n_rows + 1.4 + (0.3 if title else 0), alt)
    panels = figure.subplots(1, len(tables), sharey=True, squeeze=False)[0]
    most = vmax or max((np.nanmax(t) for t in tables if not np.isnan(t).all()), default=1.0)
    more = any((table > most).any() for table in tables)
    for axes, table, name, count in zip(panels, tables, titles, broken, strict=True):
        axes.imshow(np.nan_to_num(table), cmap=_SHADES, vmin=0, vmax=most, aspect="auto",
                    interpolation="nearest")
        for row, first, last in _nan_runs(table):
            axes.add_patch(Rectangle((first - 0.5, row - 0.5), last - first + 1, 1, linewidth=0,
                                     facecolor=_NAN_FILL, edgecolor=LIMIT, hatch="xxxx"))
        axes.set_title(f"{name}\n{count} of {n_rows} rows are NaN", fontsize=10.5, loc="left")
        axes.set_xlabel(xlabel)
        axes.tick_params(labelsize=8)
    every = max(1, -(-n_rows // 12))
    panels[0].set_yticks(range(0, n_rows, every), [str(each) for each in labels[::every]])
    panels[0].set_ylabel(ylabel)
    marks = [Rectangle((0, 0), 1, 1, facecolor=_SHADES(0.0), edgecolor=INK),
             Rectangle((0, 0), 1, 1, facecolor=_SHADES(1.0), edgecolor=INK),
             Rectangle((0, 0), 1, 1, facecolor=_NAN_FILL, edgecolor=LIMIT, hatch="xxxx")]
    dark = f"{most:.2g}" + " or more" * more
    figure.legend(marks, ["0", dark, "not a number"], loc="outside lower center", ncols=3,
                  frameon=False)
    if title:
        figure.suptitle(title, fontweight="bold")
    return figure


def _nan_runs(table):
    """(row, first column, last column) of every run of NaNs."""
    for row, line in enumerate(np.isnan(table)):
        edges = np.flatnonzero(np.diff(np.concatenate([[0], line.astype(int), [0]])))
        yield from ((row, first, end - 1) for first, end in zip(edges[::2], edges[1::2],
                                                                strict=True))


def passes(traces, n_bytes, *, least=2, title="", alt=None):
    """Draw how often each kernel goes over its arrays: the bytes asked for, line by line.

    Args:
        traces: dict from a label to what `simulator.trace()` gave: its `sites` have `op` ("load"
            or "store"), `space`, `array`, `line` and `bytes`.
        n_bytes: the size of one array, the unit of the axis.
        least: the sizes of the array that must be moved at least, by default one read and one
            written; or a dict from each label to its own.
        title: heading of the picture.
        alt: alternative text; by default the passes of each kernel.

    Raises:
        ValueError: no traces, one without an access to global memory, a size that is 0, or a
            `least` that lacks a label.
    """
    require_dict("traces", traces)
    found = {
        label: sorted((site for site in trace.sites if site.space == "global"),
                      key=lambda site: (site.line, site.op == "store"))
        for label, trace in traces.items()
    }
    if not found or not all(found.values()) or n_bytes <= 0:
        raise ValueError("passes needs traces with accesses to global memory, and a size in bytes")
    if isinstance(least, dict) and set(least) != set(found):
        raise ValueError(f"least is given for {sorted(least)}, the traces are {sorted(found)}")
    totals = {label: sum(s.bytes for s in sites) / n_bytes for label, sites in found.items()}
    alt = alt or "Bytes asked for, in sizes of the array: " + "; ".join(
        f"{label} {totals[label]:.3g}, that is " + ", ".join(
            f"{site.op} of {site.array} {site.bytes / n_bytes:.3g}" for site in sites
        )
        for label, sites in found.items()
    )
    figure = Picture(0.55 * len(found) + 1.5, alt)
    axes = figure.subplots()
    most = 1.12 * max(totals.values())
    for place, (label, sites) in enumerate(found.items()):
        left, slivers = 0.0, []
        for site in sites:
            width = site.bytes / n_bytes
            if width < 0.015 * most:  # an outline would be all there is to see: see below
                slivers.append(site)
                continue
            _pass(axes, place, left, width, width / most, site.op, site.array)
            left += width
        total = f"{totals[label]:.3g}"
        if slivers:
            rest = sum(site.bytes for site in slivers) / n_bytes
            axes.barh(place, rest, left=left, height=0.62, color=INK)
            names = ", ".join(dict.fromkeys(site.array for site in slivers))
            total += f" (the black rest: {names})"
            left += rest
        axes.text(left + 0.01 * most, place, total, va="center", fontweight="bold")
        own = least[label] if isinstance(least, dict) else least
        axes.plot([own, own], [place - 0.44, place + 0.44], color=LIMIT, linestyle="--",
                  linewidth=2)
    words = {1: "read once", 2: "read once, write once"}
    legend = "the least" if isinstance(least, dict) else f"the least: {words.get(least, least)}"
    axes.set_yticks(range(len(found)), list(found))
    axes.set(ylim=(len(found) - 0.4, -0.6), xlim=(0, most),
             xlabel="bytes that the threads ask for (sizes of the array)")
    axes.set_title(title, loc="left", fontweight="bold")
    figure.legend([Line2D([], [], color=LIMIT, linestyle="--", linewidth=2)], [legend],
                  loc="outside lower center", frameon=False)
    return figure


def _pass(axes, place, left, width, share, op, array):
    """One access as a part of a bar, `share` of the axis wide, with as much text as it has room."""
    style = {"facecolor": PEER, "hatch": "///"} if op == "store" else {"facecolor": "#cfe3f5"}
    axes.barh(place, width, left=left, height=0.62, edgecolor=INK, **style)
    room = share * 80  # characters, roughly
    upright = len(array) > room
    text = f"{_VERBS[op]} {array}" if len(array) + 6 <= room else array
    axes.text(left + width / 2, place, text, va="center", ha="center", rotation=90 * upright,
              fontsize=7 if upright else 9.5,
              bbox={"facecolor": PAPER, "edgecolor": "none", "pad": 0.6 if upright else 1.2,
                    "alpha": 0.9})


_VERBS = {"load": "read", "store": "write"}


def butterfly(values, *, title="", alt=None):
    """Draw lanes that exchange what they have, round by round, with the lane 1, 2, 4, … away.

    Args:
        values: numbers `(rounds + 1, lanes)`: what each lane holds at first and after each round.
            In round `k`, from 0, lane `i` meets lane `i ^ (1 << k)`.
        title: heading of the picture.
        alt: alternative text; by default what the lanes hold after every round.

    Raises:
        ValueError: not 2 dimensions, more than 16 lanes, or rounds that lead to lanes not shown.
    """
    values = np.asarray(values)
    if values.ndim != 2 or not 0 < values.shape[1] <= MAX_LANES or len(values) == 0 or (
        1 << (len(values) - 1)) > values.shape[1]:
        raise ValueError(f"values {values.shape} must be (rounds + 1, lanes), with at most "
                         f"{MAX_LANES} lanes and a partner for each")
    rounds, lanes = len(values) - 1, values.shape[1]
    alt = alt or "Lanes that exchange. " + "; ".join(
        f"{_round_name(number)}: " + " ".join(f"{v:g}" for v in line)
        for number, line in enumerate(values)
    )
    figure = Picture(1.0 * rounds + 1.7, alt)
    axes = figure.subplots()
    low, high = float(values.min()), float(values.max())
    for number, line in enumerate(values):
        for lane, value in enumerate(line):
            colour = _SHADES((value - low) / (high - low) if high > low else 0.0)[:3]
            axes.add_patch(Rectangle((lane - 0.36, 2 * number - 0.36), 0.72, 0.72,
                                     facecolor=colour, edgecolor=INK, linewidth=1))
            axes.text(lane, 2 * number, f"{value:g}", ha="center", va="center", fontsize=10.5,
                      color=ink_on(colour))
        if number < rounds:
            for lane in range(lanes):
                for source, width in ((lane, 1.0), (lane ^ (1 << number), 1.6)):
                    axes.annotate("", (lane, 2 * number + 1.62), (source, 2 * number + 0.4),
                                  arrowprops={"arrowstyle": "-|>", "linewidth": width,
                                              "color": INK if source == lane else OURS,
                                              "shrinkA": 0, "shrinkB": 0})
    axes.set_yticks(2 * np.arange(rounds + 1), [_round_name(n) for n in range(rounds + 1)])
    axes.set_xticks(range(lanes))
    axes.tick_params(length=0)
    axes.set(xlim=(-0.7, lanes - 0.3), ylim=(2 * rounds + 0.6, -0.6), xlabel="lane")
    axes.spines[:].set_visible(False)
    axes.set_title(title, loc="left", fontweight="bold")
    return figure


def _round_name(number):
    return "at first" if number == 0 else f"after round {number}"


def one_pass(x, m, s, *, title="", alt=None):
    """Draw how the running maximum and the running sum of exponentials follow a row of numbers.

    Args:
        x: the numbers `(n,)`, in the order in which they are read; at most 12.
        m, s: `(n,)` the running maximum and the running sum after each.
        title: heading of the picture.
        alt: alternative text; by default all numbers of the three rows.

    Raises:
        ValueError: rows of different lengths, none, or more than 12 numbers.
    """
    x, m, s = (np.asarray(each, dtype=np.float64) for each in (x, m, s))
    if x.ndim != 1 or not 0 < x.size <= MAX_STEPS or m.shape != x.shape or s.shape != x.shape:
        raise ValueError(f"x {x.shape}, m {m.shape} and s {s.shape} must be (n,), with n from 1 "
                         f"to {MAX_STEPS}")
    alt = alt or "One pass. " + "; ".join(
        f"after {a:g}: maximum {b:g}, sum {c:.4g}" for a, b, c in zip(x, m, s, strict=True)
    )
    figure = Picture(4.9, alt)
    top, bottom = figure.subplots(2, 1, sharex=True)
    place = np.arange(x.size)
    top.bar(place, x, width=0.6, color="#cfe3f5", edgecolor=INK, label="x, the number just read")
    top.step(np.append(place - 0.5, x.size - 0.5), np.append(m, m[-1]), where="post", color=LIMIT,
             linewidth=2.2, label="m, the largest so far")
    top.axhline(0, color="0.6", linewidth=0.8)
    top.set_ylabel("x, m (no unit)")
    colours = []
    before = -np.inf
    for k in place:
        rises = m[k] > before
        colours.append(PEER if rises else "#cfe3f5")
        factor = np.exp(before - m[k]) if rises else 1.0
        text = f"× {factor:.2g}\n+ 1" if rises else f"+ {np.exp(x[k] - m[k]):.2g}"
        bottom.text(k, s[k] + 0.06 * s.max(), text, ha="center", va="bottom", fontsize=9)
        bottom.text(k, s[k] / 2, f"{s[k]:.4g}", ha="center", va="center", fontsize=9.5,
                    bbox={"facecolor": PAPER, "edgecolor": "none", "pad": 1})
        before = m[k]
    bars = bottom.bar(place, s, width=0.6, color=colours, edgecolor=INK)
    for bar, colour in zip(bars, colours, strict=True):
        bar.set_hatch("///" if to_rgb(colour) == to_rgb(PEER) else "")
    bottom.set(ylim=(0, 1.45 * s.max()), ylabel="s (no unit)", xlabel="step (numbers read)")
    bottom.set_xticks(place, [str(k + 1) for k in place])
    marks = [Rectangle((0, 0), 1, 1, facecolor=PEER, edgecolor=INK, hatch="///")]
    handles, labels = top.get_legend_handles_labels()
    figure.legend(handles + marks, [*labels, "s was brought to a new m"],
                  loc="outside lower center", ncols=3, frameon=False)
    top.set_title(title, loc="left", fontweight="bold")
    return figure
