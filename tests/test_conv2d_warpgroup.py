"""Convolution by Hopper's tensor cores: `conv2d.warpgroup`, its plans, and what it has arranged."""

import collections
import contextlib
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from test_conv2d import LAYOUTS, PLACE, assert_close, case, double
from test_conv2d_halo import CHIP, SIZES, round_tf32
from test_warpgroup import LIMIT, error, has_them, simulated_only
from turns import in_turns

from course_lib import SIMULATED, cuda, simulator
from course_lib.kernels import conv2d
from course_lib.kernels.blocks import transpose
from course_lib.kernels.conv2d import arranging, halo_plan, halo_small, warpgroup, warpgroup_plan
from course_lib.kernels.conv2d.problem import problem_of
from course_lib.kernels.conv2d.warpgroup_plan import Shape
from course_lib.runtime.host import arrays
from course_lib.runtime.host.launch import launch, recorded
from course_lib.runtime.intrinsics.warpgroup import multiply_tiles

on_hopper = pytest.mark.skipif(not has_them(), reason="compute capability 9.0 alone has wgmma")
#: Tiles that the simulator makes quickly.
SMALL, PAIR, WIDE = Shape(32, 64, 1, 3), Shape(40, 64, 2, 4), Shape(48, 128, 1, 4)
DEEP = Shape(32, 64, 1, 5)  # with as many stages as the real ones
FLOAT, BRAIN, HALF = torch.float32, torch.bfloat16, torch.float16
WAY = dict(variant="tensor_core", precision="tf32")


@contextlib.contextmanager
def tiles(shape, n_blocks=2):
    """All that `warpgroup` can take is taken, with tiles of `shape`, by at most so many blocks.

    What is allocated meanwhile is NaN, so that all that is not written shows.
    """
    empty = arrays.empty

    def poisoned(*args, **options):
        found = empty(*args, **options)
        return found.fill_(math.nan) if found.is_floating_point() else found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(warpgroup_plan, "SHAPES", (shape,))
        patch.setattr(warpgroup_plan, "MULTIPROCESSORS", n_blocks)
        for plans in (halo_small, halo_plan):  # which may be thought faster
            patch.setattr(plans, "planned", lambda *_: None)
        patch.setattr(arrays, "empty", poisoned)
        warpgroup_plan.planned.cache_clear()
        try:
            yield
        finally:
            warpgroup_plan.planned.cache_clear()


@contextlib.contextmanager
def launched(shape, dtype):
    """The kernel with tiles of `shape` must be launched, once."""
    with recorded() as launches:
        yield launches
    kernel = warpgroup_plan.kernel_for(shape, dtype.itemsize)
    assert [kernel for kernel, *_ in launches].count(kernel) == 1


def forward(shape, x, weight, bias, out=None, **options):
    with launched(shape, x.dtype):
        return conv2d.forward(x, weight, bias, **WAY, out=out, **options)


def find_dx(shape, dy, x, weight, **options):
    needs = True, False, False
    with launched(shape, x.dtype):
        return conv2d.backward(dy, x, weight, needs=needs, **WAY, **options)[0]


def seen(tensor):
    """float64 of what a tensor core sees of it, on the CPU."""
    values = double(tensor)
    return torch.from_numpy(round_tf32(values) if tensor.dtype == FLOAT else values)


def true_forward(x, weight, bias, **options):
    return F.conv2d(x, weight, bias, **options)


def true_dx(dy, x, weight, padding=0, dilation=1):
    padding, dilation = ([v, v] if isinstance(v, int) else list(v) for v in (padding, dilation))
    numbers = [1, 1], padding, dilation, False, [0, 0], 1, [True, False, False]
    return torch.ops.aten.convolution_backward(dy, x, weight, None, *numbers)[0]


def check_forward(shape, x, weight, bias, **options):
    y = forward(shape, x, weight, bias, **options)
    a, b, c = seen(x), seen(weight), None if bias is None else bias.double().cpu()
    expected = true_forward(a, b, c, **options)
    sizes = true_forward(a.abs(), b.abs(), None if c is None else c.abs(), **options)
    assert_close(y, expected.numpy(), sizes.numpy())
    return y


def check_dx(shape, dy, x, weight, **options):
    dx = find_dx(shape, dy, x, weight, **options)
    a, b, c = seen(dy), x.double().cpu(), seen(weight)
    expected, sizes = true_dx(a, b, c, **options), true_dx(a.abs(), b, c.abs(), **options)
    assert_close(dx, expected.numpy(), sizes.numpy())
    return dx


