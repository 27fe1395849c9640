"""Batch normalisation, ReLU and softmax in one: every rung, both directions, against float64."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensors import PLACE, ROUNDING, double, rounded_once
from torch.nn import functional as F

from course_lib import SIMULATED, reference, simulator
from course_lib.kernels import bn_relu_softmax
from course_lib.runtime.host.arrays import ArrayError

VARIANTS = list(bn_relu_softmax.FORWARD)
every_variant = pytest.mark.parametrize("variant", VARIANTS)


def inputs(n_rows, n_cols, dtype, *, feature_dtype=None, spread=1.0, middle=0.0, seed=0):
    """x, dy and four parameters; no z so close to 0 that rounding could decide what ReLU does."""
    generator = torch.Generator().manual_seed(seed)
    x, dy = (torch.randn(n_rows, n_cols, generator=generator) for _ in range(2))
    mean, weight, bias = (torch.randn(n_cols, generator=generator) for _ in range(3))
    var = torch.rand(n_cols, generator=generator) + 0.2
    x, mean = x * spread + middle, mean * spread + middle
    parameters = [p.to(PLACE, feature_dtype or dtype) for p in (mean, var, weight, bias)]
    x = x.to(PLACE, dtype)
    z, size = terms(x, parameters)
    x = torch.where((z.abs() < 1e-5 * size).to(PLACE), parameters[0].to(dtype), x)
    return x, dy.to(PLACE, dtype), parameters


def terms(x, parameters):
    """z in float64, and the size of what was summed for it."""
    mean, var, weight, bias = (p.double().cpu() for p in parameters)
    slope = weight / (var + 1e-5).sqrt()
    x = x.double().cpu()
    return (x - mean) * slope + bias, (x.abs() + mean.abs()) * slope.abs() + bias.abs()


def check(x, dy, parameters, variant):
    y = bn_relu_softmax.forward(x, *parameters, variant=variant, out=torch.full_like(x, math.nan))
    arguments = [double(p) for p in parameters]
    # An error in z is one in y by as large a factor.
    z = terms(x, parameters)[0].abs().max().item() if x.numel() else 0.0
    rounded_once(y, reference.bn_relu_softmax(double(x), *arguments), 1 + z)
    dx, dweight, dbias = bn_relu_softmax.backward(
        dy, y, x, *parameters, variant=variant, out=torch.full_like(x, math.nan)
    )
    expected = reference.bn_relu_softmax_backward(double(dy), double(y), double(x), *arguments)
    mean, var, weight, _ = arguments
    steepest = np.abs(weight) / np.sqrt(var + 1e-5)
    d = np.abs(double(y)) * np.abs(double(dy)).max(initial=0)
    normal = (np.abs(double(x)) + np.abs(mean)) / np.sqrt(var + 1e-5)
    rounded_once(dx, expected[0], d.max(initial=0) * steepest)
    rounded_once(dweight, expected[1], 2 * (d.max(initial=0) * normal).sum(axis=0))
    rounded_once(dbias, expected[2], 2 * d.max(initial=0) * len(x))
    assert dweight.dtype == dbias.dtype == parameters[2].dtype
    return y, dx, dweight, dbias


@every_variant
@settings(max_examples=15, deadline=None)
@given(
    shape=st.tuples(st.integers(0, 12), st.integers(0, 9))
    | st.tuples(st.integers(1, 4), st.integers(1, 400)),
    dtype=st.sampled_from(list(ROUNDING)),
    spread=st.sampled_from([0.01, 1.0, 10.0]),
    middle=st.sampled_from([0.0, -100.0, 100.0]),
    seed=st.integers(0, 2**31),
    wide=st.booleans(),
)
def test_random_shapes(variant, shape, dtype, spread, middle, seed, wide):
    feature_dtype = torch.float32 if wide else dtype
    made = inputs(
        *shape, dtype, feature_dtype=feature_dtype, spread=spread, middle=middle, seed=seed
    )
    check(*made, variant)


@pytest.mark.parametrize("n_cols", [1, 8, 31, 64])
def test_more_rows_than_blocks_take_at_once(n_cols, monkeypatch):
    # Each block works on several rows, the last one on fewer.
    monkeypatch.setattr(bn_relu_softmax, "ENOUGH_THREADS", 512)
    n_rows = 3 * 512 * 8 // max(8, n_cols) + 5
    check(*inputs(n_rows, n_cols, torch.float32, seed=n_cols), "registers")


@every_variant
def test_more_rows_than_a_part_of_the_column_sums(variant):
    check(*inputs(150, 5, torch.float32), variant)


@pytest.mark.parametrize("n_cols, dtype", [(300, torch.float32), (1028, torch.float32),
                                           (600, torch.bfloat16)])  # fmt: skip
def test_a_block_for_each_row(n_cols, dtype, monkeypatch):
    monkeypatch.setattr(bn_relu_softmax, "ENOUGH_THREADS", 256)
    check(*inputs(5, n_cols, dtype, feature_dtype=torch.float32), "registers")


@pytest.mark.parametrize("n_cols", [600, 601])
def test_rows_too_long_for_registers(n_cols, monkeypatch):
    # The simulator is slow, so "too long" begins earlier here.
    monkeypatch.setattr(bn_relu_softmax, "row_limit", lambda *_: 500)
    check(*inputs(3, n_cols, torch.float32), "registers")


@every_variant
def test_as_pytorch(variant):
    x, dy, parameters = inputs(40, 20, torch.float32, seed=3)
    x = x.requires_grad_()
    mean, var, weight, bias = parameters
    weight, bias = weight.clone().requires_grad_(), bias.clone().requires_grad_()
    theirs = F.softmax(F.relu(F.batch_norm(x, mean, var, weight, bias, eps=0.1)), -1)
    theirs.backward(dy)
    y = bn_relu_softmax.forward(x, mean, var, weight, bias, eps=0.1, variant=variant)
    assert torch.allclose(y, theirs.detach(), rtol=1e-5, atol=1e-7)
    found = bn_relu_softmax.backward(dy, y, x, mean, var, weight, bias, eps=0.1, variant=variant)
    for ours, gradient in zip(found, (x.grad, weight.grad, bias.grad), strict=True):
        assert torch.allclose(ours, gradient, rtol=1e-4, atol=1e-6)


@every_variant
@pytest.mark.parametrize("n_cols", [3, 8])
def test_special_values(variant, n_cols):
    x, dy, (mean, var, weight, bias) = inputs(6, n_cols, torch.float32)
    x[0, 0], x[1, 1], x[2, 2], x[3], x[4, 1:] = math.inf, math.nan, -math.inf, -math.inf, 1e30
    leaves = [tensor.clone().requires_grad_() for tensor in (x, weight, bias)]
    theirs = F.softmax(F.relu(F.batch_norm(leaves[0], mean, var, *leaves[1:])), -1)
    y = bn_relu_softmax.forward(x, mean, var, weight, bias, variant=variant)
    assert torch.allclose(y, theirs.detach(), rtol=1e-5, equal_nan=True)
    assert y[1].isnan().all() and not y[5].isnan().any()
    theirs.backward(dy)
    found = bn_relu_softmax.backward(dy, y, x, mean, var, weight, bias, variant=variant)
    for ours, leaf in zip(found, leaves, strict=True):
        assert torch.allclose(ours, leaf.grad, rtol=1e-4, atol=1e-6, equal_nan=True)


@every_variant
def test_relu_passes_no_gradient_at_zero(variant):
    x = torch.tensor([[0.0, 1.0, -1.0, 0.0]], device=PLACE)
    zero, one = torch.zeros(4, device=PLACE), torch.ones(4, device=PLACE)
    y = bn_relu_softmax.forward(x, zero, one, one, zero, variant=variant)
    dy = torch.tensor([[1.0, 2.0, 3.0, -1.0]], device=PLACE)
    dx, dweight, dbias = bn_relu_softmax.backward(dy, y, x, zero, one, one, zero, variant=variant)
    assert (double(dx) != 0).tolist() == [[False, True, False, False]]
    assert (double(dbias) != 0).tolist() == [False, True, False, False]


@every_variant
def test_large_means_cost_no_accuracy(variant):
    x, dy, (_, var, weight, bias) = inputs(4, 64, torch.float32)
    mean = torch.full((64,), 4096.0, device=PLACE)
    x = torch.round(x * 64) / 64 + 4096  # exact: x - 4096 is as well
    y = bn_relu_softmax.forward(x, mean, var, weight, bias, variant=variant)
    expected = reference.bn_relu_softmax(double(x), *map(double, (mean, var, weight, bias)))
    assert np.abs(double(y) - expected).max() < 2e-6


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)])
def test_no_rows_no_columns(shape):
    x, dy, parameters = inputs(*shape, torch.float32)
    for variant in VARIANTS:
        y, dx, dweight, dbias = check(x, dy, parameters, variant)
        assert (dweight == 0).all() and (dbias == 0).all()  # a sum of nothing


def test_gradients_by_finite_differences():
    rng = np.random.default_rng(8)
    x, dy = rng.normal(size=(2, 4, 3))
    mean, weight, bias = rng.normal(size=(3, 3))
    var = rng.random(3) + 0.5
    y = reference.bn_relu_softmax(x, mean, var, weight, bias)
    found = reference.bn_relu_softmax_backward(dy, y, x, mean, var, weight, bias)
    step = 1e-6
    for array, gradient in zip((x, weight, bias), found, strict=True):
        for i in np.ndindex(array.shape):
            values, before = [], array[i]
            for sign in (1, -1):
                array[i] = before + sign * step
                values.append((reference.bn_relu_softmax(x, mean, var, weight, bias) * dy).sum())
            array[i] = before
            assert abs((values[0] - values[1]) / (2 * step) - gradient[i]) < 1e-8


def test_runs_agree_bit_for_bit():
    x, dy, parameters = inputs(300, 24, torch.float32)
    y = bn_relu_softmax.forward(x, *parameters)
    first, second = (bn_relu_softmax.backward(dy, y, x, *parameters) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_errors_name_what_was_expected():
    x, dy, parameters = inputs(4, 5, torch.float32)
    mean, var, weight, bias = parameters
    y = bn_relu_softmax.forward(x, *parameters)
    with pytest.raises(ValueError, match="eps must be at least 0, not -1"):
        bn_relu_softmax.forward(x, *parameters, eps=-1)
    with pytest.raises(ArrayError, match=r"x must have 2 dimensions, not shape \(5,\)"):
        bn_relu_softmax.forward(x[0], *parameters)
    with pytest.raises(ArrayError, match=r"var must have shape \(5,\), not \(4,\)"):
        bn_relu_softmax.forward(x, mean, var[:4], weight, bias)
    with pytest.raises(ArrayError, match="mean must be float32, not float16"):
        bn_relu_softmax.forward(x, mean.half(), var, weight, bias)
    with pytest.raises(ArrayError, match="bias must be float32, not float16"):
        bn_relu_softmax.forward(x.half(), mean, var, weight, bias.half())
    with pytest.raises(ArrayError, match="weight must be an array, not a NoneType"):
        bn_relu_softmax.forward(x, mean, var, None, bias)
    with pytest.raises(ArrayError, match=r"dy must have shape \(4, 5\), not \(5, 4\)"):
        bn_relu_softmax.backward(dy.t(), y, x, *parameters)
    with pytest.raises(ArrayError, match="y must be float32, not float16"):
        bn_relu_softmax.backward(dy, y.half(), x, *parameters)


@pytest.mark.skipif(not SIMULATED, reason="the sanitizer watches the simulator")
@every_variant
@pytest.mark.parametrize("n_cols", [3, 40, 300])
def test_the_sanitizer_finds_nothing(variant, n_cols, monkeypatch):
    monkeypatch.setattr(bn_relu_softmax, "ENOUGH_THREADS", 256)  # several rows for each block
    x, dy, parameters = inputs(5, n_cols, torch.float32)
    with simulator.sanitize() as report:
        y = bn_relu_softmax.forward(x, *parameters, variant=variant)
        bn_relu_softmax.backward(dy, y, x, *parameters, variant=variant)
    assert not report.findings, report.findings


@pytest.mark.gpu
@every_variant
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize(
    "shape",
    [(5000, 64), (1000, 200), (3001, 1000), (2000, 1024), (400, 8192), (399, 6000), (300, 8191),
     (20, 20000)],
)  # fmt: skip
def test_large_shapes(variant, dtype, shape):
    check(*inputs(*shape, dtype, feature_dtype=torch.float32), variant)
