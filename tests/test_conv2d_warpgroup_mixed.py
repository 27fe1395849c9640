"""Convolution by Hopper's tensor cores with float32's accuracy: `conv2d.warpgroup_mixed`."""

import collections
import contextlib
import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from test_conv2d import LAYOUTS, PLACE, case
from test_conv2d_halo import CHIP, SIZES
from test_conv2d_warpgroup import (
    DX,
    FORWARD,
    gathers,
    like_y,
    on_hopper,
    to_tf32,
    true_dx,
    true_forward,
)
from test_warpgroup import error, simulated_only
from turns import in_turns

from course_lib import SIMULATED, cuda, simulator
from course_lib.kernels import conv2d
from course_lib.kernels.conv2d import (
    halo_plan,
    halo_small,
    warpgroup_mixed,
    warpgroup_mixed_plan,
    warpgroup_plan,
)
from course_lib.kernels.conv2d.problem import problem_of
from course_lib.kernels.conv2d.warpgroup_plan import Shape
from course_lib.runtime.host import arrays
from course_lib.runtime.host.launch import recorded
from course_lib.runtime.intrinsics.warpgroup import multiply_halves, multiply_tiles

#: Tiles that the simulator makes quickly.
SMALL, PAIR, WIDE = Shape(32, 64, 1, 3), Shape(40, 64, 2, 3), Shape(48, 128, 1, 4)
FEW = Shape(32, 64, 1, 2)  # so few stages that two taps are enough
WAY = dict(variant="tensor_core", precision="float32")
ROUNDED = 4e-7  # how far sums may be off from those of the same products: float32's rounding
SPLIT = 1.2e-6  # and these from the true ones, where many errors average out
#: The most that a product may be off, in its own size. A number and what TF32 lacks of it (2⁻¹¹)
#: are each off by 2⁻⁹ as bfloat16, in two products; what both lack is not multiplied; and rounding.
WORST, MANY = 4 * 2**-20 + 2**-22 + ROUNDED, 64


@contextlib.contextmanager
def tiles(shape, n_blocks=2):
    """All that the kernel can take is taken, with tiles of `shape`, by at most so many blocks.

    What is allocated meanwhile is NaN, so that all that is not written shows.
    """
    empty = arrays.empty

    def poisoned(*args, **options):
        return empty(*args, **options).fill_(math.nan)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(warpgroup_mixed_plan, "SHAPES", (shape,))
        patch.setattr(warpgroup_mixed_plan, "MULTIPROCESSORS", n_blocks)
        patch.setattr(halo_plan, "LONG", 1)
        for plans in (halo_small, halo_plan):  # which may be thought faster
            patch.setattr(plans, "planned", lambda *_: None)
        patch.setattr(arrays, "empty", poisoned)
        warpgroup_mixed_plan.planned.cache_clear()
        try:
            yield
        finally:
            warpgroup_mixed_plan.planned.cache_clear()


@contextlib.contextmanager
def launched(shape):
    """The kernel with tiles of `shape` must be launched, once."""
    with recorded() as launches:
        yield launches
    kernel = warpgroup_mixed_plan.kernel_for(shape)
    assert [kernel for kernel, *_ in launches].count(kernel) == 1


def forward(shape, x, weight, bias, out=None, **options):
    with launched(shape):
        return conv2d.forward(x, weight, bias, **WAY, out=out, **options)


def find_dx(shape, dy, x, weight, **options):
    with launched(shape):
        return conv2d.backward(dy, x, weight, needs=(True, False, False), **WAY, **options)[0]


def parts(tensor):
    """float64 of (big, half, rest): TF32, and the number and what TF32 lacks as bfloat16."""
    values = tensor.detach().cpu().contiguous()
    big = torch.from_numpy(to_tf32(values.numpy()))
    return big.double(), values.bfloat16().double(), (values - big).bfloat16().double()


def products(convolve, a, b):
    """The three products of two tensors' parts, added up."""
    (a_big, a_half, a_rest), (b_big, b_half, b_rest) = parts(a), parts(b)
    return convolve(a_big, b_big) + convolve(a_half, b_rest) + convolve(a_rest, b_half)


def check_close(found, split, expected, sizes):
    """`sizes` are the sums of the terms' absolute values."""
    assert error(found.cpu(), split) < ROUNDED
    assert ((found.cpu() - expected).abs() <= WORST * sizes).all()
    if (sizes > 0).sum() >= MANY:
        assert error(found.cpu(), expected) < SPLIT
    assert (found.cpu() - split).abs().max() <= 4 * ROUNDED * split.abs().max()


