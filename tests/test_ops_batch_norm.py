"""Batch normalisation as operator and module: values, statistics and gradients are PyTorch's."""

import pytest
import torch
import torch.nn.functional as F
from tensors import PLACE, randn

from course_lib import nn, ops

FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
every_format = pytest.mark.parametrize("layout", FORMATS)
SHAPES = [(4, 3, 5, 6), (2, 8, 3, 3), (6, 5), (3, 4, 7)]


def arguments(C, dtype=torch.float32):
    """running_mean, running_var, weight, bias."""
    return [randn(C).to(dtype), torch.rand(C, device=PLACE).add(0.5).to(dtype),
            *(randn(C).to(dtype) for _ in range(2))]  # fmt: skip


def outcome(function, x, given, **options):
    """Everything that a call and its backward pass find."""
    mean, var = (None if t is None else t.clone() for t in given[:2])
    leaves = [t if t is None else t.clone().requires_grad_() for t in (x, *given[2:])]
    y = function(leaves[0], mean, var, *leaves[1:], **options)
    dy = torch.linspace(-1, 2, y.numel(), device=PLACE).reshape(y.shape).to(y.dtype)
    gradients = torch.autograd.grad(y, [leaf for leaf in leaves if leaf is not None], dy)
    return [y, *gradients, *(t for t in (mean, var) if t is not None)]


def compare(x, given, **options):
    found = [outcome(f, x, given, **options) for f in (ops.batch_norm, F.batch_norm)]
    tolerance = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[x.dtype]
    for ours, theirs in zip(*found, strict=True):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        torch.testing.assert_close(ours.float(), theirs.float(), rtol=tolerance, atol=tolerance * 2)
    return found


@every_format
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_statistics_and_gradients(layout, training, shape):
    x = randn(*shape) * 2 + 1
    if len(shape) == 4:
        x = x.to(memory_format=FORMATS[layout])
    given = arguments(shape[1])
    ours, theirs = compare(x, given, training=training, momentum=0.3, eps=1e-3)
    if len(shape) == 4:
        assert ours[0].is_contiguous(memory_format=FORMATS[layout])
    compare(x, [*given[:2], None, None], training=training)
    if training:
        compare(x, [None, None, *given[2:]], training=training)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_16_bits_with_float32_parameters(training, dtype):
    compare(randn(4, 8, 5, 5).to(dtype), arguments(8), training=training)


@pytest.mark.parametrize("training", [False, True])
def test_fused_relu(training):
    x, given = randn(4, 8, 5, 5), arguments(8)
    fused = outcome(lambda *a, **k: ops.batch_norm(*a, **k, relu=True), x, given, training=training)
    apart = outcome(lambda *a, **k: F.relu(F.batch_norm(*a, **k)), x, given, training=training)
    for ours, theirs in zip(fused, apart, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=5e-5)


@pytest.mark.parametrize("name", ["batch_norm", "batch_norm_inference"])
@every_format
def test_opcheck(name, layout):
    x = randn(2, 8, 3, 3).to(memory_format=FORMATS[layout]).requires_grad_()
    mean, var, weight, bias = arguments(8)
    rest = (0.1, 1e-5, True) if name == "batch_norm" else (1e-5, False)
    given = (x, weight.requires_grad_(), bias.requires_grad_(), mean, var, *rest)
    torch.library.opcheck(getattr(torch.ops.course_lib, name).default, given)


def test_compiles_without_a_graph_break():
    modules = [nn.BatchNorm2d(4).to(PLACE) for _ in range(2)]
    compiled = torch.compile(modules[0], fullgraph=True, backend="aot_eager")
    x = randn(3, 4, 5, 5)
    for _ in range(2):
        outputs, gradients = [], []
        for module in (compiled, modules[1]):
            leaf = x.clone().requires_grad_()
            outputs.append(module(leaf))
            gradients.append(torch.autograd.grad(outputs[-1].square().sum(), leaf)[0])
        torch.testing.assert_close(*outputs)
        torch.testing.assert_close(*gradients)
    for ours, theirs in zip(modules[0].buffers(), modules[1].buffers(), strict=True):
        torch.testing.assert_close(ours, theirs)


