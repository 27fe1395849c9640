"""The short way past the dispatcher, and everybody who has a say in a call and keeps it off."""

import importlib
import warnings

import pytest
import torch
from tensors import PLACE, close, randn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from course_lib import SIMULATED, nn, ops
from course_lib.ops import registration

NAMES = ("softmax", "log_softmax")
every_operator = pytest.mark.parametrize("name", NAMES)
OVERLOADS = {name: getattr(torch.ops.course_lib, name).default for name in NAMES}


@pytest.fixture
def ways(monkeypatch):
    """The list of ways that calls from outside took: "direct", or "dispatcher".

    On a machine without a GPU, plain CPU tensors take the place of plain CUDA ones.
    """
    if SIMULATED:
        monkeypatch.setattr(registration, "_direct_keys", registration.plain_keys("CPU"))
        monkeypatch.setattr(registration, "_direct_type", "cpu")
    taken, inside = [], []

    def note(way, function):
        def noted(*inputs):
            if not inside:
                taken.append(way)
            inside.append(way)
            try:
                return function(*inputs)
            finally:
                inside.pop()

        return noted

    module = importlib.import_module("course_lib.ops.softmax")
    for operator in (module._softmax, module._log_softmax):
        monkeypatch.setattr(operator, "kernel", note("direct", operator.kernel))
        monkeypatch.setattr(operator, "overload", note("dispatcher", operator.overload))
    return taken


def test_plain_tensors_take_the_short_way(ways):
    x = randn(2, 5)
    expected = torch.softmax(x, -1)
    close(ops.softmax(x), expected)
    close(ops.softmax(torch.nn.Parameter(x)), expected)
    with torch.no_grad():
        close(ops.softmax(x.clone().requires_grad_()), expected)
    close(ops.softmax(x.clone().requires_grad_()), expected)
    close(ops.softmax(x.t(), 0), expected.t())
    with torch.inference_mode():
        inferred = x * 1
        y = ops.softmax(inferred)
        assert y.is_inference()
    close(ops.softmax(inferred), expected)
    assert ways == ["direct"] * 7


def test_plain_is_what_pytorch_makes():
    x = torch.empty(2, device=PLACE)
    with torch.inference_mode():
        inferred = torch.empty(2, device=PLACE)
    found = tuple(torch._C._dispatch_keys(each) for each in (x, inferred))
    assert found == registration.plain_keys(PLACE.upper())


