"""What the tests of batch normalisation share: images, checks against float64, small plans."""

import numpy as np
import pytest
import torch
from tensors import PLACE, double

from course_lib import reference
from course_lib.kernels import batch_norm
from course_lib.kernels.batch_norm import plan, walk

EPS = 1e-5
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
#: Shapes of x, and their dtypes: every rung meets all.
IMAGES = [
    ((2, 3, 5, 7), torch.float32),
    ((1, 8, 4, 4), torch.float16),
    ((3, 16, 1, 1), torch.bfloat16),
    ((2, 20, 3, 2), torch.float32),
    ((5, 2, 1, 9), torch.bfloat16),
]
RIGHT = [name for name in batch_norm.FORWARD if name != "one_pass"]

every_variant = pytest.mark.parametrize("variant", RIGHT)
every_backward = pytest.mark.parametrize("variant", batch_norm.BACKWARD)
every_inference = pytest.mark.parametrize("variant", batch_norm.INFERENCE)
every_format = pytest.mark.parametrize("layout", FORMATS)


def image(shape, dtype=torch.float32, layout="contiguous", mean=0.5, deviation=1.0):
    x = torch.randn(shape).mul(deviation).add(mean).to(PLACE, dtype)
    return x.to(memory_format=FORMATS[layout])


def affine(C, dtype=torch.float32):
    return [(torch.randn(C) + 0.3).to(PLACE, dtype) for _ in range(2)]


def statistics(C, dtype=torch.float32):
    return torch.randn(C).to(PLACE, dtype), (torch.rand(C) + 0.5).to(PLACE, dtype)


def within(found, expected, scale, slack=0.0):
    """Within a rounding of the dtype and a few of float32, for numbers of this scale."""
    relative = 3e-6 + (0 if found.dtype == torch.float32 else torch.finfo(found.dtype).eps)
    error = np.abs(double(found) - expected)
    assert (error <= relative * scale + slack).all(), (error / (relative * scale + slack)).max()


def check_forward(x, weight, bias, variant, *, relu=False, momentum=0.3, running=None, out=None):
    C = x.shape[1]
    running = statistics(C) if running is None else running
    before = [double(r) for r in running]
    y, mean, rstd = batch_norm.forward(
        x, weight, bias, *running, momentum=momentum, eps=EPS, relu=relu, variant=variant, out=out
    )
    expected, mean64, rstd64 = reference.batch_norm(
        double(x), double(weight), double(bias), eps=EPS, relu=relu
    )
    assert y.dtype == x.dtype and mean.dtype == rstd.dtype == torch.float32
    size = np.abs(double(weight) if weight is not None else np.ones(C))
    size = (size + np.abs(double(bias) if bias is not None else np.zeros(C)))[:, None, None]
    # The mean is a float32 sum, whose roundings show where it is large.
    lost = (1e-6 * np.abs(mean64) * rstd64)[:, None, None] * size
    within(y, expected, np.abs(expected) + 4 * size, lost)
    within(mean, mean64, np.abs(mean64) + 1 / rstd64)
    within(rstd, rstd64, rstd64, rstd64 * lost.max() ** 2)
    for found, wanted in zip(
        running, reference.batch_norm_running(double(x), *before, momentum), strict=True
    ):
        within(found, wanted, np.abs(wanted) + 1 + 1 / rstd64**2, (lost.max() / rstd64) ** 2)
    return y, mean, rstd


def check_backward(
    dy, x, weight, mean, rstd, variant, *, relu=False, y=None, training=True, out=None
):  # fmt: skip
    found = batch_norm.backward(
        dy, x, weight, mean, rstd, relu=relu, y=y, training=training, variant=variant, out=out
    )
    arguments = double(x), double(weight), double(mean), double(rstd)
    expected = reference.batch_norm_backward(
        double(dy), *arguments, y=double(y) if relu else None, training=training
    )
    size = np.abs(double(dy)).mean() * (double(rstd) if weight is None else
                                        double(rstd) * np.abs(double(weight)))  # fmt: skip
    within(found[0], expected[0], np.abs(expected[0]) + 8 * size[:, None, None])
    n = x.numel() // x.shape[1]
    scale = np.abs(double(dy)).max() * np.abs(double(x) - double(mean)[:, None, None]).max()
    within(found[1], expected[1], np.abs(expected[1]) + 0.2 * n * scale * double(rstd))
    within(found[2], expected[2], np.abs(expected[2]) + 0.2 * n * np.abs(double(dy)).max())
    assert found[0].dtype == x.dtype
    assert x.is_contiguous() == found[0].is_contiguous()
    return found


def in_parts(monkeypatch):
    """Make the planner share every channel out among blocks, as it does with large images."""
    monkeypatch.setattr(plan, "ALONE_BYTES", 0)
    monkeypatch.setattr(plan, "ENOUGH_CHANNELS", 10**9)
    monkeypatch.setattr(plan, "LEAST_PART", 64)
    monkeypatch.setattr(plan, "PIXEL_ROWS", 1)
    monkeypatch.setattr(plan, "WAVE", 24)
    monkeypatch.setattr(plan, "PART_THREADS", 64)
    monkeypatch.setattr(plan, "PASS_PART", 96)
    monkeypatch.setattr(plan, "WALK_PART", 96)
    monkeypatch.setattr(walk, "ENOUGH", 10**9)
    forget_plans()


def forget_plans():
    for planned in (plan.plan_planes, plan.plan_pass, plan.plan_walk, plan.plan_pixels):
        planned.cache_clear()


def walking(monkeypatch, lead):
    """Make large images of what else are small ones, and walk them."""
    in_parts(monkeypatch)
    monkeypatch.setattr(walk, "LEAD", lead)
    monkeypatch.setattr(walk, "ENOUGH", 0)
