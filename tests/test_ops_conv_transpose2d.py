"""Transposed convolution as operator and module: options, layouts and errors are PyTorch's."""

import pytest
import torch
import torch.nn.functional as F
from tensors import PLACE, choosing, close, never_waiting, randn

from course_lib import nn, ops
from course_lib.kernels import conv2d, conv_transpose2d

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
FORMATS = [torch.contiguous_format, torch.channels_last]
OPERATOR = torch.ops.course_lib.conv_transpose2d.default
BACKWARD = torch.ops.course_lib.conv_transpose2d_backward.default


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(5)


@pytest.fixture(autouse=True)
def _quick_to_simulate(request):
    """The rungs that simulate fastest: what is tested here is the operator."""
    if "default" in request.node.name:
        yield
        return
    with choosing("gather", conv_transpose2d), choosing("direct", conv2d):
        yield


def leaves(*shapes, dtype=torch.float32, memory_format=torch.contiguous_format):
    return [
        randn(shape, dtype=dtype).contiguous(
            memory_format=memory_format if len(shape) == 4 else torch.contiguous_format
        ).requires_grad_()
        for shape in shapes
    ]  # fmt: skip


def passes(function, tensors, **options):
    """The result and all gradients."""
    y = function(*tensors, **options)
    dy = torch.linspace(-1, 2, y.numel(), device=PLACE).reshape(y.shape).to(y)
    inputs = [tensor for tensor in tensors if tensor is not None]
    return [y, *torch.autograd.grad(y, inputs, dy)]


def compare(tensors, scale=64, **options):
    found, expected = (
        passes(f, tensors, **options) for f in (ops.conv_transpose2d, F.conv_transpose2d)
    )
    for ours, theirs in zip(found, expected, strict=True):
        close(ours, theirs, scale=scale)
    return found


@pytest.mark.parametrize("options", [
    {}, dict(stride=2, padding=1, output_padding=1),
    dict(stride=(1, 2), padding=(0, 2), output_padding=(1, 0), dilation=(2, 1)),
    dict(stride=[2], padding=[1]),
])  # fmt: skip
@pytest.mark.parametrize("biased", [True, False])
def test_options(options, biased):
    tensors = leaves((2, 3, 4, 5), (3, 4, 2, 3), (4,))
    compare(tensors if biased else [*tensors[:2], None], **options)


