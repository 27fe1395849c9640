"""Pictures of a network's parts and results: fragments, losses, confusions, relative speeds."""

import numpy as np
from matplotlib.patches import Rectangle

from .basic import LINES
from .picture import INK, LIMIT, PAPER, Picture, caption, ink_on, require_dict

SHADES = ("#ffffff", "#cfe0f0", "#f3c581", "#8fb4d6")
STYLES = (
    {"color": "#1f5f99", "linestyle": "-"},
    {"color": "#12705a", "linestyle": "-."},
    {"color": "#c4621a", "linestyle": (0, (4, 2))},
    {"color": "#8a4a7d", "linestyle": ":"},
)


def fragments(matrices, *, lane=None, title="", alt=None):
    """Draw which lane of a warp holds which number of some matrices, and in which register.

    Args:
        matrices: dict from a title to `(lanes, registers)`, int arrays of one shape `(rows, cols)`,
            8 columns at most. A cell says its lane, and small, its register; registers differ in
            shade.
        lane: a lane whose cells get a thick frame.
        title: heading of the whole.
        alt: alternative text; by default where the numbers of `lane`, or of lane 0, are.

    Raises:
        ValueError: no matrices, or one of a wrong shape.
    """
    require_dict("matrices", matrices)
    if not matrices:
        raise ValueError("fragments needs at least one matrix")
    for name, (lanes, registers) in matrices.items():
        if np.ndim(lanes) != 2 or np.shape(lanes) != np.shape(registers):
            raise ValueError(f"{name}: lanes and registers must be (rows, cols), of one shape")
    shown = 0 if lane is None else lane
    alt = alt or f"Lane {shown} holds " + "; ".join(
        f"of {name} (row, column) "
        + ", ".join(f"({r}, {c})" for r, c in np.argwhere(np.asarray(lanes) == shown).tolist())
        for name, (lanes, _) in matrices.items()
    )
    tallest = max(np.shape(lanes)[0] for lanes, _ in matrices.values())
    figure = Picture(0.3 * tallest + 1.0 + (0.3 if title else 0), alt)
    panels = figure.subplots(1, len(matrices), squeeze=False)[0]
    for axes, (name, (lanes, registers)) in zip(panels, matrices.items(), strict=True):
        rows, cols = np.shape(lanes)
        for (row, col), number in np.ndenumerate(lanes):
            register = registers[row][col]
            shade = SHADES[register % len(SHADES)]
            axes.add_patch(
                Rectangle((col - 0.5, row - 0.5), 1, 1, facecolor=shade, edgecolor="0.55")
            )
            axes.text(col - 0.12, row, f"{number}", ha="center", va="center", fontsize=9)
            axes.text(col + 0.3, row + 0.2, f"{register}", ha="center", va="center", fontsize=6)
        for row, col in np.argwhere(np.asarray(lanes) == lane):
            axes.add_patch(
                Rectangle((col - 0.5, row - 0.5), 1, 1, fill=False, edgecolor=INK, linewidth=2.4)
            )
        axes.set(xlim=(-0.55, cols - 0.45), ylim=(tallest - 0.45, -0.55), xticks=range(cols),
                 yticks=range(rows), xlabel="column")  # fmt: skip
        axes.tick_params(length=0, labelsize=8)
        axes.spines[:].set_visible(False)
        axes.set_title(name, fontsize=11)
    panels[0].set_ylabel("row")
    if title:
        figure.suptitle(title, fontweight="bold")
    return figure


