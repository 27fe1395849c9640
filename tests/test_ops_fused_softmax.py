"""Softmax with dropout, and batch-norm + ReLU + softmax, as operators."""

import importlib

import pytest
import torch
import torch.nn.functional as F
from tensors import PLACE, close, never_waiting, randn

from course_lib import ops

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
LIBRARY = torch.ops.course_lib
module = importlib.import_module("course_lib.ops.fused_softmax")


def kept(z):
    return z != 0


# ── dropout ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "dim"), [((4, 40), -1), ((6, 5, 4), 1), ((30,), 0), ((), -1)])
def test_dropout_is_softmax_times_a_mask(shape, dim, dtype):
    x = randn(shape).to(dtype).requires_grad_()
    z = ops.softmax_dropout(x, 0.3, dim=dim)
    mask = kept(z)
    expected = torch.softmax(x, dim) * mask / 0.7
    close(z, expected, scale=2)
    dz = randn(shape).to(dtype)
    found = [torch.autograd.grad(each, x, dz)[0] for each in (z, expected)]
    torch.testing.assert_close(*found, rtol=0, atol=16 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_drops_the_share_asked_for(p):
    z = ops.softmax_dropout(torch.zeros(64, 64, device=PLACE), p)
    share = 1 - kept(z).float().mean().item()
    assert abs(share - p) < 5 * (p * (1 - p) / 4096) ** 0.5  # five standard deviations
    close(z[kept(z)], torch.full_like(z[kept(z)], 1 / 64 / (1 - p)))


def test_dropout_is_fixed_by_the_seed_and_moves_on():
    x = torch.zeros(8, 32, device=PLACE)
    torch.manual_seed(7)
    first, second = ops.softmax_dropout(x), ops.softmax_dropout(x)
    torch.manual_seed(7)
    assert torch.equal(ops.softmax_dropout(x), first)
    assert torch.equal(ops.softmax_dropout(x), second)
    assert not torch.equal(first, second)


def test_dropout_under_checkpoint_drops_the_same_again():
    x, dz = randn(8, 16, requires_grad=True), randn(8, 16)
    z = torch.utils.checkpoint.checkpoint(ops.softmax_dropout, x, use_reentrant=False)
    ops.softmax_dropout(x)  # others draw in the meantime
    expected = torch.softmax(x, -1) * kept(z) * 2
    close(*(torch.autograd.grad(each, x, dz)[0] for each in (z, expected)), scale=16)


def test_dropout_at_the_ends():
    x = randn(3, 9, requires_grad=True)
    close(ops.softmax_dropout(x, 0), torch.softmax(x, -1))
    z = ops.softmax_dropout(x, 1.0)
    assert not z.any() and not torch.autograd.grad(z.sum(), x)[0].any()
    close(ops.softmax_dropout(x, 0.5, training=False, dim=0), torch.softmax(x, 0))
    assert ops.softmax_dropout(randn(0, 4)).shape == (0, 4)
    assert ops.softmax_dropout(randn(4, 0)).shape == (4, 0)


@pytest.mark.parametrize(
    ("args", "error", "words"),
    [
        ((torch.ones(2, 3), 1.5), ValueError, "between 0 and 1, but got 1.5"),
        ((torch.ones(2, 3), float("nan")), ValueError, "between 0 and 1, but got nan"),
        ((torch.ones(2, 3), 0.5, True, 2), IndexError, "Dimension out of range"),
        ((torch.arange(3),), NotImplementedError, "not implemented for 'Long'"),
    ],
)
def test_dropout_errors(args, error, words):
    with pytest.raises(error, match=words):
        ops.softmax_dropout(args[0].to(PLACE), *args[1:])


@pytest.fixture
def one_mask(monkeypatch):
    monkeypatch.setattr(module, "_draw", lambda x: (-5, 8))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 8), (2, 3, 5), (), (0, 4)], ids=str)
