"""Convolution as operator and module: options, layouts, gradients and errors are PyTorch's."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from tensors import PLACE, choosing, close, never_waiting, randn

from course_lib import nn, ops
from course_lib.kernels import conv2d as kernels
from course_lib.kernels import conv_transpose2d

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
FORMATS = [torch.contiguous_format, torch.channels_last]
OPERATOR = torch.ops.course_lib.conv2d.default
BACKWARD = torch.ops.course_lib.conv2d_backward.default


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(5)


@pytest.fixture(autouse=True)
def _quick_to_simulate(request):
    """The rung that simulates fastest: what is tested here is the operator."""
    if "default" in request.node.name:
        yield
        return
    with choosing("direct", kernels), choosing("gather", conv_transpose2d):
        yield


def leaves(*shapes, dtype=torch.float32, memory_format=torch.contiguous_format):
    return [
        randn(shape, dtype=dtype).contiguous(
            memory_format=memory_format if len(shape) == 4 else torch.contiguous_format
        ).requires_grad_()
        for shape in shapes
    ]  # fmt: skip


def passes(function, tensors, dy=None, **options):
    """The result and all gradients."""
    y = function(*tensors, **options)
    if dy is None:
        dy = torch.linspace(-1, 2, y.numel(), device=PLACE).reshape(y.shape).to(y)
    inputs = [tensor for tensor in tensors if tensor is not None]
    return [y, *torch.autograd.grad(y, inputs, dy)]


def compare(tensors, scale=64, **options):
    found, expected = (passes(f, tensors, **options) for f in (ops.conv2d, F.conv2d))
    for ours, theirs in zip(found, expected, strict=True):
        close(ours, theirs, scale=scale)
    return found


@pytest.mark.parametrize("options", [
    {}, dict(stride=2, padding=1), dict(stride=(1, 2), padding=(0, 2), dilation=(2, 1)),
    dict(padding="valid"), dict(padding="same"), dict(padding="same", dilation=(1, 2)),
    dict(stride=[2], padding=[1]),
])  # fmt: skip
@pytest.mark.parametrize("biased", [True, False])
def test_options(options, biased):
    tensors = leaves((2, 3, 5, 6), (4, 3, 2, 3), (4,))
    compare(tensors if biased else [*tensors[:2], None], **options)


@pytest.mark.parametrize("memory_format", FORMATS, ids=("nchw", "nhwc"))
def test_groups_and_memory_formats(memory_format):
    for groups, K in ((1, 4), (2, 6), (4, 8)):
        shapes = (2, 4, 5, 5), (K, 4 // groups, 3, 3), (K,)
        found = compare(leaves(*shapes, memory_format=memory_format), groups=groups, padding=1)
        assert found[0].is_contiguous(memory_format=memory_format)
        assert found[1].is_contiguous(memory_format=memory_format)


@pytest.mark.parametrize("C", [1, 3])
def test_the_result_lies_as_images_or_weights_do(C):
    """Of one channel, strides alone say how they lie."""
    for of_x, of_weight in itertools.product(FORMATS, FORMATS):
        x, weight = randn(2, C, 5, 6).to(memory_format=of_x), randn(4, C, 3, 3)
        tensors = [x.requires_grad_(), weight.to(memory_format=of_weight).requires_grad_()]
        found, expected = (passes(f, tensors, padding=1) for f in (ops.conv2d, F.conv2d))
        last = torch.channels_last in (of_x, of_weight)
        assert found[0].stride() == ((120, 1, 24, 4) if last else (120, 30, 6, 1))
        for ours, theirs in zip(found, expected, strict=True):
            assert ours.stride() == theirs.stride() or C == 1
            close(ours, theirs, scale=64)
        torch.library.opcheck(OPERATOR, (*tensors, None, [1, 1], [1, 1], [1, 1], 1))
        norm = torch.ones(4, device=PLACE), None, *[randn(4).abs() for _ in range(2)]
        assert ops.conv2d_batch_norm(*tensors, *norm, padding=1).stride() == found[0].stride()
        flipped = tensors[0], tensors[1].transpose(0, 1).contiguous(memory_format=of_weight)
        found, expected = (f(*flipped) for f in (ops.conv_transpose2d, F.conv_transpose2d))
        assert found.stride() == expected.stride() or C == 1
        close(found, expected, scale=64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(dtype):
    tensors = leaves((2, 3, 5, 4), (4, 3, 3, 3), (4,), dtype=dtype)
    found = passes(ops.conv2d, tensors, padding=1)
    expected = passes(F.conv2d, [t.detach().float().requires_grad_() for t in tensors], padding=1)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == dtype
        scale = 64 if dtype is torch.float32 else 4
        close(ours, theirs.to(dtype), scale=scale)


def test_one_image_gaps_in_memory_and_no_images():
    compare(leaves((3, 5, 4), (2, 3, 3, 3), (2,)))
    x, weight, bias = leaves((2, 10, 8, 3), (2, 3, 3, 3), (2,))
    compare([x[:, ::2, ::2].permute(0, 3, 1, 2), weight, bias])
    compare(leaves((0, 3, 5, 4), (2, 3, 3, 3), (2,)))
    y = ops.conv2d(*leaves((1, 3, 5, 5), (2, 3, 3, 3)))
    (dx,) = torch.autograd.grad(y.sum(), [leaves((1,))[0]], allow_unused=True)
    assert dx is None


def test_the_default_rung():
    compare(leaves((1, 2, 5, 5), (3, 2, 3, 3), (3,)), padding=1)
    compare(leaves((1, 3, 5, 5), (6, 1, 3, 3), (6,)), groups=3)


def test_only_the_gradients_that_are_asked_for():
    x, weight, bias = leaves((1, 2, 4, 4), (3, 2, 3, 3), (3,))
    for wanted in (x, weight, bias):
        tensors = [t if t is wanted else t.detach() for t in (x, weight, bias)]
        found, expected = (
            torch.autograd.grad(f(*tensors).square().sum(), wanted)[0]
            for f in (ops.conv2d, F.conv2d)
        )
        close(found, expected, scale=256)


@pytest.mark.parametrize("shapes, options", [
    (((1, 2, 4, 4), (3, 4, 3, 3)), {}),
    (((1, 2, 4, 4), (3, 2, 5, 3)), {}),
    (((1, 2, 4, 4), (3, 2, 3, 3)), dict(stride=0)),
    (((1, 2, 4, 4), (3, 2, 3, 3)), dict(padding=-1)),
    (((1, 2, 4, 4), (3, 2, 3, 3)), dict(groups=0)),
    (((1, 2, 4, 4), (3, 2, 3, 3)), dict(padding="same", stride=2)),
    (((1, 2, 4, 4), (3, 2, 3, 3)), dict(padding="all")),
    (((1, 2, 4, 4), (3, 2, 3, 3)), dict(padding=(1, 1, 1))),
    (((2, 4), (3, 2, 3, 3)), {}),
])  # fmt: skip
def test_what_pytorch_refuses_is_refused(shapes, options):
    for function in (ops.conv2d, F.conv2d):
        with pytest.raises((RuntimeError, TypeError, ValueError)):
            function(*(randn(shape) for shape in shapes), **options)


def test_integers_and_mixed_dtypes_are_refused():
    x, weight = randn(1, 2, 4, 4), randn(3, 2, 3, 3)
    with pytest.raises((NotImplementedError, RuntimeError), match="not implemented for"):
        ops.conv2d(x.long(), weight.long())
    with pytest.raises((TypeError, RuntimeError)):
        ops.conv2d(x.half(), weight)


def test_second_gradients_and_transforms_are_refused():
    x, weight = leaves((1, 2, 4, 4), (3, 2, 3, 3))
    (dx,) = torch.autograd.grad(ops.conv2d(x, weight).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="course_lib.conv2d has no second derivative"):
        dx.sum().backward()
    with pytest.raises(RuntimeError, match="can't be transformed by torch.func"):
        torch.func.grad(lambda x: ops.conv2d(x, weight.detach()).sum())(x.detach())


def test_vmap():
    x, weight, bias = randn(3, 2, 2, 4, 4), randn(4, 2, 3, 3), randn(4)
    for axes, given in (
        ((0, None, None), (x, weight, bias)),
        ((1, None, None), (x, weight, None)),
        ((0, 0, None), (x, torch.stack([weight, 2 * weight, -weight]), bias)),
    ):
        close(*(torch.vmap(f, axes)(*given) for f in (ops.conv2d, F.conv2d)), scale=64)


@pytest.mark.parametrize("dtype, memory_format", [
    (torch.float32, FORMATS[0]), (torch.float32, FORMATS[1]), (torch.bfloat16, FORMATS[1]),
])  # fmt: skip
def test_opcheck(dtype, memory_format):
    shapes = (2, 2, 4, 4), (3, 2, 3, 3), (3,)
    x, weight, bias = leaves(*shapes, dtype=dtype, memory_format=memory_format)
    options = [1, 2], [1, 0], [1, 1], 1
    torch.library.opcheck(OPERATOR, (x, weight, bias, *options))
    x, weight = x.detach(), weight.detach()
    dy = torch.ones_like(OPERATOR(x, weight, None, *options))
    for needs in ([True, True, True], [False, True, False]):
        torch.library.opcheck(BACKWARD, (dy, x, weight, *options, needs))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_without_a_graph_break(dynamic):
    def network(x, weight, bias):
        return ops.conv2d(x * 2, weight, bias, padding=1)

    torch.compiler.reset()
    compiled = torch.compile(network, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for shape in ((2, 2, 4, 5), (3, 2, 5, 4)):
        tensors = leaves(shape, (3, 2, 3, 3), (3,))
        for ours, theirs in zip(*(passes(f, tensors) for f in (compiled, network)), strict=True):
            close(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_autocast(dtype):
    tensors = leaves((2, 3, 4, 4), (4, 3, 3, 3), (4,))
    with torch.autocast(PLACE, dtype=dtype):
        found, expected = (f(*tensors, padding=1) for f in (ops.conv2d, F.conv2d))
    close(found, expected)
    dy = torch.randn_like(found)
    for f, g in zip(*(torch.autograd.grad(y, tensors, dy) for y in (found, expected)), strict=True):
        assert f.dtype == torch.float32
        close(f.to(dtype), g.to(dtype), scale=4)


def test_inference_mode():
    tensors = [t.detach() for t in leaves((2, 3, 4, 4), (4, 3, 3, 3), (4,))]
    with torch.inference_mode():
        close(*(f(*tensors) for f in (ops.conv2d, F.conv2d)), scale=64)


@pytest.mark.parametrize("options", [
    {}, dict(stride=2, padding=1, bias=False), dict(padding="same", dilation=2),
    dict(padding="valid", groups=2), dict(padding=(1, 2), padding_mode="reflect"),
    dict(padding=1, padding_mode="circular"), dict(padding="same", padding_mode="replicate"),
])  # fmt: skip
def test_module_is_drop_in(options):
    ours, theirs = (m.Conv2d(4, 6, (3, 2), **options).to(PLACE) for m in (nn, torch.nn))
    assert repr(ours) == repr(theirs) and isinstance(ours, torch.nn.Conv2d)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    ours.load_state_dict(theirs.state_dict())
    for shape in ((2, 4, 6, 5), (4, 6, 5)):
        x = randn(shape)
        found, expected = (
            passes(lambda x, *_, m=m: m(x), [x.requires_grad_(), *m.parameters()])
            for m in (ours, theirs)
        )
        for a, b in zip(found, expected, strict=True):
            close(a, b, scale=64)


def test_module_starts_with_the_weights_of_pytorch():
    weights = []
    for module in (nn, torch.nn):
        torch.manual_seed(3)
        weights.append(module.Conv2d(3, 5, 3).state_dict())
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[1])


@pytest.mark.gpu
def test_precision_follows_pytorchs_switch():
    x, weight = randn(2, 64, 16, 16), randn(64, 64, 3, 3)
    exact = F.conv2d(x.double(), weight.double()).float()
    errors = []
    for allowed in (True, False):
        with torch.backends.cudnn.flags(allow_tf32=allowed):
            errors.append((ops.conv2d(x, weight) - exact).abs().max())
    assert errors[1] < 1e-4 and errors[1] <= errors[0]


@pytest.mark.gpu
def test_no_wait_for_the_gpu():
    tensors = leaves((8, 16, 14, 14), (32, 16, 3, 3), (32,))
    ops.conv2d(*tensors, padding=1).sum().backward()
    with never_waiting():
        ops.conv2d(*tensors, padding=1).sum().backward()
