"""The linear layer as an operator and as a module: values, gradients, tracing, autocast."""


import importlib

import pytest
import torch
import torch.nn.functional as F
from tensors import PLACE, choosing, never_waiting, randn

from course_lib import nn, ops
from course_lib.kernels import linear

LIBRARY = torch.ops.course_lib
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(12)


def case(*shape, n_out=5, dtype=torch.float32, bias=True):
    """(input, weight, bias or None)"""
    x, weight, b = (randn(s).to(dtype) for s in (shape, (n_out, shape[-1]), (n_out,)))
    return x, weight, b if bias else None


def passes(function, *operands):
    """y and all gradients, for a dy that differs from place to place."""
    leaves = [None if x is None else x.detach().requires_grad_() for x in operands]
    y = function(*leaves)
    dy = torch.arange(y.numel(), dtype=y.dtype, device=y.device).reshape(y.shape).cos()
    wanted = [leaf for leaf in leaves if leaf is not None]
    return [y, *torch.autograd.grad(y, wanted, dy)]


def near(found, expected, tolerance=1e-5):
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.shape == theirs.shape
        ours, theirs = ours.double(), theirs.double()
        assert (ours - theirs).norm() <= tolerance * theirs.norm() + 1e-30


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(3, 4), (4,), (2, 3, 4), (0, 4), (2, 0, 4), (3, 0)], ids=str)
def test_equals_pytorch(shape, bias):
    operands = case(*shape, bias=bias)
    near(passes(ops.linear, *operands), passes(F.linear, *operands))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(3, 4), (4,), (2, 0, 4)], ids=str)
def test_relu_in_the_same_pass(shape, bias):
    operands = case(*shape, bias=bias)
    found = passes(lambda *inputs: ops.linear(*inputs, relu=True), *operands)
    expected = passes(lambda *inputs: F.linear(*inputs).relu(), *operands)
    near(found, expected)
    apart = passes(lambda *inputs: ops.relu(ops.linear(*inputs)), *operands)
    assert all(map(torch.equal, found, apart))
    with torch.autocast(PLACE, torch.bfloat16):
        y = ops.linear(*operands, relu=True)
    assert y.dtype is torch.bfloat16 and (y >= 0).all()


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_narrow_types_against_float64(dtype):
    operands = case(6, 9, dtype=dtype)
    found = passes(ops.linear, *operands)
    assert all(each.dtype == dtype for each in found)
    near(found, passes(F.linear, *(x.double() for x in operands)), torch.finfo(dtype).eps)


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2), (1, 2), ()], ids=str)
def test_what_requires_a_gradient(wanted):
    found = []
    operands = case(3, 4)
    for function in (ops.linear, F.linear):
        leaves = [x.detach().clone() for x in operands]
        for i in wanted:
            leaves[i].requires_grad_()
        kept = set()  # what the backward pass reads, and no more
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x, kept=kept: kept.add(x.untyped_storage().nbytes()) or x, lambda x: x
        ):
            y = function(*leaves)
        sizes = [x.numel() * x.element_size() for x in leaves]
        assert {n for n in kept if n > 8} == {sizes[1 - i] for i in wanted if i < 2}
        assert y.requires_grad == bool(wanted)
        gradients = ()
        if wanted:
            gradients = torch.autograd.grad(y.square().sum(), [leaves[i] for i in wanted])
        found.append([y, *gradients])
    near(*found)


def test_an_expanded_gradient_and_other_layouts():
    x, weight, bias = case(4, 6)
    x, weight = x.t().contiguous().t(), weight.t().contiguous().t()
    found = []
    for function in (ops.linear, F.linear):
        leaves = [each.detach().requires_grad_() for each in (x, weight, bias)]
        found.append(torch.autograd.grad(function(*leaves).sum(), leaves))
    near(*found)


@pytest.mark.parametrize("change, error, words", [
    ({0: torch.ones(3, 5)}, RuntimeError, "input must have 4 features"),
    ({0: torch.ones(())}, RuntimeError, "input must have 4 features"),
    ({0: torch.ones(3, 4, dtype=torch.long)}, RuntimeError, "weight must be torch.int64, as input"),
    ({1: torch.ones(4)}, RuntimeError, "weight must have 2 dimensions"),
    ({1: torch.ones(5, 4).half()}, RuntimeError, "weight must be torch.float32, as input is"),
    ({2: torch.ones(4)}, RuntimeError, r"bias must have shape \(5,\), not \(4,\)"),
    ({2: torch.ones(5).half()}, RuntimeError, "bias must be torch.float32, as input is"),
])  # fmt: skip
def test_errors(change, error, words):
    operands = list(case(3, 4))
    for i, value in change.items():
        operands[i] = value.to(PLACE)
    with pytest.raises(error, match=words):
        ops.linear(*operands)
    if error is RuntimeError and "dimensions" not in words:
        with pytest.raises(RuntimeError):
            F.linear(*operands)


@pytest.mark.parametrize("shape, dtype", [
    ((3, 4), torch.float32), ((2, 3, 4), torch.bfloat16), ((0, 4), torch.float16),
], ids=str)  # fmt: skip
def test_opcheck(shape, dtype):
    with choosing("naive", linear):  # which simulates fastest
        _opcheck(shape, dtype)


