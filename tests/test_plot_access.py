"""Pictures of traces: what they say in words, how many boxes they draw, what they refuse."""

import numpy as np
import pytest
from matplotlib.patches import Rectangle
from matplotlib.text import Text

from course_lib import plot, simulator
from course_lib.plot.access import LANE_COLOURS
from course_lib.plot.picture import LIMIT
from course_lib.simulator import cuda


@cuda.jit
def transpose(x, y):
    row, col = cuda.blockIdx.x, cuda.threadIdx.x
    y[col, row] = x[row, col]


@cuda.jit
def every_eighth(x):
    i = cuda.threadIdx.x
    if x[8 * i] > 2:
        i += 1


@cuda.jit
def tiles(x, y, z):
    tile = cuda.shared.array((32, 32), np.float32)
    tx, ty = cuda.threadIdx.x, cuda.threadIdx.y
    tile[ty, tx] = x[ty, tx]
    cuda.syncthreads()
    y[ty, tx] = tile[tx, ty]
    z[ty, tx] = tile[ty, ty]


@cuda.jit
def wide(x, y):
    numbers = cuda.shared.array(32, np.float64)
    i = cuda.grid(1)
    numbers[i] = x[i + 1]
    for k in range(3):
        y[k] = numbers[2 * i % 32]


SQUARE = np.ones((32, 32), np.float32)


def trace(kernel, grid, block, *args):
    with simulator.trace() as t:
        simulator.run(kernel, grid, block, *args)
    return t


@pytest.fixture(scope="module")
def transposed():
    return trace(transpose, 8, 32, SQUARE, SQUARE.copy())


@pytest.fixture(scope="module")
def tiled():
    return trace(tiles, 1, (32, 32), SQUARE, SQUARE.copy(), SQUARE.copy())


@pytest.fixture(scope="module")
def doubles():
    return trace(wide, 1, 32, np.ones(33), np.ones(3))


def texts(figure):
    return "\n".join(text.get_text() for text in figure.findobj(Text))


def sector_boxes(axes):
    return sum(isinstance(patch, Rectangle) and patch.get_linewidth() == 1.3
               for patch in axes.patches)


def test_access_map_says_sectors_in_words(transposed):
    figure = plot.access_map(transposed, title="a transpose")
    written = texts(figure)
    assert "x[row, col] (load, line" in written and "y[col, row] (store, line" in written
    assert "4 sectors per request; 1,024 bytes asked for, 1,024 moved" in written
    # Nothing is sent back for a store, and L2 may collect several before memory hears of them.
    assert "32 sectors per request; 1,024 bytes written, in sectors of 8,192" in written
    assert "8,192 moved" not in written
    assert "a transpose" in written and "element of x" in written
    assert "4 sectors" in figure.alt and "32 sectors" in figure.alt


def test_pale_cells_are_explained_only_where_there_are_any(transposed):
    def legend(which):
        return [text.get_text() for text in plot.access_map(transposed, which).legends[0].texts]

    assert legend("x[row, col]") == ["lane 0", "lane 10", "lane 21", "lane 31"]
    assert legend("y[col, row]")[4:] == ["in the same sector, not written"]
    strided = trace(every_eighth, 1, 32, np.ones(512, np.float32))
    shown = [text.get_text() for text in plot.access_map(strided).legends[0].texts]
    assert shown[4:] == ["sent, but nobody asked"]


def test_verdicts_can_be_left_to_the_reader(transposed):
    figure = plot.access_map(transposed, "y[col, row]", verdicts=False)
    assert figure.axes[0].get_title(loc="left") == "stores of y"
    assert "per request" not in texts(figure) and "32 sectors per request" in figure.alt


def test_the_only_lane_of_a_narrow_sector_is_named(transposed):
    """Where cells have no room for numbers, lanes would be told by their shade alone."""
    axes = plot.access_map(transposed, "y[col, row]", steps=1).axes[0]
    assert [text.get_text() for text in axes.texts] == [str(lane) for lane in range(32)]
    places = [text.get_position()[0] for text in axes.texts]
    boxes = sorted(p.get_x() for p in axes.patches if p.get_linewidth() == 1.3)
    assert all(0 < place - left < 8 for place, left in zip(places, boxes, strict=True))


