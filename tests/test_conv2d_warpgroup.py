"""Convolution by Hopper's tensor cores, and its plans: `conv2d.warpgroup` and `warpgroup_mixed`.

The first multiplies in TF32 or 16 bits, the second float32 numbers in two parts. What they have
arranged before: `test_conv2d_arranging`.
"""

import collections
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from test_conv2d import LAYOUTS, PLACE, case
from test_conv2d_arranging import on_hopper, seen
from test_conv2d_halo import CHIP, SIZES
from test_warpgroup import LIMIT, error, simulated_only
from turns import as_twin
from warpgroup_checks import (
    BRAIN,
    DEEP,
    FEW,
    FLOAT,
    HALF,
    KINDS,
    PAIR,
    PAIRED,
    SMALL,
    SPLIT,
    WIDE,
    Mixed,
    Whole,
    check_dx,
    check_forward,
    every_kind,
    find_dx,
    forward,
    tiles,
    true_dx,
)

from course_lib import SIMULATED, cuda, simulator
from course_lib.kernels.conv2d import halo_plan, warpgroup_plan
from course_lib.kernels.conv2d.problem import problem_of
from course_lib.runtime.host.launch import recorded
from course_lib.runtime.intrinsics.warpgroup import multiply_halves, multiply_tiles

# ---- forward and dx ---------------------------------------------------------------------------

#: dx is a forward pass of dy: the same kernel, and the simulator takes long. A GPU finds both,
#: where padding is not more than the filters reach, which ONLY_FORWARD says.
FORWARD, DX, ONLY_FORWARD = "forward", "dx", "only forward"


