"""Convolution: every rung, forward and all gradients, against float64, PyTorch and differences."""

import contextlib
import math
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tensors import PLACE, double
from turns import in_turns

from course_lib import SIMULATED, reference, simulator
from course_lib.kernels import conv2d
from course_lib.kernels.conv2d import (
    depthwise_plan,
    direct,
    gathering,
    halo_plan,
    halo_small,
    launching,
    pixel_sums_plan,
    pixel_sums_small,
    warpgroup_plan,
)
from course_lib.kernels.conv2d.problem import problem_of
from course_lib.ops.formats import memory_format
from course_lib.runtime.host.arrays import ArrayError
from course_lib.runtime.host.launch import Chip, planning, recorded

truth, truth_backward = reference.conv2d, reference.conv2d_backward
# Half a unit in the last place of the result.
ROUNDING = {torch.float32: 1e-7, torch.float16: 5e-4, torch.bfloat16: 4e-3}
FLOOR = {torch.float32: 1e-36, torch.float16: 6e-8, torch.bfloat16: 1e-36}  # half the smallest
LAYOUTS = (torch.contiguous_format, torch.channels_last)

# What costs the simulator most: a block makes a whole tile of results, however few there are.
TILES = ["im2col", "implicit_gemm", "tensor_core"]
# That take any groups, channels and filters; `few_channels` has tests of its own.
GENERAL = [name for name in conv2d.FORWARD if name not in ("depthwise", "few_channels")]


@pytest.fixture(autouse=True, scope="module")
def small_blocks_of_dbias():
    """Every rung has the same dbias, whose 256 threads take the simulator long: 64, but once."""
    size = 64 if SIMULATED else direct.BIAS_BLOCK_SIZE
    with mock.patch.object(direct, "BIAS_BLOCK_SIZE", size):
        yield


def case(x_shape, weight_shape, dtype=torch.float32, layout=LAYOUTS[0], biased=True):
    """(x, weight, bias or None) on the device under test."""
    x, weight = (
        torch.randn(shape).to(PLACE, dtype, memory_format=layout)
        for shape in (x_shape, weight_shape)
    )
    return x, weight, torch.randn(weight_shape[0]).to(PLACE, dtype) if biased else None


def assert_close(actual, expected, terms):
    """Equal to within the dtype's rounding and 1e-6 of `terms`, the sizes of what was added up."""
    values = double(actual)
    assert values.shape == expected.shape
    limit = ROUNDING[actual.dtype] * np.abs(expected) + FLOOR[actual.dtype] + 1e-6 * terms
    error = np.abs(values - expected)
    assert (error <= limit).all(), f"worst {np.nanmax(error / limit):.3g} times the limit"


def check(variant, x, weight, bias, needs=(True, True, True), y=None, **options):
    """Run and check the forward pass, unless its result is given, and the gradients needed.

    Returns (y, dx, dweight, dbias).
    """
    y = conv2d.forward(x, weight, bias, variant=variant, **options) if y is None else y
    arguments = [double(tensor) for tensor in (x, weight, bias)]
    sizes = [None if array is None else np.abs(array) for array in arguments]
    assert_close(y, truth(*arguments, **options), truth(*sizes, **options))
    assert y.dtype == x.dtype and laid_out_alike(y, x, weight)
    dy = torch.randn(y.shape).to(x)
    found = conv2d.backward(
        dy, x, weight, needs=needs, with_bias=bias is not None, variant=variant, **options
    )
    expected = truth_backward(double(dy), *arguments[:2], **options)
    sizes = truth_backward(np.abs(double(dy)), *sizes[:2], **options)
    assert [each is not None for each in found] == [*needs[:2], needs[2] and bias is not None]
    for gradient, *wanted in zip(found, expected, sizes, strict=True):
        if gradient is not None:
            assert gradient.dtype == x.dtype
            assert_close(gradient, *wanted)
    assert not needs[0] or laid_out_alike(found[0], x, weight)
    return y, *found


def laid_out_alike(y, x, weight):
    return y.is_contiguous(memory_format=memory_format(x, weight))


small = st.integers(1, 3)


def random_cases(n_examples, variants):
    """Runs a test on so many random convolutions with each of the variants."""

    def decorated(test):
        test = given(**RANDOM)(test)
        test = settings(max_examples=n_examples, deadline=None)(test)
        return pytest.mark.parametrize("variant", variants)(test)

    return decorated


