"""Small convolutions on tensor cores: tiles dealt out to clusters, fewer launches."""

import contextlib
import itertools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from test_conv2d import LAYOUTS, PLACE, ROUNDING, assert_close, case, check, double, truth
from test_conv2d_halo import CHIP, MODES
from turns import in_turns

from course_lib import simulator
from course_lib.kernels import conv2d
from course_lib.kernels.blocks import transpose
from course_lib.kernels.blocks.mma.shape import Shape
from course_lib.kernels.conv2d import (
    gathering,
    halo_plan,
    halo_small,
    pixel_sums_plan,
    pixel_sums_small,
)
from course_lib.kernels.conv2d.problem import problem_of
from course_lib.runtime.host.launch import recorded

#: Tiles that the simulator makes quickly, and the rules that choose among what they allow.
GATHERED, SUMMED = Shape(32, 32, 1, 2, 3), Shape(64, 64, 2, 1, 3)
SHAPES = halo_small.SHAPES  # those that a GPU takes
WAY = "tensor_core/implicit_gemm"


@pytest.fixture
def small_tiles(monkeypatch):
    monkeypatch.setattr(halo_small, "SHAPES", dict.fromkeys(MODES, (GATHERED,)))
    monkeypatch.setattr(pixel_sums_small, "SHAPES", dict.fromkeys(MODES, (SUMMED,)))
    with prefer(0):
        yield


@contextlib.contextmanager
def prefer(number, source=None):
    """Of all plans that there are, take that `number`, counted round and round.

    source  the weights' (`halo_weights`), if only plans with that are to count
    """

    def chosen(candidates):
        plans = [p for p in candidates if source in (None, getattr(p, "source", source))]
        return plans[number % len(plans)]

    with pytest.MonkeyPatch.context() as patch:
        for plans in (halo_small, pixel_sums_small):
            patch.setattr(plans, "fastest", lambda _, mode, candidates: chosen(candidates))
            plans.planned.cache_clear()
        yield
    for plans in (halo_small, pixel_sums_small):
        plans.planned.cache_clear()


def clusters(launches):
    """(name, blocks of a cluster) of each launch."""
    return [
        (getattr(kernel, "py_func", kernel).__name__, options["cluster"])
        for kernel, *_, options in launches
    ]


@settings(max_examples=4, deadline=None)
@given(
    N=st.integers(1, 2),
    channels=st.sampled_from([(8, 8), (8, 40), (40, 8), (72, 8)]),
    size=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    filter_size=st.tuples(st.integers(1, 3), st.integers(1, 2)),
    padding=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    dilation=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    stride=st.sampled_from([1, 1, 2]),
    dtype=st.sampled_from(list(ROUNDING)),
    last=st.booleans(),
    number=st.integers(0, 30),
    seed=st.integers(0, 2**31),
)
def test_every_plan(
    small_tiles_of_all, N, channels, size, filter_size, padding, dilation, stride, dtype, last,
    number, seed,
):  # fmt: skip
    for length, taps, pad, apart in zip(size, filter_size, padding, dilation, strict=True):
        assume(length + 2 * pad > apart * (taps - 1))
    torch.manual_seed(seed)
    (C, K), options = channels, dict(padding=padding, dilation=dilation, stride=stride)
    with prefer(number):
        check(WAY, *case((N, C, *size), (K, C, *filter_size), dtype, LAYOUTS[last]),
              **options)  # fmt: skip


