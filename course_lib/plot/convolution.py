"""Pictures of convolution: windows that overlap, small tables of what is read, and TFLOP/s."""

import numpy as np
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from .picture import INK, LIMIT, OURS, PAPER, PEER, Picture, caption, ink_on, require_dict

PADDED = "#e6e6e6"
#: Of windows: told apart by dashes as well as by colour.
OUTLINES = (
    {"edgecolor": "#b3261e", "linestyle": "-"},
    {"edgecolor": "#12705a", "linestyle": (0, (4, 2))},
    {"edgecolor": "#8a4a7d", "linestyle": (0, (1, 1.5))},
)
LIMIT_DASHES = ("--", ":", "-.", (0, (6, 1, 1, 1, 1, 1)))
MOST_CELLS = 16  # in a line: numbers in narrower ones cannot be read


def windows(
    x, weight, y, outputs, *, stride=1, padding=0, names=("x", "weight", "y"), title="", alt=None
):
    """Draw which pixels of x some results of a convolution are made of: a frame for each window.

    Args:
        x, weight, y: one channel `(H, W)`, one filter `(R, S)`, and the result `(P, Q)`.
        outputs: up to three places `(p, q)` in y.
        stride, padding: of the convolution; padding is drawn around x, as grey zeros.
        names: what the three are called.
        title: heading of the picture.
        alt: alternative text; by default which pixels each place has read.

    Raises:
        ValueError: no places, too many or one outside of y, or too many cells to be read.
    """
    x, weight, y = (np.asarray(each, dtype=np.float64) for each in (x, weight, y))
    outputs = [tuple(map(int, place)) for place in outputs]
    if not 0 < len(outputs) <= len(OUTLINES):
        raise ValueError(f"windows draws 1 to {len(OUTLINES)} places of y, not {len(outputs)}")
    if any(not (0 <= p < y.shape[0] and 0 <= q < y.shape[1]) for p, q in outputs):
        raise ValueError(f"y has {y.shape[0]} × {y.shape[1]} places; asked for {outputs}")
    wide = np.pad(x, padding)
    if max(wide.shape) > MOST_CELLS:
        raise ValueError(f"{wide.shape} are too many cells: {MOST_CELLS} a line at most")
    R, S = weight.shape
    corners = [(p * stride - padding, q * stride - padding) for p, q in outputs]
    alt = alt or "; ".join(
        f"{names[2]}[{p}, {q}] = {y[p, q]:g} is made of rows {h} to {h + R - 1}, "
        f"columns {w} to {w + S - 1}"
        for (p, q), (h, w) in zip(outputs, corners, strict=True)
    )
    figure = Picture(0.36 * max(wide.shape[0], y.shape[0]) + 1.25, alt)
    widths = [wide.shape[1], S, y.shape[1]]
    left, middle, right = figure.subplots(1, 3, width_ratios=widths)
    inside = np.pad(np.ones(x.shape, dtype=bool), padding)
    lines = max(wide.shape[0], y.shape[0], R)
    _table(left, wide, -padding, lines, grey=~inside)
    _table(middle, weight, 0, lines)
    _table(right, y, 0, lines)
    for (p, q), (h, w), style in zip(outputs, corners, OUTLINES, strict=False):
        _frame(left, h, w, R, S, style)
        _frame(right, p, q, 1, 1, style)
    left.set_title(names[0] + ", padded" * (padding > 0), fontsize=11)
    middle.set_title(names[1], fontsize=11)
    right.set_title(names[2], fontsize=11)
    marks = [
        Rectangle((0, 0), 1, 1, facecolor="none", linewidth=2.5, **style)
        for _, style in zip(outputs, OUTLINES, strict=False)
    ]
    labels = [f"{names[2]}[{p}, {q}] and its window" for p, q in outputs]
    figure.legend(marks, labels, loc="outside lower center", ncols=3, frameon=False)
    if title:
        figure.suptitle(title, fontweight="bold")
    return figure


