"""Convolution where only a GPU can tell: accuracy at size, long arrays, graphs."""

import pytest
import torch
import torch.nn.functional as F
from tensors import never_waiting

from course_lib.kernels import conv2d

pytestmark = pytest.mark.gpu
SIZES = [(32, 64, 128, 64), (32, 128, 128, 56), (64, 256, 256, 28)]  # N, C, K, H
GENERAL = [name for name in conv2d.FORWARD if name not in ("depthwise", "few_channels")]


def tensors(N, C, K, H, dtype=torch.float32, last=False):
    layout = torch.channels_last if last else torch.contiguous_format
    torch.manual_seed(N + C)
    shapes = (N, C, H, H), (K, C, 3, 3), (N, K, H, H)
    return [torch.randn(shape, device="cuda").to(dtype, memory_format=layout) for shape in shapes]


EPS = torch.finfo(torch.float32).eps


def passes(x, weight, dy):
    """By PyTorch."""
    y = F.conv2d(x, weight, padding=1)
    options = [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False]
    return [y, *torch.ops.aten.convolution_backward(dy, x, weight, None, *options)[:2]]


def errors(found, exact):
    return [((a.double() - b).abs().max() / b.abs().max()).item() for a, b in zip(found, exact)]  # noqa: B905


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("variant", ["implicit_gemm", "tensor_core"])
def test_float32_is_as_exact_as_that_of_cudnn(size, variant):
    x, weight, dy = tensors(*size)
    exact = passes(x.double(), weight.double(), dy.double())
    with torch.backends.cudnn.flags(enabled=True, benchmark=True, allow_tf32=False):
        theirs = errors(passes(x, weight, dy), exact)
    y = conv2d.forward(x, weight, padding=1, variant=variant)
    gradients = conv2d.backward(dy, x, weight, padding=1, with_bias=False, variant=variant)
    N, C, K, H = size
    terms = 9 * C, 9 * K, N * H * H  # of each sum of y, dx and dweight
    for ours, other, n in zip(errors([y, *gradients[:2]], exact), theirs, terms, strict=True):
        # implicit_gemm adds up all terms in one float32, whose error grows with their root.
        allowed = 4 * other if variant == "tensor_core" else EPS * n**0.5
        assert ours <= allowed


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dtype, last, precision, limit", [
    (torch.float32, False, "tf32", 2e-3), (torch.float32, True, "tf32", 2e-3),
    (torch.bfloat16, True, "float32", 8e-3), (torch.float16, True, "float32", 1e-3),
    (torch.bfloat16, False, "float32", 8e-3),
])  # fmt: skip
def test_fewer_digits(size, dtype, last, precision, limit):
    x, weight, dy = tensors(*size, dtype, last)
    exact = passes(x.double(), weight.double(), dy.double())
    options = dict(padding=1, precision=precision)
    y = conv2d.forward(x, weight, **options)
    gradients = conv2d.backward(dy, x, weight, with_bias=False, **options)
    assert max(errors([y, *gradients[:2]], exact)) < limit


@pytest.mark.parametrize("N", [1, 8, 32, 64])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("precision", ["float32", "tf32"])
def test_small_convolutions(N, last, precision):
    """The second layer of the Fashion-MNIST network, whose tiles are dealt out to clusters."""
    x, weight, dy = tensors(N, 64, 128, 13, last=last)
    weight = weight / 24
    bias, dy = (
        torch.randn(128, device="cuda"),
        dy[:, :, :11, :11].contiguous(
            memory_format=torch.channels_last if last else torch.contiguous_format
        ),
    )
    exact = [F.conv2d(x.double(), weight.double(), bias.double())]
    options = [128], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True] * 3
    backward = torch.ops.aten.convolution_backward
    exact += backward(dy.double(), x.double(), weight.double(), *options)
    for _ in range(3):  # launches that follow each other closely
        found = [conv2d.forward(x, weight, bias, precision=precision)]
        found += conv2d.backward(dy, x, weight, precision=precision)
    assert max(errors(found, exact)) < (2e-3 if precision == "tf32" else 2e-6)
    again = [conv2d.forward(x, weight, bias, precision=precision)]
    again += conv2d.backward(dy, x, weight, precision=precision)
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))


@pytest.mark.parametrize("variant", GENERAL)
@pytest.mark.parametrize("last", [False, True])
def test_more_than_two_to_the_31_elements(variant, last):
    layout = torch.channels_last if last else torch.contiguous_format
    x = torch.empty((33, 64, 1024, 1024), dtype=torch.bfloat16, device="cuda", memory_format=layout)
    x[:-1] = 0
    x[-1].normal_()
    weight = torch.randn(8, 64, 1, 1, device="cuda").bfloat16().contiguous(memory_format=layout)
    y = conv2d.forward(x, weight, variant=variant)
    expected = conv2d.forward(x[-1:].clone(memory_format=layout), weight, variant=variant)
    assert torch.equal(y[-1:], expected) and not y[:-1].any()
    dx, dweight, _ = conv2d.backward(y, x, weight, with_bias=False, variant=variant)
    single = conv2d.backward(
        expected, x[-1:].clone(memory_format=layout), weight, with_bias=False, variant=variant
    )
    assert torch.equal(dx[-1:], single[0]) and not dx[:-1].any()
    torch.testing.assert_close(dweight, single[1], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("variant", GENERAL)
def test_graphs_and_no_wait_for_the_gpu(variant):
    x, weight, dy = tensors(4, 32, 48, 12)

    def step():
        y = conv2d.forward(x, weight, padding=1, variant=variant)
        return [y, *conv2d.backward(dy, x, weight, padding=1, variant=variant)]

    expected = step()
    with never_waiting():
        step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for tensor in captured:
        tensor.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(captured, expected, strict=True))


def test_the_capability_that_is_missing_is_told():
    x, weight, _ = tensors(1, 8, 8, 4)
    if torch.cuda.get_device_capability() >= (8, 0):
        assert conv2d.forward(x, weight, variant="tensor_core").shape == (1, 8, 2, 2)
    else:
        with pytest.raises(ValueError, match="needs compute capability 8.0"):
            conv2d.forward(x, weight, variant="tensor_core")
