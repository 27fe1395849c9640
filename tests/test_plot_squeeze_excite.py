"""Pictures of squeeze and excitation: what they show, what they say in words, what they refuse."""

import pytest

from course_lib import plot

SIZES = ["48\n190²", "24\n190²"]
GROUPS = {"convolution": 50.0, "blocks": 20.0, "other": 10.0}
ROWS = [
    {"label": "eager", "read": 2.1, "written": 1.1},
    {"label": "fused", "read": 1.25, "written": 1.0},
]


def test_a_group_of_bars_for_each_size():
    figure = plot.speedups(SIZES, {"batch 1": [3.0, 2.5], "batch 8": [1.5, None]}, goal=2.75,
                           device="NVIDIA H200", date="2026-11-22")  # fmt: skip
    (axes,) = figure.axes
    assert [bar.get_height() for bar in axes.patches] == [3.0, 2.5, 1.5, 0]
    assert len({bar.get_hatch() for bar in axes.patches}) == 2  # told apart without colour
    assert {line.get_ydata()[0] for line in axes.lines} == {1, 2.75}
    assert "batch 1: 3.00 at 48 190², 2.50 at 24 190²; batch 8: 1.50 at 48 190²" in figure.alt
    assert "(pixels)\nrecorded on NVIDIA H200 (2026-11-22)" in axes.get_xlabel()
    assert axes.get_ylabel() == "times as fast as PyTorch"


def test_steps_are_as_long_as_their_times():
    figure = plot.step_times({"before": GROUPS, "after": GROUPS | {"blocks": 4.0}},
                             highlight="blocks")  # fmt: skip
    (axes,) = figure.axes
    assert [bar.get_width() for bar in axes.patches] == [50, 20, 10, 50, 4, 10]
    assert [bar.get_x() for bar in axes.patches] == [0, 50, 70, 0, 50, 54]
    shades = [bar.get_facecolor()[:3] for bar in axes.patches]
    assert shades[1] == shades[4] and sum(shades[1]) < sum(shades[0])  # the darkest
    assert "before: 80 ms, of which convolution 50, blocks 20, other 10; after: 64" in figure.alt
    assert {text.get_text() for text in axes.texts} >= {"80", "64", "20"}
    assert axes.get_xlabel() == "time on the device (ms)"


def test_bytes_are_read_and_written():
    figure = plot.bytes_moved(ROWS, goal=2.4)
    (axes,) = figure.axes
    assert [bar.get_width() for bar in axes.patches] == [2.1, 1.1, 1.25, 1.0]
    assert [bar.get_hatch() for bar in axes.patches] == [None, "///"] * 2
    assert {line.get_xdata()[0] for line in axes.lines} == {2, 2.4}
    assert "eager 2.10 + 1.10 = 3.20; fused 1.25 + 1.00 = 2.25" in figure.alt
    assert len(plot.bytes_moved(ROWS).axes[0].lines) == 1


@pytest.mark.parametrize("draw, said", [
    (lambda: plot.speedups([], {"a": []}), "not 0 and 1"),
    (lambda: plot.speedups(SIZES, {}), "not 2 and 0"),
    (lambda: plot.speedups(SIZES, dict.fromkeys("abcde", [1, 1])), "1 to 4 series"),
    (lambda: plot.speedups(SIZES, {"a": [1.0]}), "each of 2 sizes"),
    (lambda: plot.speedups(SIZES, {"a": [1.0, 0.0]}), "positive number"),
    (lambda: plot.speedups(SIZES, {"a": [None, None]}), "positive number"),
    (lambda: plot.step_times({}, highlight="a"), "at least one bar"),
    (lambda: plot.step_times({"a": {}}, highlight="a"), "at least one bar"),
    (lambda: plot.step_times({"a": {"b": -1.0}}, highlight="b"), "no time may be negative"),
    (lambda: plot.bytes_moved([]), "rows that read and write"),
    (lambda: plot.bytes_moved([ROWS[0] | {"read": 0}]), "rows that read and write"),
])
def test_refuses(draw, said):
    with pytest.raises(ValueError, match=said):
        draw()
