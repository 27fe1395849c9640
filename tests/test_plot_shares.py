"""The picture of parts and wholes: what it shows, what it says in words, what it refuses."""

import pytest

from course_lib import plot

WHOLES = {
    "operations": {"convolution": 98.0, "gate": 1.0, "other": 1.0},
    "bytes": {"convolution": 3.0, "gate": 1.0},
}


def bars(figure):
    return [patch for patch in figure.axes[0].patches if patch.get_height() == pytest.approx(0.6)]


def test_parts_follow_each_other_and_make_100():
    figure = plot.shares(WHOLES, highlight="gate", title="a network")
    assert [bar.get_width() for bar in bars(figure)] == [98, 1, 1, 75, 25]
    assert [bar.get_x() for bar in bars(figure)] == [0, 98, 99, 0, 75]
    assert "operations: convolution 98.0, gate 1.0" in figure.alt and "gate 25.0" in figure.alt


def test_a_thin_part_is_written_beside_its_bar():
    texts = [text.get_text() for text in plot.shares(WHOLES, highlight="gate").axes[0].texts]
    assert "gate 1.0" in texts and "25" in texts


def test_parts_are_told_apart_without_colour():
    wholes = {"one": {str(number): 1 for number in range(7)}}
    found = {(bar.get_facecolor(), bar.get_hatch()) for bar in bars(plot.shares(wholes))}
    assert len(found) == 7


@pytest.mark.parametrize(
    "wholes", [{}, {"none": {}}, {"less": {"a": -1.0, "b": 2.0}}, {"nothing": {"a": 0.0}}]
)
def test_refuses(wholes):
    with pytest.raises(ValueError, match="shares|must be"):
        plot.shares(wholes)
