"""Softmax and dropout in one pass: every rung, both directions, against float64."""

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tensors import FLOOR, PLACE, ROUNDING, double, rounded_once

from course_lib import reference
from course_lib.kernels import softmax_dropout
from course_lib.runtime.host.arrays import ArrayError

VARIANTS = list(softmax_dropout.FORWARD)
every_variant = pytest.mark.parametrize("variant", VARIANTS)


def scale_of(p):
    return 1 / (1 - p) if p < 1 else 0.0


def check(x, dz, p, seed, offset, variant):
    """Both directions against float64, and the mask element by element."""
    z, stats = softmax_dropout.forward(
        x, p, seed, offset, variant=variant, out=torch.full_like(x, math.nan)
    )
    x64, dz64 = double(x), double(dz)
    expected = reference.softmax_dropout(x64, p, seed, offset)
    rounded_once(z, expected, scale_of(p))
    y = reference.softmax(x64)
    visible = y > FLOOR[x.dtype] * 4  # smaller ones are zero whether they are kept or not
    mask = reference.dropout_mask(x.shape, p, seed, offset)
    if p < 1:
        assert np.array_equal((double(z) != 0)[visible], mask[visible])
    dx = softmax_dropout.backward(
        dz, x, stats, p, seed, offset, variant=variant, out=torch.full_like(x, math.nan)
    )
    truth = reference.softmax_dropout_backward(dz64, x64, p, seed, offset)
    rounded_once(dx, truth, scale_of(p) * np.abs(dz64).max(initial=0))
    return z, stats, dx


@every_variant
@settings(max_examples=15, deadline=None)
@given(
    shape=st.lists(st.integers(0, 7), max_size=3)
    | st.tuples(st.integers(1, 3), st.integers(1, 400)),
    dtype=st.sampled_from(list(ROUNDING)),
    p=st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]),
    spread=st.sampled_from([0.01, 1.0, 30.0]),
    middle=st.sampled_from([0.0, -1e4, 1e4]),
    seed=st.integers(0, 2**64 - 1),
    offset=st.integers(0, 2**40).map(lambda n: 4 * n) | st.integers(0, 2**62),
)
@example((3, 16), torch.float32, 0.5, 1.0, 0.0, 1, 2**34 - 24)  # the counter's low word overflows
@example((2, 8), torch.bfloat16, 0.5, 1.0, 0.0, -1, 2**62)
def test_random_shapes(variant, shape, dtype, p, spread, middle, seed, offset):
    generator = torch.Generator().manual_seed(seed % 2**32)
    x, dz = (torch.randn(shape, generator=generator) for _ in range(2))
    x = (x * spread + middle).to(PLACE, dtype)
    check(x, dz.to(PLACE, dtype), p, seed, offset, variant)


@pytest.mark.parametrize("n_cols", [1024, 1025, 3000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_a_block(n_cols, dtype):
    x, dz = (torch.randn(2, n_cols, device=PLACE).to(dtype) for _ in range(2))
    x[1, ::3] = -math.inf
    check(x, dz, 0.3, 5, 8, "registers")


def test_each_kernel_of_registers_is_some_rows():
    for n_held, kernels in ((1, softmax_dropout._forward), (2, softmax_dropout._backward)):
        lengths = range(1, softmax_dropout.ROW_LIMIT[n_held] + 2)
        taken = {softmax_dropout.plan(n, size, n_held)[:2] for n in lengths for size in (2, 4)}
        assert taken == set(kernels)


@pytest.mark.parametrize("n_cols", [2100, 2048 + 8])
def test_rows_too_long_for_registers(monkeypatch, n_cols):
    # The simulator is slow, so "too long" begins earlier here.
    monkeypatch.setattr(softmax_dropout, "ROW_LIMIT", {1: 1000, 2: 1000})
    monkeypatch.setattr(softmax_dropout, "LONG_BLOCK_SIZE", 64)
    x, dz = (torch.randn(2, n_cols, device=PLACE) for _ in range(2))
    x[1, :1500] = -math.inf
    check(x, dz, 0.3, 5, 8, "registers")


@every_variant
@pytest.mark.parametrize("n_cols", [3, 8])
def test_special_values(variant, n_cols):
    x = torch.randn(7, n_cols, device=PLACE)
    x[0, 0], x[1, 1], x[2, 2] = math.inf, math.nan, -math.inf
    x[3] = -math.inf
    x[4, 1:] = -math.inf
    x[5, 0], x[5, 1] = math.inf, -math.inf
    z, stats = softmax_dropout.forward(x, 0.5, 3, 0, variant=variant)
    y = torch.softmax(x, -1)
    mask = torch.from_numpy(reference.dropout_mask(x.shape, 0.5, 3, 0)).to(PLACE)
    assert torch.allclose(z, y * mask * 2, rtol=1e-5, equal_nan=True)
    assert z[[0, 1, 3, 5]].isnan().all() and not z[[2, 4, 6]].isnan().any()
    dz = torch.randn_like(x)
    dx = softmax_dropout.backward(dz, x, stats, 0.5, 3, 0, variant=variant)
    g = dz * mask * 2
    expected = y * (g - (y * g).sum(-1, keepdim=True))
    assert torch.allclose(dx, expected, rtol=1e-4, atol=1e-6, equal_nan=True)


@every_variant
def test_nothing_and_everything_dropped(variant):
    x, dz = torch.randn(3, 12, device=PLACE), torch.randn(3, 12, device=PLACE)
    z, stats, dx = check(x, dz, 0.0, 1, 0, variant)
    assert (z != 0).all()
    z, stats, dx = check(x, dz, 1.0, 1, 0, variant)
    assert (z == 0).all() and (dx == 0).all()
    check(x, dz, 1 - 1e-12, 1, 0, variant)  # no uint32 is as large: the same as 1


def kept(n_rows, n_cols, p, seed, offset, variant="registers"):
    """The mask as forward applied it: softmax of zeros is positive everywhere."""
    x = torch.zeros(n_rows, n_cols, device=PLACE)
    return double(softmax_dropout.forward(x, p, seed, offset, variant=variant)[0]) != 0


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.8, 0.99])
def test_the_kept_fraction(p):
    mask = kept(64, 256, p, seed=97, offset=0)
    deviation = math.sqrt(p * (1 - p) / mask.size)
    assert abs(mask.mean() - (1 - p)) < 5 * deviation
    for axis in (0, 1):  # and along every row and column
        n = mask.shape[axis]
        worst = np.abs(mask.mean(axis) - (1 - p)).max()
        assert worst < 6 * math.sqrt(p * (1 - p) / n) + 1 / n


