"""Global average pooling: every rung, both directions, both memory formats, against float64."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensors import PLACE, double

from course_lib import reference
from course_lib.kernels import global_avg_pool as pool
from course_lib.runtime.host.arrays import ArrayError

# Half a unit in the last place of the result; float32 sums of a few thousand terms of one size.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 6e-4, torch.bfloat16: 4.5e-3}
FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
SHAPES = [
    (1, 1, 1, 1), (2, 3, 5, 7), (1, 8, 12, 12), (3, 40, 1, 9), (2, 16, 33, 4), (1, 2, 80, 70),
    (2, 5, 2, 4), (9, 3, 3, 3), (1, 2, 73, 61),
]  # fmt: skip

every_variant = pytest.mark.parametrize("variant", pool.FORWARD)
every_dtype = pytest.mark.parametrize("dtype", TOLERANCE)
every_format = pytest.mark.parametrize("layout", FORMATS)


def image(shape, dtype, layout, offset=0.5):
    x = torch.randn(shape).add(offset).to(PLACE, dtype)
    return x.to(memory_format=FORMATS[layout])


def check_forward(x, variant):
    N, C = x.shape[:2]
    y = pool.forward(x, variant=variant, out=torch.full((N, C), math.nan, device=PLACE).to(x.dtype))
    expected = reference.global_avg_pool(double(x))
    scale = np.abs(double(x)).mean(axis=(2, 3))
    error = np.abs(double(y) - expected)
    assert (error <= TOLERANCE[x.dtype] * scale + 1e-7).all(), (error / scale).max()


def check_backward(dy, size, layout, variant):
    channels_last = layout == "channels_last"
    dx = pool.backward(dy, size, channels_last=channels_last, variant=variant)
    dx.fill_(math.nan)
    pool.backward(dy, size, channels_last=channels_last, variant=variant, out=dx)
    expected = reference.global_avg_pool_backward(double(dy), size)
    error = np.abs(double(dx) - expected)
    assert (error <= TOLERANCE[dy.dtype] * np.abs(expected) + 1e-7).all()
    assert dx.is_contiguous(memory_format=FORMATS[layout])


@every_dtype
@every_format
@pytest.mark.parametrize("shape", SHAPES)
def test_planes_of_every_size(dtype, layout, shape):
    """By the rung that plans; what the others do depends on nothing."""
    check_forward(image(shape, dtype, layout), "vectorised")
    dy = torch.randn(shape[:2], device=PLACE).to(dtype)
    check_backward(dy, shape[2:], layout, "vectorised")


@settings(max_examples=25, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 20), st.integers(1, 20), st.integers(1, 20)),
    dtype=st.sampled_from(list(TOLERANCE)),
    layout=st.sampled_from(list(FORMATS)),
    variant=st.sampled_from(list(pool.FORWARD)),
    offset=st.sampled_from([0.0, 10.0, -100.0]),
)
def test_random_images(shape, dtype, layout, variant, offset):
    check_forward(image(shape, dtype, layout, offset), variant)


def test_long_planes_are_cut_into_parts():
    assert pool.plan(2, 300 * 300 * 4)[1] > 1
    check_forward(image((1, 2, 300, 300), torch.float32, "contiguous"), "vectorised")
    check_forward(image((1, 4, 150, 100), torch.float32, "channels_last"), "vectorised")
    for dtype in TOLERANCE:  # of pixels that are no whole vectors
        check_forward(image((1, 3, 150, 101), dtype, "channels_last"), "vectorised")
    dy = torch.randn(1, 2, device=PLACE)
    check_backward(dy, (300, 300), "contiguous", "vectorised")


@every_variant
def test_special_values(variant):
    x = torch.ones(1, 4, 6, 6, device=PLACE)
    x[0, 1, 2, 3] = math.nan
    x[0, 2, 5, 5] = math.inf
    x[0, 3, 0, 0], x[0, 3, 0, 1] = math.inf, -math.inf
    for layout in FORMATS.values():
        y = pool.forward(x.to(memory_format=layout), variant=variant)
        assert torch.equal(y.isnan().cpu(), torch.tensor([[False, True, False, True]]))
        assert y[0, 0] == 1 and y[0, 2] == math.inf


@every_variant
def test_empty(variant):
    assert pool.forward(torch.empty(0, 3, 4, 4, device=PLACE), variant=variant).shape == (0, 3)
    y = pool.forward(torch.empty(2, 3, 0, 4, device=PLACE), variant=variant)
    assert y.isnan().all() and y.shape == (2, 3)
    assert pool.backward(torch.empty(2, 3, device=PLACE), (0, 4)).shape == (2, 3, 0, 4)


@pytest.mark.parametrize("most", [1, 100, 1000])
def test_the_backward_kernel_in_several_launches(monkeypatch, most):
    monkeypatch.setattr(pool, "MOST_AT_ONCE", most)
    dy = torch.randn(3, 5, device=PLACE)
    for dtype in TOLERANCE:
        check_backward(dy.to(dtype), (9, 11), "contiguous", "vectorised")


@pytest.mark.parametrize("shape", [(3, 5, 40, 30), (1, 3, 61, 37), (2, 2, 33, 63)])
def test_the_backward_kernel_in_batches(monkeypatch, shape):
    monkeypatch.setattr(pool, "ENOUGH_THREADS", 1)
    monkeypatch.setattr(pool, "BLOCK_SIZE", 64)
    for dtype in TOLERANCE:
        check_backward(torch.randn(shape[:2], device=PLACE).to(dtype), shape[2:], "contiguous",
                       "vectorised")  # fmt: skip


def test_errors_name_what_was_expected():
    x = torch.randn(2, 3, 4, 5, device=PLACE)
    with pytest.raises(ArrayError, match=r"x must have 4 dimensions, not shape \(3, 4, 5\)"):
        pool.forward(x[0])
    with pytest.raises(ArrayError, match="out must be channels-last"):
        pool.backward(x[:, :, 0, 0], (4, 5), channels_last=True, out=torch.empty_like(x))
    with pytest.raises(ArrayError, match="dy must have 2 dimensions"):
        pool.backward(x, (4, 5))
    with pytest.raises(ValueError, match="'naive' writes contiguous images: use 'per_plane'"):
        pool.backward(x[:, :, 0, 0], (4, 5), channels_last=True, variant="naive")
