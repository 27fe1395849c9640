"""Max pooling, windows that kernels are compiled for; and ReLU after any window."""

import contextlib
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_max_pool2d import (
    DTYPES,
    FORMATS,
    by_torch,
    check,
    check_backward,
    every_format,
    every_typed_case,
    every_variant,
    image,
)

from course_lib import SIMULATED, simulator
from course_lib.kernels import max_pool2d as pool
from course_lib.kernels.max_pool2d import patches, pixel_patches, plan
from course_lib.kernels.max_pool2d.fixed import WIDE_WINDOWS, WINDOWS
from course_lib.kernels.max_pool2d.window import window_of
from course_lib.runtime.host import launch


@contextlib.contextmanager
def planned(**constants):
    """The planner with other constants."""
    caches = plan.plan_forward_patches, plan.plan_backward_patches
    with pytest.MonkeyPatch.context() as patch:
        for name, value in constants.items():
            patch.setattr(plan, name, value)
        for cache in caches:
            cache.cache_clear()
        try:
            yield
        finally:
            for cache in caches:
                cache.cache_clear()


def special(x):
    """x with NaN, both infinities and both zeros here and there, several of a kind in a window."""
    values = torch.tensor([math.nan, -math.inf, math.inf, 0.0, -0.0]).to(x.device, x.dtype)
    kinds = torch.randint(-20, 5, x.shape).to(x.device)
    found = torch.where(kinds < 0, x, values[kinds.clamp_min(0)])
    found[..., -x.shape[-1] // 3 :] = -math.inf  # whole windows of nothing else
    return found.to(memory_format=torch.channels_last) if x.stride(1) == 1 else found


def check_relu(x, options, variant, index_dtype, plain=None):
    """With ReLU: against `plain`, which comes without and which `check` has checked."""
    options = dict(options, variant=variant)
    y, indices = plain or pool.forward(x, index_dtype=index_dtype, **options)
    found, at = pool.forward(x, index_dtype=index_dtype, relu=True, **options)
    torch.testing.assert_close(found, y.relu(), rtol=0, atol=0, equal_nan=True)
    off = y <= 0
    nowhere = 255 if index_dtype == "uint8" else -1
    assert torch.equal(at, torch.where(off, nowhere, indices).to(at.dtype))
    dy = torch.randn_like(y)
    dx = pool.backward(dy, at, x.shape, **options)
    assert torch.equal(dx, pool.backward(dy * ~off, indices, x.shape, **options))


@every_variant
@every_format
@every_typed_case
def test_relu(variant, layout, shape, options, dtype):
    for index_dtype in ("uint8", "int64" if layout == "contiguous" else "int32"):
        check_relu(special(image(shape, dtype, layout)), options, variant, index_dtype)


@every_variant
def test_the_byte_for_nowhere_is_no_place_of_another_row(variant):
    # 255 would be the last column of the third row below.
    check_relu(image((1, 2, 8, 64)) - 8, dict(kernel_size=(1, 64)), variant, "uint8")


@settings(max_examples=25 if SIMULATED else 40, deadline=None)
@given(
    fixed=st.sampled_from(WINDOWS + WIDE_WINDOWS),
    shape=st.tuples(*(st.integers(1, most) for most in (2, 2, 9))),
    width=st.one_of(st.integers(1, 17), st.sampled_from([8, 16, 24, 32])),
    ceil_mode=st.booleans(),
    layout=st.sampled_from(list(FORMATS)),
    dtype=st.sampled_from(DTYPES),
    start=st.sampled_from([0, 0, 0, 1, 2, 4]),
    enough=st.sampled_from([0, 10**9]),
    rows=st.sampled_from([1, 2, 4]),
    n_bytes=st.sampled_from([16, 32]),
    specials=st.booleans(),
)
def test_windows_of_most_networks(
    fixed, shape, width, ceil_mode, layout, dtype, start, enough, rows, n_bytes, specials
):
    options = dict(kernel_size=fixed.kernel, stride=fixed.stride, padding=fixed.padding)
    options["ceil_mode"] = ceil_mode
    N, C, H = shape
    shape = (N, C * 8, H, width) if layout == "channels_last" else (N, C, H, width)
    memory = image((math.prod(shape) + start,), dtype)
    x = memory[start:].view(shape)
    if layout == "channels_last":
        x = memory[start:].view(N, H, width, C * 8).permute(0, 3, 1, 2)
    x = special(x) if specials else x
    try:
        _, at = by_torch(x, options)
    except RuntimeError:
        return
    few = min(rows, 2)
    constants = dict(
        FORWARD_ROWS={1: rows, 2: rows},
        FORWARD_COLUMN_ROWS={1: rows, 2: rows},
        BACKWARD_ROWS={1: rows, 2: few},
        BACKWARD_COLUMN_ROWS={1: rows, 2: few},
        FORWARD_TALL={1: few, 2: few},
        BACKWARD_TALL={2: few, 4: few},
        BACKWARD_BYTES=n_bytes,
    )
    with planned(ENOUGH_PATCHES=enough, **constants):
        y, indices = check(x, options, "vectorised", "uint8")
        dy = torch.randn(y.shape).to(y) if layout == "contiguous" else torch.randn_like(y)
        check_backward(dy, indices, at.numpy(), x, options, "vectorised")
        check_relu(x, options, "vectorised", "uint8", (y, indices))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@every_format
@pytest.mark.parametrize("fixed", WINDOWS, ids=str)
def test_which_kernels_take_the_windows_of_most_networks(fixed, layout, dtype):
    options = dict(kernel_size=fixed.kernel, stride=fixed.stride, padding=fixed.padding)
    options["ceil_mode"] = fixed.padding == 0  # so that the output is x's size over the stride
    x = image((2, 8, 16, 16), dtype, layout).cpu()
    chip = launch.Chip((9, 0), 227 << 10, 132, 60 << 20, "H200")
    with launch.planning(chip) as record, planned(ENOUGH_PATCHES=0):
        y, indices = pool.forward(x, index_dtype="uint8", **options)
        pool.backward(y, indices, x.shape, **options)
    width = 16 // dtype.itemsize
    if layout == "channels_last":
        expected = [
            pixel_patches.forward_kernel(fixed, width, plan.forward_tall(fixed, dtype.itemsize)),
            pixel_patches.backward_kernel(fixed, width, plan.backward_tall(fixed, dtype.itemsize)),
        ]
    else:
        across, rows, _ = plan.forward_shapes(fixed.stride, dtype.itemsize)[0]
        expected = [patches.forward_kernel(fixed, across, rows)]
        across, rows, _ = plan.backward_shapes(fixed, dtype.itemsize)[0]
        expected += [patches.backward_kernel(fixed, across, rows, True)]
    assert [kernel for kernel, *_ in record] == expected


@pytest.mark.parametrize("itemsize", [4, 2])
@pytest.mark.parametrize("fixed", WINDOWS, ids=str)
def test_each_kind_of_patch_is_some_images(fixed, itemsize):
    """No kernel is declared, and compiled, that nothing launches."""
    forward, backward = set(), set()
    for W, ceil_mode, log2_planes, start, byte in itertools.product(
        (5, 6, 8, 12, 16), (False, True), range(24), (0, itemsize), (0, 4, 1)
    ):
        window = window_of((W, W), fixed.kernel, fixed.stride, fixed.padding, 1, ceil_mode)
        n = 1 << log2_planes
        forward.add(plan.plan_forward_patches(n, window, itemsize, start, 0, byte))
        backward.add(plan.plan_backward_patches(n, window, itemsize, 0, byte, start))
    taken = [{found[:3] for found in each if found} for each in (forward, backward)]
    assert taken[0] == set(plan.forward_shapes(fixed.stride, itemsize))
    assert taken[1] == set(plan.backward_shapes(fixed, itemsize))


@settings(deadline=None)
@given(n=st.integers(1, 2**31 - 1), i=st.integers(0, 2**31 - 1))
def test_division_by_multiplication(n, i):
    multiplier, shift = plan.divider(n)
    assert multiplier < 2**32
    for number in (i, i // n * n, max(i // n * n - 1, 0), 2**31 - 1):
        assert number * multiplier >> 31 + shift == number // n


@pytest.mark.skipif(not SIMULATED, reason="the sanitizer watches the simulator")
@every_format
@pytest.mark.parametrize("fixed", WINDOWS + WIDE_WINDOWS, ids=str)
def test_the_sanitizer_finds_nothing(fixed, layout):
    options = dict(kernel_size=fixed.kernel, stride=fixed.stride, padding=fixed.padding)
    for dtype, shape in ((torch.float32, (1, 4, 6, 8)), (torch.bfloat16, (2, 8, 7, 5))):
        x = image(shape, dtype, layout)
        with simulator.sanitize() as report, planned(ENOUGH_PATCHES=0):
            y, indices = pool.forward(x, index_dtype="uint8", relu=True, **options)
            pool.backward(y, indices, x.shape, **options)
        assert not report.findings, report


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@every_format
def test_relu_of_large_images(dtype, layout):
    for options in (dict(kernel_size=2), dict(kernel_size=3, stride=2, padding=1)):
        for shape in ((16, 64, 112, 112), (4, 3, 500, 777)):
            check_relu(image(shape, dtype, layout), options, "vectorised", "uint8")
