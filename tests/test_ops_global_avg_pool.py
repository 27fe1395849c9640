"""Global average pooling as an operator and as a module."""

import pytest
import torch
import torch.nn.functional as F
from tensors import PLACE, close, randn

from course_lib import nn, ops
from course_lib.kernels import global_avg_pool as kernels

LAYOUTS = (torch.contiguous_format, torch.channels_last)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(2, 8, 5, 7), (1, 3, 1, 1), (0, 3, 4, 4), (2, 0, 4, 4)], ids=str)
def test_is_adaptive_avg_pool2d(layout, dtype, shape):
    x = randn(*shape).to(dtype, memory_format=layout).requires_grad_()
    y, expected = nn.AdaptiveAvgPool2d(1)(x), F.adaptive_avg_pool2d(x, 1)
    close(y, expected, 4)
    dy = torch.randn_like(y)
    (dx,), (dx_expected,) = (torch.autograd.grad(each, x, dy) for each in (y, expected))
    close(dx, dx_expected)
    assert dx.is_contiguous(memory_format=layout) or not x.numel()


def test_shapes():
    x = randn(3, 4, 5).requires_grad_()
    close(ops.global_avg_pool(x), F.adaptive_avg_pool2d(x, 1))
    assert torch.autograd.grad(ops.global_avg_pool(x).sum(), x)[0].shape == x.shape
    assert ops.global_avg_pool(randn(2, 3, 0, 4)).isnan().all()
    view = randn(2, 6, 8, 9)[:, ::2, 1:, ::3]
    close(ops.global_avg_pool(view), F.adaptive_avg_pool2d(view, 1))
    with pytest.raises(RuntimeError, match=r"expects \(N, C, H, W\) or .*not shape \(3, 3\)"):
        ops.global_avg_pool(randn(3, 3))
    with pytest.raises(NotImplementedError, match="not implemented for 'Long'"):
        ops.global_avg_pool(torch.ones(1, 1, 2, 2, device=PLACE).long())


@pytest.mark.parametrize("size", [1, (1, 1)])
def test_only_an_output_of_one_is_taken(size):
    ours, theirs = nn.AdaptiveAvgPool2d(size), torch.nn.AdaptiveAvgPool2d(size)
    assert repr(ours) == repr(theirs) and isinstance(ours, torch.nn.AdaptiveAvgPool2d)
    x = randn(2, 3, 4, 4)
    close(ours(x), theirs(x))
    for other in (7, (1, 2), (None, 1), None):
        with pytest.raises(ValueError, match="an output_size of 1 alone, not .*; torch.nn.Ada"):
            nn.AdaptiveAvgPool2d(other)
        ours.output_size = other
        with pytest.raises(ValueError, match="an output_size of 1 alone"):
            ours(x)


def test_our_kernels_run_here(monkeypatch):
    launched = []
    for name in ("forward", "backward"):
        kernel = getattr(kernels, name)
        monkeypatch.setattr(
            kernels, name, lambda *a, n=name, k=kernel, **o: (launched.append(n), k(*a, **o))[1]
        )
    x = randn(2, 3, 5, 11).requires_grad_()  # a shape that no other test has: not repeated
    ops.global_avg_pool(x).sum().backward()
    assert launched == ["forward", "backward"]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_opcheck_compile_and_vmap(layout):
    x = randn(2, 4, 3, 3).to(memory_format=layout).requires_grad_()
    torch.library.opcheck(torch.ops.course_lib.global_avg_pool.default, (x,))
    compiled = torch.compile(nn.AdaptiveAvgPool2d(1), fullgraph=True, backend="aot_eager")
    (dx,) = torch.autograd.grad(compiled(x).square().sum(), x)
    close(dx, torch.autograd.grad(F.adaptive_avg_pool2d(x, 1).square().sum(), x)[0])
    batches = randn(3, 2, 4, 3, 3)
    close(torch.vmap(ops.global_avg_pool)(batches), batches.mean((3, 4), keepdim=True))
    (dx,) = torch.autograd.grad(ops.global_avg_pool(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="course_lib.global_avg_pool has no second derivative"):
        dx.sum().backward()


def test_autocast_changes_nothing():
    x = randn(2, 3, 4, 4)
    with torch.autocast(PLACE, dtype=torch.bfloat16):
        assert ops.global_avg_pool(x).dtype is F.adaptive_avg_pool2d(x, 1).dtype is torch.float32
