"""Transposed convolution: every rung, forward and all gradients, against float64 and PyTorch."""

import math

import numpy as np
import pytest
import test_conv2d
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tensors import PLACE, double
from test_conv2d import LAYOUTS, ROUNDING, assert_close, laid_out_alike
from turns import in_turns

from course_lib import SIMULATED, cuda, reference, simulator
from course_lib.kernels import conv_transpose2d
from course_lib.kernels.conv_transpose2d.problem import problem_of
from course_lib.runtime.host.arrays import ArrayError
from course_lib.runtime.host.launch import recorded

truth, truth_backward = reference.conv_transpose2d, reference.conv_transpose2d_backward
NCHW, NHWC = LAYOUTS
# What makes whole tiles of results, however few there are, costs the simulator most.
CHEAP = ["scatter", "gather"]
every_variant = pytest.mark.parametrize("variant", [*CHEAP, "conv_gradient"])
pytestmark = pytest.mark.seed(3)


def case(x_shape, weight_shape, dtype=torch.float32, layout=NCHW, biased=True, groups=1):
    """(x, weight, bias or None) on the device under test."""
    x, weight = (
        torch.randn(shape).to(PLACE, dtype, memory_format=layout)
        for shape in (x_shape, weight_shape)
    )
    n_outputs = weight_shape[1] * groups
    return x, weight, torch.randn(n_outputs).to(PLACE, dtype) if biased else None


def check(variant, x, weight, bias, **options):
    """Run and check the forward pass and all three gradients; returns (y, dx, dweight, dbias)."""
    y = conv_transpose2d.forward(x, weight, bias, variant=variant, **options)
    arguments = [double(tensor) for tensor in (x, weight, bias)]
    sizes = [None if array is None else np.abs(array) for array in arguments]
    assert_close(y, truth(*arguments, **options), truth(*sizes, **options))
    assert y.dtype == x.dtype and laid_out_alike(y, x, weight)
    dy = torch.randn(y.shape).to(x)
    biased = bias is not None
    found = conv_transpose2d.backward(
        dy, x, weight, with_bias=biased, variant=variant, **options
    )
    expected = truth_backward(double(dy), *arguments[:2], **options)
    sizes = truth_backward(np.abs(double(dy)), *sizes[:2], **options)
    assert (found[2] is None) == (not biased)
    for gradient, *wanted in zip(found, expected, sizes, strict=True):
        if gradient is not None:
            assert gradient.dtype == x.dtype
            assert_close(gradient, *wanted)
    assert laid_out_alike(found[0], x, weight)
    return y, *found


up_to_two = st.integers(0, 2) | st.tuples(st.integers(0, 2), st.integers(0, 2))
RANDOM = test_conv2d.RANDOM | dict(
    size=st.tuples(st.integers(1, 5), st.integers(1, 4)), padding=up_to_two, more=up_to_two
)