@on_hopper
@pytest.mark.parametrize("kind, shape, dtype, last, x_shape, filters, biased, options, passes", [
    # Two chunks of channels, of which the second is not full; tiles across images; three chunks.
    (Whole, SMALL, FLOAT, False, (3, 36, 3, 5), (12, 2, 2), True, dict(padding=1), FORWARD),
    (Whole, PAIR, BRAIN, True, (2, 72, 4, 7), (16, 2, 2), False,
     dict(padding=1, dilation=(1, 2)), FORWARD),
    (Whole, DEEP, HALF, True, (2, 136, 3, 5), (8, 2, 2), True, dict(padding=1), FORWARD),
    (Mixed, SMALL, FLOAT, False, (3, 36, 4, 5), (12, 2, 2), True, dict(padding=1), FORWARD),
    (Mixed, PAIRED, FLOAT, True, (2, 68, 3, 5), (16, 2, 2), False,
     dict(padding=1, dilation=(1, 2)), FORWARD),
    # Filters that are not square, padding by axis, and filters in several parts.
    (Whole, SMALL, HALF, False, (1, 8, 7, 3), (72, 3, 1), True, dict(padding=(2, 0)), FORWARD),
    (Whole, WIDE, FLOAT, True, (2, 8, 3, 5), (132, 1, 3), True, dict(padding=(0, 1)), FORWARD),
    (Whole, PAIR, BRAIN, True, (1, 8, 9, 9), (72, 3, 2), False, {}, DX),
    (Whole, SMALL, FLOAT, True, (2, 36, 4, 3), (72, 2, 3), False,
     dict(padding=(0, 1), dilation=(2, 1)), DX),
    (Mixed, SMALL, FLOAT, False, (1, 8, 7, 3), (72, 3, 1), True, dict(padding=(2, 0)), DX),
    (Mixed, WIDE, FLOAT, True, (2, 8, 3, 5), (132, 1, 4), True, dict(padding=(0, 1)), FORWARD),
    # One line; one column; two taps.
    (Whole, SMALL, BRAIN, True, (2, 8, 1, 41), (8, 1, 3), True, dict(padding=(0, 1)), FORWARD),
    (Whole, DEEP, FLOAT, False, (3, 4, 13, 1), (8, 5, 1), False, dict(padding=(2, 0)), DX),
    (Mixed, SMALL, FLOAT, True, (2, 8, 1, 41), (8, 1, 3), True, dict(padding=(0, 1)), DX),
    (Mixed, PAIRED, FLOAT, False, (3, 4, 13, 1), (8, 5, 1), False, dict(padding=(2, 0)), DX),
    (Mixed, FEW, FLOAT, False, (2, 36, 5, 6), (8, 1, 2), True, {}, FORWARD),
    # Padding and dilation as far as they go, and none.
    (Whole, DEEP, BRAIN, False, (1, 8, 6, 5), (16, 5, 2), True, dict(padding=(2, 1)), DX),
    (Whole, PAIR, FLOAT, False, (2, 8, 9, 7), (8, 3, 3), True, dict(padding=2, dilation=2),
     FORWARD),
    (Whole, WIDE, HALF, True, (1, 16, 9, 8), (64, 3, 2), True, dict(dilation=(2, 3)), DX),
    (Mixed, PAIRED, FLOAT, False, (1, 8, 9, 7), (8, 3, 2), True, dict(padding=2, dilation=2),
     FORWARD),
    (Mixed, SMALL, FLOAT, True, (1, 8, 9, 8), (16, 3, 2), True, dict(dilation=(2, 3)), DX),
    # Pixels of y that meet padding alone; dx goes another way.
    (Whole, SMALL, BRAIN, True, (1, 8, 3, 3), (8, 2, 2), True, dict(padding=2), ONLY_FORWARD),
    (Whole, PAIR, FLOAT, False, (2, 4, 5, 3), (8, 5, 1), True, dict(padding=1), ONLY_FORWARD),
    (Whole, SMALL, FLOAT, True, (2, 4, 3, 5), (8, 1, 3), True,
     dict(padding=(2, 0), dilation=(1, 2)), ONLY_FORWARD),
    # Any number of columns: filters forward, channels for dx.
    (Whole, SMALL, BRAIN, False, (1, 8, 5, 4), (1, 2, 2), True, {}, ONLY_FORWARD),
    (Whole, SMALL, BRAIN, True, (1, 8, 5, 4), (31, 2, 2), True, {}, ONLY_FORWARD),
    (Whole, SMALL, BRAIN, False, (1, 8, 5, 4), (65, 2, 2), True, {}, ONLY_FORWARD),
    (Whole, SMALL, FLOAT, True, (1, 1, 5, 4), (4, 2, 2), False, {}, "only dx"),
    (Whole, SMALL, FLOAT, False, (1, 31, 5, 4), (4, 2, 2), False, {}, "only dx"),
    (Whole, SMALL, FLOAT, True, (1, 65, 5, 4), (4, 2, 2), False, {}, "only dx"),
])  # fmt: skip
def test_forward_and_dx(kind, shape, dtype, last, x_shape, filters, biased, options, passes):
    weight_shape = filters[0], x_shape[1], *filters[1:]
    x, weight, bias = case(x_shape, weight_shape, dtype, LAYOUTS[last], biased)
    both = not SIMULATED and not passes.startswith("only")
    with tiles(kind, shape):
        if both or passes.endswith(FORWARD):
            check_forward(kind, shape, x, weight, bias, **options)
        if both or passes.endswith(DX):
            check_dx(kind, shape, x, weight, **options)


@on_hopper
@pytest.mark.parametrize("last", [False, True])
def test_sizes_that_differ(last):
    """Each image, channel and filter of another size: what is lost of a number is lost of that."""
    x, weight, _ = case((2, 36, 5, 4), (8, 36, 2, 2), FLOAT, LAYOUTS[last], False)
    x = x * 2.0 ** torch.randint(-30, 30, (2, 1, 1, 1)).to(x)
    weight = weight * 2.0 ** torch.randint(-30, 30, (8, 1, 1, 1)).to(x)
    with tiles(Mixed, SMALL):
        y = forward(Mixed, SMALL, x, weight, None).cpu()
    expected = F.conv2d(x.double().cpu(), weight.double().cpu())
    for found, wanted in zip(y.flatten(0, 1), expected.flatten(0, 1), strict=True):
        assert error(found, wanted) < 2 * SPLIT  # a dozen numbers vary


