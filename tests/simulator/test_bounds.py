"""Out-of-bounds accesses are named in full; other exceptions keep their traceback."""

import traceback

import numpy as np
import pytest

from course_lib.simulator import OutOfBounds, cuda


def line_of(function, text):
    """The line number of the first line of `function` with `text`."""
    import inspect

    lines, first = inspect.getsourcelines(function)
    return first + next(number for number, line in enumerate(lines) if text in line)


def failure(kernel, grid, block, *args):
    with pytest.raises(OutOfBounds) as caught:
        kernel[grid, block](*args)
    return caught.value


def test_read_past_the_end():
    @cuda.jit
    def kernel(x, out):
        i = cuda.grid(1)
        out[i] = x[i + 1]

    error = failure(kernel, 2, 4, np.zeros(8), np.zeros(8))
    assert (error.array, error.index, error.shape) == ("x", 8, (8,))
    assert (error.thread, error.block) == ((3, 0, 0), (1, 0, 0))
    assert error.filename == __file__
    assert error.lineno == line_of(kernel.py_func, "x[i + 1]")
    for part in ("x[i + 1] is read", "index 8", "shape (8,)", "thread (3, 0, 0)",
                 "block (1, 0, 0)", f"{__file__}:{error.lineno}"):
        assert part in str(error)
    assert isinstance(error, IndexError)


@pytest.mark.parametrize("kind", ["read", "written", "updated"])
def test_negative_indices(kind):
    def read(x, i):
        x[i + 3] = x[i - 1]

    def written(x, i):
        x[i - 1] = 1

    def updated(x, i):
        x[i - 1] += 1

    device = cuda.jit(device=True)({"read": read, "written": written, "updated": updated}[kind])

    @cuda.jit
    def kernel(x):
        device(x, cuda.grid(1))

    x = np.arange(8.0)
    error = failure(kernel, 1, 4, x)
    assert (error.array, error.index, error.thread) == ("x", -1, (0, 0, 0))
    assert f"x[i - 1] is {kind}" in str(error)
    assert x.tolist() == list(range(8))


def test_several_dimensions():
    @cuda.jit
    def kernel(x, out):
        i, j = cuda.grid(2)
        out[i, j] = x[j, i - 1]

    error = failure(kernel, 1, (2, 3), np.zeros((3, 2)), np.zeros((2, 3)))
    assert error.index == (0, -1)

    @cuda.jit
    def first_axis(x):
        i = cuda.grid(1)
        x[i - 1, i + 1] = 0

    assert failure(first_axis, 1, 2, np.zeros((3, 2))).index == (-1, Ellipsis)

    @cuda.jit
    def past(x):
        i = cuda.grid(1)
        x[i, 2 * i] = 0

    error = failure(past, 1, 4, np.zeros((3, 3)))
    assert (error.index, error.thread) == ((2, 4), (2, 0, 0))


@pytest.mark.parametrize("declare", ["list", "array"])
def test_shared_and_local_arrays(declare):
    @cuda.jit
    def kernel(out, listed):
        s = cuda.shared.array((4, 8), np.float32)
        mine = cuda.local.array(3, np.int32)
        i = cuda.threadIdx.x
        mine[i] = i
        s[i, i + 6] = mine[i]
        out[i] = s[i, 0]

    @cuda.jit
    def sliced(out, listed):
        s = cuda.shared.array((4, 8), np.float32)
        i = cuda.threadIdx.x
        row = s[i]
        row[i + 6] = 1
        s[i, i + 6] = 1
        out[i] = s[i, 0]

    error = failure(kernel if declare == "list" else sliced, 1, 4, np.zeros(8), 0)
    assert error.thread == (2, 0, 0)
    assert error.index in ((2, 8), 8)
    assert error.array in ("s", "row")

    @cuda.jit
    def local(out):
        mine = cuda.local.array(3, np.int32)
        mine[cuda.threadIdx.x - 1] = 0

    assert failure(local, 1, 1, np.zeros(1)).shape == (3,)