MODULES = [
    {}, dict(momentum=None), dict(affine=False), dict(track_running_stats=False),
    dict(eps=0.1, momentum=0.5),
]  # fmt: skip


@pytest.mark.parametrize("options", MODULES, ids=str)
def test_the_module_is_drop_in(options):
    ours, theirs = nn.BatchNorm2d(5, **options).to(PLACE), torch.nn.BatchNorm2d(5, **options)
    theirs = theirs.to(PLACE)
    assert repr(ours) == repr(theirs)
    state = {k: torch.rand_like(v) if v.is_floating_point() else v
             for k, v in theirs.state_dict().items()}  # fmt: skip
    ours.load_state_dict(state)
    theirs.load_state_dict(ours.state_dict())
    for step in range(4):
        if step == 3:
            ours.eval()
            theirs.eval()
        x = randn(3, 5, 4, 4) + step
        torch.testing.assert_close(ours(x), theirs(x), rtol=1e-4, atol=1e-5)
        for name, value in theirs.state_dict().items():
            torch.testing.assert_close(ours.state_dict()[name], value)


def test_autograd_notices_that_the_statistics_changed():
    x, (mean, var, weight, bias) = randn(2, 3, 4, 4), arguments(3)
    before = mean._version
    ops.batch_norm(x, mean, var, weight, bias, training=True)
    assert mean._version > before and var._version > before


def test_second_gradients_and_gradients_of_statistics_are_refused():
    x, (mean, var, weight, bias) = randn(2, 3, 4, 4).requires_grad_(), arguments(3)
    y = ops.batch_norm(x, mean, var, weight, bias, training=True)
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="course_lib.batch_norm has no second derivative"):
        dx.sum().backward()
    y = ops.batch_norm(x, mean.requires_grad_(), var, weight, bias)
    with pytest.raises(RuntimeError, match="no gradient for running_mean and running_var"):
        y.sum().backward()


def test_errors_name_what_was_expected():
    x, (mean, var, *_) = randn(2, 3, 4, 4), arguments(3)
    with pytest.raises(ValueError, match="Expected more than 1 value per channel when training"):
        ops.batch_norm(randn(1, 3, 1, 1), mean, var, training=True)
    with pytest.raises(RuntimeError, match="must be defined in evaluation mode"):
        ops.batch_norm(x, None, None)
    with pytest.raises(RuntimeError, match=r"at least 2 dimensions, not shape \(5,\)"):
        ops.batch_norm(randn(5), mean, var)
    with pytest.raises(NotImplementedError, match='"batch_norm" not implemented for'):
        ops.batch_norm(x.int(), mean, var)
    with pytest.raises(RuntimeError, match="weight should contain 3 elements not 4"):
        ops.batch_norm(x, mean, var, randn(4))
    with pytest.raises(RuntimeError, match="running_mean should contain 5 elements not 3"):
        nn.BatchNorm2d(3).to(x.device)(randn(2, 5, 4, 4))
    with pytest.raises(ValueError, match="expected 4D input"):
        nn.BatchNorm2d(3)(x[0])


@pytest.mark.gpu
def test_in_a_captured_graph():
    module, twin = (nn.BatchNorm2d(8).cuda() for _ in range(2))
    x = torch.randn(4, 8, 6, 6, device="cuda", requires_grad=True)
    for m in (module, twin):
        torch.autograd.grad(m(x).sum(), x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = module(x)
        (dx,) = torch.autograd.grad(y.square().sum(), x)
    for _ in range(3):
        with torch.no_grad():
            x.copy_(torch.randn_like(x))
        graph.replay()
        expected = twin(x)
        torch.testing.assert_close(y, expected)
        torch.testing.assert_close(dx, torch.autograd.grad(expected.square().sum(), x)[0])
    for ours, theirs in zip(module.buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs)