@on_hopper
@every_kind
def test_fewer_tiles_than_blocks_or_more(kind):
    """Four tiles, of two parts of the filters: the same bits by any number; inputs stay."""
    x, weight, bias = case((1, 8, 7, 6), (66, 8, 2, 2), layout=LAYOUTS[1])
    before = [tensor.clone() for tensor in (x, weight, bias)]
    gather = halo_plan.forward_of(problem_of(x.shape, weight.shape, 1, 0, 1, 1, True))
    assert warpgroup_plan.n_tiles_of(gather, SMALL) == 4
    kernel, results = kind.kernel(SMALL, FLOAT), []
    for n_blocks in ((3, 5) if kind is Whole else (1, 5)) if SIMULATED else (1, 3, 5):
        with tiles(kind, SMALL, n_blocks), recorded() as launches:
            results.append(check_forward(kind, SMALL, x, weight, bias))
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
    with tiles(Whole, SMALL):
        expected = check_forward(Whole, SMALL, x, weight, bias)
        for first in (1,) if SIMULATED else (1, 2):
            room = torch.full((first + 120 + 9,), 7.0, dtype=dtype, device=PLACE)
            out = room[first : first + 120].as_strided((2, 10, 3, 2), strides, first)
            out.fill_(math.nan)
            assert torch.equal(forward(Whole, SMALL, x, weight, bias, out=out), expected)
            assert (room[:first] == 7).all() and (room[-9:] == 7).all()


small, one_or_two = st.integers(0, 2), st.integers(1, 2)


