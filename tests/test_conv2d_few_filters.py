"""The way `few_filters`: every pass, in both formats, and where plans take it."""

import math

import pytest
import torch
from tensors import PLACE, double
from test_conv2d import LAYOUTS, assert_close, case

from course_lib import reference, simulator
from course_lib.kernels import conv2d, conv_transpose2d
from course_lib.kernels.conv2d import few_filters_plan
from course_lib.kernels.conv2d.gather_taps import dx_sizes, forward_sizes
from course_lib.kernels.conv2d.ladders import FORWARD
from course_lib.kernels.conv2d.problem import problem_of
from course_lib.kernels.operation import Refusal
from course_lib.runtime.host.launch import Chip, recorded

FLOAT, HALF, BRAIN = torch.float32, torch.float16, torch.bfloat16
WAY = dict(variant="tensor_core/few_filters")
H200 = Chip((9, 0), 227 << 10, 132, 50 << 20, "H200")


def check(x, weight, bias, **options):
    """Forward, and dx where it has few filters, against float64."""
    arrays = double(x), double(weight), None if bias is None else double(bias)
    sizes = [None if array is None else abs(array) for array in arrays]
    y = conv2d.forward(x, weight, bias, **options, **WAY)
    assert_close(y, reference.conv2d(*arrays, **options), reference.conv2d(*sizes, **options))
    if weight.shape[1] <= few_filters_plan.SHAPES[-1][0]:
        dy = torch.randn_like(y)
        dx, _, _ = conv2d.backward(dy, x, weight, needs=(True, False, False), **options, **WAY)
        given = (double(dy), *arrays[:2]), (abs(double(dy)), *sizes[:2])
        truths = [reference.conv2d_backward(*each, **options)[0] for each in given]
        assert_close(dx, *truths)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype, x_shape, weight_shape, options", [
    (FLOAT, (3, 2, 5, 7), (1, 2, 3, 2), dict(stride=(2, 1), padding=(2, 1))),
    (BRAIN, (2, 6, 4, 5), (6, 2, 2, 3), dict(groups=3, dilation=2, padding=2)),
    (HALF, (1, 37, 2, 3), (5, 37, 1, 1), {}),  # in slices, a last one of fewer channels
    (FLOAT, (1, 70, 2, 3), (8, 70, 2, 2), dict(padding=1)),
    (FLOAT, (2, 24, 3, 3), (4, 12, 1, 1), dict(groups=2, stride=2)),
])  # fmt: skip
def test_every_pass(dtype, x_shape, weight_shape, options, layout):
    x, weight, bias = case(x_shape, weight_shape, dtype, layout)
    with simulator.sanitize() as report:
        check(x, weight, bias, **options)
    assert not report, str(report)
    check(x, weight.contiguous(), None, **options)
    check(x, weight.to(memory_format=torch.channels_last), None, **options)


def test_an_infinity_stays_in_its_group_and_tap():
    x, weight, _ = case((1, 4, 3, 3), (4, 2, 1, 1))
    x[0, 1, 1, 1] = math.inf
    y = conv2d.forward(x, weight, groups=2, **WAY)
    assert y.isfinite().flatten(2).all(2).tolist() == [[False, False, True, True]]
    assert (~y.isfinite()).sum() == 2


def test_it_refuses_many_filters():
    x, weight, _ = case((1, 2, 3, 3), (9, 2, 1, 1))
    with pytest.raises(ValueError, match="1 to 8 filters of a group, not 9"):
        conv2d.forward(x, weight, **WAY)


def test_a_transposed_convolution_to_one_channel_takes_it(monkeypatch):
    monkeypatch.setattr(few_filters_plan, "is_faster", lambda *_: True)
    x, weight, bias = case((2, 3, 4, 5), (3, 1, 3, 3))
    bias = torch.randn(1).to(PLACE)
    with recorded() as launches:
        y = conv_transpose2d.forward(x, weight, bias, stride=2)
    assert [kernel.py_func.__name__ for kernel, *_ in launches] == ["few_filters_kernel"]
    given = [double(each) for each in (x, weight, bias)]
    sizes = [abs(each) for each in given]
    truths = [reference.conv_transpose2d(*each, stride=2) for each in (given, sizes)]
    assert_close(y, *truths)


@pytest.mark.parametrize("sizes_of, x_shape, weight_shape, options, last, mode, faster", [
    # Measured: 7 to 12 times as fast as what else there is, and 4 to 15 times as slow.
    (dx_sizes, (32, 1, 195, 195), (2, 1, 3, 3), {}, True, "float32", True),
    (forward_sizes, (43, 160, 11, 11), (5, 32, 3, 3), dict(groups=5), False, "half", True),
    (forward_sizes, (11, 24, 80, 80), (3, 8, 3, 5), dict(groups=3), True, "tf32", True),
    (forward_sizes, (8, 280, 117, 117), (8, 280, 3, 3), {}, True, "half", False),
    (dx_sizes, (64, 3, 122, 122), (216, 3, 3, 3), dict(stride=2), True, "half", False),
    (forward_sizes, (40, 88, 143, 6), (88, 8, 3, 5), dict(groups=11), True, "half", False),
    (forward_sizes, (0, 8, 9, 9), (1, 8, 1, 1), {}, False, "half", False),
    (forward_sizes, (4, 0, 9, 9), (1, 0, 1, 1), {}, False, "half", False),
])  # fmt: skip
def test_where_it_goes_first(sizes_of, x_shape, weight_shape, options, last, mode, faster):
    asked = (options.get(name, default) for name, default in (
        ("stride", 1), ("padding", 0), ("dilation", 1), ("groups", 1),
    ))  # fmt: skip
    problem = problem_of(x_shape, weight_shape, *asked, last, mode)
    assert few_filters_plan.is_faster(sizes_of, problem, H200) == faster


def test_of_few_pixels_it_goes_before_few_channels():
    few, many = (problem_of((n, 3, 34, 34), (1, 3, 3, 3), 1, 0, 1, 1, False) for n in (4, 400))
    assert FORWARD.choose("auto", few, H200).variant == "tensor_core/few_filters"
    assert FORWARD.choose("auto", many, H200).variant == "few_channels"


def test_more_is_counted_in_32_bits_than_it_takes():
    problem = problem_of((2**15, 1, 200, 200), (1, 1, 1, 1), 1, 0, 1, 1, False)
    assert isinstance(few_filters_plan.FORWARD_PLAN(problem, H200), Refusal)
