"""The pictures of lesson 3: what they say in words and numbers, and what they refuse to draw."""

from types import SimpleNamespace

import numpy as np
import pytest
from drawings import hold, texts

from course_lib import plot

TABLE = np.array([[0.5, 0.5, 0.0], [np.nan, np.nan, 1.0], [0.0, np.nan, np.nan]])
LANES = np.array([[3, 1, 4, 1], [3, 3, 4, 4], [4, 4, 4, 4]])
X, M = np.array([1.0, 3.0, 2.0]), np.array([1.0, 3.0, 3.0])
S = np.array([1.0, 1 + np.exp(-2), 1 + np.exp(-2) + np.exp(-1)])


def site(op, array, line, n_bytes, space="global"):
    return SimpleNamespace(op=op, array=array, line=line, bytes=n_bytes, space=space)


def trace(*sites):
    return SimpleNamespace(sites=[*sites, site("load", "s", 9, 40, "shared")])


TWO = trace(site("store", "y", 5, 40), site("load", "x", 2, 40))
THREE = trace(*(site("load", "x", line, 40) for line in (2, 3, 4)), site("store", "y", 5, 40))


def draw_tables(tables=(TABLE, TABLE / 2), titles=("a", "b"), labels=(0, 10, 20)):
    return plot.probabilities(tables, titles, labels=labels, xlabel="class", ylabel="offset")


PICTURES = {
    "probabilities": draw_tables,
    "passes": lambda: plot.passes({"two": TWO, "four": THREE}, 40, title="passes"),
    "butterfly": lambda: plot.butterfly(LANES, title="a butterfly"),
    "one_pass": lambda: plot.one_pass(X, M, S, title="one pass"),
}


@pytest.mark.parametrize("name", PICTURES)
def test_picture_is_drawn_without_warnings(name, tmp_path):
    assert hold(PICTURES[name], tmp_path).axes[-1].get_xlabel()


def test_every_nan_is_marked_and_no_number_is():
    figure = draw_tables(tables=(TABLE,), titles=("a",))
    assert "a: 2 rows are not a number" in figure.alt
    covered = np.zeros(TABLE.shape, dtype=bool)
    for patch in figure.axes[0].patches:
        col, row = round(patch.get_x() + 0.5), round(patch.get_y() + 0.5)
        covered[row, col : col + round(patch.get_width())] = True
    assert np.array_equal(covered, np.isnan(TABLE))


def test_passes_count_what_was_asked_for():
    figure = PICTURES["passes"]()
    assert "two 2, that is load of x 1, store of y 1" in figure.alt
    assert texts(figure).count("read x") == 4 and texts(figure).count("write y") == 2
    assert {"2", "4"} <= set(texts(figure))


def test_each_kernel_may_have_a_least_of_its_own():
    figure = plot.passes({"two": TWO, "four": THREE}, 40, least={"two": 1, "four": 3})
    lines = [line.get_xdata()[0] for line in figure.axes[0].lines]
    assert lines == [1, 3]
    assert texts(figure).count("the least") == 1
    assert [line.get_xdata()[0] for line in PICTURES["passes"]().axes[0].lines] == [2, 2]


def test_what_is_too_narrow_for_an_outline_is_named_at_the_end():
    small = [site("load", "target", 1, 0.1), site("store", "loss", 7, 0.1)]
    figure = plot.passes({"forward": trace(site("load", "x", 2, 40), *small)}, 40)
    assert "1.01 (the black rest: target, loss)" in texts(figure)
    assert [text for text in texts(figure) if text.startswith(("read", "write"))] == ["read x"]
    assert "load of target 0.0025" in figure.alt


def test_a_narrow_part_keeps_its_name():
    narrow = [site("load", name, 1, 4) for name in ("target", "m")]
    figure = plot.passes({"backward": trace(*narrow, site("load", "logits", 2, 100))}, 40)
    named = {text.get_text(): text for text in figure.axes[0].texts}
    assert named["target"].get_rotation() == 90 and "m" in named and "read logits" in named


def test_a_butterfly_says_what_lanes_hold():
    figure = PICTURES["butterfly"]()
    assert figure.alt.endswith("after round 2: 4 4 4 4")
    assert "at first: 3 1 4 1" in figure.alt


def test_one_pass_tells_the_factor_of_each_new_maximum():
    figure = PICTURES["one_pass"]()
    shown = [text.get_text() for text in figure.axes[1].texts]
    assert shown[::2] == ["× 0\n+ 1", f"× {np.exp(-2):.2g}\n+ 1", f"+ {np.exp(-1):.2g}"]


@pytest.mark.parametrize(
    "draw",
    [
        lambda: draw_tables(tables=()),
        lambda: draw_tables(tables=(TABLE, TABLE[:2])),
        lambda: draw_tables(labels=(1, 2)),
        lambda: draw_tables(titles=("a",)),
        lambda: plot.passes({}, 40),
        lambda: plot.passes({"none": SimpleNamespace(sites=[])}, 40),
        lambda: plot.passes({"two": TWO}, 0),
        lambda: plot.passes({"two": TWO}, 40, least={"four": 2}),
        lambda: plot.butterfly(LANES[0]),
        lambda: plot.butterfly(np.zeros((4, 4))),
        lambda: plot.butterfly(np.zeros((2, 17))),
        lambda: plot.one_pass([], [], []),
        lambda: plot.one_pass(X, M, S[:2]),
        lambda: plot.one_pass(np.zeros(13), np.zeros(13), np.ones(13)),
    ],
)
def test_refused(draw):
    with pytest.raises(ValueError):
        draw()
