"""Batch normalisation: every rung, both directions, both memory formats, against float64."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from batch_norm_checks import (
    DTYPES,
    EPS,
    FORMATS,
    IMAGES,
    PLACE,
    RIGHT,
    affine,
    check_backward,
    check_forward,
    double,
    every_backward,
    every_format,
    every_inference,
    every_variant,
    forget_plans,
    image,
    in_parts,
    statistics,
    walking,
    within,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from course_lib import SIMULATED, reference, simulator
from course_lib.kernels import batch_norm
from course_lib.kernels.batch_norm import plan, walk
from course_lib.runtime.host.arrays import ArrayError


@pytest.fixture(autouse=True)
def plans_of_this_test_alone():
    yield
    forget_plans()


@every_variant
@every_format
@pytest.mark.parametrize(("shape", "dtype"), IMAGES)
def test_forward(variant, layout, shape, dtype):
    x = image(shape, dtype, layout)
    y, _, _ = check_forward(x, *affine(shape[1]), variant)
    assert y.is_contiguous(memory_format=FORMATS[layout])


@every_backward
@every_format
@pytest.mark.parametrize(("shape", "dtype"), IMAGES)
def test_backward(variant, layout, shape, dtype):
    x, dy = image(shape, dtype, layout), image(shape, dtype, layout)
    weight, bias = affine(shape[1])
    relu = shape[0] > 1
    y, mean, rstd = batch_norm.forward(x, weight, bias, eps=EPS, relu=relu)
    check_backward(dy, x, weight, mean, rstd, variant, relu=relu, y=y)


@every_inference
@every_format
@pytest.mark.parametrize("relu", [False, True])
def test_inference(variant, layout, relu):
    for shape, dtype in IMAGES:
        x, (mean, var) = image(shape, dtype, layout), statistics(shape[1])
        weight, bias = affine(shape[1])
        y = batch_norm.inference(x, weight, bias, mean, var, eps=EPS, relu=relu, variant=variant)
        expected, _, _ = reference.batch_norm(
            double(x), double(weight), double(bias), eps=EPS, relu=relu, mean=double(mean),
            var=double(var),
        )  # fmt: skip
        within(y, expected, np.abs(expected) + 8)


@settings(max_examples=15, deadline=None)
@given(
    shape=st.tuples(*(st.integers(1, most) for most in (4, 12, 9, 9))),
    dtype=st.sampled_from(DTYPES),
    layout=st.sampled_from(list(FORMATS)),
    variant=st.sampled_from(RIGHT),
    backward=st.sampled_from(list(batch_norm.BACKWARD)),
    options=st.tuples(*[st.booleans()] * 4),
    own_dtype=st.booleans(),
)
def test_random_images(shape, dtype, layout, variant, backward, options, own_dtype):
    shape = (shape[0] + (shape[0] * shape[2] * shape[3] == 1), *shape[1:])
    with_weight, with_bias, relu, training = options
    x, dy = image(shape, dtype, layout), image(shape, dtype, layout)
    weight, bias = affine(shape[1], dtype if own_dtype else torch.float32)
    weight, bias = weight if with_weight else None, bias if with_bias else None
    y, mean, rstd = check_forward(x, weight, bias, variant, relu=relu)
    check_backward(dy, x, weight, mean, rstd, backward, relu=relu, y=y, training=training)


@every_format
@pytest.mark.parametrize("stray", [0.0, 1e4])
def test_a_stray_first_element_costs_little(layout, stray):
    # Sums start from the first element that they meet.
    x = image((4, 8, 33, 35), torch.float32, layout, 100.0, 0.1)
    x[0, :, 0, 0] = stray
    _, mean, rstd = batch_norm.forward(x, eps=EPS)
    _, mean64, rstd64 = reference.batch_norm(double(x), eps=EPS)
    # Of all channels together: how far a single sum is off is a matter of luck.
    assert np.linalg.norm(double(rstd) - rstd64) <= 3e-5 * np.linalg.norm(rstd64)
    np.testing.assert_allclose(double(mean), mean64, rtol=1e-6)


@pytest.mark.parametrize("mean, deviation", [(1000.0, 0.1), (-3e4, 3.0), (1e-4, 1e-6)])
@every_format
def test_a_large_mean_costs_nothing_but_in_one_pass(mean, deviation, layout):
    x = image((4, 8, 9, 9), torch.float32, layout, mean, deviation)
    for variant in RIGHT:
        check_forward(x, *affine(8), variant)
    if mean > 1:
        _, _, rstd = batch_norm.forward(x, eps=EPS, variant="one_pass")
        _, _, right = reference.batch_norm(double(x), eps=EPS)
        assert (np.abs(double(rstd) - right) > 0.05 * right).any()


def test_one_pass_is_right_for_a_small_mean():
    check_forward(image((2, 8, 5, 5), mean=0.1), *affine(8), "one_pass")


@every_variant
def test_special_values(variant):
    x = image((2, 4, 4, 4))
    x[0, 1, 2, 3] = math.nan
    x[1, 2, 0, 0] = math.inf
    x[:, 3] = 5.0
    for layout in FORMATS.values():
        y, _, rstd = batch_norm.forward(x.to(memory_format=layout), variant=variant, relu=True)
        expected = F.relu(F.batch_norm(x, None, None, training=True))
        torch.testing.assert_close(y, expected, equal_nan=True, rtol=1e-5, atol=1e-5)
        assert rstd[3].item() == pytest.approx(EPS**-0.5)


@every_variant
def test_empty_and_single(variant):
    y, mean, rstd = batch_norm.forward(torch.empty(0, 3, 4, 4, device=PLACE), variant=variant)
    assert y.shape == (0, 3, 4, 4) and mean.shape == rstd.shape == (3,)
    dx, dweight, dbias = batch_norm.backward(y, y, None, mean, rstd)
    assert dx.shape == y.shape and not dweight.any() and not dbias.any()
    with pytest.raises(ValueError, match="a variance needs two values a channel"):
        batch_norm.forward(torch.ones(1, 3, 1, 1, device=PLACE), variant=variant)


@every_format
def test_two_runs_agree_bit_for_bit_and_inputs_are_left_alone(monkeypatch, layout):
    in_parts(monkeypatch)
    x, dy, (weight, bias) = image((6, 8, 5, 5), layout=layout), image((6, 8, 5, 5)), affine(8)
    before = [t.clone() for t in (x, dy, weight, bias)]
    runs = []
    for _ in range(2):
        y, mean, rstd = batch_norm.forward(x, weight, bias, relu=True)
        found = batch_norm.backward(dy, x, weight, mean, rstd, relu=True, y=y)
        runs.append((y, mean, rstd, *found))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(before, (x, dy, weight, bias), strict=True))


def test_errors_name_what_was_expected():
    x, (weight, bias), running = image((2, 3, 4, 4)), affine(3), statistics(3)
    with pytest.raises(ArrayError, match=r"x must have 4 dimensions, not shape \(3, 4, 4\)"):
        batch_norm.forward(x[0])
    with pytest.raises(ValueError, match="running_mean and running_var must be given together"):
        batch_norm.forward(x, weight, bias, running[0])
    with pytest.raises(ArrayError, match="running_mean must be contiguous"):
        batch_norm.forward(x, None, None, torch.ones(6, device=PLACE)[::2], running[1])
    with pytest.raises(ValueError, match="inference needs running_mean and running_var"):
        batch_norm.inference(x, weight, bias, None, None)
    y, mean, rstd = batch_norm.forward(x, relu=True)
    with pytest.raises(ValueError, match="the gradient of a ReLU needs its output: pass y"):
        batch_norm.backward(x, x, None, mean, rstd, relu=True)


@pytest.mark.skipif(not SIMULATED, reason="the sanitizer watches the simulator")
@every_format
def test_the_sanitizer_finds_nothing(monkeypatch, layout):
    x, dy, (weight, bias) = image((3, 8, 4, 5), layout=layout), image((3, 8, 4, 5)), affine(8)
    with simulator.sanitize() as report:
        for variant in batch_norm.FORWARD:
            y, mean, rstd = batch_norm.forward(x, weight, bias, *statistics(8), variant=variant)
        for variant in batch_norm.BACKWARD:
            batch_norm.backward(dy, x, weight, mean, rstd, relu=True, y=y, variant=variant)
        in_parts(monkeypatch)
        y, mean, rstd = batch_norm.forward(x, weight, bias, *statistics(8))
        batch_norm.backward(dy, x, weight, mean, rstd, relu=True, y=y)
        for variant in batch_norm.INFERENCE:
            batch_norm.inference(x, weight, bias, *statistics(8), variant=variant)
        walking(monkeypatch, 3)
        batch_norm.forward(x, weight, bias, *statistics(8))
        monkeypatch.undo()
        monkeypatch.setattr(plan, "LEAST_SHARE", 64)
        forget_plans()
        y, mean, rstd = batch_norm.forward(x, weight, bias, *statistics(8))
        batch_norm.backward(dy, x, weight, mean, rstd, relu=True, y=y)
    assert not report.findings, report


@pytest.mark.gpu
@every_format
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("enough", [0, 10**9], ids=["walk", "parts"])
def test_large_images(monkeypatch, layout, dtype, enough):
    monkeypatch.setattr(walk, "ENOUGH", enough)
    for shape in ((32, 64, 112, 112), (256, 256, 14, 14), (512, 1024, 7, 7), (3, 6, 301, 299)):
        x, dy = image(shape, dtype, layout, 3.0, 2.0), image(shape, dtype, layout)
        weight, bias = affine(shape[1])
        y, mean, rstd = check_forward(x, weight, bias, "vectorised", relu=True)
        check_backward(dy, x, weight, mean, rstd, "vectorised", relu=True, y=y)


@pytest.mark.gpu
@pytest.mark.gpu_memory(40)
@every_format
def test_more_than_two_billion_elements(layout):
    x = torch.zeros(2, 8, 16400, 8200, device="cuda", dtype=torch.float16)
    x = x.to(memory_format=FORMATS[layout])
    x[1] = 1  # mean 1/2, deviation 1/2
    y, mean, rstd = batch_norm.forward(x, eps=0.0)
    torch.testing.assert_close(mean, torch.full_like(mean, 0.5), rtol=1e-5, atol=0)
    torch.testing.assert_close(rstd, torch.full_like(rstd, 2.0), rtol=1e-5, atol=0)
    assert y[1].eq(1).all() and y[0].eq(-1).all()
    dx, dweight, dbias = batch_norm.backward(y, x, None, mean, rstd)
    assert dx.abs().max() < 1e-3  # y is a function of the statistics alone
    torch.testing.assert_close(
        dweight, torch.full_like(dweight, x.numel() / 8.0), rtol=1e-4, atol=0
    )
