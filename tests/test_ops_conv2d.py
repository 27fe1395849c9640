"""Convolution as an operator: how its result lies, and its precision."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from contract.operators import quick
from tensors import PLACE, close, randn

from course_lib import ops

FORMATS = [torch.contiguous_format, torch.channels_last]
OPERATOR = torch.ops.course_lib.conv2d.default


@pytest.fixture(autouse=True)
def _quick():
    torch.manual_seed(5)
    with quick():  # what is tested here is the operator
        yield


def passes(function, tensors, **options):
    """The result and all gradients."""
    y = function(*tensors, **options)
    dy = torch.linspace(-1, 2, y.numel(), device=PLACE).reshape(y.shape)
    return [y, *torch.autograd.grad(y, tensors, dy)]


@pytest.mark.parametrize("C", [1, 3])
def test_the_result_lies_as_images_or_weights_do(C):
    """Of one channel, strides alone say how they lie."""
    for of_x, of_weight in itertools.product(FORMATS, FORMATS):
        x, weight = randn(2, C, 3, 4).to(memory_format=of_x), randn(2, C, 2, 2)
        tensors = [x.requires_grad_(), weight.to(memory_format=of_weight).requires_grad_()]
        found, expected = (passes(f, tensors, padding=1) for f in (ops.conv2d, F.conv2d))
        last = torch.channels_last in (of_x, of_weight)
        assert found[0].stride() == ((40, 1, 10, 2) if last else (40, 20, 5, 1))
        for ours, theirs in zip(found, expected, strict=True):
            assert ours.stride() == theirs.stride() or C == 1
            close(ours, theirs, scale=64)
        arguments = *tensors, None, [1, 1], [1, 1], [1, 1], 1
        checks = dict(test_utils="test_faketensor") if of_x is of_weight else {}  # else all
        torch.library.opcheck(OPERATOR, arguments, **checks)
        norm = torch.ones(2, device=PLACE), None, *[randn(2).abs() for _ in range(2)]
        assert ops.conv2d_batch_norm(*tensors, *norm, padding=1).stride() == found[0].stride()
        flipped = tensors[0], tensors[1].transpose(0, 1).contiguous(memory_format=of_weight)
        found, expected = (f(*flipped) for f in (ops.conv_transpose2d, F.conv_transpose2d))
        assert found.stride() == expected.stride() or C == 1
        close(found, expected, scale=64)


@pytest.mark.gpu
def test_precision_follows_pytorchs_switch():
    x, weight = randn(2, 64, 16, 16), randn(64, 64, 3, 3)
    exact = F.conv2d(x.double(), weight.double()).float()
    errors = []
    for allowed in (True, False):
        with torch.backends.cudnn.flags(allow_tf32=allowed):
            errors.append((ops.conv2d(x, weight) - exact).abs().max())
    assert errors[1] < 1e-4 and errors[1] <= errors[0]
