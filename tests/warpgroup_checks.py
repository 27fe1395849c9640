"""The two convolutions by Hopper's tensor cores, as their tests see them: how each is right."""

import contextlib
import math

import pytest
import torch
import torch.nn.functional as F
from test_conv2d import LAYOUTS, assert_close
from test_conv2d_arranging import parts, seen
from test_conv2d_halo import CHIP
from test_warpgroup import error

from course_lib.kernels import conv2d
from course_lib.kernels.conv2d import (
    halo_plan,
    halo_small,
    warpgroup,
    warpgroup_mixed,
    warpgroup_mixed_plan,
    warpgroup_plan,
)
from course_lib.kernels.conv2d.warpgroup_plan import Shape
from course_lib.runtime.host import arrays
from course_lib.runtime.host.launch import recorded

#: Tiles that the simulator makes quickly. DEEP has as many stages as the real ones; FEW so few that
#: two taps are enough.
SMALL, PAIR, WIDE = Shape(32, 64, 1, 3), Shape(40, 64, 2, 4), Shape(48, 128, 1, 4)
DEEP, FEW, PAIRED = Shape(32, 64, 1, 5), Shape(32, 64, 1, 2), Shape(40, 64, 2, 3)
FLOAT, BRAIN, HALF = torch.float32, torch.bfloat16, torch.float16
ROUNDED = 4e-7  # how far sums may be off from those of the same products: float32's rounding
SPLIT = 1.2e-6  # and these from the true ones, where many errors average out
#: The most that a product may be off, in its own size. A number and what TF32 lacks of it (2⁻¹¹)
#: are each off by 2⁻⁹ as bfloat16, in two products; what both lack is not multiplied; and rounding.
WORST, MANY = 4 * 2**-20 + 2**-22 + ROUNDED, 64


class Whole:
    """`warpgroup`: numbers as tensor cores see them."""

    plans, module, precision, dtypes = warpgroup_plan, warpgroup, "tf32", (FLOAT, BRAIN, HALF)
    shapes, modes = (SMALL, PAIR, WIDE, DEEP), ((4, "tf32"), (2, "narrow"))

    @staticmethod
    def kernel(shape, dtype):
        return warpgroup_plan.kernel_for(shape, dtype.itemsize)

    @staticmethod
    def check(found, convolve, a, b, add):
        a, b = seen(a), seen(b)
        expected, sizes = convolve(a, b) + add, convolve(a.abs(), b.abs()) + abs(add)
        assert_close(found, expected.numpy(), sizes.numpy())

    @staticmethod
    def plan_of(gather, shape, itemsize):
        return warpgroup_plan.plan_of(gather, shape, itemsize, CHIP)

    @staticmethod
    def check_plan(plan, gather, itemsize, last_tap):
        shape = plan.shape
        assert warpgroup.shared_bytes(shape, plan.n_positions) < 227 << 10
        assert shape.m - 1 + last_tap == plan.n_positions - 1
        assert (plan.n_chunks - 1) * 128 < gather.n_channels * itemsize <= plan.n_chunks * 128
        # Position j of the next chunk comes with tap 1 + j // share, as do the weights of
        # n_stages − 2 taps later; and these must be of the next chunk's first tap, at the latest.
        return shape.n_stages - 2