def random_case(
    variant, N, per_group, groups, size, filter_size, stride, padding, more, dilation, biased,
    dtype, layout, seed,
):  # fmt: skip
    torch.manual_seed(seed)
    pairs = [(v, v) if isinstance(v, int) else v for v in (stride, padding, more, dilation)]
    for length, taps, step, pad, extra, apart in zip(size, filter_size, *pairs, strict=True):
        assume(extra < max(step, apart))
        assume((length - 1) * step + apart * (taps - 1) + extra + 1 > 2 * pad)
    C, K = (count * groups for count in per_group)
    tensors = case((N, C, *size), (C, K // groups, *filter_size), dtype, layout, biased, groups)
    options = dict(
        stride=stride, padding=padding, output_padding=more, dilation=dilation, groups=groups
    )
    if N:
        check(variant, *tensors, **options)
    else:
        y = conv_transpose2d.forward(*tensors, variant=variant, **options)
        found = conv_transpose2d.backward(y, *tensors[:2], variant=variant, **options)
        assert y.shape[1] == K and found[0].shape == tensors[0].shape
        assert not found[1].any() and not found[2].any()


@pytest.mark.parametrize("variant", CHEAP)
@settings(max_examples=8, deadline=None)
@given(**RANDOM)
def test_random_cases(variant, **arguments):
    random_case(variant, **arguments)


@settings(max_examples=3, deadline=None)
@given(**RANDOM)
def test_random_cases_in_tiles(**arguments):
    random_case("conv_gradient", **arguments)


CASES = [
    ((2, 3, 3, 4), (3, 4, 2, 2), dict(stride=2)),
    ((1, 4, 4, 3), (4, 3, 3, 2), dict(
        stride=(2, 3), padding=(1, 0), output_padding=(1, 2), dilation=(1, 2), groups=2)),
    ((2, 3, 3, 3), (3, 2, 2, 3), dict(padding=1, groups=3)),
    ((1, 2, 3, 3), (2, 3, 3, 3), dict(dilation=3, output_padding=2)),  # more than the stride
]  # fmt: skip


@pytest.mark.parametrize("x_shape, weight_shape, options", CASES)
def test_truth_is_that_of_pytorch(x_shape, weight_shape, options):
    x, weight = (torch.randn(s).double().requires_grad_() for s in (x_shape, weight_shape))
    n_outputs = weight_shape[1] * options.get("groups", 1)
    bias = torch.randn(n_outputs).double().requires_grad_()
    expected = F.conv_transpose2d(x, weight, bias, **options)
    found = truth(double(x), double(weight), double(bias), **options)
    np.testing.assert_allclose(found, double(expected), rtol=1e-12, atol=1e-12)
    dy = torch.randn(expected.shape).double()
    expected.backward(dy)
    gradients = truth_backward(double(dy), double(x), double(weight), **options)
    for gradient, tensor in zip(gradients, (x, weight, bias), strict=True):
        np.testing.assert_allclose(gradient, double(tensor.grad), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("variant", CHEAP)
def test_device_arrays_of_numba(variant):
    random = np.random.default_rng(0)
    x, weight = (random.normal(size=s).astype("f4") for s in ((1, 2, 3, 2), (2, 1, 2, 2)))
    given = map(cuda.to_device, (x, weight))
    y = conv_transpose2d.forward(*given, stride=2, variant=variant).copy_to_host()
    np.testing.assert_allclose(y, truth(x, weight, stride=2), atol=1e-6)


@pytest.mark.parametrize("x_shape, weight_shape, options, layout", in_turns(CASES, LAYOUTS))
@every_variant
def test_every_option(variant, layout, x_shape, weight_shape, options):
    groups = options.get("groups", 1)
    check(variant, *case(x_shape, weight_shape, layout=layout, groups=groups), **options)


@pytest.mark.parametrize("variant, layout", in_turns([*CHEAP, "conv_gradient"], LAYOUTS))
def test_out_is_part_of_a_concatenation(variant, layout):
    """y goes where it is wanted; what lies beside it, before and behind, stays as it is."""
    x, weight, bias = case((2, 2, 2, 3), (2, 3, 2, 2), layout=layout)
    expected = conv_transpose2d.forward(x, weight, bias, stride=2, variant=variant)
    room = torch.full((2, 8, 4, 6), 7.0, device=PLACE).contiguous(memory_format=layout)
    out = room[:, 4:7]
    y = conv_transpose2d.forward(x, weight, bias, stride=2, variant=variant, out=out)
    assert y is out
    torch.testing.assert_close(y, expected, rtol=1e-6, atol=1e-6)
    assert (room[:, :4] == 7).all() and (room[:, 7:] == 7).all()
    dy = torch.randn(room.shape, device=PLACE).contiguous(memory_format=layout)[:, 4:7]
    wanted = conv_transpose2d.backward(dy.clone(), x, weight, stride=2, variant=variant)
    found = conv_transpose2d.backward(dy, x, weight, stride=2, variant=variant)
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a, b)


@pytest.mark.skipif(not SIMULATED, reason="NumPy arrays are for the simulator")
@pytest.mark.parametrize("variant", CHEAP)
def test_numpy_arrays_with_gaps(variant):
    x, weight, bias = (double(t).astype(np.float32) for t in case((2, 2, 2, 3), (2, 3, 2, 2)))
    expected = conv_transpose2d.forward(x, weight, bias, stride=2, variant=variant)
    room = np.full((2, 5, 4, 12), 7, np.float32)
    out = room[:, 1:4, :, ::2]
    y = conv_transpose2d.forward(
        np.repeat(x, 2, -1)[..., ::2], weight, bias, stride=2, variant=variant, out=out
    )
    assert y is out and (room[..., 1::2] == 7).all() and (room[:, [0, 4]] == 7).all()
    np.testing.assert_allclose(y, expected, rtol=1e-6, atol=1e-6)
    with pytest.raises(ArrayError, match="negative strides"):
        conv_transpose2d.forward(
            x, weight, bias, stride=2, variant=variant, out=np.empty((2, 3, 4, 6), "f4")[:, ::-1]
        )


def test_a_weight_of_the_other_format():
    x, weight, bias = case((2, 4, 3, 2), (4, 2, 3, 3))
    check("gather", x.to(memory_format=NHWC), weight, bias)
    check("gather", x, weight.to(memory_format=NHWC), bias)


def test_only_what_is_needed():
    x, weight, bias = case((1, 2, 2, 2), (2, 3, 2, 2))
    dy = torch.randn(1, 3, 3, 3, device=PLACE)
    every = conv_transpose2d.backward(dy, x, weight, variant="gather")
    for number in range(8):
        needs = tuple(bool(number >> i & 1) for i in range(3))
        found = conv_transpose2d.backward(dy, x, weight, needs=needs, variant="gather")
        for needed, gradient, wanted in zip(needs, found, every, strict=True):
            assert torch.equal(gradient, wanted) if needed else gradient is None
    assert conv_transpose2d.backward(dy, x, weight, with_bias=False, variant="gather")[2] is None


def test_tensor_cores_make_nan_of_what_is_not_finite():
    """As infinity is split into infinity and NaN; and it stays where it is."""
    x, weight, bias = case((1, 2, 4, 4), (2, 3, 2, 2))
    x[0, 1, 0, 0] = math.nan
    x[0, 0, 3, 3] = math.inf
    y = conv_transpose2d.forward(x, weight, bias, stride=2, variant="conv_gradient")
    expected = F.conv_transpose2d(x, weight, bias, stride=2)
    expected = expected.where(expected.isfinite(), math.nan)
    torch.testing.assert_close(y, expected, equal_nan=True, rtol=1e-5, atol=1e-5)
    assert torch.isfinite(y).sum() == y.numel() - 24


@pytest.mark.parametrize("layout", LAYOUTS, ids=("nchw", "nhwc"))
def test_sanitizer_finds_nothing(layout):
    x, weight, bias = case((1, 2, 2, 3), (2, 2, 2, 3), layout=layout)
    options = dict(stride=(2, 1), padding=1, output_padding=(1, 0), variant="conv_gradient")
    with simulator.sanitize() as report:
        y = conv_transpose2d.forward(x, weight, bias, **options)
        if layout == NHWC:  # `test_conv2d` has the same kernels on the others
            conv_transpose2d.backward(y, x, weight, **options)
    assert not report, str(report)


def kernels_of(function):
    with recorded() as launches:
        function()
    return {kernel.py_func.__name__ for kernel, *_ in launches}


def test_the_rung_asked_for_is_the_one_that_runs():
    x, weight, _ = case((1, 2, 2, 2), (2, 3, 2, 2))
    for variant, kernel in (("scatter", "scatter_kernel"), ("gather", "gather_kernel")):
        names = kernels_of(lambda v=variant: conv_transpose2d.forward(x, weight, variant=v))
        assert kernel in names
    with recorded() as launches:
        conv_transpose2d.forward(x, weight, variant="conv_gradient")
    assert launches and not any("conv_transpose2d" in k.py_func.__module__ for k, *_ in launches)


def test_the_default():
    def chosen(x_shape, weight_shape, groups=1, capability=(9, 0)):
        problem = problem_of(x_shape, weight_shape, 2, 0, 0, 1, groups, False)
        operands = torch.empty(x_shape, device=PLACE), torch.empty(weight_shape, device=PLACE)
        return conv_transpose2d.default_variant(problem, operands, capability)

    assert chosen((2, 64, 8, 8), (64, 32, 2, 2)) == "upsample2x"
    assert chosen((2, 64, 8, 8), (64, 32, 2, 2), capability=(7, 5)) == "conv_gradient"
    assert chosen((2, 64, 7, 7), (64, 32, 2, 2)) == "conv_gradient"

    assert chosen((2, 64, 8, 8), (64, 32, 3, 3)) == "conv_gradient"
    assert chosen((2, 64, 8, 8), (64, 1, 3, 3), groups=64) == "gather"
    assert chosen((2, 64, 8, 8), (64, 1, 16, 16)) == "gather"
    tensors = case((1, 4, 2, 2), (4, 1, 2, 2), groups=4)
    check("auto", *tensors, groups=4, stride=2)
    check("auto", *case((1, 4, 2, 2), (4, 4, 2, 2)), stride=2)


@pytest.mark.parametrize("wrong, message", [
    (dict(variant="fast"), "unknown variant 'fast'; there are scatter, gather, conv_gradient, ups"),
    (dict(stride=0), "stride must be at least 1, not 0"),
    (dict(output_padding=1), "output_padding must be smaller than stride or dilation"),
    (dict(output_padding=-1), "output_padding must be at least 0, not -1"),
    (dict(padding=1.5), "padding must be an int or a pair of ints, not 1.5"),
    (dict(groups=0), "groups must be at least 1"),
    (dict(precision="fp8"), "unknown precision 'fp8'"),
])  # fmt: skip
def test_wrong_options_are_refused(wrong, message):
    x, weight, bias = case((1, 2, 2, 2), (2, 3, 2, 2))
    with pytest.raises(ValueError, match=message):
        conv_transpose2d.forward(x, weight, bias, **wrong)
    with pytest.raises(ValueError, match=message):
        conv_transpose2d.backward(torch.randn(1, 3, 3, 3, device=PLACE), x, weight, **wrong)


def test_arrays_that_do_not_go_together_are_refused():
    x, weight, bias = case((1, 4, 2, 2), (4, 3, 2, 2))
    forward, backward = conv_transpose2d.forward, conv_transpose2d.backward
    for arguments, options, message in (
        ((x[0], weight), {}, "x must have 4 dimensions"),
        ((x, weight[:3]), {}, r"weight must have shape \(4, K/groups, R, S\)"),
        ((x, weight[..., :0]), {}, "the last three from 1 on"),
        ((x[:, :0], weight[:0]), {}, "a channel and a pixel at least"),
        ((x, weight), dict(groups=3), "x has 4 channels, which groups=3 does not divide"),
        ((x, weight), dict(padding=2), "which is too small"),
        ((x, weight.half()), {}, "weight must be float32, not float16"),
        ((x.long(), weight.long()), {}, "x must be float32 or float16 or bfloat16, not int64"),
        ((x, weight, bias[:2]), {}, r"bias must have shape \(3,\), not \(2,\)"),
        ((x, weight), dict(out=torch.empty(1, 3, 3, 4)), r"out must have shape \(1, 3, 3, 3\)"),
        ((x, weight), dict(out=torch.empty(1, 3, 3, 3).half()), "out must be float32"),
    ):
        with pytest.raises(ArrayError, match=message):
            forward(*arguments, **options)
    with pytest.raises(ArrayError, match=r"dy must have shape \(1, 3, 3, 3\)"):
        backward(torch.randn(1, 3, 3, 2, device=PLACE), x, weight)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", list(ROUNDING), ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids=("nchw", "nhwc"))
@pytest.mark.parametrize("x_shape, weight_shape, options", [
    ((2, 128, 32, 32), (128, 64, 2, 2), dict(stride=2)),
    ((2, 64, 30, 33), (64, 72, 4, 4), dict(stride=2, padding=1)),
    ((3, 48, 17, 19), (48, 24, 3, 3), dict(stride=2, padding=1, output_padding=1, groups=2)),
    ((1, 32, 64, 64), (32, 3, 3, 3), dict(padding=1)),
])  # fmt: skip
def test_sizes_of_networks(dtype, layout, x_shape, weight_shape, options):
    groups = options.get("groups", 1)
    tensors = case(x_shape, weight_shape, dtype, layout, groups=groups)
    for variant in conv_transpose2d.FORWARD:
        if variant != "upsample2x" or options == dict(stride=2):
            check(variant, *tensors, **options)
