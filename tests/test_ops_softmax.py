"""Softmax and log-softmax as operators and modules: any axis and dtype, like PyTorch's own."""

import pickle
import warnings

import pytest
import torch
import torch.nn.functional as F
from tensors import PLACE, close, randn

from course_lib import nn, ops
from course_lib.kernels import softmax as kernels

NAMES = ("softmax", "log_softmax")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
every_operator = pytest.mark.parametrize("name", NAMES)
OVERLOADS = {name: getattr(torch.ops.course_lib, name).default for name in NAMES}


@every_operator
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("shape", "dim"), [((3, 5), -1), ((2, 3, 4), 1), ((), 0), ((0, 3), 1), ((3, 0), -1)]
)
def test_opcheck(name, shape, dim, dtype):
    x = randn(shape, dtype=dtype, requires_grad=True)
    torch.library.opcheck(OVERLOADS[name], (x, dim, None))
    y = OVERLOADS[name](x.detach(), dim, None)
    backward = getattr(torch.ops.course_lib, f"{name}_backward").default
    torch.library.opcheck(backward, (torch.randn_like(y), y, dim, dtype))


@every_operator
def test_opcheck_with_a_dtype_and_gaps_in_memory(name):
    x = randn(6, 10, dtype=torch.float16)[::2, 1::3].requires_grad_()
    torch.library.opcheck(OVERLOADS[name], (x, 0, torch.float32))


@every_operator
@pytest.mark.parametrize(
    ("shape", "dim"),
    [
        ((5,), 0), ((3, 7), 1), ((3, 7), -2), ((2, 3, 4, 5), 1), ((2, 3, 4, 5), -1),
        ((2, 3, 4, 5), 0), ((1, 4), 0), ((4, 1), -1), ((), -1), ((0, 4), 0), ((2, 0, 3), -1),
    ],
)  # fmt: skip
def test_any_axis(name, shape, dim):
    theirs = getattr(torch, name)
    x = randn(shape, requires_grad=True)
    y, expected = getattr(ops, name)(x, dim), theirs(x, dim)
    close(y, expected)
    assert y.stride() == expected.stride()
    dy = torch.randn_like(y)
    (dx,), (expected_dx,) = (torch.autograd.grad(out, x, dy) for out in (y, expected))
    close(dx, expected_dx, scale=8)


@every_operator
@pytest.mark.parametrize("dim", [-1, 0])
def test_gaps_in_memory_and_channels_last(name, dim):
    wide = randn(6, 12)
    image = randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    for x in (wide[::2, ::3], wide.t(), wide[:, 5:], image, wide[:1].expand(4, 12)):
        y, expected = getattr(ops, name)(x, dim), getattr(torch, name)(x, dim)
        close(y, expected)
        assert y.is_contiguous() == expected.is_contiguous()


@every_operator
def test_dtype_converts_first(name):
    ours, theirs = getattr(ops, name), getattr(torch, name)
    x = (randn(3, 40, dtype=torch.float16) * 4).requires_grad_()
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        y, expected = ours(x, -1, dtype), theirs(x, -1, dtype=dtype)
        close(y, expected)
        gradients = [torch.autograd.grad(out, x, torch.ones_like(out)) for out in (y, expected)]
        assert all(found[0].dtype == torch.float16 for found in gradients)
    close(ours(torch.arange(5, device=PLACE), 0, dtype=torch.float32), theirs(
        torch.arange(5, device=PLACE), 0, dtype=torch.float32))  # fmt: skip


@every_operator
def test_masked_and_broken_rows(name):
    x = randn(5, 9)
    x[0, ::2] = -torch.inf
    x[1] = -torch.inf
    x[2, 3] = torch.inf
    x[3, 4] = torch.nan
    close(getattr(ops, name)(x), getattr(torch, name)(x, -1))


def raised(function, *args):
    with pytest.raises(Exception) as caught:
        function(*args)
    return caught.value


@every_operator
@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((torch.arange(3), 0), "not implemented for 'Long'"),
        ((torch.ones(3, dtype=torch.bool), 0), "not implemented for 'Bool'"),
        ((torch.ones(3), 0, torch.int32), "not implemented for 'Int'"),
        ((torch.ones(3, dtype=torch.complex64), 0), "not implemented for 'ComplexFloat'"),
        ((torch.ones(2, 3), 2), "expected to be in range of [-2, 1], but got 2"),
        ((torch.ones(2, 3), -3), "expected to be in range of [-2, 1], but got -3"),
        ((torch.ones(()), 1), "expected to be in range of [-1, 0], but got 1"),
        ((torch.ones(3), 1.0), ""),
        ((torch.ones(3), True), ""),
    ],
)
def test_errors_are_those_of_pytorch(name, args, words):
    args = (args[0].to(PLACE), *args[1:])
    ours, theirs = (raised(f, *args[:2], dtype) for f, dtype in (
        (getattr(ops, name), args[2] if len(args) > 2 else None),
        (lambda x, dim, dtype: getattr(torch, name)(x, dim, dtype=dtype), (*args, None)[2]),
    ))  # fmt: skip
    assert type(ours) is type(theirs)
    assert words in str(ours) and words in str(theirs)


@every_operator
@pytest.mark.parametrize("n_dims", range(5))
def test_without_an_axis_it_is_that_of_torch_nn_functional(name, n_dims):
    x = randn(tuple(range(2, 2 + n_dims)))
    with pytest.warns(UserWarning, match=f"Implicit dimension choice for {name}") as told:
        y = getattr(ops, name)(x, None)
    assert [warning.filename for warning in told] == [__file__]
    with pytest.warns(UserWarning, match="Implicit dimension"):
        close(y, getattr(F, name)(x))


@every_operator
def test_second_gradients_are_refused(name):
    x = randn(2, 4, requires_grad=True)
    y = getattr(ops, name)(x)
    (gradient,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=f"course_lib.{name} has no second derivative"):
        gradient.sum().backward()


@pytest.mark.parametrize("name", ["Softmax", "LogSoftmax"])
@pytest.mark.parametrize("dim", [None, 0, -1])
def test_modules_are_drop_in(name, dim):
    ours, theirs = getattr(nn, name)(dim), getattr(torch.nn, name)(dim)
    assert repr(ours) == repr(theirs) and ours.dim == dim and not ours.state_dict()
    assert isinstance(ours, getattr(torch.nn, name))
    assert repr(pickle.loads(pickle.dumps(ours))) == repr(theirs)
    for shape in ((), (3,), (3, 4), (2, 3, 4), (2, 3, 4, 5)):
        x = randn(shape)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            close(ours(x), theirs(x))
        assert len(caught) == (2 if dim is None else 0)
        if caught:
            assert caught[0].category is caught[1].category
            assert str(caught[0].message) == str(caught[1].message)
            assert caught[0].filename == __file__


@pytest.mark.parametrize("dim", [1.0, "1", True])
def test_modules_refuse_what_is_no_axis(dim):
    with pytest.raises(TypeError):  # some versions of PyTorch look when it is made
        nn.Softmax(dim)(randn(2, 3))
    with pytest.raises(TypeError):
        ops.softmax(randn(2, 3), dim)


def test_our_kernels_run_here(monkeypatch):
    used = []
    forward = kernels.softmax.forward
    monkeypatch.setattr(kernels.softmax, "forward", lambda x: (used.append(x), forward(x))[1])
    ops.softmax(randn(5))
    assert len(used) == 1
