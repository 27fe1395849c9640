"""The pictures of the README: a cell, and all results as ratios."""

import io

import numpy as np
import pytest
from matplotlib.colors import to_hex
from PIL import Image

from course_lib import plot
from course_lib.plot.picture import OURS, PEER

GROUPS = {"relu": [0.5, 0.9, 1.2], "linear": [2.0, 4.0], "adamw": [0.25]}


def test_every_case_is_a_dot_on_its_side_of_one():
    figure = plot.ratios(GROUPS, title="All", device="A chip", date="2026-11-24")
    axes, ends = figure.axes
    dots = {to_hex(found.get_facecolor()[0][:3]): [] for found in axes.collections
            if len(found.get_offsets())}  # fmt: skip
    for found in axes.collections:
        if len(found.get_offsets()):
            dots[to_hex(found.get_facecolor()[0][:3])] += found.get_offsets()[:, 0].tolist()
    assert sorted(dots[OURS]) == [0.25, 0.5, 0.9] and sorted(dots[PEER]) == [1.2, 2.0, 4.0]
    assert axes.get_xscale() == "log"
    assert [label.get_text() for label in axes.get_yticklabels()] == list(GROUPS)
    told = [label.get_text() for label in ends.get_yticklabels()]
    assert told == ["1 of 3 slower, at worst 1.20×", "2 of 2 slower, at worst 4.00×",
                    "none of 1 slower"]  # fmt: skip
    assert "relu 0.50 to 1.20, 1 of 3 slower" in figure.alt
    assert "recorded on A chip (2026-11-24)" in axes.get_xlabel()


def test_dots_stay_in_their_row():
    figure = plot.ratios({"many": np.linspace(0.2, 3, 300), "few": [0.5]})
    for found in figure.axes[0].collections:
        y = np.asarray(found.get_offsets())[:, 1]
        assert ((abs(y) < 0.5) | (abs(y - 1) < 0.5)).all()


@pytest.mark.parametrize("groups", [{}, {"a": []}, {"a": [1.0, 0.0]}])
def test_ratios_must_be_positive(groups):
    with pytest.raises(ValueError, match="every row needs ratios"):
        plot.ratios(groups)


SOURCE = "@cuda.jit\ndef f(x):\n    x[0] = 'a'  # it\n"


def texts(figure):
    return [text.get_text() for text in figure.texts]


def test_a_cell_shows_code_output_and_marks():
    figure = plot.cell(SOURCE, "a race " * 12, marked=[3], title="Look", width_inches=2.7,
                       height_inches=2.0)  # fmt: skip
    found = texts(figure)
    assert found[0] == "Look" and {" 1", " 2", " 3"} <= set(found)
    assert {"def", "f", "'a'", "# it"} <= set(found)
    assert " ".join(found[-3:]).split() == ["a", "race"] * 12  # wrapped
    assert len(figure.artists) + len(figure.patches) >= 2
    with Image.open(io.BytesIO(figure.png())) as picture:
        assert picture.width == round(2.7 * 160)
    assert "def f" in figure.alt and "a race" in figure.alt


def test_a_cell_without_marks_has_no_numbers_and_keeps_inside():
    figure = plot.cell(SOURCE, "fine")
    assert " 1" not in texts(figure)
    figure.canvas.draw()
    for text in figure.texts:
        box = text.get_window_extent().transformed(figure.transFigure.inverted())
        assert box.x0 >= 0 and box.x1 <= 1 and box.y0 >= 0 and box.y1 <= 1.01, text


def test_what_a_cell_refuses():
    with pytest.raises(ValueError, match="needs code"):
        plot.cell(" \n", "")
    with pytest.raises(ValueError, match=r"lines \[4\] are marked, of 3"):
        plot.cell(SOURCE, "", marked=[4])
