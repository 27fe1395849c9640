"""Dropout: kernels against the float64 mask; operator and module against PyTorch's contract."""

import importlib

import numpy as np
import pytest
import torch
from tensors import PLACE, randn

from course_lib import nn, ops, reference
from course_lib.kernels import dropout
from course_lib.runtime.host.arrays import ArrayError

# `ops.dropout` is the function.
dropout_operator = importlib.import_module("course_lib.ops.dropout")

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
every_variant = pytest.mark.parametrize("variant", dropout.FORWARD)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def expected(x, p, seed, offset):
    """float64, of the elements in the order of memory."""
    kept = reference.dropout_mask((x.numel(),), p, seed, offset)
    return x.double().cpu().numpy().ravel() * kept * (1 / (1 - p) if p < 1 else 0)


@every_variant
@every_dtype
@pytest.mark.parametrize("n, offset", [(1, 0), (7, 8), (9, 0), (300, 8), (40, 13)])
def test_against_the_reference(variant, dtype, n, offset):
    x = randn(n).to(dtype)
    for p in (0.0, 0.3, 1.0):
        y = dropout.forward(x, p, 1234567, offset, variant=variant)
        truth = expected(x, p, 1234567, offset)
        assert (np.abs(y.double().cpu().numpy() - truth) <= torch.finfo(dtype).eps * 4).all()
        assert torch.equal(y == 0, torch.from_numpy(truth == 0).to(y.device))


def test_errors_name_what_was_expected():
    x = randn(8)
    with pytest.raises(ValueError, match="p must be a probability between 0 and 1, not 2"):
        dropout.forward(x, 2, 1, 0)
    with pytest.raises(ValueError, match="dropout probability has to be between 0 and 1, but got"):
        ops.dropout(x, 1.5)


def test_the_gradient_has_the_mask_of_its_forward_pass():
    for x in (randn(2, 3, 4, 5), randn(2, 8, 4, 4).to(memory_format=torch.channels_last),
              randn(6, 8).t(), randn(6, 8)[:, ::2]):  # fmt: skip
        x = x.detach().requires_grad_()
        y = ops.dropout(x, 0.4)
        (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
        torch.testing.assert_close(dx * x, y)
        (dx,) = torch.autograd.grad(ops.dropout(x, 0.4).sum(), x)  # an expanded gradient
        assert torch.allclose(dx[dx != 0], torch.full((), 1 / 0.6, device=PLACE))


def test_masks_differ_and_repeat_with_the_generator():
    x = torch.ones(4000, device=PLACE)
    torch.manual_seed(5)
    first, second = ops.dropout(x, 0.25), ops.dropout(x, 0.25)
    torch.manual_seed(5)
    assert torch.equal(first, ops.dropout(x, 0.25)) and not torch.equal(first, second)
    assert abs((first == 0).float().mean().item() - 0.25) < 0.03
    assert torch.allclose(first[first != 0], torch.full((), 1 / 0.75, device=PLACE))


def test_the_module_is_drop_in():
    for options in ({}, dict(p=0.2), dict(p=0.2, inplace=True)):
        assert repr(nn.Dropout(**options)) == repr(torch.nn.Dropout(**options))
    x = randn(50)
    assert nn.Dropout(0.5).eval()(x) is x and nn.Dropout(0.0)(x) is x
    y = nn.Dropout(1.0)(x)
    assert not y.any()
    inplace = x.clone()
    assert nn.Dropout(0.5, inplace=True)(inplace) is inplace and not torch.equal(inplace, x)


@every_variant
@pytest.mark.parametrize("seed", [0, 1234567, -1, -(2**63), 2**63 - 1])
def test_a_seed_on_the_device_gives_the_same_mask(variant, seed):
    x, on_device = randn(300), torch.tensor([seed], device=PLACE)
    for offset in (0, 13):
        found = dropout.forward(x, 0.4, on_device, offset, variant=variant)
        assert torch.equal(found, dropout.forward(x, 0.4, seed, offset, variant=variant))
    for wrong in (on_device.int(), on_device.repeat(2)):
        with pytest.raises(ArrayError, match="seed must"):
            dropout.forward(x, 0.4, wrong, 0, variant=variant)


def test_seeds_on_the_device_are_drawn_by_the_generator():
    x = randn(200).requires_grad_()
    with dropout_operator.seeds_on_device():
        torch.manual_seed(3)
        y, other = ops.dropout(x, 0.5), ops.dropout(x, 0.5)
        torch.manual_seed(3)
        assert torch.equal(y, ops.dropout(x, 0.5)) and not torch.equal(y, other)
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    torch.testing.assert_close(dx * x, y)
    drawn = torch.ops.course_lib.dropout(x, 0.5)[1]
    assert drawn.shape == (2,)  # as before


@pytest.mark.gpu
def test_each_replay_of_a_graph_draws_anew():
    x = torch.ones(4000, device="cuda", requires_grad=True)

    def step():
        y = ops.dropout(x, 0.25)
        return y.detach(), torch.autograd.grad(y.sum(), x)[0]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, dx = step()
    found = []
    for _ in range(2):
        torch.manual_seed(7)
        for _ in range(2):
            graph.replay()
            found.append(y.clone())
            assert torch.equal(dx, y)  # x is all ones
    assert not torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[3])
    torch.manual_seed(7)
    with dropout_operator.seeds_on_device():
        assert torch.equal(step()[0], found[0])
