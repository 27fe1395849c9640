"""Activations in place, the default compiler, and torch.fx."""

import pickle

import pytest
import torch
import torch.fx
import torch.nn.functional as F
from operands import ACTIVATIONS, IN_PLACE
from tensors import PLACE

from course_lib import ops

PEERS = {name: getattr(F, name) for name in ACTIVATIONS}
every_form = pytest.mark.parametrize("name", IN_PLACE)


@pytest.mark.gpu
def test_compiles_with_the_default_backend():
    def network(x):
        return ops.silu(ops.relu(x * 2 - 1)).sum()

    x = torch.randn(1000, device="cuda", requires_grad=True)
    compiled = torch.compile(network, fullgraph=True)
    expected = torch.autograd.grad(network(x), x)[0]
    assert torch.allclose(torch.autograd.grad(compiled(x), x)[0], expected, rtol=1e-5, atol=1e-6)


# ── in place ─────────────────────────────────────────────────────────────────────────────────────


def written_over(function, shape=(2, 3, 5, 4), look=lambda x: x, **options):
    """(what was written over, the gradient of what it was computed from)."""
    leaf = torch.linspace(-7, 7, torch.Size(shape).numel(), device=PLACE).reshape(shape)
    x = leaf.requires_grad_() * 1
    part = look(x)
    y = function(part, inplace=True, **options)
    assert y is part and y.data_ptr() == part.data_ptr()
    dy = torch.arange(x.numel(), device=PLACE).reshape(shape)
    return x, torch.autograd.grad((x * dy).sum(), leaf)[0]


@every_form
@pytest.mark.parametrize(
    "look",
    [
        lambda x: x, lambda x: x.to(memory_format=torch.channels_last), lambda x: x[1],
        lambda x: x[:, :, ::2], lambda x: x.transpose(1, 2), lambda x: x[:0],
    ],
    ids=["all", "channels-last", "half", "gaps", "transposed", "nothing"],
)  # fmt: skip
def test_in_place(name, look):
    ours, theirs = (
        written_over(function, look=look) for function in (getattr(ops, name), PEERS[name])
    )
    for found, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@every_form
def test_in_place_makes_nothing_beside_what_the_gradient_needs(name, monkeypatch):
    """As PyTorch: nothing without a gradient; a copy of x where that needs x, and not y."""
    x, copies = torch.randn(50, device=PLACE), []
    clone = torch.Tensor.clone
    monkeypatch.setattr(torch.Tensor, "clone", lambda x: copies.append(1) or clone(x))
    monkeypatch.setattr(torch, "empty_like", lambda *_, **__: pytest.fail("made an array"))
    getattr(ops, name)(x, inplace=True)
    assert not copies
    getattr(ops, name)(x.requires_grad_() * 1, inplace=True)
    assert len(copies) == (name in ("silu", "hardsigmoid", "hardswish"))


def test_leaky_relu_in_place_with_a_slope_below_zero():
    ours = written_over(ops.leaky_relu, negative_slope=-0.5)[1]
    leaf = torch.linspace(-7, 7, 120, device=PLACE).reshape(2, 3, 5, 4).requires_grad_()
    dy = torch.arange(120, device=PLACE).reshape(leaf.shape)
    expected = torch.autograd.grad((F.leaky_relu(leaf, -0.5) * dy).sum(), leaf)[0]
    torch.testing.assert_close(ours, expected)


@every_form
def test_autograd_sees_what_is_written(name):
    function = getattr(ops, name)
    x = torch.randn(5, device=PLACE, requires_grad=True)
    y = x * 2
    z = y.sin()  # its gradient needs y
    function(y, inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()
    y = function(x * 2, inplace=True)
    y += 1  # not what relu's gradient is from any more
    if name in ("relu", "relu6", "leaky_relu"):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


@every_form
def test_what_must_not_be_written_over_is_left_alone(name):
    function = getattr(ops, name)
    x = torch.randn(6, device=PLACE, requires_grad=True)
    before = x.detach().clone()
    for part, words in ((x, "a leaf Variable"), (x[2:], "a view of a leaf Variable")):
        with pytest.raises(RuntimeError, match=f"{words} that requires grad is being used"):
            function(part, inplace=True)
    with torch.inference_mode():
        inferred = torch.randn(6, device=PLACE)
        function(inferred, inplace=True)
    with pytest.raises(RuntimeError, match="Inplace update to inference tensor outside"):
        function(inferred, inplace=True)
    with pytest.raises(RuntimeError, match="single memory location"):
        function(torch.randn(1, device=PLACE).expand(4), inplace=True)
    assert torch.equal(x, before)
    with torch.no_grad():
        function(x, inplace=True)
    torch.testing.assert_close(x, PEERS[name](before), rtol=1e-5, atol=1e-6)


def test_names_are_those_of_torch():
    x = torch.randn(4, device=PLACE)
    for name in ACTIVATIONS:
        close = torch.testing.assert_close
        close(getattr(ops, name)(input=x), PEERS[name](input=x), rtol=1e-5, atol=1e-6)
    close(ops.gelu(x, approximate="tanh"), F.gelu(x, approximate="tanh"), rtol=1e-5, atol=1e-6)


# ── torch.fx ─────────────────────────────────────────────────────────────────────────────────────


def test_a_call_is_a_node_of_a_traced_graph():
    weight = torch.randn(4, 3, 3, 3, device=PLACE)

    def network(x):
        y = ops.conv2d(x, weight, padding=1)
        y = ops.relu(ops.max_pool2d(y, 2), inplace=True)
        return ops.softmax(ops.global_avg_pool(input=y).flatten(1), -1)

    traced = torch.fx.symbolic_trace(network)
    called = [node.target for node in traced.graph.nodes if node.op == "call_function"]
    assert called == [ops.conv2d, ops.max_pool2d, ops.relu, ops.global_avg_pool, ops.softmax]
    x = torch.randn(2, 3, 6, 6, device=PLACE)
    assert torch.equal(traced(x), network(x))
    again = pickle.loads(pickle.dumps(torch.fx.symbolic_trace(lambda x: ops.silu(x) + 1)))
    assert torch.equal(again(x), ops.silu(x) + 1)
