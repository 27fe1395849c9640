"""Softmax with dropout: what its masks depend on."""

import pytest
import torch
from tensors import PLACE, close, randn

from course_lib import ops


def kept(z):
    return z != 0


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