def test_atomics(jit):
    @jit
    def kernel(x):
        cuda.atomic.add(x, cuda.grid(1) - 1, 1)

    error = failure(kernel, 1, 2, np.zeros(4))
    assert (error.index, error.shape) == (-1, (4,))

    @jit
    def past(x):
        cuda.atomic.max(x, (cuda.grid(1), 1), 1)

    error = failure(past, 1, 8, np.zeros((4, 2)))
    assert error.index == (4, 1)


def test_without_source(jit):
    @jit
    def kernel(x):
        x[cuda.grid(1) - 2] = 1

    error = failure(kernel, 1, 4, np.zeros(4))
    assert (error.index, error.thread) == (-2, (0, 0, 0))

    @jit
    def past(x):
        x[cuda.grid(1)] = 1

    error = failure(past, 1, 5, np.zeros(4))
    assert error.thread == (4, 0, 0)


def test_tuple_indices():
    @cuda.jit
    def kernel(x):
        place = cuda.grid(2)
        x[place] = place[0] + 10 * place[1]

    x = np.zeros((2, 3))
    kernel[1, (2, 3)](x)
    assert x.tolist() == [[0, 10, 20], [1, 11, 21]]
    assert failure(kernel, 1, (3, 3), x).index == (2, 0)


def test_indices_read_from_memory():
    @cuda.jit
    def kernel(x, places, out):
        i = cuda.grid(1)
        out[i] = x[places[i]]

    out = np.zeros(3)
    kernel[1, 3](np.arange(5.0), np.array([4, 0, 2], np.int32), out)
    assert out.tolist() == [4, 0, 2]
    assert failure(kernel, 1, 3, np.arange(5.0), np.array([4, -1, 2]), out).index == -1
    assert failure(kernel, 1, 3, np.arange(5.0), np.array([4, 0, 7]), out).index == 7


def test_shape_and_tuples_keep_python_meaning():
    @cuda.jit
    def kernel(x, pair, out):
        out[0] = x.shape[-1]
        out[1] = pair[-2]
        k = -1
        out[2] = pair[k]

    out = np.zeros(3)
    kernel[1, 1](np.zeros((2, 7)), (5, 6), out)
    assert out.tolist() == [7, 5, 6]


def test_other_index_errors_are_not_misreported():
    @cuda.jit
    def too_many(x):
        x[0, cuda.grid(1)] = 1

    @cuda.jit
    def a_float(x):
        x[cuda.grid(1) / 2] = 1

    @cuda.jit
    def a_tuple(pair, x):
        x[0] = pair[2]

    for kernel, args in ((too_many, (np.zeros(3),)), (a_float, (np.zeros(3),)),
                         (a_tuple, ((1, 2), np.zeros(1)))):
        with pytest.raises(IndexError) as caught:
            kernel[1, 1](*args)
        assert not isinstance(caught.value, OutOfBounds)
        assert "raised in thread (0, 0, 0) of block (0, 0, 0)" in caught.value.__notes__


def test_other_exceptions_keep_their_traceback(jit):
    @jit(device=True)
    def deeper(value):
        return value.no_such_attribute

    @jit
    def kernel(x):
        cuda.syncthreads()
        if cuda.threadIdx.x == 2:
            deeper(x)

    with pytest.raises(AttributeError) as caught:
        kernel[1, 4](np.zeros(3))
    assert caught.value.__notes__ == ["raised in thread (2, 0, 0) of block (0, 0, 0)"]
    frames = traceback.extract_tb(caught.value.__traceback__)
    assert [frame.name for frame in frames][-1] == "deeper"
    if jit.path == "source":
        assert frames[-1].lineno == line_of(deeper.py_func, "no_such_attribute")
        assert frames[-1].filename == __file__
        assert [frame.name for frame in frames][-2] == "kernel"


def test_the_next_launch_works(jit):
    @jit
    def kernel(x, n):
        s = cuda.shared.array(8, np.int32)
        i = cuda.threadIdx.x
        s[i] = i
        cuda.syncthreads()
        x[i] = s[(i + n) % 8 if n < 8 else n]

    x = np.zeros(8)
    for _ in range(2):
        failure(kernel, 1, 8, x, 9)
        kernel[1, 8](x, 1)
        assert x.tolist() == [1, 2, 3, 4, 5, 6, 7, 0]
