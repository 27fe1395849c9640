"""The linear layer as an operator: relu in its pass, what is kept, and its precision."""

import importlib

import pytest
import torch
from tensors import PLACE, randn

from course_lib import ops

pytestmark = pytest.mark.seed(12)


def case(*shape, n_out=5, bias=True):
    """(input, weight, bias or None)"""
    x, weight, b = (randn(s) for s in (shape, (n_out, shape[-1]), (n_out,)))
    return x, weight, b if bias else None


def passes(function, *operands):
    """y and all gradients, for a dy that differs from place to place."""
    leaves = [None if x is None else x.detach().requires_grad_() for x in operands]
    y = function(*leaves)
    dy = torch.arange(y.numel(), dtype=y.dtype, device=y.device).reshape(y.shape).cos()
    wanted = [leaf for leaf in leaves if leaf is not None]
    return [y, *torch.autograd.grad(y, wanted, dy)]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(3, 4), (4,), (2, 0, 4)], ids=str)
def test_relu_in_the_same_pass(shape, bias):
    operands = case(*shape, bias=bias)
    found = passes(lambda *inputs: ops.linear(*inputs, relu=True), *operands)
    apart = passes(lambda *inputs: ops.relu(ops.linear(*inputs)), *operands)
    assert all(map(torch.equal, found, apart))
    with torch.autocast(PLACE, torch.bfloat16):
        y = ops.linear(*operands, relu=True)
    assert y.dtype is torch.bfloat16 and (y >= 0).all()


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2), (1, 2), ()], ids=str)
def test_no_more_is_kept_than_the_gradients_need(wanted):
    leaves, kept = case(3, 4), set()
    for i in wanted:
        leaves[i].requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: kept.add(x.untyped_storage().nbytes()) or x, lambda x: x
    ):
        y = ops.linear(*leaves)
    sizes = [x.numel() * x.element_size() for x in leaves]
    assert {n for n in kept if n > 8} == {sizes[1 - i] for i in wanted if i < 2}
    assert y.requires_grad == bool(wanted)


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