@pytest.mark.parametrize("memory_format", FORMATS, ids=("nchw", "nhwc"))
def test_groups_and_memory_formats(memory_format):
    for groups, K in ((1, 4), (2, 6), (4, 4)):
        shapes = (2, 4, 3, 3), (4, K // groups, 3, 3), (K,)
        found = compare(leaves(*shapes, memory_format=memory_format), groups=groups, padding=1)
        assert found[0].is_contiguous(memory_format=memory_format)
        assert found[1].is_contiguous(memory_format=memory_format)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(dtype):
    tensors = leaves((2, 3, 4, 3), (3, 4, 2, 2), (4,), dtype=dtype)
    found = passes(ops.conv_transpose2d, tensors, stride=2)
    in_float = [t.detach().float().requires_grad_() for t in tensors]
    expected = passes(F.conv_transpose2d, in_float, stride=2)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == dtype
        close(ours, theirs.to(dtype), scale=64 if dtype is torch.float32 else 4)


def test_one_image_gaps_in_memory_and_no_images():
    compare(leaves((3, 4, 3), (3, 2, 3, 3), (2,)))
    x, weight, bias = leaves((2, 8, 6, 3), (3, 2, 3, 3), (2,))
    compare([x[:, ::2, ::2].permute(0, 3, 1, 2), weight, bias])
    compare(leaves((0, 3, 4, 3), (3, 2, 3, 3), (2,)))


def test_the_default_rung():
    compare(leaves((1, 2, 3, 3), (2, 3, 2, 2), (3,)), stride=2)


def test_only_the_gradients_that_are_asked_for():
    x, weight, bias = leaves((1, 2, 3, 3), (2, 3, 3, 3), (3,))
    for wanted in (x, weight, bias):
        tensors = [t if t is wanted else t.detach() for t in (x, weight, bias)]
        found, expected = (
            torch.autograd.grad(f(*tensors).square().sum(), wanted)[0]
            for f in (ops.conv_transpose2d, F.conv_transpose2d)
        )
        close(found, expected, scale=256)


@pytest.mark.parametrize("shapes, options", [
    (((1, 2, 4, 4), (3, 4, 3, 3)), {}),
    (((1, 2, 4, 4), (2, 3, 3, 3), (2,)), {}),
    (((1, 2, 4, 4), (2, 3, 3, 3)), dict(stride=0)),
    (((1, 2, 4, 4), (2, 3, 3, 3)), dict(padding=-1)),
    (((1, 2, 4, 4), (2, 3, 3, 3)), dict(padding=4)),
    (((1, 2, 4, 4), (2, 3, 3, 3)), dict(output_padding=1)),
    (((1, 2, 4, 4), (2, 3, 3, 3)), dict(groups=0)),
    (((1, 3, 4, 4), (3, 3, 3, 3)), dict(groups=2)),
    (((1, 2, 4, 4), (2, 3, 3, 3)), dict(padding=(1, 1, 1))),
    (((1, 0, 4, 4), (0, 3, 3, 3)), {}),
    (((2, 4), (2, 3, 3, 3)), {}),
])  # fmt: skip
def test_what_pytorch_refuses_is_refused(shapes, options):
    for function in (ops.conv_transpose2d, F.conv_transpose2d):
        with pytest.raises((RuntimeError, TypeError, ValueError)):
            function(*(randn(shape) for shape in shapes), **options)


def test_integers_and_mixed_dtypes_are_refused():
    x, weight = randn(1, 2, 4, 4), randn(2, 3, 3, 3)
    with pytest.raises((NotImplementedError, RuntimeError), match="not implemented for"):
        ops.conv_transpose2d(x.long(), weight.long())
    with pytest.raises((TypeError, RuntimeError)):
        ops.conv_transpose2d(x.half(), weight)


def test_second_gradients_and_transforms_are_refused():
    x, weight = leaves((1, 2, 3, 3), (2, 3, 3, 3))
    (dx,) = torch.autograd.grad(ops.conv_transpose2d(x, weight).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="course_lib.conv_transpose2d has no second derivative"):
        dx.sum().backward()
    with pytest.raises(RuntimeError, match="can't be transformed by torch.func"):
        torch.func.grad(lambda x: ops.conv_transpose2d(x, weight.detach()).sum())(x.detach())


def test_vmap():
    x, weight, bias = randn(3, 2, 2, 3, 3), randn(2, 4, 3, 3), randn(4)
    for axes, given in (
        ((0, None, None), (x, weight, bias)),
        ((1, None, None), (x, weight, None)),
        ((0, 0, None), (x, torch.stack([weight, 2 * weight, -weight]), bias)),
    ):
        functions = ops.conv_transpose2d, F.conv_transpose2d
        close(*(torch.vmap(f, axes)(*given) for f in functions), scale=64)


@pytest.mark.parametrize("dtype, memory_format", [
    (torch.float32, FORMATS[0]), (torch.bfloat16, FORMATS[1]),
])  # fmt: skip
def test_opcheck(dtype, memory_format):
    shapes = (2, 2, 3, 3), (2, 3, 3, 3), (3,)
    x, weight, bias = leaves(*shapes, dtype=dtype, memory_format=memory_format)
    options = [1, 2], [1, 0], [0, 1], 1, [1, 1]
    torch.library.opcheck(OPERATOR, (x, weight, bias, *options))
    x, weight = x.detach(), weight.detach()
    dy = torch.ones_like(OPERATOR(x, weight, None, *options))
    for needs in ([True, True, True], [False, True, False]):
        torch.library.opcheck(BACKWARD, (dy, x, weight, *options, needs))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_without_a_graph_break(dynamic):
    def network(x, weight, bias):
        return ops.conv_transpose2d(x * 2, weight, bias, stride=2)

    torch.compiler.reset()
    compiled = torch.compile(network, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for shape in ((2, 2, 3, 4), (3, 2, 4, 3)):
        tensors = leaves(shape, (2, 3, 2, 2), (3,))
        for ours, theirs in zip(*(passes(f, tensors) for f in (compiled, network)), strict=True):
            close(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_autocast(dtype):
    tensors = leaves((2, 3, 3, 3), (3, 4, 2, 2), (4,))
    with torch.autocast(PLACE, dtype=dtype):
        found, expected = (
            f(*tensors, stride=2) for f in (ops.conv_transpose2d, F.conv_transpose2d)
        )
    close(found, expected)
    dy = torch.randn_like(found)
    for f, g in zip(*(torch.autograd.grad(y, tensors, dy) for y in (found, expected)), strict=True):
        assert f.dtype == torch.float32
        close(f.to(dtype), g.to(dtype), scale=4)


@pytest.mark.parametrize("options", [
    {}, dict(stride=2, padding=1, bias=False), dict(stride=2, output_padding=1, groups=2),
    dict(dilation=2, padding=(1, 2)),
])  # fmt: skip
def test_module_is_drop_in(options):
    ours, theirs = (m.ConvTranspose2d(4, 6, (3, 2), **options).to(PLACE) for m in (nn, torch.nn))
    assert repr(ours) == repr(theirs) and isinstance(ours, torch.nn.ConvTranspose2d)
    ours.load_state_dict(theirs.state_dict())
    for shape in ((2, 4, 3, 4), (4, 4, 3)):
        x = randn(shape)
        found, expected = (
            passes(lambda x, *_, m=m: m(x), [x.requires_grad_(), *m.parameters()])
            for m in (ours, theirs)
        )
        for a, b in zip(found, expected, strict=True):
            close(a, b, scale=64)


def test_module_gives_the_size_that_is_asked_for():
    ours, theirs = (m.ConvTranspose2d(2, 3, 3, stride=2, padding=1).to(PLACE)
                    for m in (nn, torch.nn))  # fmt: skip
    ours.load_state_dict(theirs.state_dict())
    x = randn(1, 2, 4, 3)
    for size in ((7, 5), (8, 6), (1, 3, 8, 5)):
        close(ours(x, output_size=size), theirs(x, output_size=size), scale=64)
    for module in (ours, theirs):
        with pytest.raises(ValueError, match="requested an output size"):
            module(x, output_size=(9, 6))
    with pytest.raises(ValueError, match='Only "zeros" padding mode'):
        nn.ConvTranspose2d(2, 3, 3, padding_mode="reflect")


@pytest.mark.gpu
def test_no_wait_for_the_gpu():
    tensors = leaves((8, 16, 14, 14), (16, 32, 2, 2), (32,))
    ops.conv_transpose2d(*tensors, stride=2).sum().backward()
    with never_waiting():
        ops.conv_transpose2d(*tensors, stride=2).sum().backward()