@pytest.fixture(scope="module")
def small_tiles_of_all():
    """As `small_tiles`, for all examples of a test together."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(halo_small, "SHAPES", dict.fromkeys(MODES, (GATHERED,)))
        patch.setattr(pixel_sums_small, "SHAPES", dict.fromkeys(MODES, (SUMMED,)))
        yield


NETWORK = (64, 128, 13, 3)  # the second layer of the Fashion-MNIST network: C, K, H, R


def gathers(N, C, K, H, R):
    problem = problem_of((N, C, H, H), (K, C, R, R), 1, 0, 1, 1, True)
    return problem, (halo_plan.forward_of(problem), halo_plan.dx_of(problem))


@pytest.mark.parametrize("N", [1, 8, 32, 64])
@pytest.mark.parametrize("mode", MODES)
def test_plans_share_out_everything(N, mode):
    itemsize = 2 if mode == "narrow" else 4
    problem, both = gathers(N, *NETWORK)
    for gather in both:
        n_taps = gather.R * gather.S
        plans = list(halo_small.candidates(gather, itemsize, mode, CHIP))
        assert halo_small.planned(gather, itemsize, mode, CHIP) in plans
        assert max(plan.n_blocks(n_taps) for plan in plans) > 1
        for plan in plans:
            assert plan.shared_bytes(itemsize) + halo_plan.STATIC_BYTES <= CHIP[1]
            taps = -(-n_taps // plan.taps_each)
            chunks = -(-plan.n_chunks // plan.chunks_each)
            assert plan.n_blocks(n_taps) == taps * chunks <= halo_small.MOST_IN_CLUSTER
            # Nobody has nothing to do.
            assert (taps - 1) * plan.taps_each < n_taps
            assert (chunks - 1) * plan.chunks_each < plan.n_chunks
    for plan in pixel_sums_small.candidates(problem, itemsize, mode, CHIP):
        assert plan.n_splits <= halo_small.MOST_IN_CLUSTER
        assert plan.n_splits * plan.length >= N * 121 > (plan.n_splits - 1) * plan.length


@pytest.mark.parametrize("size", [(32, 64, 128, 64), (32, 128, 128, 56), (64, 256, 256, 28)])
def test_large_convolutions_are_not_small(size):
    N, C, K, H = size
    problem = problem_of((N, C, H, H), (K, C, 3, 3), 1, 1, 1, 1, True)
    for mode in MODES:
        itemsize = 2 if mode == "narrow" else 4
        for gather in (halo_plan.forward_of(problem), halo_plan.dx_of(problem)):
            assert halo_small.planned(gather, itemsize, mode, CHIP) is None
        assert pixel_sums_small.planned(problem, itemsize, mode, CHIP) is None


def test_chips_without_clusters():
    problem, both = gathers(1, *NETWORK)
    older = (8, 0), 163 << 10
    assert all(halo_small.planned(gather, 4, "tf32", older) is None for gather in both)
    assert pixel_sums_small.planned(problem, 4, "tf32", older) is None


@pytest.mark.parametrize("last", [False, True])
def test_one_launch_for_each_pass(small_tiles, last):
    """And one before it, where channels have to be laid side by side."""
    x, weight, bias = case((2, 8, 4, 5), (8, 8, 3, 2), layout=LAYOUTS[last])
    before = [] if last else [("transpose_two_kernel", 1)]
    way = dict(variant=WAY)
    with recorded() as launches:
        y = conv2d.forward(x, weight, bias, **way)
    assert [name for name, _ in clusters(launches)] == [*(n for n, _ in before), "halo_kernel"]
    for needs, kernel in (((True, False), "halo_kernel"), ((False, True), "pixel_sums_kernel")):
        with recorded() as launches:
            conv2d.backward(y, x, weight, needs=(*needs, False), **way)
        assert [name for name, _ in clusters(launches)] == [*(n for n, _ in before), kernel]


@settings(max_examples=4, deadline=None)
@given(
    N=st.integers(1, 2),
    channels=st.sampled_from([(4, 36), (12, 4), (40, 4), (68, 4)]),
    size=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    filter_size=st.tuples(st.integers(1, 2), st.integers(2, 3)),
    padding=st.tuples(st.integers(0, 1), st.integers(0, 1)),
    stride=st.sampled_from([1, 2]),
    with_bias=st.booleans(),
    last=st.booleans(),
    number=st.integers(0, 30),
    seed=st.integers(0, 2**31),
)
def test_contiguous_weights_are_read_as_they_lie(
    small_tiles_of_all, N, channels, size, filter_size, padding, stride, with_bias, last, number,
    seed,
):  # fmt: skip
    """Nothing is launched for them, and the bits are those that laid out weights give."""
    assume(size != (1, 1))  # which would be contiguous as well
    for length, taps, pad in zip(size, filter_size, padding, strict=True):
        assume(length + 2 * pad >= taps)
    torch.manual_seed(seed)
    C, K = channels
    options = dict(padding=padding, stride=stride, variant=WAY)
    x, weight, bias = case((N, C, *size), (K, C, *filter_size), layout=LAYOUTS[last])
    bias, given = bias if with_bias else None, weight.contiguous()
    with prefer(number, "by_k"):
        expected = conv2d.forward(x, weight, bias, **options)
    out = torch.full_like(expected, torch.nan)
    with prefer(number, "by_element"), recorded() as launches:
        y = conv2d.forward(x, given, bias, out=out, **options)
    before = [] if last else ["transpose_kernel"]  # of the images
    assert [name for name, _ in clusters(launches)] == [*before, "halo_kernel"]
    assert launches[-1][3][1] is given
    assert torch.equal(y, expected)
    del options["variant"]
    exact = [double(array) for array in (x, weight, bias)]
    sizes = [None if array is None else np.abs(array) for array in exact]
    assert_close(y, truth(*exact, **options), truth(*sizes, **options))


def test_who_reads_contiguous_weights_as_they_lie(monkeypatch):
    """The forward pass of float32: the network's, above all."""
    monkeypatch.setattr(halo_small, "SHAPES", SHAPES)
    planned = halo_small.planned.__wrapped__  # which does not remember
    for mode, N in itertools.product(MODES, (1, 8)):
        forward, dx = gathers(N, *NETWORK)[1]
        chosen = 2 if mode == "narrow" else 4, mode, CHIP
        read = "by_k" if mode == "narrow" else "by_element"
        for last in (True, False):
            found = planned(forward, *chosen, last, False)
            assert (found.source, found.n_copies) == (read, 2 - last - (read == "by_element"))
            found = planned(dx, *chosen, last, False)
            assert (found.source, found.n_copies) == ("by_row", 2 - last)
        found = planned(forward, *chosen)
        assert (found.source, found.n_copies) == ("by_k", 0)


