"""The torch operators: schema, gradients, tracing, and where each kind of tensor goes."""

import pickle

import pytest
import torch
import torch.fx
import torch.nn.functional as F

from course_lib import SIMULATED, nn, ops
from course_lib.kernels import activation

PLACE = "cpu" if SIMULATED else "cuda"
NAMES = (
    "relu", "relu6", "leaky_relu", "sigmoid", "silu", "hardsigmoid", "hardswish", "gelu",
)  # fmt: skip
PEERS = {name: getattr(F, name) for name in NAMES}
SLOPES = {"leaky_relu": (0.1,)}
IN_PLACE = [name for name in NAMES if name not in ("sigmoid", "gelu")]
every_operator = pytest.mark.parametrize("name", NAMES)
every_form = pytest.mark.parametrize("name", IN_PLACE)


@every_operator
@pytest.mark.parametrize("shape", [(2, 3, 4), (0, 3), ()])
def test_opcheck(name, shape):
    x = torch.randn(shape, device=PLACE, requires_grad=True)
    inputs = x, *SLOPES.get(name, ())
    torch.library.opcheck(getattr(torch.ops.course_lib, name).default, inputs)
    if name in IN_PLACE:
        in_place = getattr(torch.ops.course_lib, f"{name}_").default
        torch.library.opcheck(in_place, (x.detach(), *inputs[1:]))


@every_operator
def test_gradients_equal_pytorch(name):
    x = torch.randn(6, 7, device=PLACE, dtype=torch.float32)
    upstream = torch.randn_like(x)
    found = []
    for function in (getattr(ops, name), PEERS[name]):
        leaf = x.clone().requires_grad_()
        (function(leaf) * 2).backward(upstream)
        found.append(leaf.grad)
    assert torch.allclose(*found, rtol=1e-5, atol=1e-6)