def grids(
    cells, titles, *, marked=None, shade=None, xlabel="column", ylabel="row", title="", alt=None
):
    """Draw small tables side by side, of numbers or of words, each in its own size.

    Args:
        cells: list of arrays `(n_rows, n_cols)`, 16 columns at most; empty texts stay empty.
        titles: one heading per table.
        marked: for each table a list of `(row, col, n_rows, n_cols)` to frame, three at most.
        shade: list of arrays like `cells`, numbers by whose size cells are dark; by default the
            cells themselves, if they are numbers.
        xlabel, ylabel: what columns and rows are.
        title: heading of the whole.
        alt: alternative text; by default all cells.

    Raises:
        ValueError: no tables, one that is no table or too wide, or another number of titles.
    """
    cells = [np.asarray(each) for each in cells]
    if not cells or any(each.ndim != 2 or not 0 < each.shape[1] <= MOST_CELLS for each in cells):
        raise ValueError(
            f"grids needs tables (n_rows, 1 to {MOST_CELLS}), not {[c.shape for c in cells]}"
        )
    if len(titles) != len(cells):
        raise ValueError(f"{len(cells)} tables but {len(titles)} titles")
    marked = marked or [[]] * len(cells)
    shade = shade or [each if each.dtype.kind in "iuf" else None for each in cells]
    alt = alt or "; ".join(
        f"{name}: " + ", ".join(" ".join(_text(v) or "–" for v in row) for row in each)
        for name, each in zip(titles, cells, strict=True)
    )
    rows = max(each.shape[0] for each in cells)
    figure = Picture(0.36 * rows + 1.0 + (0.3 if title else 0), alt)
    panels = figure.subplots(
        1, len(cells), squeeze=False, width_ratios=[max(2, each.shape[1]) for each in cells]
    )[0]
    for axes, each, name, frames, dark in zip(panels, cells, titles, marked, shade, strict=True):
        _table(axes, each, 0, rows, shade=dark)
        for (row, col, n_rows, n_cols), style in zip(frames, OUTLINES, strict=False):
            _frame(axes, row, col, n_rows, n_cols, style)
        axes.set_xlabel(xlabel)
        axes.set_ylabel(ylabel, y=1 - len(each) / (2 * rows))  # beside the table's middle
        axes.set_title(name, fontsize=11)
    if title:
        figure.suptitle(title, fontweight="bold")
    return figure


def arithmetic(rows, limits, *, title="", device="", date="", alt=None):
    """Draw a bar of TFLOP/s for each rung and each peer, with what the chip could do at most.

    Args:
        rows: list of dicts with `label`, `kind` (`"ours"` or `"peer"`) and `tflops`.
        limits: dict from what a limit is called to its TFLOP/s; four at most.
        title, device, date: a heading, where and when it was measured.
        alt: alternative text; by default every number.

    Raises:
        ValueError: no rows, too many limits, or a number that is not positive.
    """
    require_dict("limits", limits)
    rows = list(rows)
    if not rows or len(limits) > len(LIMIT_DASHES):
        raise ValueError(f"arithmetic needs rows, and {len(LIMIT_DASHES)} limits at most")
    if not min([row["tflops"] for row in rows] + list(limits.values())) > 0:
        raise ValueError("TFLOP/s must be positive")
    alt = alt or "TFLOP/s: " + ", ".join(
        [f"{row['label']} {row['tflops']:.3g}" for row in rows]
        + [f"limit ({name}) {value:.3g}" for name, value in limits.items()]
    )
    figure = Picture(0.42 * len(rows) + 1.9, alt)
    axes = figure.subplots()
    most = max([row["tflops"] for row in rows] + list(limits.values()))
    for place, row in enumerate(rows):
        peer = row.get("kind") == "peer"
        axes.barh(
            place,
            row["tflops"],
            height=0.7,
            facecolor=PEER if peer else OURS,
            hatch="///" if peer else None,
            edgecolor=INK,
        )
        axes.text(
            row["tflops"] + 0.012 * most,
            place,
            f"{row['tflops']:.3g}",
            va="center",
            bbox={"facecolor": PAPER, "edgecolor": "none", "pad": 1},
        )
    marks, names = [], []
    for (name, value), dashes in zip(limits.items(), LIMIT_DASHES, strict=False):
        axes.axvline(value, color=LIMIT, linestyle=dashes, linewidth=2, zorder=0.5)
        marks.append(Line2D([], [], color=LIMIT, linestyle=dashes, linewidth=2))
        names.append(f"limit: {name}, {value:,.0f}")
    for kind, name in (("ours", "our kernel"), ("peer", "a library to compare with")):
        if any(row.get("kind", "ours") == kind for row in rows):
            marks.append(
                Rectangle(
                    (0, 0),
                    1,
                    1,
                    edgecolor=INK,
                    hatch="///" * (kind == "peer"),
                    facecolor=PEER if kind == "peer" else OURS,
                )
            )
            names.append(name)
    axes.set_yticks(range(len(rows)), [row["label"] for row in rows])
    axes.set(
        ylim=(len(rows) - 0.4, -0.6),
        xlim=(0, 1.1 * most),
        xlabel="useful operations per second (TFLOP/s)",
    )
    axes.set_title(title, loc="left", fontweight="bold")
    figure.legend(marks, names, loc="outside lower center", ncols=3, frameon=False)
    caption(axes, device, date)
    return figure


