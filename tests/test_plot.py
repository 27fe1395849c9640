"""The pictures: what they say in words and numbers, and what they refuse to draw."""

import io

import drawings
import numpy as np
import pytest
from matplotlib.figure import Figure

from course_lib import plot

RUNGS = [
    {"label": "naive", "kind": "ours", "gbps": 2000.0, "microseconds": 10.0, "quartiles": [9, 12]},
    {"label": "vectorised", "kind": "ours", "gbps": 3900.0, "microseconds": 5.1},
    {"label": "PyTorch eager", "kind": "peer", "gbps": 3700.0, "microseconds": 5.4},
]
POINTS = [
    {"label": "relu", "kind": "ours", "intensity": 0.125, "tflops": 0.4},
    {"label": "matmul", "kind": "peer", "intensity": 170.0, "tflops": 51.0},
]
LANES = np.arange(32)
ROWS_AND_COLUMNS = {"by rows": LANES * 4, "by columns": LANES * 512}


def draw_thread_strip(n=20, **options):
    return plot.thread_map(np.arange(n) // 8, np.arange(n) % 8, **options)


def draw_thread_image():
    y, x = np.mgrid[:6, :8]
    return plot.thread_map(
        np.stack([x // 4, y // 3], axis=-1), np.stack([x % 4, y % 3], axis=-1), title="a picture"
    )


SWEPT = [
    {"label": "naive", "kind": "ours", "percent": [20.0, 10.0]},
    {"label": "split", "kind": "ours", "percent": [None, 95.0]},
    {"label": "PyTorch", "kind": "peer", "percent": [61.0, 55.0]},
]
PICTURES = {
    "thread_map, strip": lambda: draw_thread_strip(title="a strip"),
    "thread_map, one element": lambda: draw_thread_strip(1),
    "thread_map, several lines": lambda: draw_thread_strip(100),
    "thread_map, image": draw_thread_image,
    "access_order": lambda: plot.access_order(ROWS_AND_COLUMNS, row_bytes=512, title="order"),
    "ladder": lambda: plot.ladder(RUNGS, 4200.0, title="a ladder", device="a GPU", date="2026"),
    "ladder, one row": lambda: plot.ladder(RUNGS[:1], 4200.0),
    "ladder, notes": lambda: plot.ladder([RUNGS[0] | {"note": "a thread per row"}], 4200.0),
    "sweep": lambda: plot.sweep([64, 4096], SWEPT, xlabel="numbers in a row", device="a GPU"),
    "sweep, one size": lambda: plot.sweep(
        [64], [{"label": "naive", "percent": [20.0]}], xlabel="numbers in a row"
    ),
    "durations": lambda: plot.durations(RUNGS, device="a GPU"),
    "durations, one row": lambda: plot.durations(RUNGS[:1]),
    "roofline": lambda: plot.roofline(POINTS, 4200.0, 67.0),
    "roofline, one point": lambda: plot.roofline(POINTS[:1], 4200.0, 67.0),
    "timeline": lambda: plot.timeline([("host", 0, 2, "launch"), ("GPU", 2, 12, "kernel")]),
    "images": lambda: plot.images([np.eye(4), np.zeros((4, 5, 3))], ["grey", "colour"]),
    "images, one": lambda: plot.images([np.eye(4)]),
    "tensor_layout": lambda: plot.tensor_layout((2, 3, 2, 4)),
    "curves": lambda: plot.curves(LANES, {"y": LANES}, xlabel="x (1)", ylabel="y (1)"),
    "curves, one point, log": lambda: plot.curves(
        [1.0], {"y": [2.0]}, xlabel="x (1)", ylabel="y (1)", log=True
    ),
}


def texts(figure):
    return "\n".join(drawings.texts(figure))


@pytest.mark.parametrize("name", PICTURES)
def test_picture_is_drawn_without_warnings(name, tmp_path):
    assert isinstance(drawings.hold(PICTURES[name], tmp_path), Figure)


@pytest.mark.parametrize("name", PICTURES)
def test_every_axis_is_labelled(name):
    figure = PICTURES[name]()
    for axes in figure.axes:
        assert axes.get_xlabel(), name
        named_bars = [tick.get_text() for tick in axes.get_yticklabels()]
        one_line = name in ("thread_map, strip", "thread_map, one element")
        assert axes.get_ylabel() or any(named_bars) or one_line, name


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("ladder", "GB/s"),
        ("durations", "µs"),
        ("timeline", "µs"),
        ("roofline", "TFLOP/s"),
        ("roofline", "FLOP per byte"),
        ("images", "pixels"),
        ("access_order", "elements"),
    ],
)
def test_axes_name_their_units(name, unit):
    labels = [a.get_xlabel() + a.get_ylabel() for a in PICTURES[name]().axes]
    assert all(unit in label for label in labels)


def test_pictures_stay_out_of_pyplot():
    import matplotlib.pyplot as plt

    draw_thread_strip()
    assert not plt.get_fignums(), "pyplot would show the figure a second time"


def test_notebook_output_carries_the_alternative_text(monkeypatch):
    shown = {}
    monkeypatch.setattr(
        "IPython.display.display",
        lambda data, metadata, raw: shown.update(data=data, metadata=metadata, raw=raw),
    )
    figure = draw_thread_strip()
    figure._ipython_display_()
    assert shown["raw"] and shown["data"]["image/png"].startswith(b"\x89PNG")
    assert shown["data"]["text/plain"] == figure.alt
    assert shown["metadata"]["image/png"]["alt"] == figure.alt
    assert shown["metadata"]["image/png"]["width"] == 900


def test_stored_picture_is_small_and_the_same_in_every_run():
    first, second = (draw_thread_strip().png() for _ in range(2))
    assert first == second
    full = io.BytesIO()
    draw_thread_strip().savefig(full, dpi=plot.picture.STORED_DPI)
    assert len(first) < len(full.getvalue()) / 1.5


def test_thread_map_numbers_threads_and_names_blocks():
    written = texts(draw_thread_strip(20, length=18))
    for expected in ("block 0", "block 2", "past the end of the array"):
        assert expected in written
    assert written.split().count("7") == 2, "thread 7 handles elements 7 and 15"
    assert "3 blocks" in draw_thread_strip(20).alt


def test_thread_map_shows_elements_nobody_handled():
    blocks = np.array([0, 0, -1, -1])
    figure = plot.thread_map(blocks, np.array([0, 1, -1, -1]))
    assert "handled by nobody" in texts(figure)
    assert "2 were handled by nobody" in figure.alt
    assert "-1" not in texts(figure).split()


def test_thread_map_writes_pairs_as_x_y():
    written = texts(draw_thread_image())
    assert "3,2" in written and "block 1, 1" in written
    order = [t.get_text() for t in draw_thread_image().legends[0].get_texts()]
    assert order == ["block 0, 0", "block 1, 0", "block 0, 1", "block 1, 1"]


def test_neighbouring_blocks_differ_in_lightness():
    """Also between the lines of a grid of blocks, and also when printed in grey."""
    y, x = np.mgrid[:4, :9]
    figure = plot.thread_map(np.stack([x, y], -1), np.zeros((4, 9, 2), int), numbered=False)
    grey = np.asarray(figure.axes[0].images[0].get_array()) @ (0.299, 0.587, 0.114)
    assert np.abs(np.diff(grey, axis=0)).min() > 0.15
    assert np.abs(np.diff(grey, axis=1)).min() > 0.15


def test_access_order_counts_sectors_and_bytes():
    figure = plot.access_order(ROWS_AND_COLUMNS, row_bytes=512)
    written = texts(figure)
    assert "by rows: 4 sectors" in written and "128 bytes wanted, 128 sent" in written
    assert "by columns: 32 sectors" in written and "128 bytes wanted, 1024 sent" in written
    assert "4 sectors" in figure.alt and "32 sectors" in figure.alt
    assert "later steps" not in written


def test_access_order_outlines_one_box_per_sector():
    figure = plot.access_order(ROWS_AND_COLUMNS, row_bytes=512)
    outlined = [
        sum(patch.get_linewidth() == 1.2 for patch in axes.patches) for axes in figure.axes
    ]
    assert outlined == [4, 32]


def test_access_order_shows_later_steps():
    steps = {"by rows": np.stack([LANES * 4, LANES * 4 + 512])}
    assert "later steps" in texts(plot.access_order(steps, row_bytes=512))


def test_access_order_counts_misaligned_requests():
    assert "5 sectors" in plot.access_order({"off by one": LANES * 4 + 4}, row_bytes=512).alt


def test_ladder_writes_values_limit_and_origin():
    written = texts(PICTURES["ladder"]())
    for expected in ("2,000 (48%)", "3,900 (93%)", "4,200 GB/s", "recorded on a GPU (2026)"):
        assert expected in written


def test_ladder_tells_peers_apart_without_colour():
    bars = PICTURES["ladder"]().axes[0].patches
    assert [bar.get_hatch() for bar in bars] == [None, None, "///"]


def test_ladder_whiskers_are_the_quartiles():
    lines = PICTURES["ladder"]().axes[0].lines
    whisker = next(line for line in lines if len(set(line.get_xdata())) == 2)
    assert sorted(whisker.get_xdata()) == pytest.approx([2000 * 10 / 12, 2000 * 10 / 9])


def test_whiskers_are_explained_where_they_can_be_seen():
    assert "the middle half of all measurements" in texts(PICTURES["ladder"]())
    still = [row | {"quartiles": [row["microseconds"]] * 2} for row in RUNGS]
    assert "middle half" not in texts(plot.ladder(still, 4200.0))


def test_a_note_stands_under_its_label():
    figure = PICTURES["ladder, notes"]()
    assert "a thread per row" in texts(figure)
    assert "a thread per row" not in texts(PICTURES["ladder"]())


def test_sweep_tells_peers_apart_without_colour_and_leaves_gaps():
    figure = PICTURES["sweep"]()
    _, *lines = figure.axes[0].lines  # the first is the limit
    assert [line.get_linestyle() for line in lines] == ["-", "-", "--"]
    assert len({(line.get_linestyle(), line.get_marker()) for line in lines}) == 3
    assert np.isnan(lines[1].get_ydata()).tolist() == [True, False]
    assert "split 95 at 4,096; PyTorch 61 at 64, 55 at 4,096" in figure.alt
    assert "4,096" in texts(figure)


def test_heights_alone_may_be_logarithmic():
    axes = plot.curves([0, 9], {"y": [3, 1]}, xlabel="x", ylabel="y", log="y").axes[0]
    assert (axes.get_xscale(), axes.get_yscale()) == ("linear", "log")
    with pytest.raises(ValueError, match="log is True, False"):
        plot.curves([1], {"y": [1]}, xlabel="x", ylabel="y", log="z")


def test_thumbnails_need_no_numbers():
    numbered, plain = (plot.images([np.eye(4)] * 2, ["a", "b\nc"], pixels=p) for p in (True, False))
    assert all(axes.get_xlabel() == "column (pixels)" for axes in numbered.axes)
    assert not any(axes.get_xlabel() or len(axes.get_xticks()) for axes in plain.axes)
    assert plain.get_size_inches()[1] < 6 and plain.alt == numbered.alt


def test_durations_choose_readable_units():
    rows = [{"label": str(us), "microseconds": us} for us in (0.25, 12.0, 3400.0, 2.5e6)]
    written = texts(plot.durations(rows))
    for expected in ("250 ns", "12 µs", "3.4 ms", "2.5 s"):
        assert expected in written


def test_durations_have_no_bars_on_an_axis_without_a_zero():
    axes = PICTURES["durations"]().axes[0]
    assert axes.get_xscale() == "log" and not axes.patches
    points = [line for line in axes.lines if line.get_marker() != "None"]
    assert [line.get_marker() for line in points] == ["o", "o", "s"]
    assert [line.get_xdata()[0] for line in points] == [row["microseconds"] for row in RUNGS]


def test_a_curve_that_ends_has_a_mark_there():
    series = {"whole": [1, 2, 3], "ends": [1, 2, np.inf]}
    *_, end = plot.curves([0, 1, 2], series, xlabel="x", ylabel="y").axes[0].lines[:-1]
    assert (end.get_xdata()[0], end.get_ydata()[0]) == (1, 2) and end.get_markersize() > 10
    whole = plot.curves([0, 1, 2], {"whole": [1, 2, 3]}, xlabel="x", ylabel="y").axes[0]
    assert len(whole.lines) == 2, "the curve, and the axis"


def test_a_curve_that_ends_early_says_where_and_no_nan():
    figure = plot.curves([1, 2, 4], {"y": [3, 1, np.nan]}, xlabel="x", ylabel="y")
    assert figure.alt == "y over x: y from 3 to 1, where it ends, at 2"
    figure = plot.curves([1, 2], {"y": [np.nan, np.nan]}, xlabel="x", ylabel="y")
    assert figure.alt == "y over x: y nowhere"


def test_a_timeline_by_actor_gives_each_actor_one_colour():
    spans = [("a", 0, 1, "0"), ("a", 1, 2, "1"), ("b", 0, 1, "0"), ("b", 1, 2, "1")]
    for by_actor, colours in ((False, [0, 1, 0, 1]), (True, [0, 0, 1, 1])):
        boxes = plot.timeline(spans, by_actor=by_actor).axes[0].patches
        found = [box.get_facecolor() for box in boxes]
        assert [[*dict.fromkeys(found)].index(each) for each in found] == colours


def test_curves_with_one_logarithmic_axis():
    axes = plot.curves([1, 1000], {"y": [3, 1]}, xlabel="x", ylabel="y", log="x").axes[0]
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "linear")
    assert "1,000" in [tick.get_text() for tick in axes.get_xticklabels()]


