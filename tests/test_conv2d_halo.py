"""Convolution on tensor cores, 16 bytes at a time: `conv2d.halo` and `conv2d.pixel_sums`."""

import contextlib

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_conv2d import LAYOUTS, PLACE, case, check, double, round_tf32

from course_lib import SIMULATED, simulator
from course_lib.kernels import conv2d
from course_lib.kernels.blocks.mma.shape import Shape
from course_lib.kernels.conv2d import halo_plan, halo_small, pixel_sums_plan, pixel_sums_small
from course_lib.kernels.conv2d.problem import problem_of
from course_lib.runtime.host.launch import recorded

#: Tiles that the simulator makes quickly.
SMALL = {halo_plan: Shape(32, 32, 1, 2, 3), pixel_sums_plan: Shape(64, 64, 2, 1, 3)}
CHIP = (9, 0), 227 << 10
SIZES = [(32, 64, 128, 64), (32, 128, 128, 56), (64, 256, 256, 28), (1, 64, 128, 13)]
MODES = ("split", "tf32", "narrow", "mixed")


@pytest.fixture
def small_tiles(monkeypatch):
    for plans, shape in SMALL.items():
        monkeypatch.setattr(plans, "SHAPES", dict.fromkeys(MODES, {shape: 1.0}))
        plans.planned.cache_clear()
    for plans in (halo_small, pixel_sums_small):  # which would go first; `test_conv2d_small`
        monkeypatch.setattr(plans, "planned", lambda *_: None)
    yield
    monkeypatch.undo()
    for plans in SMALL:
        plans.planned.cache_clear()


def kernels_of(mode, dtype):
    return [plans.kernel_for(shape, dtype.itemsize, mode) for plans, shape in SMALL.items()]


@pytest.mark.parametrize("dtype, last, shapes, options, sanitized", [
    # Two chunks of channels, of which the second is not full; tiles across images.
    (torch.float32, False, ((3, 36, 3, 3), (12, 36, 3, 1)), dict(padding=(2, 0)), False),
    (torch.float32, True, ((1, 8, 3, 4), (8, 8, 2, 2)), dict(padding=(0, 1)), False),
    (torch.bfloat16, True, ((1, 72, 3, 5), (8, 72, 2, 2)), dict(dilation=(1, 2)), False),
    (torch.float16, False, ((1, 8, 9, 4), (16, 8, 3, 1)), dict(padding=(2, 0)), False),
    # A 1 × 1 filter; one line and one column of y.
    (torch.float32, True, ((2, 4, 1, 9), (4, 4, 1, 1)), {}, True),
])  # fmt: skip
def test_every_pass(small_tiles, dtype, last, shapes, options, sanitized):
    tensors = case(*shapes, dtype, LAYOUTS[last])
    with simulator.sanitize() if sanitized else contextlib.nullcontext() as report:
        with recorded() as launches:
            check("tensor_core/implicit_gemm", *tensors, **options)
    assert not report, str(report)
    halo, sums = kernels_of("split" if dtype == torch.float32 else "narrow", dtype)
    used = [kernel for kernel, *_ in launches]
    assert used.count(halo) == 2 and used.count(sums) == 1


def test_strides_go_forward_alone(small_tiles):
    """dx of a stride is no convolution of dy; it goes the general way."""
    tensors = case((1, 4, 4, 5), (8, 4, 2, 2))
    with recorded() as launches:
        check("tensor_core/implicit_gemm", *tensors, stride=(2, 1), padding=1)
    halo, sums = kernels_of("split", torch.float32)
    used = [kernel for kernel, *_ in launches]
    assert used.count(halo) == 1 and used.count(sums) == 1


