"""The rung `upsample2x` of transposed convolution, against float64."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensors import PLACE, double
from test_conv2d import LAYOUTS, ROUNDING
from turns import in_turns

from course_lib import reference, simulator
from course_lib.kernels import conv_transpose2d
from course_lib.kernels.conv_transpose2d import upsample2x
from course_lib.runtime.host.launch import recorded

NCHW, NHWC = LAYOUTS
every_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=("nchw", "nhwc"))
pytestmark = pytest.mark.seed(6)


def case(N, C, H, W, K, dtype=torch.float32, layout=NCHW, biased=True):
    x, weight = (
        torch.randn(shape).to(PLACE, dtype, memory_format=layout)
        for shape in ((N, C, H, W), (C, K, 2, 2))
    )
    return x, weight, torch.randn(K).to(PLACE, dtype) if biased else None


def forward(x, weight, bias, **options):
    return conv_transpose2d.forward(x, weight, bias, stride=2, variant="upsample2x", **options)


def check(x, weight, bias, *, precision="float32", out=None):
    y = forward(x, weight, bias, precision=precision, out=out)
    arguments = [double(tensor) for tensor in (x, weight, bias)]
    expected = reference.conv_transpose2d(*arguments, stride=2)
    sizes = [None if array is None else np.abs(array) for array in arguments]
    terms = reference.conv_transpose2d(*sizes, stride=2)
    exact = 1e-6 if precision == "float32" else 2**-10
    limit = ROUNDING[y.dtype] * np.abs(expected) + exact * terms + 1e-7
    assert (np.abs(double(y) - expected) <= limit).all()
    return y


@settings(max_examples=5, deadline=None)
@given(
    N=st.integers(1, 2),
    C=st.integers(1, 5),
    size=st.sampled_from([(2, 4), (4, 2), (8, 1), (1, 8), (8, 3), (3, 8), (5, 8)]),
    K=st.integers(1, 5),
    biased=st.booleans(),
    dtype=st.sampled_from(list(ROUNDING)),
    layout=st.sampled_from(LAYOUTS),
    seed=st.integers(0, 2**31),
)
def test_random_cases(N, C, size, K, biased, dtype, layout, seed):
    torch.manual_seed(seed)
    if layout is NHWC:  # whole vectors of channels
        C, K = 8 * C, 8 * K
    if dtype is not torch.float32:
        K *= 2
    check(*case(N, C, *size, K, dtype, layout, biased))


KINDS = (
    (torch.float32, "float32"), (torch.float32, "tf32"), (torch.bfloat16, "float32"),
)  # fmt: skip


@pytest.mark.parametrize("dtype, precision, layout", in_turns(KINDS, LAYOUTS))
def test_several_tiles_each_way(dtype, precision, layout):
    """More pixels and columns than a block takes, and more channels than a step."""
    C = 40 if dtype == torch.float32 else 72
    check(*case(1, C, 9, 8, 24, dtype, layout), precision=precision)


@pytest.mark.parametrize("layout, dtype", [(NCHW, torch.bfloat16), (NHWC, torch.float32)])
def test_the_large_tile(layout, dtype, monkeypatch):
    monkeypatch.setattr(upsample2x, "LARGE_FROM", 1)
    check(*case(1, 16, 17, 8, 24, dtype, layout))


def gradients(x, weight, dy, **options):
    """(dx, dweight, None), the first checked, and the names of the kernels that were launched."""
    with recorded() as launches:
        found = conv_transpose2d.backward(
            dy, x, weight, stride=2, with_bias=False, variant="upsample2x", **options
        )
    given = [double(tensor) for tensor in (dy, x, weight)]
    expected, terms = (
        reference.conv_transpose2d_backward(*arrays, stride=2)[0]
        for arrays in (given, [np.abs(array) for array in given])
    )
    exact = 1e-6 if options.get("precision") != "tf32" else 2**-10
    limit = ROUNDING[x.dtype] * np.abs(expected) + exact * terms + 1e-7
    assert (np.abs(double(found[0]) - expected) <= limit).all()
    return found, [kernel.py_func.__name__ for kernel, *_ in launches]


@pytest.mark.parametrize("sizes, dtype", in_turns(
    [((1, 8, 3, 5, 8),), ((3, 136, 4, 6, 24),), ((2, 16, 9, 8, 40),)],
    [torch.bfloat16, torch.float16],
))  # fmt: skip
def test_channels_last_halves_by_warpgroups(sizes, dtype):
    """More pixels, channels of x and channels of y than a tile has, and fewer."""
    N, C, H, W, K = sizes
    x, weight, bias = case(N, C, H, W, K, dtype, NHWC)
    with recorded() as launches:
        y = check(x, weight, bias)
    assert [kernel.py_func.__name__ for kernel, *_ in launches] == ["upsample2x_warpgroup_kernel"]
    (dx, *_), names = gradients(x, weight, torch.randn_like(y), needs=(True, False, False))
    assert names == ["upsample2x_dx_kernel"] and dx.is_contiguous(memory_format=NHWC)
    room = torch.full((N, 2 * K, 2 * H, 2 * W), 7.0, device=PLACE, dtype=dtype)
    room = room.contiguous(memory_format=NHWC)
    forward(x, weight, bias, out=room[:, K:])  # its half of a concatenation
    assert torch.equal(room[:, K:], y) and (room[:, :K] == 7).all()


@pytest.mark.parametrize(
    "dtype, precision, sizes", in_turns(KINDS, [(2, 72, 5, 8, 16), (3, 5, 1, 16, 4)])
)
def test_dx_of_contiguous_images_from_packed_dy(sizes, dtype, precision):
    N, C, H, W, K = sizes
    x, weight, _ = case(*sizes, dtype)
    dy = torch.randn((N, K, 2 * H, 2 * W), device=PLACE).to(dtype)
    _, names = gradients(x, weight, dy, needs=(True, False, False), precision=precision)
    assert names[0] == "pack_kernel" and len(names) == 2  # one product for all images


def test_dx_of_what_neither_takes():
    """Widths that 16 bytes don't divide, and float32 channels-last: by the convolution."""
    for sizes, layout in (((1, 4, 4, 3, 4), NCHW), ((1, 8, 3, 4, 8), NHWC)):
        x, weight, _ = case(*sizes, layout=layout)
        N, _, H, W, K = sizes
        dy = torch.randn((N, K, 2 * H, 2 * W), device=PLACE)
        _, names = gradients(x, weight, dy, needs=(True, False, False))
        assert not {"tensor_core_kernel", "upsample2x_dx_kernel"} & set(names)