def losses(curves, *, xlabel="step", title="", device="", date="", alt=None):
    """Draw losses of several runs over their steps, those of one label in one style.

    Args:
        curves: list of `(label, steps, losses)`; four labels at most, any number of runs of each.
        xlabel: what is counted.
        title, device, date: heading, and where and when it was recorded.
        alt: alternative text; by default each label's first and last loss.

    Raises:
        ValueError: no curves, too many labels, or as many losses as steps are not there.
    """
    curves = [(label, list(steps), list(values)) for label, steps, values in curves]
    labels = list(dict.fromkeys(label for label, *_ in curves))
    if not 0 < len(labels) <= len(STYLES):
        raise ValueError(f"losses needs one to {len(STYLES)} labels, not {len(labels)}")
    if any(len(steps) != len(values) or not steps for _, steps, values in curves):
        raise ValueError("each curve needs as many losses as steps, and one at least")
    alt = alt or "Losses: " + "; ".join(
        f"{label} from {values[0]:.3f} to {values[-1]:.3f}" for label, _, values in curves
    )
    figure = Picture(4.0, alt)
    axes = figure.subplots()
    for label, steps, values in curves:
        style = STYLES[labels.index(label)]
        axes.plot(steps, values, linewidth=1.2, alpha=0.85, **style)
    for label in labels:
        axes.plot([], [], linewidth=1.8, label=label, **STYLES[labels.index(label)])
    axes.set(xlabel=xlabel, ylabel="loss", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    axes.set_title(title, loc="left", fontweight="bold")
    caption(axes, device, date)
    return figure


def confusion(counts, names, *, title="", device="", date="", alt=None):
    """Draw which class is taken for which: a table, dark where the share of the row is large.

    Args:
        counts: `(classes, classes)` whole numbers: rows are true classes, columns answers.
        names: of the classes.
        title, device, date: heading, and where and when it was recorded.
        alt: alternative text; by default the share of right answers and the commonest mistake.

    Raises:
        ValueError: no square table, or another number of names.
    """
    counts = np.asarray(counts)
    if counts.ndim != 2 or counts.shape != (len(names), len(names)):
        raise ValueError(f"{len(names)} names need as many rows and columns, not {counts.shape}")
    wrong = counts - np.diag(np.diag(counts))
    row, col = np.unravel_index(wrong.argmax(), wrong.shape)
    total = max(counts.sum(), 1)
    alt = alt or (
        f"{np.trace(counts) / total:.1%} of {counts.sum():,} are right; the commonest mistake, "
        f"{wrong[row, col]} times: {names[row]} taken for {names[col]}"
    )
    figure = Picture(5.6, alt)
    axes = figure.subplots()
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    for (row, col), share in np.ndenumerate(shares):
        # The root, so that a few mistakes among thousands are seen.
        depth = np.sqrt(share)
        shade = tuple(1 - depth * (1 - part) for part in (0x1F / 255, 0x5F / 255, 0x99 / 255))
        axes.add_patch(Rectangle((col - 0.5, row - 0.5), 1, 1, facecolor=shade, edgecolor=PAPER))
        if counts[row, col]:
            axes.text(col, row, f"{counts[row, col]}", ha="center", va="center", fontsize=9,
                      color=ink_on(shade))  # fmt: skip
    n = len(names)
    axes.set(xlim=(-0.5, n - 0.5), ylim=(n - 0.5, -0.5), xlabel="answer", ylabel="true class")
    axes.set_xticks(range(n), names, rotation=35, ha="right")
    axes.set_yticks(range(n), names)
    axes.tick_params(length=0)
    axes.set_title(title, loc="left", fontweight="bold")
    caption(axes, device, date)
    return figure


def relative(panels, x, *, xlabel, ylabel, title="", device="", date="", alt=None):
    """Draw ratios over a size, several panels with the same axes, both logarithmic; 1 is a line.

    Args:
        panels: dict from a heading to a dict from a label to ratios, as many as `x`; every panel
            with the same labels, four at most.
        x: the sizes, positive and rising; each is a tick.
        xlabel, ylabel: what the axes mean.
        title, device, date: heading, and where and when it was recorded.
        alt: alternative text; by default every ratio.

    Raises:
        ValueError: no panels, other labels than in the first, or a number that is not positive.
    """
    require_dict("panels", panels)
    labels = [list(series) for series in panels.values()]
    if not panels or labels.count(labels[0]) < len(labels) or not 0 < len(labels[0]) <= len(LINES):
        raise ValueError(f"relative needs panels with the same 1 to {len(LINES)} labels")
    ratios = [value for series in panels.values() for each in series.values() for value in each]
    if any(len(each) != len(x) for series in panels.values() for each in series.values()):
        raise ValueError(f"each label needs {len(x)} ratios, one for each size")
    if not min([*ratios, *x]) > 0:
        raise ValueError("the axes are logarithmic: every number must be positive")
    alt = alt or f"{ylabel} over {xlabel}: " + "; ".join(
        f"{name}, {label}: "
        + ", ".join(f"{y:.2f} at {size:,}" for size, y in zip(x, each, strict=True))
        for name, series in panels.items()
        for label, each in series.items()
    )
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    figure = Picture(2.5 * rows + 0.9, alt)
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    low = min(0, int(np.floor(np.log2(min(ratios)))))
    high = max(1, int(np.ceil(np.log2(max(ratios)))))
    for axes, (name, series) in zip(grid.ravel(), panels.items(), strict=False):
        axes.axhline(1, color=LIMIT, linestyle="--", linewidth=2, zorder=0.5)
        for (label, each), line in zip(series.items(), LINES, strict=False):
            axes.plot(x, each, label=label, linewidth=1.8, **line)
        axes.set(xscale="log", yscale="log", ylim=(2.0**low, 2.0**high))
        axes.set_xticks(x, [f"{size:,}" for size in x])
        names = [f"{2**k}" if k >= 0 else f"1/{2**-k}" for k in range(low, high + 1)]
        axes.set_yticks([2.0**k for k in range(low, high + 1)], names)
        axes.minorticks_off()
        axes.grid(alpha=0.25)
        axes.set_title(name, loc="left", fontsize=11)
    for axes in grid.ravel()[len(panels):]:
        axes.set_axis_off()
    for axes in grid[-1]:
        axes.set_xlabel(xlabel)
    for axes in grid[:, 0]:
        axes.set_ylabel(ylabel)
    caption(grid[-1, 0], device, date)
    figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside lower center",
                  ncols=len(labels[0]), frameon=False)  # fmt: skip
    if title:
        figure.suptitle(title, fontweight="bold")
    return figure