def test_dropout_opcheck(one_mask, shape, dtype):
    x = randn(shape, dtype=dtype, requires_grad=True)
    torch.library.opcheck(LIBRARY.softmax_dropout.default, (x, 0.4))
    _, stats, drawn = LIBRARY.softmax_dropout(x.detach(), 0.4)
    assert drawn.tolist() == [-5, 8]
    backward = LIBRARY.softmax_dropout_backward.default
    torch.library.opcheck(backward, (torch.randn_like(x).detach(), x.detach(), stats, drawn, 0.4))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_dropout_draws_at_each_call(dynamic):
    torch.compiler.reset()
    compiled = torch.compile(
        lambda x: ops.softmax_dropout(x * 1, 0.5), fullgraph=True, backend="aot_eager",
        dynamic=dynamic,
    )  # fmt: skip
    x = torch.zeros(8, 32, device=PLACE, requires_grad=True)
    torch.manual_seed(3)
    first, second = compiled(x), compiled(x)
    torch.manual_seed(3)
    assert torch.equal(first, ops.softmax_dropout(x))
    assert not torch.equal(first, second)
    # The backward pass of each has its own mask.
    for z in (first, second):
        mask = kept(z)
        (dx,) = torch.autograd.grad(z, x, torch.arange(256.0, device=PLACE).reshape(8, 32))
        peer = torch.zeros_like(x).requires_grad_()
        (torch.softmax(peer, -1) * mask * 2).backward(
            torch.arange(256.0, device=PLACE).reshape(8, 32)
        )
        torch.testing.assert_close(dx, peer.grad, rtol=1e-5, atol=1e-4)


# ── batch normalisation and ReLU ─────────────────────────────────────────────────────────────────


def parameters(n, dtype=torch.float32):
    mean, bias = (randn(n).to(dtype) for _ in range(2))
    var, weight = (torch.rand(n, device=PLACE).add(0.5).to(dtype) for _ in range(2))
    return mean, var, weight.requires_grad_(), bias.requires_grad_()


def chain(x, mean, var, weight, bias, eps=1e-5):
    return torch.softmax(F.relu(F.batch_norm(x, mean, var, weight, bias, eps=eps)), -1)


@pytest.mark.parametrize("shape", [(6, 5), (1, 33), (7, 1), (40, 8)], ids=str)
def test_bn_relu_softmax_equals_the_chain(shape):
    x, given = randn(shape).mul(2).requires_grad_(), parameters(shape[1])
    leaves = (x, given[2], given[3])
    dy = randn(shape)
    found = []
    for function in (ops.bn_relu_softmax, chain):
        y = function(x, *given, 1e-3)
        found.append((y, *torch.autograd.grad(y, leaves, dy)))
    for ours, theirs in zip(*found, strict=True):
        close(ours, theirs, scale=32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("own_dtype", [False, True])
def test_bn_relu_softmax_dtypes(dtype, own_dtype):
    given = parameters(16, dtype if own_dtype else torch.float32)
    x = randn(5, 16).to(dtype)
    y = ops.bn_relu_softmax(x, *given)
    close(y, chain(x.float(), *(p.float() for p in given)).to(dtype))
    gradients = torch.autograd.grad(y.float().square().sum(), given[2:])
    assert all(gradient.dtype == given[2].dtype for gradient in gradients)


def test_bn_relu_softmax_other_layouts_and_no_rows():
    given = parameters(6)
    x = randn(6, 9).t()
    close(ops.bn_relu_softmax(x, *given), chain(x, *given), scale=4)
    x = randn(0, 6, requires_grad=True)
    y = ops.bn_relu_softmax(x, *given)
    assert y.shape == (0, 6)
    assert not any(g.any() for g in torch.autograd.grad(y.sum(), given[2:]))


def test_bn_relu_softmax_errors():
    x, given = randn(3, 4), parameters(4)
    with pytest.raises(TypeError, match=r"x must have 2 dimensions, not shape \(3, 4, 1\)"):
        ops.bn_relu_softmax(x[..., None], *given)
    with pytest.raises(TypeError, match=r"mean must have shape \(4,\), not \(5,\)"):
        ops.bn_relu_softmax(x, *parameters(5))
    with pytest.raises(NotImplementedError, match="not implemented for 'Long'"):
        ops.bn_relu_softmax(x.long(), *given)
    mean = given[0].clone().requires_grad_()
    with pytest.raises(RuntimeError, match="no gradient for running_mean and running_var"):
        ops.bn_relu_softmax(x, mean, *given[1:]).sum().backward()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 8), (0, 4)], ids=str)
