"""Pictures of threads that work together: histograms, a race walked through, trees of sums."""

import numpy as np
from matplotlib.patches import FancyArrowPatch, Rectangle

from .basic import LINES
from .memory import BLOCK_COLOURS, UNTOUCHED
from .picture import INK, LIMIT, OURS, PAPER, WIDTH_INCHES, Picture, caption, ink_on, require_dict

MAX_TREE = 32  # more cells in a line are too narrow for their numbers
ACTIONS = ("read", "compute", "write")


def histograms(counts, *, xlabel, ylabel="count", title="", alt=None):
    """Draw histograms above each other, over one axis and to one scale.

    Args:
        counts: dict from a title to numbers `(n_bins,)`, all of the same length.
        xlabel, ylabel: what a bin and its number mean, with units.
        title: heading of the whole.
        alt: alternative text; by default each one's sum and highest bin.

    Raises:
        ValueError: nothing to draw, or histograms of different lengths.
    """
    require_dict("counts", counts)
    counts = {name: np.asarray(numbers) for name, numbers in counts.items()}
    lengths = {numbers.shape for numbers in counts.values()}
    if len(lengths) != 1 or len(next(iter(lengths))) != 1 or (0,) in lengths:
        raise ValueError(f"histograms needs (n_bins,) numbers of one length, not {lengths or '{}'}")
    alt = alt or "Histograms: " + "; ".join(
        f"{name}: {numbers.sum():,} in all, the highest bin {numbers.argmax()} has "
        f"{numbers.max():,}"
        for name, numbers in counts.items()
    )
    figure = Picture(1.45 * len(counts) + 0.7 + (0.3 if title else 0), alt)
    panels = figure.subplots(len(counts), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for axes, (name, numbers) in zip(panels, counts.items(), strict=True):
        edges = np.arange(numbers.size + 1) - 0.5
        axes.stairs(numbers, edges, fill=True, color=OURS)
        axes.set_title(f"{name}: {numbers.sum():,} in all", loc="left", fontsize=11)
        axes.set(xlabel=xlabel if axes is panels[-1] else "", ylabel=ylabel)
        axes.set_xlim(-0.5, numbers.size - 0.5)
        axes.grid(axis="y", alpha=0.25)
    if title:
        figure.suptitle(title, fontweight="bold")
    return figure


def interleaving(steps, *, threads, place, start, title="", alt=None):
    """Draw what two threads do to one place in memory, step after step, downwards.

    Args:
        steps: list of `(thread, action, text, value)` in the order of time: `thread` is one of
            `threads`, `action` "read", "compute" or "write", `text` what it says in its box, and
            `value` the number that the place holds afterwards.
        threads: the names of the two threads.
        place: the name of the place in memory.
        start: the number it holds at first.
        title: heading of the picture.
        alt: alternative text; by default the steps in words.

    Raises:
        ValueError: no steps, not two threads, or a step of an unknown thread or action.
    """
    steps = list(steps)
    if not steps or len(threads) != 2:
        raise ValueError("interleaving needs at least one step, and two threads")
    for thread, action, *_ in steps:
        if thread not in threads or action not in ACTIONS:
            raise ValueError(f"unknown step {(thread, action)}: {threads} may {ACTIONS}")
    alt = alt or f"{place} is {start}. " + " ".join(
        f"{thread}: {text}; {place} is {value}." for thread, _, text, value in steps
    )
    figure = Picture(0.46 * (len(steps) + 1) + 0.95, alt)
    axes = figure.subplots()
    columns = {threads[0]: 0.0, threads[1]: 4.0}
    centre, half, held = 2.0, 0.72, start
    _cell(axes, centre, 0, 0.42, str(start), UNTOUCHED)
    for time, (thread, action, text, value) in enumerate(steps, start=1):
        column = columns[thread]
        colour = {"read": "#cfe3f5", "compute": PAPER, "write": "#f3c581"}[action]
        _cell(axes, column, time, half, text, colour)
        changed = value != held
        written = action == "write"
        _cell(axes, centre, time, 0.42, str(value), "#f3c581" if written else UNTOUCHED,
              bold=written, edge=INK if changed or written else "0.7")
        side = 1 if column > centre else -1
        inner, outer = centre + side * 0.45, column - side * (half + 0.03)
        if action != "compute":
            ends = [(outer, time), (inner, time)]
            tail, head = ends if written else ends[::-1]
            axes.add_patch(FancyArrowPatch(tail, head, arrowstyle="-|>", mutation_scale=14,
                                           color=INK, linewidth=1.5, shrinkA=0, shrinkB=0))
        held = value
    axes.set_xticks([0.0, centre, 4.0], [threads[0], place, threads[1]], fontsize=11)
    axes.tick_params(axis="x", top=True, labeltop=True, bottom=False, labelbottom=False, length=0)
    axes.set_yticks(range(len(steps) + 1))
    axes.set(xlim=(-0.9, 4.9), ylim=(len(steps) + 0.6, -0.6), ylabel="time (steps)")
    axes.set_xlabel("who reads (blue) and writes (orange), and what memory holds (middle)")
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.set_title(title, loc="left", fontweight="bold")
    return figure


def _cell(axes, x, y, half_width, text, colour, *, bold=False, edge=INK):
    axes.add_patch(
        Rectangle((x - half_width, y - 0.36), 2 * half_width, 0.72, facecolor=colour,
                  edgecolor=edge, linewidth=1)
    )
    axes.text(x, y, text, ha="center", va="center", fontsize=10, color=ink_on(colour),
              fontweight="bold" if bold else "normal")


def tree(values, threads, sources, *, title="", alt=None):
    """Draw a reduction round by round: who added what to what.

    Args:
        values: numbers `(rounds + 1, n)`: the array before the first round and after each.
        threads: int `(rounds, n)`: the thread that added to the element in this round, else -1.
        sources: int `(rounds, n)`: the index of the element that it added, else -1.
        title: heading of the picture.
        alt: alternative text; by default the additions of every round in words.

    Raises:
        ValueError: shapes that do not fit together, or more than 32 elements.
    """
    values, threads, sources = (np.asarray(each) for each in (values, threads, sources))
    if values.ndim != 2 or threads.shape != sources.shape or threads.shape != (
        len(values) - 1, values.shape[1],
    ):
        raise ValueError(
            f"values {values.shape}, threads {threads.shape} and sources {sources.shape} must be "
            "(rounds + 1, n), (rounds, n) and (rounds, n)"
        )
    rounds, n = threads.shape
    if not 0 < n <= MAX_TREE:
        raise ValueError(f"{n} elements cannot be drawn: 1 to {MAX_TREE}")
    alt = alt or _tree_in_words(threads, sources, values)
    side = min((WIDTH_INCHES - 1.2) / n, 0.5)
    gap = 2.0  # from one line of cells to the next, in cells
    figure = Picture(side * (gap * rounds + 1.2) + 1.3, alt)
    axes = figure.subplots()
    for line in range(rounds + 1):
        adds = threads[line - 1] if line else np.full(n, -1)
        for i in range(n):
            used = line < rounds and (threads[line, i] >= 0 or i in sources[line])
            active = adds[i] >= 0
            colour = BLOCK_COLOURS[adds[i] % 8] if active else (PAPER if used else UNTOUCHED)
            _number(axes, i, gap * line, values[line, i], colour, side, faint=not (used or active))
            if active:
                _addition(axes, i, sources[line - 1, i], adds[i], gap * line, gap, side)
    labels = ["at first", *(f"after round {line}" for line in range(1, rounds + 1))]
    axes.set_yticks(gap * np.arange(rounds + 1), labels)
    axes.set_xticks(range(n))
    axes.tick_params(length=0)
    axes.set(xlim=(-0.7, n - 0.3), ylim=(gap * rounds + 0.7, -0.7), aspect="equal",
             xlabel="index in shared memory (elements); t3: thread 3 did this addition")
    axes.spines[:].set_visible(False)
    axes.set_title(title, loc="left", fontweight="bold")
    return figure


def _number(axes, x, y, value, colour, side, *, faint):
    axes.add_patch(Rectangle((x - 0.5, y - 0.4), 1, 0.8, facecolor=colour,
                             edgecolor="0.75" if faint else INK, linewidth=1))
    text = f"{value:g}"
    size = float(np.clip(side * 72 / (1.2 + 0.55 * len(text)), 5, 12))
    axes.text(x, y, text, ha="center", va="center", fontsize=size,
              color="0.6" if faint else ink_on(colour))


def _addition(axes, into, source, thread, y, gap, side):
    top, bottom = y - gap + 0.42, y - 0.42
    for start, width in ((source, 1.4), (into, 1.0)):
        axes.add_patch(FancyArrowPatch((start, top), (into, bottom), arrowstyle="-|>",
                                       mutation_scale=9, color=INK, linewidth=width,
                                       shrinkA=0, shrinkB=0))
    axes.text(into - 0.16, bottom - 0.42, f"t{thread}", ha="right", va="center", color=OURS,
              fontsize=float(np.clip(side * 22, 6, 10)), fontweight="bold",
              bbox={"facecolor": PAPER, "edgecolor": "none", "pad": 0.6})


def _tree_in_words(threads, sources, values):
    lines = [
        f"round {number + 1}: " + ", ".join(
            f"thread {threads[number, i]} adds element {sources[number, i]} to element {i}"
            for i in np.flatnonzero(threads[number] >= 0)
        )
        for number in range(len(threads))
    ]
    return "A tree of sums. " + "; ".join(lines) + f". Element 0 ends as {values[-1, 0]:g}."


def run_to_run(sums, exact, *, ylabel="sum − exact sum (no unit)", title="", device="", date="",
               alt=None):
    """Draw the results of the same sum, taken again and again, as distances from the exact one.

    Args:
        sums: dict from a label to numbers `(runs,)`, four at most.
        exact: the exact sum.
        ylabel: what the distance means, with its unit.
        title: heading of the picture.
        device, date: where and when this was measured, for the line underneath.
        alt: alternative text; by default the least and greatest distance of each.

    Raises:
        ValueError: no runs, or more than four labels.
    """
    require_dict("sums", sums)
    sums = {label: np.asarray(values, dtype=np.float64) for label, values in sums.items()}
    if not sums or len(sums) > len(LINES) or min(values.size for values in sums.values()) == 0:
        raise ValueError(f"run_to_run needs one to {len(LINES)} labels, each with its runs")
    alt = alt or f"Sums minus the exact sum {exact:g}: " + "; ".join(
        f"{label}: {values.size} runs from {(values - exact).min():.3g} to "
        f"{(values - exact).max():.3g}, {np.unique(values).size} different"
        for label, values in sums.items()
    )
    figure = Picture(3.4, alt)
    axes = figure.subplots()
    for number, ((label, values), line) in enumerate(zip(sums.items(), LINES, strict=False)):
        style = line | {"linestyle": "none"}
        aside = 0.2 * (number - (len(sums) - 1) / 2)  # equal sums must not hide each other
        axes.plot(np.arange(1, values.size + 1) + aside, values - exact, label=label, markersize=8,
                  markeredgecolor=INK, **style)
    axes.axhline(0, color=LIMIT, linestyle="--", linewidth=1.5, label="exact", zorder=0)
    most = max(values.size for values in sums.values())
    axes.set_xticks(range(1, most + 1, max(1, most // 20)))
    axes.set(xlabel="run (number)", ylabel=ylabel)
    axes.set_title(title, loc="left", fontweight="bold")
    axes.grid(alpha=0.25)
    figure.legend(loc="outside lower center", ncols=len(sums) + 1, frameon=False)
    caption(axes, device, date)
    return figure