@every_operator
def test_second_gradients_are_refused(name):
    x = torch.randn(4, device=PLACE, requires_grad=True)
    (gradient,) = torch.autograd.grad(getattr(ops, name)(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=f"course_lib.{name} has no second derivative"):
        (gradient.sum() + x.sum()).backward()


@every_operator
def test_runs_in_inference_mode_and_without_gradients(name):
    x = torch.randn(9, device=PLACE)
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            y = getattr(ops, name)(x)
            assert not y.requires_grad
            assert torch.allclose(y, PEERS[name](x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["relu", "silu"])
def test_compiles_without_a_graph_break(name):
    def network(x):
        return getattr(ops, name)(x * 2 + 1).sum()

    x = torch.randn(33, device=PLACE, requires_grad=True)
    expected = network(x)
    (expected_gradient,) = torch.autograd.grad(expected, x)
    # The backend "aot_eager" traces forward and backward as the default one does, and needs no
    # C compiler, which a laptop may lack.
    compiled = torch.compile(network, fullgraph=True, backend="aot_eager")
    y = compiled(x)
    assert torch.allclose(y, expected)
    assert torch.allclose(torch.autograd.grad(y, x)[0], expected_gradient)


@pytest.mark.gpu
def test_compiles_with_the_default_backend():
    def network(x):
        return ops.silu(ops.relu(x * 2 - 1)).sum()

    x = torch.randn(1000, device="cuda", requires_grad=True)
    compiled = torch.compile(network, fullgraph=True)
    expected = torch.autograd.grad(network(x), x)[0]
    assert torch.allclose(torch.autograd.grad(compiled(x), x)[0], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
def test_operators_in_a_captured_graph():
    x = torch.zeros(500, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = ops.sigmoid(ops.relu(x))
    x.fill_(-3)
    graph.replay()
    assert torch.equal(y, torch.full_like(y, 0.5))


def test_our_kernels_run_here(monkeypatch):
    launches = []
    launch = activation.launch
    monkeypatch.setattr(activation, "launch", lambda *a, **k: (launches.append(a), launch(*a, **k)))
    ops.relu(torch.randn(997, device=PLACE))  # a size that no other test has: not repeated
    assert len(launches) == 1


def made(options):
    """The same module of ours and of PyTorch's."""
    name, *arguments = options
    return getattr(nn, name)(*arguments), getattr(torch.nn, name)(*arguments)


@pytest.mark.parametrize(
    "options",
    [
        ("ReLU",), ("ReLU", True), ("ReLU6",), ("ReLU6", True), ("LeakyReLU",),
        ("LeakyReLU", 0.2, True), ("LeakyReLU", -0.5), ("SiLU",), ("SiLU", True), ("Sigmoid",),
        ("Hardsigmoid",), ("Hardsigmoid", True), ("Hardswish",), ("Hardswish", True), ("GELU",),
        ("GELU", "tanh"),
    ],
    ids=str,
)  # fmt: skip
def test_modules_are_drop_in(options):
    ours, theirs = made(options)
    assert repr(ours) == repr(theirs) and isinstance(ours, type(theirs))
    assert vars(ours).keys() == vars(theirs).keys()
    leaves = [torch.linspace(-3, 3, 11, device=PLACE, requires_grad=True) for _ in range(2)]
    inputs = [leaf * 1 for leaf in leaves]
    outputs = [module(x) for module, x in zip((ours, theirs), inputs, strict=True)]
    assert torch.allclose(*outputs, rtol=1e-5, atol=1e-6)
    assert all(
        (y is x) == bool(getattr(theirs, "inplace", False))
        for x, y in zip(inputs, outputs, strict=True)
    )
    for y in outputs:
        y.sum().backward()
    assert torch.allclose(leaves[0].grad, leaves[1].grad, rtol=1e-5, atol=1e-6)


def test_wrong_dtype_is_refused_by_name():
    with pytest.raises(TypeError, match="x must be float32 or float16 or bfloat16, not int64"):
        ops.relu(torch.arange(3, device=PLACE))


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
@pytest.mark.filterwarnings("error")  # one sample after another would be said to be slow
def test_vmap(name):
    x, found = torch.randn(2, 3, 4, device=PLACE, requires_grad=True), []
    for function in (getattr(ops, name), PEERS[name]):
        for axis in (0, 1):
            for inplace in (False, True):

                def of(t, function=function, inplace=inplace):
                    return function(t * 2, inplace=inplace)

                y = torch.vmap(of, axis, axis)(x)
                found.append((y, torch.autograd.grad((y * y).sum(), x)[0]))
    for ours, theirs in zip(found[:4], found[4:], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    y = x.detach().clone()
    torch.vmap(lambda t: getattr(ops, name)(t, inplace=True))(y)
    torch.testing.assert_close(y, PEERS[name](x.detach()), rtol=1e-5, atol=1e-5)


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


@every_form
def test_in_place_compiles_without_a_graph_break(name):
    def network(x):
        y = x * 2
        getattr(ops, name)(y, inplace=True)
        return (y * y).sum()

    x = torch.randn(3, 11, device=PLACE, requires_grad=True)
    expected = torch.autograd.grad(network(x), x)[0]
    compiled = torch.compile(network, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(torch.autograd.grad(compiled(x), x)[0], expected)


def test_names_are_those_of_torch():
    x = torch.randn(4, device=PLACE)
    for name in NAMES:
        close = torch.testing.assert_close
        close(getattr(ops, name)(input=x), PEERS[name](input=x), rtol=1e-5, atol=1e-6)
    close(ops.gelu(x, approximate="tanh"), F.gelu(x, approximate="tanh"), rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="approximate must be 'none' or 'tanh', not 'erf'"):
        ops.gelu(x, approximate="erf")


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


def test_every_function_can_be_traced():
    for name in ops.__all__:
        graph = torch.fx.Graph()
        proxy = torch.fx.Proxy(graph.placeholder("x"))
        getattr(ops, name)(proxy)
        assert list(graph.nodes)[-1].target is getattr(ops, name)
