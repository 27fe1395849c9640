"""Intrinsics: exact data movement, stated error elsewhere; the same kernels on GPU and twin."""

import numpy as np
import pytest
import torch

from course_lib import SIMULATED, cuda
from course_lib.runtime.intrinsics import (
    block_max,
    block_sum,
    fast_exp,
    fast_reciprocal,
    load,
    load_vector,
    store,
    store_vector,
    vector_width,
    warp_max,
    warp_sum,
)
from course_lib.runtime.launch import launch

PLACE = "cpu" if SIMULATED else "cuda"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@cuda.jit
def convert_kernel(x, y):
    i = cuda.grid(1)
    if i < x.shape[0]:
        store(y, i, load(x, i))


@cuda.jit
def copy_vector_kernel(x, y, widths):
    values = cuda.local.array(8, np.float32)
    width = vector_width(x)
    i = cuda.grid(1) * width
    if i + width <= x.shape[0]:
        load_vector(values, x, i)
        store_vector(y, i, values)
        widths[cuda.grid(1)] = width


@cuda.jit
def function_kernel(x, exponential, reciprocal):
    i = cuda.grid(1)
    if i < x.shape[0]:
        exponential[i] = fast_exp(x[i])
        reciprocal[i] = fast_reciprocal(x[i])


@cuda.jit
def warp_kernel(x, sums, largest):
    i = cuda.grid(1)
    sums[i] = warp_sum(x[i])
    largest[i] = warp_max(x[i])


@cuda.jit
def block_kernel(x, sums, largest):
    scratch = cuda.shared.array(32, np.float32)
    i = cuda.grid(1)
    sums[i] = block_sum(x[i], scratch)
    largest[i] = block_max(x[i], scratch)
    sums[i] += block_sum(x[i], scratch)  # the same scratch again: is it still being read?


def all_patterns(dtype):
    """Every 16-bit pattern, or as many float32 patterns spread over all of them."""
    if dtype == torch.float32:
        step = 2**32 // 65521
        return torch.arange(-(2**31), 2**31, step).to(torch.int32).view(dtype)
    return torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)


def same(a, b):
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a[~a.isnan()], b[~b.isnan()])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("target", DTYPES)
def test_load_and_store_round_as_pytorch(dtype, target):
    x = all_patterns(dtype).to(PLACE)
    if SIMULATED:
        x = x[:: 16 if len(x) > 4096 else 1]
    y = torch.zeros(len(x), dtype=target, device=PLACE)
    launch(convert_kernel, -(-len(x) // 128), 128, x, y)
    expected = x.to(target)
    assert same(y, expected)
    assert torch.equal(y.signbit()[~y.isnan()], expected.signbit()[~y.isnan()])


@pytest.mark.parametrize("dtype", DTYPES)
def test_vectors_move_every_pattern(dtype):
    x = all_patterns(dtype)[:4096].contiguous().to(PLACE)
    width = 16 // dtype.itemsize
    x = x[: len(x) // width * width]
    y, widths = torch.zeros_like(x), torch.zeros(len(x) // width, dtype=torch.int32, device=PLACE)
    launch(copy_vector_kernel, -(-len(widths) // 64), 64, x, y, widths)
    assert widths.eq(width).all()
    assert same(y, x)


def test_fast_functions_keep_their_bounds():
    x = torch.cat([torch.linspace(-80, 80, 4001), torch.tensor([1e-3, -1e-3, 1e30])]).to(PLACE)
    exponential, reciprocal = torch.empty_like(x), torch.empty_like(x)
    launch(function_kernel, -(-len(x) // 128), 128, x, exponential, reciprocal)
    exact = x.double()
    # ex2.approx: 2 ulp; rounding x·log2(e) adds up to |x|·2⁻²⁴ of the result.
    bound = 2**-22 + exact.abs() * 2**-23
    inside = exact < 80
    error = (exponential.double() / exact.exp() - 1).abs()
    assert (error <= bound)[inside].all()
    finite = x != 0
    assert ((reciprocal.double() * exact - 1).abs() <= 2**-22)[finite].all()


def test_warp_reductions():
    x = torch.randn(4 * 32, device=PLACE)
    sums, largest = torch.empty_like(x), torch.empty_like(x)
    launch(warp_kernel, 2, 64, x, sums, largest)
    rows = x.view(4, 32)
    assert torch.allclose(sums.view(4, 32), rows.sum(1, keepdim=True).expand(4, 32), atol=1e-5)
    assert torch.equal(largest.view(4, 32), rows.amax(1, keepdim=True).expand(4, 32))


@pytest.mark.parametrize("block", [32, 64, 96, 256, 1024])
def test_block_reductions(block):
    x = torch.randn(2 * block, device=PLACE) - 50  # a wrong zero would win every maximum
    sums, largest = torch.empty_like(x), torch.empty_like(x)
    launch(block_kernel, 2, block, x, sums, largest)
    rows = x.view(2, block)
    expected = 2 * rows.double().sum(1, keepdim=True).expand(2, block)
    assert torch.allclose(sums.view(2, block).double(), expected, rtol=1e-5)
    assert torch.equal(largest.view(2, block), rows.amax(1, keepdim=True).expand(2, block))


@pytest.mark.parametrize("block", [32, 256])
def test_block_reductions_of_infinities(block):
    x = torch.zeros(2 * block, device=PLACE)
    x[3] = float("inf")
    sums, largest = torch.empty_like(x), torch.empty_like(x)
    launch(block_kernel, 2, block, x, sums, largest)
    assert sums[:block].eq(float("inf")).all() and sums[block:].eq(0).all()
    assert largest[:block].eq(float("inf")).all() and largest[block:].eq(0).all()


@pytest.mark.skipif(not SIMULATED, reason="a GPU's context does not survive a misaligned access")
def test_misaligned_vectors_are_refused():
    x = torch.randn(64)[1:]
    widths = torch.zeros(16, dtype=torch.int32)
    with pytest.raises(ValueError, match="misaligned 16-byte access: element 0 lies 4 bytes past"):
        launch(copy_vector_kernel, 1, 32, x, torch.empty(64), widths)