class Mixed:
    """`warpgroup_mixed`: float32 numbers in parts."""

    plans, module, precision, dtypes = warpgroup_mixed_plan, warpgroup_mixed, "float32", (FLOAT,)
    shapes, modes = (SMALL, PAIRED, FEW), ((4, "mixed"),)

    @staticmethod
    def kernel(shape, dtype):
        return warpgroup_mixed_plan.kernel_for(shape)

    @staticmethod
    def check(found, convolve, a, b, add):
        (big, half, rest), (b_big, b_half, b_rest) = parts(a), parts(b)
        split = convolve(big, b_big) + convolve(half, b_rest) + convolve(rest, b_half) + add
        a, b, found = a.double().cpu(), b.double().cpu(), found.cpu()
        expected, sizes = convolve(a, b) + add, convolve(a.abs(), b.abs()) + abs(add)
        assert error(found, split) < ROUNDED
        assert ((found - expected).abs() <= WORST * sizes).all()
        if (sizes > 0).sum() >= MANY:
            assert error(found, expected) < SPLIT
        assert (found - split).abs().max() <= 4 * ROUNDED * split.abs().max()

    @staticmethod
    def plan_of(gather, shape, itemsize):
        return warpgroup_mixed_plan.plan_of(gather, shape, CHIP)

    @staticmethod
    def check_plan(plan, gather, itemsize, last_tap):
        shape = plan.shape
        assert plan.n_positions % 8 == 0 and shape.m + last_tap <= plan.n_positions
        # The sums on their way lie where the big parts, the halves and the rests do.
        assert 2 * 128 * plan.n_positions >= shape.n_threads // 32 * 16 * 36 * 4
        # Position j comes with tap 1 + j // share, and is there n_stages − 1 taps later.
        return shape.n_stages - 1


KINDS = Whole, Mixed
every_kind = pytest.mark.parametrize("kind", KINDS)


@contextlib.contextmanager
def tiles(kind, shape, n_blocks=2):
    """All that the kernel can take is taken, with tiles of `shape`, by at most so many blocks.

    What is allocated meanwhile is NaN, so that all that is not written shows.
    """
    empty = arrays.empty

    def poisoned(*args, **options):
        found = empty(*args, **options)
        return found.fill_(math.nan) if found.is_floating_point() else found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind.plans, "SHAPES", (shape,))
        patch.setattr(kind.plans, "MULTIPROCESSORS", n_blocks)
        patch.setattr(halo_plan, "LONG", 1)
        for plans in (halo_small, halo_plan):  # which may be thought faster
            patch.setattr(plans, "planned", lambda *_: None)
        patch.setattr(arrays, "empty", poisoned)
        kind.plans.planned.cache_clear()
        try:
            yield
        finally:
            kind.plans.planned.cache_clear()


@contextlib.contextmanager
def launched(kind, shape, dtype):
    """The kernel with tiles of `shape` must be launched, once."""
    with recorded() as launches:
        yield launches
    assert [kernel for kernel, *_ in launches].count(kind.kernel(shape, dtype)) == 1


def way_of(groups=1, **others):
    """The way that takes `warpgroup`, with and without groups."""
    return "tensor_core/block_diagonal" if groups > 1 else "tensor_core/implicit_gemm"


def forward(kind, shape, x, weight, bias, **options):
    way = dict(variant=way_of(**options), precision=kind.precision)
    with launched(kind, shape, x.dtype):
        return conv2d.forward(x, weight, bias, **way, **options)


def find_dx(kind, shape, dy, x, weight, **options):
    way = dict(variant=way_of(**options), precision=kind.precision, needs=(True, False, False))
    with launched(kind, shape, x.dtype):
        return conv2d.backward(dy, x, weight, **way, **options)[0]


def true_dx(dy, x, weight, padding=0, dilation=1):
    padding, dilation = ([v, v] if isinstance(v, int) else list(v) for v in (padding, dilation))
    numbers = [1, 1], padding, dilation, False, [0, 0], 1, [True, False, False]
    return torch.ops.aten.convolution_backward(dy, x, weight, None, *numbers)[0]


def check_forward(kind, shape, x, weight, bias, **options):
    y = forward(kind, shape, x, weight, bias, **options)
    add = torch.zeros(()) if bias is None else bias.double().cpu()[:, None, None]
    kind.check(y, lambda a, b: F.conv2d(a, b, None, **options), x, weight, add)
    return y


def check_dx(kind, shape, x, weight, **options):
    """Of a random dy, laid out as y would be."""
    like = F.conv2d(x.cpu().double(), weight.cpu().double(), **options).shape
    layout = LAYOUTS[not x.is_contiguous()]
    dy = torch.randn(like).to(x.device, x.dtype, memory_format=layout)
    dx = find_dx(kind, shape, dy, x, weight, **options)
    wide = x.double().cpu()
    kind.check(dx, lambda a, b: true_dx(a, wide, b, **options), dy, weight, torch.zeros(()))
