"""Lesson 11 runs by what the learner has solved elsewhere, and its scoreboard says the truth."""

import numpy as np
import pytest
from test_notebooks import LESSONS, build
from test_teach_kept import restart, run  # noqa: F401 - `restart` is a fixture

from course_lib import cuda
from course_lib.teach import Scoreboard, check
from course_lib.teach.exercise import exercises
from course_lib.teach.keeping import record
from course_lib.teach.keeping.kept import keep

EARLIER = (
    "conv2d_direct", "conv2d_dx", "conv2d_dweight", "conv2d_dbias", "cross_entropy",
    "cross_entropy_backward",
)  # fmt: skip
ZERO = np.float32(0)


@cuda.jit
def relu(x, y):
    i = cuda.grid(1)
    if i < x.size:
        y[i] = x[i] if x[i] > ZERO else ZERO


@cuda.jit
def fails(x, y):
    y[x.size + 7] = ZERO


def test_counts_what_was_launched_and_whose(capsys, restart):  # noqa: F811
    x = np.linspace(-2, 2, 70, dtype=np.float32)
    y, z = np.empty_like(x), np.empty_like(x)
    check("relu", relu)
    board = Scoreboard()
    board.use("relu", relu)
    board.use("relu_grid_stride")
    board.launch("first", "relu", x.size, x, y, block=32)
    board.launch("first", "relu", x.size, x, y, block=32)
    board.launch("second", "relu_grid_stride", 1, x, z)
    assert y.tolist() == z.tolist() == np.maximum(x, 0).tolist()
    assert board.launches == {"yours": 2, "the course's": 1}
    capsys.readouterr()
    board.show()
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split() == ["first", "relu", "1", "yours", "2", "192"]
    assert lines[3].split() == ["second", "relu_grid_stride", "1", "the", "course's", "1", "128"]
    assert lines[4:] == ["launches: yours 2, the course's 1"]
    board.clear()
    assert sum(board.launches.values()) == 0 and board.whose("relu") == "yours"


def test_what_failed_is_not_counted(capsys, restart, monkeypatch):  # noqa: F811
    board = Scoreboard()
    board.use("relu")
    monkeypatch.setitem(board._kernels, "relu", fails)
    with pytest.raises(IndexError):
        board.launch("first", "relu", 1, np.ones(3, np.float32), np.ones(3, np.float32))
    assert sum(board.launches.values()) == 0
    board.show()
    assert capsys.readouterr().out.endswith("launches: yours 0, the course's 0\n")


def test_refuses_what_it_cannot_launch(restart):  # noqa: F811
    board = Scoreboard()
    with pytest.raises(TypeError, match="output_size is a function"):
        board.use("output_size")
    with pytest.raises(ValueError, match="no kernel 'relu', it has none: use it first"):
        board.launch("first", "relu", 1)


#: Put before the cells: each launch in the simulator is noted, whoever has asked for it.
NOTED = """
from course_lib.simulator.engine.kernel import Kernel
LAUNCHED, plain = [], Kernel.launch
def noted(self, *arguments, **options):
    LAUNCHED.append(self.__name__)
    return plain(self, *arguments, **options)
Kernel.launch = noted
"""


def test_lesson_11_runs_by_what_was_kept(restart, tmp_path):  # noqa: F811
    """All cells up to the scoreboard, after lessons 5, 8 and 9 were solved: no kernel but yours."""
    for name in EARLIER:
        keep(exercises()[name], exercises()[name].solution)
    assert {name for name, entry in record.load().items() if "kept" in entry} == set(EARLIER)
    cells = []
    for cell in build.make_forms(LESSONS["11_fashion_mnist"])[1].cells:
        if cell.cell_type == "code" and not cell.source.startswith(("hint(", "plot.")):
            cells.append(cell.source)
            if cell.source.endswith("board.show()"):
                break
    text = "\n\n".join(cells).replace("board.clear()\n", "board.clear()\nLAUNCHED.clear()\n")
    out = run(NOTED + text + "\nprint(len(LAUNCHED), 'in the simulator')\n", tmp_path)
    for name in EARLIER:
        assert f"Using the {name} that you wrote in lesson {exercises()[name].lesson[1]}.\n" in out
    assert "launches: yours 31, the course's 0\n31 in the simulator\n" in out
    errors = [float(line.split()[-1]) for line in out.splitlines() if "of the gradient" in line]
    assert len(errors) == 8 and max(errors) < 1e-5
