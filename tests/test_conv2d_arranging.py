"""What is arranged for convolutions by Hopper's tensor cores: rounded images, weights in order."""

import math

import numpy as np
import pytest
import torch
from test_conv2d import LAYOUTS, PLACE, case, double
from test_conv2d_halo import round_tf32
from test_warpgroup import has_them

from course_lib.kernels.conv2d import arranging, halo_plan, warpgroup_mixed_plan, warpgroup_plan
from course_lib.kernels.conv2d.problem import problem_of
from course_lib.kernels.conv2d.warpgroup_plan import Shape
from course_lib.runtime.host.launch import launch

on_hopper = pytest.mark.skipif(not has_them(), reason="compute capability 9.0 alone has wgmma")
SMALL = Shape(32, 64, 1, 3)
FLOAT, HALF = torch.float32, torch.float16


def seen(tensor):
    """float64 of what a tensor core sees of it, on the CPU."""
    values = double(tensor)
    return torch.from_numpy(round_tf32(values) if tensor.dtype == FLOAT else values)


def parts(tensor):
    """float64 of (big, half, rest): TF32, and the number and what TF32 lacks as bfloat16."""
    values = tensor.detach().cpu().contiguous()
    big = torch.from_numpy(to_tf32(values.numpy()))
    return big.double(), values.bfloat16().double(), (values - big).bfloat16().double()


def to_tf32(values):
    """float32 rounded to 10 bits of mantissa, ties to even, by arithmetic in float64."""
    with np.errstate(invalid="ignore", over="ignore"):
        wide = values.astype(np.float64)
        _, exponent = np.frexp(np.where(np.isfinite(wide), wide, 0))  # |wide| < 2 ** exponent
        unit = np.ldexp(1.0, np.maximum(exponent - 1, -126) - 10)
        found = np.where(np.isfinite(wide), np.rint(wide / unit) * unit, wide)
        return found.astype(np.float32)


def hard_to_round(n):
    """float32: ties both ways and beside them, the largest and smallest, and any bits at all."""
    bits = np.random.default_rng(n).integers(0, 1 << 32, n, dtype=np.uint32)
    ends = np.array([0, 0x0FFF, 0x1000, 0x1001, 0x1FFF, 0x2FFF, 0x3000, 0x3001], np.uint32)
    tops = np.array([0, 0x3F800000, 0x7F7FE000, 0x007FE000, 0x80000000, 0xBFFFE000], np.uint32)
    special = np.array([0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00001, 0x7F800001], np.uint32)
    known = np.concatenate([special, (tops[:, None] + ends).ravel()])
    bits[: len(known)] = known[:n]
    return bits.view(np.float32)


def assert_same_bits(found, expected):
    """But for those of a NaN."""
    found, number = found.cpu().numpy(), ~np.isnan(expected)
    assert np.array_equal(np.isnan(found), ~number)
    assert np.array_equal(found[number].view(np.uint32), expected[number].view(np.uint32))


@on_hopper
@pytest.mark.parametrize("n", [1, 3, 4, 53, 1030])
def test_rounding(n):
    values = hard_to_round(n)
    x, y = torch.from_numpy(values).to(PLACE), torch.full((n + 4,), 7.0, device=PLACE)
    n_blocks = math.ceil(n / (4 * arranging.BLOCK_SIZE))
    launch(arranging.round_kernel, n_blocks, arranging.BLOCK_SIZE, x, y[:n], flat=True)
    assert_same_bits(y[:n], to_tf32(values))
    assert (y[n:] == 7).all()


