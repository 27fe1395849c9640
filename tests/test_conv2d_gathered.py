"""`conv2d.gather`: any convolution without groups by Hopper's tensor cores."""

import collections
import contextlib
import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tensors import double
from test_conv2d import LAYOUTS, case
from test_conv2d_arranging import on_hopper, seen
from test_warpgroup import simulated_only
from turns import as_twin

from course_lib import cuda, reference, simulator
from course_lib.kernels import conv2d
from course_lib.kernels.blocks.mma import warpgroup
from course_lib.kernels.conv2d import gather, gather_dweight, gather_plan
from course_lib.kernels.conv2d.gather import Shape
from course_lib.kernels.conv2d.problem import problem_of
from course_lib.kernels.operation import Refusal
from course_lib.runtime.host.launch import Chip, recorded
from course_lib.runtime.intrinsics.warpgroup import multiply_tiles

WAY = "tensor_core/gather"
HALF, BRAIN, FLOAT = torch.float16, torch.bfloat16, torch.float32
SMALL, WIDE = Shape(64, 32, 3, 2), Shape(128, 64, 4, 1)
H200 = Chip((9, 0), 227 << 10, 132, 50 << 20, "H200")


@contextlib.contextmanager
def tiles(shape=SMALL, n_splits=1):
    """All passes by this shape, and their terms in so many parts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gather_plan, "SHAPES", (shape,))
        patch.setattr(gather_plan, "SPLIT_SHAPES", (shape,))
        patch.setattr(gather_plan, "DWEIGHT_SHAPES", (shape._replace(n=64),))
        patch.setattr(gather_plan, "SPLITS", (n_splits,))
        patch.setattr(gather_plan, "LEAST_STEPS", 0)
        gather_plan.planned.cache_clear()
        yield
    gather_plan.planned.cache_clear()


def assert_close(found, truth, sizes):
    """Rounded once, from sums whose error goes with the sizes of what was added up."""
    limit = 1e-6 * sizes + torch.finfo(found.dtype).eps / 2 * abs(truth) + 1e-7
    assert (abs(double(found) - truth) <= limit).all()


def check(x, weight, bias, precision="tf32", with_dweight=True, **options):
    """All passes, against float64."""
    as_seen = seen if precision == "tf32" else lambda x: x.double().cpu()
    arguments = [as_seen(x).numpy(), as_seen(weight).numpy()]
    arguments.append(None if bias is None else double(bias))
    given = options | dict(variant=WAY, precision=precision)
    y = conv2d.forward(x, weight, bias, **given)
    sizes = [None if a is None else abs(a) for a in arguments]
    assert_close(y, reference.conv2d(*arguments, **options), reference.conv2d(*sizes, **options))
    dy = torch.randn_like(y)
    with_dweight = with_dweight and x.dtype != FLOAT  # which takes 16-bit numbers alone
    needs = dict(needs=(True, with_dweight, False))
    dx, dweight, _ = conv2d.backward(dy, x, weight, **needs, **given)
    dy, x, weight = as_seen(dy).numpy(), *arguments[:2]
    truths = [
        reference.conv2d_backward(*each, **options)
        for each in ((dy, x, weight), (abs(dy), abs(x), abs(weight)))
    ]
    for found, truth, sizes in zip((dx, dweight), *truths, strict=False):
        if found is not None:
            assert_close(found, truth, sizes)


@on_hopper
@pytest.mark.parametrize("dtype, last, x_shape, filters, options, shape, n_splits", [
    # Tiles across images; residues of strides, by axis; channels that are no whole vectors.
    (BRAIN, True, (3, 8, 7, 6), (40, 3, 3), dict(stride=2, padding=1), SMALL, 1),
    (HALF, False, (2, 5, 7, 6), (9, 3, 2), dict(stride=(2, 1), padding=(1, 0)), WIDE, 1),
    (BRAIN, True, (1, 3, 9, 8), (10, 5, 7), dict(stride=2, padding=3), SMALL, 2),
    # Strides and dilations with and without a common divisor: residues that no tap meets.
    (BRAIN, False, (2, 24, 6, 8), (8, 2, 2), dict(stride=4, dilation=(2, 3)), SMALL, 1),
    (HALF, True, (1, 16, 4, 4), (33, 3, 2), dict(stride=(3, 2), padding=2, dilation=2), SMALL, 3),
    # A stride larger than the filter; one channel, one filter; planes of whole vectors.
    (BRAIN, False, (3, 1, 9, 8), (1, 2, 2), dict(stride=4, padding=1), SMALL, 1),
    (HALF, False, (2, 8, 4, 8), (8, 3, 3), dict(padding=1), SMALL, 2),
    (FLOAT, True, (2, 12, 5, 6), (10, 3, 3), dict(stride=2, padding=1), SMALL, 2),
    (FLOAT, False, (1, 7, 6, 5), (9, 2, 3), dict(stride=(1, 2), padding=1), SMALL, 1),
    # In three parts: sums of more than a few tiles, of whole vectors and not, by two blocks.
    (FLOAT, False, (2, 19, 5, 6), (9, 3, 3), dict(padding=1, precision="float32"), SMALL, 1),
    (FLOAT, True, (1, 8, 6, 5), (40, 3, 2), dict(stride=(2, 1), precision="float32"), WIDE, 2),
])  # fmt: skip
def test_every_pass(dtype, last, x_shape, filters, options, shape, n_splits):
    tensors = case(x_shape, (filters[0], x_shape[1], *filters[1:]), dtype, LAYOUTS[last])
    with tiles(shape, n_splits), recorded() as launches:
        check(*tensors, **options)
    names = [kernel.py_func.__name__ for kernel, *_ in launches]
    dweight = names.count("gather_dweight_kernel")
    assert names.count("gather_kernel") == 2 and dweight == (dtype != FLOAT)
    assert names.count("total_kernel") == 2 * (n_splits > 1)
    assert len(names) <= 2 * (2 + (n_splits > 1)) + 3


@on_hopper
@pytest.mark.parametrize("dtype, last", [(BRAIN, True), (HALF, False), (FLOAT, False)])
def test_a_tile_reads_the_channels_of_its_own_groups(dtype, last):
    """By a window, which begins in the middle of the channels, and ends with them."""
    x, weight, bias = case((1, 60, 2, 3), (72, 5, 1, 2), dtype, LAYOUTS[last])
    precision = "float32" if dtype == FLOAT else "tf32"
    with tiles(), recorded() as launches:
        check(x, weight, bias, precision=precision, with_dweight=False, groups=12)
    sizes = [args[-1] for kernel, _, _, args, _ in launches if "gather" in kernel.py_func.__name__]
    assert all(z.window < z.pitch and z.n_channels < z.pitch for z in sizes) and len(sizes) == 2


@on_hopper
@pytest.mark.parametrize("dtype, last", [(BRAIN, True), (HALF, False), (FLOAT, False)])
def test_groups_are_joined(dtype, last):
    """Weights that a group does not have are zeros; neither NaN nor infinity of them is made."""
    x, weight, bias = case((2, 10, 5, 6), (15, 2, 3, 3), dtype, LAYOUTS[last])
    precision = "float32" if dtype == FLOAT else "tf32"
    options = dict(stride=2, padding=1, groups=5)
    with tiles(), recorded() as launches:
        check(x, weight, bias, precision=precision, with_dweight=False, **options)
    names = {kernel.py_func.__name__ for kernel, *_ in launches}
    assert names <= {"pack_kernel", "gather_kernel"}


few, steps = st.integers(0, 2), st.integers(1, 3)


@on_hopper
@settings(max_examples=4, deadline=None)
@given(
    last=st.booleans(),
    sizes=st.tuples(st.integers(1, 2), st.integers(1, 20), st.integers(1, 7), st.integers(1, 7)),
    filters=st.tuples(st.integers(1, 35), st.integers(1, 3), st.integers(1, 3)),
    stride=st.tuples(steps, steps),
    padding=st.tuples(few, few),
    dilation=st.tuples(steps, steps),
    n_splits=st.sampled_from([1, 2]),
    seed=st.integers(0, 2**31),
)
def test_random_cases(last, sizes, filters, stride, padding, dilation, n_splits, seed):
    reach = [apart * (n - 1) for apart, n in zip(dilation, filters[1:], strict=True)]
    assume(all(n + 2 * p > r for n, p, r in zip(sizes[2:], padding, reach, strict=True)))
    torch.manual_seed(seed)
    tensors = case(sizes, (filters[0], sizes[1], *filters[1:]), BRAIN, LAYOUTS[last], seed % 2 == 0)
    with tiles(SMALL, n_splits):
        check(*tensors, stride=stride, padding=padding, dilation=dilation)


@on_hopper
@pytest.mark.parametrize("last", [False, True])
def test_a_result_and_inputs_that_begin_anywhere(last):
    """Nothing before or behind a result is written, and neither NaN nor infinity spreads."""
    x, weight, bias = case((1, 8, 4, 4), (8, 8, 3, 3), HALF, LAYOUTS[last])
    x[0, 3, 3, 3] = math.nan
    with tiles():
        expected = conv2d.forward(x, weight, bias, padding=1, variant=WAY)
        assert expected.isnan().sum() == 4 * 8
        room = torch.full((1 + 128 + 9,), 7.0, dtype=HALF, device=x.device)
        out = room[1:129].as_strided(expected.shape, expected.stride(), 1)
        moved = torch.cat([x.new_zeros(1), x.as_strided((128,), (1,))])[1:]
        moved = moved.as_strided(x.shape, x.stride(), 1)
        conv2d.forward(moved, weight, bias, padding=1, variant=WAY, out=out)
    assert torch.equal(out.nan_to_num(9), expected.nan_to_num(9))
    assert (room[:1] == 7).all() and (room[-9:] == 7).all()


@on_hopper
@simulated_only
def test_the_sanitizer_finds_nothing(monkeypatch):
    """Products come as late as they may: a GPU need not multiply before it is waited for."""
    tensors = case((1, 20, 4, 5), (12, 20, 2, 2), BRAIN)
    begun = collections.defaultdict(list)

    def wait(n_left):
        mine = begun[cuda.blockIdx.x, cuda.threadIdx.x]
        while len(mine) > n_left:
            multiply_tiles(*mine.pop(0))

    def begin(*arguments):
        begun[cuda.blockIdx.x, cuda.threadIdx.x].append(arguments)

    monkeypatch.setattr(warpgroup, "multiply_tiles", as_twin(begin))
    monkeypatch.setattr(
        warpgroup, "wait_for_earlier_products", as_twin(lambda: wait(1))
    )
    for module in (gather, gather_dweight, warpgroup):
        monkeypatch.setattr(
            module, "wait_for_products", as_twin(lambda acc, n: wait(0))
        )
    with tiles(SMALL, 2), simulator.sanitize() as report:
        check(*tensors, stride=(1, 2), padding=1)
    assert begun and not any(begun.values())
    assert not report, str(report)


def plan_of(x_shape, filters, stride=1, mode="half", groups=1, chip=H200, of="FORWARD"):
    weight_shape = filters[0], x_shape[1] // groups, *filters[1:]
    problem = problem_of(x_shape, weight_shape, stride, 1, 1, groups, True, mode)
    return getattr(gather_plan, f"{of}_PLAN")(problem, chip)


@on_hopper
def test_no_images_and_no_channels():
    for x_shape, C in (((0, 8, 5, 5), 8), ((2, 0, 5, 5), 0)):
        x, weight, bias = case(x_shape, (4, C, 3, 3), BRAIN)
        y = conv2d.forward(x, weight, bias, stride=2)
        assert torch.equal(y, bias[None, :, None, None].expand_as(y))
        dx, dweight, dbias = conv2d.backward(torch.ones_like(y), x, weight, stride=2)
        assert dx.shape == x.shape and (dweight == 0).all() and dweight.shape == weight.shape
        assert (dbias == 4 * len(x)).all()


def test_plans():
    """Small planes share their terms; no residue multiplies zeros; any number of taps."""
    small = plan_of((1, 512, 7, 7), (512, 3, 3))
    assert small.n_blocks > 32 and small.sizes.n_splits * small.sizes.length >= 512 * 9
    assert plan_of((64, 256, 56, 56), (256, 3, 3), 2).sizes.n_splits == 1
    assert plan_of((64, 64, 56, 56), (64, 3, 3), 2, of="DWEIGHT").n_blocks >= 100
    dx = plan_of((64, 256, 56, 56), (256, 3, 3), 2, of="DX").sizes
    assert dx.n_residues == 4 and dx.most_terms == 4 * 256
    assert plan_of((2, 8, 999, 999), (8, 40, 40)).shape


@pytest.mark.parametrize("says, options", [
    ("compute capability 9.0 alone", dict(chip=H200._replace(capability=(10, 0)))),
    ("takes 16-bit numbers, which wgmma", dict(mode="tf32", of="DWEIGHT")),
    ("takes dweight without groups", dict(groups=2, of="DWEIGHT")),
    ("takes up to 1,073,741,824 pixels", dict(x_shape=(1 << 12, 64, 1 << 10, 1 << 10))),
    ("has no tiles that fit", dict(chip=H200._replace(shared_bytes=48 << 10))),
])  # fmt: skip
def test_what_it_refuses(says, options):
    found = plan_of(**dict(x_shape=(1, 8, 9, 9), filters=(8, 3, 3)) | options)
    assert isinstance(found, Refusal) and says in found.reason
