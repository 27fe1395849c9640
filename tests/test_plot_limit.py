"""Pictures of kernels at the limit: what they show, what they say in words, what they refuse."""

import numpy as np
import pytest
from matplotlib.text import Text

from course_lib import plot

POINTS = [
    {"in_flight": 1024, "gbps": 200.0, "loads": 1, "load_bytes": 4},
    {"in_flight": 65536, "gbps": 4000.0, "loads": 4, "load_bytes": 16},
]
SIX_KINDS = [POINTS[0] | {"loads": loads} for loads in range(1, 7)]
ROWS = [
    {"label": "online", "a": 10.0, "b": 2.0, "c": 0.5},
    {"label": "registers", "a": 4.0, "b": 1.0, "c": 0.0},
]


def bars(figure, axes=0):
    return [patch for patch in figure.axes[axes].patches if hasattr(patch, "get_width")]


def test_loads_in_time_counts_the_time():
    figure = plot.loads_in_time({"one": 1, "four": 4}, 8, latency=600, work=50)
    assert "one: done after 5200 ns" in figure.alt and "four: done after 1600 ns" in figure.alt
    ends = [max(bar.get_x() + bar.get_width() for bar in bars(figure, k)) for k in (0, 1)]
    assert ends == [5200, 1600]


def test_in_flight_draws_the_law():
    figure = plot.in_flight(POINTS, 600, 4200, 132, device="NVIDIA H200", date="2026-01-01")
    x, y = figure.axes[0].lines[0].get_data()
    np.testing.assert_allclose(y, np.minimum(x * 132 / 600, 4200))
    assert "19 KB" in figure.alt and "recorded on NVIDIA H200" in figure.axes[0].get_xlabel()
    texts = [text.get_text() for text in figure.legends[0].get_texts()]
    assert texts[:2] == ["1 × 4 bytes per thread", "4 × 16 bytes per thread"]


def test_stalls_are_stacked():
    figure = plot.stalls(ROWS, {"memory": ["a"], "else": ["b", "c"]})
    assert "online memory 10.0, else 2.5" in figure.alt
    widths = [bar.get_width() for bar in bars(figure)]
    assert widths == [10.0, 4.0, 2.5, 1.0]
    assert [bar.get_x() for bar in bars(figure)] == [0, 0, 10.0, 4.0]


def test_times_begin_at_zero():
    rows = [{"label": "ours", "microseconds": 3.0},
            {"label": "theirs", "kind": "peer", "microseconds": 4.5}]
    figure = plot.times(rows)
    assert figure.axes[0].get_xlim()[0] == 0
    assert "ours 3, theirs 4.5" in figure.alt
    assert bars(figure)[1].get_hatch() and not bars(figure)[0].get_hatch()


def test_a_difference_below_zero_is_shown():
    rows = [{"label": "a", "microseconds": -0.1}, {"label": "b", "microseconds": 2.0}]
    assert plot.times(rows).axes[0].get_xlim()[0] < -0.1


def test_tables_write_every_number():
    figure = plot.tables([np.array([[1.0, -0.25]]), np.zeros((1, 2))], ["a", "b"])
    assert figure.alt == "a: 1.00 -0.25; b: 0.00 0.00"
    assert [text.get_text() for text in figure.axes[0].texts] == ["1.00", "-0.25"]


def test_tables_tell_above_zero_from_below():
    figure = plot.tables([np.array([[1.0, -1.0, 0.0]])], ["a"])
    above, below, zero = (patch.get_facecolor()[:3] for patch in figure.axes[0].patches)
    assert above[2] > above[0], "blue"
    assert below[0] > below[2], "orange"
    assert zero == (1.0, 1.0, 1.0)


def test_tables_name_rows_and_columns():
    figure = plot.tables([np.eye(2)], ["a"], rows=["cat", "slept"], columns=["thing", "action"])
    assert figure.alt == "a: cat 1.00 0.00, slept 0.00 1.00"
    assert [each.get_text() for each in figure.axes[0].get_xticklabels()] == ["thing", "action"]
    assert [each.get_text() for each in figure.axes[0].get_yticklabels()] == ["cat", "slept"]


