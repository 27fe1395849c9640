"""Everyday pictures: images side by side, curves over one axis."""

import numpy as np

from .picture import INK, WIDTH_INCHES, Picture, require_dict

LINES = (
    {"color": "#1f5f99", "linestyle": "-", "marker": "o"},
    {"color": "#c4621a", "linestyle": "--", "marker": "s"},
    {"color": "#12705a", "linestyle": ":", "marker": "^"},
    {"color": "#8a4a7d", "linestyle": "-.", "marker": "D"},
)


def images(pictures, titles=None, *, columns=None, vmin=None, vmax=None, pixels=True, title="",
           alt=None):
    """Draw images side by side, in grey or, with a last axis of 3 or 4, in colour.

    Args:
        pictures: list of arrays `(H, W)` (grey) or `(H, W, 3 | 4)` (floats 0..1 or uint8).
        titles: one heading per picture; its row and column numbers are in pixels.
        columns: pictures per line, at most 4 by default.
        vmin, vmax: the numbers drawn black and white; by default each grey picture's own extremes.
        pixels: number rows and columns; False where one looks at what is shown, not at a pixel.
        title: heading of the whole.
        alt: alternative text; by default the titles and sizes.

    Raises:
        ValueError: no pictures, an empty or wrongly shaped one, or a wrong number of titles.
    """
    pictures = [np.asarray(picture) for picture in pictures]
    if not pictures:
        raise ValueError("images needs at least one picture")
    titles = [""] * len(pictures) if titles is None else list(titles)
    if len(titles) != len(pictures):
        raise ValueError(f"{len(pictures)} pictures but {len(titles)} titles")
    for picture in pictures:
        grey, coloured = picture.ndim == 2, picture.ndim == 3 and picture.shape[-1] in (3, 4)
        if picture.size == 0 or not (grey or coloured):
            raise ValueError(f"a picture must be (H, W) or (H, W, 3 | 4), not {picture.shape}")

    columns = min(len(pictures), columns or 4)
    rows = -(-len(pictures) // columns)
    tallest = max(picture.shape[0] / picture.shape[1] for picture in pictures)
    alt = alt or "Pictures: " + "; ".join(
        f"{name or 'untitled'} ({picture.shape[1]} × {picture.shape[0]} pixels)"
        for name, picture in zip(titles, pictures, strict=True)
    )
    panel = min((WIDTH_INCHES / columns - (0.6 if pixels else 0.1)) * tallest, 4.3)
    below = 0.8 if pixels else 0.25 + 0.2 * max(name.count("\n") + 1 for name in titles)
    figure = Picture((panel + below) * rows + (0.3 if title else 0), alt)
    grid = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes, picture, name in zip(grid, pictures, titles, strict=False):
        axes.imshow(picture, cmap="gray", vmin=vmin, vmax=vmax, interpolation="nearest")
        axes.set_title(name, fontsize=11)
        if pixels:
            axes.tick_params(labelsize=8)
            axes.set_xlabel("column (pixels)", fontsize=8)
            axes.set_ylabel("row (pixels)", fontsize=8)
        else:
            axes.set(xticks=[], yticks=[])
    for axes in grid[len(pictures):]:
        axes.set_axis_off()
    if title:
        figure.suptitle(title, fontweight="bold")
    return figure


def _ends(label, x, y):
    """The first and last values of a curve, for those who don't see it, and where it ends early."""
    there = np.flatnonzero(~np.isnan(y))
    if not there.size:
        return f"{label} nowhere"
    first, last = there[0], there[-1]
    early = f", where it ends, at {x[last]:.6g}" if last < y.size - 1 else ""
    return f"{label} from {y[first]:.3g} to {y[last]:.3g}{early}"


def curves(x, series, *, xlabel, ylabel, title="", log=False, alt=None):
    """Draw several curves over one axis, told apart by dashes and markers as well as by colour.

    Args:
        x: numbers `(n,)`.
        series: dict from a label to numbers `(n,)`, four at most. Where one is infinite or NaN it
            is not drawn; a large mark stands where it ends.
        xlabel, ylabel: what the axes mean, with their units.
        title: heading of the picture.
        log: draw both axes logarithmically; `"x"` or `"y"` only that one.
        alt: alternative text; by default the labels with first and last values that are no NaN.

    Raises:
        ValueError: no points, no series, too many, one of another length than `x`, or another
            `log`.
    """
    require_dict("series", series)
    x = np.asarray(x)
    series = {label: np.asarray(y) for label, y in series.items()}
    if x.size == 0 or not series:
        raise ValueError("curves needs at least one point and one series")
    if len(series) > len(LINES):
        raise ValueError(f"{len(series)} curves are too many to tell apart: {len(LINES)} at most")
    for label, y in series.items():
        if y.shape != x.shape:
            raise ValueError(f"series {label!r} has shape {y.shape}, x has {x.shape}")
    alt = alt or f"{ylabel} over {xlabel}: " + "; ".join(
        _ends(label, x, y) for label, y in series.items())
    figure = Picture(3.8, alt)
    axes = figure.subplots()
    for (label, y), line in zip(series.items(), LINES, strict=False):
        axes.plot(x, y, label=label, markevery=max(1, x.size // 12), linewidth=2, **line)
        there = np.flatnonzero(np.isfinite(y))
        if there.size and there[-1] < y.size - 1:  # other curves may hide where this one ends
            axes.plot(x[there[-1]], y[there[-1]], markersize=12, markeredgecolor=INK,
                      **line | {"linestyle": "none"})
    if log not in (False, True, "x", "y"):
        raise ValueError(f'log is True, False, "x" or "y", not {log!r}')
    if log in (True, "x"):
        axes.set_xscale("log")
    if log in (True, "y"):
        axes.set_yscale("log")
    else:
        axes.axhline(0, color="0.7", linewidth=1, zorder=0)
    if log == "x":
        axes.xaxis.set_major_formatter("{x:,.0f}" if x.min() >= 1 else "{x:g}")
    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.set_title(title, loc="left", fontweight="bold")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    return figure