def check_forward(shape, x, weight, bias, **options):
    y = forward(shape, x, weight, bias, **options)
    add = 0 if bias is None else bias.double().cpu()[:, None, None]

    def convolve(a, b):
        return true_forward(a, b, None, **options)

    given = x.double().cpu(), weight.double().cpu()
    sizes = convolve(*map(abs, given)) + abs(add)
    check_close(y, products(convolve, x, weight) + add, convolve(*given) + add, sizes)
    return y


def check_dx(shape, dy, x, weight, **options):
    dx = find_dx(shape, dy, x, weight, **options)

    def convolve(a, b):
        return true_dx(a, x.double().cpu(), b, **options)

    given = dy.double().cpu(), weight.double().cpu()
    sizes = convolve(*map(abs, given))
    check_close(dx, products(convolve, dy, weight), convolve(*given), sizes)
    return dx


@on_hopper
@pytest.mark.parametrize("shape, last, x_shape, filters, biased, options, passes", [
    # Two chunks of channels, of which the second is not full; tiles across images.
    (SMALL, False, (3, 36, 4, 5), (12, 2, 2), True, dict(padding=1), FORWARD),
    (PAIR, True, (2, 68, 3, 5), (16, 2, 2), False, dict(padding=1, dilation=(1, 2)), FORWARD),
    # Filters that are not square, padding by axis, and filters in several parts.
    (SMALL, False, (1, 8, 7, 3), (72, 3, 1), True, dict(padding=(2, 0)), DX),
    (WIDE, True, (2, 8, 3, 5), (132, 2, 3), True, dict(padding=(0, 1)), FORWARD),
    # One line; one column; two taps.
    (SMALL, True, (2, 8, 1, 41), (8, 1, 3), True, dict(padding=(0, 1)), DX),
    (PAIR, False, (3, 4, 13, 1), (8, 5, 1), False, dict(padding=(2, 0)), DX),
    (FEW, False, (2, 36, 5, 6), (8, 1, 2), True, {}, FORWARD),
    # Padding and dilation as far as they go.
    (PAIR, False, (1, 8, 9, 7), (8, 3, 3), True, dict(padding=2, dilation=2), FORWARD),
    (SMALL, True, (1, 8, 9, 8), (16, 3, 3), True, dict(dilation=(2, 3)), DX),
])  # fmt: skip
def test_forward_and_dx(shape, last, x_shape, filters, biased, options, passes):
    weight_shape = filters[0], x_shape[1], *filters[1:]
    x, weight, bias = case(x_shape, weight_shape, torch.float32, LAYOUTS[last], biased)
    with tiles(shape):
        if "forward" in passes or not SIMULATED:
            check_forward(shape, x, weight, bias, **options)
        if "dx" in passes or not SIMULATED:
            check_dx(shape, like_y(x, weight, **options), x, weight, **options)


@on_hopper
@pytest.mark.parametrize("last", [False, True])
def test_sizes_that_differ(last):
    """Each image, channel and filter of another size: what is lost of a number is lost of that."""
    x, weight, _ = case((2, 36, 5, 4), (8, 36, 2, 2), torch.float32, LAYOUTS[last], False)
    x = x * 2.0 ** torch.randint(-30, 30, (2, 1, 1, 1)).to(x)
    weight = weight * 2.0 ** torch.randint(-30, 30, (8, 1, 1, 1)).to(x)
    with tiles(SMALL):
        y = forward(SMALL, x, weight, None).cpu()
    expected = true_forward(x.double().cpu(), weight.double().cpu(), None)
    for n in range(2):
        for k in range(8):
            assert error(y[n, k], expected[n, k]) < 2 * SPLIT  # a dozen numbers vary


@on_hopper
def test_fewer_tiles_than_blocks_or_more():
    """Four tiles, of two parts of the filters: the same bits by any number; inputs stay."""
    x, weight, bias = case((1, 8, 7, 6), (66, 8, 2, 2), layout=LAYOUTS[1])
    before = [tensor.clone() for tensor in (x, weight, bias)]
    gather = halo_plan.forward_of(problem_of(x.shape, weight.shape, 1, 0, 1, 1, True))
    assert warpgroup_plan.n_tiles_of(gather, SMALL) == 4
    kernel, results = warpgroup_mixed_plan.kernel_for(SMALL), []
    for n_blocks in (1, 5):
        with tiles(SMALL, n_blocks), recorded() as launches:
            results.append(check_forward(SMALL, x, weight, bias))
        assert [grid for found, grid, *_ in launches if found is kernel] == [min(n_blocks, 4)]
    assert all(torch.equal(y, results[0]) for y in results)
    assert all(map(torch.equal, (x, weight, bias), before))


small = st.integers(0, 2)