def test_other_seeds_and_offsets_give_independent_masks():
    first = kept(32, 256, 0.5, seed=1, offset=0)
    n = first.size
    for seed, offset in ((2, 0), (1 << 32 | 1, 0), (1, n), (1, 2**34), (1, 4), (1, 1)):
        other = kept(32, 256, 0.5, seed, offset)
        assert abs((first == other).mean() - 0.5) < 5 * 0.5 / math.sqrt(n), (seed, offset)


def test_an_offset_moves_the_mask():
    whole = kept(4, 32, 0.5, seed=9, offset=0).ravel()
    for variant in VARIANTS:
        for offset in (32, 5):
            part = kept(2, 32, 0.5, seed=9, offset=offset, variant=variant).ravel()
            assert np.array_equal(part, whole[offset : offset + 64])


@every_variant
def test_backward_drops_what_forward_dropped(variant):
    # softmax of two equal numbers: dx = (g0 - g1) / 4 tells which of the two gradients counted.
    x = torch.zeros(50, 2, device=PLACE)
    z, stats = softmax_dropout.forward(x, 0.5, 77, 6, variant=variant)
    dz = torch.tensor([1.0, 10.0], device=PLACE).expand(50, 2)
    dx = softmax_dropout.backward(dz, x, stats, 0.5, 77, 6, variant=variant)
    first, second = (double(z) != 0).T
    assert np.allclose(double(dx)[:, 0], (2 * first - 20.0 * second) / 4)
    assert 0 < first.sum() < 50 and not np.array_equal(first, second)


@pytest.mark.parametrize("shape", [(), (0,), (0, 5), (5, 0), (2, 0, 3)])
def test_no_rows_no_columns_no_dimensions(shape):
    x = torch.zeros(shape, device=PLACE)
    z, stats = softmax_dropout.forward(x, 0.25, 1, 0)
    assert z.shape == x.shape and stats.dtype == torch.float32
    assert softmax_dropout.backward(x, x, stats, 0.25, 1, 0).shape == x.shape


def test_errors_name_what_was_expected():
    x = torch.randn(4, 5, device=PLACE)
    z, stats = softmax_dropout.forward(x, 0.5, 0, 0)
    for wrong in (-0.1, 1.5, math.nan):
        with pytest.raises(ValueError, match="p must be a probability between 0 and 1, not"):
            softmax_dropout.forward(x, wrong, 0, 0)
    with pytest.raises(TypeError, match="p must be a number, not '0.5'"):
        softmax_dropout.forward(x, "0.5", 0, 0)
    with pytest.raises(TypeError, match="seed must be an int, not 1.5"):
        softmax_dropout.forward(x, 0.5, 1.5, 0)
    with pytest.raises(TypeError, match="offset must be an int, not None"):
        softmax_dropout.forward(x, 0.5, 0, None)
    for wrong in (-1, 2**63 - 20):
        with pytest.raises(ValueError, match="offset must be at least 0, and less than 2"):
            softmax_dropout.forward(x, 0.5, 0, wrong)
    with pytest.raises(ArrayError, match=r"stats must have shape \(4, 2\), not \(2, 4\)"):
        softmax_dropout.backward(x, x, stats.t(), 0.5, 0, 0)


@pytest.mark.gpu
@every_variant
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize(
    "shape", [(4096, 64), (1000, 200), (301, 1000), (64, 8192), (63, 8191), (5, 50304), (2, 131072)]
)
def test_large_shapes(variant, dtype, shape):
    x, dz = (torch.randn(shape, device=PLACE).mul(3).to(dtype) for _ in range(2))
    check(x, dz, 0.1, 2024, 12, variant)