def test_lanes_in_their_order_are_named_by_the_first_and_the_last(transposed):
    axes = plot.access_map(transposed, "x[row, col]", steps=4).axes[0]
    assert [text.get_text() for text in axes.texts] == ["0–7", "8–15", "16–23", "24–31"] * 4


def test_access_map_outlines_each_sector_that_is_sent(transposed):
    # In the order of the source: the store stands left of the load.
    store, load = plot.access_map(transposed, steps=3).axes
    assert (sector_boxes(store), sector_boxes(load)) == (3 * 32, 3 * 4)
    assert [label.get_text() for label in load.get_yticklabels()] == [
        f"block {block}, warp 0" for block in range(3)]


def test_access_map_of_one_site(transposed):
    load = next(site for site in transposed.sites if site.op == "load")
    for which in (load, "x[row, col]"):
        assert len(plot.access_map(transposed, which).axes) == 1


def test_access_map_numbers_lanes_and_steps(doubles):
    load = next(axes for axes in plot.access_map(doubles).axes if sector_boxes(axes) == 9)
    assert "9 sectors per request" in load.get_title(loc="left")
    store = plot.access_map(doubles, "y[k]").axes[0]
    assert [label.get_text() for label in store.get_yticklabels()] == ["step 0", "step 1", "step 2"]
    assert "32 lanes" in {text.get_text() for text in store.texts}


def test_access_map_shows_fewer_steps_rather_than_thin_cells():
    @cuda.jit
    def far(x):
        for k in range(4):
            x[32 * (cuda.threadIdx.x + 32 * k)] = 1

    (axes,) = plot.access_map(trace(far, 1, 32, np.ones(4096, np.float32))).axes
    assert sector_boxes(axes) == 32


def test_bank_map_stacks_the_lanes_that_wait(tiled):
    figure = plot.bank_map(tiled, title="a tile")
    titles = {axes.get_title(loc="left").split(" (")[0]: axes for axes in figure.axes}
    assert "1 turn, no bank is asked twice" in titles["tile[ty, tx]"].get_title(loc="left")
    conflict = titles["tile[tx, ty]"]
    assert "32 turns instead of one: 32 different words" in conflict.get_title(loc="left")
    assert {patch.get_x() for patch in conflict.patches} == {-0.5}
    assert sorted(patch.get_y() for patch in conflict.patches) == list(range(32))
    shared = titles["tile[ty, ty]"]
    assert len(shared.patches) == 1 and shared.texts[0].get_text() == "×32"
    assert "32 turns" in figure.alt and "a tile" in texts(figure)


def test_bank_map_of_wide_elements(doubles):
    store, load = plot.bank_map(doubles).axes
    assert "2 turns, one for each half of the warp" in store.get_title(loc="left")
    assert "instead of two" in load.get_title(loc="left")
    assert len(store.patches) == 64


def test_lanes_keep_their_order_in_grey():
    grey = [np.dot(LANE_COLOURS(lane / 31)[:3], (0.299, 0.587, 0.114)) for lane in range(32)]
    assert np.all(np.diff(grey) < 0) and grey[0] - grey[-1] > 0.5
    assert LIMIT


def test_pictures_are_pngs_with_alternative_text(transposed, tiled):
    for figure in (plot.access_map(transposed), plot.bank_map(tiled)):
        assert figure.png().startswith(b"\x89PNG") and len(figure.alt) > 20
    assert plot.bank_map(tiled, alt="words").alt == "words"


@pytest.mark.parametrize("draw, message", [
    (lambda t: plot.access_map(t, "z[i]"), "no site 'z\\[i\\]' in global memory"),
    (lambda t: plot.bank_map(t), "no access to shared memory"),
])
def test_what_is_not_there_cannot_be_drawn(transposed, draw, message):
    with pytest.raises(ValueError, match=message):
        draw(transposed)