def asked(kernels, *, unit="sizes of x", title="", alt=None):
    """Draw what the threads of several kernels ask memory for, array by array.

    Args:
        kernels: dict from a label to a list of `(array, op, amount)`, op being "load" or "store".
        unit: what an amount is counted in.
        title: heading of the picture.
        alt: alternative text; by default every number.

    Raises:
        ValueError: no kernels, one that asks for nothing, or a negative amount.
    """
    require_dict("kernels", kernels)
    amounts = [amount for parts in kernels.values() for *_, amount in parts]
    if not kernels or not all(kernels.values()) or min(amounts) < 0 or not max(amounts) > 0:
        raise ValueError(f"asked needs kernels that ask for something, not {kernels}")
    totals = {label: sum(amount for *_, amount in parts) for label, parts in kernels.items()}
    alt = alt or f"Asked for, in {unit}: " + "; ".join(
        f"{label} {totals[label]:.3g}, that is "
        + ", ".join(f"{op} {name} {amount:.3g}" for name, op, amount in parts)
        for label, parts in kernels.items()
    )
    names = dict.fromkeys((name, op) for parts in kernels.values() for name, op, _ in parts)
    shades = (OURS, "#cfe3f5", "#8db8de", "#f7f8fa")
    hatches = ("", "", "...", "xx")
    loads = [each for each in names if each[1] == "load"]
    styles = {
        each: {"facecolor": PEER, "hatch": ("///", "\\\\\\")[number % 2]}
        if each[1] == "store"
        else {"facecolor": shades[loads.index(each) % 4], "hatch": hatches[loads.index(each) % 4]}
        for number, each in enumerate(names)
    }
    figure = Picture(0.5 * len(kernels) + 1.6, alt)
    axes = figure.subplots()
    most = max(totals.values())
    for place, parts in enumerate(kernels.values()):
        left = 0.0
        for name, op, amount in parts:
            style = styles[name, op]
            axes.barh(place, amount, left=left, height=0.62, edgecolor=INK, **style)
            if amount > 0.05 * most:
                shade = style["facecolor"]
                box = {"facecolor": shade, "edgecolor": "none", "pad": 1}
                axes.text(left + amount / 2, place, f"{amount:.3g}", ha="center", va="center",
                          fontsize=9.5, color=ink_on(shade), bbox=box)  # fmt: skip
            left += amount
        axes.text(left + 0.012 * most, place, f"{left:.3g}", va="center", fontweight="bold")
    marks = [Rectangle((0, 0), 1, 1, edgecolor=INK, **styles[each]) for each in names]
    verbs = {"load": "read", "store": "write"}
    labels = [f"{verbs[op]} {name}" for name, op in names]
    figure.legend(marks, labels, loc="outside lower center", ncols=6, frameon=False)
    axes.set_yticks(range(len(kernels)), list(kernels))
    axes.set(ylim=(len(kernels) - 0.4, -0.6), xlim=(0, 1.1 * most),
             xlabel=f"asked for, from memory ({unit})")  # fmt: skip
    axes.set_title(title, loc="left", fontweight="bold")
    return figure


def _text(value):
    return value if isinstance(value, str) else f"{value:.4g}"


def _table(axes, cells, first, lines, *, grey=None, shade=None):
    """Boxes with numbers or words; rows and columns are counted from `first` on.

    There is room for so many lines, so that the cells of tables side by side are of one size.
    """
    dark = np.abs(shade).max() if shade is not None and shade.size else 0
    for (row, col), value in np.ndenumerate(cells):
        colour = PAPER
        if grey is not None and grey[row, col]:
            colour = PADDED
        elif dark:
            part = abs(float(shade[row, col])) / dark
            colour = tuple(1 - part * (1 - np.array([0.42, 0.64, 0.82])))
        place = col + first - 0.5, row + first - 0.5
        axes.add_patch(Rectangle(place, 1, 1, facecolor=colour, edgecolor="0.55", linewidth=0.8))
        text = _text(value)
        axes.text(
            col + first,
            row + first,
            text,
            ha="center",
            va="center",
            fontsize=9.5 if len(text) < 5 else 8,
            color=ink_on(colour),
        )
    rows, cols = cells.shape
    axes.set(
        xlim=(first - 0.6, cols + first - 0.4),
        ylim=(lines + first - 0.4, first - 0.6),
        xticks=range(first, cols + first),
        yticks=range(first, rows + first),
        aspect="equal",
        anchor="N",
    )
    axes.xaxis.tick_top()  # small tables end above the bottom of large ones
    axes.xaxis.set_label_position("top")
    axes.tick_params(labelsize=8, length=0)
    for side in axes.spines.values():
        side.set_visible(False)


def _frame(axes, row, col, n_rows, n_cols, style):
    axes.add_patch(
        Rectangle(
            (col - 0.5, row - 0.5), n_cols, n_rows, facecolor="none", linewidth=3, zorder=3, **style
        )
    )
