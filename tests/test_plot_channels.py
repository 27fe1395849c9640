"""Pictures of channels and of a cache: what they show, what they say in words, what they refuse."""

import pytest

from course_lib import plot

GATES = {"clean": [0.9, 0.5, 0.1], "noisy": [0.2, 0.5, 1.0]}
NAMES = ["edges", "blur", "light"]
WALKS = {
    "late": [(0, "first"), (1, "first"), (0, "late"), (0, "write"), (1, "late"), (1, "write")],
    "soon": [(0, "first"), (0, "again"), (0, "write"), (1, "first"), (1, "again"), (1, "write")],
}

SPANS = {
    "slow": [(0, 0, 1, "pool", "0·0"), (1, 0, 2, "pool", "0·1"), (0, 1, 2, "wait", "")],
    "fast": [(0, 0, 1, "pool", "0·0"), (1, 0, 1, "scale", "0·1")],
}


def test_a_bar_for_each_channel_of_each_image():
    figure = plot.channel_gates(GATES, NAMES, title="gates")
    bars = figure.axes[0].patches
    assert [bar.get_height() for bar in bars] == [0.9, 0.5, 0.1, 0.2, 0.5, 1.0]
    assert len({bar.get_hatch() for bar in bars}) == 2  # told apart without colour
    assert "clean: edges 0.90, blur 0.50, light 0.10" in figure.alt


def test_a_walk_says_what_is_moved():
    figure = plot.cache_walk(WALKS, title="two walks")
    assert [axes.get_title(loc="left") for axes in figure.axes] == [
        "late: 6 pictures moved", "soon: 4 pictures moved",
    ]  # fmt: skip
    assert "soon: 4 pictures moved, 2 second readings from L2 and 0 from memory" in figure.alt
    letters = [text.get_text() for text in figure.axes[1].texts]
    assert letters == ["r", "L2", "w", "r", "L2", "w"]


def test_only_what_occurs_is_in_the_legend():
    figure = plot.cache_walk({"soon": WALKS["soon"]})
    (legend,) = figure.legends
    assert [text.get_text()[0] for text in legend.get_texts()] == ["r", "L", "w"]


def test_waiting_is_seen_and_counted():
    figure = plot.work_items(SPANS, title="two schedules")
    assert "slow: done after 2.0 steps, 1.0 waited" in figure.alt
    assert "fast: done after 1.0 steps, 0.0 waited" in figure.alt
    waiting = [bar for bar in figure.axes[0].patches if bar.get_hatch()]
    assert [(bar.get_x(), bar.get_width()) for bar in waiting] == [(1, 1)]


def test_pictures_are_drawn():
    pictures = plot.channel_gates(GATES, NAMES), plot.cache_walk(WALKS), plot.work_items(SPANS)
    for picture in pictures:
        assert picture.png()[:4] == b"\x89PNG" and picture.alt


@pytest.mark.parametrize("gates", [{}, {"a": [1.0]}, {name: [1.0, 0.5, 0.2] for name in "abcde"}])
def test_refuses_gates(gates):
    with pytest.raises(ValueError, match="channel_gates|gates \\(1,\\)"):
        plot.channel_gates(gates, NAMES)


@pytest.mark.parametrize("walks", [{}, {"a": []}, {"a": [(0, "seen")]}, {"a": [(0, "first")] * 41}])
def test_refuses_walks(walks):
    with pytest.raises(ValueError, match="cache_walk|unknown access|too many"):
        plot.cache_walk(walks)


@pytest.mark.parametrize(
    "schedules",
    [{}, {"a": []}, {"a": [(0, 0, 1, "sleep", "")]}, {"a": [(0, 1, 0, "pool", "")]}],
)
def test_refuses_schedules(schedules):
    with pytest.raises(ValueError, match="work_items|cannot"):
        plot.work_items(schedules)
