"""Reads of what `cuda.device_array` made and nobody wrote: found, and nothing else is."""

import numpy as np
import pytest

from course_lib import cuda, simulator


@cuda.jit
def copy(x, y):
    i = cuda.grid(1)
    if i < y.size:
        y[i] = x[i]  # BUG where x was never written


@cuda.jit
def fill(x, n):
    i = cuda.grid(1)
    if i < n:
        x[i] = i


@cuda.jit
def count(x):
    cuda.atomic.add(x, cuda.grid(1) % x.size, 1)


LINE = copy.py_func.__code__.co_firstlineno + 4
KINDS = [np.float32, np.int8, np.dtype([("a", np.int8), ("b", np.float64)], align=True)]


@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_a_read_of_what_nobody_wrote_is_found(dtype):
    x = cuda.device_array(40, dtype)
    with simulator.sanitize() as report:
        copy[2, 32](x, cuda.device_array(40, dtype))
    [finding] = report
    assert (finding.kind, finding.line) == ("uninitialised-read", LINE)
    assert finding.count >= 40  # of a record every piece
    assert "reads global `x" in finding.message
    assert "cuda.device_array" in finding.message


def test_an_atomic_on_what_nobody_wrote_is_found():
    with simulator.sanitize() as report:
        count[1, 32](cuda.device_array(4, np.int32))
    assert report.kinds() == ["uninitialised-read"]


def by_a_watched_kernel(x, n):
    with simulator.sanitize() as report:
        fill[2, 32](x, n)
    assert not report


def by_a_copy_into_a_view(x, n):
    x[:n].copy_to_device(np.ones(n))


@pytest.mark.parametrize("write", [by_a_watched_kernel, by_a_copy_into_a_view])
@pytest.mark.parametrize("n", [40, 33])
def test_what_was_written_is_followed_by_the_element(write, n):
    x = cuda.device_array(40)
    write(x, n)
    with simulator.sanitize() as report:
        copy[2, 32](x, cuda.device_array(40))
    assert sum(finding.count for finding in report) == 40 - n
    assert all(f"`x[{n}]`" in finding.message for finding in report)


def by_a_kernel_out_of_sight(x):
    fill[2, 32](x, 1)


def by_a_traced_kernel(x):
    with simulator.trace():
        fill[2, 32](x, 1)


def by_an_assignment(x):
    x[0] = 1


def by_another_library(x):
    assert x.__cuda_array_interface__["shape"] == x.shape


@pytest.mark.parametrize("write", [by_a_kernel_out_of_sight, by_a_traced_kernel, by_an_assignment,
                                   by_another_library])
def test_what_may_have_been_written_is_not_told(write):
    x = cuda.device_array(40)
    write(x)
    with simulator.sanitize() as report:
        copy[2, 32](x, cuda.device_array(40))
    assert not report


def test_a_block_that_writes_too_late_races():
    @cuda.jit
    def late(x, y):
        if cuda.blockIdx.x == 0:
            y[0] = x[0]
        else:
            x[0] = 1

    with simulator.sanitize() as report:
        late[2, 1](cuda.device_array(1), cuda.device_array(1))
    assert report.kinds() == ["race-between-blocks"]
