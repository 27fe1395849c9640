"""What every picture of the lessons is held to."""

import warnings

from matplotlib.text import Text


def hold(draw, folder):
    """`draw()`: without a warning, told in words, and as wide as a notebook's column."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure = draw()
        figure.savefig(folder / "picture.png")
    assert len(figure.alt) > 15
    assert 800 <= figure.get_size_inches()[0] * figure.dpi <= 1000, "made for a notebook column"
    return figure


def texts(figure):
    """Everything written on it."""
    return [text.get_text() for text in figure.findobj(Text)]