@pytest.mark.parametrize("layout, dtype", [
    (NCHW, torch.float32), (NHWC, torch.float32), (NCHW, torch.bfloat16),
])  # fmt: skip
def test_out_is_part_of_a_concatenation(layout, dtype):
    x, weight, bias = case(2, 8, 4, 4, 8, dtype, layout)
    expected = check(x, weight, bias)
    for first in (8, 3):  # on boundaries of 16 bytes, and off
        room = torch.full((2, 17, 8, 8), 7.0, device=PLACE, dtype=dtype)
        room = room.contiguous(memory_format=layout)
        out = room[:, first : first + 8]
        assert forward(x, weight, bias, out=out) is out and torch.equal(out, expected)
        assert (room[:, :first] == 7).all() and (room[:, first + 8 :] == 7).all()


@every_layout
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_y_is_written_by_sixteen_bytes(layout, dtype):
    """Whole sectors, each of them once; and x read by the copies that shared memory is for."""
    x, weight, bias = case(1, 8, 4, 16, 16, dtype, layout)
    with simulator.trace() as trace:
        y = forward(x, weight, bias)
    stores = [s for s in trace.sites if s.op == "store" and s.space == "global"]
    assert {site.size for site in stores} == {16}
    assert sum(site.sectors for site in stores) == y.numel() * y.itemsize // 32


def test_rows_that_vectors_do_not_fill():
    """Pixels of a thread's 16 bytes may lie in two rows of the image."""
    for W, H in ((1, 8), (3, 8), (5, 8)):
        check(*case(1, 4, H, W, 4))
    check(*case(1, 4, 8, 3, 4, torch.float16))


@every_layout
def test_sanitizer_finds_nothing(layout):
    x, weight, bias = case(1, 8, 3, 8, 8, torch.bfloat16, layout)
    with simulator.sanitize() as report:
        y = forward(x, weight, bias)
        conv_transpose2d.backward(y, x, weight, stride=2, needs=(True, False, False))
    assert not report, str(report)


def test_one_launch():
    with recorded() as launches:
        forward(*case(1, 8, 4, 4, 8))
    assert [kernel.py_func.__name__ for kernel, *_ in launches] == ["upsample2x_kernel"]


@pytest.mark.parametrize("shape, options, message", [
    ((4, 4, 3, 3), dict(stride=2), "filters of 2 × 2 with stride 2"),
    ((4, 4, 2, 2), dict(stride=1), "filters of 2 × 2 with stride 2"),
    ((4, 4, 2, 2), dict(stride=2, padding=1), "filters of 2 × 2 with stride 2"),
    ((4, 4, 2, 2), dict(stride=2, output_padding=1), "filters of 2 × 2 with stride 2"),
    ((4, 2, 2, 2), dict(stride=2, groups=2), "without padding, dilation and groups"),
])  # fmt: skip
def test_what_it_does_not_take_it_refuses(shape, options, message):
    x, weight = torch.randn(1, 4, 4, 4, device=PLACE), torch.randn(shape, device=PLACE)
    with pytest.raises(ValueError, match=f"'upsample2x' takes .*{message}.*use 'conv_gradient'"):
        conv_transpose2d.forward(x, weight, variant="upsample2x", **options)


def test_sizes_and_memory_that_vectors_need():
    x, weight, _ = case(1, 4, 3, 3, 4)
    with pytest.raises(ValueError, match="images whose pixels, and 4·K, are multiples of 4"):
        forward(x, weight, None)
    x, weight, _ = case(1, 6, 2, 4, 8, layout=NHWC)
    with pytest.raises(ValueError, match="channels-last images whose channels are multiples of 4"):
        forward(x, weight, None)
    x, weight, _ = case(1, 4, 2, 4, 4)
    moved = torch.empty(x.numel() + 1, device=PLACE)[1:].view(x.shape).copy_(x)
    with pytest.raises(ValueError, match="arrays that begin on boundaries of 16 bytes"):
        forward(moved, weight, None)
    y = conv_transpose2d.forward(moved, weight, stride=2)  # the default takes another
    torch.testing.assert_close(y, forward(x, weight, None), rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, precision", [
    (torch.float32, "float32"), (torch.float32, "tf32"), (torch.bfloat16, "float32"),
    (torch.float16, "float32"),
])  # fmt: skip
@every_layout
@pytest.mark.parametrize("sizes", [(2, 128, 64, 64, 64), (8, 64, 33, 40, 32), (1, 1024, 8, 8, 512)])
def test_sizes_of_networks(dtype, precision, layout, sizes):
    check(*case(*sizes, dtype, layout), precision=precision)