def test_tf32(small_tiles):
    x, weight, bias = case((1, 36, 3, 3), (12, 36, 2, 2))
    rounded = [torch.from_numpy(round_tf32(double(t))).to(PLACE) for t in (x, weight)]
    y = conv2d.forward(x, weight, bias, padding=1, precision="tf32")
    expected = F.conv2d(*rounded, bias.double(), padding=1)
    torch.testing.assert_close(y.double(), expected, rtol=1e-6, atol=1e-5)
    dy = torch.randn_like(y)
    dx, dweight, _ = conv2d.backward(dy, x, weight, padding=1, precision="tf32")
    options = [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False]
    dy = torch.from_numpy(round_tf32(double(dy))).to(PLACE)
    expected = torch.ops.aten.convolution_backward(dy, *rounded, None, *options)
    torch.testing.assert_close(dx.double(), expected[0], rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(dweight.double(), expected[1], rtol=1e-6, atol=1e-5)


def test_pixels_shared_among_blocks(small_tiles, monkeypatch):
    monkeypatch.setattr(pixel_sums_plan, "LEAST_TILES", 1)
    x, weight, _ = case((3, 4, 7, 8), (4, 4, 2, 2))
    plan = pixel_sums_plan.planned(
        problem_of(x.shape, weight.shape, 1, 0, 1, 1, False), 4, "split", CHIP
    )
    assert plan.n_splits > 2
    dy = torch.randn(3, 4, 6, 7, device=PLACE)
    found = [conv2d.backward(dy, x, weight, needs=(False, True, False))[1] for _ in range(2)]
    assert torch.equal(*found)
    expected = torch.nn.grad.conv2d_weight(x.double(), weight.shape, dy.double())
    torch.testing.assert_close(found[0].double(), expected, rtol=1e-5, atol=1e-5)


def test_a_larger_tile():
    """Warps of which each has its own rows, and a warp's columns in several pairs."""
    if SIMULATED:
        pytest.skip("takes the simulator long; the GPU runs it")
    for size in SIZES[1:]:
        N, C, K, H = size
        for layout in LAYOUTS:
            x, weight, bias = case((min(N, 4), C, H, H), (K, C, 3, 3), layout=layout)
            y = conv2d.forward(x, weight, bias, padding=1)
            expected = F.conv2d(x.double(), weight.double(), bias.double(), padding=1)
            assert (y.double() - expected).norm() < 1e-6 * expected.norm()


def test_long_sums(small_tiles, monkeypatch):
    """The small products in bfloat16: forward, and in dweight; those of dx are too few."""
    monkeypatch.setattr(halo_plan, "LONG", 33)
    with recorded() as launches:
        check("tensor_core/implicit_gemm", *case((1, 36, 5, 12), (8, 36, 3, 1)))
    halo, sums = kernels_of("mixed", torch.float32)
    used = [kernel for kernel, *_ in launches]
    assert used.count(halo) == 1 and used.count(sums) == 1


def test_what_lies_off_the_boundaries(small_tiles):
    """16 bytes can't be copied from there: channels-last images go the general way."""
    room = torch.randn(1 + 4 * 9, device=PLACE)
    x = room[1:].as_strided((1, 4, 3, 3), (36, 1, 12, 4), 1)
    assert x.is_contiguous(memory_format=torch.channels_last)
    weight = case((1, 4, 3, 3), (4, 4, 2, 2), layout=LAYOUTS[1])[1]
    with recorded() as launches:
        y = conv2d.forward(x, weight)
    assert kernels_of("split", torch.float32)[0] not in [kernel for kernel, *_ in launches]
    torch.testing.assert_close(y, F.conv2d(x, weight), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_plans_fit_the_chip(size):
    N, C, K, H = size
    problem = problem_of((N, C, H, H), (K, C, 3, 3), 1, 1, 1, 1, False)
    for mode in MODES:
        itemsize = 2 if mode == "narrow" else 4
        for gather in (halo_plan.forward_of(problem), halo_plan.dx_of(problem)):
            plan = halo_plan.planned(gather, itemsize, mode, CHIP)
            assert plan.shared_bytes(itemsize) + halo_plan.STATIC_BYTES <= CHIP[1]
            # By hand: each block's first and last pixel, and the taps behind the last one.
            grid, pixels = H + 2, np.arange(N * H * H)
            places = (pixels // (H * H) * grid + pixels % (H * H) // H) * grid + pixels % H
            first = places[:: plan.shape.m]
            last = places[
                np.minimum(np.arange(len(first)) * plan.shape.m + plan.shape.m, N * H * H) - 1
            ]
            assert plan.n_positions == (last - first).max() + 2 * grid + 2 + 1
        plan = pixel_sums_plan.planned(problem, itemsize, mode, CHIP)
        assert plan.n_splits * plan.length >= N * H * H > (plan.n_splits - 1) * plan.length
