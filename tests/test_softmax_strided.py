"""Softmax and log-softmax along an axis that is not the last, without a transposed copy."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from softmax_checks import DTYPES, PLACE, check, identical

from course_lib import SIMULATED, ops, simulator
from course_lib.kernels import softmax
from course_lib.kernels.softmax import strided
from course_lib.runtime.host.arrays import ArrayError
from course_lib.runtime.host.launch import recorded

INF, NAN = math.inf, math.nan
OPERATIONS = list(softmax.OPERATIONS.values())
both = pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)


class Along:
    """The operation along `axis`, as one along the last axis of arrays with that axis last."""

    BACKWARD = ()

    def __init__(self, operation, axis):
        self.operation, self.axis, self.name = operation, axis, operation.name

    def _given(self, array):
        return array.movedim(-1, self.axis).contiguous()

    def forward(self, x, *, variant, out):
        y = self.operation.forward_along(self._given(x), self.axis)
        return out.copy_(y.movedim(self.axis, -1))

    def backward(self, dy, y, *, variant, out):
        dx = self.operation.backward_along(self._given(dy), self._given(y), self.axis)
        return out.copy_(dx.movedim(self.axis, -1))


def randn(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(PLACE, dtype)


def check_along(operation, axis, x, dy):
    """`x` and `dy` with the axis in its place; both directions as `softmax_checks` holds them."""
    return check(Along(operation, axis), x.movedim(axis, -1), dy.movedim(axis, -1), "auto")


@both
@settings(max_examples=30, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 20), st.sampled_from([1, 2, 3, 4, 8, 16, 21]))
    | st.tuples(st.integers(1, 2), st.integers(1, 6), st.integers(1, 5), st.integers(1, 8)),
    axis=st.integers(0, 2),
    dtype=st.sampled_from(DTYPES),
    spread=st.sampled_from([0.01, 1.0, 30.0]),
    middle=st.sampled_from([0.0, -1e4, 1e4]),
    masked=st.sampled_from([0.0, 0.3, 0.95]),
    seed=st.integers(0, 2**32 - 1),
)
def test_random_shapes(operation, shape, axis, dtype, spread, middle, masked, seed):
    x, dy = randn(*shape, seed=seed) * spread + middle, randn(*shape, dtype=dtype, seed=seed + 1)
    x[torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < masked] = -INF
    check_along(operation, axis, x.to(dtype), dy)


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
@pytest.mark.parametrize("dtype", DTYPES)
def test_memory_that_starts_anywhere_and_results_that_are_given(operation, dtype):
    """Off the 16-byte boundaries; nothing before or behind the result is written."""
    room = randn(2 * 5 * 16 + 3, dtype=dtype)
    x = room[3:].view(2, 5, 16)
    expected = operation.forward_along(x.clone(), 1)
    assert identical(operation.forward_along(x, 1), expected)
    target = torch.full((2 * 5 * 16 + 9,), 7.0, device=PLACE, dtype=dtype)
    out = target[1:-8].view(2, 5, 16)
    assert operation.forward_along(x, 1, out=out) is out and identical(out, expected)
    assert target[0] == 7 and (target[-8:] == 7).all()
    dy = randn(2, 5, 16, dtype=dtype, seed=4)
    wanted = operation.backward_along(dy, expected, 1)
    assert operation.backward_along(dy, expected, 1, out=out) is out and identical(out, wanted)
    assert target[0] == 7 and (target[-8:] == 7).all()


@both
def test_views_are_copied_and_nothing_is_nothing(operation):
    x = randn(2, 6, 5, 4)
    for view in (x.to(memory_format=torch.channels_last), x[:, ::2], x.transpose(1, 2)):
        y = operation.forward_along(view, 1)
        assert y.is_contiguous() and identical(y, operation.forward_along(view.contiguous(), 1))
    for shape in ((0, 3, 4), (2, 0, 4), (2, 3, 0)):
        x = torch.empty(shape, device=PLACE)
        assert operation.forward_along(x, 1).shape == x.shape
        assert operation.backward_along(x, x, 1).shape == x.shape


@both
def test_what_does_not_go_together_is_refused(operation):
    x = randn(2, 3, 4)
    for axis in (-1, 3):
        with pytest.raises(ValueError, match=rf"shape \(2, 3, 4\) has no axis {axis}"):
            operation.forward_along(x, axis)
    for arguments, options, message in (
        ((x.long(), 1), {}, "x must be float32 or float16 or bfloat16, not int64"),
        ((x, 1), dict(out=x[:1]), r"out must have shape \(2, 3, 4\), not \(1, 3, 4\)"),
        ((x, 1), dict(out=x.half()), "out must be float32, not float16"),
        ((x, 1), dict(out=randn(4, 3, 2).mT.transpose(0, 1)[:, :2]), "out must have shape"),
        ((x, 1), dict(out=randn(2, 4, 3).mT), "out must be contiguous"),
    ):
        with pytest.raises(ArrayError, match=message):
            operation.forward_along(*arguments, **options)
    with pytest.raises(ArrayError, match=r"dy must have shape \(2, 3, 4\), not \(2, 3\)"):
        operation.backward_along(x[..., 0], x, 1)


@both
@pytest.mark.parametrize("shape", [(2, 3, 8), (1, 12, 8), (1, 19, 8), (2, 6, 3), (1, 19, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sanitizer_finds_nothing(operation, shape, dtype):
    x = randn(*shape, dtype=dtype)
    with simulator.sanitize() as report:
        y = operation.forward_along(x, 1)
        operation.backward_along(x, y, 1)
    assert not report, str(report)


@both
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_byte_is_moved_once(operation, dtype):
    """Whole sectors, each asked for once: what the operation must move, and no more."""
    x = randn(1, 7, 256, dtype=dtype)
    least = x.numel() * x.itemsize // 32
    with simulator.trace() as trace:
        y = operation.forward_along(x, 1)
    assert sectors(trace, "load") == least and sectors(trace, "store") == least
    with simulator.trace() as trace:
        operation.backward_along(x, y, 1)
    assert sectors(trace, "load") == 2 * least and sectors(trace, "store") == least


def sectors(trace, op):
    return sum(site.sectors for site in trace.sites if site.op == op and site.space == "global")


def test_where_the_operators_take_it():
    """Short or many columns: one launch. Few long ones are copied, which is quicker."""

    def names(shape, dim):
        x = randn(*shape)
        with recorded() as launches:
            ops.softmax(x, dim)
        return {kernel.py_func.__name__ for kernel, *_ in launches}

    assert names((2, 7, 3, 4), 1) == {"held_kernel"}
    assert names((1, 9, 600), 1) == {"held_kernel"}
    assert "held_kernel" not in names((1, 9, 8), 1)
    assert names((2, 7, 1, 1), 1) <= {"team_kernel", "block_kernel"}
    assert strided.takes(2**19, 200) and not strided.takes(16, 1000)


@pytest.mark.skipif(not SIMULATED, reason="NumPy arrays are for the simulator")
def test_numpy_arrays_in_the_simulator():
    x = np.random.default_rng(0).normal(size=(2, 5, 6)).astype("f4")
    y = softmax.softmax.forward_along(x, 1)
    assert isinstance(y, np.ndarray) and y.dtype == np.float32
    np.testing.assert_allclose(y.sum(1), 1, rtol=1e-6)