def test_tables_write_integers_as_such():
    figure = plot.tables([np.array([[3, -12]])], ["counts"])
    assert [text.get_text() for text in figure.axes[0].texts] == ["3", "-12"]
    assert "counts: 3 -12" in figure.alt


def test_thread_map_of_teams():
    figure = plot.thread_map(np.array([0, 0, 1, 1]), np.array([0, 1, 0, 1]), group="team")
    assert "by the team" in figure.alt
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["team 0", "team 1"]


def test_shared_row_merges():
    figure = plot.shared_row([(1.0, 2.0), (3.0, 4.0)])
    total = 2 * np.exp(-2) + 4
    assert f"to maximum 3 and sum {total:.3g}" in figure.alt


def test_roofline_labels_do_not_overlap():
    points = [{"label": str(k), "intensity": 1.25, "tflops": 5 - 0.01 * k} for k in range(6)]
    figure = plot.roofline(points, 4200, 60)
    figure.canvas.draw()
    named = [text for text in figure.axes[0].texts if text.get_text().isdigit()]
    boxes = [Text.get_window_extent(text) for text in named]  # without its line
    assert len(boxes) == 6
    assert all(not a.overlaps(b) for k, a in enumerate(boxes) for b in boxes[:k])


def test_a_zoomed_roofline_names_its_points_beside_them():
    points = [{"label": f"k{k}", "intensity": 0.69, "tflops": 2.5 - 0.1 * k} for k in range(6)]
    figure = plot.roofline(points, 4200, 60, zoom=True)
    whole, near = figure.axes
    assert not [text for text in whole.texts if text.get_text().startswith("k")]
    assert whole.get_xlim()[1] > 60 / 4.2 > near.get_xlim()[1], "the ridge is in one of them"
    figure.canvas.draw()
    named = [text for text in near.texts if text.get_text().startswith("k")]
    boxes = [Text.get_window_extent(text) for text in named]
    assert len(boxes) == 6
    assert all(not a.overlaps(b) for k, a in enumerate(boxes) for b in boxes[:k])
    assert all(box.x0 > near.get_window_extent().x1 for box in boxes), "outside"
    assert max(box.x1 for box in boxes) < figure.bbox.x1, "and on the page"


@pytest.mark.parametrize(
    "draw, says",
    [
        (lambda: plot.loads_in_time({}, 8, latency=1, work=1), "batches that divide 8"),
        (lambda: plot.loads_in_time({"a": 3}, 8, latency=1, work=1), "batches that divide 8"),
        (lambda: plot.in_flight([], 1, 1, 1), "at least one point"),
        (lambda: plot.in_flight(POINTS, 0, 1, 1), "must be positive"),
        (lambda: plot.in_flight(SIX_KINDS, 1, 1, 1), "6 kinds of load"),
        (lambda: plot.stalls([], {"a": ["a"]}), "needs rows"),
        (lambda: plot.stalls(ROWS, {}), "one to 6 reasons"),
        (lambda: plot.times([]), "at least one row"),
        (lambda: plot.tables([], []), "tables needs"),
        (lambda: plot.tables([np.eye(2)], ["a"], rows=["cat"]), "1 words for 2"),
        (lambda: plot.tables([np.eye(2), np.eye(3)], ["a", "b"]), "of one shape"),
        (lambda: plot.tables([np.eye(2)], []), "1 tables but 0 titles"),
        (lambda: plot.times([{"label": "a", "kind": "b", "microseconds": 1}]), "'ours' and 'peer'"),
        (lambda: plot.shared_row([(1, 1)]), "two to eight parts"),
    ],
)
def test_what_is_refused(draw, says):
    with pytest.raises(ValueError, match=says):
        draw()


def test_pictures_are_the_same_in_every_run():
    def draw():
        return plot.in_flight(POINTS, 600, 4200, 132).png()

    assert draw() == draw()
