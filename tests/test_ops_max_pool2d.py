"""Max pooling as operator and module: options, shapes, gradients and errors are PyTorch's."""

import pytest
import torch
import torch.nn.functional as F
from tensors import PLACE, randn

from course_lib import nn, ops

OPERATOR = torch.ops.course_lib.max_pool2d.default
FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
OPTIONS = [
    dict(kernel_size=2),
    dict(kernel_size=3, stride=2, padding=1),
    dict(kernel_size=(2, 3), stride=(1, 2), padding=(0, 1), dilation=(2, 1), ceil_mode=True),
    dict(kernel_size=[2], stride=[]),
]
every_option = pytest.mark.parametrize("options", OPTIONS, ids=str)


def compare(x, **options):
    x = x.detach().requires_grad_()
    found = []
    for function in (ops.max_pool2d, F.max_pool2d):
        y, indices = function(x, return_indices=True, **options)
        alone = function(x, **options)
        assert torch.equal(alone, y)
        dy = torch.linspace(-1, 2, y.numel(), device=PLACE).reshape(y.shape).to(y.dtype)
        found.append(
            (y, indices, torch.autograd.grad(y, x, dy)[0], torch.autograd.grad(alone, x, dy)[0])
        )
    for ours, theirs in zip(*found, strict=True):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        torch.testing.assert_close(ours, theirs)
        if x.dim() == 4:
            for format in FORMATS.values():
                assert ours.is_contiguous(memory_format=format) or not theirs.is_contiguous(
                    memory_format=format
                )


@every_option
@pytest.mark.parametrize("layout", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_values_indices_and_gradients(options, layout, dtype):
    x = randn(2, 3, 7, 8).to(dtype).to(memory_format=FORMATS[layout])
    compare(x, **options)


@every_option
def test_relu_in_the_same_pass(options):
    x = randn(2, 3, 7, 8)
    x[0, 0, :3, :3] = 0.0
    x[1, 2, 4:, 4:] = torch.nan
    x.requires_grad_()
    found = []
    for pooled in (
        ops.max_pool2d(x, **options, relu=True), F.max_pool2d(x, **options).relu(),
        ops.max_pool2d(x, **options, relu=True, return_indices=True)[0],
    ):  # fmt: skip
        dy = torch.linspace(-1, 2, pooled.numel(), device=PLACE).reshape(pooled.shape)
        found.append((pooled, *torch.autograd.grad(pooled, x, dy)))
    for ours in (found[0], found[2]):
        torch.testing.assert_close(ours, found[1], rtol=0, atol=1e-6, equal_nan=True)
    y, indices = ops.max_pool2d(x, **options, relu=True, return_indices=True)
    assert torch.equal(indices == -1, y == 0)


def test_one_image_without_a_batch_and_other_layouts():
    compare(randn(3, 6, 8), kernel_size=2)
    x = randn(4, 3, 8, 10)
    for view in (x[:, :, ::2], x.transpose(2, 3), x[:1].expand(4, 3, 8, 10)):
        y = ops.max_pool2d(view, 2)
        assert torch.equal(y, F.max_pool2d(view, 2))


def test_gradients_that_are_expanded():
    x = randn(2, 3, 6, 6).to(memory_format=torch.channels_last).requires_grad_()
    (dx,) = torch.autograd.grad(ops.max_pool2d(x, 2).sum(), x)
    (expected,) = torch.autograd.grad(F.max_pool2d(x, 2).sum(), x)
    assert torch.equal(dx, expected) and dx.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("index_dtype", ["int64", "uint8"])
@pytest.mark.parametrize("shape", [(2, 3, 6, 7), (0, 3, 4, 4)])
@pytest.mark.parametrize("layout", FORMATS)
def test_opcheck(index_dtype, shape, layout):
    x = randn(*shape).to(memory_format=FORMATS[layout]).requires_grad_()
    arguments = (x, (3, 2), (2, 2), (1, 0), (1, 1), True, index_dtype, index_dtype == "uint8")
    torch.library.opcheck(OPERATOR, arguments)


def test_compiles_without_a_graph_break():
    def network(x):
        return ops.max_pool2d(x * 2, 3, 2, 1).sum()

    x = randn(2, 3, 7, 7).requires_grad_()
    compiled = torch.compile(network, fullgraph=True, backend="aot_eager", dynamic=True)
    for size in (7, 10):
        x = randn(2, 3, size, 9).requires_grad_()
        found, expected = (torch.autograd.grad(f(x), x)[0] for f in (compiled, network))
        assert torch.equal(found, expected)


def test_autocast_keeps_the_dtype():
    x = randn(1, 2, 4, 4)
    with torch.autocast(PLACE, torch.bfloat16):
        assert ops.max_pool2d(x, 2).dtype == torch.float32
        assert ops.max_pool2d(x.bfloat16(), 2).dtype == torch.bfloat16


def test_second_gradients_are_refused():
    x = randn(1, 1, 4, 4).requires_grad_()
    (dx,) = torch.autograd.grad(ops.max_pool2d(x, 2).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="course_lib.max_pool2d has no second derivative"):
        dx.sum().backward()


def test_integers_are_refused():
    with pytest.raises(NotImplementedError, match='"max_pool2d" not implemented for'):
        ops.max_pool2d(torch.ones(1, 1, 4, 4, device=PLACE).int(), 2)


@every_option
def test_the_module_is_drop_in(options):
    ours, theirs = nn.MaxPool2d(**options), torch.nn.MaxPool2d(**options)
    assert repr(ours) == repr(theirs) and ours.state_dict() == theirs.state_dict() == {}
    x = randn(2, 3, 7, 8)
    assert torch.equal(ours(x), theirs(x))
    with_indices = nn.MaxPool2d(2, return_indices=True)(x)
    expected = torch.nn.MaxPool2d(2, return_indices=True)(x)
    assert all(torch.equal(a, b) for a, b in zip(with_indices, expected, strict=True))


def test_flatten_is_a_view():
    x = randn(2, 3, 4, 5)
    assert repr(nn.Flatten()) == repr(torch.nn.Flatten())
    assert nn.Flatten()(x).shape == (2, 60) and nn.Flatten(0, 1)(x).shape == (6, 4, 5)
    assert nn.Flatten()(x).data_ptr() == x.data_ptr()


@pytest.mark.gpu
def test_in_a_captured_graph():
    x = torch.zeros(2, 3, 8, 8, device="cuda", requires_grad=True)
    dx = None
    for _ in range(2):
        (dx,) = torch.autograd.grad(ops.max_pool2d(x, 2).sum(), x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = ops.max_pool2d(x, 2)
        (dx,) = torch.autograd.grad(y.sum(), x)
    with torch.no_grad():
        x.copy_(torch.randn_like(x))
    graph.replay()
    assert torch.equal(y, F.max_pool2d(x, 2))
    assert torch.equal(dx, torch.autograd.grad(F.max_pool2d(x, 2).sum(), x)[0])