@on_hopper
@settings(max_examples=2, deadline=None)
@given(
    shape=st.sampled_from([SMALL, PAIR, FEW]),
    last=st.booleans(),
    N=st.integers(1, 3),
    vectors=st.tuples(st.sampled_from([1, 9]), st.sampled_from([1, 3, 9])),
    size=st.tuples(st.integers(1, 7), st.integers(1, 7)),
    taps=st.sampled_from([(2, 2), (3, 1), (1, 3), (3, 3), (2, 3), (1, 4)]),
    padding=st.tuples(small, small),
    dilation=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    biased=st.booleans(),
    n_blocks=st.integers(1, 4),
    seed=st.integers(0, 2**31),
)
def test_random_cases(
    shape, last, N, vectors, size, taps, padding, dilation, biased, n_blocks, seed
):
    torch.manual_seed(seed)
    reach = [apart * (n - 1) for apart, n in zip(dilation, taps, strict=True)]
    assume(all(n + 2 * p > r for n, p, r in zip(size, padding, reach, strict=True)))
    C, K = (n * 4 for n in vectors)
    x, weight, bias = case((N, C, *size), (K, C, *taps), torch.float32, LAYOUTS[last], biased)
    options = dict(padding=padding, dilation=dilation)
    with tiles(shape, n_blocks):
        if seed % 2 or any(p > r for p, r in zip(padding, reach, strict=True)):
            check_forward(shape, x, weight, bias, **options)
        else:
            check_dx(shape, like_y(x, weight, **options), x, weight, **options)


@on_hopper
@pytest.mark.parametrize("place, value, last", in_turns([
    ((0, 3, -1, -1), math.nan),  # the end of an image: the next one's padding follows
    ((1, 5, 2, -1), math.inf),  # the end of a line
], [False, True]))  # fmt: skip
def test_what_is_no_number_stays_where_it_is(place, value, last):
    """An infinity has no rest: as in "mixed" elsewhere, what meets it may be NaN."""
    x, weight, bias = case((3, 8, 4, 5), (8, 8, 3, 3), torch.float32, LAYOUTS[last])
    x[place] = value
    with tiles(SMALL):
        y = forward(SMALL, x, weight, bias, padding=1).cpu()
    arguments = (tensor.double().cpu() for tensor in (x, weight, bias))
    expected = true_forward(*arguments, padding=1)
    finite = expected.isfinite()
    assert not finite.all() and (~finite).any(dim=1).sum() <= 9  # pixels
    assert torch.equal(y.isfinite(), finite)
    assert error(y[finite], expected[finite]) < SPLIT


