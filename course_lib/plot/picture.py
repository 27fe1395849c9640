"""The figure class and the style that all pictures share."""

import io
from collections.abc import Mapping

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from PIL import Image  # Matplotlib needs it as well

WIDTH_INCHES = 9.0  # at 100 screen pixels per inch: the width of a notebook column
SCREEN_DPI = 100
STORED_DPI = 160  # sharper than the screen needs, so that text stays crisp on dense displays
OURS, PEER, LIMIT, INK, PAPER = "#1f5f99", "#f3c581", "#b3261e", "#22272e", "#ffffff"


class Picture(Figure):
    """A Matplotlib figure with alternative text (`alt`) for readers who cannot see it."""

    def __init__(self, height_inches, alt, *, width_inches=WIDTH_INCHES):
        """Open an empty figure of the given size in inches; `alt` says in words what it shows."""
        super().__init__(
            figsize=(width_inches, height_inches), dpi=SCREEN_DPI, facecolor=PAPER,
            layout="constrained",
        )
        FigureCanvasAgg(self)  # not pyplot's: pyplot would show the figure a second time
        self.alt = alt

    def png(self, colours=256):
        """The picture as the bytes of a PNG file of so many colours, the same in every run."""
        full, small = io.BytesIO(), io.BytesIO()
        self.savefig(full, format="png", dpi=STORED_DPI)
        # Notebooks are kept in git with their pictures: few colours are a third of the bytes.
        picture = Image.open(full).convert("RGB")
        picture = picture.quantize(colours, dither=Image.Dither.NONE)
        picture.save(small, format="png", optimize=True)
        return small.getvalue()

    def _ipython_display_(self):
        """Show the picture in a notebook, with its alternative text in the output's metadata."""
        from IPython.display import display

        width, height = (round(inches * SCREEN_DPI) for inches in self.get_size_inches())
        display(
            {"image/png": self.png(), "text/plain": self.alt},
            metadata={"image/png": {"alt": self.alt, "width": width, "height": height}},
            raw=True,
        )


def require_dict(name, value):
    """TypeError where `value`, the argument called `name`, is no dict from labels to values."""
    if not isinstance(value, Mapping):
        kind = type(value).__name__
        raise TypeError(f"{name} must be a dict from labels to values, not a {kind}")


def ink_on(colour):
    """Black or white, whichever reads better on `colour`."""
    lightness = np.dot(to_rgb(colour), (0.299, 0.587, 0.114))
    return INK if lightness > 0.55 else PAPER


def caption(axes, device, date):
    """Write under the horizontal axis where and when its numbers were measured, where known."""
    known = " ".join(part for part in (device and f"on {device}", date and f"({date})") if part)
    if known:
        axes.set_xlabel(f"{axes.get_xlabel()}\nrecorded {known}")