@on_hopper
@every_kind
@settings(max_examples=3, deadline=None)
@given(
    data=st.data(),
    last=st.booleans(),
    N=st.integers(1, 3),
    vectors=st.tuples(st.sampled_from([1, 2, 9]), st.sampled_from([1, 3, 9])),
    size=st.tuples(st.integers(1, 5), st.integers(1, 6)),
    taps=st.sampled_from([(2, 2), (3, 1), (1, 3), (3, 3), (2, 3), (1, 4), (4, 2)]),
    padding=st.tuples(small, small),
    dilation=st.tuples(one_or_two, one_or_two),
    biased=st.booleans(),
    n_blocks=st.integers(1, 4),
    seed=st.integers(0, 2**31),
)
def test_random_cases(
    kind, data, last, N, vectors, size, taps, padding, dilation, biased, n_blocks, seed
):
    shape, dtype = (data.draw(st.sampled_from(each)) for each in (kind.shapes, kind.dtypes))
    torch.manual_seed(seed)
    assume(kind is Mixed or taps[0] * taps[1] > shape.n_stages - 2)
    reach = [apart * (n - 1) for apart, n in zip(dilation, taps, strict=True)]
    assume(all(n + 2 * p > r for n, p, r in zip(size, padding, reach, strict=True)))
    C, K = (n * 16 // dtype.itemsize for n in vectors)
    x, weight, bias = case((N, C, *size), (K, C, *taps), dtype, LAYOUTS[last], biased)
    options = dict(padding=padding, dilation=dilation)
    with tiles(kind, shape, n_blocks):
        if seed % 2 or any(p > r for p, r in zip(padding, reach, strict=True)):
            check_forward(kind, shape, x, weight, bias, **options)
        else:
            check_dx(kind, shape, x, weight, **options)


@on_hopper
@pytest.mark.parametrize("kind, dtype, last, places", [
    # The end of an image, whose next one's padding follows; the beginning of a line.
    (Whole, FLOAT, False, {(0, 3, -1, -1): math.nan, (1, 7, 2, 0): -math.inf}),
    # The beginning of an image; the end of a line.
    (Whole, FLOAT, True, {(1, 0, 0, 0): math.nan, (1, 5, 2, -1): math.inf}),
    (Whole, BRAIN, True, {(0, 3, -1, -1): math.nan, (1, 7, 2, 0): -math.inf}),
    (Mixed, FLOAT, False, {(0, 3, -1, -1): math.nan}),
    (Mixed, FLOAT, True, {(1, 5, 2, -1): math.inf}),
])  # fmt: skip
def test_what_is_no_number_stays_where_it_is(kind, dtype, last, places):
    """Of `Mixed` an infinity has no rest: as in "mixed" elsewhere, what meets it may be NaN."""
    x, weight, bias = case((2, 8, 4, 4), (8, 8, 3, 3), dtype, LAYOUTS[last])
    dy = torch.randn_like(x)
    for place, value in places.items():
        x[place], dy[place] = value, value
    see = seen if kind is Whole else lambda tensor: tensor.double().cpu()
    with tiles(kind, SMALL):
        y = forward(kind, SMALL, x, weight, bias, padding=1).cpu()
        expected = F.conv2d(see(x), see(weight), bias.double().cpu(), padding=1)
        pairs = [(y, expected)]
        if kind is Whole:
            dx = find_dx(kind, SMALL, dy, x, weight, padding=1).cpu()
            expected = true_dx(see(dy), torch.zeros(x.shape).double(), see(weight), padding=1)
            pairs.append((dx, expected))
    for found, wanted in pairs:
        finite = wanted.isfinite()
        n_pixels = sum(4 if place[2:] in ((-1, -1), (0, 0)) else 6 for place in places)
        assert not finite.all() and (~finite).any(dim=1).sum() == n_pixels
        assert torch.equal(found.isfinite(), finite)
        if kind is Whole:
            assert torch.equal(found.isnan(), wanted.isnan())
            assert torch.equal(found[wanted.isinf()].double(), wanted[wanted.isinf()])
        limit = LIMIT[dtype] if kind is Whole else SPLIT
        assert error(found[finite], wanted[finite]) < limit


@on_hopper
@simulated_only
@pytest.mark.parametrize("kind, shape, dtype, x_shape, weight_shape, last, padding, late", [
    (Whole, SMALL, FLOAT, (2, 8, 5, 4), (36, 8, 2, 2), True, (1, 1), False),
    (Whole, PAIR, BRAIN, (2, 128, 4, 5), (12, 128, 2, 2), False, (1, 1), True),
    (Mixed, PAIRED, FLOAT, (2, 36, 5, 4), (8, 36, 2, 2), False, (1, 1), True),
    (Mixed, FEW, FLOAT, (2, 8, 5, 4), (36, 8, 1, 2), True, (0, 1), True),
])  # fmt: skip
def test_the_sanitizer_finds_nothing(
    monkeypatch, kind, shape, dtype, x_shape, weight_shape, last, padding, late
):
    """Several tiles of several chunks to each block: forward, and dx of channels-last images.

    Products `late` come as late as they may: the simulator multiplies at once; a GPU need not
    before it is waited for.
    """
    x, weight, bias = case(x_shape, weight_shape, dtype, LAYOUTS[last])
    begun = collections.defaultdict(list)

    def begin(product):
        def later(*args):
            begun[cuda.blockIdx.x, cuda.threadIdx.x].append((product, args))

        return as_twin(later)

    def wait(n_left):
        mine = begun[cuda.blockIdx.x, cuda.threadIdx.x]
        while len(mine) > n_left:
            product, args = mine.pop(0)
            product(*args)

    if late:
        monkeypatch.setattr(kind.module, "multiply_tiles", begin(multiply_tiles))
        waits = as_twin(lambda acc, n: wait(0))
        monkeypatch.setattr(kind.module, "wait_for_products", waits)
        if kind is Mixed:
            monkeypatch.setattr(kind.module, "multiply_halves", begin(multiply_halves))
        else:
            waits = as_twin(lambda: wait(1))
            monkeypatch.setattr(kind.module, "wait_for_earlier_products", waits)
    with tiles(kind, shape, 1), simulator.sanitize() as report:
        if last:
            check_dx(kind, shape, x, weight, padding=padding)
        else:
            check_forward(kind, shape, x, weight, bias, padding=padding)
    assert bool(begun) == late and not any(begun.values())
    assert not report, str(report)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("kind, shape, dtype", [
    (kind, shape, dtype) for kind in KINDS for shape in kind.plans.SHAPES for dtype in kind.dtypes
], ids=str)  # fmt: skip
@pytest.mark.parametrize("size", [(4, 64, 128, 30), (4, 128, 64, 30)], ids=str)
def test_the_real_tiles(size, kind, shape, dtype, last):
    N, C, K, H = size
    x, weight, bias = case((N, C, H, H), (K, C, 3, 3), dtype, LAYOUTS[last])
    dy = torch.randn(N, K, H, H).to(PLACE, dtype, memory_format=LAYOUTS[last])
    limit = LIMIT[dtype] if kind is Whole else SPLIT
    for n_blocks in (132, 5):
        with tiles(kind, shape, n_blocks):
            y = forward(kind, shape, x, weight, bias, padding=1)
            dx = find_dx(kind, shape, dy, x, weight, padding=1)
        expected = F.conv2d(x.double(), weight.double(), bias.double(), padding=1)
        assert error(y, expected) < limit
        assert error(dx, true_dx(dy.double(), x.double(), weight.double(), 1)) < limit


# ---- which convolutions take it, and with which tiles -------------------------------------------


def gathers(N, C, K, H, W=None, taps=(3, 3), padding=1, stride=1):
    """Those of forward and dx."""
    problem = problem_of((N, C, H, W or H), (K, C, *taps), stride, padding, 1, 1, True)
    return halo_plan.forward_of(problem), halo_plan.dx_of(problem)


def check_plan(kind, plan, gather, itemsize):
    grid_w = max(gather.W + gather.pad[1], gather.Q)
    last_tap = (gather.R - 1) * gather.dilation[0] * grid_w + (gather.S - 1) * gather.dilation[1]
    later = kind.check_plan(plan, gather, itemsize, last_tap)
    assert kind.module.shared_bytes(plan.shape, plan.n_positions) <= CHIP[1]
    assert plan.n_positions <= kind.module.MOST_POSITIONS
    latest = 1 + (plan.n_positions - 1) // plan.share
    assert latest + later <= gather.R * gather.S


@every_kind
@pytest.mark.parametrize("size", SIZES[:3], ids=str)
def test_plans(size, kind):
    for itemsize, mode in kind.modes:
        for gather in gathers(*size):
            assert kind.plans.planned(gather, itemsize, mode, CHIP)
            for shape in kind.plans.SHAPES:
                plan = kind.plan_of(gather, shape, itemsize)
                if plan or kind is Whole:
                    check_plan(kind, plan, gather, itemsize)


@pytest.mark.parametrize("kind, taps, shape", [
    (Whole, (2, 2), SMALL), (Whole, (3, 1), PAIR), (Whole, (1, 3), WIDE), (Whole, (2, 2), DEEP),
    (Whole, (5, 5), DEEP), (Mixed, (2, 2), SMALL), (Mixed, (3, 1), PAIRED), (Mixed, (1, 2), FEW),
])  # fmt: skip
def test_plans_of_the_tiles_tested_here(kind, taps, shape):
    for gather in gathers(2, 36, 72, 9, 7, taps, padding=0):
        check_plan(kind, kind.plan_of(gather, shape, 4), gather, 4)


@every_kind
def test_what_it_does_not_take(kind):
    size, planned = SIZES[0], kind.plans.planned
    for itemsize, mode in (4, "tf32"), (4, "split"), (4, "mixed"), (2, "narrow"):
        given = itemsize, mode, CHIP
        assert bool(planned(gathers(*size)[0], *given)) == ((itemsize, mode) in kind.modes)
    for itemsize, mode in kind.modes:
        assert planned(None, itemsize, mode, CHIP) is None
        others = [(capability, CHIP[1]) for capability in ((8, 0), (8, 9), (10, 0), (12, 0))]
        for chip in (*others, ((9, 0), 99 << 10)):
            assert planned(gathers(*size)[0], itemsize, mode, chip) is None
        strided, dx = gathers(*size, stride=2)
        assert planned(strided, itemsize, mode, CHIP) is None and dx is None
        # Too few taps to copy the next chunk meanwhile; no channels, and no whole vectors; a tile's
        # halo that fits no shared memory; and pixels counted beyond 32 bits.
        few = ((1, 1), (1, 2), (2, 1)) if kind is Mixed else ((1, 1), (1, 3), (3, 1))
        refused = [gathers(*size, taps=taps, padding=0) for taps in few]
        refused += [gathers(32, C, 128, 64)[:1] for C in (0, 66)]
        refused += [gathers(2, 64, 128, 64, 1000), gathers(1 << 20, 64, 128, 64)]
        for gather in (gather for both in refused for gather in both):
            assert planned(gather, itemsize, mode, CHIP) is None
