"""The torch operators: schema, gradients, tracing, and where each kind of tensor goes."""


import pytest
import torch

from course_lib import SIMULATED, nn, ops
from course_lib.kernels import activation

PLACE = "cpu" if SIMULATED else "cuda"
PEERS = {"relu": torch.relu, "sigmoid": torch.sigmoid, "swish": torch.nn.functional.silu}
every_operator = pytest.mark.parametrize("name", PEERS)


@every_operator
@pytest.mark.parametrize("shape", [(5,), (2, 3, 4), (0, 3), ()])
def test_opcheck(name, shape):
    x = torch.randn(shape, device=PLACE, requires_grad=True)
    torch.library.opcheck(getattr(torch.ops.course_lib, name).default, (x,))


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


@pytest.mark.parametrize("name", ["relu", "swish"])
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
        return ops.swish(ops.relu(x * 2 - 1)).sum()

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


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (nn.ReLU(), torch.nn.ReLU()),
        (nn.ReLU(inplace=True), torch.nn.ReLU(inplace=True)),
        (nn.SiLU(), torch.nn.SiLU()),
        (nn.SiLU(True), torch.nn.SiLU(True)),
        (nn.Sigmoid(), torch.nn.Sigmoid()),
    ],
    ids=str,
)
def test_modules_are_drop_in(ours, theirs):
    assert repr(ours) == repr(theirs)
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
