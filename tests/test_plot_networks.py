"""Pictures of fragments, losses and confusions: what they show, say in words, and refuse."""

import numpy as np
import pytest

from course_lib import plot

LANES = np.array([[0, 1], [2, 0]])
REGISTERS = np.array([[0, 0], [0, 1]])


def test_each_cell_says_its_lane_and_register():
    figure = plot.fragments({"A": (LANES, REGISTERS)}, lane=0, title="two registers")
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert texts == ["0", "0", "1", "0", "2", "0", "0", "1"]
    assert figure.alt == "Lane 0 holds of A (row, column) (0, 0), (1, 1)"
    frames = [patch for patch in figure.axes[0].patches if not patch.get_fill()]
    assert len(frames) == 2
    with pytest.raises(ValueError, match="at least one matrix"):
        plot.fragments({})
    with pytest.raises(ValueError, match="A: lanes and registers must be"):
        plot.fragments({"A": (LANES, REGISTERS[0])})


def test_runs_of_one_label_look_alike():
    runs = [("ours", [0, 1], [2.0, 1.0]), ("ours", [0, 1], [2.1, 1.1]), ("theirs", [0], [3.0])]
    figure = plot.losses(runs, device="a GPU", date="today")
    lines = figure.axes[0].lines
    assert len(lines) == 5 and lines[0].get_linestyle() == lines[1].get_linestyle()
    assert lines[2].get_linestyle() != lines[0].get_linestyle()
    assert "ours from 2.000 to 1.000" in figure.alt
    assert "recorded on a GPU (today)" in figure.axes[0].get_xlabel()
    for wrong in ([], [("a", [0], [])], [(str(k), [0], [1.0]) for k in range(5)]):
        with pytest.raises(ValueError):
            plot.losses(wrong)


def test_the_commonest_mistake_is_told():
    figure = plot.confusion([[8, 2], [0, 10]], ["shirt", "coat"], title="clothes")
    assert figure.alt.startswith("90.0% of 20 are right; the commonest mistake, 2 times: shirt")
    assert [text.get_text() for text in figure.axes[0].texts] == ["8", "2", "10"]
    assert plot.confusion([[0]], ["nothing"]).alt.startswith("0.0% of 0")
    with pytest.raises(ValueError, match="2 names need as many rows and columns"):
        plot.confusion([[1]], ["shirt", "coat"])


def test_ratios_share_their_axes_and_tick_the_sizes():
    series = {"captured": [1.5, 3.0, 2.0], "modules": [0.05, 0.5, 1.1]}
    panels = {"training": series, "inference": {k: v[::-1] for k, v in series.items()}}
    figure = plot.relative(panels, [1, 32, 1024], xlabel="batch", ylabel="times as fast",
                           title="ratios", device="H200", date="2026")  # fmt: skip
    left, right = figure.axes
    assert [tick.get_text() for tick in left.get_xticklabels()] == ["1", "32", "1,024"]
    heights = [tick.get_text() for tick in left.get_yticklabels()]
    assert heights == ["1/32", "1/16", "1/8", "1/4", "1/2", "1", "2", "4"]
    assert left.get_ylim() == right.get_ylim() == (1 / 32, 4)
    lines = left.lines[1:]
    assert [list(line.get_ydata()) for line in lines] == list(series.values())
    assert len({line.get_linestyle() for line in lines}) == 2  # told apart without colour
    assert list(left.lines[0].get_ydata()) == [1, 1]
    assert "training, modules: 0.05 at 1, 0.50 at 32, 1.10 at 1,024" in figure.alt
    assert left.get_xlabel() == "batch\nrecorded on H200 (2026)"
    for wrong, words in (
        ({}, "same 1 to 4 labels"),
        ({"a": {"b": [1.0]}, "c": {"d": [1.0]}}, "same 1 to 4 labels"),
        ({"a": {"b": [1.0, 2.0]}}, "1 ratios"),
        ({"a": {"b": [0.0]}}, "must be positive"),
    ):
        with pytest.raises(ValueError, match=words):
            plot.relative(wrong, [1], xlabel="batch", ylabel="times as fast")


def weighed(epoch, colour, points=("stage1", "pooled")):
    three = {"colour": colour, "brightness": 0.8 - colour, "integrated": 0.2}
    return {"epoch": epoch, "integration_weights": dict.fromkeys(points, three)}


def test_weights_of_each_point_have_a_panel():
    figure = plot.integration_weights([weighed(1, 0.4), weighed(2, 0.5)], title="weighed")
    assert [axes.get_title("left") for axes in figure.axes] == ["stage1", "pooled"]
    for axes in figure.axes:
        assert [list(line.get_ydata())[-1] for line in axes.lines] == pytest.approx([0.5, 0.3, 0.2])
        assert len({line.get_linestyle() for line in axes.lines}) == 3 and axes.get_xlabel()
    assert "share" in figure.axes[0].get_ylabel()
    assert figure.alt.startswith("Weights from epoch 1 to 2: stage1: colour from 0.40 to 0.50, ")
    five = [*(f"stage{i}" for i in range(1, 5)), "pooled"]
    panels = plot.integration_weights([weighed(7, 0.4, five)]).axes
    assert [bool(axes.get_xlabel()) for axes in panels] == [False, False, True, True, True, False]
    last = plot.integration_weights([weighed(7, 0.4)], device="H200", date="2026").axes[-1]
    assert last.get_xlabel() == "epoch\nrecorded on H200 (2026)"
    for wrong, words in (
        ([], "at least one epoch"),
        ([{"epoch": 3}], "epoch 3 has no integration_weights"),
        ([weighed(1, 0.4), weighed(2, 0.4, ["pooled"])], "epoch 2 has weights of .*'pooled'"),
        ([{"epoch": 1, "integration_weights": {"a": {}}}], "1 to 4 weights"),
    ):
        with pytest.raises(ValueError, match=words):
            plot.integration_weights(wrong)
