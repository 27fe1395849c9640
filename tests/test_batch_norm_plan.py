"""Batch normalisation: how `vectorised` deals out channels, by parts, clusters and a walk."""

import contextlib
import math

import numpy as np
import pytest
import torch
from batch_norm_checks import (
    DTYPES,
    affine,
    check_backward,
    check_forward,
    double,
    every_format,
    forget_plans,
    image,
    in_parts,
    statistics,
    walking,
    within,
)
from hypothesis import example, given, settings
from hypothesis import strategies as st
from turns import in_turns

from course_lib import SIMULATED, reference, simulator
from course_lib.kernels import batch_norm
from course_lib.kernels.batch_norm import plan, walk


@pytest.fixture(autouse=True)
def plans_of_this_test_alone():
    yield
    forget_plans()


@every_format
@pytest.mark.parametrize("shape", [(6, 8, 5, 5), (1, 8, 13, 17), (2, 3, 20, 11)])
def test_channels_in_parts(monkeypatch, layout, shape):
    dtype = torch.bfloat16 if shape[0] == 1 else torch.float32
    in_parts(monkeypatch)
    assert not plan.plan_planes(shape[0], shape[1], shape[2] * shape[3], 4).cluster
    assert plan.plan_planes(shape[0], shape[1], shape[2] * shape[3], 4).n_parts > 1
    x, dy = image(shape, dtype, layout), image(shape, dtype, layout)
    weight, bias = affine(shape[1])
    for relu in (False, True):
        y, mean, rstd = check_forward(x, weight, bias, "vectorised", relu=relu)
        check_backward(dy, x, weight, mean, rstd, "vectorised", relu=relu, y=y)
    check_backward(dy, x, None, mean, rstd, "vectorised", training=False)
    running = statistics(shape[1])
    y = batch_norm.inference(x, weight, bias, *running)
    expected, _, _ = reference.batch_norm(
        double(x), double(weight), double(bias), mean=double(running[0]), var=double(running[1])
    )
    within(y, expected, np.abs(expected) + 8)


def test_channels_that_are_no_whole_vectors(monkeypatch):
    """A row is several pixels, the last one ends early, and elements are left behind it."""
    in_parts(monkeypatch)
    (weight, bias), shape, dtype = affine(17), (1, 17, 5, 53), torch.bfloat16
    assert plan.plan_pixels(5 * 53, 17, dtype.itemsize).n_parts > 1 and math.prod(shape) % 8
    x, dy = image(shape, dtype, "channels_last"), image(shape, dtype, "channels_last")
    with simulator.sanitize() if SIMULATED else contextlib.nullcontext() as report:
        y, mean, rstd = check_forward(x, weight, bias, "vectorised", relu=True)
        check_backward(dy, x, weight, mean, rstd, "vectorised", relu=True, y=y)
    assert not SIMULATED or not report.findings, report
    # Off a boundary: what is read is copied, and what is written goes by elements.
    off, dx = begun(x, 1), begun(dy, 1)
    assert check_forward(off, weight, bias, "vectorised", relu=True)[0].equal(y)
    check_backward(dy, off, weight, mean, rstd, "vectorised", relu=True, y=y, out=dx)


def begun(x, start):
    """A channels-last copy of `x` that begins `start` elements behind a boundary."""
    N, C, H, W = x.shape
    memory = torch.empty(x.numel() + start, dtype=x.dtype, device=x.device)[start:]
    return memory.view(N, H, W, C).permute(0, 3, 1, 2).copy_(x)


