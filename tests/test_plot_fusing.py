"""Pictures of fusing: what they show, what they say in words, what they refuse."""

import pytest

from course_lib import plot

CHAINS = {
    "two kernels": [("softmax", 1, 1), ("dropout", 1, 1.25)],
    "one kernel": [("softmax + dropout", 1, 1)],
}


def bars(figure):
    return [patch for patch in figure.axes[0].patches if patch.get_height() == pytest.approx(0.42)]


def test_kernels_follow_each_other():
    figure = plot.arrays_moved(CHAINS)
    assert [bar.get_width() for bar in bars(figure)] == [1, 1, 1, 1.25, 1, 1]
    assert [bar.get_x() for bar in bars(figure)] == [0, 1, 2, 3, 0, 1]
    assert "two kernels 4.25" in figure.alt and "dropout reads 1 and writes 1.25" in figure.alt
    assert {bar.get_hatch() for bar in bars(figure)} == {None, "///"}  # told apart without colour


def test_the_last_chain_is_the_line():
    (line,) = [each for each in plot.arrays_moved(CHAINS).axes[0].lines
               if each.get_linestyle() == "--"]
    assert set(line.get_xdata()) == {2}


def test_a_kernel_that_only_reads_has_one_bar():
    assert len(bars(plot.arrays_moved({"sum": [("sum", 1, 0)]}))) == 1


@pytest.mark.parametrize(
    "chains", [{}, {"none": []}, {"less": [("a", -1, 1)]}, {"zero": [("a", 0, 0)]}]
)
def test_refuses(chains):
    with pytest.raises(ValueError, match="arrays_moved|not \\["):
        plot.arrays_moved(chains)