@pytest.mark.parametrize("variant, dtype", in_turns(
    ["direct", "tiled", "im2col", "implicit_gemm", WAY], ROUNDING
), ids=str)  # fmt: skip
def test_else_contiguous_weights_are_laid_out(small_tiles, variant, dtype):
    """By a launch of our own, for forward and dx, on every rung."""
    torch.manual_seed(0)
    x, weight, bias = case((1, 8, 3, 3), (8, 8, 2, 2), dtype, LAYOUTS[1])
    expected = conv2d.forward(x, weight, bias, variant=variant)
    with prefer(0, "by_k"), recorded() as launches:
        y = conv2d.forward(x, weight.contiguous(), bias, variant=variant)
    assert clusters(launches)[0][0] == "transpose_kernel" and torch.equal(y, expected)
    needs = True, False, False
    expected, *_ = conv2d.backward(y, x, weight, needs=needs, variant=variant)
    with recorded() as launches:
        dx, *_ = conv2d.backward(y, x, weight.contiguous(), needs=needs, variant=variant)
    assert clusters(launches)[0][0] == "transpose_kernel" and torch.equal(dx, expected)


def test_contiguous_weights_are_laid_out_once():
    """Also where they are offered to `halo` first, which has no plan for groups."""
    x, weight, _ = case((1, 8, 5, 5), (8, 4, 3, 3), layout=LAYOUTS[1])
    with recorded() as launches:
        conv2d.forward(x, weight.contiguous(), groups=2, variant=WAY)
    assert [name for name, _ in clusters(launches)].count("transpose_kernel") == 1