@on_hopper
@simulated_only
@pytest.mark.parametrize("shape, last, width", [(PAIR, False, 2), (FEW, True, 1)])
def test_the_sanitizer_finds_nothing(shape, last, width):
    """Several tiles of several chunks, to each block; products as late as they may come.

    Forward, and dx of channels-last images.
    """
    (C, K), padding = (8, 36) if last else (36, 8), (width - 1, 1)
    x, weight, bias = case((2, C, 5, 4), (K, C, width, 2), layout=LAYOUTS[last])
    begun = collections.defaultdict(list)

    def begin(product):
        def later(*args):
            begun[cuda.blockIdx.x, cuda.threadIdx.x].append((product, args))

        return later

    def wait(acc, n):
        mine = begun[cuda.blockIdx.x, cuda.threadIdx.x]
        while mine:
            product, args = mine.pop(0)
            product(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(warpgroup_mixed, "multiply_halves", begin(multiply_halves))
        patch.setattr(warpgroup_mixed, "multiply_tiles", begin(multiply_tiles))
        patch.setattr(warpgroup_mixed, "wait_for_products", wait)
        with tiles(shape, 1), simulator.sanitize() as report:
            if last:
                check_dx(shape, like_y(x, weight, padding=padding), x, weight, padding=padding)
            else:
                check_forward(shape, x, weight, bias, padding=padding)
    assert begun and not any(begun.values())
    assert not report, str(report)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("shape", warpgroup_mixed_plan.SHAPES, ids=str)
def test_the_real_tiles(shape, last):
    x, weight, bias = case((4, 128, 30, 30), (128, 128, 3, 3), torch.float32, LAYOUTS[last])
    dy = torch.randn(4, 128, 30, 30).to(PLACE, memory_format=LAYOUTS[last])
    for n_blocks in (132, 5):
        with tiles(shape, n_blocks):
            y = forward(shape, x, weight, bias, padding=1)
            dx = find_dx(shape, dy, x, weight, padding=1)
        a, b, c = x.double(), weight.double(), bias.double()
        assert error(y, true_forward(a, b, c, padding=1)) < SPLIT
        assert error(dx, true_dx(dy.double(), a, b, 1)) < SPLIT


# ---- which convolutions take it, and what it has arranged ---------------------------------------


@pytest.mark.parametrize("size", SIZES[:3], ids=str)
def test_plans(size):
    for gather in gathers(*size):
        assert warpgroup_mixed_plan.planned(gather, 4, "mixed", CHIP)
        for shape in warpgroup_mixed_plan.SHAPES:
            if plan := warpgroup_mixed_plan.plan_of(gather, shape, CHIP):
                check_plan(plan, gather)


@pytest.mark.parametrize("taps, shape", [((2, 2), SMALL), ((3, 1), PAIR), ((1, 2), FEW)])
def test_plans_of_the_tiles_tested_here(taps, shape):
    for gather in gathers(2, 36, 72, 9, 7, taps, padding=0):
        check_plan(warpgroup_mixed_plan.plan_of(gather, shape, CHIP), gather)


def check_plan(plan, gather):
    shape = plan.shape
    assert warpgroup_mixed.shared_bytes(shape, plan.n_positions) <= CHIP[1]
    assert plan.n_positions <= warpgroup_mixed.MOST_POSITIONS and plan.n_positions % 8 == 0
    grid_w = max(gather.W + gather.pad[1], gather.Q)
    last_tap = (gather.R - 1) * gather.dilation[0] * grid_w + (gather.S - 1) * gather.dilation[1]
    assert shape.m + last_tap <= plan.n_positions
    # Position j comes with tap 1 + j // share, and is there n_stages − 1 taps later.
    latest = 1 + (plan.n_positions - 1) // plan.share
    assert latest + shape.n_stages - 1 <= gather.R * gather.S
    # The sums on their way lie where the big parts, the halves and the rests do.
    assert 2 * 128 * plan.n_positions >= shape.n_threads // 32 * 16 * 36 * 4


def test_what_it_does_not_take():
    size, planned = SIZES[0], warpgroup_mixed_plan.planned
    gather = gathers(*size)[0]
    assert planned(gather, 4, "mixed", CHIP)
    assert planned(None, 4, "mixed", CHIP) is None
    for mode in ("split", "tf32", "narrow"):
        assert planned(gather, 4, mode, CHIP) is None
    for capability in ((8, 0), (8, 9), (10, 0), (12, 0)):
        assert planned(gather, 4, "mixed", (capability, CHIP[1])) is None
    assert planned(gather, 4, "mixed", ((9, 0), 99 << 10)) is None
    assert planned(gathers(*size, stride=2)[0], 4, "mixed", CHIP) is None
    for taps in ((1, 1), (1, 2), (2, 1)):  # too few to copy the next chunk meanwhile
        assert planned(gathers(*size, taps=taps, padding=0)[0], 4, "mixed", CHIP) is None
    for C in (0, 66):
        assert planned(gathers(32, C, 128, 64)[0], 4, "mixed", CHIP) is None
    for gather in gathers(2, 64, 128, 64, 1000):  # a tile's halo fits no shared memory
        assert planned(gather, 4, "mixed", CHIP) is None
    for gather in gathers(1 << 20, 64, 128, 64):  # pixels counted beyond 32 bits
        assert planned(gather, 4, "mixed", CHIP) is None


@on_hopper
@pytest.mark.parametrize("last, flipped", [(True, False), (False, True)])
def test_weights_in_two_parts(last, flipped):
    """[chunk, tap, part, big or small, line, k]; zeros beyond the last channel and column."""
    K, C = (68, 36) if not flipped else (36, 68)
    x, weight, _ = case((1, C, 3, 3), (K, C, 1, 2), torch.float32, LAYOUTS[last], False)
    problem = problem_of(x.shape, weight.shape, 1, 0, 1, 1, last)
    gather = halo_plan.dx_of(problem) if flipped else halo_plan.forward_of(problem)
    source = like_y(x, weight) if flipped else x
    plan = warpgroup_plan.Plan(SMALL, 0, 2, 0)
    _, found = warpgroup_mixed_plan.laid_out(gather, plan, problem, source, weight)
    words = found.cpu().numpy().view(np.uint32).reshape(2, 2, 2, 2, 64, 32)
    values = weight.cpu().contiguous().numpy()[:, :, 0]  # filter, channel, tap
    values = values.transpose(1, 0, 2)[..., ::-1] if flipped else values
    every = np.zeros((128, 64, 2), np.float32)
    every[:68, :36] = values
    line = np.arange(128).reshape(8, 8, 2).transpose(0, 2, 1).ravel()
    every = every[line].reshape(2, 64, 2, 32, 2).transpose(2, 4, 0, 1, 3)
    big, half, rest = (t.numpy() for t in parts(torch.from_numpy(every.copy())))
    assert np.array_equal(words[:, :, :, 0].view(np.float32), big)
    small_words = np.ascontiguousarray(words[:, :, :, 1]).view(np.uint16)
    seen = (small_words.astype(np.uint32) << 16).view(np.float32)
    assert np.array_equal(seen, np.concatenate([rest, half], axis=-1))