def like_y(x, weight, **options):
    """A dy, laid out as y would be."""
    shape = F.conv2d(x.cpu().double(), weight.cpu().double(), **options).shape
    layout = LAYOUTS[not x.is_contiguous()]
    return torch.randn(shape).to(x.device, x.dtype, memory_format=layout)


# ---- forward and dx ---------------------------------------------------------------------------


#: dx is a forward pass of dy: the same kernel, and the simulator takes long. A GPU finds both.
FORWARD, DX = ("forward",), ("dx",)


@on_hopper
@pytest.mark.parametrize("shape, dtype, last, x_shape, filters, biased, options, passes", [
    # Two chunks of channels, of which the second is not full; tiles across images.
    (SMALL, FLOAT, False, (3, 36, 5, 6), (12, 3, 3), True, dict(padding=1), FORWARD),
    (PAIR, BRAIN, True, (2, 72, 4, 7), (16, 2, 2), False, dict(padding=1, dilation=(1, 2)),
     FORWARD),
    (DEEP, HALF, True, (2, 136, 3, 5), (8, 2, 2), True, dict(padding=1), FORWARD),  # three chunks
    # Filters that are not square, padding by axis, and filters in several parts.
    (SMALL, HALF, False, (1, 8, 7, 3), (72, 3, 1), True, dict(padding=(2, 0)), FORWARD),
    (WIDE, FLOAT, True, (2, 8, 3, 5), (132, 1, 3), True, dict(padding=(0, 1)), FORWARD),
    (PAIR, BRAIN, True, (1, 8, 9, 9), (72, 3, 2), False, {}, DX),
    (SMALL, FLOAT, True, (2, 36, 4, 3), (72, 2, 3), False, dict(padding=(0, 1), dilation=(2, 1)),
     DX),
    # One line; one column.
    (SMALL, BRAIN, True, (2, 8, 1, 41), (8, 1, 3), True, dict(padding=(0, 1)), FORWARD),
    (DEEP, FLOAT, False, (3, 4, 13, 1), (8, 5, 1), False, dict(padding=(2, 0)), DX),
    # Padding and dilation as far as they go, and none.
    (DEEP, BRAIN, False, (1, 8, 6, 5), (16, 5, 5), True, dict(padding=2), DX),
    (PAIR, FLOAT, False, (2, 8, 9, 7), (8, 3, 3), True, dict(padding=2, dilation=2), FORWARD),
    (WIDE, HALF, True, (1, 16, 9, 8), (64, 3, 3), True, dict(dilation=(2, 3)), DX),
])  # fmt: skip
def test_forward_and_dx(shape, dtype, last, x_shape, filters, biased, options, passes):
    weight_shape = filters[0], x_shape[1], *filters[1:]
    x, weight, bias = case(x_shape, weight_shape, dtype, LAYOUTS[last], biased)
    with tiles(shape):
        if "forward" in passes or not SIMULATED:
            check_forward(shape, x, weight, bias, **options)
        if "dx" in passes or not SIMULATED:
            check_dx(shape, like_y(x, weight, **options), x, weight, **options)


@on_hopper
@pytest.mark.parametrize("shape, dtype, last, x_shape, filters, options", [
    (SMALL, BRAIN, True, (1, 8, 3, 3), (8, 2, 2), dict(padding=2)),
    (PAIR, FLOAT, False, (2, 4, 5, 3), (8, 5, 1), dict(padding=1)),
    (SMALL, FLOAT, True, (2, 4, 3, 5), (8, 1, 3), dict(padding=(2, 0), dilation=(1, 2))),
])  # fmt: skip
def test_padding_that_no_filter_fills(shape, dtype, last, x_shape, filters, options):
    """Pixels of y that meet padding alone; dx goes another way."""
    x, weight, bias = case(x_shape, (filters[0], x_shape[1], *filters[1:]), dtype, LAYOUTS[last])
    with tiles(shape):
        check_forward(shape, x, weight, bias, **options)


