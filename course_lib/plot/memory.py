"""Pictures of threads and memory: who handles which element, what a warp touches."""

import numpy as np
from matplotlib.colors import to_rgb
from matplotlib.patches import Rectangle

from .picture import INK, LIMIT, OURS, PAPER, WIDTH_INCHES, Picture, ink_on, require_dict

# Neighbours in this list differ in lightness as well as in hue, so they differ in grey too.
BLOCK_COLOURS = (
    "#cfe3f5", "#2c6da4", "#fbdca4", "#a3480f", "#c4e6d5", "#12705a", "#ecd3e6", "#8a4a7d",
)
UNTOUCHED = "#f1f1f1"
SENT = "#fbdca4"
MAX_CELLS = 200_000
CELLS_PER_LINE = 32  # a strip is broken into lines of one warp each


def thread_map(
    blocks, threads, *, length=None, title="", numbered=None, group="block", alt=None
):
    """Draw which thread handled which element.

    Args:
        blocks: int array with the block that handled each element, -1 where nobody did: `(n,)` for
            a 1-D array, `(H, W)` for an image, `(H, W, 2)` for an image and 2-D blocks `(x, y)`.
        threads: int array of the same shape, the thread's number (or `x, y`) within its block.
        length: 1-D only. Elements from this index on lie past the end of the array: hatched.
        title: heading of the picture.
        numbered: write the thread's number into each cell; by default when it stays legible.
        group: what `blocks` are called, where they are other teams of threads.
        alt: alternative text; by default a sentence made from the numbers.

    Raises:
        ValueError: no elements, shapes that differ, a wrong number of axes, or too many elements.
    """
    blocks, threads = np.asarray(blocks), np.asarray(threads)
    if blocks.size == 0:
        raise ValueError("thread_map needs at least one element to draw")
    if blocks.shape != threads.shape:
        raise ValueError(f"blocks {blocks.shape} and threads {threads.shape} differ in shape")
    pairs = blocks.ndim == 3 and blocks.shape[-1] == 2
    if blocks.ndim not in (1, 2) and not pairs:
        raise ValueError(f"blocks must be (n,), (H, W) or (H, W, 2), not {blocks.shape}")
    cells = blocks.shape[:2] if pairs else blocks.shape
    n_cells = int(np.prod(cells))
    if n_cells > MAX_CELLS:
        raise ValueError(f"{n_cells} elements are too many to draw ({MAX_CELLS}): pass a corner")

    strip = blocks.ndim == 1
    columns = min(n_cells, CELLS_PER_LINE) if strip else cells[1]
    rows = -(-n_cells // columns)
    limit = n_cells if length is None else length
    numbered = columns <= 40 and rows <= 40 if numbered is None else numbered
    flat_threads = threads.reshape(n_cells, -1)
    block_of, names, colours = _blocks(blocks.reshape(n_cells, -1))
    alt = alt or (
        f"{n_cells} elements coloured by the {group} that handled them ({len(names)} {group}s) and "
        f"numbered by thread; {int((block_of < 0).sum())} were handled by nobody."
    )
    side = min((WIDTH_INCHES - 1.0) / columns, 0.5 if strip else 7.0 / rows)
    figure = Picture(side * rows + 1.3, alt)
    axes = figure.subplots()
    canvas = np.full((rows * columns, 3), to_rgb(PAPER))
    for index in range(n_cells):
        row, column = divmod(index, columns)
        past_end = index >= limit
        colour = UNTOUCHED if block_of[index] < 0 else PAPER if past_end else colours[index]
        canvas[index] = to_rgb(colour)
        if past_end:
            axes.add_patch(
                Rectangle((column - 0.5, row - 0.5), 1, 1, facecolor="none", edgecolor=LIMIT,
                          hatch="////", linewidth=0)
            )
        if numbered and block_of[index] >= 0:
            text = ",".join(str(part) for part in flat_threads[index])
            size = float(np.clip(side * 72 / (1.3 + 0.5 * len(text)), 4.5, 12))
            box = {"facecolor": PAPER, "edgecolor": "none", "pad": 0.8} if past_end else None
            axes.text(column, row, text, ha="center", va="center", fontsize=size,
                      color=ink_on(colour), bbox=box)
    axes.imshow(canvas.reshape(rows, columns, 3), aspect="equal")
    _outline_blocks(axes, block_of, rows, columns)
    if strip:
        starts = range(0, rows * columns, columns) if rows > 1 else []
        axes.set_yticks(range(len(starts)), [str(start) for start in starts])
        axes.set_xlabel("element index" + (", counted from its line's start" if starts else ""))
        axes.set_ylabel("line starts at" if starts else "")
    else:
        axes.set(xlabel="column (elements)", ylabel="row (elements)")
    labels = [f"{group} {name}" for name in names]
    _legend_of_blocks(figure, labels, block_of, colours, limit < n_cells)
    axes.set_title(title, loc="left", fontweight="bold")
    return figure


def _blocks(blocks):
    """Number the distinct blocks `(n, 1 | 2)`; return cells' numbers, names and cells' colours."""
    # Row by row, as blocks are numbered by hand: sort by y first, then by x.
    keys, block_of = np.unique(blocks[:, ::-1], axis=0, return_inverse=True)
    keys, block_of = keys[:, ::-1], block_of.reshape(-1)
    handled = (keys >= 0).all(axis=1)
    number = np.where(handled, np.cumsum(handled) - 1, -1)
    names = [", ".join(str(part) for part in key) for key in keys[handled]]
    # An odd step from one line of blocks to the next keeps a light block beside a dark one.
    shade = keys[:, 0] + (5 * keys[:, 1] if keys.shape[1] == 2 else 0)
    palette = np.array(BLOCK_COLOURS)[shade % len(BLOCK_COLOURS)]
    return number[block_of], names, palette[block_of]


def _outline_blocks(axes, block_of, rows, columns):
    """Draw a line wherever two neighbouring cells belong to different blocks."""
    grid = np.full(rows * columns, -2)
    grid[: block_of.size] = block_of
    grid = grid.reshape(rows, columns)
    style = {"color": INK, "linewidth": 1.6}
    for row, column in np.argwhere(grid[:, 1:] != grid[:, :-1]):
        axes.plot([column + 0.5] * 2, [row - 0.5, row + 0.5], **style)
    for row, column in np.argwhere(grid[1:] != grid[:-1]):
        axes.plot([column - 0.5, column + 0.5], [row + 0.5] * 2, **style)
    axes.set(xlim=(-0.5, columns - 0.5), ylim=(rows - 0.5, -0.5))


def _legend_of_blocks(figure, names, block_of, colours, past_end):
    """Name the blocks underneath, when there are few enough to be told apart."""
    if len(names) > len(BLOCK_COLOURS):
        return
    handles = [
        Rectangle((0, 0), 1, 1, facecolor=colours[np.argmax(block_of == number)], edgecolor=INK)
        for number in range(len(names))
    ]
    labels = list(names)
    if (block_of < 0).any():
        handles.append(Rectangle((0, 0), 1, 1, facecolor=UNTOUCHED, edgecolor="0.6"))
        labels.append("handled by nobody")
    if past_end:
        handles.append(Rectangle((0, 0), 1, 1, facecolor=PAPER, edgecolor=LIMIT, hatch="////"))
        labels.append("past the end of the array")
    ncols = len(labels) if len(labels) <= 6 else 4
    figure.legend(handles, labels, loc="outside lower center", ncols=ncols, frameon=False)


def access_order(
    patterns, *, row_bytes, itemsize=4, sector_bytes=32, shown_rows=40, shown_columns=40,
    title="", alt=None,
):
    """Draw memory as a grid and, for each access pattern, what one warp touches of it.

    Dark cells are the elements the warp asks for in its first step, grey cells those of its later
    steps, the later the lighter. Each outlined box is a sector that memory sends for the first
    step: what is pale inside the box is sent along although nobody asked for it.

    Args:
        patterns: dict from a title to an int array `(lanes,)` or `(steps, lanes)` of addresses in
            bytes, counted from the start of the array.
        row_bytes: bytes of one line of the picture, in most cases of one image row.
        itemsize: bytes of one element.
        sector_bytes: bytes that memory sends at least.
        shown_rows, shown_columns: at most so many lines and elements of each are drawn.
        title: heading of the picture.
        alt: alternative text; by default the number of sectors of every pattern.

    Raises:
        ValueError: no pattern, an empty one, a negative address, or sizes that do not divide.
    """
    require_dict("patterns", patterns)
    patterns = {name: np.atleast_2d(np.asarray(steps)) for name, steps in patterns.items()}
    if not patterns:
        raise ValueError("access_order needs at least one pattern")
    if row_bytes % itemsize or sector_bytes % itemsize:
        raise ValueError("row_bytes and sector_bytes must be multiples of itemsize")
    for name, steps in patterns.items():
        if steps.size == 0 or steps.min() < 0:
            raise ValueError(f"pattern {name!r} needs addresses, none of them negative")

    sectors = {name: np.unique(steps[0] // sector_bytes) for name, steps in patterns.items()}
    alt = alt or "One warp's first step: " + "; ".join(
        f"{name} touches {len(touched)} sectors of {sector_bytes} bytes"
        for name, touched in sectors.items()
    )
    columns = min(row_bytes // itemsize, shown_columns)
    last_row = max(int(steps.max()) for steps in patterns.values()) // row_bytes
    rows = min(last_row + 1, shown_rows)
    panel = WIDTH_INCHES / len(patterns) - 0.6
    figure = Picture(panel / columns * rows + 1.7, alt)
    panels = figure.subplots(1, len(patterns), squeeze=False)[0]
    for axes, (name, steps) in zip(panels, patterns.items(), strict=True):
        axes.set_facecolor(UNTOUCHED)
        for row, column in _grid_places(sectors[name] * sector_bytes, row_bytes, itemsize):
            axes.add_patch(
                Rectangle((column - 0.5, row - 0.5), sector_bytes // itemsize, 1, facecolor=SENT)
            )
            axes.add_patch(  # on top of the cells
                Rectangle((column - 0.5, row - 0.5), sector_bytes // itemsize, 1, facecolor="none",
                          edgecolor=LIMIT, linewidth=1.2, zorder=4)
            )
        for step in reversed(range(len(steps))):
            shade = OURS if step == 0 else str(0.4 + 0.45 * step / len(steps))
            for row, column in _grid_places(np.unique(steps[step]), row_bytes, itemsize):
                axes.add_patch(
                    Rectangle((column - 0.4, row - 0.4), 0.8, 0.8, facecolor=shade, zorder=3)
                )
        asked, moved = len(np.unique(steps[0])) * itemsize, len(sectors[name]) * sector_bytes
        axes.set(xlim=(-0.5, columns - 0.5), ylim=(rows - 0.5, -0.5), aspect="equal",
                 xlabel="column (elements)", ylabel="row")
        axes.set_title(
            f"{name}: {len(sectors[name])} sectors\n{asked} bytes wanted, {moved} sent",
            fontsize=11,
        )
    _legend_of_access(figure, sector_bytes, any(len(steps) > 1 for steps in patterns.values()))
    if title:
        figure.suptitle(title, fontweight="bold")
    return figure


def _grid_places(addresses, row_bytes, itemsize):
    """Line and column, in elements, of each byte address."""
    return [(int(a) // row_bytes, int(a) % row_bytes // itemsize) for a in addresses]


def _legend_of_access(figure, sector_bytes, later_steps):
    handles = [
        Rectangle((0, 0), 1, 1, facecolor=OURS),
        Rectangle((0, 0), 1, 1, facecolor="0.6"),
        Rectangle((0, 0), 1, 1, facecolor=SENT, edgecolor=LIMIT),
    ]
    labels = [
        "asked for in step 0",
        "asked for in later steps",
        f"sector of {sector_bytes} bytes, sent for step 0",
    ]
    if not later_steps:
        del handles[1], labels[1]
        labels = ["asked for", f"sector of {sector_bytes} bytes, sent"]
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)


def tensor_layout(shape, *, title="", alt=None):
    """Draw a small tensor `(N, C, H, W)` as planes, each cell with its place in memory.

    Args:
        shape: four positive integers; at most 600 elements, else the numbers are unreadable.
        title: heading of the picture.
        alt: alternative text; by default the shape and the number of elements.

    Raises:
        ValueError: not four positive sizes, or too many elements.
    """
    if len(shape) != 4 or min(shape) < 1:
        raise ValueError(f"tensor_layout needs four positive sizes (N, C, H, W), not {shape}")
    n, c, h, w = shape
    if n * c * h * w > 600:
        raise ValueError(f"{n * c * h * w} elements are too many to number: 600 at most")
    places = np.arange(n * c * h * w).reshape(shape)
    alt = alt or f"The {places.size} elements of a tensor {tuple(shape)}, numbered in memory order"
    side = min((WIDTH_INCHES - 0.6 * c) / (c * w), 0.42)
    figure = Picture(n * (side * h + 0.75) + 0.5, alt)
    for image, line in enumerate(figure.subplots(n, c, squeeze=False)):
        for channel, axes in enumerate(line):
            colour = BLOCK_COLOURS[(channel + 3 * image) % len(BLOCK_COLOURS)]
            axes.imshow(np.full((h, w, 3), to_rgb(colour)), aspect="equal")
            for (row, column), place in np.ndenumerate(places[image, channel]):
                axes.text(column, row, str(place), ha="center", va="center", color=ink_on(colour),
                          fontsize=float(np.clip(side * 26, 5, 11)))
            axes.set_title(f"n = {image}, c = {channel}", fontsize=10)
            axes.set(xticks=range(w), yticks=range(h))
            axes.tick_params(labelsize=8)
            axes.set_xlabel("column w (elements)", fontsize=8)
            axes.set_ylabel("row h", fontsize=8)
    if title:
        figure.suptitle(title, fontweight="bold")
    return figure
