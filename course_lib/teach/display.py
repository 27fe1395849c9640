"""Showing things in a notebook, and printing them elsewhere."""

from __future__ import annotations

import io
import sys


def in_notebook() -> bool:
    """Tell whether there is a Jupyter front end to show rich output in."""
    if "IPython" not in sys.modules:
        return False
    from IPython import get_ipython

    return getattr(get_ipython(), "kernel", None) is not None


def show_rich(text: str, *, markdown: str | None = None, html: str | None = None) -> None:
    """Show Markdown or HTML in a notebook, and print `text` elsewhere."""
    if not in_notebook():
        print(text)
        return
    from IPython.display import display

    bundle = {"text/plain": text}
    if markdown is not None:
        bundle["text/markdown"] = markdown
    if html is not None:
        bundle["text/html"] = html
    display(bundle, raw=True)


def show(figure, alt: str) -> None:
    """Show a matplotlib figure with `alt`, the sentence that says what can be seen in it.

    The description is stored with the picture, for readers who can't see it, and is what is
    printed outside notebooks. The figure is closed.

    Raises
    ------
    ValueError: the description is empty.
    """
    if not alt.strip():
        raise ValueError("alt must say what the picture shows")
    import matplotlib.pyplot as plt

    if in_notebook():
        from IPython.display import display

        # No software version inside, so that the same figure gives the same bytes.
        png = io.BytesIO()
        figure.savefig(png, format="png", bbox_inches="tight", metadata={"Software": None})
        display(
            {"image/png": png.getvalue(), "text/plain": alt},
            metadata={"image/png": {"alt": alt}},
            raw=True,
        )
    else:
        print(alt)
    # An open figure would be shown again by the inline backend when the cell ends.
    plt.close(figure)
