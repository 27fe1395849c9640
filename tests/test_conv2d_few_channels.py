"""Convolution of few channels with small filters: `conv2d.few_channels`."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from test_conv2d import LAYOUTS, PLACE, ROUNDING, assert_close, case, check, double
from turns import in_turns

from course_lib import SIMULATED, reference, simulator
from course_lib.kernels import conv2d
from course_lib.kernels.conv2d import few_channels_plan as plans
from course_lib.kernels.conv2d.problem import problem_of
from course_lib.runtime.host.launch import planning, recorded

RUNG = "few_channels"
OWN = (False, True, True)  # gradients that have kernels here; dx is that of `tensor_core`
small = st.integers(1, 3)
OPTIONS = dict(
    stride=small | st.tuples(small, small),
    padding=st.integers(0, 3) | st.tuples(st.integers(0, 4), st.integers(0, 4)),
    dilation=st.just(1) | st.tuples(small, small),
)


def as_pair(option):
    return (option, option) if isinstance(option, int) else option


def fits(image, taps, padding, dilation):
    pairs = image, taps, as_pair(padding), as_pair(dilation)
    return all(n + 2 * pad > apart * (t - 1) for n, t, pad, apart in zip(*pairs, strict=True))


@settings(max_examples=6, deadline=None)
@given(
    N=st.integers(0, 2),
    size=st.sampled_from(plans.FILTER_SIZES),
    K=st.integers(1, 12),
    image=st.tuples(st.integers(1, 9), st.integers(1, 7)),
    options=st.fixed_dictionaries(OPTIONS),
    biased=st.booleans(),
    dtype=st.sampled_from(list(ROUNDING)),
    layout=st.sampled_from(LAYOUTS),
    seed=st.integers(0, 2**31),
)
def test_random_cases(N, size, K, image, options, biased, dtype, layout, seed):
    torch.manual_seed(seed)
    C, *taps = size
    assume(fits(image, taps, options["padding"], options["dilation"]))
    tensors = case((N, C, *image), (K, C, *taps), dtype, layout, biased)
    if N:
        check(RUNG, *tensors, needs=OWN, **options)
        return
    y = conv2d.forward(*tensors, variant=RUNG, **options)
    dx, dweight, dbias = conv2d.backward(y, *tensors[:2], variant=RUNG, **options)
    assert y.shape[1] == K and dx.shape == tensors[0].shape
    assert not dweight.any() and not dbias.any()


@pytest.mark.parametrize(
    "size, layout", in_turns([(size,) for size in plans.FILTER_SIZES], LAYOUTS), ids=str
)
def test_every_size(size, layout):
    """More filters than a block of dweight takes, of which the last has fewer."""
    C, *taps = size
    K = 35 if not SIMULATED else 19 if layout == LAYOUTS[1] else 11
    tensors = case((1, C, 5, 4), (K, C, *taps), layout=layout)
    check(RUNG, *tensors, needs=OWN, padding=tuple(n // 2 for n in taps))


@pytest.mark.parametrize("N, dtype", in_turns([45, 1], [torch.float32, torch.bfloat16]), ids=str)
def test_results_of_one_channel_in_both_formats(N, dtype):
    """x is of both formats, so that y and dy may be of either, and none is copied."""
    x, weight, bias = case((N, 1, 5, 6), (8, 1, 3, 3), dtype)
    arguments = [double(each) for each in (x, weight, bias)]
    sizes = [abs(each) for each in arguments]
    dy = torch.randn(N, 8, 3, 4).to(PLACE, dtype)
    expected = reference.conv2d_backward(double(dy), *arguments[:2])
    dy_sizes = reference.conv2d_backward(abs(double(dy)), *sizes[:2])
    for layout in LAYOUTS:
        y, dy = (torch.empty_like(dy, memory_format=layout), dy.to(memory_format=layout))
        with recorded() as launches:
            assert conv2d.forward(x, weight, bias, out=y) is y
            gradients = conv2d.backward(dy, x, weight, needs=OWN)[1:]
        assert len(launches) == 3 and launches[0][3][3] is y and launches[1][3][0] is dy
        assert_close(y, reference.conv2d(*arguments), reference.conv2d(*sizes))
        for gradient, *wanted in zip(gradients, expected[1:], dy_sizes[1:], strict=True):
            assert_close(gradient, *wanted)


def test_tiles_across_images_and_many_of_them(monkeypatch):
    """Pixels of several images in a tile, several tiles in a block, and a last one not full."""
    monkeypatch.setattr(plans, "MULTIPROCESSORS", 1)
    for layout in LAYOUTS:
        tensors = case((13, 2, 4, 8), (12, 2, 3, 3), layout=layout)
        check(RUNG, *tensors, needs=OWN, padding=(0, 1), stride=(1, 2))


@pytest.mark.parametrize(
    "dtype, layout", in_turns([torch.float32, torch.float16], LAYOUTS), ids=str
)
def test_memory_that_starts_anywhere(dtype, layout):
    """Arrays off the 16-byte boundaries; nothing before or behind the result is written."""

    def moved(tensor, by):
        room = torch.full((by + tensor.numel() + 9,), 7.0, dtype=dtype, device=PLACE)
        strides = torch.empty(tensor.shape).to(memory_format=layout).stride()
        view = room[by : by + tensor.numel()].as_strided(tensor.shape, strides, by)
        view.copy_(tensor)
        return room, view

    x, weight, bias = case((2, 3, 5, 5), (8, 3, 3, 3), dtype, layout)
    (_, x), (_, weight) = moved(x, 1), moved(weight, 3)
    expected, *_ = check(RUNG, x, weight, bias, needs=OWN, padding=1)
    dy = torch.randn(2, 8, 5, 5).to(PLACE, dtype, memory_format=layout)
    aligned, apart = (
        conv2d.backward(each, x, weight, needs=OWN, padding=1, variant=RUNG)[1:]
        for each in (dy, moved(dy, 1)[1])
    )
    assert all(torch.equal(a, b) for a, b in zip(aligned, apart, strict=True))
    room, out = moved(torch.full((2, 8, 5, 5), math.nan), 2)
    y = conv2d.forward(x, weight, bias, padding=1, variant=RUNG, out=out)
    assert y is out and (room[:2] == 7).all() and (room[-7:] == 7).all()
    assert torch.equal(y, expected)


def test_values_that_are_not_finite_stay_where_they_are():
    x, weight, bias = case((1, 2, 6, 6), (5, 2, 3, 3))
    x[0, 1, 0, 0], x[0, 0, 5, 5] = math.nan, math.inf
    y = conv2d.forward(x, weight, bias, variant=RUNG)
    torch.testing.assert_close(y, F.conv2d(x, weight, bias), equal_nan=True, rtol=1e-5, atol=1e-5)
    assert torch.isfinite(y).sum() == y.numel() - 10
    x, dy = torch.randn_like(x), torch.randn_like(y)
    dy[0, 3, 2, 1], dy[0, 0, 0, 0] = math.inf, math.nan
    _, dweight, dbias = conv2d.backward(dy, x, weight, needs=OWN, variant=RUNG)
    assert dbias[3] == math.inf and dbias[0].isnan() and dbias.isfinite().sum() == 3
    assert dweight[3].isinf().all() and dweight[0].isnan().all()
    assert dweight[[1, 2, 4]].isfinite().all()


@pytest.mark.parametrize("layout, K", [(LAYOUTS[0], 5), (LAYOUTS[1], 5), (LAYOUTS[1], 8)])
def test_sanitizer_finds_nothing(layout, K):
    x, weight, bias = case((2, 2, 4, 4), (K, 2, 3, 3), layout=layout)
    options = dict(stride=(2, 1), padding=1, variant=RUNG)
    with simulator.sanitize() as report:
        y = conv2d.forward(x, weight, bias, **options)
        conv2d.backward(y, x, weight, needs=OWN, **options)
    assert not report, str(report)


def test_one_pass_finds_what_is_needed():
    x, weight, _ = case((2, 1, 6, 6), (4, 1, 3, 3))
    dy = torch.randn(2, 4, 4, 4, device=PLACE)
    every = conv2d.backward(dy, x, weight, needs=OWN)
    for needs in (OWN, (False, True, False), (False, False, True)):
        with recorded() as launches:
            found = conv2d.backward(dy, x, weight, needs=needs)
        assert len(launches) == 2  # sums of blocks, and their total
        for needed, gradient, wanted in zip(needs, found, every, strict=True):
            assert torch.equal(gradient, wanted) if needed else gradient is None
    assert conv2d.backward(dy, x, weight, needs=OWN, with_bias=False)[2] is None
    with recorded() as launches:
        assert conv2d.backward(dy, x, weight, needs=(False,) * 3) == (None,) * 3
    assert not launches


def test_a_kernel_is_made_once():
    kinds = {(*kind, shape.per_thread) for *kind, shape in plans._kinds()}
    assert len(set(map(id, plans.forward_kernels()))) == len(kinds) == 15


def test_the_rung_by_default():
    def rung(x_shape, weight_shape, groups=1, capability=(9, 0), stride=1):
        problem = problem_of(x_shape, weight_shape, stride, 0, 1, groups, False)
        return conv2d.default_variant(problem, capability)

    assert rung((1, 1, 28, 28), (64, 1, 3, 3)) == RUNG
    assert rung((1, 1, 28, 28), (64, 1, 3, 3), capability=(7, 5)) == RUNG
    for size in (224, 380):
        for capability in ((8, 0), (9, 0)):
            assert rung((8, 3, size, size), (32, 3, 3, 3), capability=capability, stride=2) == RUNG
    assert rung((8, 3, 32, 32), (6, 3, 5, 5)) == RUNG
    assert rung((8, 8, 32, 32), (6, 8, 3, 3)) == "tensor_core"
    assert rung((8, 1, 28, 28), (6, 1, 4, 4)) == "tensor_core"
    assert rung((8, 1, 28, 40000), (6, 1, 3, 3)) == "tensor_core"  # a line fills shared memory
    assert rung((8, 4, 28, 28), (6, 2, 3, 3), groups=2) == "tensor_core"


@pytest.mark.parametrize("x_shape, weight_shape, groups, words", [
    ((1, 8, 9, 9), (6, 8, 3, 3), 1, "these sizes and channels: 3 × 3 over 1, .*'implicit_gemm'"),
    ((1, 4, 9, 9), (6, 2, 3, 3), 2, "filters, without groups"),
    ((1, 1, 3, 20000), (6, 1, 3, 3), 1, "lines of x that fit 77,824 bytes of shared memory, not "),
])  # fmt: skip
def test_what_does_not_fit_is_refused(x_shape, weight_shape, groups, words):
    x, weight, _ = case(x_shape, weight_shape)
    with pytest.raises(ValueError, match=words):
        conv2d.forward(x, weight, groups=groups, variant=RUNG)
    y = torch.empty(x_shape[0], 6, *(n - 2 for n in x_shape[2:]), device=PLACE)
    with pytest.raises(ValueError, match=words):
        conv2d.backward(y, x, weight, groups=groups, variant=RUNG)


@settings(max_examples=300, deadline=None)
@given(
    size=st.sampled_from(plans.FILTER_SIZES),
    N=st.integers(1, 9),
    image=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    options=st.fixed_dictionaries(OPTIONS),
    n_pixels=st.integers(1, 700),
)
def test_tiles_hold_all_that_is_met(size, N, image, options, n_pixels):
    C, *taps = size
    assume(fits(image, taps, options["padding"], options["dilation"]))
    options = [options[name] for name in ("stride", "padding", "dilation")]
    problem = problem_of((N, C, *image), (4, C, *taps), *options, 1, False)
    tile, p = plans.tile_of(problem, n_pixels), problem
    lines = [
        image * tile.tall + line * p.stride_h
        for image in range(N) for line in range(p.P) for _ in range(p.Q)
    ]  # fmt: skip
    reach = p.dilation_h * (p.R - 1) + 1
    needed = max(
        max(lines[i : i + n_pixels]) - lines[i] + reach for i in range(0, len(lines), n_pixels)
    )
    assert needed <= tile.n_lines <= N * tile.tall
    assert tile.n_cols == (p.Q - 1) * p.stride_w + p.dilation_w * (p.S - 1) + 1


@pytest.mark.parametrize("N, K, count", [(64, 216, 3), (64, 8, 2), (4, 216, 2)])
def test_many_products_are_for_tensor_cores(N, K, count):
    """dweight of 16-bit numbers, where x would be copied for many groups of filters."""
    from test_chips import CHIPS

    x = torch.empty(N, 3, 122, 122, dtype=torch.bfloat16).to(memory_format=LAYOUTS[1])
    dy = torch.empty(N, K, 61, 61, dtype=torch.bfloat16).to(memory_format=LAYOUTS[1])
    weight = torch.empty(K, 3, 3, 3, dtype=torch.bfloat16)
    with planning(CHIPS[4]) as launches:
        conv2d.backward(dy, x, weight, stride=2, padding=2, dilation=2, needs=(False, True, False))
    names = [kernel.py_func.__name__ for kernel, *_ in launches]
    assert len(names) == count and ("few_channels_dweight_kernel" in names) == (count == 2)


@given(
    n_pixels=st.integers(0, 10**6), side=st.sampled_from([32, 128]), n_groups=st.integers(1, 300),
    unroll=st.sampled_from([1, 2, 4]), turns=st.integers(1, 4),
)  # fmt: skip
def test_parts_of_the_pixels(n_pixels, side, n_groups, unroll, turns):
    shape, rounds = plans.Shape(4, 8, unroll, 3, False), turns * unroll
    n_splits, length, rounds = plans.split_plan(n_pixels, side, n_groups, shape, rounds)
    assert rounds % unroll == 0 and length % (rounds * side) == 0
    assert n_splits * length >= n_pixels
    assert (n_splits - 1) * length < max(1, n_pixels)
    assert n_splits == 1 or n_splits * n_groups <= max(plans.MULTIPROCESSORS * 3, n_groups)