@settings(deadline=None)
@example(N=3, C=6, P=301 * 299, itemsize=2)
@given(
    N=st.integers(1, 512), C=st.integers(1, 3000), P=st.integers(1, 10**6) | st.integers(1, 400),
    itemsize=st.sampled_from([2, 4]),
)  # fmt: skip
def test_plans_are_what_the_kernels_expect(N, C, P, itemsize):
    plans = [plan.plan_planes(N, C, P, itemsize, most) for most in (1, 2, plan.CLUSTER)]
    plans += [plan.plan_pass(N, C, P, itemsize), plan.plan_walk(N, C, P, itemsize)]
    for found in plans:
        assert found.cluster in (0, found.n_parts) and found.cluster <= plan.CLUSTER
        assert N * P <= found.n_parts * found.length
        assert found.cluster or (found.n_parts - 1) * found.length < N * P
        assert found.block % found.team == 0 and found.block % 32 == 0
        assert found.team & (found.team - 1) == 0
    for merged in (True, False):
        found = plan.plan_pixels(N * P, C, itemsize, merged)
        assert found.wide % C == found.wide * itemsize % 16 == 0
        assert (found.n_rows - 1) * found.wide < N * P * C <= found.n_rows * found.wide
        assert (found.n_parts - 1) * found.length < found.n_rows <= found.n_parts * found.length
        assert 256 % found.n_columns == 0 and found.n_parts <= 65535
        assert found.n_tiles * found.n_columns * 16 >= found.wide * itemsize


@pytest.mark.parametrize("shape, dtype", in_turns(
    [((6, 2, 5, 5),), ((1, 2, 13, 17),), ((2, 2, 20, 12),), ((2, 1, 1, 1),)], DTYPES
), ids=str)  # fmt: skip
def test_channels_of_clusters(monkeypatch, shape, dtype):
    N, C, H, W = shape
    x, dy, (weight, bias) = image(shape, dtype), image(shape, dtype), affine(C)
    for least, most in ((1, 8), (64, 8), (1, 4)):
        monkeypatch.setattr(plan, "LEAST_SHARE", least)
        monkeypatch.setattr(plan, "CLUSTER", most)
        monkeypatch.setattr(batch_norm.vectorised, "CLUSTER", most)
        forget_plans()
        found = plan.plan_planes(N, C, H * W, x.element_size(), most)
        assert found.cluster == most or N * H * W * x.element_size() < 2 * most * least
        y, mean, rstd = check_forward(x, weight, bias, "vectorised", relu=True)
        check_backward(dy, x, weight, mean, rstd, "vectorised", relu=True, y=y)
        check_backward(dy, x, None, mean, rstd, "vectorised", training=False)


@pytest.mark.parametrize("shape", [(6, 3, 5, 5), (1, 5, 13, 17), (2, 3, 20, 12)])
@pytest.mark.parametrize("lead", [1, 7, 1000])
def test_a_walk_over_the_channels(monkeypatch, shape, lead):
    dtype = torch.bfloat16 if shape[0] == 1 else torch.float32
    walking(monkeypatch, lead)
    walked, real = [], walk.forward
    monkeypatch.setattr(walk, "forward", lambda *a: walked.append(1) or real(*a))
    x, (weight, bias) = image(shape, dtype), affine(shape[1])
    check_forward(x, weight, bias, "vectorised", relu=(shape[0] + lead) % 2 == 1)
    assert walked == [1]


@pytest.mark.skipif(not SIMULATED, reason="the simulator has other orders to offer")
@pytest.mark.parametrize("order", ["reverse", "random"])
def test_a_walk_in_any_order_of_blocks_leaves_its_counters_at_zero(monkeypatch, order):
    walking(monkeypatch, 2)
    made = []
    monkeypatch.setattr(
        walk.counters, "counters", lambda n, like: made.append(like.new_zeros(n).int()) or made[-1]
    )
    x, weight = image((4, 3, 9, 9)), affine(3)[0]
    found = []
    for how in ("forward", order):
        with simulator.options(order=how):
            found.append(batch_norm.forward(x, weight))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert len(made) == 2 and not any(counted.any() for counted in made)


def test_clusters_and_single_blocks_agree(monkeypatch):
    # On chips without clusters, a block takes the channel that a cluster takes elsewhere.
    x, weight = image((4, 2, 9, 9)), affine(2)[0]
    monkeypatch.setattr(plan, "LEAST_SHARE", 16)
    found = []
    for since in ((9, 0), (99, 0)):
        monkeypatch.setattr(batch_norm.vectorised, "CLUSTERS_SINCE", since)
        y, mean, rstd = check_forward(x, weight, None, "vectorised")
        found.append(check_backward(x, x, weight, mean, rstd, "vectorised"))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