def test_roofline_has_its_ridge_where_both_limits_meet():
    figure = plot.roofline(POINTS, 4000.0, 60.0)
    assert "15 FLOP per byte" in figure.alt
    x, y = figure.axes[0].lines[0].get_data()
    assert np.all(np.diff(y) >= 0) and y[-1] == 60.0
    assert y[0] == pytest.approx(x[0] * 4.0)


def test_tensor_layout_numbers_elements_in_memory_order():
    figure = plot.tensor_layout((2, 3, 2, 4))
    assert len(figure.axes) == 6
    cells = [int(text.get_text()) for axes in figure.axes for text in axes.texts]
    assert cells == list(range(48))


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda: plot.thread_map([], []), "at least one element"),
        (lambda: plot.thread_map([0], [0, 1]), "differ in shape"),
        (lambda: plot.thread_map(np.zeros((2, 2, 3)), np.zeros((2, 2, 3))), r"\(H, W, 2\)"),
        (lambda: plot.thread_map(np.zeros(300_000), np.zeros(300_000)), "too many"),
        (lambda: plot.access_order({}, row_bytes=512), "at least one pattern"),
        (lambda: plot.access_order({"none": []}, row_bytes=512), "'none' needs addresses"),
        (lambda: plot.access_order({"below": [-4]}, row_bytes=512), "none of them negative"),
        (lambda: plot.access_order({"odd": [0]}, row_bytes=511), "multiples of itemsize"),
        (lambda: plot.ladder([], 4200.0), "ladder needs at least one row"),
        (lambda: plot.ladder(RUNGS, 0.0), "copy_gbps must be positive"),
        (lambda: plot.ladder([{**RUNGS[0], "kind": "theirs"}], 1.0), "'ours' or 'peer'"),
        (lambda: plot.sweep([64, 4096], [], xlabel="x"), "sweep needs at least one row"),
        (lambda: plot.sweep([64], SWEPT, xlabel="x"), "'naive' has 2 numbers for 1 sizes"),
        (lambda: plot.sweep([4096, 64], SWEPT, xlabel="x"), "positive and rising"),
        (lambda: plot.durations([]), "durations needs at least one row"),
        (lambda: plot.durations([{"label": "x", "microseconds": 0.0}]), "must be positive"),
        (lambda: plot.roofline([], 1.0, 1.0), "roofline needs at least one row"),
        (lambda: plot.roofline(POINTS, 0.0, 1.0), "every number must be positive"),
        (lambda: plot.timeline([]), "at least one span"),
        (lambda: plot.timeline([("host", 2, 1, "back")]), "ends before it starts"),
        (lambda: plot.images([]), "at least one picture"),
        (lambda: plot.images([np.eye(2)], ["a", "b"]), "1 pictures but 2 titles"),
        (lambda: plot.images([np.zeros(4)]), r"must be \(H, W\)"),
        (lambda: plot.images([np.zeros((0, 4))]), r"must be \(H, W\)"),
        (lambda: plot.tensor_layout((1, 2, 3)), "four positive sizes"),
        (lambda: plot.tensor_layout((10, 10, 10, 10)), "600 at most"),
        (lambda: plot.curves([], {}, xlabel="x", ylabel="y"), "at least one point"),
        (lambda: plot.curves([1], {"y": [1, 2]}, xlabel="x", ylabel="y"), "has shape"),
        (
            lambda: plot.curves([1], dict.fromkeys("abcde", [1]), xlabel="x", ylabel="y"),
            "too many to tell apart",
        ),
    ],
)
def test_senseless_input_is_refused_with_a_reason(draw, message):
    with pytest.raises(ValueError, match=message):
        draw()


@pytest.mark.parametrize("call, name", [
    (lambda: plot.curves([1, 2], [[1, 2]], xlabel="x", ylabel="y"), "series"),
    (lambda: plot.channel_gates([[0.5, 0.5]], ["a"]), "gates"),
    (lambda: plot.access_order([[0, 1]], row_bytes=8), "patterns"),
    (lambda: plot.fragments([[0, 1]]), "matrices"),
    (lambda: plot.histograms([[0, 1]], xlabel="x"), "counts"),
    (lambda: plot.shares([("a", 1)]), "wholes"),
])
def test_a_list_where_a_dict_is_wanted_is_named(call, name):
    with pytest.raises(TypeError, match=f"{name} must be a dict from labels to values, not a list"):
        call()