def test_every_way_to_share_chunks_and_taps(small_tiles):
    """Also twice the same, bit for bit."""
    x, weight, bias = case((1, 40, 1, 2), (8, 40, 1, 3), layout=LAYOUTS[1])
    seen, results = set(), []
    for number in range(4):
        with prefer(number), recorded() as launches:
            y = conv2d.forward(x, weight, bias, padding=1, variant=WAY)
            again = conv2d.forward(x, weight, bias, padding=1, variant=WAY)
        seen |= set(clusters(launches))
        assert torch.equal(y, again)
        results.append(y)
    assert {cluster for name, cluster in seen if name == "halo_kernel"} >= {1, 2, 4}
    for y in results[1:]:
        torch.testing.assert_close(y, results[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("number", [1, 2])
def test_sanitizer_finds_nothing(small_tiles, number):
    """Two ways to share the work, of which each is taken by two of the four kernels."""
    x, weight, bias = case((1, 40, 2, 2), (8, 40, 1, 2), layout=LAYOUTS[1])
    dy = torch.randn(1, 8, 2, 1, device=PLACE).contiguous(memory_format=LAYOUTS[1])
    dweight, dbias = torch.empty_like(weight), torch.empty_like(bias)
    problem = problem_of(x.shape, weight.shape, 1, 0, 1, 1, True)
    with prefer(number), simulator.sanitize() as report:
        if number == 1:
            with prefer(number, "by_element"):
                conv2d.forward(x, weight.contiguous(), bias, variant=WAY)
            conv2d.backward(dy, x, weight, needs=(True, False, False), variant=WAY)
        else:
            conv2d.forward(x, weight, bias, variant=WAY)
            gathering.launch_dweight("tensor_core", problem, dy, x, dweight, "float32", dbias)
    assert not report, str(report)


@pytest.mark.parametrize("dtype, last, n_splits", in_turns(
    itertools.product(ROUNDING, [False, True]), [1, 2, 3]
), ids=str)  # fmt: skip
def test_dbias_comes_with_dweight(dtype, last, n_splits):
    """Channels in two tiles, of which the second is not full."""
    torch.manual_seed(n_splits)
    x, weight, bias = case((2, 8, 7, 7), (72, 8, 1, 1), dtype, LAYOUTS[last])
    dy = torch.randn(2, 72, 7, 7).to(PLACE, dtype, memory_format=LAYOUTS[last])
    dweight, dbias = torch.full_like(weight, torch.nan), torch.full_like(bias, torch.nan)
    problem = problem_of(x.shape, weight.shape, 1, 0, 1, 1, last)
    k_size = 128 // dtype.itemsize
    n_pixels = 2 * 7 * 7
    length = math.ceil(math.ceil(n_pixels / k_size) / n_splits) * k_size
    plan = pixel_sums_small.Plan(SUMMED, math.ceil(n_pixels / length), length)
    mode = halo_plan.mode_of(x, "float32", n_pixels)
    pixel_sums_small.run(plan, problem, dy, x, dweight, dbias, mode)
    expected = dy.double().sum((0, 2, 3))
    torch.testing.assert_close(dbias, expected.to(dtype), rtol=1e-2, atol=1e-5)
    expected = torch.nn.grad.conv2d_weight(x.double(), weight.shape, dy.double())
    rtol, atol = (1e-5, 1e-5) if dtype == torch.float32 else (2e-2, 2e-2)
    torch.testing.assert_close(dweight.double(), expected, rtol=rtol, atol=atol)


def test_who_makes_dbias_is_told():
    x, weight, bias = case((1, 8, 3, 3), (8, 8, 2, 2))
    dy = torch.randn(1, 8, 2, 2, device=PLACE)
    problem, dweight = problem_of(x.shape, weight.shape, 1, 0, 1, 1, False), weight.clone()
    found = torch.full_like(bias, torch.nan)
    arguments = problem, dy, x, dweight, "float32"
    assert gathering.launch_dweight("tensor_core", *arguments, found)
    torch.testing.assert_close(found, dy.sum((0, 2, 3)))
    found = torch.full_like(bias, torch.nan)
    assert not gathering.launch_dweight("implicit_gemm", *arguments, found)
    assert found.isnan().all()


def test_weights_off_the_boundaries(small_tiles):
    """16 bytes can't be copied from there: they are arranged first. Elements can."""
    x, like, _ = case((1, 8, 3, 3), (8, 8, 2, 2), layout=LAYOUTS[1])
    room = torch.randn(1 + like.numel(), device=PLACE)
    weight = room[1:].as_strided(like.shape, like.stride(), 1)
    with recorded() as launches:
        y = conv2d.forward(x, weight, variant=WAY)
    assert "arrange_kernel" in [name for name, _ in clusters(launches)]
    expected = F.conv2d(x.double(), weight.double())
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)
    given = room[1:].view(like.shape)
    with prefer(0, "by_element"), recorded() as launches:
        y = conv2d.forward(x, given, variant=WAY)
    assert [name for name, _ in clusters(launches)] == ["halo_kernel"]
    expected = F.conv2d(x.double(), given.double())
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", list(ROUNDING), ids=str)
def test_two_arrays_transposed_in_one_launch(dtype):
    problem = problem_of((2, 8, 5, 3), (4, 8, 1, 1), 1, 0, 1, 1, False)
    shapes = (2, 72, 5, 3), (3, 16, 4, 4)
    first, second = (torch.randn(shape).to(PLACE, dtype) for shape in shapes)
    with recorded() as launches:
        found = halo_plan.side_by_side(problem, (first, 72), (second, 16))
    assert len(launches) == 1
    for array, copy in zip((first, second), found, strict=True):
        assert torch.equal(copy, array.permute(0, 2, 3, 1).reshape(-1))
    alone = halo_plan.side_by_side(problem, (second, 16))
    assert len(alone) == 1 and torch.equal(alone[0], found[1])
    assert transpose.SIDE == 64  # 72 channels are more than a square


def test_specialisations_are_what_is_launched(small_tiles):
    labels = [label for label, *_ in halo_small.specialisations()]
    labels += [label for label, *_ in pixel_sums_small.specialisations()]
    assert len(set(labels)) == len(labels) > 10
    assert pixel_sums_plan.kernel_for(SUMMED, 4, "split", True) is pixel_sums_plan.kernel_for(
        SUMMED, 4, "split", True
    )