RANDOM = dict(
    N=st.integers(0, 2),
    per_group=st.tuples(st.integers(1, 3), st.integers(1, 4)),
    groups=st.integers(1, 2),
    size=st.tuples(st.integers(1, 7), st.integers(1, 6)),
    filter_size=st.tuples(st.integers(1, 3), st.integers(1, 4)),
    stride=small | st.tuples(small, small),
    padding=st.integers(0, 2) | st.tuples(st.integers(0, 3), st.integers(0, 3)),
    dilation=small | st.tuples(small, small),
    biased=st.booleans(),
    dtype=st.sampled_from(list(ROUNDING)),
    layout=st.sampled_from(LAYOUTS),
    seed=st.integers(0, 2**31),
)


def random_case(
    variant, N, per_group, groups, size, filter_size, stride, padding, dilation, biased, dtype,
    layout, seed,
):  # fmt: skip
    torch.manual_seed(seed)
    pair = [(v, v) if isinstance(v, int) else v for v in (padding, dilation)]
    for length, taps, pad, apart in zip(size, filter_size, *pair, strict=True):
        assume(length + 2 * pad > apart * (taps - 1))
    C, K = (count * groups for count in per_group)
    tensors = case((N, C, *size), (K, C // groups, *filter_size), dtype, layout, biased)
    options = dict(stride=stride, padding=padding, dilation=dilation, groups=groups)
    if N:
        check(variant, *tensors, **options)
    else:
        y = conv2d.forward(*tensors, variant=variant, **options)
        dx, dweight, dbias = conv2d.backward(y, *tensors[:2], variant=variant, **options)
        assert y.shape[1] == K and dx.shape == tensors[0].shape
        assert not dweight.any() and not dbias.any()


@random_cases(10, [name for name in GENERAL if name not in TILES])
def test_random_cases(variant, **arguments):
    random_case(variant, **arguments)


@random_cases(3, TILES)
def test_random_cases_in_tiles(variant, **arguments):
    random_case(variant, **arguments)


CASES = [
    ((2, 3, 6, 5), (4, 3, 3, 2), {}),
    ((1, 4, 7, 7), (6, 2, 3, 3), dict(stride=(2, 1), padding=(1, 2), dilation=(1, 2), groups=2)),
    ((2, 3, 5, 4), (6, 1, 2, 3), dict(padding=1, groups=3)),
    ((1, 2, 9, 4), (3, 2, 1, 1), dict(stride=3)),
]
every_variant_somehow = pytest.mark.parametrize("variant, layout", [
    (variant, layout) for i, variant in enumerate(GENERAL)
    for layout in (LAYOUTS if variant not in TILES else LAYOUTS[i % 2 :][:1])
])  # fmt: skip
#: Those of which the contract has few runs: `contract.exceptions.LEAN`.
every_lean_variant = pytest.mark.parametrize("variant, layout", [
    ("tiled", LAYOUTS[0]), ("tiled", LAYOUTS[1]),
    *((variant, LAYOUTS[i % 2]) for i, variant in enumerate(TILES)),
])  # fmt: skip


@pytest.mark.parametrize("x_shape, weight_shape, options", CASES)
def test_truth_is_that_of_pytorch(x_shape, weight_shape, options):
    x, weight = (torch.randn(s).double().requires_grad_() for s in (x_shape, weight_shape))
    bias = torch.randn(weight_shape[0]).double().requires_grad_()
    expected = F.conv2d(x, weight, bias, **options)
    found = truth(double(x), double(weight), double(bias), **options)
    np.testing.assert_allclose(found, double(expected), rtol=1e-12, atol=1e-12)
    dy = torch.randn(expected.shape).double()
    expected.backward(dy)
    gradients = truth_backward(double(dy), double(x), double(weight), **options)
    for gradient, tensor in zip(gradients, (x, weight, bias), strict=True):
        np.testing.assert_allclose(gradient, double(tensor.grad), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", list(ROUNDING), ids=str)
def test_dbias_in_blocks_of_their_real_size(monkeypatch, dtype):
    monkeypatch.setattr(direct, "BIAS_BLOCK_SIZE", 256)
    tensors = case((2, 2, 33, 40), (2, 2, 1, 1), dtype)  # more than a block has threads, in parts
    dy = torch.randn(2, 2, 33, 40).to(PLACE, dtype)
    needs = (False, False, True)
    found = conv2d.backward(dy, *tensors[:2], needs=needs, variant="direct")[2]
    summed = double(dy)
    assert_close(found, summed.sum((0, 2, 3)), np.abs(summed).sum((0, 2, 3)))


@pytest.mark.parametrize("x_shape, weight_shape, options, layout", in_turns(CASES, LAYOUTS))
@pytest.mark.parametrize("variant", [name for name in GENERAL if name not in TILES])
def test_every_option(variant, layout, x_shape, weight_shape, options):
    check(variant, *case(x_shape, weight_shape, layout=layout), **options)


@every_variant_somehow
def test_rows_and_channels_that_fill_no_tile(variant, layout):
    """More pixels and filters than one block takes, and none a multiple of anything."""
    check(variant, *case((1, 2, 5, 12), (66, 2, 2, 1), layout=layout), padding=(1, 0))


@every_lean_variant
def test_memory_that_starts_anywhere(variant, layout):
    """Arrays off the 16-byte boundaries; nothing before or behind the result is written."""

    def moved(tensor, by):
        room = torch.full((by + tensor.numel() + 9,), 7.0, device=PLACE)
        strides = torch.empty(tensor.shape).to(memory_format=layout).stride()
        view = room[by : by + tensor.numel()].as_strided(tensor.shape, strides, by)
        view.copy_(tensor)
        return room, view

    x, weight, bias = case((2, 4, 5, 5), (8, 4, 3, 3), layout=layout)
    (_, x), (_, weight) = moved(x, 1), moved(weight, 3)
    expected, *_ = check(variant, x, weight, bias, padding=1)
    room, out = moved(torch.full((2, 8, 5, 5), math.nan), 2)
    y = conv2d.forward(x, weight, bias, padding=1, variant=variant, out=out)
    assert y is out and (room[:2] == 7).all() and (room[-7:] == 7).all()
    assert torch.equal(y, expected)


def test_a_weight_of_the_other_format():
    x, weight, bias = case((2, 4, 5, 6), (3, 4, 2, 2))
    check("direct", x.to(memory_format=torch.channels_last), weight, bias)
    check("direct", x, weight.to(memory_format=torch.channels_last), bias)


def test_only_what_is_needed():
    variant = "direct"
    x, weight, bias = case((1, 2, 4, 4), (3, 2, 3, 3))
    dy = torch.randn(1, 3, 2, 2, device=PLACE)
    every = conv2d.backward(dy, x, weight, variant=variant)
    for number in range(8):
        needs = tuple(bool(number >> i & 1) for i in range(3))
        found = conv2d.backward(dy, x, weight, needs=needs, variant=variant)
        for needed, gradient, wanted in zip(needs, found, every, strict=True):
            assert torch.equal(gradient, wanted) if needed else gradient is None
    assert conv2d.backward(dy, x, weight, with_bias=False, variant=variant)[2] is None


def test_tensor_cores_make_nan_of_what_is_not_finite():
    """As infinity is split into infinity and NaN; and it stays where it is."""
    x, weight, bias = case((1, 2, 6, 6), (3, 2, 3, 3))
    x[0, 1, 0, 0] = math.nan
    x[0, 0, 5, 5] = math.inf
    y = conv2d.forward(x, weight, bias, variant="tensor_core")
    expected = F.conv2d(x, weight, bias)
    expected = expected.where(expected.isfinite(), math.nan)
    torch.testing.assert_close(y, expected, equal_nan=True, rtol=1e-5, atol=1e-5)
    assert torch.isfinite(y).sum() == y.numel() - 6


@every_lean_variant
def test_sanitizer_finds_nothing(variant, layout):
    groups = 1 if variant in TILES else 2
    x, weight, bias = case((1, 2, 4, 3), (4, 2 // groups, 3, 2), layout=layout)
    options = dict(stride=(2, 1), padding=1, groups=groups, variant=variant)
    with simulator.sanitize() as report:
        y = conv2d.forward(x, weight, bias, **options)
        conv2d.backward(y, x, weight, **options)
    assert not report, str(report)


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize("way, x_shape, size, options, multiple, dtype, layout", [
    ("by_element", (2, 3, 5, 6), (3, 3), dict(padding=1), 1, FP32, LAYOUTS[0]),
    ("by_element", (2, 3, 5, 6), (4, 3), dict(stride=3, padding=2), 1, FP32, LAYOUTS[1]),
    ("by_element", (2, 3, 5, 6), (3, 3), dict(stride=2, padding=1), 2, BF16, LAYOUTS[1]),
    ("windows", (2, 3, 5, 6), (2, 5), dict(padding=(0, 2), dilation=(2, 1)), 2, FP16, LAYOUTS[0]),
    ("windows", (1, 2, 9, 9), (3, 3), dict(stride=2, padding=1), 3, BF16, LAYOUTS[0]),
    ("windows", (1, 2, 4, 8), (5, 3), dict(padding=3), 1, FP32, LAYOUTS[0]),  # vectors of results
    ("windows", (1, 2, 11, 13), (3, 3), dict(padding=2, dilation=(1, 2)), 1, FP32, LAYOUTS[0]),
    ("windows", (1, 8, 9, 8), (5, 5), dict(stride=2, padding=1), 1, BF16, LAYOUTS[1]),
    ("windows", (1, 4, 6, 7), (3, 3), dict(stride=2), 1, FP32, LAYOUTS[1]),
    ("windows", (1, 4, 7, 5), (7, 7), dict(padding=3), 1, FP32, LAYOUTS[1]),
    ("windows", (1, 3, 7, 9), (3, 3), dict(padding=1, dilation=(3, 2)), 1, FP32, LAYOUTS[1]),
    ("windows", (2, 3, 9, 13), (3, 3), dict(stride=2, dilation=2), 1, BF16, LAYOUTS[0]),
    ("windows", (1, 2, 12, 10), (3, 3), dict(stride=2, dilation=(2, 4), padding=(3, 1)), 2, FP32,
     LAYOUTS[0]),  # taps several strides apart
    ("windows", (1, 4, 9, 13), (3, 5), dict(stride=(3, 2), dilation=(3, 2), padding=(2, 1)), 1,
     FP32, LAYOUTS[1]),
    ("windows", (1, 3, 8, 9), (3, 3), dict(stride=(1, 2), dilation=2, padding=1), 1, FP16,
     LAYOUTS[1]),
])  # fmt: skip
def test_depthwise(way, x_shape, size, options, multiple, dtype, layout):
    C = x_shape[1]
    tensors = case(x_shape, (C * multiple, 1, *size), dtype, layout)
    with simulator.sanitize() if multiple == 1 else contextlib.nullcontext() as report:
        check(f"depthwise/{way}", *tensors, groups=C, **options)
    assert not report, str(report)


def test_depthwise_in_many_blocks(monkeypatch):
    """Blocks for channels, for the parts of a line and for several lines; pixels shared among some.

    And channels off the 16-byte boundaries, one at a time.
    """
    monkeypatch.setattr(depthwise_plan, "ENOUGH_BLOCKS", 1)
    monkeypatch.setattr(depthwise_plan, "LEAST_RUNS", 1)
    tensors = case((2, 36, 9, 34), (36, 1, 1, 3), layout=LAYOUTS[1])
    wide = check("depthwise/windows", *tensors, padding=(0, 1), groups=36)
    x = torch.empty(1 + tensors[0].numel(), device=PLACE)[1:].as_strided(
        tensors[0].shape, tensors[0].stride(), 1
    )
    x.copy_(tensors[0])
    narrow = check("depthwise/windows", x, *tensors[1:], padding=(0, 1), groups=36)
    assert torch.equal(wide[0], narrow[0])
    check("depthwise/windows", *case((2, 2, 3, 150), (2, 1, 3, 3)), padding=1, groups=2)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_depthwise_dweight_meets_only_what_results_meet(layout):
    """Infinity in a column that no result meets by the first tap."""
    x, weight, _ = case((1, 4, 3, 7), (4, 1, 3, 3), layout=layout)
    x[0, 0, 0, 6] = math.inf
    dy = torch.ones(1, 4, 1, 5, device=PLACE)
    _, dweight, _ = conv2d.backward(dy, x, weight, groups=4, needs=(False, True, False))
    expected = torch.ones_like(dweight).bool()
    expected[0, 0, 0, 2] = False
    assert torch.equal(dweight.isfinite(), expected)


@pytest.mark.parametrize(
    "x_shape, taps, stride, layout, blocks",
    [
        ((7, 5, 9, 9), 7, 1, LAYOUTS[0], 5),  # so few pixels that nothing is left to add up
        ((3, 104, 59, 47), 7, 2, LAYOUTS[0], 104 * 3),
        ((16, 48, 13, 17), 3, 2, LAYOUTS[1], 2 * 28),  # two groups of channels
        ((6, 47, 16, 17), 3, 1, LAYOUTS[1], 3 * 36),  # three, of 16 threads each: two would idle
    ],
)
def test_blocks_of_depthwise_dweight(x_shape, taps, stride, layout, blocks):
    from test_chips import CHIPS

    x = torch.empty(x_shape).to(memory_format=layout)
    weight = torch.empty(x_shape[1], 1, taps, taps).to(memory_format=layout)
    options = dict(stride=stride, padding=taps // 2, dilation=1, groups=x_shape[1])
    y_shape = problem_of(x_shape, tuple(weight.shape), *options.values(), False).y_shape
    dy = torch.empty(y_shape).to(memory_format=layout)
    with planning(CHIPS[4]) as launches:
        conv2d.backward(dy, x, weight, needs=(False, True, False), **options)
    assert launches[0][1] == blocks and len(launches) == 1 + (blocks > x_shape[1])


@pytest.mark.parametrize("variant, weight_shape, options, reason", [
    ("depthwise", (2, 2, 3, 3), {}, "one channel a group, groups=2 here, not 1: use one of direct"),
    ("depthwise/windows", (2, 1, 3, 2), dict(groups=2), "of 3, 5, 7 columns .*, not 3 × 2"),
    ("depthwise/windows", (2, 1, 8, 3), dict(groups=2, padding=4), "at most 7 lines, not 8 × 3"),
    ("depthwise/windows", (2, 1, 3, 3), dict(groups=2, stride=3), "divide the dilation, or 2"),
    ("depthwise/windows", (2, 1, 3, 3), dict(groups=2, stride=2, dilation=(2, 1), padding=1),
     "without dilation"),
    ("depthwise/windows", (2, 1, 3, 3), dict(groups=2, stride=9, dilation=9, padding=9), "up to 8"),
    ("tensor_core/block_diagonal", (2, 2, 3, 3), {}, "takes several groups, not 1"),
])  # fmt: skip
def test_groups_that_a_way_refuses(variant, weight_shape, options, reason):
    x, weight, _ = case((1, 2, 4, 4), weight_shape)
    with pytest.raises(ValueError, match=reason):
        conv2d.forward(x, weight, variant=variant, **options)


@pytest.mark.parametrize("x_shape, weight_shape, options, dtype, layout, kernels", [
    ((1, 24, 2, 3), (24, 4, 2, 2), dict(padding=1), BF16, LAYOUTS[1],
     {"arrange_kernel", "warpgroup_kernel", "gather_dweight_kernel", "spread_kernel"}),
    ((1, 16, 4, 5), (32, 4, 3, 3), dict(stride=2, padding=1), BF16, LAYOUTS[1],
     {"spread_kernel", "halo_kernel", "channels_last_kernel", "gather_dweight_kernel"}),
    ((2, 6, 2, 4), (9, 2, 2, 2), dict(padding=1), FP32, LAYOUTS[0],
     {"spread_kernel", "gathered_product_kernel", "pixel_sums_kernel"}),
    ((1, 8, 1, 514), (8, 2, 1, 1), {}, FP32, LAYOUTS[0], {"dweight_product_kernel"}),  # long lines
])  # fmt: skip
def test_groups_that_are_joined(x_shape, weight_shape, options, dtype, layout, kernels):
    options |= dict(groups=x_shape[1] // weight_shape[1])
    with simulator.sanitize() if dtype == FP32 else contextlib.nullcontext() as report:
        with recorded() as launches:
            tensors = case(x_shape, weight_shape, dtype, layout)
            check("tensor_core/block_diagonal", *tensors, **options)
    assert not report, str(report)
    assert kernels <= {kernel.py_func.__name__ for kernel, *_ in launches}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("x_shape, weight_shape, groups, options, dtype", [
    ((1, 45, 3, 2), (450, 3, 1, 2), 15, {}, FP32),  # 16 channels, of three groups or four
    ((2, 96, 2, 3), (192, 16, 2, 1), 6, dict(stride=2, padding=(1, 0)), BF16),  # of two groups
    ((1, 642, 3, 3), (8, 321, 1, 1), 2, dict(dilation=2), BF16),  # all, and too many for one group
    ((1, 48, 1, 260), (192, 3, 1, 1), 16, {}, FP32),  # pixels in parts
])  # fmt: skip
def test_dweight_reads_windows_of_channels(x_shape, weight_shape, groups, options, dtype, layout):
    x, weight, _ = case(x_shape, weight_shape, dtype, layout)
    options |= dict(groups=groups)
    y = conv2d.forward(x, weight, variant="direct", **options)
    with simulator.sanitize() as report, recorded() as launches:
        check("tensor_core", x, weight, None, (False, True, False), y, **options)
    assert not report, str(report)
    assert "group_sums_kernel" in {kernel.py_func.__name__ for kernel, *_ in launches}


@pytest.mark.parametrize("n_filters", [5, 64])  # of three groups in a tile, and of one
def test_in_dweight_an_infinity_stays_in_its_group(n_filters):
    x, weight, _ = case((1, 12, 2, 3), (3 * n_filters, 4, 1, 1))
    x[0, 5, 1, 1] = math.inf
    dy, way = torch.ones(1, 3 * n_filters, 2, 3).to(PLACE), dict(groups=3, variant="tensor_core")
    _, dweight, _ = conv2d.backward(dy, x, weight, needs=(False, True, False), **way)
    finite = dweight.isfinite().flatten(1).all(1).view(3, -1)
    assert finite.all(1).tolist() == finite.any(1).tolist() == [True, False, True]


def test_joined_groups_in_tf32():
    """Contiguous images are transposed, and rounded, as the weights are spread."""
    x, weight, bias = case((1, 16, 2, 3), (16, 8, 2, 2))
    options = dict(padding=1, groups=2)
    with recorded() as launches:
        way = dict(precision="tf32", variant="tensor_core/block_diagonal")
        y = conv2d.forward(x, weight, bias, **way, **options)
    names = [kernel.py_func.__name__ for kernel, *_ in launches]
    assert names == ["transpose_and_arrange_kernel", "warpgroup_kernel"]
    rounded = [torch.from_numpy(round_tf32(double(t))).to(x) for t in (x, weight)]
    torch.testing.assert_close(y, F.conv2d(*rounded, bias, **options), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("dtype, shapes, options", [
    (torch.bfloat16, ((2, 8, 3, 4), (8, 8, 3, 2)), dict(stride=(2, 1), padding=(1, 0))),
    (torch.float16, ((1, 16, 5, 6), (72, 16, 2, 1)), dict(dilation=(2, 1))),
    (torch.bfloat16, ((2, 32, 4, 4), (16, 16, 3, 1)), dict(stride=(1, 2), padding=1, groups=2)),
    (torch.bfloat16, ((1, 8, 3, 3), (12, 8, 2, 2)), {}),  # 12 filters are no whole vectors
])  # fmt: skip
def test_channels_side_by_side(monkeypatch, large, dtype, shapes, options):
    """16 bytes at a time on tensor cores, in both sizes of tiles."""
    monkeypatch.setattr(gathering, "LARGE_FROM", 0 if large else 1 << 30)
    others = halo_plan, halo_small, warpgroup_plan, pixel_sums_plan, pixel_sums_small
    for plans in others:  # would go first
        monkeypatch.setattr(plans, "planned", lambda *_: None)
    tensors = case(*shapes, dtype, LAYOUTS[1])
    kernels = {kernel for kernel, *_ in gathering.CHANNELS_LAST.values()}
    sanitized = not large and shapes[0][2:] == (3, 3)
    with simulator.sanitize() if sanitized else contextlib.nullcontext() as report:
        with recorded() as launches:
            check("tensor_core/implicit_gemm", *tensors, **options)
    assert not report, str(report)
    assert len(kernels & {kernel for kernel, *_ in launches}) == (1 if shapes[1][0] == 12 else 2)


def test_channels_side_by_side_off_the_boundaries():
    room = torch.randn(1 + 8 * 9, device=PLACE).bfloat16()
    x = room[1:].as_strided((1, 8, 3, 3), (72, 1, 24, 8), 1)
    assert x.is_contiguous(memory_format=torch.channels_last)
    check("tensor_core", x, *case((1, 8, 3, 3), (8, 8, 2, 2), torch.bfloat16, LAYOUTS[1])[1:])


def test_the_larger_tile(monkeypatch):
    monkeypatch.setattr(gathering, "LARGE_FROM", 0)
    tensors = case((1, 2, 3, 3), (66, 2, 1, 1))
    check("tensor_core", *tensors, needs=(False, True, True))  # dx has few columns: a small tile


def test_tf32_is_used_where_it_may_be():
    x, weight, _ = case((1, 4, 3, 3), (12, 4, 2, 2))
    y, coarse = (
        conv2d.forward(x, weight, precision=precision, variant="tensor_core")
        for precision in ("float32", "tf32")
    )
    rounded = [
        torch.from_numpy(round_tf32(double(tensor))).to(PLACE, torch.float32)
        for tensor in (x, weight)
    ]
    expected, exact = F.conv2d(*rounded), F.conv2d(x, weight)
    torch.testing.assert_close(coarse, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(y, exact, rtol=1e-6, atol=1e-6)
    assert (coarse - exact).abs().max() > 1e-5


def round_tf32(values):
    """float64 of float32 rounded to 10 bits of mantissa, ties to even."""
    bits = values.astype(np.float32).view(np.uint32)
    bits = bits + np.uint32(0x0FFF) + (bits >> np.uint32(13) & np.uint32(1))
    return (bits & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)


def test_sums_shared_among_blocks():
    """dweight and dbias of more pixels than one block is given."""
    needs = (False, True, True)
    for variant in GENERAL:
        check(variant, *case((1, 1, 12, 12), (2, 1, 1, 1)), needs=needs)
    check("depthwise", *case((1, 2, 40, 40), (2, 1, 1, 1)), needs=needs, groups=2)


def test_images_a_few_at_a_time(monkeypatch):
    monkeypatch.setattr(launching, "MOST_WORKSPACE", 1000)
    check("im2col", *case((3, 2, 4, 4), (2, 2, 2, 2)))


def test_what_does_not_fit_is_refused():
    x, weight, _ = case((1, 1, 13, 14), (1, 1, 13, 13))
    for variant in ("implicit_gemm", "tensor_core/implicit_gemm", "tiled"):
        with pytest.raises(ValueError, match="at most 121 taps.*use 'direct'"):
            conv2d.forward(x, weight, variant=variant)
    y = conv2d.forward(x, weight)
    torch.testing.assert_close(y, F.conv2d(x, weight), rtol=1e-5, atol=1e-5)


def test_chips_without_tensor_cores_are_told(monkeypatch):
    t4 = Chip((7, 5), 64 << 10, 40, 4 << 20, "T4")
    monkeypatch.setattr(conv2d, "chip_of", lambda array: t4)
    x, weight, _ = case((1, 1, 3, 3), (1, 1, 3, 3))
    with pytest.raises(ValueError, match="needs compute capability 8.0, and this GPU has 7.5"):
        conv2d.forward(x, weight, variant="tensor_core")


def test_the_rung_by_default():
    def rung(x_shape, weight_shape, groups=1, capability=(9, 0), mode="float32", stride=1):
        problem = problem_of(x_shape, weight_shape, stride, 0, 1, groups, False, mode)
        return conv2d.default_variant(problem, capability)

    assert rung((1, 8, 28, 28), (64, 8, 3, 3)) == "tensor_core"
    assert rung((1, 1, 28, 28), (64, 1, 3, 3)) == "few_channels"
    assert rung((1, 64, 28, 28), (64, 64, 3, 3), capability=(7, 5)) == "implicit_gemm"
    assert rung((1, 64, 28, 28), (64, 1, 3, 3), groups=64) == "depthwise"
    assert rung((1, 2, 28, 28), (64, 2, 13, 13)) == "direct"
    assert rung((1, 2, 28, 28), (64, 2, 13, 13), mode="half") == "tensor_core"  # `gather`
    assert rung((1, 2, 13, 13), (64, 2, 13, 13)) == "tensor_core"  # one product of matrices
    assert rung((1, 3, 32, 32), (8, 3, 16, 16), stride=16) == "tensor_core"  # patches
    assert rung((1, 2, 2**15, 2**15), (4, 2, 3, 3)) == "direct"


@pytest.mark.parametrize("dtype, x_shape, weight_shape, layout, transposed", [
    (torch.float32, (2, 8, 3, 4), (9, 8, 1, 1), LAYOUTS[0], False),  # planes begin on boundaries
    (torch.bfloat16, (2, 24, 4, 6), (24, 24, 1, 1), LAYOUTS[0], False),  # by wgmma
    (torch.bfloat16, (1, 8, 3, 3), (5, 8, 1, 1), LAYOUTS[0], True),
    (torch.bfloat16, (1, 8, 3, 3), (5, 8, 1, 1), LAYOUTS[1], False),
    (torch.float32, (3, 2, 3, 2), (4, 2, 3, 2), LAYOUTS[1], False),  # a filter of the image's size
])  # fmt: skip
def test_products_of_matrices(dtype, x_shape, weight_shape, layout, transposed):
    x, weight, bias = case(x_shape, weight_shape, dtype, layout)
    with simulator.sanitize() as report, recorded() as launches:
        y = conv2d.forward(x, weight, bias, variant="tensor_core/gemm")
    assert not report, str(report)
    modules = {kernel.py_func.__module__ for kernel, *_ in launches}
    assert ("course_lib.kernels.blocks.transpose" in modules) == transposed
    assert any(module.startswith("course_lib.kernels.gemm") for module in modules)
    check("tensor_core/gemm", x, weight, bias, (True, x_shape[2:] == (3, 2), False), y)
    with pytest.raises(ValueError, match="tensor_core/gemm' takes filters of one tap"):
        conv2d.forward(x, weight, padding=1, variant="tensor_core/gemm")


@pytest.mark.parametrize("x_shape, weight_shape, layout", [
    ((2, 3, 9, 8), (8, 3, 4, 3), LAYOUTS[0]),  # a line and two columns belong to no patch
    ((2, 3, 9, 8), (8, 3, 4, 3), LAYOUTS[1]),
    ((1, 2, 24, 25), (6, 2, 12, 11), LAYOUTS[0]),
    ((1, 2, 4, 6), (6, 2, 4, 3), LAYOUTS[1]),
])  # fmt: skip
def test_filters_that_step_by_their_own_size_are_products_of_patches(x_shape, weight_shape, layout):
    x, weight, bias = case(x_shape, weight_shape, layout=layout)
    stride, many = weight_shape[2:], weight_shape[2] == 12
    for variant in ("tensor_core/gemm", *["auto"] * many):
        with simulator.sanitize() as report, recorded() as launches:
            y = conv2d.forward(x, weight, bias, stride=stride, variant=variant)
        assert not report, str(report)
        assert launches[0][0].py_func.__name__ == "patches_kernel"
        leaves = [a.double().requires_grad_() for a in (x, weight, bias)]
        expected = F.conv2d(*leaves, stride=stride)
        dy = torch.randn_like(y)
        found = conv2d.backward(dy, x, weight, stride=stride, variant=variant)
        expected.backward(dy.double())
        for one, other in zip((y, *found), (expected, *(a.grad for a in leaves)), strict=True):
            torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)


def test_nothing_to_do():
    for x_shape, weight_shape in (((0, 3, 5, 5), (4, 3, 3, 3)), ((2, 3, 5, 5), (0, 3, 3, 3))):
        x, weight, bias = case(x_shape, weight_shape)
        y = conv2d.forward(x, weight, bias)
        assert y.shape == (x_shape[0], weight_shape[0], 3, 3)
        dx, dweight, dbias = conv2d.backward(y, x, weight)
        assert dx.shape == x.shape and dweight.shape == weight.shape
        assert not dx.any() and not dweight.any() and not dbias.any()


@pytest.mark.parametrize("arguments, options, error, words", [
    (((1, 2, 4), (3, 2, 3, 3)), {}, ArrayError, "x must have 4 dimensions"),
    (((1, 2, 4, 4), (3, 2, 3)), {}, ArrayError, "weight must have 4 dimensions"),
    (((1, 2, 4, 4), (3, 4, 3, 3)), {}, ArrayError, r"shape \(K, 2, R, S\)"),
    (((1, 2, 4, 4), (3, 2, 5, 3)), {}, ArrayError, "can't be greater than the padded input"),
    (((1, 2, 4, 4), (3, 2, 3, 0)), {}, ArrayError, "R and S from 1 on"),
    (((1, 3, 4, 4), (4, 1, 3, 3)), dict(groups=2), ArrayError, "groups=2 does not divide"),
    (((1, 4, 4, 4), (3, 2, 3, 3)), dict(groups=2), ArrayError, "groups=2 does not divide"),
    (((1, 2, 4, 4), (3, 2, 3, 3)), dict(stride=0), ValueError, "stride must be at least 1"),
    (((1, 2, 4, 4), (3, 2, 3, 3)), dict(padding=-1), ValueError, "padding must be at least 0"),
    (((1, 2, 4, 4), (3, 2, 3, 3)), dict(dilation=(1, 2, 3)), ValueError, "a pair of ints"),
    (((1, 2, 4, 4), (3, 2, 3, 3)), dict(stride=1.5), ValueError, "stride must be an int"),
    (((1, 2, 4, 4), (3, 2, 3, 3)), dict(groups=0), ValueError, "groups must be at least 1"),
    (((1, 2, 4, 4), (3, 2, 3, 3)), dict(variant="fast"), ValueError, "unknown variant 'fast'"),
    (((1, 2, 4, 4), (3, 2, 3, 3)), dict(precision="half"), ValueError, "unknown precision"),
])  # fmt: skip
def test_wrong_arguments_are_named(arguments, options, error, words):
    x, weight = (torch.zeros(shape, device=PLACE) for shape in arguments)
    with pytest.raises(error, match=words):
        conv2d.forward(x, weight, **options)
    with pytest.raises(error, match=words):
        conv2d.backward(x, x, weight, **options)


def test_wrong_arrays_are_named():
    x, weight, bias = case((1, 2, 4, 4), (3, 2, 3, 3))
    with pytest.raises(ArrayError, match="weight must be float32, not float16"):
        conv2d.forward(x, weight.half())
    with pytest.raises(ArrayError, match=r"bias must have shape \(3,\), not \(2,\)"):
        conv2d.forward(x, weight, bias[:2])
    with pytest.raises(ArrayError, match=r"dy must have shape \(1, 3, 2, 2\)"):
        conv2d.backward(x, x, weight)
    one, filters, _ = case((1, 1, 4, 4), (3, 1, 3, 3))  # of one channel: of either memory format
    with pytest.raises(ArrayError, match="dy must be an array, not a list"):
        conv2d.backward([0.0], one, filters)
    with pytest.raises(ArrayError, match="out must be an array, not a list"):
        conv2d.forward(one, filters, out=[0.0])
    out = torch.zeros(1, 3, 2, 2, device=PLACE).to(memory_format=torch.channels_last)
    last = x.to(memory_format=torch.channels_last)
    with pytest.raises(ArrayError, match="out must be channels-last; its strides are"):
        conv2d.forward(last, weight, out=out.contiguous())
    with pytest.raises(ArrayError, match="must be an array, not a list"):
        conv2d.forward(x.tolist(), weight)
