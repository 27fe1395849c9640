"""Batch normalisation: what autograd and captured graphs see of its statistics."""

import pytest
import torch
from tensors import PLACE, randn

from course_lib import nn, ops


def test_autograd_notices_that_the_statistics_changed():
    mean, var = randn(3), torch.ones(3, device=PLACE)
    before = mean._version
    ops.batch_norm(randn(2, 3, 4, 4), mean, var, training=True)
    assert mean._version > before and var._version > before


@pytest.mark.gpu
def test_in_a_captured_graph():
    module, twin = (nn.BatchNorm2d(8).cuda() for _ in range(2))
    x = torch.randn(4, 8, 6, 6, device="cuda", requires_grad=True)
    for m in (module, twin):
        torch.autograd.grad(m(x).sum(), x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = module(x)
        (dx,) = torch.autograd.grad(y.square().sum(), x)
    for _ in range(3):
        with torch.no_grad():
            x.copy_(torch.randn_like(x))
        graph.replay()
        expected = twin(x)
        torch.testing.assert_close(y, expected)
        torch.testing.assert_close(dx, torch.autograd.grad(expected.square().sum(), x)[0])
    for ours, theirs in zip(module.buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs)
