"""Pictures of convolution: what they show, what they say in words, what they refuse."""

import numpy as np
import pytest

from course_lib import plot

X, WEIGHT, Y = np.arange(16.0).reshape(4, 4), np.ones((3, 3)), np.ones((4, 4))
ROWS = [{"label": "direct", "kind": "ours", "tflops": 2.0},
        {"label": "cuDNN", "kind": "peer", "tflops": 50.0}]  # fmt: skip


def texts(axes):
    return [text.get_text() for text in axes.texts]


def test_windows_are_framed_where_they_lie():
    figure = plot.windows(X, WEIGHT, Y, [(0, 0), (1, 2)], padding=1, title="Two windows")
    left, middle, right = figure.axes
    assert len(texts(left)) == 36 and len(texts(middle)) == 9 and len(texts(right)) == 16
    frames = [patch for patch in left.patches if patch.get_linewidth() == 3]
    assert [patch.get_xy() for patch in frames] == [(-1.5, -1.5), (0.5, -0.5)]
    assert len({patch.get_linestyle() for patch in frames}) == 2  # told apart without colour
    assert "y[1, 2] = 1 is made of rows 0 to 2, columns 1 to 3" in figure.alt
    strided = plot.windows(X, WEIGHT, np.ones((1, 1)), [(0, 0)], stride=2)
    assert "rows 0 to 2" in strided.alt


def test_grids_of_numbers_and_of_words():
    figure = plot.grids([[[1, 22]], [["a", ""]]], ["one", "two"], marked=[[(0, 1, 1, 1)], []])
    assert [texts(axes) for axes in figure.axes] == [["1", "22"], ["a", ""]]
    assert figure.alt == "one: 1 22; two: a –"
    light, dark = figure.axes[0].patches[:2]
    assert sum(light.get_facecolor()[:3]) > sum(dark.get_facecolor()[:3])
    assert sum(patch.get_linewidth() == 3 for patch in figure.axes[0].patches) == 1


def test_bars_and_limits():
    figure = plot.arithmetic(ROWS, {"float32": 67.0, "TF32": 495.0}, device="NVIDIA H200")
    (axes,) = figure.axes
    assert [bar.get_width() for bar in axes.patches] == [2.0, 50.0]
    assert [line.get_xdata()[0] for line in axes.lines] == [67.0, 495.0]
    assert len({line.get_linestyle() for line in axes.lines}) == 2
    assert "cuDNN 50, limit (float32) 67, limit (TF32) 495" in figure.alt
    assert "recorded on NVIDIA H200" in axes.get_xlabel()


def test_what_is_asked_for_by_array():
    parts = {"direct": [("x", "load", 9.0), ("y", "store", 1.0)], "tiled": [("x", "load", 2.0)]}
    figure = plot.asked(parts, title="Asked")
    (axes,) = figure.axes
    assert [bar.get_width() for bar in axes.patches] == [9, 1, 2]
    assert [bar.get_x() for bar in axes.patches] == [0, 9, 0]
    assert axes.patches[0].get_hatch() != axes.patches[1].get_hatch()
    assert figure.alt == (
        "Asked for, in sizes of x: direct 10, that is load x 9, store y 1; tiled 2, that is "
        "load x 2"
    )
    assert [text.get_text() for text in figure.legends[0].texts] == ["read x", "write y"]


@pytest.mark.parametrize("draw, said", [
    (lambda: plot.windows(X, WEIGHT, Y, []), "1 to 3 places"),
    (lambda: plot.windows(X, WEIGHT, Y, [(4, 0)]), "4 × 4 places"),
    (lambda: plot.windows(np.ones((20, 20)), WEIGHT, Y, [(0, 0)]), "too many cells"),
    (lambda: plot.grids([], []), "needs tables"),
    (lambda: plot.grids([[1, 2]], [""]), "needs tables"),
    (lambda: plot.grids([[[1]]], []), "1 tables but 0"),
    (lambda: plot.asked({}), "ask for something"),
    (lambda: plot.asked({"a": [("x", "load", 0.0)]}), "ask for something"),
    (lambda: plot.arithmetic([], {}), "needs rows"),
    (lambda: plot.arithmetic(ROWS, dict.fromkeys("abcde", 1.0)), "4 limits at most"),
    (lambda: plot.arithmetic(ROWS, {"none": 0.0}), "must be positive"),
])  # fmt: skip
def test_what_cannot_be_drawn_is_refused(draw, said):
    with pytest.raises(ValueError, match=said):
        draw()


def test_bars_without_a_limit_fill_the_axis():
    figure = plot.arithmetic([{**row, "tflops": row["tflops"] / 10} for row in ROWS], {})
    (axes,) = figure.axes
    assert not axes.lines and axes.get_xlim()[1] == pytest.approx(5.5)
    assert figure.alt == "TFLOP/s: direct 0.2, cuDNN 5"