def test_bn_relu_softmax_opcheck(shape, dtype):
    x, given = randn(shape, dtype=dtype, requires_grad=True), parameters(shape[1])
    mean, var = given[:2]
    torch.library.opcheck(LIBRARY.bn_relu_softmax.default, (x, *given, 1e-5))
    plain = [tensor.detach() for tensor in (x, *given)]
    y = LIBRARY.bn_relu_softmax(*plain, 1e-5)
    torch.library.opcheck(
        LIBRARY.bn_relu_softmax_backward.default, (torch.randn_like(y), y, *plain, 1e-5)
    )


@pytest.mark.parametrize("name", ["softmax_dropout", "bn_relu_softmax"])
def test_second_gradients_and_transforms_are_refused(name):
    given = parameters(5) if name == "bn_relu_softmax" else ()
    x = randn(3, 5, requires_grad=True)
    y = getattr(ops, name)(x, *given)
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=f"course_lib.{name} has no second derivative"):
        dx.sum().backward()
    with pytest.raises(RuntimeError, match="can't be transformed by torch.func"):
        torch.func.grad(lambda x: getattr(ops, name)(x, *given).sum())(x.detach())


def test_vmap():
    x, given = randn(2, 3, 5), parameters(5)
    with pytest.raises(RuntimeError, match="softmax_dropout can't be mapped by torch.vmap"):
        torch.vmap(ops.softmax_dropout)(x)
    close(torch.vmap(lambda x: ops.bn_relu_softmax(x, *given))(x), chain(
        x.reshape(6, 5), *given).reshape(2, 3, 5), scale=4)  # fmt: skip


@pytest.mark.parametrize("name", ["softmax_dropout", "bn_relu_softmax"])
def test_autocast(name):
    x = randn(4, 6, dtype=torch.bfloat16)
    extra = parameters(6) if name == "bn_relu_softmax" else (0.5,)
    with torch.autocast(PLACE, dtype=torch.bfloat16):
        dtype = getattr(ops, name)(x, *extra).dtype
        assert dtype == torch.softmax(x, -1).dtype  # float32 on a GPU, x's own elsewhere
    with torch.inference_mode():
        assert getattr(ops, name)(x, *extra).dtype == torch.bfloat16


def test_compiled_bn_relu_softmax():
    torch.compiler.reset()
    compiled = torch.compile(
        lambda *args: ops.bn_relu_softmax(*args) * 2, fullgraph=True, backend="aot_eager"
    )
    x, given = randn(5, 6, requires_grad=True), parameters(6)
    y, expected = compiled(x, *given), chain(x, *given) * 2
    close(y, expected, scale=4)
    for ours, theirs in zip(*(torch.autograd.grad(each.square().sum(), (x, *given[2:]))
                              for each in (y, expected)), strict=True):  # fmt: skip
        close(ours, theirs, scale=32)


@pytest.mark.gpu
def test_dropout_takes_turns_with_pytorch_at_the_generator():
    x = torch.zeros(64, 64, device="cuda")
    torch.manual_seed(5)
    first, theirs, second = ops.softmax_dropout(x), torch.rand(1000, device="cuda"), None
    second = ops.softmax_dropout(x)
    torch.manual_seed(5)
    assert torch.equal(ops.softmax_dropout(x), first)
    assert torch.equal(torch.rand(1000, device="cuda"), theirs)
    assert torch.equal(ops.softmax_dropout(x), second) and not torch.equal(first, second)


@pytest.mark.gpu
def test_dropout_in_a_captured_graph_is_refused():
    x = randn(4, 4)
    ops.softmax_dropout(x)
    with pytest.raises(RuntimeError, match="can't be captured in a CUDA graph: each replay"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            ops.softmax_dropout(x)


@pytest.mark.gpu
def test_no_wait_for_the_gpu():
    x, given = randn(64, 100, requires_grad=True), parameters(100)

    def work():
        ops.softmax_dropout(x).sum().backward()
        ops.bn_relu_softmax(x, *given).sum().backward()

    work()  # the first time, kernels are loaded
    with never_waiting():
        work()
