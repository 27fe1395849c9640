"""The pictures of lesson 2: what they say in words and numbers, and what they refuse to draw."""

import numpy as np
import pytest
from drawings import hold, texts

from course_lib import plot

A, B = THREADS = ("thread 0", "thread 1")
LOST_UPDATE = [
    (A, "read", "old = 5", 5), (B, "read", "old = 5", 5), (A, "compute", "5 + 1", 5),
    (A, "write", "write 6", 6), (B, "write", "write 6", 6),
]
VALUES = np.array([[1, 2, 3, 4], [4, 6, 3, 4], [10, 6, 3, 4]])
ADDERS = np.array([[0, 1, -1, -1], [0, -1, -1, -1]])
SOURCES = np.array([[2, 3, -1, -1], [1, -1, -1, -1]])
COUNTS = {"right": [1, 2, 3], "wrong": [1, 1, 1]}


def draw_race(steps=LOST_UPDATE, threads=THREADS):
    return plot.interleaving(steps, threads=threads, place="counts[13]", start=5)


PICTURES = {
    "histograms": lambda: plot.histograms(COUNTS, xlabel="brightness", title="two"),
    "interleaving": draw_race,
    "tree": lambda: plot.tree(VALUES, ADDERS, SOURCES, title="a tree"),
    "tree of 32": lambda: plot.tree(
        np.ones((2, 32)), np.full((1, 32), 0), np.full((1, 32), 1), title="wide"
    ),
    "run_to_run": lambda: plot.run_to_run(
        {"atomics": [1.0, 1.5, 0.5], "fixed": [1.0] * 3}, 1.1, device="a GPU", date="2026"
    ),
}


@pytest.mark.parametrize("name", PICTURES)
def test_picture_is_drawn_without_warnings(name, tmp_path):
    assert hold(PICTURES[name], tmp_path).axes[-1].get_xlabel()


def test_histograms_say_how_many_they_counted():
    figure = plot.histograms(COUNTS, xlabel="brightness", ylabel="pixels")
    assert {"right: 6 in all", "wrong: 3 in all"} <= set(texts(figure))
    assert "the highest bin 2 has 3" in figure.alt
    heights = [axes.get_ylim()[1] for axes in figure.axes]
    assert heights[0] == heights[1], "two scales would hide that one is smaller"


def test_a_race_shows_what_memory_holds_after_each_step():
    figure = draw_race()
    memory = [t for t in figure.axes[0].texts if t.get_position()[0] == 2.0]
    assert [t.get_text() for t in memory] == ["5", "5", "5", "5", "6", "6"]
    assert figure.alt.endswith("thread 1: write 6; counts[13] is 6.")


def test_a_tree_says_who_added_what():
    figure = PICTURES["tree"]()
    assert "round 1: thread 0 adds element 2 to element 0" in figure.alt
    assert figure.alt.endswith("Element 0 ends as 10.")
    assert texts(figure).count("t0") == 2 and texts(figure).count("t1") == 1


def test_run_to_run_counts_the_different_results():
    alt = PICTURES["run_to_run"]().alt
    assert "atomics: 3 runs from -0.6 to 0.4, 3 different" in alt
    assert "1 different" in alt


@pytest.mark.parametrize(
    "draw",
    [
        lambda: plot.histograms({}, xlabel="x"),
        lambda: plot.histograms({"a": [1, 2], "b": [1]}, xlabel="x"),
        lambda: plot.histograms({"a": []}, xlabel="x"),
        lambda: draw_race([]),
        lambda: draw_race([("nobody", "read", "x", 5)]),
        lambda: draw_race([(A, "ponder", "x", 5)]),
        lambda: draw_race(threads=(A,)),
        lambda: plot.tree(VALUES, ADDERS[:1], SOURCES),
        lambda: plot.tree(np.ones((2, 33)), np.zeros((1, 33)), np.zeros((1, 33))),
        lambda: plot.run_to_run({}, 1.0),
        lambda: plot.run_to_run({"a": []}, 1.0),
    ],
)
def test_refused(draw):
    with pytest.raises(ValueError):
        draw()


def test_a_ladder_may_have_another_limit_than_a_copy():
    rows = [{"label": "warp", "kind": "ours", "gbps": 2000.0}]
    figure = plot.ladder(rows, 4000.0, limit="reading alone")
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert "limit: reading alone, 4,000 GB/s" in legend
    assert "where reading alone reaches 4,000 GB/s" in figure.alt


def test_equal_sums_of_two_labels_do_not_hide_each_other():
    lines = plot.run_to_run({"one": [1.0, 2.0], "other": [1.0, 2.0]}, 1.0).axes[0].lines[:2]
    one, other = (line.get_xdata() for line in lines)
    assert min(abs(one - other)) >= 0.2 and list(np.round(one)) == [1, 2]
    alone = plot.run_to_run({"one": [1.0, 2.0]}, 1.0).axes[0].lines[0]
    assert list(alone.get_xdata()) == [1, 2]
