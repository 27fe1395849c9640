"""The picture of a tape: what it shows, what it says in words, what it refuses."""

import itertools

import numpy as np
import pytest
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from course_lib import plot

DIAMOND = [
    ("x", "", ()), ("y", "x · x", ("x", "x")), ("u", "y · x", ("y", "x")),
    ("z", "u + y", ("u", "y")),
]  # fmt: skip


def boxes(figure):
    """{the first line in a box: its middle}."""
    found = {}
    for box in (p for p in figure.axes[0].patches if isinstance(p, FancyBboxPatch)):
        middle = box.get_x() + box.get_width() / 2, box.get_y() + box.get_height() / 2
        inside = [t for t in figure.axes[0].texts
                  if abs(t.get_position()[0] - middle[0]) < 0.1
                  and abs(t.get_position()[1] - middle[1]) < 0.3]
        found[inside[0].get_text()] = middle
    return found


def test_results_stand_right_of_what_they_are_made_from():
    figure = plot.tape(DIAMOND, title="a diamond")
    x = {name.split(" = ")[0]: middle[0] for name, middle in boxes(figure).items()}
    assert x["x"] < x["y"] < x["u"] < x["z"]
    arrows = [p for p in figure.axes[0].patches if isinstance(p, FancyArrowPatch)]
    assert len(arrows) == 6  # one for each use, and x is used twice for y
    assert "y = x · x of x, x" in figure.alt and "x is a leaf" in figure.alt
    assert "The way back" not in figure.alt


def test_no_box_lies_on_another_and_no_arrow_runs_behind_one():
    tensors = [("a", "", ()), ("b", "", ())]
    for i in range(8):
        inputs = (tensors[-1][0], tensors[i % 3][0])
        tensors.append((f"t{i}", "f", inputs))
    figure = plot.tape(tensors)
    places = boxes(figure).values()
    for (x, y), (other_x, other_y) in itertools.combinations(places, 2):
        assert abs(x - other_x) > 1.3 or abs(y - other_y) > 0.8
    for line in figure.axes[0].lines:  # the parts of an arrow that pass a column
        xs, ys = line.get_xdata(), line.get_ydata()
        for x, y in places:
            if xs[1] < x < xs[2]:
                assert abs(y - ys[1]) > 0.37


def test_the_way_back_is_numbered_and_told():
    figure = plot.tape(DIAMOND, order=["z", "u", "y", "x"], gradients={"x": "33"})
    written = [text.get_text() for text in figure.axes[0].texts]
    assert {"1", "2", "3", "4", "33"} <= set(written)
    assert "The way back: z, u, y, x" in figure.alt and "Gradients: x 33" in figure.alt
    assert figure.png().startswith(b"\x89PNG")


def test_leaves_and_quiet_tensors_are_told_apart_without_colour():
    figure = plot.tape([("x", "", ()), ("w", "", ()), ("y", "x · w", ("x", "w"))], quiet=["x"])
    styles = [p.get_linestyle() for p in figure.axes[0].patches if isinstance(p, FancyBboxPatch)]
    kinds = [type(p.get_boxstyle()).__name__ for p in figure.axes[0].patches
             if isinstance(p, FancyBboxPatch)]
    assert styles == ["--", "-", "-"] and kinds == ["Square", "Square", "Round"]
    grey = np.dot(figure.axes[0].patches[-1].get_facecolor()[:3], (0.299, 0.587, 0.114))
    assert grey > 0.7  # dark letters are read on it


@pytest.mark.parametrize("tensors, options, words", [
    ([], {}, "0 tensors"),
    ([(f"t{i}", "", ()) for i in range(25)], {}, "25 tensors"),
    ([("x", "", ()), ("x", "", ())], {}, "two tensors are called 'x'"),
    ([("y", "f", ("x",)), ("x", "", ())], {}, "'x', which does not come before"),
    (DIAMOND, {"order": ["q"]}, "no tensor is called 'q'"),
    (DIAMOND, {"gradients": {"q": "1"}}, "no tensor is called 'q'"),
])
def test_refuses(tensors, options, words):
    with pytest.raises(ValueError, match=words):
        plot.tape(tensors, **options)
