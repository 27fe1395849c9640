"""Layer normalisation: what the contract does not prove, its plan and large means."""

import pytest
import torch
import torch.nn.functional as F

from course_lib import SIMULATED, ops
from course_lib.kernels import layer_norm
from course_lib.kernels.layer_norm import plan

DEVICE = "cpu" if SIMULATED else "cuda"
DTYPES = ("float32", "float16", "bfloat16")
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def numbers(*shape, dtype=torch.float32, scale=1.0, shift=0.0, seed=0):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale + shift
    return x.to(DEVICE, dtype)


def near(found, expected, tolerance):
    assert found.shape == expected.shape
    error = (found.double() - expected).norm() / expected.norm()
    assert error <= tolerance, f"{error:.1e}"


def gradients(function, shape, x, weight, bias, dy):
    """[y, dx, dweight, dbias] of those that there are."""
    leaves = [None if t is None else t.clone().requires_grad_() for t in (x, weight, bias)]
    y = function(leaves[0], shape, *leaves[1:], 1e-3)
    y.backward(dy)
    return [y, *(leaf.grad for leaf in leaves if leaf is not None)]


@pytest.mark.parametrize("variant", layer_norm.FORWARD)
def test_rows_far_from_zero_keep_their_digits(variant):
    """As far as float32 has them: the mean is a thousand times the spread."""
    x = numbers(2, 96, shift=1e3)
    y, mean, rstd = layer_norm.forward(x, variant=variant)
    true = F.layer_norm(x.double(), (96,))
    near(y, true, 2e-6 if variant == "registers" else 2**-14)  # others: a digit of the mean
    near(mean, x.double().mean(-1), 1e-6)
    near(rstd, (x.double().var(-1, correction=0) + 1e-5).rsqrt(), 1e-4)


def test_statistics_of_rows_of_nothing():
    y, mean, rstd = layer_norm.forward(numbers(3, 0))
    assert y.shape == (3, 0) and (mean == 0).all() and rstd.isnan().all()
    dx, *sums = layer_norm.backward(numbers(0, 5), numbers(0, 5), None, numbers(0), numbers(0))
    assert dx.shape == (0, 5) and all((each == 0).all() and each.shape == (5,) for each in sums)


def test_padding_past_a_row_does_not_overflow():
    """x̂ of what is not there: (0 − mean)·rstd is infinite here."""
    x, dy = numbers(3, 20) * 0 + 3e37, numbers(3, 20, seed=1)
    mean, rstd = x[:, 0].clone(), numbers(3) * 0 + 316
    for variant in layer_norm.BACKWARD:
        found = layer_norm.backward(dy, x, None, mean, rstd, variant=variant)
        assert all(each.isfinite().all() for each in found), variant


@pytest.mark.parametrize("itemsize", [4, 2])
@pytest.mark.parametrize("vectors", [True, False])
def test_plans_hold_every_row(itemsize, vectors):
    """Whatever the length, the threads of a row have room for it, and no more than they may."""
    for n_cols in range(1, plan.FORWARD_LIMIT + 1, 7):
        plans = [(plan.forward_plan(n_cols, itemsize), plan.FORWARD_THREADS)]
        if n_cols <= plan.BACKWARD_LIMIT[vectors]:
            found = plan.backward_plan(n_cols, itemsize, vectors)
            plans.append((found, plan.BACKWARD_THREADS))
            assert found.n_threads * plan.record_bytes(vectors) <= 60 << 10  # a T4 has 64
        for found, most in plans:
            n_ranks = found.n_threads // found.n_teams
            assert n_ranks * found.n_slots * (16 // itemsize) >= n_cols
            assert found.n_threads <= most and found.n_threads % 32 == 0
            assert found.n_slots <= plan.most_slots(itemsize)


def test_long_rows_are_streamed():
    limit = plan.FORWARD_LIMIT
    chosen = layer_norm.default_variant
    assert [chosen("forward", n) for n in (limit, limit + 1)] == ["registers", "streamed"]
    for vectors, most in plan.BACKWARD_LIMIT.items():
        found = [chosen("backward", n, vectors) for n in (most, most + 1)]
        assert found == ["registers", "streamed"]
    x = numbers(1, limit + 8)
    with pytest.raises(ValueError, match="rows of at most 8,192 elements here, not 8,200"):
        layer_norm.forward(x, variant="registers")
    with pytest.raises(ValueError, match="rows of at most 6,144 elements here"):
        layer_norm.backward(x, x, None, x[:, 0], x[:, 0], variant="registers")
    y, *_ = layer_norm.forward(x)
    near(y, F.layer_norm(x.double(), x.shape[-1:]), 1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("shape", [
    (513, 768), (4099, 64), (70, 1023), (257, 3072), (33, 6144), (33, 6152), (129, 8192),
    (17, 3079), (5, 100_003), (200_000, 24), (3, 1 << 20),
])  # fmt: skip
def test_every_rung_on_a_gpu(shape, name):
    dtype = getattr(torch, name)
    x, dy = (numbers(*shape, dtype=dtype, shift=0.3, seed=n) for n in range(2))
    weight, bias = (numbers(shape[1], dtype=dtype, seed=n) for n in (2, 3))
    true = gradients(F.layer_norm, shape[1:], *(t.double() for t in (x, weight, bias, dy)))
    for variant in ("auto", *layer_norm.FORWARD):
        try:
            y, mean, rstd = layer_norm.forward(x, weight, bias, eps=1e-3, variant=variant)
        except ValueError:
            assert variant == "registers" and shape[1] > plan.FORWARD_LIMIT
            continue
        near(y, true[0], TOLERANCE[dtype])
    for variant in ("auto", *layer_norm.BACKWARD):
        try:
            found = layer_norm.backward(dy, x, weight, mean, rstd, variant=variant)
        except ValueError:
            assert variant == "registers" and shape[1] > min(plan.BACKWARD_LIMIT.values())
            continue
        again = layer_norm.backward(dy, x, weight, mean, rstd, variant=variant)
        assert all(map(torch.equal, found, again)), variant
        for part, expected in zip(found, true[1:], strict=True):
            near(part, expected, TOLERANCE[dtype] * (5 if part.dim() == 1 else 1))
    found = gradients(ops.layer_norm, shape[1:], x, weight, bias, dy)
    for part, expected in zip(found, true, strict=True):
        near(part, expected, TOLERANCE[dtype] * (5 if part.dim() == 1 else 1))