@on_hopper
@pytest.mark.parametrize("n_channels, plane", [(5, (3, 7)), (72, (2, 4)), (4, (3, 22))])
def test_rounding_and_transposing(n_channels, plane):
    """16 bytes at a time and not; more than a square either way."""
    shape = 2, n_channels, *plane
    values = hard_to_round(math.prod(shape)).reshape(shape)
    problem = problem_of(shape, (4, n_channels, 1, 1), 1, 0, 1, 1, False)
    x = torch.from_numpy(values).to(PLACE)
    gather, weight = halo_plan.forward_of(problem), torch.ones((4, n_channels, 1, 1), device=PLACE)
    plan = warpgroup_plan.Plan(SMALL, 0, math.ceil(n_channels / 32), 0)
    found, _ = warpgroup_plan.laid_out(gather, plan, problem, x, weight)
    expected = np.ascontiguousarray(to_tf32(values).transpose(0, 2, 3, 1)).ravel()
    assert_same_bits(found, expected)


@on_hopper
@pytest.mark.parametrize("dtype, last, flipped", [
    (FLOAT, True, False), (FLOAT, False, True), (HALF, False, False), (HALF, True, True),
])  # fmt: skip
def test_weights_in_their_order(dtype, last, flipped):
    """tiles[chunk, tap, line, k], of each sixteen columns first the even ones; zeros beyond."""
    width, size = 16 // dtype.itemsize, 128 // dtype.itemsize
    K, C = (3 * width, 9 * width) if not flipped else (9 * width, 3 * width)
    x, weight, _ = case((1, C, 3, 3), (K, C, 1, 2), dtype, LAYOUTS[last], False)
    problem = problem_of(x.shape, weight.shape, 1, 0, 1, 1, last)
    gather = halo_plan.dx_of(problem) if flipped else halo_plan.forward_of(problem)
    plan = warpgroup_plan.Plan(SMALL, 0, 2, 0)
    _, found = warpgroup_plan.laid_out(gather, plan, problem, x, weight)
    values = seen(weight).numpy()[:, :, 0]  # filter, channel, tap
    values = values.transpose(1, 0, 2)[..., ::-1] if flipped else values
    every = np.zeros((64, 2 * size, 2))
    every[: 3 * width, : 9 * width] = values
    line = np.arange(64).reshape(4, 8, 2).transpose(0, 2, 1).ravel()
    expected = every[line].reshape(64, 2, size, 2).transpose(1, 3, 0, 2)
    assert np.array_equal(double(found), expected.ravel())


@on_hopper
@pytest.mark.parametrize("last, flipped", [(True, False), (False, True)])
def test_weights_in_two_parts(last, flipped):
    """[chunk, tap, part, big or small, line, k]; zeros beyond the last channel and column."""
    K, C = (68, 36) if not flipped else (36, 68)
    x, weight, _ = case((1, C, 3, 3), (K, C, 1, 2), torch.float32, LAYOUTS[last], False)
    problem = problem_of(x.shape, weight.shape, 1, 0, 1, 1, last)
    gather = halo_plan.dx_of(problem) if flipped else halo_plan.forward_of(problem)
    source = torch.randn(1, K, 3, 2, device=PLACE) if flipped else x
    plan = warpgroup_plan.Plan(SMALL, 0, 2, 0)
    _, found = warpgroup_mixed_plan.laid_out(gather, plan, problem, source, weight)
    words = found.cpu().numpy().view(np.uint32).reshape(2, 2, 2, 2, 64, 32)
    values = weight.cpu().contiguous().numpy()[:, :, 0]  # filter, channel, tap
    values = values.transpose(1, 0, 2)[..., ::-1] if flipped else values
    every = np.zeros((128, 64, 2), np.float32)
    every[:68, :36] = values
    line = np.arange(128).reshape(8, 8, 2).transpose(0, 2, 1).ravel()
    every = every[line].reshape(2, 64, 2, 32, 2).transpose(2, 4, 0, 1, 3)
    big, half, rest = (t.numpy() for t in parts(torch.from_numpy(every.copy())))
    assert np.array_equal(words[:, :, :, 0].view(np.float32), big)
    small_words = np.ascontiguousarray(words[:, :, :, 1]).view(np.uint16)
    found = (small_words.astype(np.uint32) << 16).view(np.float32)
    assert np.array_equal(found, np.concatenate([rest, half], axis=-1))