def _opcheck(shape, dtype):
    x, weight, bias = case(*shape, dtype=dtype)
    leaves = [each.clone().requires_grad_() for each in (x, weight, bias)]
    torch.library.opcheck(LIBRARY.linear.default, (*leaves, False))
    torch.library.opcheck(LIBRARY.linear.default, (x, weight.requires_grad_(), None, True))
    dy = randn(*shape[:-1], 5).to(dtype)
    needs = [False, True, False]
    for y in (None, dy.abs()):
        given = dy, x, weight.detach(), y, needs
        torch.library.opcheck(LIBRARY.linear_backward.default, given)


def test_second_gradients_and_transforms_are_refused():
    x, weight, bias = case(3, 4)
    (dx,) = torch.autograd.grad(
        ops.linear(x.requires_grad_(), weight, bias).square().sum(), x, create_graph=True
    )
    with pytest.raises(RuntimeError, match="course_lib.linear has no second derivative"):
        dx.sum().backward()
    with pytest.raises(RuntimeError, match="can't be transformed by torch.func"):
        torch.func.grad(lambda x: ops.linear(x, weight, bias).sum())(x.detach())


@pytest.mark.parametrize("in_dims", [(0, None, None), (1, None, None), (0, 0, 0), (None, 0, None)])
def test_vmap(in_dims):
    shapes = (4,), (5, 4), (5,)
    operands = []
    for shape, axis in zip(shapes, in_dims, strict=True):
        operands.append(randn(shape) if axis is None else randn(3, *shape).movedim(0, axis))
    found, expected = (torch.vmap(f, in_dims)(*operands) for f in (ops.linear, F.linear))
    near([found], [expected])


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_without_a_graph_break(dynamic):
    torch.compiler.reset()

    def network(x, weight, bias):
        return ops.linear(x * 2, weight, bias) + bias

    compiled = torch.compile(network, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for n_rows in (3, 6):
        operands = case(n_rows, 4)
        near(passes(compiled, *operands), passes(network, *operands))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_autocast_computes_in_its_dtype(dtype):
    operands = case(3, 4)
    with torch.autocast(PLACE, dtype=dtype):
        ours, theirs = ops.linear(*operands), F.linear(*operands)
        assert ours.dtype == theirs.dtype == dtype
        found = passes(ops.linear, *operands)
    near([ours], [theirs], 2 * torch.finfo(dtype).eps)
    assert [each.dtype for each in found[1:]] == [torch.float32] * 3
    narrow = [x.to(dtype).double() for x in operands]
    near(found, passes(F.linear, *narrow), 2 * torch.finfo(dtype).eps)


def test_the_module_is_pytorch_s_own_but_for_what_computes():
    theirs = torch.nn.Linear(4, 5, device=PLACE)
    ours = nn.Linear(4, 5, device=PLACE)
    assert str(ours) == str(theirs) and isinstance(ours, torch.nn.Linear)
    ours.load_state_dict(theirs.state_dict())
    x = randn(3, 4)
    near([ours(x)], [theirs(x)])
    assert nn.Linear(4, 5, bias=False).bias is None
    ours(x).square().sum().backward()
    theirs(x).square().sum().backward()
    near([ours.weight.grad, ours.bias.grad], [theirs.weight.grad, theirs.bias.grad])


def test_tf32_is_what_pytorch_s_switch_allows(monkeypatch):
    asked = []
    kernels = importlib.import_module("course_lib.ops.linear").kernels
    launcher = kernels.forward
    monkeypatch.setattr(
        kernels, "forward",
        lambda *args, **options: (asked.append(options["precision"]), launcher(*args))[1],
    )  # fmt: skip
    before = torch.backends.cuda.matmul.allow_tf32
    try:
        for n_rows, allowed in ((3, False), (4, True), (5, False)):  # what is repeated asks nobody
            torch.backends.cuda.matmul.allow_tf32 = allowed
            ops.linear(*case(n_rows, 41))
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    assert asked == ["float32", "tf32", "float32"]


def test_forward_mode_names_the_operator():
    x, weight, _ = case(3, 4)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, x)
        for name, call in {
            "linear": lambda: ops.linear(dual, weight), "softmax": lambda: ops.softmax(dual),
            "relu_": lambda: ops.relu(dual, inplace=True),
        }.items():  # fmt: skip
            with pytest.raises(NotImplementedError, match=f"course_lib.{name} has no forward-mode"):
                call()


def test_the_operator_is_there_for_a_mac():
    for name in ("linear", "linear_backward"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"course_lib::{name}", "MPS")


@pytest.mark.gpu
def test_no_wait_for_the_gpu_and_kernels_of_ours_alone():
    operands = case(32, 300, n_out=70)
    passes(ops.linear, *operands)  # the first time, kernels are loaded
    leaves = [x.requires_grad_() for x in operands]
    dy = randn(32, 70)
    with never_waiting():
        torch.autograd.grad(ops.linear(*leaves), leaves, dy)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        torch.autograd.grad(ops.linear(*leaves), leaves, dy)
        torch.cuda.synchronize()
    names = [event.name for event in profile.events() if event.device_type.name == "CUDA"]
    assert names and not any("gemm" in name.lower() and "cutlass" in name for name in names)
    assert not any("at::" in name or "fill" in name.lower() for name in names), names