@on_hopper
@pytest.mark.parametrize("n_columns, last", in_turns([1, 31, 65], [False, True]))
def test_any_number_of_columns(n_columns, last):
    """Forward of so many filters; dx of so many channels."""
    with tiles(SMALL):
        x, weight, bias = case((1, 8, 5, 4), (n_columns, 8, 2, 2), BRAIN, LAYOUTS[last])
        check_forward(SMALL, x, weight, bias)
        x, weight, _ = case((1, n_columns, 5, 4), (4, n_columns, 2, 2), FLOAT, LAYOUTS[last])
        check_dx(SMALL, like_y(x, weight), x, weight)


@on_hopper
def test_fewer_tiles_than_blocks_or_more():
    """Four tiles, of two parts of the filters: the same bits by any number; inputs stay."""
    x, weight, bias = case((1, 8, 7, 6), (66, 8, 2, 2), layout=LAYOUTS[1])
    before = [tensor.clone() for tensor in (x, weight, bias)]
    gather = halo_plan.forward_of(problem_of(x.shape, weight.shape, 1, 0, 1, 1, True))
    assert warpgroup_plan.n_tiles_of(gather, SMALL) == 4
    kernel, results = warpgroup_plan.kernel_for(SMALL, 4), []
    for n_blocks in (1, 3, 5):
        with tiles(SMALL, n_blocks), recorded() as launches:
            results.append(check_forward(SMALL, x, weight, bias))
        assert [grid for found, grid, *_ in launches if found is kernel] == [min(n_blocks, 4)]
    assert all(torch.equal(y, results[0]) for y in results)
    assert all(map(torch.equal, (x, weight, bias), before))


@on_hopper
@pytest.mark.parametrize("dtype", [FLOAT, BRAIN] if SIMULATED else [FLOAT, BRAIN, HALF])
@pytest.mark.parametrize("last", [False, True])
def test_a_result_that_begins_anywhere(dtype, last):
    """Off the boundary of a pair; nothing before or behind it is written."""
    x, weight, bias = case((2, 8, 4, 3), (10, 8, 2, 2), dtype, LAYOUTS[last])
    strides = torch.empty(2, 10, 3, 2).to(memory_format=LAYOUTS[last]).stride()
    with tiles(SMALL):
        expected = check_forward(SMALL, x, weight, bias)
        for first in (1,) if SIMULATED else (1, 2):
            room = torch.full((first + 120 + 9,), 7.0, dtype=dtype, device=PLACE)
            out = room[first : first + 120].as_strided((2, 10, 3, 2), strides, first)
            out.fill_(math.nan)
            assert torch.equal(forward(SMALL, x, weight, bias, out=out), expected)
            assert (room[:first] == 7).all() and (room[-9:] == 7).all()


small = st.integers(0, 2)