class Noting(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen = [*getattr(self, "seen", ()), str(func)]
        return func(*args, **(kwargs or {}))


def test_a_dispatch_mode_sees_the_operator(ways):
    with Noting() as mode:
        ops.softmax(randn(2, 3))
    assert "course_lib.softmax.default" in mode.seen and ways == ["dispatcher"]


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


def test_outputs_without_a_gradient_are_not_given_one_of_zeros():
    x, weight = randn(2, 3, 6, 6).requires_grad_(), randn(4, 3, 3, 3).requires_grad_()
    running = [randn(4).abs() for _ in range(2)]
    y = ops.conv2d_batch_norm(x, weight, None, None, *running)
    y = ops.batch_norm(ops.max_pool2d(y, 2), *running, training=True)
    loss = ops.cross_entropy(y.flatten(1), torch.tensor([1, 0], device=PLACE))
    with Seen() as seen:
        loss.backward()
    assert x.grad is not None and "conv2d_batch_norm_backward" in seen.names
    assert not [name for name in seen.names if "zero" in name or "fill" in name], seen.names


def test_no_gradient_at_all_is_passed_on():
    class Nowhere(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, dy):
            return None

    x = randn(2, 3, 6, 6).requires_grad_()
    (Nowhere.apply(ops.max_pool2d(x, 2)).sum() + x.sum()).backward()
    close(x.grad, torch.ones_like(x))


def test_a_second_gradient_by_any_output_is_refused():
    x, weight = randn(1, 2, 4, 4).requires_grad_(), randn(3, 2, 3, 3).requires_grad_()
    (dweight,) = torch.autograd.grad(ops.conv2d(x, weight).sum(), weight, create_graph=True)
    with pytest.raises(RuntimeError, match="has no second derivative"):
        dweight.sum().backward()


def test_a_function_mode_sees_the_operator(ways):
    class Functions(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    x, seen = randn(2, 3), []
    with Functions():
        ops.softmax(x)
    assert ways == ["dispatcher"] and OVERLOADS["softmax"] in seen


def test_a_subclass_sees_the_operator(ways):
    class Named(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            seen.append(func)
            return super().__torch_function__(func, types, args, kwargs or {})

    seen = []
    y = ops.softmax(randn(2, 3).as_subclass(Named))
    assert type(y) is Named and ways == ["dispatcher"] and OVERLOADS["softmax"] in seen


def test_fake_tensors(ways):
    with torch._subclasses.FakeTensorMode() as mode:
        y = ops.softmax(torch.empty(2, 3, device="cuda", dtype=torch.bfloat16), 0)
    outside = ops.log_softmax(mode.from_tensor(torch.empty(4, 1)))
    assert y.shape == (2, 3) and y.device.type == "cuda" and y.dtype == torch.bfloat16
    assert outside.shape == (4, 1) and ways == ["dispatcher"] * 2


@pytest.mark.parametrize("tracing_mode", ["real", "fake", "symbolic"])
@pytest.mark.parametrize("pre_dispatch", [False, True])
def test_make_fx(ways, tracing_mode, pre_dispatch):
    traced = make_fx(
        lambda x: ops.softmax(x, 0), tracing_mode=tracing_mode, pre_dispatch=pre_dispatch
    )(randn(2, 3))
    assert any(node.target is OVERLOADS["softmax"] for node in traced.graph.nodes)
    x = randn(2, 3)
    close(traced(x), torch.softmax(x, 0))


def test_jit_trace(ways):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch calls it deprecated
        traced = torch.jit.trace(lambda x: ops.softmax(x) * 2, (randn(2, 3),))
    x = randn(4, 5)
    close(traced(x), torch.softmax(x, -1) * 2)


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict):
    program = torch.export.export(
        nn.Softmax(dim=1), (randn(2, 3),), dynamic_shapes=({0: torch.export.Dim("n")},),
        strict=strict,
    )  # fmt: skip
    assert OVERLOADS["softmax"] in [node.target for node in program.graph.nodes]
    x = randn(5, 3)
    close(program.module()(x), torch.softmax(x, 1))


def test_compiled_module_calls_the_operator():
    seen = []

    def backend(graph, inputs):
        seen.extend(node.target for node in graph.graph.nodes)
        return graph

    torch.compiler.reset()
    x = randn(3, 4)
    close(torch.compile(nn.Softmax(dim=-1), fullgraph=True, backend=backend)(x), x.softmax(-1))
    assert OVERLOADS["softmax"] in seen


@every_operator
def test_vmap_of_numbers(name, ways):
    scalars = torch.vmap(lambda t: getattr(ops, name)(t, 0))(randn(4))
    close(scalars, torch.full_like(scalars, name == "softmax"))
    assert set(ways) == {"dispatcher"}


def test_negated_tensors(ways):
    x = torch._neg_view(randn(2, 3))
    close(ops.softmax(x), torch.softmax(x.resolve_neg(), -1))
    assert ways == ["dispatcher"]


def test_saved_tensor_hooks_and_in_place_changes():
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        y = ops.softmax(randn(2, 3, requires_grad=True))
    assert len(packed) == 1 and torch.equal(packed[0], y)
    y = ops.softmax(randn(2, 3, requires_grad=True))
    y.detach().zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_autocast_is_alike_on_both_ways(ways, monkeypatch):
    x, w = randn(2, 3, 5, 5), randn(4, 3, 3, 3)
    kernel = importlib.import_module("course_lib.ops.conv2d")._conv2d
    found, seen = [], []
    inner = kernel.kernel

    def noted(*inputs):
        seen.append((inputs[0].dtype, torch.is_autocast_enabled(PLACE)))
        return inner(*inputs)

    monkeypatch.setattr(kernel, "kernel", noted)
    for short in (True, False):
        monkeypatch.setattr(registration, "dispatcher_is_idle", lambda short=short: short)
        leaves = [each.clone().requires_grad_() for each in (x, w)]
        with torch.autocast(PLACE, torch.bfloat16):
            y = ops.conv2d(*leaves, padding=1)
            assert torch.is_autocast_enabled(PLACE)
        assert y.dtype is torch.bfloat16 and type(y.grad_fn).__name__ == "Conv2dBackward"
        found.append((y, *torch.autograd.grad(y.float().sum(), leaves)))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
    assert seen == [(torch.bfloat16, False)]  # the dispatcher holds the operator's own kernel
    with torch.autocast(PLACE, torch.bfloat16, enabled=False):
        assert ops.conv2d(x, w).dtype is torch.float32
