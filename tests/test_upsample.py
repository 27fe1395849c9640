"""Upsampling, nearest and bilinear: kernels, operator and module, against float64 and PyTorch."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from tensors import PLACE, double, randn

from course_lib import reference, simulator
from course_lib.kernels import upsample
from course_lib.ops.formats import memory_format
from course_lib.runtime.host.arrays import ArrayError
from course_lib.runtime.host.launch import recorded

# Half a unit in the last place of the result, and float32's rounding of what is mixed.
ROUNDING = {torch.float32: 1e-6, torch.float16: 6e-4, torch.bfloat16: 4.5e-3}
FLOOR = {torch.float32: 1e-6, torch.float16: 1e-6, torch.bfloat16: 1e-6}
LAYOUTS = (torch.contiguous_format, torch.channels_last)
WAYS = [("nearest", False), ("bilinear", False), ("bilinear", True)]
every_way = pytest.mark.parametrize("mode, align_corners", WAYS)
pytestmark = pytest.mark.seed(7)


def laid_out(shape, dtype, layout):
    return torch.randn(shape).to(PLACE, dtype, memory_format=layout)


def assert_close(actual, expected, size):
    limit = ROUNDING[actual.dtype] * np.abs(expected) + FLOOR[actual.dtype] * (1 + size)
    assert (np.abs(double(actual) - expected) <= limit).all()


def check(x, size, **options):
    """Both directions, every rung, against float64."""
    expected = reference.upsample(double(x), size, **options)
    for variant in upsample.FORWARD:
        y = upsample.forward(x, size, variant=variant, **options)
        # A place is off by float32's rounding of it, which the difference of pixels multiplies.
        off = max(size) * np.abs(double(x)).max()
        assert y.dtype == x.dtype
        assert_close(y, expected, off)
    dy = torch.randn_like(y)
    dx = upsample.backward(dy, tuple(x.shape), **options)
    expected = reference.upsample_backward(double(dy), tuple(x.shape), **options)
    share = math.prod(size) / math.prod(x.shape[2:])
    assert_close(dx, expected, max(size) * (1 + share) * np.abs(double(dy)).max())
    for like, each in ((x, y), (dy, dx)):  # where the format shows
        assert each.is_contiguous(memory_format=memory_format(like))
    return y, dx


@settings(max_examples=20, deadline=None)
@given(
    N=st.integers(1, 2),
    C=st.sampled_from([1, 3, 8]),
    sizes=st.tuples(*[st.integers(1, 9)] * 2),
    new_sizes=st.tuples(*[st.integers(1, 16)] * 2),
    way=st.sampled_from(WAYS),
    factors=st.none() | st.tuples(*[st.sampled_from([0.5, 1.0, 2.0, 3.0, 1.7, 0.3])] * 2),
    dtype=st.sampled_from(list(ROUNDING)),
    layout=st.sampled_from(LAYOUTS),
    seed=st.integers(0, 2**31),
)
def test_random_cases(N, C, sizes, new_sizes, way, factors, dtype, layout, seed):
    torch.manual_seed(seed)
    if factors is not None:
        new_sizes = [max(1, math.floor(n * f)) for n, f in zip(sizes, factors, strict=True)]
    x = laid_out((N, C, *sizes), dtype, layout)
    check(x, tuple(new_sizes), mode=way[0], align_corners=way[1], scale_factor=factors)


@pytest.mark.parametrize("shape, size", [((1, 2, 3, 3), (6, 8)), ((1, 8, 3, 2), (5, 5))])
def test_truth_is_that_of_pytorch(shape, size):
    for mode, align_corners in WAYS:
        x = torch.randn(shape).double().requires_grad_()
        y = F.interpolate(x, size, mode=mode, align_corners=align_corners or None)
        options = dict(mode=mode, align_corners=align_corners)
        np.testing.assert_allclose(reference.upsample(double(x), size, **options), double(y))
        dy = torch.randn(y.shape).double()
        (dx,) = torch.autograd.grad(y, x, dy)
        found = reference.upsample_backward(double(dy), shape, **options)
        np.testing.assert_allclose(found, double(dx), atol=1e-12)


@every_way
def test_values_that_are_not_finite(mode, align_corners):
    x = randn(1, 2, 4, 4)
    x[0, 0, 1, 1], x[0, 1, 3, 3] = math.nan, math.inf
    options = dict(mode=mode, align_corners=align_corners)
    y = upsample.forward(x, (8, 8), **options)
    expected = F.interpolate(x, (8, 8), mode=mode, align_corners=align_corners or None)
    assert torch.equal(y.isnan(), expected.isnan()) and torch.equal(y.isinf(), expected.isinf())


@pytest.mark.parametrize("dtype", list(ROUNDING), ids=str)
def test_views_results_that_are_given_and_memory_that_starts_anywhere(dtype):
    x = randn(2, 3, 4, 4, dtype=dtype)
    for mode, align_corners in WAYS:
        options = dict(mode=mode, align_corners=align_corners)
        expected, _ = check(x, (8, 8), **options)
        wide = torch.stack([x, x], -1)[..., 0]
        assert torch.equal(upsample.forward(wide, (8, 8), **options), expected)
        room = torch.full((expected.numel() + 9,), 7.0, device=PLACE, dtype=dtype)
        out = room[1:-8].view(expected.shape)
        assert upsample.forward(x, (8, 8), out=out, **options) is out
        assert torch.equal(out, expected) and room[0] == 7 and (room[-8:] == 7).all()


@pytest.mark.parametrize("layout", LAYOUTS, ids=("nchw", "nhwc"))
def test_y_is_written_by_sixteen_bytes(layout):
    x = randn(1, 8, 4, 4, dtype=torch.bfloat16).contiguous(memory_format=layout)
    for mode in upsample.MODES:
        with simulator.trace() as trace:
            y = upsample.forward(x, (8, 8), mode=mode)
        stores = [site for site in trace.sites if site.op == "store"]
        assert {site.size for site in stores} == {16}
        assert sum(site.sectors for site in stores) == y.numel() * 2 // 32
    with recorded() as launches:  # and an element at a time where that can't be
        upsample.forward(x[:, :7], (7, 7))
    assert [kernel.py_func.__name__ for kernel, *_ in launches] == ["walking_kernel"]


@every_way
@pytest.mark.parametrize("layout", LAYOUTS, ids=("nchw", "nhwc"))
def test_sanitizer_finds_nothing(mode, align_corners, layout):
    x = randn(1, 4, 3, 4).contiguous(memory_format=layout)
    options = dict(mode=mode, align_corners=align_corners)
    with simulator.sanitize() as report:
        for size in ((7, 8), (2, 3)):
            for variant in upsample.FORWARD:
                y = upsample.forward(x, size, variant=variant, **options)
            upsample.backward(y, tuple(x.shape), **options)
    assert not report, str(report)


def test_what_does_not_go_together_is_refused():
    x = randn(1, 2, 3, 3)
    for error, call, message in (
        (ValueError, lambda: upsample.forward(x, (6, 6), mode="cubic"), "unknown mode 'cubic'; th"),
        (ValueError, lambda: upsample.forward(x, 6), "size must be a pair of ints, not 6"),
        (ValueError, lambda: upsample.forward(x, (6, 6), scale_factor=(2, -1)), "pair of numbers"),
        (ArrayError, lambda: upsample.forward(x, (6, 0)), "sizes must be from 1 on"),
        (ArrayError, lambda: upsample.forward(x[0], (6, 6)), "x must have 4 dimensions"),
        (ArrayError, lambda: upsample.forward(x.long(), (6, 6)), "x must be float32 or float16"),
        (ArrayError, lambda: upsample.forward(x, (6, 6), out=x), r"out must have shape \(1, 2, 6"),
        (ArrayError, lambda: upsample.backward(x, (1, 3, 3, 3)), "is not of an x of"),
    ):
        with pytest.raises(error, match=message):
            call()