@on_hopper
@settings(max_examples=4, deadline=None)
@given(
    shape=st.sampled_from([SMALL, PAIR, WIDE, DEEP]),
    dtype=st.sampled_from([FLOAT, BRAIN, HALF]),
    last=st.booleans(),
    N=st.integers(1, 3),
    vectors=st.tuples(st.sampled_from([1, 2, 9]), st.sampled_from([1, 3, 9])),
    size=st.tuples(st.integers(1, 7), st.integers(1, 7)),
    taps=st.sampled_from([(2, 2), (3, 1), (1, 3), (3, 3), (2, 3), (1, 4), (4, 2)]),
    padding=st.tuples(small, small),
    dilation=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    biased=st.booleans(),
    n_blocks=st.integers(1, 4),
    seed=st.integers(0, 2**31),
)
def test_random_cases(
    shape, dtype, last, N, vectors, size, taps, padding, dilation, biased, n_blocks, seed
):
    torch.manual_seed(seed)
    assume(taps[0] * taps[1] > shape.n_stages - 2)
    reach = [apart * (n - 1) for apart, n in zip(dilation, taps, strict=True)]
    assume(all(n + 2 * p > r for n, p, r in zip(size, padding, reach, strict=True)))
    C, K = (n * 16 // dtype.itemsize for n in vectors)
    x, weight, bias = case((N, C, *size), (K, C, *taps), dtype, LAYOUTS[last], biased)
    options = dict(padding=padding, dilation=dilation)
    with tiles(shape, n_blocks):
        if seed % 2 or any(p > r for p, r in zip(padding, reach, strict=True)):
            check_forward(shape, x, weight, bias, **options)
        else:
            check_dx(shape, like_y(x, weight, **options), x, weight, **options)


@on_hopper
@pytest.mark.parametrize("places, kind", in_turns([
    # The end of an image, whose next one's padding follows; the beginning of a line.
    ({(0, 3, -1, -1): math.nan, (1, 7, 2, 0): -math.inf},),
    # The beginning of an image; the end of a line.
    ({(1, 0, 0, 0): math.nan, (1, 5, 2, -1): math.inf},),
], [(FLOAT, False), (FLOAT, True), (BRAIN, True)]))  # fmt: skip
def test_what_is_no_number_stays_where_it_is(places, kind):
    dtype, last = kind
    x, weight, bias = case((2, 8, 4, 4), (8, 8, 3, 3), dtype, LAYOUTS[last])
    dy = torch.randn_like(x)
    for place, value in places.items():
        x[place], dy[place] = value, value
    with tiles(SMALL):
        y = forward(SMALL, x, weight, bias, padding=1)
        dx = find_dx(SMALL, dy, x, weight, padding=1)
    expected = true_forward(seen(x), seen(weight), bias.double().cpu(), padding=1)
    expected_dx = true_dx(seen(dy), torch.zeros(x.shape).double(), seen(weight), padding=1)
    for found, wanted in ((y.cpu(), expected), (dx.cpu(), expected_dx)):
        finite = wanted.isfinite()
        assert not finite.all() and (~finite).any(dim=1).sum() == 4 + 6  # pixels
        assert torch.equal(found.isnan(), wanted.isnan())
        assert torch.equal(found[wanted.isinf()].double(), wanted[wanted.isinf()])
        assert error(found[finite], wanted[finite]) < LIMIT[dtype]


@on_hopper
@simulated_only
def test_the_sanitizer_finds_nothing():
    """Several tiles of several chunks to each block: dx of channels-last images."""
    x, weight, _ = case((2, 8, 5, 4), (36, 8, 2, 2), layout=LAYOUTS[1])
    dy = like_y(x, weight, padding=1)
    with tiles(SMALL, 1), simulator.sanitize() as report:
        find_dx(SMALL, dy, x, weight, padding=1)
    assert not report, str(report)


@on_hopper
@simulated_only
def test_products_that_come_as_late_as_they_may(monkeypatch):
    """The simulator multiplies at once; a GPU need not before it is waited for."""
    begun = collections.defaultdict(list)

    def begin(*args):
        begun[cuda.blockIdx.x, cuda.threadIdx.x].append(args)

    def wait_for_all_but(n_left):
        mine = begun[cuda.blockIdx.x, cuda.threadIdx.x]
        while len(mine) > n_left:
            multiply_tiles(*mine.pop(0))

    monkeypatch.setattr(warpgroup, "multiply_tiles", begin)
    monkeypatch.setattr(warpgroup, "wait_for_earlier_products", lambda: wait_for_all_but(1))
    monkeypatch.setattr(warpgroup, "wait_for_products", lambda acc, n: wait_for_all_but(0))
    x, weight, bias = case((2, 128, 4, 5), (12, 128, 2, 2), BRAIN)
    with tiles(PAIR, 1), simulator.sanitize() as report:
        check_forward(PAIR, x, weight, bias, padding=1)
    assert begun and not any(begun.values())
    assert not report, str(report)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("dtype", [FLOAT, BRAIN, HALF])
@pytest.mark.parametrize("shape", warpgroup_plan.SHAPES, ids=lambda shape: f"{shape.m}x{shape.n}")
@pytest.mark.parametrize("size", [(4, 64, 128, 30), (4, 128, 64, 30)], ids=str)
def test_the_real_tiles(size, shape, dtype, last):
    N, C, K, H = size
    x, weight, bias = case((N, C, H, H), (K, C, 3, 3), dtype, LAYOUTS[last])
    dy = torch.randn(N, K, H, H).to(PLACE, dtype, memory_format=LAYOUTS[last])
    for n_blocks in (132, 5):
        with tiles(shape, n_blocks):
            y = forward(shape, x, weight, bias, padding=1)
            dx = find_dx(shape, dy, x, weight, padding=1)
        expected = F.conv2d(x.double(), weight.double(), bias.double(), padding=1)
        assert error(y, expected) < LIMIT[dtype]
        assert error(dx, true_dx(dy.double(), x.double(), weight.double(), 1)) < LIMIT[dtype]


# ---- which convolutions take it, and with which tiles -------------------------------------------


def gathers(N, C, K, H, W=None, taps=(3, 3), padding=1, stride=1):
    """Those of forward and dx."""
    problem = problem_of((N, C, H, W or H), (K, C, *taps), stride, padding, 1, 1, True)
    return halo_plan.forward_of(problem), halo_plan.dx_of(problem)


@pytest.mark.parametrize("size", SIZES[:3], ids=str)
@pytest.mark.parametrize("itemsize, mode", [(4, "tf32"), (2, "narrow")])
def test_plans(size, itemsize, mode):
    for gather in gathers(*size):
        assert warpgroup_plan.planned(gather, itemsize, mode, CHIP)
        for shape in warpgroup_plan.SHAPES:
            plan = warpgroup_plan.plan_of(gather, shape, itemsize, CHIP)
            check_plan(plan, gather, itemsize)


def check_plan(plan, gather, itemsize):
    shape, n_taps = plan.shape, gather.R * gather.S
    n_bytes = warpgroup.shared_bytes(shape, plan.n_positions)
    assert n_bytes <= CHIP[1] and n_bytes < 227 << 10
    assert plan.n_positions <= warpgroup.MOST_POSITIONS
    # The last position's last tap. Behind a line's columns stands the next one's padding.
    grid_w = max(gather.W + gather.pad[1], gather.Q)
    last_tap = (gather.R - 1) * gather.dilation[0] * grid_w + (gather.S - 1) * gather.dilation[1]
    assert shape.m - 1 + last_tap == plan.n_positions - 1
    assert (plan.n_chunks - 1) * 128 < gather.n_channels * itemsize <= plan.n_chunks * 128
    # Position j of the next chunk comes with tap 1 + j // share, as do the weights of n_stages − 2
    # taps later; and these must be of the next chunk's first tap, at the latest.
    latest = 1 + (plan.n_positions - 1) // plan.share
    assert latest + shape.n_stages - 2 <= n_taps


@pytest.mark.parametrize("taps, shape", [
    ((2, 2), SMALL), ((3, 1), PAIR), ((1, 3), WIDE), ((2, 2), DEEP), ((5, 5), DEEP),
])  # fmt: skip
def test_plans_of_the_tiles_tested_here(taps, shape):
    for gather in gathers(2, 36, 72, 9, 7, taps, padding=0):
        check_plan(warpgroup_plan.plan_of(gather, shape, 4, CHIP), gather, 4)


def test_what_it_does_not_take():
    size, planned = SIZES[0], warpgroup_plan.planned
    gather = gathers(*size)[0]
    assert planned(gather, 4, "tf32", CHIP) and planned(gather, 2, "narrow", CHIP)
    assert planned(None, 4, "tf32", CHIP) is None
    for mode in ("split", "mixed"):
        assert planned(gather, 4, mode, CHIP) is None
    for capability in ((8, 0), (8, 9), (10, 0), (12, 0)):
        assert planned(gather, 4, "tf32", (capability, CHIP[1])) is None
    assert planned(gather, 4, "tf32", ((9, 0), 99 << 10)) is None
    strided, dx = gathers(*size, stride=2)
    assert planned(strided, 4, "tf32", CHIP) is None and dx is None
    for taps in ((1, 1), (1, 3), (3, 1)):  # too few to copy the next chunk meanwhile
        padding = tuple(n // 2 for n in taps)
        for gather in gathers(*size, taps=taps, padding=padding):
            assert planned(gather, 4, "tf32", CHIP) is None
    for C, itemsize, mode in ((0, 4, "tf32"), (66, 4, "tf32"), (68, 2, "narrow")):
        assert planned(gathers(32, C, 128, 64)[0], itemsize, mode, CHIP) is None
    for gather in gathers(2, 64, 128, 64, 1000):  # a tile's halo fits no shared memory
        assert planned(gather, 4, "tf32", CHIP) is None
    for gather in gathers(1 << 20, 64, 128, 64):  # pixels counted beyond 32 bits
        assert planned(gather, 4, "tf32", CHIP) is None


# ---- what it has arranged -----------------------------------------------------------------------


def to_tf32(values):
    """float32 rounded to 10 bits of mantissa, ties to even, by arithmetic in float64."""
    with np.errstate(invalid="ignore", over="ignore"):
        wide = values.astype(np.float64)
        _, exponent = np.frexp(np.where(np.isfinite(wide), wide, 0))  # |wide| < 2 ** exponent
        unit = np.ldexp(1.0, np.maximum(exponent - 1, -126) - 10)
        found = np.where(np.isfinite(wide), np.rint(wide / unit) * unit, wide)
        return found.astype(np.float32)


def hard_to_round(n):
    """float32: ties both ways and beside them, the largest and smallest, and any bits at all."""
    bits = np.random.default_rng(n).integers(0, 1 << 32, n, dtype=np.uint32)
    ends = np.array([0, 0x0FFF, 0x1000, 0x1001, 0x1FFF, 0x2FFF, 0x3000, 0x3001], np.uint32)
    tops = np.array([0, 0x3F800000, 0x7F7FE000, 0x007FE000, 0x80000000, 0xBFFFE000], np.uint32)
    special = np.array([0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00001, 0x7F800001], np.uint32)
    known = np.concatenate([special, (tops[:, None] + ends).ravel()])
    bits[: len(known)] = known[:n]
    return bits.view(np.float32)


def assert_same_bits(found, expected):
    """But for those of a NaN."""
    found, number = found.cpu().numpy(), ~np.isnan(expected)
    assert np.array_equal(np.isnan(found), ~number)
    assert np.array_equal(found[number].view(np.uint32), expected[number].view(np.uint32))


@on_hopper
@pytest.mark.parametrize("n", [1, 3, 4, 53, 1030])
def test_rounding(n):
    values = hard_to_round(n)
    x, y = torch.from_numpy(values).to(PLACE), torch.full((n + 4,), 7.0, device=PLACE)
    n_blocks = math.ceil(n / (4 * transpose.BLOCK_SIZE))
    launch(arranging.round_kernel, n_blocks, transpose.BLOCK_SIZE, x, y[:n], flat=True)
    assert_same_bits(y[:n], to_tf32(values))
    assert (y[n:] == 7).all()


@on_hopper
@pytest.mark.parametrize("n_channels, plane", [(5, (3, 7)), (72, (2, 4)), (4, (3, 22))])
def test_rounding_and_transposing(n_channels, plane):
    """16 bytes at a time and not; more than a square either way."""
    shape = 2, n_channels, *plane
    values = hard_to_round(math.prod(shape)).reshape(shape)
    problem = problem_of(shape, (4, n_channels, 1, 1), 1, 0, 1, 1, False)
    x = torch.from_numpy(values).to(PLACE)
    gather, weight = halo_plan.forward_of(problem), torch.ones((4, n_channels, 1, 1), device=PLACE)
    plan = warpgroup_plan.Plan(SMALL, 0, math.ceil(n_channels / 32), 0)
    found, _ = warpgroup_plan.laid_out(gather, plan, problem, x, weight)
    expected = np.ascontiguousarray(to_tf32(values).transpose(0, 2, 3, 1)).ravel()
    assert_same_bits(found, expected)


@on_hopper
@pytest.mark.parametrize("dtype, last, flipped", [
    (FLOAT, True, False), (FLOAT, False, True), (HALF, False, False), (HALF, True, True),
])  # fmt: skip
def test_weights_in_their_order(dtype, last, flipped):
    """tiles[chunk, tap, line, k], of each sixteen columns first the even ones; zeros beyond."""
    width, size = 16 // dtype.itemsize, 128 // dtype.itemsize
    K, C = (3 * width, 9 * width) if not flipped else (9 * width, 3 * width)
    x, weight, _ = case((1, C, 3, 3), (K, C, 1, 2), dtype, LAYOUTS[last], False)
    problem = problem_of(x.shape, weight.shape, 1, 0, 1, 1, last)
    gather = halo_plan.dx_of(problem) if flipped else halo_plan.forward_of(problem)
    plan = warpgroup_plan.Plan(SMALL, 0, 2, 0)
    _, found = warpgroup_plan.laid_out(gather, plan, problem, x, weight)
    values = seen(weight).numpy()[:, :, 0]  # filter, channel, tap
    values = values.transpose(1, 0, 2)[..., ::-1] if flipped else values
    every = np.zeros((64, 2 * size, 2))
    every[: 3 * width, : 9 * width] = values
    line = np.arange(64).reshape(4, 8, 2).transpose(0, 2, 1).ravel()
    expected = every[line].reshape(64, 2, size, 2).transpose(1, 3, 0, 2)
    assert np.array_equal(double(found), expected.ravel())
