"""Softmax and log-softmax along an axis that is not the last, without a transposed copy."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from softmax_checks import DTYPES, both, check, randn

from course_lib import SIMULATED, simulator
from course_lib.kernels import softmax
from course_lib.runtime.host.launch import chip_of, planning

INF, NAN = math.inf, math.nan
STRIDED = {"variant": "strided"}


class Along:
    """The operation along `axis`, as one along the last axis of arrays with that axis last."""

    def __init__(self, operation, axis):
        self.operation, self.axis, self.name = operation, axis, operation.name
        self.BACKWARD = operation.BACKWARD

    def _given(self, array):
        return array.movedim(-1, self.axis).contiguous()

    def forward(self, x, *, variant, out):
        y = self.operation.forward(self._given(x), axis=self.axis, variant=variant)
        return out.copy_(y.movedim(self.axis, -1))

    def backward(self, dy, y, *, variant, out):
        given = self._given(dy), self._given(y)
        dx = self.operation.backward(*given, axis=self.axis, variant=variant)
        return out.copy_(dx.movedim(self.axis, -1))


def check_along(operation, axis, x, dy, variant="strided"):
    """`x` and `dy` with the axis in its place; both directions as `softmax_checks` holds them."""
    return check(Along(operation, axis), x.movedim(axis, -1), dy.movedim(axis, -1), variant)


@both
@settings(max_examples=30, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 20), st.sampled_from([1, 2, 3, 4, 8, 16, 21]))
    | st.tuples(st.integers(1, 2), st.integers(1, 6), st.integers(1, 5), st.integers(1, 8)),
    axis=st.integers(0, 2),
    variant=st.sampled_from(["strided", "strided", "auto", "registers"]),
    dtype=st.sampled_from(DTYPES),
    spread=st.sampled_from([0.01, 1.0, 30.0]),
    middle=st.sampled_from([0.0, -1e4, 1e4]),
    masked=st.sampled_from([0.0, 0.3, 0.95]),
    seed=st.integers(0, 2**32 - 1),
)
def test_random_shapes(operation, variant, shape, axis, dtype, spread, middle, masked, seed):
    x, dy = randn(*shape, seed=seed) * spread + middle, randn(*shape, dtype=dtype, seed=seed + 1)
    x[torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < masked] = -INF
    check_along(operation, axis, x.to(dtype), dy, variant)


@both
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [3, 7, 14, 37])  # of every kernel that holds, and streamed
def test_columns_that_are_not_finite(operation, dtype, length):
    big = torch.finfo(dtype).max * 0.88
    x = randn(1, length, 16, dtype=dtype)
    for column, values in enumerate((
        [NAN], [INF], [-INF], [-INF] * length, [INF] * length, [INF, -INF], [NAN] * length,
        [-INF] * (length - 1), [big], [big] * length, [-big] * length, [NAN, INF],
    )):  # fmt: skip
        x[0, : len(values), column] = torch.tensor(values, dtype=dtype)
    y, _ = check_along(operation, 1, x, randn(1, length, 16, dtype=dtype, seed=1))
    wrong = [0, 1, 3, 4, 5, 6, 11]
    assert y[0][wrong].isnan().all() and not y[0][[2, *range(7, 11), *range(12, 16)]].isnan().any()


@both
def test_an_axis_that_there_is_not_is_refused(operation):
    x = randn(2, 3, 4)
    for axis in (-4, 3):
        with pytest.raises(ValueError, match=rf"shape \(2, 3, 4\) has no axis {axis}"):
            operation.forward(x, axis=axis)
    with pytest.raises(ValueError, match="'strided/held' holds columns of at most 16 numbers"):
        operation.forward(randn(2, 17, 3), axis=1, variant="strided/held")


@both
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_byte_is_moved_once(operation, dtype):
    """Whole sectors, each asked for once: what the operation must move, and no more."""
    x = randn(1, 7, 256, dtype=dtype)
    least = x.numel() * x.itemsize // 32
    with simulator.trace() as trace:
        y = operation.forward(x, axis=1, **STRIDED)
    assert sectors(trace, "load") == least and sectors(trace, "store") == least
    with simulator.trace() as trace:
        operation.backward(x, y, axis=1, **STRIDED)
    assert sectors(trace, "load") == 2 * least and sectors(trace, "store") == least


def sectors(trace, op):
    return sum(site.sectors for site in trace.sites if site.op == op and site.space == "global")


def test_where_auto_takes_it():
    """Short or many columns: one launch. Few long ones are copied, which is quicker."""

    def names(shape, dim):
        x = torch.empty(shape)
        with planning(chip_of(x if SIMULATED else randn(1))) as launches:
            softmax.softmax.forward(x, axis=dim)
        return {kernel.py_func.__name__ for kernel, *_ in launches}

    assert names((2, 7, 3, 4), 1) == {"held_kernel"}
    assert names((1, 9, 600), 1) == {"held_kernel"}
    assert "held_kernel" not in names((1, 9, 8), 1)
    assert names((2, 7, 1, 1), 1) <= {"team_kernel", "block_kernel"}
    assert names((1, 200, 1 << 14), 1) == {"streamed_kernel"}


@pytest.mark.skipif(not SIMULATED, reason="NumPy arrays are for the simulator")
def test_numpy_arrays_in_the_simulator():
    x = np.random.default_rng(0).normal(size=(2, 5, 6)).astype("f4")
    for variant in ("strided", "registers"):
        y = softmax.softmax.forward(x, axis=1, variant=variant)
        assert isinstance(y, np.ndarray) and y.dtype == np.float32
        np.testing.assert_allclose(y.sum(1), 1, rtol=1e-6)
